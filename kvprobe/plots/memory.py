"""Does a cache hold what its formula says? Bytes of each kind of cache, the part pinned by views, and the formula."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvprobe.plots.style import COLOURS, DOTS, INK, look, panels, styled, titled
from kvprobe.results.result import Row

MIB = 2**20


def draw(rows: list[Row], ax: Axes) -> Axes:
    """One bar a cache in MiB, its end the part pinned by views, and a mark at the formula; rows of one context.

    Rows need ``cache``, ``formula_bytes``, ``measured_bytes``, ``pinned_bytes``.
    """
    places = range(len(rows))
    read = [(row["measured_bytes"] - row["pinned_bytes"]) / MIB for row in rows]
    ax.barh(places, read, color=COLOURS[4], height=0.6, label="keys and values")
    pinned = [row["pinned_bytes"] / MIB for row in rows]
    # white between the hatching: black on the fill would be lost in grey print
    ax.barh(places, pinned, left=read, color=COLOURS[5], height=0.6, hatch="///", edgecolor="white", linewidth=0,
            label="pinned by views")  # fmt: skip
    formula = [row["formula_bytes"] / MIB for row in rows]
    ax.plot(formula, places, color=INK, marker="|", markersize=14, markeredgewidth=1.5, linestyle="none",
            label="formula")  # fmt: skip
    ax.set_yticks(places, [row["cache"] for row in rows])
    ax.invert_yaxis()
    ax.set(xlabel="held (MiB)")
    return ax


def draw_growth(rows: list[Row], ax: Axes) -> Axes:
    """Bytes held in MiB against context, one line a kind of cache, and the full cache's formula as a dotted line.

    Rows need ``cache``, ``context``, ``formula_bytes``, ``measured_bytes``.
    """
    for i, cache in enumerate(dict.fromkeys(row["cache"] for row in rows)):
        points = sorted((row for row in rows if row["cache"] == cache), key=lambda row: row["context"])
        ax.plot(
            [row["context"] for row in points],
            [row["measured_bytes"] / MIB for row in points],
            **look(i) | {"markersize": 7 - i, "markerfacecolor": "none"},
            label=cache,
        )
    first = sorted((row for row in rows if row["cache"] == rows[0]["cache"]), key=lambda row: row["context"])
    contexts = [row["context"] for row in first]
    ax.plot(
        contexts, [row["formula_bytes"] / MIB for row in first], color=INK, linestyle=DOTS, linewidth=1, label="formula"
    )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(contexts, [f"{context:,}" for context in contexts])
    ax.yaxis.set_major_formatter("{x:,g}")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.set(xlabel="context (tokens)", ylabel="held (MiB)")
    return ax


def figure(rows: list[Row], run: dict[str, Any], *, width: float = 5.0, title: bool = True) -> Figure:
    """One panel, at the longest context."""
    context = max(row["context"] for row in rows)
    with styled():
        fig, (ax,) = panels(width, 2.8)
        draw([row for row in rows if row["context"] == context], ax)
        fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        what = f"caches of {context:,} tokens, batch {run['batch']:,}, {run['dtype']}"
        return titled(fig, f"{run['model']}: {what}") if title else fig
