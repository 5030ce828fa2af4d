"""``kvprobe lowrank``: what rank do keys and values have, and what does a smaller one cost?"""

from typing import Any

import click
from click.core import ParameterSource

from kvprobe.cli import common, passage_options

COLUMNS = (
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
    type=int,
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
    help="Fitted to the scored passage itself, to its tokens before --score-from, or (untruncated) to another text.",
)
@click.option("--fit-text", help="Text of the basis heldout.  [default: the tokens after the passage in --text]")
@click.option("--center", is_flag=True, help="Take the mean of the fitted tokens out first (it is stored as well).")
@click.option("--score-from", type=int, help="The first target is the token after it.  [default: half of --tokens]")
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
      kvprobe lowrank smollm2-135m --rank 96 --basis heldout     a basis that never saw the scored tokens
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
    import time

    from kvprobe.console import progress_bar
    from kvprobe.subject import prepare

    started = time.perf_counter()
    # asked for one stage, or left open: then the spectrum shows both
    one_stage = ctx.get_parameter_source("stage") != ParameterSource.DEFAULT
    with progress_bar(options["quiet"]) as progress:
        fit_text = None
        if options["fit_text"] is not None:
            from kvprobe import passages

            # both texts before the model, which takes longer
            fit_text = passages.read_text(options["fit_text"], progress=progress)
        subject = prepare(
            model,
            text=options["text"],
            tokens=options["tokens"],
            bos=options["bos"],
            dtype=options["dtype"],
            device=options["device"],
            progress=progress,
        )
        work = _spectrum if options["spectrum"] else _sweep
        rows, settings = work(subject, fit_text, one_stage, options, progress)
    settings |= {"seed": options["seed"], "wall_s": round(time.perf_counter() - started, 3)}
    _show(subject, rows, settings, options)


def _sweep(subject: Any, fit_text: Any, one_stage: bool, options: Any, progress: Any) -> tuple[Any, dict[str, Any]]:
    from kvprobe import passages
    from kvprobe.truncation import sweep

    fit, bos, tokens = None, options["bos"], options["tokens"]
    if options["basis"] == "heldout":
        # the same text again would begin with the scored tokens
        own = fit_text is None or fit_text.sha256 == subject.text.sha256
        cut = passages.heldout if own else passages.encode
        fit = cut(subject.loaded.tokenizer, subject.text if own else fit_text, n_tokens=tokens, bos=bos)
    score_from = tokens // 2 if options["score_from"] is None else options["score_from"]
    swept = sweep(
        subject.model,
        subject.input_ids[0],
        ranks=options["ranks"],
        of=options["of"],
        stage=options["stage"],
        basis=options["basis"],
        fit_ids=None if fit is None else fit.ids.to(subject.loaded.device),
        center=options["center"],
        allocation=options["allocate"],
        score_from=score_from,
        seed=options["seed"],
        progress=progress,
    )
    return swept.rows, {
        "ranks": [row["rank"] for row in swept.rows[1:] if row["allocate"] == "uniform"],
        **{key: options[key] for key in ("of", "stage", "basis", "allocate")},
        "centered": options["center"],
        "score_from": score_from,
        "n_targets": tokens - 1 - score_from,
        "n_fitted": swept.n_fitted,
        "fit_text": None if fit is None else {"name": fit.name, "sha256": fit.sha256, "offset": fit.offset},
        "ranks_by_layer": swept.ranks_by_layer,
        "interval": f"95 %, paired moving-block bootstrap, blocks of {swept.block_length} tokens, 10,000 resamples",
    }


def _spectrum(subject: Any, fit_text: Any, one_stage: bool, options: Any, progress: Any) -> tuple[Any, dict[str, Any]]:
    from kvprobe.truncation import spectrum_rows

    progress("spectrum", 0, None)
    stages: list[Any] = [options["stage"]] if one_stage else ["post_rope", "pre_rope"]
    rows = spectrum_rows(
        subject.model,
        subject.input_ids[0],
        ranks=options["ranks"],
        of=options["of"],
        stages=stages,
        center=options["center"],
    )
    settings = {"ranks": list(options["ranks"]), "of": options["of"], "stages": stages, "centered": options["center"]}
    return rows, {"spectrum": True, **settings}


def _show(subject: Any, rows: Any, settings: dict[str, Any], options: Any) -> None:
    from kvprobe.console import emit, save_plot
    from kvprobe.results import Result, run_record

    run = run_record(subject.record(), **settings)
    result = Result("lowrank", rows, run)
    columns: tuple[str, ...] = COLUMNS
    if options["spectrum"]:
        summary = ["", f"{_passage(run)}, {run['of']}{', centred' if run['centered'] else ''}: one untruncated pass"]
        columns = ("stage", "layer", "rank", "energy", *SPECTRUM_COLUMNS[2:]) if options["ranks"] else SPECTRUM_COLUMNS
        if options["format_"] == "table" and not options["ranks"]:
            # the doubling ranks are for curves: a table shows each layer once
            result = Result("lowrank", [row for row in rows if row["rank"] == 1], run)
    else:
        summary = _summary(result, subject)
        if options["allocate"] == "energy":
            columns = ("rank", "allocate", *COLUMNS[1:])
    emit(result, format_=options["format_"], out=options["out"], columns=columns, summary=summary)
    if options["plot"]:
        from kvprobe.plots import lowrank

        draw = lowrank.spectrum_figure if options["spectrum"] else lowrank.figure
        save_plot(draw(rows, run), options["plot"])


def _passage(run: dict[str, Any]) -> str:
    bos = "with BOS" if run["has_bos"] else "no BOS"
    return f"{run['model']}, {run['passage']}, {run['n_tokens']:,} tokens ({bos})"


def _summary(result: Any, subject: Any) -> list[str]:
    run, first = result.run, result.rows[0]
    fitted = f"{run['n_fitted']:,} tokens" + (f" of {run['fit_text']['name']}" if run["fit_text"] else "")
    lines = [
        "",
        f"{_passage(run)}, {run['n_targets']:,} targets from {run['score_from'] + 1:,} on",
        f"{first['of']} {first['stage']}, width {first['width']:,}, {first['bytes_full']:,} bytes in full; "
        f"{first['basis']} basis{', centred' if first['centered'] else ''}, fitted on {fitted}: rank at most "
        f"{first['limit']:,}",
        f"interval: {run['interval']}",
    ]
    if any(window is not None for window in subject.loaded.spec.windows):
        lines.append("layers with a window of their own are truncated over the whole passage as well")
    return lines
