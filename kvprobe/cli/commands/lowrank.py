"""``kvprobe lowrank``: what rank do keys and values have, and what does a smaller one cost?"""

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvprobe.cli.main import COUNT, common, load_subject, passage_options

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject
    from kvprobe.results.result import Result

COLUMNS: tuple[str, ...] = (
    "rank", "loss", "perplexity", "delta", "delta_low", "delta_high", "energy", "latent_bytes", "basis_bytes", "ratio",
    "notional_ratio", "break_even_tokens",
)  # fmt: skip
SPECTRUM_COLUMNS = (
    "stage", "layer", "width", "numerical_rank", "effective_rank", "rank_90", "rank_99", "rank_99_9",
)  # fmt: skip


@click.command("lowrank", short_help="What does a low-rank latent for K and V cost in loss?")
@click.argument("model", default="gpt2")
@click.option(
    "--rank",
    "ranks",
    type=COUNT,
    multiple=True,
    help="Singular directions kept in every layer. Repeat for a curve.  [default: 1/2, 1/4 and 1/8 of the width]",
)
@click.option(
    "--of",
    type=click.Choice(["kv", "k", "v"]),
    default="kv",
    show_default=True,
    help="What is one matrix a layer: keys beside values, keys alone (values untouched), or values alone.",
)
@click.option(
    "--stage",
    type=click.Choice(["post_rope", "pre_rope"]),
    default="post_rope",
    show_default=True,
    help="Keys as attention reads them, or turned back to before position encoding.",
)
@click.option(
    "--basis",
    type=click.Choice(["oracle", "prefix", "heldout"]),
    default="oracle",
    show_default=True,
    help="Fitted to the scored passage itself, to its tokens before --score-from, or (untruncated) to later tokens of "
    "the same text or those of --fit-text.",
)
@click.option(
    "--fit-text",
    help="Another text for the basis heldout, a file or a name as --text.  [default: later tokens of the same text]",
)
@click.option("--center", is_flag=True, help="Take the mean of the fitted tokens out first (it is stored as well).")
@click.option("--score-from", type=COUNT, help="The first target is the token after it.  [default: half of --tokens]")
@click.option("--spectrum", is_flag=True, help="Only what rank each layer has, before and after RoPE: no loss.")
@click.option(
    "--allocate",
    type=click.Choice(["uniform", "energy"]),
    default="uniform",
    show_default=True,
    help="energy: also spend the same rank × layers over the layers by energy, at equal bytes.",
)
@passage_options
@common
@click.pass_context
def command(ctx: click.Context, /, model: str, **options: Any) -> None:
    """What rank do a model's keys and values have, and what does truncating them cost in loss?

    All positions of all layers, local ones too, are truncated at once; each layer sees what the ones before it made.
    The first row is the untruncated pass; delta is the difference to it in nat per token, with its 95 % interval
    from a paired bootstrap over blocks of tokens. Bytes are of the matrices that are cut.

    \b
    Columns: energy             share of the squared norm of all tokens' K/V that is kept, mean over layers
             ratio              full over latent plus basis, at this length: the honest one
             notional_ratio     width over rank, as if the basis were free
             break_even_tokens  from this length on latent plus basis are smaller than the full cache

    \b
    Examples:
      kvprobe lowrank smollm2-135m --rank 192 --rank 96 --rank 48 --plot lowrank.png
      kvprobe lowrank smollm2-135m --rank 96 --basis heldout     a basis of later tokens of the same text
      kvprobe lowrank smollm2-135m --rank 96 --basis heldout --fit-text manual     one of another text
      kvprobe lowrank smollm2-135m --spectrum                    keys before and after RoPE
      kvprobe lowrank smollm2-135m --rank 96 --allocate energy   more rank where there is more energy
    """
    if options["spectrum"]:
        for name in ("basis", "fit_text", "score_from", "allocate"):
            if ctx.get_parameter_source(name) != ParameterSource.DEFAULT:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"--spectrum looks at the untruncated pass and takes no {option}", ctx)
    if options["fit_text"] is not None and options["basis"] != "heldout":
        raise click.UsageError(f"--fit-text is for --basis heldout, not for --basis {options['basis']}", ctx)
    if options["fit_text"] == options["text"] == "-":
        raise click.UsageError("standard input can be read once: leave out --fit-text, or give a file", ctx)
    from kvprobe.cli.console import progress_bar
    from kvprobe.experiments import lowrank

    shared = {"ranks": options["ranks"], "of": options["of"], "center": options["center"], "seed": options["seed"]}
    with progress_bar(options["quiet"]) as progress:
        fit_text = None
        if options["fit_text"] is not None:
            from kvprobe.text import passages

            # both texts before the model, which takes longer
            n_bytes = passages.enough(options["tokens"])
            fit_text = passages.read_text(options["fit_text"], n_bytes=n_bytes, progress=progress)
        subject = load_subject(model, options, progress)
        if options["spectrum"]:
            # asked for one stage, or left open: then the spectrum shows both
            one_stage = ctx.get_parameter_source("stage") != ParameterSource.DEFAULT
            stages = (options["stage"],) if one_stage else lowrank.STAGES
            result = lowrank.spectrum(subject, stages=stages, **shared, progress=progress)
        else:
            chosen = {name: options[name] for name in ("stage", "basis", "score_from", "allocate")}
            result = lowrank.run(subject, fit_text=fit_text, **chosen, **shared, progress=progress)
    _show(result, subject, options)


def _show(result: "Result", subject: "Subject", options: dict[str, Any]) -> None:
    from kvprobe.cli.console import emit, save_plot
    from kvprobe.results.result import Result

    columns, shown, summary = COLUMNS, result, _spectrum_summary if options["spectrum"] else _summary
    if options["spectrum"]:
        columns = ("stage", "layer", "rank", "energy", *SPECTRUM_COLUMNS[2:]) if options["ranks"] else SPECTRUM_COLUMNS
        if options["format_"] == "table" and not options["ranks"]:
            # the doubling ranks are for curves: a table shows each layer once
            shown = Result("lowrank", [row for row in result.rows if row["rank"] == 1], result.run)
    elif options["allocate"] == "energy":
        columns = ("rank", "allocate", *COLUMNS[1:])
    emit(shown, format_=options["format_"], out=options["out"], columns=columns, summary=summary(result, subject))
    if options["plot"]:
        from kvprobe.plots import lowrank

        draw = lowrank.spectrum_figure if options["spectrum"] else lowrank.figure
        save_plot(draw(result.rows, result.run), options["plot"])


def _spectrum_summary(result: "Result", subject: "Subject") -> list[str]:
    from kvprobe.results.phrases import passage_of

    run = result.run
    return ["", f"{passage_of(run)}, {run['of']}{', centred' if run['centered'] else ''}: one untruncated pass"]


def _summary(result: "Result", subject: "Subject") -> list[str]:
    from kvprobe.results.phrases import fitted_to, passage_of

    run, first = result.run, result.rows[0]
    fitted = (f"{fitted_to(run)}, " if run["fit_text"] else "") + f"{run['n_fitted']:,} tokens"
    lines = [
        "",
        f"{passage_of(run)}, {run['n_targets']:,} targets from {run['score_from'] + 1:,} on",
        f"{first['of']} {first['stage']}, width {first['width']:,}, {first['bytes_full']:,} bytes in full; "
        f"{first['basis']} basis{', centred' if first['centered'] else ''}, fitted on {fitted}: rank at most "
        f"{first['limit']:,}",
        f"interval: {run['interval']}",
    ]
    if any(window is not None for window in subject.loaded.spec.windows):
        lines.append("layers with a window of their own are truncated over the whole passage as well")
    return lines
