"""Does one sink save a window? The published GPT-2 grid (Dive into Deep Learning, "Generation and the KV cache").

    python -m analyses.window gpt2 --text time-machine

Window 256, which counts the query, absolute positions, sinks in addition: 0 sinks 8.25 (perplexity 3842), 1 sink 3.86
(47), 4 sinks 3.76 (43), full 3.58 (36) on the 511 targets 513 to 1023 of 1,024 tokens without BOS. The other sink
choices ask what that rests on: whether it must be the first tokens.
"""

from collections.abc import Sequence

import click

from kvprobe.console import emit, progress_bar
from kvprobe.progress import Progress, silent
from kvprobe.results import Result, run_record
from kvprobe.subject import prepare
from kvprobe.windows import SinkChoice, grid

CHOICES: tuple[SinkChoice, ...] = ("first", "random", "heaviest")


def run(
    model: str = "gpt2",
    *,
    text: str = "time-machine",
    tokens: int = 1024,
    score_from: int = 512,
    window: int = 256,
    sinks: Sequence[int] = (0, 1, 4),
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """The rows of ``kvprobe window``: the full pass, then each number of sinks for each choice of them."""
    subject = prepare(model, text=text, tokens=tokens, progress=progress)
    rows = []
    for choice in CHOICES:
        found = grid(
            subject.model,
            subject.input_ids[0],
            windows=[window],
            # the rows without sinks are the same for every choice
            sinks=[n for n in sinks if n or choice == "first"],
            score_from=score_from,
            sink_choice=choice,
            n_front=subject.passage.n_front,
            seed=seed,
            progress=progress,
        )
        rows += found if choice == "first" else found[1:]
    settings = {"window": window, "sinks": list(sinks), "score_from": score_from, "positions": "absolute", "seed": seed}
    return Result("window", rows, run_record(subject.record(), **settings))


@click.command(help=__doc__)
@click.argument("model", default="gpt2")
@click.option("--text", default="time-machine", show_default=True)
@click.option("--tokens", type=int, default=1024, show_default=True)
@click.option("--score-from", type=int, default=512, show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/window.{csv,json}.")
def main(model: str, text: str, tokens: int, score_from: int, save: bool) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, text=text, tokens=tokens, score_from=score_from, progress=progress)
    columns = ["window", "n_sink", "sink_choice", "loss", "perplexity", "delta", "delta_low", "delta_high"]
    emit(result, format_="table", out=None, columns=columns)
    if save:
        result.save("results/window")


if __name__ == "__main__":
    main()
