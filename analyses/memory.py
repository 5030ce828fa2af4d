"""Does a KV cache hold what its formula says, and what do views of a fused projection hold?

\b
    python -m analyses.memory
    python -m analyses.memory smollm2-135m --context 512 --context 2048

Protocol of Dive into Deep Learning, "Generation and the KV cache": 2 · layers · n_kv_heads · head_dim · tokens ·
batch · bytes, for the GPT of `analyses.latency` at float32 72 KiB a token. Published: 72.0, 144.0 and 288.0 MiB at
1,024, 2,048 and 4,096 tokens, by allocator and formula alike; caching *views* of the fused QKV projection held twice
that. Keys and values that are both views hold 1.5 times (multi-head attention: q, k and v for k and v). Under RoPE a
turned key is new memory and the value's view keeps all three alive beside it: that is twice, the row ``fused views,
K turned``.
"""

from collections.abc import Sequence
from typing import Any

import click
import torch
from torch import Tensor

from analyses.common import PUBLISHED_GPT, load, script, show
from kvprobe.bench.cache_memory import fused_views
from kvprobe.bench.storages import measure
from kvprobe.cli.console import progress_bar
from kvprobe.experiments.memory import Memory
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result, Row

CONTEXTS = (1024, 2048, 4096)
VIEWS = "fused views"


def run(
    model: str = PUBLISHED_GPT,
    *,
    contexts: Sequence[int] = CONTEXTS,
    random_weights: bool = False,
    dtype: str = "float32",
    progress: Progress = silent,
) -> Result:
    """The rows of ``kvprobe memory`` and, after each ``fused views``, those views with the keys turned."""
    loaded = load(model, random_weights=random_weights, dtype=dtype, progress=progress)
    return measured(loaded, contexts, progress=progress)


def measured(loaded: Loaded, contexts: Sequence[int], *, progress: Progress = silent) -> Result:
    """As :func:`run`, of a model that is loaded already."""
    result = Memory(contexts=tuple(contexts)).run(loaded, progress=progress)
    rows = []
    for row in result.rows:
        rows.append(row)
        if row["cache"] == VIEWS:
            rows.append(_turned(loaded, row))
    return Result("memory", rows, result.run)


def _turned(loaded: Loaded, views: Row) -> Row:
    def make() -> list[tuple[Tensor, Tensor]]:
        dtype = getattr(torch, loaded.dtype)
        kept = fused_views(loaded.spec, views["context"], batch=views["batch"], dtype=dtype, device=loaded.device)
        # turning makes a new tensor of a key, whatever the angle
        return [(key.clone(), value) for key, value in kept]

    _, held = measure(make, loaded.device)
    return views | {
        "cache": f"{VIEWS}, K turned",
        "measured_bytes": held.measured_bytes,
        "pinned_bytes": held.pinned_bytes,
        "excess_bytes": held.measured_bytes - views["formula_bytes"],
        "ratio": held.measured_bytes / views["formula_bytes"],
    }


@click.command(help=__doc__)
@click.argument("model", default=PUBLISHED_GPT)
@click.option("--context", "contexts", type=int, multiple=True, default=CONTEXTS, show_default=True)
@click.option("--random-weights", is_flag=True, help="Take MODEL's shape alone.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/memory.{csv,json}.")
def main(model: str, save: bool, **options: Any) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, **options, progress=progress)
    show(result, save=save, summary=["", Memory.sentence(result)])


if __name__ == "__main__":
    script(main)
