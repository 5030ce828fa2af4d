"""What does a KV cache cost by the model's shape alone, and what would each lever make of it? No torch in here."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.progress import Progress, silent
from kvprobe.results.record import run_record
from kvprobe.results.result import Result
from kvprobe.shape import published
from kvprobe.shape.cache_bytes import DTYPE_BYTES, Amount, describe
from kvprobe.shape.levers import rows
from kvprobe.shape.spec import Spec, to_json

DEFAULT_CONTEXTS = (1024, 8192)


def run(
    spec: Spec,
    *,
    about: Mapping[str, Any],
    contexts: Sequence[int] = (),
    batch: int = 1,
    dtype: str = "float32",
    window: int = 1024,
    n_sink: int = 4,
    rank: int | None = None,
    weights_bytes: int | None = None,
) -> Result:
    """A row a context and lever, the model as it is first of each context (:func:`kvprobe.shape.levers.rows`).

    ``about`` is what the record says of the model, at least its name as ``model`` (see :func:`find_shape`).
    ``contexts`` default to 1,024, 8,192 and all positions of the model, ``weights_bytes`` to all parameters at
    ``dtype``. Raises ValueError for what is out of range.
    """
    started = time.perf_counter()
    source = "given"
    if weights_bytes is None and spec.n_parameters is not None:
        weights_bytes, source = spec.n_parameters * DTYPE_BYTES[dtype], "closed form of the configuration"
    elif weights_bytes is None:
        source = "not known: the family has no closed form here"
    settings: dict[str, Any] = {
        "batch": batch,
        "dtype": dtype,
        "weights_bytes": weights_bytes,
        "window": window,
        "n_sink": n_sink,
        "rank": rank,
    }
    contexts = [*contexts] or _default_contexts(spec.max_positions)
    found = rows(spec, contexts=contexts, **settings)
    record = run_record(
        about,
        settings,
        family=spec.family,
        support=spec.support,
        shape=describe(spec),
        n_parameters=spec.n_parameters,
        weights_source=source,
        max_positions=spec.max_positions,
        contexts=contexts,
        spec=to_json(spec),
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("cache", found, record)


def find_shape(model: str, *, progress: Progress = silent) -> tuple[Spec, dict[str, Any]]:
    """The model's shape, and what a run record says of it; a directory or file goes before a published name.

    Raises KvprobeError for a name that means nothing here, naming the published shapes that need no network.
    """
    item = published.look_up(model)
    if item is not None and not Path(model).is_dir():
        return item.spec, {"model": item.name, "revision": item.source, "source": "catalogue"}
    from kvprobe.models import loading

    try:
        spec = loading.load_spec(model, progress=progress)
        found = loading.find(model, only_config=True, progress=progress)
    except UnsupportedModelError:
        raise
    except KvprobeError as error:
        known = ", ".join(published.published())
        raise KvprobeError(f"{error}; without a network, `kvprobe cache` knows {known}") from error
    return spec, {"model": found.name, "revision": found.revision, "source": found.source}


def sentence(result: Result) -> str:
    """What the rows support, in one plain sentence: one more token, and the longest context asked for."""
    run = result.run
    longest = max(run["contexts"])
    row = next(row for row in result.rows if row["context"] == longest)
    said = f"{run['model']}: the cache of {longest:,} tokens takes {Amount(row['bytes'])} at {run['dtype']}"
    said += f", batch {run['batch']:,}" if run["batch"] > 1 else ""
    said += f", and one more token {Amount(row['bytes_per_token'])}" if row["bytes_per_token"] else ""
    if row["outweighs_at"] is not None:
        said += f"; from {row['outweighs_at']:,} tokens on it is larger than the weights"
        limit = run["max_positions"]
        said += f" (beyond its {limit:,} positions)" if limit is not None and row["outweighs_at"] > limit else ""
    return said


def _default_contexts(max_positions: int | None) -> list[int]:
    if max_positions is None:
        return [*DEFAULT_CONTEXTS]
    return sorted({*(context for context in DEFAULT_CONTEXTS if context < max_positions), max_positions})
