"""Is a prefill bound by arithmetic and a decode step by memory? Both at one context, beside the machine's ceilings.

\b
    python -m analyses.roofline
    python -m analyses.roofline smollm2-135m --context 1024 --batch 1 --batch 16

Protocol of Dive into Deep Learning, "Generation and the KV cache": the GPT of `analyses.latency` at float32, a
prefill of 2,048 tokens and one decode step at 2,048. Published, on an unnamed GPU: prefill 34 to 37 ms (55
to 60 thousand tokens/s), decode 69 to 72 tokens/s; decode 247 MFLOP over 645 MB, 0.4 FLOP/B, prefill about 784, ridge
point about 80, bandwidth ceiling about 1,550 tokens/s. The text counts the products with weights alone, in prefill
with the logits of every token: ``published_flops`` and ``published_intensity``. ``flops`` and ``intensity`` are ours:
attention counts, and a prefill needs the last token's logits.
"""

from collections.abc import Sequence
from typing import Any

import click

from analyses.common import PUBLISHED_GPT, load, script, show
from kvprobe.bench.roofline import Shape
from kvprobe.cli.console import progress_bar
from kvprobe.decoder.model import Decoder, from_hf
from kvprobe.experiments.latency import Latency
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result, Row


def run(
    model: str = PUBLISHED_GPT,
    *,
    context: int = 2048,
    batches: Sequence[int] = (1,),
    random_weights: bool = False,
    dtype: str = "float32",
    repeats: int = 20,
    seconds: float = 3.0,
    progress: Progress = silent,
) -> Result:
    """The rows ``prefill`` and ``cached`` of ``kvprobe latency`` with the published way of counting; see above."""
    loaded = load(model, random_weights=random_weights, dtype=dtype, progress=progress)
    timed = Latency(
        contexts=(context,), batches=tuple(batches), phases=("prefill", "cached"), repeats=repeats, seconds=seconds
    )
    result = timed.run(loaded, progress=progress)
    decoder = from_hf(loaded.model)
    rows = [row | counted(decoder, row["phase"], context, row["batch"]) for row in result.rows]
    return Result("roofline", rows, result.run)


def counted(decoder: Decoder, phase: str, context: int, batch: int = 1) -> Row:
    """Arithmetic alone, as the text counts: ``published_flops``, ``bytes_moved``, ``published_intensity``."""
    shape = Shape.of(decoder)
    if phase == "prefill":
        work = shape.prefill(context, batch=batch, all_logits=True)
    else:
        work = shape.decode(context, batch=batch)
    return {
        "published_flops": work.weight_flops,
        "bytes_moved": work.bytes_moved,
        "published_intensity": work.weight_flops / work.bytes_moved,
    }


@click.command(help=__doc__)
@click.argument("model", default=PUBLISHED_GPT)
@click.option("--context", type=int, default=2048, show_default=True)
@click.option("--batch", "batches", type=int, multiple=True, default=(1,), show_default=True, help="Repeatable.")
@click.option("--random-weights", is_flag=True, help="Take MODEL's shape alone.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--repeats", type=int, default=20, show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/roofline.{csv,json}.")
def main(model: str, save: bool, **options: Any) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, **options, progress=progress)
    columns = ["phase", "context", "batch", "ms_median", "tokens_per_s", "flops", "bytes_moved", "intensity"]
    columns += ["published_intensity", "bound", "ceiling_tokens_per_s", "fraction_of_ceiling"]
    machine = (
        f"ridge point {result.run['ridge_point']:.1f} FLOP/B, {result.run['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s"
    )
    show(result, save=save, columns=columns, summary=["", machine])


if __name__ == "__main__":
    script(main)
