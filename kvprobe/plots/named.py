"""Which picture belongs to which analysis? One function for each name."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvprobe.results.result import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_of(result: Result) -> "Figure":
    """The picture of ``result``. Raises ValueError for an analysis without one."""
    if result.analysis not in FIGURES:
        raise ValueError(f"the analysis {result.analysis!r} has no picture: pictures exist of {', '.join(FIGURES)}")
    return FIGURES[result.analysis](result)


def _lowrank(result: Result) -> "Figure":
    from kvprobe.plots import lowrank

    if result.run.get("spectrum"):
        return lowrank.spectrum_figure(result.rows, result.run)
    return lowrank.figure(pooled(result.rows), result.run)


def pooled(rows: list[Row]) -> list[Row]:
    """Of several passages, only the rows of all passages together; other rows unchanged."""
    return [row for row in rows if row.get("passage") == "all"] or rows


def _window(result: Result) -> "Figure":
    from kvprobe.plots import window

    if result.run.get("stream"):
        raise ValueError("a streamed window has no picture: there is no full pass to compare with")
    return window.figure(result.rows, result.run)


def _roofline(result: Result) -> "Figure":
    from kvprobe.plots import roofline

    return roofline.figure(result.rows, result.run)


def _gqa(result: Result) -> "Figure":
    from kvprobe.plots import gqa

    return gqa.figure(result.rows, result.run)


FIGURES: dict[str, Callable[[Result], "Figure"]] = {
    "lowrank": _lowrank,
    "window": _window,
    "roofline": _roofline,
    "gqa": _gqa,
}
