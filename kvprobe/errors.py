"""Errors that a user can fix: their text says what was met, with its value, and what to do next."""

from collections.abc import Iterable


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean X? `` for the one of ``known`` that is closest to ``name``; empty if none is close."""
    # only for whoever mistypes: an import that no other command waits for
    import difflib

    near = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {near[0]}? " if near else ""
