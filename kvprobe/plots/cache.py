"""How does the memory bill grow with context, and how much would each lever reduce it?"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvprobe.plots.style import COLOURS, DOTS, INK, LINES, MARKERS, TWO_COLUMNS, panels, styled, titled
from kvprobe.results.result import Row
from kvprobe.shape.cache_bytes import Amount

GREY = "#888888"
# one look for each factor of the formula that a lever attacks; the same in both panels
LOOK: dict[str, tuple[str, str, Any]] = {
    "model": (COLOURS[0], MARKERS[0], "-"),
    "undone": (GREY, "x", LINES[3]),
    "heads": (COLOURS[1], MARKERS[1], LINES[1]),
    "latent": (COLOURS[2], MARKERS[2], LINES[2]),
    "window": (COLOURS[3], MARKERS[3], LINES[4]),
    "bits": (COLOURS[4], MARKERS[4], LINES[5]),
    "linear": (COLOURS[5], MARKERS[5], "-"),
}


def draw_growth(rows: list[Row], ax: Axes, *, max_positions: int | None = None) -> Axes:
    """Bytes against context, one line a lever, and the weights as a horizontal line.

    Rows need ``lever``, ``kind``, ``context``, ``bytes``, ``weights_bytes``. Contexts beyond the model's
    ``max_positions``, where the bill is arithmetic only, are shaded.
    """
    for i, lever in enumerate(dict.fromkeys(row["lever"] for row in rows)):
        points = [row for row in rows if row["lever"] == lever]
        colour, marker, dashes = LOOK[points[0]["kind"]]
        ax.plot(
            [row["context"] for row in points],
            [row["bytes"] for row in points],
            color=colour,
            marker=marker,
            markersize=4,
            # alternating, so that both marks show if two levers leave the same bytes
            markevery=(i % 2, 2) if len(points) > 3 else 1,
            linewidth=2.2 if points[0]["kind"] == "model" else 1.2,
            linestyle=dashes,
            label=lever,
        )
    if rows[0]["weights_bytes"] is not None:
        ax.axhline(rows[0]["weights_bytes"], color=INK, linewidth=1, linestyle=DOTS, label="weights")
    _binary(ax, "both")
    longest = max(row["context"] for row in rows)
    if max_positions is not None and longest > max_positions:
        # up to the edge of the axes, not of the data
        ax.set_xlim(ax.get_xlim())
        ax.axvspan(
            max_positions, ax.get_xlim()[1], color=GREY, alpha=0.18, linewidth=0, zorder=0,
            label=f"beyond its {max_positions:,} positions",
        )  # fmt: skip
    ax.xaxis.set_major_formatter(FuncFormatter(_tokens))
    ax.set(xlabel="context (tokens)", ylabel="cache")
    return ax


def draw_relief(rows: list[Row], ax: Axes) -> Axes:
    """What each lever leaves at one context, as a distance from the first row, the model as it is.

    Rows need ``lever``, ``kind``, ``bytes``.
    """
    now = rows[0]["bytes"]
    ax.axvline(now, color=LOOK["model"][0], linewidth=1)
    for place, row in enumerate(rows):
        colour, marker, _ = LOOK[row["kind"]]
        ax.plot([now, row["bytes"]], [place, place], color=colour, linewidth=1.6)
        ax.plot([row["bytes"]], [place], color=colour, marker=marker, markersize=5)
        left = row["bytes"] < now
        ax.annotate(
            str(Amount(row["bytes"])),
            (row["bytes"], place),
            xytext=(-6 if left else 6, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=7,
            color=INK,
        )
    _binary(ax, "x")
    ax.set_yticks(range(len(rows)), [row["lever"] for row in rows])
    ax.invert_yaxis()
    # room for the numbers beside the outermost marks
    ax.margins(x=0.7)
    ax.set(xlabel="cache")
    return ax


def figure(
    growth: list[Row], relief: list[Row], run: dict[str, Any], *, width: float = TWO_COLUMNS, title: bool = True
) -> Figure:
    """Both panels: growth under the strongest lever of each kind, and every lever's relief at the longest context."""
    strongest = {row["kind"]: row["lever"] for row in growth}
    with styled():
        fig, (first, second) = panels(width, 3.7 if width >= TWO_COLUMNS else 2.9, 2)
        draw_growth(
            [row for row in growth if row["lever"] in strongest.values()], first, max_positions=run["max_positions"]
        )
        draw_relief(relief, second)
        # below both panels: inside, lines would run through it anywhere
        ncols = 4 if width >= TWO_COLUMNS else 2
        fig.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=ncols)
        beyond = run["max_positions"] is not None and relief[0]["context"] > run["max_positions"]
        second.set_title(f"at {relief[0]['context']:,} tokens" + (", beyond its positions" if beyond else ""))
        what = f"KV cache in {run['dtype']}, batch {run['batch']:,}"
        return titled(fig, f"{run['model']}: {what}") if title else fig


def _binary(ax: Axes, which: str) -> None:
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        if which in (name, "both"):
            getattr(ax, f"set_{name}scale")("log", base=2)
            axis.set_major_locator(LogLocator(base=2, numticks=5))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: str(Amount(round(value)))))
    ax.tick_params(labelsize=7)


def _tokens(value: float, _: int) -> str:
    for size, unit in ((2**20, "Mi"), (2**10, "Ki")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"
