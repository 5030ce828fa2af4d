"""How does an experiment become a command? Fields are options, the docstring is the help, columns are the table."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import click

from kvprobe.cli.options import (
    COUNT,
    Command,
    CountFrom,
    Finite,
    common,
    load_model,
    load_subject,
    passage_options,
    with_options,
)
from kvprobe.experiments.experiment import Experiment, Setting, settings_of
from kvprobe.results.result import Result


def options_of(experiment: type[Experiment]) -> Callable[[Command], Command]:
    """The options of an experiment's own settings, in the order of its fields."""
    own = {name: about for name, about in settings_of(experiment).items() if not about.common}
    fields = experiment.__dataclass_fields__  # type: ignore[attr-defined]
    return with_options(*(_option(name, about, fields[name].default) for name, about in own.items()))


def settings_from(experiment: type[Experiment], options: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given; the others keep the experiment's default."""
    given = {name: options[name] for name in settings_of(experiment)}
    return {name: value for name, value in given.items() if value is not None and value != ()}


def show(result: Result, experiment: type[Experiment], options: dict[str, Any], *, columns: Sequence[str] = ()) -> None:
    """Print or write a result, as the ``common`` options say; a table shows bytes in the unit that reads best."""
    from kvprobe.cli.console import emit

    emit(
        experiment.shown(result) if options["format_"] == "table" else result,
        format_=options["format_"],
        out=options["out"],
        columns=columns or experiment.table_columns(result),
        summary=experiment.summary(result),
    )


def ask(experiment: Experiment, model: str, options: dict[str, Any], **more: Any) -> Result:
    """The result for MODEL, loaded with what the experiment needs; ``more`` goes to `prepare`."""
    from kvprobe.cli.console import progress_bar

    with progress_bar(options["quiet"]) as progress:
        if experiment.needs in ("passage", "corpus"):
            return experiment.run(load_subject(model, options, progress, **more), progress=progress)
        return experiment.run(load_model(model, options, progress), progress=progress)


def draw(result: Result, experiment: type[Experiment], options: dict[str, Any]) -> None:
    """Draw the picture if ``--plot`` asks for one."""
    if options["plot"]:
        from kvprobe.cli.console import save_plot

        save_plot(experiment.figure(result), options["plot"])


def command_of(experiment: type[Experiment]) -> click.Command:
    """The command of an experiment that needs no code of its own."""

    def command(model: str, **options: Any) -> None:
        result = ask(experiment(**settings_from(experiment, options)), model, options)
        show(result, experiment, options)
        draw(result, experiment, options)

    command.__doc__ = inspect.getdoc(experiment)
    made: Any = options_of(experiment)(common(command))
    if experiment.needs == "passage":
        made = passage_options(made)
    made = click.argument("model", default="gpt2")(made)
    return click.command(experiment.name, short_help=experiment.short)(made)


def _option(name: str, about: Setting, default: Any) -> Callable[[Any], Any]:
    flag, repeats = about.flag or f"--{name.replace('_', '-')}", isinstance(default, tuple)
    given: dict[str, Any] = {"help": about.help + (f"  [default: {about.shown}]" if about.shown else "")}
    if about.kind is bool:
        return click.option(flag, name, is_flag=True, default=default, **given)
    if not about.shown and default not in (None, ()):
        given |= {"default": default, "show_default": True}
    if about.alone is not None:
        given |= {"is_flag": False, "flag_value": about.alone}
    return click.option(flag, name, type=_type(about), multiple=repeats or about.kind is tuple, **given)


def _type(about: Setting) -> Any:
    if about.choices:
        return click.Choice([*about.choices])
    if about.kind is float:
        return Finite(about.least, about.most, min_open=about.above)
    if about.kind is int:
        least, most = (None if bound is None else int(bound) for bound in (about.least, about.most))
        return COUNT if least is most is None else CountFrom(least, most, min_open=about.above)
    return about.kind
