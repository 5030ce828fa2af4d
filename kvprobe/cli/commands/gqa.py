"""``kvprobe gqa``: what do shared keys and values cost: trained from the start, uptrained or just pooled?"""

from typing import Any

import click

from kvprobe.cli.experiment import ask, asked, command_of
from kvprobe.experiments.gqa import Gqa
from kvprobe.results.result import Result

# options of training, and of reading a pretrained model: each is refused if it would do nothing
OF_TRAINING = (
    "seeds", "steps", "corpus", "quick", "uptrain", "margin", "learning_rate", "train_windows", "valid_windows",
)  # fmt: skip
OF_POOLING = ("text", "tokens", "bos", "score_from")


def _body(model: str | None, options: dict[str, Any]) -> Result:
    _refuse_strays(model, pool=options["pool"])
    gqa = asked(Gqa, options)
    return ask(gqa, model or "gpt2", options) if gqa.pool else _train(gqa, options)


def _train(gqa: Gqa, options: dict[str, Any]) -> Result:
    from kvprobe.cells.run_store import RunStore
    from kvprobe.cli.console import notice, progress_bar
    from kvprobe.experiments.gqa_training import TrainingSubject, words_of
    from kvprobe.files.store import home
    from kvprobe.models.loading import device_for
    from kvprobe.text.corpus import characters, enough
    from kvprobe.text.texts import read_text

    quiet, protocol = options["quiet"], gqa.protocol
    split = {"length": protocol.length, "n_train": protocol.n_train, "n_valid": protocol.n_valid}
    n_bytes = enough(protocol.n_train + protocol.n_valid, protocol.length)
    device = str(device_for(options["device"]))
    try:
        with progress_bar(quiet) as progress:
            corpus = characters(read_text(options["corpus"], n_bytes=n_bytes), **split)
            if gqa.quick:
                notice(f"--quick is {words_of(protocol, corpus)}", quiet=quiet)
            return gqa.run(TrainingSubject(corpus, RunStore(home() / "gqa"), device), progress=progress)
    except KeyboardInterrupt:
        notice("kept: the same command continues with the models that are not finished", quiet=quiet)
        raise


def _refuse_strays(model: str | None, *, pool: bool) -> None:
    context = click.get_current_context()
    if model is not None and not pool:
        raise click.UsageError(f"MODEL {model!r} is only read with --pool; without it, small models are trained")
    default = click.core.ParameterSource.DEFAULT
    given = [name for name in context.params if context.get_parameter_source(name) != default]
    if stray := [name for name in given if name in (OF_TRAINING if pool else OF_POOLING)]:
        where = "trains small models: leave out --pool" if pool else "reads a pretrained model: give --pool too"
        raise click.UsageError(f"--{stray[0].replace('_', '-')} {where}")


command = command_of(
    Gqa,
    click.option(
        "--corpus",
        default="time-machine",
        show_default=True,
        help="Text to train on: a UTF-8 file or a name, as for --text.",
    ),
    body=_body,
)
