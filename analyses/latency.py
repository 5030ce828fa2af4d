"""How long does a token take with a KV cache and without, as the context grows? The published curve, on this machine.

\b
    python -m analyses.latency
    python -m analyses.latency smollm2-135m --context 128 --context 512 --context 1024

Protocol of Dive into Deep Learning, "Generation and the KV cache": a GPT of 123.6 million random weights (12 blocks,
768 wide, 12 heads, a vocabulary of 50,257, RoPE, SwiGLU of 2,048) at float32 on one GPU, contexts 512, 1024, 2048 and
4096. Published, in ms a token: without a cache 10.12, 15.22, 33.74, 77.45; with one 9.77, 9.83, 9.79, 11.91 (JAX
31.27, 14.83, 42.23, 76.04 and 11.53, 11.30, 12.44, 12.12). Which GPU it was is not said, so times are compared within
a machine only.
"""

from collections.abc import Sequence
from typing import Any

import click

from analyses.common import PUBLISHED_GPT, load, script, show
from kvprobe.cli.console import progress_bar
from kvprobe.experiments.latency import Latency
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result

CONTEXTS = (512, 1024, 2048, 4096)


def run(
    model: str = PUBLISHED_GPT,
    *,
    contexts: Sequence[int] = CONTEXTS,
    random_weights: bool = False,
    dtype: str = "float32",
    repeats: int = 20,
    seconds: float = 3.0,
    progress: Progress = silent,
) -> Result:
    """The rows of ``kvprobe latency``, all three phases at every context."""
    loaded = load(model, random_weights=random_weights, dtype=dtype, progress=progress)
    return Latency(contexts=tuple(contexts), repeats=repeats, seconds=seconds).run(loaded, progress=progress)


@click.command(help=__doc__)
@click.argument("model", default=PUBLISHED_GPT)
@click.option("--context", "contexts", type=int, multiple=True, default=CONTEXTS, show_default=True)
@click.option("--random-weights", is_flag=True, help="Take MODEL's shape alone.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--repeats", type=int, default=20, show_default=True)
@click.option("--seconds", type=float, default=3.0, show_default=True, help="A row stops repeating after so long.")
@click.option("--save/--no-save", default=True, help="Keep results/latency.{csv,json}.")
def main(model: str, save: bool, **options: Any) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, **options, progress=progress)
    columns = ["phase", "context", "step", "ms_median", "ms_low", "ms_high", "tokens_per_s", "fraction_of_ceiling"]
    show(result, save=save, columns=columns, summary=["", Latency.sentence(result)])


if __name__ == "__main__":
    script(main)
