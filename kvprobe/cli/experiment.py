"""How does an experiment become a command? Fields are options, the docstring is the help, columns are the table."""

from collections.abc import Callable
from typing import Any

import click

from kvprobe.cli.command import Command
from kvprobe.cli.options import (
    COUNT,
    Choice,
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


def command_of(
    kind: type[Experiment],
    *own: Callable[[Any], Any],
    body: Callable[[str, dict[str, Any]], Result | None] | None = None,
) -> click.Command:
    """The command of an experiment: an option for each setting, the ``own`` ones, and those of what it needs.

    ``body(model, options)`` gives the result where `ask` alone does not, as for a corpus, or None if it has shown it.
    """

    def command(model: str, **options: Any) -> None:
        result = body(model, options) if body else ask(asked(kind, options), model, options)
        if result is not None:
            show(result, kind, options)
            draw(result, kind, options)

    command.__doc__ = kind.help
    parts = [options_of(kind), *own]
    if kind.needs == "model":
        parts.append(click.option("--random-weights", is_flag=True, help="Use MODEL's shape with random weights."))
    if kind.needs in ("passage", "corpus"):
        parts.append(passage_options)
    argument = {"required": False} if kind.needs == "corpus" else {"default": "gpt2"}
    made: Any = with_options(click.argument("model", **argument), *parts, common)(command)
    found = click.command(kind.name, cls=Command, short_help=kind.short)(made)
    if kind.needs == "config":
        # arithmetic: nothing runs on a device and nothing is random
        found.params = [option for option in found.params if option.name not in ("device", "seed")]
    for option in found.params:
        about = settings_of(kind).get(option.name or "")
        if isinstance(option, click.Option) and about is not None and about.common:
            option.help = _help(about)
            if about.shown:
                option.default, option.show_default = None, False
    return found


def options_of(kind: type[Experiment]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of an experiment's own settings, in the order of its fields."""
    own = {name: about for name, about in settings_of(kind).items() if not about.common}
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return with_options(*(_option(name, about, fields[name].default) for name, about in own.items()))


def asked(kind: type[Experiment], options: dict[str, Any]) -> Any:
    """The experiment with the settings that were given; the others keep its defaults. Raises SettingError."""
    given = {name: options[name] for name in settings_of(kind)}
    return kind(**{name: value for name, value in given.items() if value is not None and value != ()})


def ask(experiment: Experiment, model: str, options: dict[str, Any], **more: Any) -> Result:
    """The result for MODEL, loaded with what the experiment needs; ``more`` goes to `prepare`."""
    from kvprobe.cli.console import progress_bar

    with progress_bar(options["quiet"]) as progress:
        subject: Any
        if experiment.needs == "config":
            from kvprobe.experiments.cache import find_shape

            subject = find_shape(model, progress=progress)
        elif experiment.needs == "model":
            subject = load_model(model, options, progress)
        else:
            subject = load_subject(model, options, progress, **more)
        return experiment.run(subject, progress=progress)


def show(result: Result, kind: type[Experiment], options: dict[str, Any]) -> None:
    """Print or write a result, as the ``common`` options say, after its notices."""
    from kvprobe.cli.console import emit, notice
    from kvprobe.results import phrases

    in_table = options["format_"] == "table"
    # the lines under a table say already what was timed on a busy machine
    for line in [*kind.notices(result), *([] if in_table else phrases.busy_lines(result.run))]:
        notice(line, quiet=options["quiet"])
    emit(
        kind.shown(result) if in_table else result,
        format_=options["format_"],
        out=options["out"],
        columns=kind.table_columns(result),
        summary=kind.summary(result),
    )


def draw(result: Result, kind: type[Experiment], options: dict[str, Any]) -> None:
    """Draw the picture if ``--plot`` asks for one."""
    if options["plot"]:
        from kvprobe.cli.console import save_plot

        save_plot(kind.figure(result), options["plot"])


def _help(about: Setting) -> str:
    return about.help + (f"  [default: {about.shown}]" if about.shown else "")


def _option(name: str, about: Setting, default: Any) -> Callable[[Any], Any]:
    given: dict[str, Any] = {"help": _help(about)}
    if about.kind is bool:
        return click.option(about.option(name), name, is_flag=True, default=default, **given)
    if not about.shown and default not in (None, ()):
        given |= {"default": default, "show_default": True}
    if about.alone is not None:
        given |= {"is_flag": False, "flag_value": about.alone}
    return click.option(about.option(name), name, type=_type(about), multiple=about.repeats, **given)


def _type(about: Setting) -> Any:
    if about.choices:
        return Choice([*about.choices])
    if about.kind is float:
        return Finite(about.least, about.most, min_open=about.above)
    if about.kind is int:
        least, most = (None if bound is None else int(bound) for bound in (about.least, about.most))
        return COUNT if least is most is None else CountFrom(least, most, min_open=about.above)
    return about.kind
