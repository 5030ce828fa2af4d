"""``kvprobe sinks``: how much of the attention goes to token 0?"""

import inspect
from typing import Any

import click

from kvprobe.cli.experiment import ask, draw, options_of, settings_from, show
from kvprobe.cli.options import common, passage_options
from kvprobe.experiments.sinks import Sinks

HEAD_COLUMNS = ("layer", "head", "mass", "is_sink")


@click.command("sinks", short_help=Sinks.short, help=inspect.getdoc(Sinks))
@click.argument("model", default="gpt2")
@passage_options
@options_of(Sinks)
@click.option("--per-head", is_flag=True, help="One row for each head instead of each layer.")
@common
def command(model: str, **options: Any) -> None:  # noqa: D103
    result = ask(Sinks(**settings_from(Sinks, options)), model, options)
    if options["per_head"]:
        show(Sinks.by_head(result), Sinks, options, columns=HEAD_COLUMNS)
    else:
        show(result, Sinks, options)
    draw(result, Sinks, options)
