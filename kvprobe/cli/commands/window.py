"""``kvprobe window``: what does it cost to see only the last tokens and a few sinks?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvprobe.cli.experiment import ask, asked, command_of, show
from kvprobe.cli.options import COUNT, checked_parent, load_subject
from kvprobe.experiments.window import Window, stream
from kvprobe.results.result import Result

if TYPE_CHECKING:
    from kvprobe.experiments.stream_checkpoint import StreamProgress
    from kvprobe.experiments.streaming import StreamConfig


def _body(model: str, options: dict[str, Any]) -> Result | None:
    if options["stream"]:
        _stream(model, options)
        return None
    # an --every of 0 was given too
    given = [name for name in ("every", "state") if options[name] is not None]
    given += ["no_resume"] if options["no_resume"] else []
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} needs --stream: give it too")
    window = asked(Window, options)
    # by slot, no position beyond the model's is ever used
    return ask(window, model, options, unlimited=window.positions == "cache")


def _stream(model: str, options: dict[str, Any]) -> None:
    refused = {
        "--positions recompute": options["positions"] == "recompute",
        "--sink-choice other than first": options["sink_choice"] != "first",
        "--drop-sink-logits": options["drop_sink_logits"],
        "--plot": options["plot"],
    }
    if stray := [name for name, given in refused.items() if given]:
        raise click.UsageError(f"{stray[0]} does not work with --stream, which reads the text once: leave out one")

    from dataclasses import asdict

    from kvprobe.cli.console import notice, progress_bar
    from kvprobe.decoder.model import from_hf
    from kvprobe.experiments.stream_checkpoint import StreamCheckpoint, identity
    from kvprobe.experiments.streaming import StreamConfig, check
    from kvprobe.files.store import home

    quiet = options["quiet"]
    with progress_bar(quiet) as progress:
        given = click.get_current_context().get_parameter_source("tokens") != click.core.ParameterSource.DEFAULT
        # how long a stream may be depends on its positions: checked after loading
        tokens = options["tokens"] if given else None
        subject = load_subject(model, options, progress, tokens=tokens, unlimited=True)
    decoder, n_tokens = from_hf(subject.model), subject.passage.n_tokens
    config = StreamConfig(
        windows=options["windows"],
        sinks=options["sinks"] or (0, 1, 4),
        positions=options["positions"],
        score_from=options["score_from"] or 0,
        every=options["every"],
    )
    check(decoder, n_tokens, config)
    about = identity(subject.record(), subject.passage.ids, asdict(config))
    kept = options["state"]
    state = StreamCheckpoint(Path(kept), about) if kept else StreamCheckpoint.within(home() / "streams", about)
    with state.held():
        if options["no_resume"]:
            state.remove()
        if before := _where(state.progress(), config, n_tokens):
            notice(f"resuming {before} (--no-resume starts afresh)", quiet=quiet)
        try:
            with progress_bar(quiet) as progress:
                result = stream(subject, decoder, config, state=state, progress=progress)
        except KeyboardInterrupt:
            if after := _where(state.progress(), config, n_tokens):
                notice(f"kept: the same command resumes {after}", quiet=quiet)
            raise
        show(result, Window, options)
        # only now: if the result could not be written, the next run still has it
        state.remove()


def _where(now: "StreamProgress | None", config: "StreamConfig", n_tokens: int) -> str | None:
    """Where a run is, in words; None if it has done nothing."""
    if now is None or not (now.done or now.length):
        return None
    if len(now.done) == len(config.cells):
        return "at the end: the result is there"
    window, n_sink = config.cells[len(now.done)]
    return f"window {window} + {n_sink} sinks at token {now.length:,} of {n_tokens:,}"


command = command_of(
    Window,
    click.option(
        "--stream", is_flag=True, help="Read the whole text, however long, through a rolling cache in constant memory."
    ),
    click.option("--every", type=COUNT, help="With --stream: a result every N tokens.  [default: only at the end]"),
    click.option(
        "--state",
        type=click.Path(dir_okay=False),
        callback=checked_parent,
        help="With --stream: the file from which a killed run continues.  [default: one in kvprobe's directory]",
    ),
    click.option("--no-resume", is_flag=True, help="With --stream: start afresh and ignore what an earlier run kept."),
    body=_body,
)
