"""Does one sink save a window? The published GPT-2 grid, and whether the sinks must be the first tokens.

\b
    python -m analyses.window gpt2 --text time-machine
    python -m analyses.window smollm2-135m --window 64 --window 128 --window 256 --window 512

Protocol of Dive into Deep Learning, "Generation and the KV cache": window 256, which counts the query, absolute
positions, sinks in addition. Published: 0 sinks 8.25 (perplexity 3842), 1 sink 3.86 (47), 4 sinks 3.76 (43), full
3.58 (36) on the 511 targets 513 to 1023 of 1,024 tokens without BOS. The other sink choices ask why.
"""

import time
from collections.abc import Sequence
from typing import Any

import click

from analyses.common import script, show
from kvprobe.cli.console import progress_bar
from kvprobe.experiments.window import Window
from kvprobe.models.subject import prepare
from kvprobe.probes.windows import SinkChoice
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result

CHOICES: tuple[SinkChoice, ...] = ("first", "random", "heaviest")


def run(
    model: str = "gpt2",
    *,
    text: str = "time-machine",
    tokens: int = 1024,
    score_from: int = 512,
    windows: Sequence[int] = (256,),
    sinks: Sequence[int] = (0, 1, 4),
    choices: Sequence[SinkChoice] = CHOICES,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """The rows of ``kvprobe window``: the full pass, then each window and number of sinks for each choice of them."""
    started = time.perf_counter()
    subject = prepare(model, text=text, tokens=tokens, progress=progress)
    shared: dict[str, Any] = {"windows": tuple(windows), "score_from": score_from, "seed": seed}
    first, *others = choices
    result = Window(sinks=tuple(sinks), sink_choice=first, **shared).run(subject, progress=progress)
    rows = result.rows
    for choice in others:
        # the full pass and the rows without sinks are the same for every choice
        if some := [n for n in sinks if n]:
            rows = (
                rows + Window(sinks=tuple(some), sink_choice=choice, **shared).run(subject, progress=progress).rows[1:]
            )
    of_all = {"sink_choice": [*choices], "wall_s": round(time.perf_counter() - started, 3)}
    return Result("window", rows, result.run | of_all)


@click.command(help=__doc__)
@click.argument("model", default="gpt2")
@click.option("--text", default="time-machine", show_default=True)
@click.option("--tokens", type=int, default=1024, show_default=True)
@click.option("--score-from", type=int, default=512, show_default=True)
@click.option("--window", "windows", type=int, multiple=True, default=(256,), show_default=True, help="Repeatable.")
@click.option("--sinks", type=int, multiple=True, default=(0, 1, 4), show_default=True, help="Repeatable.")
@click.option("--save/--no-save", default=True, help="Keep results/window.{csv,json}.")
def main(model: str, save: bool, **options: Any) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, **options, progress=progress)
    columns = ["window", "n_sink", "sink_choice", "loss", "perplexity", "delta", "delta_low", "delta_high"]
    show(result, save=save, columns=columns)


if __name__ == "__main__":
    script(main)
