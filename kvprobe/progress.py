"""How far along is long work? One callable, given down to whatever takes time."""

from typing import Protocol


class Progress(Protocol):
    """Told of every step of long work: ``progress("low rank", 3, 8, "passes")``.

    ``done`` and ``total`` count ``unit``; ``total`` is None where it is not known beforehand.
    """

    def __call__(self, what: str, done: int, total: int | None, unit: str = "") -> None:
        """Tell that ``done`` of ``total`` is done."""
        ...


def silent(what: str, done: int, total: int | None, unit: str = "") -> None:
    """The default of every library function: says nothing."""
