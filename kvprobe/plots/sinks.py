"""How much of each layer's attention goes to token 0? Bars against the uniform line, and a layer × head map."""

from typing import Any

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvprobe.plots.style import COLOURS, HEAT, INK, TWO_COLUMNS, legend_above, panels, styled, titled
from kvprobe.results.result import Row

# a larger map is one bitmap in a vector file: a path for each cell would be megabytes
VECTOR_CELLS = 2000


def draw_layers(rows: list[Row], ax: Axes) -> Axes:
    """Mean mass by layer as bars, the uniform reference as a line; rows need ``layer``, ``mass``, ``uniform``."""
    layers = [row["layer"] for row in rows]
    bars = ax.bar(layers, [row["mass"] for row in rows], color=COLOURS[0], width=0.8, label="attention on token 0")
    # a step as wide as its bar: local layers have another reference
    (line,) = ax.step(
        layers, [row["uniform"] for row in rows], where="mid", color=COLOURS[5], linewidth=1.6, label="spread evenly"
    )
    ax.set(xlabel="layer", ylabel="mean attention weight", ylim=(0, 1), xlim=(min(layers) - 0.6, max(layers) + 0.6))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_above(ax, handles=[bars, line])
    return ax


def draw_heads(rows: list[Row], ax: Axes) -> Axes:
    """Mass of every head as a map, layers down and heads across; rows need ``layer`` and ``head_mass``."""
    layers = [row["layer"] for row in rows]
    grid = [row["head_mass"] for row in rows]
    heads = range(len(grid[0]))
    every = max(1, -(-len(layers) // 15))
    sns.heatmap(
        grid,
        ax=ax,
        vmin=0,
        vmax=1,
        cmap=HEAT,
        xticklabels=max(1, -(-len(heads) // 16)),
        yticklabels=[str(layer) if i % every == 0 else "" for i, layer in enumerate(layers)],
        cbar_kws={"label": "attention on token 0"},
        rasterized=len(layers) * len(heads) > VECTOR_CELLS,
    )
    bar = ax.collections[0].colorbar
    assert bar is not None
    bar.ax.tick_params(color=INK)
    ax.tick_params(left=False, bottom=False, labelrotation=0)
    ax.set(xlabel="head", ylabel="layer")
    return ax


def figure(rows: list[Row], run: dict[str, Any], *, width: float = TWO_COLUMNS, title: bool = True) -> Figure:
    """Both panels, side by side in two columns and stacked in one."""
    with styled():
        fig, (first, second) = panels(width, 2.9, 2, ratios=(3, 2))
        draw_layers(rows, first)
        draw_heads(rows, second)
        queries = f"queries {run['queries_from']:,} to {run['n_tokens'] - 1:,} of {run['passage']}"
        return titled(fig, f"{run['model']}: {queries}") if title else fig
