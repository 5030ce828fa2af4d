"""Errors that a user can fix: their text says what was met, with its value, and what to do next."""

import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any, Self


class Wording(str):
    """A sentence with settings in braces: a str with their names in Python; :meth:`said` has those of a command line.

    >>> wording = Wording("{fit_text} needs {basis} heldout, not {basis} {0}", "oracle")
    >>> print(wording)
    fit_text needs basis heldout, not basis oracle
    >>> wording.said({"fit_text": "--fit-text", "basis": "--basis"})
    '--fit-text needs --basis heldout, not --basis oracle'
    """

    template: str
    values: tuple[Any, ...]
    """What stands in its place where the template has a number in braces."""

    def __new__(cls, template: str, *values: Any) -> Self:
        """The sentence with the names that ``template`` itself has."""
        names = {name: name for name in _names(template)}
        made = super().__new__(cls, Formatter().vformat(template, values, names))
        made.template, made.values = template, values
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.template, *self.values)

    @property
    def names(self) -> set[str]:
        """The settings that it names."""
        return _names(self.template)

    def said(self, flags: Mapping[str, str]) -> str:
        """The text with each setting as ``flags`` has it."""
        return Formatter().vformat(self.template, self.values, {name: flags.get(name, name) for name in self.names})

    def renamed(self, names: Mapping[str, str]) -> "Wording":
        """The same with other names in Python."""
        template = re.sub(r"{([a-z_]+)}", lambda match: f"{{{names.get(match[1], match[1])}}}", self.template)
        return Wording(template, *self.values)


def _names(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name and not name.isdecimal()}


def reword(error: BaseException, said: Callable[[Wording], str]) -> None:
    """Give an error whose text is a `Wording` that of ``said(wording)`` instead; any other stays as it is."""
    if error.args and isinstance(error.args[0], Wording):
        error.args = (said(error.args[0]), *error.args[1:])


class SettingError(ValueError):
    """A setting that cannot be, whatever the model: ``text`` is a template of `Wording`.

    On the command line one that names several settings, which contradict each other, is a usage error.
    """

    def __init__(self, text: str, *values: Any) -> None:
        super().__init__(text if isinstance(text, Wording) else Wording(text, *values))


class KvprobeError(Exception):
    """Anything the user can act on. The command line prints the text as one line and exits with 1."""


class UnsupportedModelError(KvprobeError):
    """A model, family or checkpoint that kvprobe cannot read honestly; the text names it and the reason."""


class NotIntercepted(KvprobeError):
    """An attention layer that should have passed through the seam did not: a result would be of the plain model."""


def short(value: object) -> str:
    """The repr of a value that an error quotes, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def did_you_mean(name: str, known: Iterable[str], then: str = "") -> str:
    """``did you mean X? Then`` for that of ``known`` which is closest to ``name``; ``then`` alone if none is close."""
    # only for whoever mistypes: an import that no other command waits for
    import difflib

    near = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {near[0]}? {then[:1].upper()}{then[1:]}".rstrip() if near else then
