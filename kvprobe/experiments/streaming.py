"""How well does a model read a text far longer than its window, through a rolling cache, in constant memory?

The protocol of StreamingLLM (Xiao et al., 2024, section 4.1): the text passes once through sinks and a window, a chunk
at a time, and every token is predicted from what the cache then holds. Their budget counts the sinks: their 4 + 1020 is
``window=1020, n_sink=4`` here. Losses are negative log-likelihoods in nat per predicted token.

    segments = stream(decoder, ids, StreamConfig(windows=(1020,), sinks=(4,), positions="cache", every=10_000))

With a :class:`~kvprobe.experiments.stream_checkpoint.StreamCheckpoint` a killed run continues where it was and ends
with the same loss, bit for bit.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from kvprobe.caches.rolling import Positions, RollingCache
from kvprobe.decoder.model import Decoder
from kvprobe.errors import KvprobeError, UnsupportedModelError, Wording
from kvprobe.experiments.stream_checkpoint import Segment, StreamCheckpoint, StreamProgress
from kvprobe.memory import check_memory
from kvprobe.probes.losses import check_finite, check_score_from, hidden_losses
from kvprobe.probes.window_attention import check_window
from kvprobe.probes.windows import describe_sinks
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Row

# positions whose logits are held at once
LOGITS = 256
SECONDS_BETWEEN_SAVES = 30.0


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """What is streamed: every window with every number of sinks, one after the other, and when a result is due.

    A window counts the query; sinks are in addition. ``score_from = s`` makes s + 1 the first target. A result is due
    every ``every`` tokens and at the end (None: only at the end). ``chunk`` tokens pass through the model at once
    (None: as many as the window), which changes results by rounding alone.
    """

    windows: tuple[int, ...]
    sinks: tuple[int, ...] = (0,)
    positions: Positions = "absolute"
    score_from: int = 0
    every: int | None = None
    chunk: int | None = None

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(window, n_sink), in the order in which they are streamed."""
        return [(window, n_sink) for window in dict.fromkeys(self.windows) for n_sink in dict.fromkeys(self.sinks)]


def check(decoder: Decoder, n_tokens: int, config: StreamConfig) -> None:
    """Refuse, before any work, what :func:`stream` cannot do; see there."""
    if config.positions not in get_args(Positions):
        raise ValueError(
            Wording("{positions} of a stream must be {0}, got {1}", " or ".join(get_args(Positions)), config.positions)
        )
    if not config.cells:
        raise ValueError("a stream needs at least one window and one number of sinks")
    for window, n_sink in config.cells:
        check_window(window)
        if n_sink < 0:
            raise ValueError(Wording("{sinks} must be at least 0, got {0}", n_sink))
    for name, value in (("every", config.every), ("chunk", config.chunk)):
        if value is not None and value < 1:
            raise ValueError(Wording(f"{{{name}}} must be at least 1 token, got {{0}}", value))
    check_score_from(n_tokens, config.score_from)
    limit, learned = decoder.config.max_positions, decoder.config.rotary is None
    if config.positions == "cache" and learned:
        raise UnsupportedModelError(
            Wording(
                "{positions} cache: this model's positions are learned, added to the hidden state, and cannot be moved "
                "by slot afterwards; use {positions} absolute, for at most {tokens} {0}",
                limit,
            )
        )
    if config.positions == "absolute" and n_tokens > limit:
        why = (
            "learned positions have no entry beyond them, so use fewer {tokens}"
            if learned
            else "use {positions} cache, which has no last position, or fewer {tokens}"
        )
        raise KvprobeError(Wording("{0} tokens are more than the model's {1} positions: " + why, n_tokens, limit))


@torch.no_grad()
def stream(
    decoder: Decoder,
    input_ids: Tensor,
    config: StreamConfig,
    *,
    state: StreamCheckpoint | None = None,
    progress: Progress = silent,
) -> list[tuple[Segment, ...]]:
    """The segments of every cell of ``config`` on ``input_ids`` ``[length]``, in the order of ``config.cells``.

    The result at N tokens is the one of a text of N tokens. Beyond the ids, memory does not depend on the length: a
    chunk, the logits of 256 positions, the cache. ``progress`` is told the running loss. With a ``state`` it continues
    from what is saved there, and saves at every result and every 30 s unless saving takes a tenth of the time.

    Raises ValueError for what is out of range, KvprobeError for ``absolute`` beyond the model's positions and for a
    loss that is not finite, UnsupportedModelError for ``cache`` under learned positions.
    """
    n_tokens = len(input_ids)
    check(decoder, n_tokens, config)
    # before a state is written, which would stand in the way of the next run
    shape, weight, slots = decoder.config, decoder.embedding.weight, max(map(sum, config.cells))
    need = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * slots * weight.element_size()
    check_memory(
        f"a rolling cache of {slots:,} tokens", need, weight.device, hint="a smaller {window} or fewer {sinks}"
    )
    saved_progress = state.progress() if state is not None else None
    now = StreamProgress() if saved_progress is None else replace(saved_progress, resumed=saved_progress.resumed + 1)
    if state is not None:
        state.clear_partial()
        if saved_progress is None:
            state.save(now)  # a place that cannot be written to is found before the work, not after it
    began = time.monotonic() - now.seconds
    saved, cost = time.monotonic(), 0.0
    for window, n_sink in config.cells[len(now.done) :]:
        cache = decoder.rolling_cache(window, n_sink=n_sink, positions=config.positions)
        if state is not None and now.length:
            cache.restore(state.tensors())
        chunk = config.chunk or window
        # always from a multiple of `chunk`, also after a kill: other chunks would round differently
        for first in range(now.length, n_tokens - 1, chunk):
            last = min(first + chunk, n_tokens - 1)
            skip = max(0, config.score_from - first)
            losses = _losses(decoder, input_ids[first:last], input_ids[first + 1 : last + 1], cache, skip)
            n_before = len(now.segments)
            now = now.add(first + 1 + skip, losses, every=config.every or n_tokens, n_tokens=n_tokens)
            now = replace(now, length=cache.length, seconds=time.monotonic() - began)
            mean = f", loss {now.nll / now.n_scored:.4f}" if now.n_scored else ""
            progress(f"window {window} + {n_sink} sinks", last + 1, n_tokens, f"tokens{mean}")
            waited, due = time.monotonic() - saved, len(now.segments) > n_before
            if state is not None and waited >= max(10 * cost, 0.0 if due else SECONDS_BETWEEN_SAVES):
                start = time.monotonic()
                state.save(now, cache)
                saved = time.monotonic()
                cost = saved - start
        now = StreamProgress((*now.done, now.segments), seconds=now.seconds, resumed=now.resumed)
        if state is not None:
            state.save(now)
    return [*now.done]


def rows(
    config: StreamConfig, results: Sequence[Sequence[Segment]], *, n_front: int = 0, local_layers: str | None = None
) -> list[Row]:
    """One row a result: the mean loss up to ``at_token``, and ``stretch_loss``, that since the result before.

    The fields of :func:`kvprobe.probes.windows.grid` are all there. ``delta`` and its interval are null: the full
    pass they compare with does not exist for a text longer than the model. No family that streams has sink logits.
    """
    table = []
    for (window, n_sink), segments in zip(config.cells, results, strict=True):
        before = Segment(0, 0, 0.0)
        for now in segments:
            loss = now.nll / now.n_scored
            row = {
                "window": window,
                "n_sink": n_sink,
                "positions": config.positions,
                "at_token": now.at_token,
                "tokens_scored": now.n_scored,
                "loss": loss,
                "perplexity": math.exp(loss),
                "stretch_loss": (now.nll - before.nll) / (now.n_scored - before.n_scored),
                **dict.fromkeys(("delta", "delta_low", "delta_high")),
                "cache_tokens": min(now.at_token, window + n_sink),
                "sink_choice": "first" if n_sink else None,
                "sink_positions": describe_sinks(range(n_sink)) if n_sink else None,
                "bos_kept": n_front > 0 and n_sink > 0,
                "local_layers": local_layers,
                "has_sink_logits": False,
                "sink_logits_dropped": False,
            }
            table.append(row)
            before = now
    return table


def _losses(decoder: Decoder, ids: Tensor, targets: Tensor, cache: RollingCache, skip: int) -> Tensor:
    """Float64 ``[q_len - skip]`` on the CPU: the loss of ``targets`` after ``ids``, both ``[q_len]``."""
    x = decoder.body(ids[None], cache=cache)
    losses = hidden_losses(decoder.logits, x[:, skip:], targets[None, skip:], chunk=LOGITS)[0]
    check_finite(losses, decoder, lambda: decoder(ids[None, : decoder.config.max_positions]))
    return losses
