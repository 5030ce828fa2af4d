"""``kvprobe sinks``: how much of the attention goes to token 0?"""

from typing import Any

import click

from kvprobe.cli.experiment import ask, asked, command_of, draw, show
from kvprobe.experiments.sinks import Sinks
from kvprobe.results.result import Result


def _body(model: str, options: dict[str, Any]) -> Result | None:
    result = ask(asked(Sinks, options), model, options)
    if not options["per_head"]:
        return result
    show(Sinks.by_head(result), Sinks, options)
    # the picture has layers and heads
    draw(result, Sinks, options)
    return None


command = command_of(
    Sinks,
    click.option("--per-head", is_flag=True, help="One row for each head instead of each layer."),
    body=_body,
)
