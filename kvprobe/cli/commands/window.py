"""``kvprobe window``: what does it cost to see only the last tokens and a few sinks?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvprobe.cli.main import COUNT, checked_parent, common, load_subject, passage_options

if TYPE_CHECKING:
    from kvprobe.experiments.stream_checkpoint import Standing
    from kvprobe.experiments.streaming import Plan
    from kvprobe.results.result import Result

COLUMNS = (
    "window", "n_sink", "positions", "sink_choice", "loss", "perplexity", "delta", "delta_low", "delta_high",
    "cache_tokens",
)  # fmt: skip
STREAM_COLUMNS = (
    "window", "n_sink", "positions", "at_token", "tokens_scored", "loss", "perplexity", "stretch_loss", "cache_tokens",
)  # fmt: skip


@click.command("window", short_help="What does it cost to see only a window and some sinks?")
@click.argument("model", default="gpt2")
@click.option(
    "--window",
    "windows",
    type=COUNT,
    multiple=True,
    default=(256,),
    show_default=True,
    help="Tokens seen, the query itself counted. Repeat for a grid.",
)
@click.option(
    "--sinks",
    type=COUNT,
    multiple=True,
    help="Tokens kept beside the window, in addition to it. Repeat for a grid.  [default: 0, 1, 4]",
)
@click.option(
    "--positions",
    type=click.Choice(["absolute", "cache", "recompute"]),
    default="absolute",
    show_default=True,
    help="absolute: a mask. cache: by slot of the cache (RoPE only). recompute: a fresh pass a prediction.",
)
@click.option(
    "--sink-choice",
    type=click.Choice(["first", "bos", "random", "heaviest"]),
    default="first",
    show_default=True,
    help="Which tokens are the sinks; none looks at what is scored.",
)
@click.option("--drop-sink-logits", is_flag=True, help="Take out the learned sink logits that a model has (gpt-oss).")
@click.option(
    "--score-from",
    type=COUNT,
    help="The first target is the token after it.  [default: half of --tokens; 0 with --stream]",
)
@click.option(
    "--stream", is_flag=True, help="The whole text, however long, through a rolling cache in constant memory."
)
@click.option("--every", type=COUNT, help="With --stream: a result every N tokens.  [default: at the end]")
@click.option(
    "--state",
    type=click.Path(dir_okay=False),
    callback=checked_parent,
    help="With --stream: where a killed run is kept.  [default: a file of its own in kvprobe's directory]",
)
@click.option("--no-resume", is_flag=True, help="With --stream: start afresh, whatever an earlier run has kept.")
@passage_options
@common
def command(model: str, **options: Any) -> None:
    """What does it cost to see only the last tokens and a few attention sinks?

    The first row is the untouched pass; delta is the difference to it in nat per token, with its 95 % interval from
    a paired bootstrap over blocks of tokens. cache_tokens is what a full layer holds at the end.

    \b
    Positions: absolute   keys stay where they were made; older context leaks through the layers
               cache      the sinks are as near as their slots in the cache (StreamingLLM)
               recompute  each prediction sees its last tokens only, from position 0 (and the BOS, if there is one)

    \b
    With --stream a text far longer than the model is read once, all of it unless --tokens is given; every token is
    predicted from what the cache holds. There is no untouched pass to compare with, so no first row and no delta.
    Positions absolute end where the model's do; cache has no end. Killed, the same command goes on where it was.

    \b
    Examples:
      kvprobe window smollm2-135m --window 256 --sinks 0 --sinks 1 --sinks 4 --plot window.png
      kvprobe window smollm2-135m --window 256 --positions cache
      kvprobe window smollm2-135m --window 256 --sinks 4 --sink-choice random   are the first tokens special?
      kvprobe window smollm2-135m --window 128 --positions recompute
      kvprobe window smollm2-135m --stream --text book.txt --window 1020 --sinks 4 --positions cache --every 10000
    """
    if options["stream"]:
        _stream(model, options)
        return
    if stray := [name for name in ("every", "state", "no_resume") if options[name]]:
        raise click.UsageError(f"--{stray[0].replace('_', '-')} belongs to --stream: give that too")

    from kvprobe.cli.console import emit, progress_bar, save_plot
    from kvprobe.experiments import window

    names = ("windows", "sinks", "positions", "score_from", "sink_choice", "drop_sink_logits", "seed")
    settings = {name: options[name] for name in names}
    with progress_bar(options["quiet"]) as progress:
        # by slot, no position beyond the model's is ever used
        subject = load_subject(model, options, progress, unlimited=options["positions"] == "cache")
        result = window.run(subject, **settings, progress=progress)
    emit(result, format_=options["format_"], out=options["out"], columns=COLUMNS, summary=_summary(result))
    if options["plot"]:
        from kvprobe.plots.window import figure

        save_plot(figure(result.rows, result.run), options["plot"])


def _stream(model: str, options: dict[str, Any]) -> None:
    refused = {
        "--positions recompute": options["positions"] == "recompute",
        "--sink-choice other than first": options["sink_choice"] != "first",
        "--drop-sink-logits": options["drop_sink_logits"],
        "--plot": options["plot"],
    }
    if stray := [name for name, given in refused.items() if given]:
        raise click.UsageError(f"{stray[0]} cannot be had with --stream, which reads the text once: leave out one")

    from dataclasses import asdict

    from kvprobe.cli.console import emit, notice, progress_bar
    from kvprobe.decoder.model import from_hf
    from kvprobe.experiments import window
    from kvprobe.experiments.stream_checkpoint import State, identity
    from kvprobe.experiments.streaming import Plan, check
    from kvprobe.files.store import home

    quiet = options["quiet"]
    with progress_bar(quiet) as progress:
        given = click.get_current_context().get_parameter_source("tokens") != click.core.ParameterSource.DEFAULT
        # how long a stream may be depends on its positions: decided after loading, with a reason of its own
        tokens = options["tokens"] if given else None
        subject = load_subject(model, options, progress, tokens=tokens, unlimited=True)
    decoder, n_tokens = from_hf(subject.model), subject.passage.n_tokens
    plan = Plan(
        windows=options["windows"],
        sinks=options["sinks"] or (0, 1, 4),
        positions=options["positions"],
        score_from=options["score_from"] or 0,
        every=options["every"],
    )
    check(decoder, n_tokens, plan)
    about = identity(subject.record(), subject.passage.ids, asdict(plan))
    kept = options["state"]
    state = State(Path(kept), about) if kept else State.within(home() / "streams", about)
    with state.held():
        if options["no_resume"]:
            state.remove()
        if before := _where(state.read(), plan, n_tokens):
            notice(f"resuming {before} (--no-resume starts afresh)", quiet=quiet)
        try:
            with progress_bar(quiet) as progress:
                result = window.stream(subject, decoder, plan, state=state, progress=progress)
        except KeyboardInterrupt:
            if after := _where(state.read(), plan, n_tokens):
                notice(f"kept: the same command resumes {after}", quiet=quiet)
            raise
        emit(result, format_=options["format_"], out=options["out"], columns=STREAM_COLUMNS, summary=_summary(result))
        # only now: a result that could not be written is still there for the next run
        state.remove()


def _where(standing: "Standing | None", plan: "Plan", n_tokens: int) -> str | None:
    """Where a run stands, in words; None if it has done nothing."""
    if standing is None or not (standing.done or standing.length):
        return None
    if len(standing.done) == len(plan.cells):
        return "at the end: the result is there"
    window, n_sink = plan.cells[len(standing.done)]
    return f"window {window} + {n_sink} sinks at token {standing.length:,} of {n_tokens:,}"


def _summary(result: "Result") -> list[str]:
    from kvprobe.results.phrases import passage_of

    run, first = result.run, result.rows[0]
    lines = [
        "",
        f"{passage_of(run)}, {run['n_targets']:,} targets from {run['score_from'] + 1:,} on; a window counts the "
        "query, sinks are in addition",
    ]
    if run.get("stream"):
        lines.append(
            "streamed once through a rolling cache; loss is the mean up to at_token, stretch_loss since the last"
        )
    if first["local_layers"]:
        lines.append(f"layers with a window of their own: {first['local_layers']}")
    if first["has_sink_logits"]:
        dropped = any(row["sink_logits_dropped"] for row in result.rows)
        lines.append(f"the model has learned sink logits{', dropped in every row but the first' if dropped else ''}")
    return lines
