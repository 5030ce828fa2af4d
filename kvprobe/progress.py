"""How far along is long work? One callable, passed down to whatever takes time."""

from typing import Protocol


class Progress(Protocol):
    """Called at every step of long work: ``progress("low rank", 3, 8, "passes")``.

    ``done`` and ``total`` count ``unit``; ``total`` is None if it is not known in advance.
    """

    def __call__(self, what: str, done: int, total: int | None, unit: str = "") -> None:
        """Report that ``done`` of ``total`` is done."""


def silent(what: str, done: int, total: int | None, unit: str = "") -> None:
    """The default of every library function: report nothing."""
