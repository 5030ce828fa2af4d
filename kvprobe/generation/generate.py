"""Which token comes next, and how long did it take? Prefill, decode and sampling, with a cache or without.

    for step in stream(decoder, [prompt_ids], max_new_tokens=64):
        print(step.tokens[0])

Prefill reads the prompt and gives the first token; decode takes one token and gives the next. An engine does both
(:mod:`kvprobe.decoder.torch_engine`); they are timed separately.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvprobe.caches.layer import KVCache
from kvprobe.decoder.model import Decoder
from kvprobe.decoder.torch_engine import Engine, device_clock, one_thread, reread
from kvprobe.errors import KvprobeError
from kvprobe.generation.choose_engine import EngineChoice, choose_engine


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: at ``temperature`` from the ``top_k`` likeliest, of these from the nucleus ``top_p``.

    In this order, as Hugging Face applies them. Temperature 0 takes the likeliest token and draws nothing. The
    nucleus (Holtzman et al., 2020) is the smallest set of likeliest tokens with a probability of at least ``top_p``.
    Raises ValueError for a temperature below 0, ``top_k < 1`` or ``top_p`` outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        # with a smaller temperature the scaled logits overflow float32
        if not (self.temperature == 0 or 1e-4 <= self.temperature < float("inf")):
            raise ValueError(f"temperature must be 0 (greedy) or at least 0.0001 and finite, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of ``logits`` ``[batch, vocab]`` that may be drawn: probabilities and ids ``[batch, n]``.

        Tokens outside the nucleus have probability 0. The whole vocabulary is sorted only for a nucleus
        without ``top_k``.
        """
        if self.temperature == 0:
            best = logits.argmax(-1, keepdim=True)
            return torch.ones_like(best, dtype=torch.float32), best
        scaled = logits.float() / self.temperature
        if self.top_k is not None:
            scaled, ids = scaled.topk(min(self.top_k, scaled.shape[-1]), dim=-1)
        elif self.top_p is not None:
            scaled, ids = scaled.sort(dim=-1, descending=True)
        else:
            ids = torch.arange(scaled.shape[-1], device=scaled.device).expand_as(scaled)
        probabilities = scaled.softmax(-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            # the likeliest token, with nothing before it, stays even if top_p is lost in float32
            probabilities = probabilities.masked_fill((before >= self.top_p) & (before > 0), 0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities, ids

    def pick(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token id a row, ``[batch]``, from ``logits`` ``[batch, vocab]``."""
        probabilities, ids = self.candidates(logits)
        if self.temperature == 0:
            return ids[:, 0]
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        return ids.gather(1, drawn)[:, 0]


@dataclass(frozen=True)
class Step:
    """One new token a row, None where the row had ended, and the milliseconds it took. The first step is prefill."""

    tokens: tuple[int | None, ...]
    ms: float
    ended: tuple[bool, ...]


@dataclass(frozen=True)
class Generation:
    """What was generated and what it took. One entry a row in ``token_ids`` (new tokens alone) and ``stopped_by``.

    ``stopped_by`` is "eos", whose token is then the row's last, or "length". ``prefill_ms`` is the time to the first
    token, ``decode_ms`` the time of each later step. ``cache_bytes`` are those of the cache's buffers, or 0.
    """

    token_ids: tuple[tuple[int, ...], ...]
    stopped_by: tuple[str, ...]
    prefill_ms: float
    decode_ms: tuple[float, ...]
    cache_bytes: int

    @property
    def decode_ms_median(self) -> float | None:
        """Median milliseconds of a decode step; None if there was none."""
        return median(self.decode_ms) if self.decode_ms else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens decoded in all rows over the seconds it took; None if there were none."""
        decoded = sum(len(row) - 1 for row in self.token_ids)
        return 1000 * decoded / sum(self.decode_ms) if decoded else None

    @classmethod
    def of(cls, steps: Iterable[Step], cache: KVCache | None = None) -> "Generation":
        """All the steps that :func:`stream` gave, as one."""
        steps = list(steps)
        if not steps:
            raise ValueError("nothing was generated")
        rows = zip(*(step.tokens for step in steps), strict=True)
        return cls(
            token_ids=tuple(tuple(token for token in row if token is not None) for row in rows),
            stopped_by=tuple("eos" if ended else "length" for ended in steps[-1].ended),
            prefill_ms=steps[0].ms,
            decode_ms=tuple(step.ms for step in steps[1:]),
            cache_bytes=0 if cache is None else cache.nbytes,
        )


def stream(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    cache: KVCache | None = None,
    naive: bool = False,
    sampling: Sampling | None = None,
    seed: int = 0,
    eos: Sequence[int] = (),
    chunk: int | None = None,
    engine: Engine | EngineChoice = "auto",
) -> Iterator[Step]:
    """Continue each of ``prompts`` (token ids, of any lengths), one :class:`Step` at a time.

    ``cache`` is emptied first; by default it is a full one of the size needed. ``naive`` uses no cache and reads the
    whole sequence again for every token: the baseline. Default sampling is greedy. A row ends with a token of ``eos``.
    The same ``seed`` draws the same tokens. ``engine`` is a choice
    (:func:`kvprobe.generation.choose_engine.choose_engine`), or one that was made for this decoder and ``cache``.
    Raises ValueError at once for an empty prompt and if the model's positions or the cache will not suffice;
    KvprobeError for logits that are not finite.
    """
    sampling = sampling or Sampling()
    needed = tokens_fed(prompts, max_new_tokens)
    ids, left_pad = left_padded(prompts, device=decoder.embedding.weight.device)
    decoder.check_length(needed, cache)
    if not isinstance(engine, str) and cache is not None and engine.cache is not cache:
        raise ValueError("the engine was made for another cache")
    if naive:
        cache = None
    elif cache is None and not isinstance(engine, str):
        cache = engine.cache
    elif cache is None:
        cache = decoder.full_cache(needed, batch=len(prompts))
    if cache is not None:
        cache.reset()
        cache.left_pad = left_pad
        try:
            cache.check(len(prompts), needed)
            if isinstance(engine, str):
                engine = choose_engine(decoder, cache, engine)
            # a single token is prefill's: nothing is decoded
            if max_new_tokens > 1:
                engine.ready(ids.shape[1])
        except ValueError:
            # the padding belongs to these prompts, which were refused
            cache.reset()
            raise
    ours = None if cache is None or isinstance(engine, str) else engine
    return _steps(decoder, ids, left_pad, max_new_tokens, sampling, seed, frozenset(eos), chunk, ours)


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    cache: KVCache | None = None,
    naive: bool = False,
    **settings: Any,
) -> Generation:
    """As :func:`stream`, with the same other ``settings``, all at once."""
    if cache is None and not naive:
        needed = tokens_fed(prompts, max_new_tokens)
        decoder.check_length(needed)
        cache = decoder.full_cache(needed, batch=len(prompts))
    steps = stream(decoder, prompts, max_new_tokens=max_new_tokens, cache=cache, naive=naive, **settings)
    return Generation.of(steps, cache)


def tokens_fed(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Tokens that each row's cache sees at most: the longest prompt and all new tokens but the last.

    Raises ValueError for an empty prompt and for ``max_new_tokens < 1``.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("the prompt has no tokens: there is nothing to continue")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    return max(map(len, prompts)) + max_new_tokens - 1


def left_padded(
    prompts: Sequence[Sequence[int]], *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor | None]:
    """Token ids ``[batch, length]`` with short rows padded on the left by id 0, and that padding, int ``[batch]``.

    The padding is None if all are of one length. Which id pads a row does not matter: nothing ever sees it.
    """
    length = tokens_fed(prompts, 1)
    left_pad = [length - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(left_pad, prompts, strict=True)], device=device)
    return ids, torch.tensor(left_pad, device=device) if any(left_pad) else None


def _steps(
    decoder: Decoder,
    ids: Tensor,
    left_pad: Tensor | None,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    eos: frozenset[int],
    chunk: int | None,
    engine: Engine | None,
) -> Iterator[Step]:
    generator, clock = torch.Generator(ids.device).manual_seed(seed), device_clock(ids.device)
    ended = [False] * ids.shape[0]
    token: Tensor | None = None
    for _ in range(max_new_tokens):
        started = clock()
        if engine is None:
            ids = ids if token is None else torch.cat([ids, token[:, None]], dim=1)
            logits = reread(decoder, ids, left_pad)
        elif token is None:
            logits = engine.prefill(ids, chunk=chunk)
        else:
            logits = engine.decode(token[:, None])[:, 0]
        with one_thread(engine is not None and engine.name == "numba"):
            if not bool(logits.isfinite().all()):
                raise KvprobeError(
                    f"the logits are not finite at dtype {logits.dtype}: try float32, or check the weights"
                )
            token = sampling.pick(logits, generator)
        # a row that has ended is still fed, since the others need the step, but gives nothing more
        tokens = tuple(None if done else drawn for done, drawn in zip(ended, token.tolist(), strict=True))
        ended = [done or drawn in eos for done, drawn in zip(ended, tokens, strict=True)]
        yield Step(tokens, 1000 * (clock() - started), tuple(ended))
        if all(ended):
            return
