"""How long does a whole answer take, with a KV cache and without? A long prompt, then many tokens.

\b
    python -m analyses.end_to_end
    python -m analyses.end_to_end smollm2-135m --naive-samples 8

Protocol of Dive into Deep Learning, "Generation and the KV cache": the GPT of 123.6 million random weights of
`analyses.latency`, 256 tokens after a prompt of 3,584, on one GPU. Published: without a cache 13.4 tokens/s, with one
59.5 (JAX 10.5 and 29.2). On a CPU decoding without a cache takes many minutes: ``--naive-samples`` times some of
its tokens, spread evenly, and takes their mean for the others.
"""

from typing import Any

import click

from analyses.common import PUBLISHED_GPT, load, script, show
from kvprobe.cli.console import progress_bar
from kvprobe.experiments.latency import Latency
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result


def run(
    model: str = PUBLISHED_GPT,
    *,
    prompt_tokens: int = 3584,
    new_tokens: int = 256,
    naive_samples: int | None = None,
    random_weights: bool = False,
    dtype: str = "float32",
    progress: Progress = silent,
) -> Result:
    """Two rows of ``kvprobe latency --end-to-end``: phase ``end_to_end_cached`` and ``end_to_end_naive``."""
    loaded = load(model, random_weights=random_weights, dtype=dtype, progress=progress)
    sizes: dict[str, Any] = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "naive_samples": naive_samples}
    result = Latency(contexts=(prompt_tokens,), phases=(), end_to_end=True, **sizes).run(loaded, progress=progress)
    return Result("end_to_end", result.rows, result.run)


@click.command(help=__doc__)
@click.argument("model", default=PUBLISHED_GPT)
@click.option("--prompt-tokens", type=int, default=3584, show_default=True)
@click.option("--new-tokens", type=int, default=256, show_default=True)
@click.option("--naive-samples", type=int, help="Time only this many tokens without a cache.  [default: all]")
@click.option("--random-weights", is_flag=True, help="Take MODEL's shape alone.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/end_to_end.{csv,json}.")
def main(model: str, save: bool, **options: Any) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, **options, progress=progress)
    show(result, save=save, columns=["phase", "context", "step", "ms_median", "tokens_per_s", "fraction_of_ceiling"])


if __name__ == "__main__":
    script(main)
