"""How much attention is on token 0, layer by layer? The published GPT-2 bars, with every head beside them.

\b
    python -m analyses.sinks gpt2 --text time-machine

Protocol of Dive into Deep Learning, "Generation and the KV cache": GPT-2 124M at float32, the first 1,024 tokens of
The Time Machine without BOS, the mean over heads and over the queries 64 to 1023 of the weight on token 0. Published,
by layer: .00 .01 .11 .30 .32 .51 .46 .57 .48 .48 .45 .34, against .003 if spread evenly. A sink head gives
token 0 more than 0.3 (Gu et al., When attention sink emerges in language models).
"""

from typing import Any

import click

from analyses.common import script, show
from kvprobe.cli.console import progress_bar
from kvprobe.experiments.sinks import Sinks
from kvprobe.models.subject import prepare
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result


def run(
    model: str = "gpt2",
    *,
    text: str = "time-machine",
    tokens: int = 1024,
    queries_from: int = 64,
    epsilon: float = 0.3,
    progress: Progress = silent,
) -> Result:
    """The rows of ``kvprobe sinks``, one a layer; ``head_mass`` lists its heads."""
    subject = prepare(model, text=text, tokens=tokens, progress=progress)
    return Sinks(queries_from=queries_from, epsilon=epsilon).run(subject, progress=progress)


@click.command(help=__doc__)
@click.argument("model", default="gpt2")
@click.option("--text", default="time-machine", show_default=True)
@click.option("--tokens", type=int, default=1024, show_default=True)
@click.option("--queries-from", type=int, default=64, show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/sinks.{csv,json}.")
def main(model: str, save: bool, **options: Any) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, **options, progress=progress)
    columns = ["layer", "mass", "uniform", "sink_rate", "top_position", "top_token", "top_mass", "window"]
    show(result, save=save, columns=columns, summary=["", Sinks.sentence(result)])


if __name__ == "__main__":
    script(main)
