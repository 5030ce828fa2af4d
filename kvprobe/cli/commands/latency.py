"""``kvprobe latency``: how long does a token take, with a cache and without, and what would the machine allow?"""

from typing import Any

import click

from kvprobe.cli.experiment import ask, asked, command_of
from kvprobe.experiments.latency import Latency
from kvprobe.results.result import Result


def _body(model: str, options: dict[str, Any]) -> Result:
    if not options["compiled"] and options["engine"] == "numba":
        raise click.UsageError("--no-compile and --engine numba contradict each other: leave one out")
    if not options["compiled"]:
        options["engine"] = "torch"
    return ask(asked(Latency, options), model, options)


command = command_of(
    Latency,
    click.option(
        "--compile/--no-compile",
        "compiled",
        default=True,
        show_default=True,
        help="--no-compile is the same as --engine torch.",
    ),
    body=_body,
)
