"""How long does a token take, at which context and batch, and how near is that to what the machine could do?

Four phases, timed separately: ``prefill`` reads a prompt into a cache; ``cached`` is one decode step on a full
cache; ``naive`` is a token without a cache, the whole context read again; ``end_to_end_*`` is a prompt and then many
tokens, as a user waits for them. Only the last includes drawing the token from the logits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprobe.bench.busy import Watch
from kvprobe.bench.roofline import Ceilings, Shape, Work, total
from kvprobe.bench.timing import Timing, timed
from kvprobe.caches.layer import KVCache
from kvprobe.caches.registry import build
from kvprobe.decoder.model import Decoder
from kvprobe.decoder.torch_engine import Clock, Engine, device_clock, reread
from kvprobe.errors import Wording
from kvprobe.generation.choose_engine import EngineChoice, choose_engine
from kvprobe.memory import check_memory
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Row

PHASES = ("naive", "cached", "prefill")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One phase at one context and batch: what was timed, how many tokens a run gave, and the work they needed.

    ``context`` counts the tokens attended to, the newest included; for ``end_to_end_*`` it is the prompt. ``step`` is
    "numba" or "torch": what decoded, or in a prefill what read the prompt.
    """

    phase: str
    context: int
    batch: int
    step: str
    n_tokens: int
    timing: Timing
    works: tuple[Work, ...]

    def row(self, ceilings: Ceilings, dtype: str) -> Row:
        """As the command prints it: ``ms_*`` of one run, tokens/s of all rows of the batch, and its ceiling."""
        work, least = total(self.works), sum(map(ceilings.seconds, self.works))
        rate, ceiling = self.n_tokens / self.timing.median, self.n_tokens / least
        return {
            "context": self.context,
            "batch": self.batch,
            "dtype": dtype,
            "phase": self.phase,
            "step": self.step,
            "ms_median": 1e3 * self.timing.median,
            "ms_low": 1e3 * self.timing.low,
            "ms_high": 1e3 * self.timing.high,
            "n_runs": len(self.timing.seconds),
            "tokens_per_s": rate,
            "bytes_moved": work.bytes_moved,
            "bytes_per_s": work.bytes_moved / self.timing.median,
            "flops": work.flops,
            "weight_flops": work.weight_flops,
            "attention_flops": work.attention_flops,
            "intensity": work.intensity,
            "attention_intensity": work.attention_intensity,
            "bound": ceilings.bound(work),
            "ceiling_tokens_per_s": ceiling,
            "fraction_of_ceiling": rate / ceiling,
        }


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How to time a decoder.

    At most ``repeats`` runs a row, fewer once ``seconds`` are spent on it but at least three. ``engine`` chooses what
    reads prompts and decodes (:mod:`kvprobe.generation.choose_engine`), ``cache_kind`` is the kind of cache
    (:mod:`kvprobe.caches.registry`). ``start_ups`` has the seconds that the first engine of each name took to get
    ready, ``notes`` why it is not the compiled one, ``watch`` what else ran: all fill as rows are timed.
    """

    decoder: Decoder
    engine: EngineChoice = "auto"
    cache_kind: str = "full"
    repeats: int = 20
    seconds: float = 3.0
    seed: int = 0
    clock: Clock | None = None
    progress: Progress = silent
    start_ups: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def measure(
        self, contexts: Sequence[int], *, batches: Sequence[int] = (1,), phases: Sequence[str] = PHASES
    ) -> Iterator[Observation]:
        """Every phase at every context with the first batch; the other batches decode only.

        A prefill or a naive pass of 64 rows would take minutes and say nothing new: both are bound by arithmetic
        already. Raises ValueError for an unknown phase, a context beyond the model's positions or below 1; KvprobeError
        where cache and activations would not fit the free memory. Both are raised before anything is timed.
        """
        if unknown := sorted(set(phases) - set(PHASES)):
            raise ValueError(Wording("{phase} must be one of {0}, got {1!r}", ", ".join(PHASES), unknown[0]))
        shape, device = Shape.of(self.decoder), self.decoder.embedding.weight.device
        for context in contexts:
            if context > (limit := self.decoder.config.max_positions):
                raise ValueError(
                    Wording("{context} must be at most {0}, the model's positions, got {1}", limit, context)
                )
            for batch in batches:
                # refuses contexts and batches below 1
                shape.decode(context, batch=batch)
                # a row's bytes, since a batch may be longer than any list of its lengths
                need = batch * self._cache(context, device="meta").formula_bytes
                need += self._activation_bytes(context, batch if batch == batches[0] else 1)
                check_memory(f"a batch of {batch} at {context:,} tokens", need, device)
        return self._observations(contexts, batches, phases, shape)

    def end_to_end(self, n_prompt: int, n_new: int, *, naive_samples: int | None = None) -> Iterator[Observation]:
        """``n_new`` tokens after a prompt of ``n_prompt``, with a cache (prefill, then greedy decode) and without.

        If ``naive_samples`` is given, only so many tokens without a cache are timed, spread evenly, and their mean
        stands for the others. Raises ValueError as :meth:`measure` does, for numbers below 1, and for a kind of cache
        other than full, whose work at each length is not known.
        """
        if self.cache_kind != "full":
            said = "{end_to_end}, a whole answer, is timed with {cache_kind} full, not with {0}: leave out one"
            raise ValueError(Wording(said, self.cache_kind))
        samples = n_new if naive_samples is None else naive_samples
        for name, value in (("prompt_tokens", n_prompt), ("new_tokens", n_new), ("naive_samples", samples)):
            if value < 1:
                raise ValueError(Wording(f"{{{name}}} must be at least 1, got {{0}}", value))
        if n_prompt + n_new - 1 > (limit := self.decoder.config.max_positions):
            said = "{prompt_tokens} {0} and {new_tokens} {1} need more than the model's {2} positions: give fewer"
            raise ValueError(Wording(said, n_prompt, n_new, limit))
        check_memory(
            f"{n_new:,} tokens after {n_prompt:,}",
            Shape.of(self.decoder).decode(n_prompt + n_new).cache_bytes + self._activation_bytes(n_prompt + n_new, 1),
            self.decoder.embedding.weight.device,
            hint="fewer {prompt_tokens} or {new_tokens}, or {dtype} bfloat16",
        )
        return self._end_to_end(n_prompt, n_new, min(samples, n_new))

    def _observations(
        self, contexts: Sequence[int], batches: Sequence[int], phases: Sequence[str], shape: Shape
    ) -> Iterator[Observation]:
        for batch in batches:
            for context in contexts:
                ids = self._ids(batch, context)
                cache = self._cache(context, batch)
                chosen = phases if batch == batches[0] else [phase for phase in phases if phase == "cached"]
                observed = partial(
                    Observation,
                    context=context,
                    batch=batch,
                    works=(shape.prefill(context, batch=batch),),
                )
                if "naive" in chosen:
                    timing = self._time("naive", context, batch, partial(reread, self.decoder, ids))
                    yield observed(phase="naive", n_tokens=batch, timing=timing, step="torch")
                if "prefill" in chosen:
                    cache.reset()
                    engine = self._engine(cache)
                    by = engine.reads(context)
                    timing = self._time("prefill", context, batch, partial(engine.prefill, ids), prepare=cache.reset)
                    self._note(engine)
                    yield observed(phase="prefill", n_tokens=batch * context, timing=timing, step=by)
                if "cached" in chosen:
                    yield self._cached(cache, ids, shape)

    def _cached(self, cache: KVCache, ids: Tensor, shape: Shape) -> Observation:
        context, token = ids.shape[1], ids[:, -1]
        # every run is the step at exactly this context
        rewind = self._filled_but_one(cache, ids)
        work = shape.decode(context, batch=cache.batch)
        if self.cache_kind != "full":
            read = sum(layer.index(1).shape[-1] for layer in cache.layers)
            work = replace(work, cache_bytes=cache.formula_bytes, attention_flops=shape.attend(read, cache.batch))
        engine = self._engine(cache)
        self._first_step(engine, token[:, None])
        decode = partial(engine.decode, token[:, None])
        timing = self._time("cached", context, cache.batch, decode, prepare=rewind, warm_up=2)
        return Observation(
            phase="cached",
            context=context,
            batch=cache.batch,
            step=engine.name,
            n_tokens=cache.batch,
            timing=timing,
            works=(work,),
        )

    def _end_to_end(self, n_prompt: int, n_new: int, samples: int) -> Iterator[Observation]:
        shape, clock = Shape.of(self.decoder), self._clock
        ids = self._ids(1, n_prompt + n_new)
        observed = partial(Observation, context=n_prompt, batch=1, n_tokens=n_new)
        cache = self._cache(n_prompt + n_new - 1)
        engine = self._engine(cache)
        self._first_step(engine, ids[:, :1])
        cache.reset()
        engine.ready(n_prompt)
        self._note(engine)
        with self.watch.span():
            started = clock()
            token = engine.prefill(ids[:, :n_prompt]).argmax(-1, keepdim=True)
            for done in range(1, n_new):
                self.progress("end to end, cached", done, n_new, "tokens")
                token = engine.decode(token)[:, 0].argmax(-1, keepdim=True)
            taken = clock() - started
        self.progress("end to end, cached", n_new, n_new, "tokens")
        works = (shape.prefill(n_prompt), *(shape.decode(n_prompt + i) for i in range(1, n_new)))
        timing = Timing((taken,))
        yield observed(phase="end_to_end_cached", step=engine.name, timing=timing, works=works)
        taken = 0.0
        for done in range(samples):
            self.progress("end to end, naive", done, samples, "tokens")
            # which tokens are read again changes no time
            length = n_prompt + (done * n_new) // samples
            with self.watch.span():
                started = clock()
                reread(self.decoder, ids[:, :length]).argmax(-1)
                taken += clock() - started
        self.progress("end to end, naive", samples, samples, "tokens")
        works = tuple(shape.prefill(n_prompt + i) for i in range(n_new))
        timing = Timing((taken * n_new / samples,))
        yield observed(phase="end_to_end_naive", step="torch", timing=timing, works=works)

    def _engine(self, cache: KVCache) -> Engine:
        engine = choose_engine(self.decoder, cache, self.engine)
        if engine.note is not None and engine.note not in self.notes:
            self.notes.append(engine.note)
        return engine

    def _first_step(self, engine: Engine, token: Tensor) -> None:
        """Decode once; for the first engine of a kind, this step and getting ready count as start-up."""
        started = self._clock()
        engine.decode(token)
        self.start_ups.setdefault(f"{engine.name} step", self._clock() - started)
        self._note(engine)

    def _note(self, engine: Engine) -> None:
        for what, seconds in engine.start_up_s.items():
            self.start_ups.setdefault(what, seconds)

    def _time(self, phase: str, context: int, batch: int, run: Callable[[], object], **settings: Any) -> Timing:
        what = f"{phase}, {context:,} tokens" + (f", batch {batch:,}" if batch > 1 else "")
        ticks = settings.get("warm_up", 1) + self.repeats
        with self.watch.span():
            timing = timed(
                run,
                clock=self._clock,
                repeats=self.repeats,
                seconds=self.seconds,
                tick=lambda done: self.progress(what, done, ticks),
                **settings,
            )
        self.progress(what, ticks, ticks)
        return timing

    @property
    def _clock(self) -> Clock:
        return self.clock or device_clock(self.decoder.embedding.weight.device)

    def _ids(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(self.decoder.config.vocab, (batch, length), generator=generator)
        return ids.to(self.decoder.embedding.weight.device)

    def _cache(self, capacity: int, batch: int = 1, **where: Any) -> KVCache:
        settings = {"bound_local": True} if self.cache_kind == "full" else {}
        return build(self.cache_kind, replace(self.decoder.place(capacity, batch=batch), **where), **settings)

    def _filled_but_one(self, cache: KVCache, ids: Tensor) -> Callable[[], None]:
        """Fill the cache but for the last token; returns a function that restores this state after a step."""
        capacity, lengths = ids.shape[1], [ids.shape[1] - 1] * cache.batch
        self._fill(cache, ids, capacity)
        try:
            cache.truncate(lengths)
        except ValueError:
            # the kind has forgotten what the last token displaced
            cache.reset()
            self._fill(cache, ids[:, :-1], capacity)
            before = {name: tensor.clone() for name, tensor in cache.state().items()}
            return lambda: cache.restore(before)
        return lambda: cache.truncate(lengths)

    def _fill(self, cache: KVCache, ids: Tensor, capacity: int) -> None:
        """The cache as after a prefill. Every row is a copy of the first: as many bytes as if filled row by row."""
        if cache.length == ids.shape[1]:
            return
        filled = cache if cache.batch == 1 else self._cache(capacity)
        self._engine(filled).prefill(ids[:1])
        if filled is not cache:
            ours = cache.state()
            cache.restore({name: tensor.expand_as(ours[name]) for name, tensor in filled.state().items()})

    def _activation_bytes(self, n_tokens: int, batch: int) -> int:
        config, weight = self.decoder.config, self.decoder.embedding.weight
        # at once: the MLP's two or three inner vectors of every token, and a handful of hidden ones
        inner = batch * n_tokens * (3 * config.mlp_width + 8 * config.hidden) * weight.element_size()
        # logits of the last tokens, and what they are computed in
        return inner + 2 * batch * config.vocab * 4
