"""``kvprobe lowrank``: what rank do keys and values have, and what does a smaller one cost?"""

from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from kvprobe.cli.experiment import asked, command_of
from kvprobe.cli.options import load_subject
from kvprobe.experiments.lowrank import STAGES, Lowrank
from kvprobe.results.result import Result


def _body(model: str, options: dict[str, Any]) -> Result:
    ctx = click.get_current_context()
    if options["spectrum"]:
        for name in ("basis", "fit_text", "score_from", "allocate"):
            if ctx.get_parameter_source(name) != ParameterSource.DEFAULT:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"--spectrum looks at the full pass and takes no {option}", ctx)
    lowrank = asked(Lowrank, options)
    if options["fit_text"] == options["text"] == "-":
        raise click.UsageError("standard input can be read only once: leave out --fit-text, or give a file", ctx)
    from kvprobe.cli.console import progress_bar

    with progress_bar(options["quiet"]) as progress:
        if options["fit_text"] is not None:
            from kvprobe.text.passages import enough
            from kvprobe.text.texts import read_text

            # both texts before the model, which takes longer
            text = read_text(options["fit_text"], n_bytes=enough(options["tokens"]))
            lowrank = replace(lowrank, fit_text=text)
        subject = load_subject(model, options, progress)
        if options["spectrum"]:
            # without --stage the spectrum shows both
            one_stage = ctx.get_parameter_source("stage") != ParameterSource.DEFAULT
            return lowrank.spectrum(subject, stages=(lowrank.stage,) if one_stage else STAGES, progress=progress)
        return lowrank.run(subject, progress=progress)


command = command_of(
    Lowrank,
    click.option("--spectrum", is_flag=True, help="Only what rank each layer has, before and after RoPE: no loss."),
    body=_body,
)
