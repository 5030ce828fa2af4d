"""Does each kind of KV cache hold what its formula says?"""

import time
from collections.abc import Sequence

from kvprobe.bench.cache_memory import rows
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.results.record import run_record
from kvprobe.results.result import Result
from kvprobe.shape.cache_bytes import Amount

DEFAULT_CONTEXTS = (128, 512, 1024)


def run(
    loaded: Loaded,
    *,
    contexts: Sequence[int] = (),
    batch: int = 1,
    window: int = 256,
    n_sink: int = 4,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """A row a context and kind of cache: bytes by formula beside bytes held (:func:`kvprobe.bench.cache_memory.rows`).

    ``contexts`` default to those of 128, 512 and 1,024 that the model has positions for. Raises as ``rows`` does.
    """
    started = time.perf_counter()
    limit = loaded.spec.max_positions
    contexts = [*contexts] or [n for n in DEFAULT_CONTEXTS if limit is None or n <= limit] or [limit or 1]
    found = rows(loaded, contexts, batch=batch, window=window, n_sink=n_sink, seed=seed, progress=progress)
    record = run_record(
        loaded.record(),
        contexts=contexts,
        batch=batch,
        window=window,
        n_sink=n_sink,
        counted_by="allocator" if loaded.device.startswith("cuda") else "unique storages",
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("memory", found, record)


def exact_caches(result: Result) -> list[str]:
    """The kinds that hold, at every context, to the byte what their formula says."""
    kinds = dict.fromkeys(row["cache"] for row in result.rows)
    return [kind for kind in kinds if all(row["excess_bytes"] == 0 for row in result.rows if row["cache"] == kind)]


def sentence(result: Result) -> str:
    """What the rows support, in one plain sentence."""
    exact, longest = exact_caches(result), max(row["context"] for row in result.rows)
    said = f"{result.run['model']}: " + (
        f"to the byte what the formula says hold {', '.join(exact)}" if exact else "no cache holds its formula's bytes"
    )
    worst = max((row for row in result.rows if row["context"] == longest), key=lambda row: row["pinned_bytes"])
    if worst["pinned_bytes"]:
        said += (
            f"; {worst['cache']} keep {Amount(worst['pinned_bytes'])} alive at {longest:,} tokens that nothing reads, "
            f"{worst['ratio']:.2f} times the formula in all"
        )
    return said
