"""``kvprobe evaluate``: what does an attention function of your own cost?"""

import inspect
import sys
from contextlib import redirect_stdout
from typing import Any

import click

from kvprobe.cli.experiment import ask, draw, options_of, settings_from, show
from kvprobe.cli.options import common, passage_options
from kvprobe.experiments.evaluate import Evaluate


@click.command("evaluate", short_help=Evaluate.short, help=inspect.getdoc(Evaluate))
@click.argument("model", default="gpt2")
@passage_options
@options_of(Evaluate)
@common
def command(model: str, **options: Any) -> None:  # noqa: D103
    # what the user's code prints must not get into the result
    with redirect_stdout(sys.stderr):
        result = ask(Evaluate(**settings_from(Evaluate, options)), model, options)
    show(result, Evaluate, options)
    draw(result, Evaluate, options)


for option in command.params:
    option.required = option.required or option.name == "attend"
