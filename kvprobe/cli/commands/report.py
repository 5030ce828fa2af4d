"""``kvprobe report``: one page on one model that needs no other file and no network."""

from typing import Any

import click

from kvprobe.cli.command import Command
from kvprobe.cli.options import checked_first, checked_parent, model_options, quiet_option, text_options, with_options


@click.command(
    "report",
    cls=Command,
    short_help="One self-contained page on a model: levers, bill, sinks, windows, ranks, speed.",
)
@click.argument("model", default="gpt2")
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    default="report.html",
    show_default=True,
    callback=checked_parent,
    help="The page, written whole or not at all.",
)
@with_options(
    *text_options(tokens=None, unless="1024, or all positions if the model has fewer"),
    *model_options(),
    quiet_option(),
)
@checked_first
def command(model: str, **options: Any) -> None:
    """One HTML page on MODEL: what it is, what each lever on its cache costs and leaves (as kvprobe relief measures
    it), its memory bill, its sinks, the loss by window and by rank, and its speed.

    The page holds its pictures and tables and needs no network; it says how each number was made. A section that the
    family refuses says why. On two cores a model of 135M parameters takes about two minutes.

    \b
    Examples:
      kvprobe report smollm2-135m --out smollm2.html
      kvprobe report gemma3-270m --tokens 2048
      kvprobe report MODEL --text book.txt --quiet
    """
    from kvprobe.cli.console import notice, progress_bar
    from kvprobe.report import report

    config = report.ReportConfig(
        **{name: options[name] for name in ("text", "tokens", "bos", "dtype", "device", "seed")}
    )
    with progress_bar(options["quiet"]) as progress:
        refused = report.write(model, options["out"], config, progress=progress)
    for heading in refused:
        notice(f"{heading}: not measured; the page says why", quiet=options["quiet"])
    notice(f"wrote {options['out']}", quiet=options["quiet"])
