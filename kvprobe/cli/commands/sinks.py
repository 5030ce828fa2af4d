"""``kvprobe sinks``: how much of the attention goes to token 0?"""

from typing import Any

import click

from kvprobe.cli.experiment import ask, asked, command_of, draw, show
from kvprobe.experiments.sinks import Sinks


def _body(model: str, options: dict[str, Any]) -> None:
    result = ask(asked(Sinks, options), model, options)
    show(Sinks.by_head(result) if options["per_head"] else result, Sinks, options)
    draw(result, Sinks, options)


command = command_of(
    Sinks,
    click.option("--per-head", is_flag=True, help="One row for each head instead of each layer."),
    body=_body,
)
