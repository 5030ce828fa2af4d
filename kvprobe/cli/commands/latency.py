"""``kvprobe latency``: how long does a token take, with a cache and without, and what would the machine allow?"""

import inspect
from typing import Any

import click

from kvprobe.cli.experiment import ask, draw, options_of, settings_from, show
from kvprobe.cli.options import common
from kvprobe.experiments.latency import Latency
from kvprobe.results import phrases


@click.command("latency", short_help=Latency.short, help=inspect.getdoc(Latency))
@click.argument("model", default="gpt2")
@options_of(Latency)
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=True,
    show_default=True,
    help="--no-compile is the same as --engine torch.",
)
@click.option("--random-weights", is_flag=True, help="Use MODEL's shape with random weights.")
@common
def command(model: str, **options: Any) -> None:  # noqa: D103
    from kvprobe.cli.console import notice

    if not options["compiled"] and options["engine"] == "numba":
        raise click.UsageError("--no-compile and --engine numba contradict each other: leave one out")
    if not options["compiled"]:
        options["engine"] = "torch"
    result = ask(Latency(**settings_from(Latency, options)), model, options)
    for note in result.run["notes"]:
        notice(note, quiet=options["quiet"])
    if options["format_"] != "table":
        # a table includes them
        for line in phrases.lines(result.run):
            notice(line, quiet=options["quiet"])
    show(result, Latency, options)
    draw(result, Latency, options)
