"""How does the memory bill grow with context, and how far would each lever take it down?"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvprobe.bill import Amount
from kvprobe.plots.style import COLOURS, INK, MARKERS, TWO_COLUMNS, styled
from kvprobe.results import Row

GREY = "#888888"
# one look for each factor of the formula that a lever attacks, the same in both panels
LOOK = {
    "model": (COLOURS[0], MARKERS[0]),
    "undone": (GREY, "x"),
    "heads": (COLOURS[1], MARKERS[1]),
    "latent": (COLOURS[2], MARKERS[2]),
    "window": (COLOURS[3], MARKERS[3]),
    "bits": (COLOURS[4], MARKERS[4]),
    "linear": (COLOURS[5], MARKERS[5]),
}


def draw_growth(rows: list[Row], ax: Axes) -> Axes:
    """Bytes against context, a line a lever, and the weights as a level line.

    Rows need ``lever``, ``kind``, ``context``, ``bytes``, ``weights_bytes``.
    """
    for lever in dict.fromkeys(row["lever"] for row in rows):
        mine = [row for row in rows if row["lever"] == lever]
        colour, marker = LOOK[mine[0]["kind"]]
        ax.plot(
            [row["context"] for row in mine],
            [row["bytes"] for row in mine],
            color=colour,
            marker=marker,
            markersize=3.5,
            markevery=2,
            linewidth=2.2 if mine[0]["kind"] == "model" else 1.2,
            linestyle="--" if mine[0]["kind"] == "undone" else "-",
            label=lever,
        )
    if rows[0]["weights_bytes"] is not None:
        ax.axhline(rows[0]["weights_bytes"], color=INK, linewidth=1, linestyle=":", label="weights")
    _binary(ax, "both")
    ax.xaxis.set_major_formatter(FuncFormatter(_tokens))
    ax.set(xlabel="context (tokens)", ylabel="cache")
    return ax


def draw_relief(rows: list[Row], ax: Axes) -> Axes:
    """What each lever leaves at one context, as its distance from the model as it is, the first row.

    Rows need ``lever``, ``kind``, ``bytes``.
    """
    now = rows[0]["bytes"]
    ax.axvline(now, color=LOOK["model"][0], linewidth=1)
    for place, row in enumerate(rows):
        colour, marker = LOOK[row["kind"]]
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
    # room for the amounts beside the outermost marks
    ax.margins(x=0.45)
    ax.set(xlabel="cache")
    return ax


def figure(growth: list[Row], relief: list[Row], run: dict[str, Any]) -> Figure:
    """Both panels: growth of the strongest lever of each kind, relief of all of them at the longest context."""
    strongest = {row["kind"]: row["lever"] for row in growth}
    with styled():
        fig = Figure(figsize=(TWO_COLUMNS, 3.9), layout="constrained")
        left, right = fig.subplots(1, 2)
        draw_growth([row for row in growth if row["lever"] in strongest.values()], left)
        draw_relief(relief, right)
        # below both panels: inside, lines run through it wherever it stands
        fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        right.set_title(f"at {relief[0]['context']:,} tokens", fontsize=8)
        fig.suptitle(f"{run['model']}: KV cache in {run['dtype']}, batch {run['batch']:,}", fontsize=9, color=INK)
    return fig


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
