"""``kvprobe memory``: does a KV cache hold what its formula says?"""

import inspect
from typing import Any

import click

from kvprobe.cli.experiment import ask, draw, options_of, settings_from, show
from kvprobe.cli.options import common
from kvprobe.experiments.memory import Memory


@click.command("memory", short_help=Memory.short, help=inspect.getdoc(Memory))
@click.argument("model", default="gpt2")
@options_of(Memory)
@click.option("--random-weights", is_flag=True, help="Use MODEL's shape with random weights.")
@common
def command(model: str, **options: Any) -> None:  # noqa: D103
    from kvprobe.cli.console import notice

    result = ask(Memory(**settings_from(Memory, options)), model, options)
    if not any(row["cache"] == "full" for row in result.rows):
        what = f"the {result.run['family']} family does not keep one K and one V for each KV head"
        notice(f"kvprobe's own caches are left out: {what}", quiet=options["quiet"])
    show(result, Memory, options)
    draw(result, Memory, options)
