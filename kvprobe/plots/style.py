"""What do all pictures share? Sizes, colours that survive colour-blindness and grey print, and a figure to draw in."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvprobe.results.result import Row
from kvprobe.results.visible import visible

# Okabe and Ito (2008), in an order whose neighbours also differ in lightness
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")
# lines differ in their dashes too; dots are for references and ceilings, which are not measurements
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1.2, 1.5)), (0, (2.5, 1.2)), (0, (8, 2)), (0, (4, 1, 1, 1)))
DOTS = (0, (1, 1.6))
# the one colour of text and axes: a picture is made fit for a dark page by replacing it
INK = "#333333"
# monotone in lightness, readable under every common colour-blindness
HEAT = "cividis"
# how matplotlib itself writes a tick of a logarithmic axis
POWER = re.compile(r"\$\\mathdefault\{[-−0-9.^{}\\times]*\}\$")
ONE_COLUMN = 3.35  # inches
TWO_COLUMNS = 6.9


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the ``index``-th line of a picture, for ``plot`` and ``errorbar``."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index % len(LINES)],
        "markersize": 4.5,
        "linewidth": 1.2,
    }


def error_bars(
    rows: Sequence[Row], middle: str = "delta", *, low: str = "delta_low", high: str = "delta_high"
) -> list[list[float]]:
    """How far the error bars of ``rows`` reach below and above ``middle``: ``[2][n]``, as ``errorbar`` takes them."""
    return [[row[middle] - row[low] for row in rows], [row[high] - row[middle] for row in rows]]


class Drawn(Figure):
    """A figure that a notebook shows by itself, whether or not matplotlib was set up there.

    No name in it is read as mathematics, and a name's invisible characters are made visible, as SVG demands.
    """

    def draw(self, renderer: Any) -> None:
        """Draw everything, with texts taken literally."""
        for ax in self.axes:
            for axis in (ax.xaxis, ax.yaxis):
                labels = [label.get_text() for label in axis.get_ticklabels()]
                if not "".join(labels).replace("\n", "").isprintable():
                    axis.set_ticks(axis.get_ticklocs(), labels=[visible(label, keep="\n") for label in labels])
        for text in self.findobj(Text):
            said = text.get_text()
            if not POWER.fullmatch(said):
                text.set_parse_math(False)
                text.set_text(visible(said, keep="\n"))
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.savefig(data, format="png", dpi=120)
        return data.getvalue()


@contextmanager
def styled() -> Iterator[None]:
    """Settings for one figure, undone afterwards."""
    with mpl.rc_context(
        {
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "font.size": 8,
            "axes.titlesize": 8,
            "axes.labelsize": 8,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.8,
            "legend.frameon": False,
            "legend.fontsize": 7,
            "hatch.linewidth": 0.6,
        }
    ):
        yield


def panels(width: float, height: float, n: int = 1, **settings: Any) -> tuple[Figure, list[Axes]]:
    """A figure ``width`` inches wide with ``n`` panels of ``height``: side by side in two columns, else stacked.

    ``settings`` are those of ``Figure.subplots``; ``ratios`` are of widths, and ignored if the panels are stacked.
    """
    beside = width > 1.4 * ONE_COLUMN
    ratios = settings.pop("ratios", None)
    if ratios is not None and beside:
        settings["width_ratios"] = ratios
    figure = Drawn(figsize=(width, height if beside else height * n), layout="constrained")
    axes = figure.subplots(*((1, n) if beside else (n, 1)), squeeze=False, **settings)
    return figure, list(axes.flat)


def legend_above(ax: Axes, *, ncols: int = 2, narrow: int = 2, handles: Sequence[Any] | None = None) -> None:
    """Put the legend above the axes, in ``narrow`` columns in a narrow figure: inside, data may be anywhere."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=ncols if figure.get_figwidth() > 1.4 * ONE_COLUMN else narrow,
        borderaxespad=0.2,
        columnspacing=1.2,
    )


def titled(figure: Figure, text: str) -> Figure:
    """``figure`` with ``text``, if any, as its title, wrapped to its width and never read as mathematics."""
    if not text:
        return figure
    # a character of 8 points takes a little over 0.06 inches
    lines = textwrap.wrap(text, max(20, round(figure.get_figwidth() / 0.066)))
    figure.suptitle("\n".join(lines), fontsize=8, color=INK, parse_math=False)
    return figure
