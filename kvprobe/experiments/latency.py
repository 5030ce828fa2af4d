"""How long does a token take, with a KV cache and without, beside what this machine allows?"""

import time
from collections.abc import Sequence

import torch

from kvprobe.bench import machine
from kvprobe.bench.latency import PHASES, Bench
from kvprobe.bench.roofline import Shape
from kvprobe.decoder.model import from_hf
from kvprobe.generation.engines import Kind
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.results import phrases
from kvprobe.results.record import run_record
from kvprobe.results.result import Result

DEFAULT_CONTEXTS = (128, 512, 1024)
ABOVE = "what it reads stays in the processor's caches, or the machine was busy while its ceilings were measured"
"""Why a row may be above its ceiling."""


def run(
    loaded: Loaded,
    *,
    contexts: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    phases: Sequence[str] = PHASES,
    engine: Kind = "auto",
    repeats: int = 20,
    seconds: float = 3.0,
    end_to_end: tuple[int, int] | None = None,
    naive_samples: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """A row a phase, context and batch (:meth:`kvprobe.bench.latency.Observation.row`), the machine in the record.

    ``busy`` and ``load`` there say what else ran (:meth:`kvprobe.bench.busy.Watch.record`).

    ``contexts`` default to those of 128, 512 and 1,024 that the model has positions for; without ``phases`` none is
    timed by itself. ``end_to_end`` is a prompt's length and how many tokens follow it, which adds those two rows. For
    the other settings see :class:`kvprobe.bench.latency.Bench`, whose notes are ``notes`` in the record. Raises as it
    does.
    """
    started = time.perf_counter()
    decoder = from_hf(loaded.model)
    limit = decoder.config.max_positions
    contexts = [*contexts] or [n for n in DEFAULT_CONTEXTS if n <= limit] or [limit]
    timing = Bench(decoder=decoder, engine=engine, repeats=repeats, seconds=seconds, seed=seed, progress=progress)
    # both refuse what cannot be before anything is timed
    parts = [timing.measure(contexts, batches=batches, phases=phases)] if phases else []
    if end_to_end is not None:
        parts.append(timing.end_to_end(*end_to_end, naive_samples=naive_samples))
    dtype = getattr(torch, loaded.dtype)
    # before and after: a shared machine drifts, and a ceiling is the best it does
    with timing.watch.span():
        here = machine.measure_machine(dtype, loaded.device, progress=progress)
    observations = [observation for part in parts for observation in part]
    with timing.watch.span():
        here = here.best_of(machine.measure_machine(dtype, loaded.device))
    ceilings, shape = here.ceilings, Shape.of(decoder)
    rows = [observation.row(ceilings, loaded.dtype) for observation in observations]
    n_prompt, n_new = end_to_end or (None, None)
    record = run_record(
        loaded.record(),
        here.record(),
        timing.watch.record(rows, device=loaded.device),
        contexts=contexts,
        batches=[*batches],
        compiled=engine != "torch",
        engine=engine,
        start_up_s=timing.start_ups,
        notes=timing.notes,
        repeats=repeats,
        seconds=seconds,
        prompt_tokens=n_prompt,
        new_tokens=n_new,
        naive_samples=naive_samples,
        arithmetic_binds_at_batch={str(context): ceilings.binding_batch(shape, context) for context in contexts},
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("latency", rows, record)


def sentence(result: Result) -> str:
    """What the rows support, in one plain sentence: the longest context that was decoded with a cache.

    Of a busy machine it ends in :data:`kvprobe.results.phrases.WORDS`.
    """
    return phrases.said(_sentence(result), result.run)


def _sentence(result: Result) -> str:
    run = result.run
    cached = [row for row in result.rows if row["phase"] == "cached" and row["batch"] == result.rows[0]["batch"]]
    if not cached:
        first = result.rows[0]
        return f"{run['model']}: {first['phase']} at {first['context']:,} tokens takes {first['ms_median']:,.1f} ms"
    row = max(cached, key=lambda row: row["context"])
    said = f"{run['model']} on {run['gpu'] or run['cpu']}: at {row['context']:,} tokens one more takes "
    said += f"{row['ms_median']:,.1f} ms with a cache"
    naive = [other for other in result.rows if other["phase"] == "naive" and other["context"] == row["context"]]
    if naive:
        times = naive[0]["ms_median"] / row["ms_median"]
        said += f" and {naive[0]['ms_median']:,.1f} ms without ({times:,.1f} times as long)"
    bound = "its memory" if row["bound"] == "bandwidth" else "its arithmetic"
    if row["fraction_of_ceiling"] > 1:
        return f"{said}; with it, more than was measured of {bound}: {ABOVE}"
    return f"{said}; with it, {row['fraction_of_ceiling']:.0%} of what {bound} allows is reached"
