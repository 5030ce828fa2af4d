"""``kvprobe lowrank``: what rank do keys and values have, and what does a smaller one cost?"""

import inspect
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from kvprobe.cli.experiment import draw, options_of, settings_from, show
from kvprobe.cli.options import common, load_subject, passage_options
from kvprobe.experiments.lowrank import STAGES, Lowrank
from kvprobe.results.result import Result

SPECTRUM_COLUMNS = ("numerical_rank", "effective_rank", "rank_90", "rank_99", "rank_99_9")


@click.command("lowrank", short_help=Lowrank.short, help=inspect.getdoc(Lowrank))
@click.argument("model", default="gpt2")
@options_of(Lowrank)
@click.option("--spectrum", is_flag=True, help="Only what rank each layer has, before and after RoPE: no loss.")
@passage_options
@common
@click.pass_context
def command(ctx: click.Context, /, model: str, **options: Any) -> None:  # noqa: D103
    if options["spectrum"]:
        for name in ("basis", "fit_text", "score_from", "allocate"):
            if ctx.get_parameter_source(name) != ParameterSource.DEFAULT:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"--spectrum looks at the full pass and takes no {option}", ctx)
    if options["fit_text"] is not None and options["basis"] != "heldout":
        raise click.UsageError(f"--fit-text needs --basis heldout, not --basis {options['basis']}", ctx)
    if options["fit_text"] == options["text"] == "-":
        raise click.UsageError("standard input can be read only once: leave out --fit-text, or give a file", ctx)
    from kvprobe.cli.console import progress_bar

    asked = Lowrank(**settings_from(Lowrank, options))
    with progress_bar(options["quiet"]) as progress:
        if options["fit_text"] is not None:
            from kvprobe.text import passages

            # both texts before the model, which takes longer
            n_bytes = passages.enough(options["tokens"])
            asked = replace(asked, fit_text=passages.read_text(options["fit_text"], n_bytes=n_bytes, progress=progress))
        subject = load_subject(model, options, progress)
        if options["spectrum"]:
            # without --stage the spectrum shows both
            one_stage = ctx.get_parameter_source("stage") != ParameterSource.DEFAULT
            result = asked.spectrum(subject, stages=(asked.stage,) if one_stage else STAGES, progress=progress)
        else:
            result = asked.run(subject, progress=progress)
    _show(result, options)
    draw(result, Lowrank, options)


def _show(result: Result, options: dict[str, Any]) -> None:
    columns = [column.field for column in Lowrank.columns]
    if options["spectrum"]:
        chosen = ("rank", "energy", *SPECTRUM_COLUMNS) if options["ranks"] else ("width", *SPECTRUM_COLUMNS)
        columns = ["stage", "layer", *chosen]
        if options["format_"] == "table" and not options["ranks"]:
            # the doubling ranks are for curves: a table shows each layer once
            result = Result("lowrank", [row for row in result.rows if row["rank"] == 1], result.run)
    elif options["allocate"] == "energy":
        columns.insert(1, "allocate")
    show(result, Lowrank, options, columns=columns)
