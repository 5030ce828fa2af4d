"""Which options do several commands share, and what do they load?"""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from kvprobe.errors import KvprobeError, Wording, did_you_mean
from kvprobe.progress import Progress

if TYPE_CHECKING:
    from kvprobe.models.loading import Loaded
    from kvprobe.models.subject import Subject

Command = TypeVar("Command", bound=Callable[..., Any])

PLOT_ENDINGS = (".svg", ".png", ".pdf")


class _Countable:
    """For a type of integers: at most 2^40, so that no size computed from one overflows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for anything else, or beyond 2^40."""
        number: int = super().convert(value, param, ctx)  # type: ignore[misc]
        if abs(number) > 2**40:
            raise click.BadParameter(f"{number} is beyond 2^40, more than any machine holds", ctx, param)
        return number


class Count(_Countable, click.types.IntParamType):
    """An integer; the library refuses what is out of range."""


COUNT = Count()


class CountFrom(_Countable, click.IntRange):
    """An integer in a range."""


class Finite(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            raise click.BadParameter(f"{value} is not a finite number", ctx, param)
        return number


class Choice(click.Choice[str]):
    """One of some words; a near miss gets a suggestion."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """As click says it, with what was probably meant."""
        said, meant = super().get_invalid_choice_message(value, ctx), did_you_mean(str(value), self.choices)
        return f"{said.removesuffix('.')}: {meant}" if meant else said


def refuse_repeated(ctx: click.Context, args: list[str]) -> None:
    """A usage error for an option that takes one value and is given several times: click would keep the last."""
    try:
        _, _, order = ctx.command.make_parser(ctx).parse_args([*args])
    except click.UsageError:  # parsing for the command will raise it too
        return
    for param, count in Counter(order).items():
        if isinstance(param, click.Option) and count > 1 and not (param.multiple or param.is_flag or param.count):
            raise click.UsageError(f"{param.opts[0]} takes one value and is given {count} times: give it once", ctx)


def with_options(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Decorates a command with ``options``, in the order in which ``--help`` lists them."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def model_options() -> tuple[Callable[[Any], Any], ...]:
    """The options that say how a model is loaded and what is drawn."""
    return (
        click.option(
            "--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto: the best available."
        ),
        click.option(
            "--dtype",
            type=Choice(["float32", "bfloat16", "float16"]),
            default="float32",
            show_default=True,
            help="Weights and activations. Published numbers are float32.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(0, 2**63 - 1),
            default=0,
            show_default=True,
            help="Seed of everything drawn.",
        ),
    )


def output_options() -> tuple[Callable[[Any], Any], ...]:
    """The options that say where a result goes."""
    return (
        click.option(
            "--format",
            "format_",
            type=Choice(["table", "json", "csv"]),
            default="table",
            show_default=True,
            help="json: exactly one document, rows and run record.",
        ),
        click.option(
            "--out",
            type=click.Path(dir_okay=False),
            callback=checked_parent,
            help="Write the result to FILE, whole or not at all, instead of standard output.",
        ),
        quiet_option(),
    )


def quiet_option() -> Callable[[Any], Any]:
    """The option that silences standard error."""
    return click.option("--quiet", is_flag=True, help="No progress and no notices.")


def text_options(*, tokens: int | None = 1024, unless: str = "") -> tuple[Callable[[Any], Any], ...]:
    """The options that choose the text; ``tokens`` None: the command finds the default, described in ``unless``."""
    return (
        click.option(
            "--text",
            default="bundled",
            show_default=True,
            help="A UTF-8 file, - for standard input, or a name: bundled, time-machine, manual.",
        ),
        click.option(
            "--tokens",
            type=COUNT,
            default=tokens,
            show_default=tokens is not None,
            help="Length of the passage, BOS included." + (f"  [default: {unless}]" if unless else ""),
        ),
        click.option(
            "--bos",
            type=Choice(["auto", "add", "drop"]),
            default="auto",
            show_default=True,
            help="Begin-of-sequence token: as the tokenizer does by itself, always, or only if the text has one.",
        ),
    )


def common(command: Command) -> Command:
    """The options of every command that loads a model and prints a result."""
    plot = click.option(
        "--plot",
        type=click.Path(dir_okay=False),
        multiple=True,
        callback=_checked_plots,
        help="Draw to FILE: .svg, .png, .pdf. Repeat for several.",
    )
    return with_options(*model_options(), plot, *output_options())(checked_first(command, weights=False))


def passage_options(command: Command) -> Command:
    """The options that choose the text, for a command that reads it with a model."""
    return with_options(*text_options())(checked_first(command))


def checked_first(command: Command, *, weights: bool = True) -> Command:
    """Refuse a model by its files' headers (`kvprobe.models.loading.check`) before anything slow is imported."""

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> Any:
        for name in filter(None, [options.get("model"), *options.get("arguments", ())[:1]]):
            # the first of `generate`'s arguments may be its prompt
            if name.endswith(".gguf") or (weights and name == options.get("model")):
                from kvprobe.models import loading

                loading.check(name, weights=weights)
        ctx = click.get_current_context()
        with naming_default(ctx.get_parameter_source("model") is click.core.ParameterSource.DEFAULT):
            return command(*arguments, **options)

    return cast(Command, checked)


@contextmanager
def naming_default(defaulted: bool) -> Iterator[None]:
    """What cannot be done with gpt2 says, if nobody typed it, where the name comes from."""
    try:
        yield
    except KvprobeError as error:
        if not defaulted or "gpt2" not in str(error) or "MODEL defaults" in str(error):
            raise
        said = error.args[0]
        template, values = (said.template, said.values) if isinstance(said, Wording) else ("{0}", (str(error),))
        raise type(error)(Wording(f"{template}; MODEL defaults to gpt2", *values)) from error


def load_model(model: str, options: Mapping[str, Any], progress: Progress) -> "Loaded":
    """The model of a command with the ``common`` options; with ``--random-weights`` a random one of the same shape."""
    if options.get("random_weights"):
        from kvprobe.models.random_weights import load_random

        return load_random(
            model, dtype=options["dtype"], device=options["device"], seed=options["seed"], progress=progress
        )
    from kvprobe.models import loading

    return loading.load(model, dtype=options["dtype"], device=options["device"], progress=progress)


def load_subject(model: str, options: Mapping[str, Any], progress: Progress, **more: Any) -> "Subject":
    """The model and passage of a command with the ``common`` and ``passage_options``.

    ``more`` goes to :func:`kvprobe.models.subject.prepare` too and overrides the options.
    """
    from kvprobe.cli.console import notice
    from kvprobe.models.subject import prepare
    from kvprobe.text.passages import notices

    given = {name: options[name] for name in ("text", "tokens", "bos", "dtype", "device")}
    subject = prepare(model, **(given | more), progress=progress)
    for said in notices(subject.passage):
        notice(said, quiet=options["quiet"])
    return subject


def _checked_plots(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if Path(value).suffix.lower() not in PLOT_ENDINGS:
            raise click.BadParameter(f"{value!r} must end in one of {', '.join(PLOT_ENDINGS)}", ctx, param)
        checked_parent(ctx, param, value)
    return values


def checked_parent(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A click callback: a usage error unless the file can be written; a picture is no table."""
    if value is None:
        return value
    if value == "":
        raise click.BadParameter("a file name is needed", ctx, param)
    if param.name == "out" and Path(value).suffix.lower() in PLOT_ENDINGS:
        draws = any(option.name == "plot" for option in ctx.command.params)
        hint = f"--plot {value} draws a picture" if draws else "give another ending"
        raise click.BadParameter(f"{value!r} would hold no picture: {hint}", ctx, param)
    # before the work, not after it
    directory = Path(value).parent
    if not directory.is_dir():
        raise click.BadParameter(f"directory {str(directory)!r} does not exist: make it first", ctx, param)
    if not os.access(directory, os.W_OK):
        raise click.BadParameter(f"directory {str(directory)!r} cannot be written to", ctx, param)
    return value
