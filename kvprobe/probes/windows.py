"""What does it cost to see only the last tokens and a few sinks, and which positions do the kept keys then have?

Four things are called "window" elsewhere; here every row says which it is:

- ``absolute``: a mask. Keys keep the positions they were made at, and older context still leaks through the layers.
- ``cache``: positions are slots of the cache, as in StreamingLLM (Xiao et al., 2024, section 3.2). Distances inside
  the window are unchanged, those to the sinks shrink to what the slots give.
- ``recompute``: every prediction from a fresh pass over the last tokens alone.
- a model trained with its own window: applied as it is, by absolute distance, and named in ``local_layers``.

A window counts the query itself; sinks are in addition to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvprobe.attention.call import Attend
from kvprobe.attention.language_model import LanguageModel, language_model, observe
from kvprobe.errors import KvprobeError, UnsupportedModelError, Wording
from kvprobe.probes.losses import check_finite, check_score_from, hidden_losses, loss_fields, token_losses
from kvprobe.probes.window_attention import Sinks, check_window, windowed
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Row

Positions = Literal["absolute", "cache", "recompute"]
SinkChoice = Literal["first", "bos", "random", "heaviest"]

# tokens of one batch of fresh passes: enough to fill the machine, few enough to stay in its caches
BATCH_TOKENS = 4096


def recompute_losses(
    model: Any,
    input_ids: Tensor,
    *,
    window: int,
    score_from: int,
    n_front: int = 0,
    attend: Attend | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> Tensor:
    """Loss of every target after ``score_from``, each from a fresh pass over the last ``window`` tokens before it.

    ``input_ids`` ``[length]``. The first ``n_front`` of them (the BOS) stand before every window; positions begin at 0
    in every pass. Returns float64 ``[n_targets]`` in nat, as :func:`kvprobe.probes.losses.token_losses`, and raises as
    it does. Passes are batched, about ``batch_tokens`` tokens at once.
    """
    check_window(window)
    length = len(input_ids)
    check_score_from(length, score_from)
    parts = []
    first = score_from + 1
    # up to here nothing has left the window: all these fresh passes are prefixes of one
    whole = min(length - 1, n_front + window)
    if whole > first:
        parts.append(token_losses(model, input_ids[: whole + 1], score_from=score_from, attend=attend))
        first = whole + 1
    if first == length:
        return parts[0]
    subject = language_model(model)
    # [targets, n_front + window]
    contexts = input_ids[first - window : length - 1].unfold(0, window, 1)
    contexts = torch.cat([input_ids[:n_front].expand(len(contexts), -1), contexts], dim=1)
    rows = max(1, batch_tokens // contexts.shape[1])
    for done in range(0, len(contexts), rows):
        progress("recompute", done, len(contexts), "predictions")
        some = contexts[done : done + rows]
        targets = input_ids[first + done : first + done + len(some), None]
        run = partial(_last_losses, subject, some, targets, attend)
        losses = run()
        check_finite(losses, subject.module, run)
        parts.append(losses)
    progress("recompute", len(contexts), len(contexts), "predictions")
    return torch.cat(parts)


def _last_losses(model: LanguageModel, ids: Tensor, targets: Tensor, attend: Attend | None) -> Tensor:
    """Losses ``[rows]`` of ``targets`` ``[rows, 1]``, each after the last of its row of ``ids`` ``[rows, length]``."""
    return hidden_losses(model.logits, model.body(ids, attend=attend)[:, -1:], targets)[:, 0]


def choose_sinks(
    model: Any,
    input_ids: Tensor,
    n_sink: int,
    *,
    choice: SinkChoice = "first",
    score_from: int,
    n_front: int = 0,
    seed: int = 0,
) -> Sinks:
    """Which ``n_sink`` tokens are kept as sinks; what is scored, after ``score_from``, is never looked at.

    ``first``: positions 0 to n_sink − 1. ``bos``: the ``n_front`` tokens before the text and nothing else.
    ``random``: drawn with ``seed`` from positions 1 to score_from − 1, one draw for all layers, and a smaller
    ``n_sink`` takes a part of a larger one's; position 0 is what it is compared with. ``heaviest``: by layer, the
    keys with the greatest sum of attention over heads and over the queries before ``score_from`` of an untouched
    pass. Raises ValueError where there are fewer tokens to choose from than ``n_sink``.
    """
    available = {"first": len(input_ids), "bos": n_front, "random": max(0, score_from - 1), "heaviest": score_from}
    if choice not in available:
        raise ValueError(Wording("{sink_choice} must be one of {0}, got {1!r}", ", ".join(available), choice))
    if choice == "bos" and n_front == 0:
        raise KvprobeError(
            Wording("{sink_choice} bos: the passage has no BOS; use {bos} add, or another {sink_choice}")
        )
    if not 0 <= n_sink <= available[choice]:
        raise ValueError(
            Wording(
                "{sinks} must be between 0 and {0} for {sink_choice} {1}, got {2}", available[choice], choice, n_sink
            )
        )
    if n_sink == 0 or choice in ("first", "bos"):
        return tuple(range(n_sink))
    if choice == "random":
        drawn = torch.randperm(score_from - 1, generator=torch.Generator().manual_seed(seed))[:n_sink] + 1
        return tuple(sorted(drawn.tolist()))
    from kvprobe.probes.mass import measure

    mass = measure(model, input_ids[None, :score_from], queries_from=0, positions=True)
    assert mass.share is not None
    heaviest = mass.share.topk(n_sink, dim=-1).indices.tolist()
    return {layer: tuple(sorted(keys)) for layer, keys in zip(mass.layers, heaviest, strict=True)}


def grid(
    model: Any,
    input_ids: Tensor,
    *,
    windows: Sequence[int],
    sinks: Sequence[int] = (0,),
    positions: Positions = "absolute",
    score_from: int,
    sink_choice: SinkChoice = "first",
    drop_sink_logits: bool = False,
    n_front: int = 0,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Row]:
    """The window × sinks grid on one passage ``input_ids`` ``[length]``: the full pass, then a row each.

    Losses in nat per target after ``score_from``; ``delta`` is the difference to the full pass with its 95 %
    interval. ``cache_tokens`` are the tokens held per full layer at the end (the most of any layer). ``bos_kept``:
    the BOS stays visible whatever the window. ``drop_sink_logits`` takes the learned sink logits (gpt-oss) out of
    every row but the first, and adds the full pass without them. Refused before any work: what cannot be run, with
    the value and the allowed range (ValueError), ``cache`` without RoPE (UnsupportedModelError), and a passage of
    more tokens than the model has positions, unless positions are ``cache`` (KvprobeError).
    """
    length = len(input_ids)
    check(model, length, windows=windows, sinks=sinks, positions=positions, score_from=score_from)
    choices: dict[int, Sinks] = {
        n: choose_sinks(model, input_ids, n, choice=sink_choice, score_from=score_from, n_front=n_front, seed=seed)
        for n in dict.fromkeys(sinks)
    }
    has_sink_logits = _has_sink_logits(model, input_ids)
    if drop_sink_logits and not has_sink_logits:
        raise KvprobeError(
            Wording("this model has no learned sink logits to drop (gpt-oss has); leave out {drop_sink_logits}")
        )
    local_layers = describe_local_layers(language_model(model).windows)
    cells = [(window, n) for window in dict.fromkeys(windows) for n in choices]
    n_passes = 1 + drop_sink_logits + len(cells)
    reference = token_losses(model, input_ids, score_from=score_from)

    def row(losses: Tensor, window: int | None, n_sink: int, cache_tokens: int, dropped: bool) -> Row:
        chosen = choices.get(n_sink, ()) if window else ()
        fresh = window is not None and positions == "recompute"
        keeps_front = window is None or fresh or _everywhere(0, chosen)
        return {
            "window": window,
            "n_sink": n_sink,
            "positions": "absolute" if window is None else positions,
            **loss_fields(losses, reference, seed=seed),
            "cache_tokens": cache_tokens,
            "sink_choice": sink_choice if n_sink else None,
            "sink_positions": describe_sinks(chosen) if n_sink else None,
            "bos_kept": n_front > 0 and keeps_front,
            "local_layers": local_layers,
            "has_sink_logits": has_sink_logits,
            "sink_logits_dropped": dropped,
        }

    rows = [row(reference, None, 0, length, False)]
    progress("windows", 1, n_passes, "passes")
    dropping: Attend | None = None
    if drop_sink_logits:
        dropping = _without_sink_logits(lambda call: call.attend())
        losses = token_losses(model, input_ids, score_from=score_from, attend=dropping)
        rows.append(row(losses, None, 0, length, True))
    for window, n_sink in cells:
        if positions == "recompute":
            losses = recompute_losses(
                model,
                input_ids,
                window=window,
                score_from=score_from,
                n_front=n_front,
                attend=dropping,
                progress=progress,
            )
            held = min(length, n_front + window)
        else:
            attend = windowed(window=window, sinks=choices[n_sink], by_slot=positions == "cache")
            attend = _without_sink_logits(attend) if drop_sink_logits else attend
            losses = token_losses(model, input_ids, score_from=score_from, attend=attend)
            held = _held(length, window, choices[n_sink])
        rows.append(row(losses, window, n_sink, held, drop_sink_logits))
        progress("windows", len(rows), n_passes, "passes")
    return rows


def check(
    model: Any,
    n_tokens: int,
    *,
    windows: Sequence[int],
    sinks: Sequence[int],
    positions: Positions,
    score_from: int,
) -> None:
    """Refuse what :func:`grid` cannot run, before any work; see there for what is raised."""
    if positions not in get_args(Positions):
        raise ValueError(
            Wording("{positions} must be one of {0}, got {1!r}", ", ".join(get_args(Positions)), positions)
        )
    if not windows or not sinks:
        raise ValueError("a grid needs at least one window and one number of sinks")
    for window in windows:
        check_window(window)
    check_score_from(n_tokens, score_from)
    for n_sink in sinks:
        if not 0 <= n_sink <= n_tokens:
            raise ValueError(Wording("{sinks} must be between 0 and {0} for {0} tokens, got {1}", n_tokens, n_sink))
        if n_sink and positions == "recompute":
            raise ValueError(
                Wording(
                    "{sinks} do not apply to {positions} recompute, got {0}: every prediction is a fresh pass over the "
                    "last tokens, whose first becomes its own sink (a BOS is kept by itself)",
                    n_sink,
                )
            )
    subject = language_model(model)
    if positions == "cache":
        try:
            limit = subject.check_by_slot(n_tokens)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                Wording("{positions} cache: {0}; {positions} absolute and recompute work on it", error)
            ) from error
    else:
        limit = subject.max_positions
    if limit is not None and n_tokens > limit:
        hint = ", or for {positions} cache (under RoPE), which has no limit" if positions != "cache" else ""
        said = "{0} tokens are more than the {1} positions that the model has; ask for at most {tokens} {1}"
        raise KvprobeError(Wording(said + hint, n_tokens, limit))


def describe_local_layers(windows: Sequence[int | None]) -> str | None:
    """The layers that see only a window by themselves, as ``"0-4,6-10 (512)"``; None if there are none."""
    sizes = sorted({window for window in windows if window is not None})
    parts = (f"{_ranges([layer for layer, window in enumerate(windows) if window == size])} ({size})" for size in sizes)
    return " ".join(parts) or None


def describe_sinks(sinks: Sinks) -> str:
    """Positions as ``"0,1,2"``, or by layer as ``"0:0,7 1:0,9"``."""
    if isinstance(sinks, Mapping):
        return " ".join(f"{layer}:{describe_sinks(chosen)}" for layer, chosen in sorted(sinks.items()))
    return ",".join(map(str, sinks))


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _everywhere(position: int, sinks: Sinks) -> bool:
    return all(position in chosen for chosen in (sinks.values() if isinstance(sinks, Mapping) else (sinks,)))


def _held(length: int, window: int, sinks: Sinks) -> int:
    recent = min(length, window)
    layers = sinks.values() if isinstance(sinks, Mapping) else (sinks,)
    return recent + max(sum(position < length - recent for position in chosen) for chosen in layers)


def _without_sink_logits(attend: Attend) -> Attend:
    return lambda call: attend(replace(call, sink_logits=None))


def _has_sink_logits(model: Any, input_ids: Tensor) -> bool:
    return any(observe(model, input_ids[None, :2], lambda call: call.sink_logits is not None).values())
