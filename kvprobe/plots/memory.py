"""Does a cache hold what its formula says? Bytes of each kind, what views pin among them, and the formula."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvprobe.plots.style import COLOURS, INK, styled
from kvprobe.results import Row

MIB = 2**20


def draw(rows: list[Row], ax: Axes) -> Axes:
    """One bar a cache in MiB, the part that views pin at its end, and a mark where the formula is; rows of one context.

    Rows need ``cache``, ``formula_bytes``, ``measured_bytes``, ``pinned_bytes``.
    """
    places = range(len(rows))
    read = [(row["measured_bytes"] - row["pinned_bytes"]) / MIB for row in rows]
    ax.barh(places, read, color=COLOURS[4], height=0.6, label="keys and values")
    pinned = [row["pinned_bytes"] / MIB for row in rows]
    ax.barh(places, pinned, left=read, color=COLOURS[5], height=0.6, hatch="///", label="pinned by views")
    formula = [row["formula_bytes"] / MIB for row in rows]
    ax.plot(formula, places, color=INK, marker="|", markersize=18, linestyle="none", label="formula")
    ax.set_yticks(places, [row["cache"] for row in rows])
    ax.invert_yaxis()
    ax.set(xlabel="held (MiB)")
    return ax


def figure(rows: list[Row], run: dict[str, Any]) -> Figure:
    """One panel, at the longest context."""
    context = max(row["context"] for row in rows)
    with styled():
        fig = Figure(figsize=(5.0, 3.0), layout="constrained")
        ax = draw([row for row in rows if row["context"] == context], fig.subplots())
        fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        title = f"{run['model']}: caches of {context:,} tokens, batch {run['batch']:,}, {run['dtype']}"
        fig.suptitle(title, fontsize=9, color=INK)
    return fig
