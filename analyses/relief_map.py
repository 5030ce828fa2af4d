"""Which lever on the KV cache costs how much loss for how many bytes? The relief map, measured on one model.

\b
    python -m analyses.relief_map smollm2-135m

Dive into Deep Learning, "Generation and the KV cache", names the levers by the factor of the formula that they attack
and measures two of them on GPT-2: a window with sinks, and a low rank of joint keys and values. Here every lever that
a trained model takes without training becomes a point, loss against bytes a token, by the text's protocol: 1,024
tokens without BOS, the 511 targets 513 to 1023, float32. Fewer key/value heads, a latent and linear attention need
training.
"""

from collections.abc import Sequence
from typing import Any

import click

from analyses.common import script, show
from kvprobe.cli.console import progress_bar
from kvprobe.experiments.relief import BASES, Relief
from kvprobe.models.subject import prepare
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result


def run(
    model: str = "gpt2",
    *,
    text: str = "time-machine",
    tokens: int = 1024,
    score_from: int = 512,
    windows: Sequence[int] = (),
    n_sink: int = 4,
    ranks: Sequence[int] = (),
    bases: Sequence[str] = BASES,
    bits: Sequence[int] = (8, 4),
    progress: Progress = silent,
) -> Result:
    """The rows of ``kvprobe relief``: the model as it is, then a row a lever."""
    subject = prepare(model, text=text, tokens=tokens, progress=progress)
    levers = Relief(
        windows=tuple(windows),
        n_sink=n_sink,
        ranks=tuple(ranks),
        bases=tuple(bases),
        bits=tuple(bits),
        score_from=score_from,
    )
    return levers.run(subject, progress=progress)


@click.command(help=__doc__)
@click.argument("model", default="gpt2")
@click.option("--text", default="time-machine", show_default=True)
@click.option("--tokens", type=int, default=1024, show_default=True)
@click.option("--score-from", type=int, default=512, show_default=True)
@click.option("--window", "windows", type=int, multiple=True, help="[default: 1/2, 1/4 and 1/8 of --tokens]")
@click.option("--sinks", "n_sink", type=int, default=4, show_default=True)
@click.option("--rank", "ranks", type=int, multiple=True, help="[default: 1/2, 1/4 and 1/8 of the width]")
@click.option("--bits", type=int, multiple=True, default=(8, 4), show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/relief_map.{csv,json}.")
def main(model: str, save: bool, **options: Any) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, **options, progress=progress)
    columns = ["lever", "kind", "loss", "delta", "delta_low", "delta_high", "bytes", "bytes_per_token", "relief"]
    show(result, save=save, columns=[*columns, "on_front"], summary=["", Relief.sentence(result)])


if __name__ == "__main__":
    script(main)
