"""What is an experiment? A frozen dataclass whose fields are its settings, in Python, commands and sweeps."""

import inspect
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvprobe.errors import SettingError, reword
from kvprobe.progress import Progress, silent
from kvprobe.results.columns import Column
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row
from kvprobe.shape.cache_bytes import Amount

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Experiment", "Setting", "SettingError", "seed", "setting", "settings_of"]

WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The help line of one field and the values that it takes.

    ``flag`` is the option's name if it differs from the field's; ``least`` and ``most`` are bounds unless None, and
    ``above`` excludes ``least`` itself. A setting that ``repeats`` is a tuple; ``loose`` also takes objects, which only
    Python can give. ``shown`` stands in help for a default that is only known later, and ``alone`` is the value of an
    option that no value follows. ``common`` marks an option of every command.
    """

    help: str
    kind: type
    flag: str | None = None
    choices: Collection[str] = ()
    least: float | None = None
    most: float | None = None
    above: bool = False
    shown: str = ""
    alone: Any = None
    repeats: bool = False
    loose: bool = False
    common: bool = False

    def option(self, name: str) -> str:
        """The option of the setting of that name."""
        return self.flag or f"--{name.replace('_', '-')}"

    def checked(self, name: str, value: Any) -> Any:
        """The value, numpy's numbers as Python's.

        Raises SettingError for another type, and outside the choices or the bounds; nan is outside any.
        """
        wanted = {int: Integral, float: Real}.get(self.kind, self.kind)
        # to Python a truth value is a number
        if not self.loose and (not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool)):
            raise SettingError(f"{{{name}}} must be {WORDS[self.kind]}, got {{0!r}}", value)
        if self.kind in (int, float) and not isinstance(value, int | float):
            value = self.kind(value)
        if self.choices and value not in self.choices:
            raise SettingError(f"{{{name}}} must be one of {', '.join(self.choices)}, got {{0!r}}", value)
        low = self.least is None or (value > self.least if self.above else value >= self.least)
        high = self.most is None or value <= self.most
        if not (low and high):
            bounds = f"{'above' if self.above else 'at least'} {self.least}"
            if self.most is not None:
                bounds = f"{bounds} and at most {self.most}" if self.above else f"between {self.least} and {self.most}"
            raise SettingError(f"{{{name}}} must be a number {bounds}, got {{0}}", value)
        return value


def setting(default: Any, help: str, *, kind: type | None = None, **about: Any) -> Any:  # noqa: A002
    """A field of an experiment. ``kind`` is the default's type unless given; a tuple is an option that repeats."""
    about |= {"kind": kind or type(default), "repeats": isinstance(default, tuple)}
    return field(default=default, metadata={"setting": Setting(help=help, **about)})


def seed() -> Any:
    """The field for the seed of everything drawn."""
    return setting(0, "Seed of everything drawn.", least=0, common=True)


class Experiment:
    """One question asked of one model. A subclass is a frozen dataclass, alone in a file that imports no torch.

    Its docstring is the help of its command: a question, what the columns are, examples. ``needs`` says what
    `measure` is given: ``config`` a :class:`kvprobe.experiments.cache.KnownShape`, ``model`` a
    :class:`kvprobe.models.loading.Loaded`, ``passage`` a :class:`kvprobe.models.subject.Subject`, ``corpus`` a
    :class:`kvprobe.experiments.gqa_training.TrainingSubject`. ``version`` rises when the same settings would give other
    rows. ``heading`` puts it on the report's page.
    """

    name: ClassVar[str]
    analysis: ClassVar[str] = ""
    """The name of its result, if it differs from its own."""
    needs: ClassVar[Literal["config", "model", "passage", "corpus"]] = "passage"
    version: ClassVar[int] = 1
    short: ClassVar[str]
    """One line of `kvprobe --help`."""
    columns: ClassVar[tuple[Column, ...]]
    in_units: ClassVar[tuple[str, ...]] = ()
    """Fields in bytes that a table shows in the unit that reads best."""
    heading: ClassVar[str] = ""
    caption: ClassVar[str] = ""

    example: ClassVar[str] = ""
    """Settings without which it cannot be made."""
    help: ClassVar[str]
    """The docstring as it was written, which is the help of its command; `help()` in Python has the settings too."""

    def __init_subclass__(cls) -> None:
        cls.help = inspect.cleandoc(cls.__doc__ or "")
        fields_of = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        lines = [_about(name, value) for name, value in fields_of.items() if "setting" in value.metadata]
        asked = "subject" if cls.needs == "corpus" else '"smollm2-135m"'
        example = [
            f"    >>> from kvprobe.experiments import {cls.__name__}",
            f"    >>> result = {cls.__name__}({cls.example}).run({asked})",
        ]
        text = cls.help.replace("\b\n", "").rstrip()
        cls.__doc__ = "\n".join([text, "", "In Python:", *example, "", "Settings, given by name:", *lines])

    def __post_init__(self) -> None:
        for name, about in settings_of(type(self)).items():
            value = getattr(self, name)
            if about.repeats:
                if isinstance(value, str) or not isinstance(value, Iterable):
                    raise SettingError(f"{{{name}}} must be a list, even of one, got {{0!r}}", value)
                if None in (value := tuple(value)):
                    raise SettingError(
                        f"{{{name}}} takes no None"
                        + (": the full pass is always the first row" if self.needs == "passage" else "")
                    )
                value = tuple(about.checked(name, part) for part in value)
            # as a class has it: the default
            elif value is not None or getattr(type(self), name) is not None:
                value = about.checked(name, value)
            object.__setattr__(self, name, value)

    def measure(self, subject: Any, progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """The rows, and for the record what the settings do not say. Raises as the experiment says."""
        raise NotImplementedError

    def run(self, subject: Any, *, progress: Progress = silent) -> Result:
        """The result of asking ``subject``; raises as `measure` does, naming its own settings.

        A model's name, a loaded model or a subject is made what the experiment ``needs`` with the defaults of
        :func:`kvprobe.prepare`. Raises TypeError for anything else.
        """
        subject = self.given(subject, progress)
        started = time.perf_counter()
        try:
            rows, facts = self.measure(subject, progress)
        except Exception as error:
            # what it calls knows one window, and not that it is of `windows`
            fields_of = {
                about.option(name)[2:].replace("-", "_"): name for name, about in settings_of(type(self)).items()
            }
            reword(error, lambda wording: wording.renamed(fields_of))
            raise
        wall_s = round(time.perf_counter() - started, 3)
        about, settings = subject.record(), self.settings()
        if twice := sorted(about.keys() & settings.keys()):
            raise ValueError(f"a run record says {twice[0]} twice")
        # facts say what a setting came to, and what was read in the subject's place
        return Result(self.analysis or self.name, rows, run_record(about | settings | facts, wall_s=wall_s))

    def given(self, subject: Any, progress: Progress) -> Any:
        """``subject`` as what it ``needs``: `run` says what may be given."""
        name = isinstance(subject, str)
        if self.needs == "model" and name:
            from kvprobe.models.loading import load

            return load(subject, progress=progress)
        if self.needs == "passage" and (name or hasattr(subject, "tokenizer")):
            from kvprobe.models.subject import prepare

            return prepare(subject, progress=progress)
        if self.needs == "model" and hasattr(subject, "loaded"):
            return subject.loaded
        if hasattr(subject, "record"):
            return subject
        wanted = {
            "config": "a model's name",
            "model": "a model's name or what kvprobe.load gives",
            "passage": "a model's name, or what kvprobe.load or kvprobe.prepare gives",
            "corpus": "a TrainingSubject (kvprobe.experiments.gqa_training)",
        }[self.needs]
        hint = "" if self.needs == "corpus" else "; kvprobe.prepare takes a model in memory"
        raise TypeError(f"{type(self).__name__}.run takes {wanted}, not {type(subject).__name__}{hint}")

    def settings(self) -> dict[str, Any]:
        """The settings as a record has them."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence."""
        raise NotImplementedError

    @classmethod
    def summary(cls, result: Result) -> list[str]:
        """The lines under the table."""
        return ["", cls.sentence(result)]

    @classmethod
    def notices(cls, result: Result) -> list[str]:
        """What its command says on standard error."""
        return []

    @classmethod
    def table_columns(cls, result: Result) -> list[str]:
        """The fields of the rows that a table in the terminal shows, if a kind of result has others too."""
        return [column.field for column in cls.columns]

    @classmethod
    def shown(cls, result: Result) -> Result:
        """The result as a table shows it, if that differs from what is kept."""
        rows = [row | {field: Amount(row[field]) for field in cls.in_units} for row in result.rows]
        return Result(result.analysis, rows, result.run)

    @classmethod
    def figure(cls, result: Result, **how: Any) -> "Figure":
        """The picture, by `kvprobe.plots`; ``how``: ``width`` in inches, ``title``."""
        return import_module(f"kvprobe.plots.{cls.name}").figure(result.rows, result.run, **how)


def _about(name: str, value: "Field[Any]") -> str:
    about = value.metadata["setting"]
    default = about.shown or repr(value.default)
    said = re.sub(r"Repeat for [^.]*\.", "A list.", about.help)
    return f"    {name}: {' '.join(said.split())}  [default: {default}]"


def settings_of(experiment: type[Experiment]) -> dict[str, Setting]:
    """The settings of an experiment by name, in the order in which its command lists them."""
    return {entry.name: entry.metadata["setting"] for entry in fields(experiment)}  # type: ignore[arg-type]
