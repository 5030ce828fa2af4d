"""How small can the rank be? Loss against rank, one line a basis, and energy against rank, one line a layer."""

from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvprobe.plots.style import DOTS, HEAT, INK, TWO_COLUMNS, error_bars, legend_above, look, panels, styled, titled
from kvprobe.results.phrases import fitted_to
from kvprobe.results.result import Row

BASES = {"oracle": "oracle: the scored tokens", "prefix": "prefix: tokens before them"}
STAGES = {"pre_rope": "keys before RoPE", "post_rope": "keys as attention reads them"}
PARTS = {"kv": "keys and values", "k": "keys", "v": "values"}


def draw_loss(rows: list[Row], ax: Axes, *, fitted: str = "later tokens of the same text") -> Axes:
    """Loss against rank, with 95 % intervals of the difference from the untruncated pass, which is the dotted line.

    One line for each basis and allocation. Rows of one passage need ``rank``, ``loss``, ``delta``, ``delta_low``,
    ``delta_high``, ``basis``, ``allocate``. ``fitted`` is what the basis ``heldout`` was fitted to.
    """
    names = BASES | {"heldout": f"heldout: {fitted}"}
    truncated = [row for row in rows if row["rank"] is not None]
    full = next(row for row in rows if row["rank"] is None)
    ax.axhline(full["loss"], color=INK, linewidth=1, linestyle=DOTS, label="not truncated")
    ranks = sorted({row["rank"] for row in truncated})
    lines = list(dict.fromkeys((row["basis"], row["allocate"]) for row in truncated))
    for i, (basis, allocate) in enumerate(lines):
        points = sorted(
            (row for row in truncated if (row["basis"], row["allocate"]) == (basis, allocate)),
            key=lambda row: row["rank"],
        )
        ax.errorbar(
            # side by side, so that intervals do not cover each other
            [row["rank"] * (1 + 0.02 * (i - (len(lines) - 1) / 2)) for row in points],
            [row["loss"] for row in points],
            yerr=error_bars(points),
            **look(i),
            capsize=3,
            elinewidth=1,
            label=str(names.get(basis, basis)) + (", rank by energy" if allocate == "energy" else ""),
        )
    ax.set_xscale("log")
    # of ranks too close to label, only the first has a label
    named = [rank for i, rank in enumerate(ranks) if i == 0 or rank >= 1.15 * ranks[i - 1]]
    ax.set_xticks(ranks, [f"{rank:,}" if rank in named else "" for rank in ranks])
    ax.xaxis.set_minor_locator(NullLocator())
    # room around a single rank, so that lines drawn side by side stay together
    ax.set(xlabel=f"rank (of {truncated[0]['width']:,})", xlim=(ranks[0] / 1.25, ranks[-1] * 1.25))
    ax.set_ylabel("loss (nat per token; bars: 95 %\nof the difference to not truncated)")
    legend_above(ax, narrow=1)
    return ax


def draw_energy(rows: list[Row], ax: Axes) -> Axes:
    """Energy kept against rank, one line a layer, darker for earlier ones; rows of one stage need ``layer``, ``rank``,
    ``energy``.
    """
    layers = sorted({row["layer"] for row in rows})
    colours = mpl.colormaps[HEAT].resampled(len(layers))
    for i, layer in enumerate(layers):
        points = sorted((row for row in rows if row["layer"] == layer), key=lambda row: row["rank"])
        ax.plot(
            [row["rank"] for row in points],
            [row["energy"] for row in points],
            color=colours(i),
            linewidth=1,
            label=f"layer {layer}",
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set(xlabel="rank", ylabel="energy kept")
    return ax


def figure(rows: list[Row], run: dict[str, Any], *, width: float = 5.0, title: bool = True) -> Figure:
    """One panel of losses."""
    with styled():
        fig, (ax,) = panels(width, 3.2 if width >= TWO_COLUMNS else 3.0)
        draw_loss(rows, ax, fitted=fitted_to(run))
        targets = f"{run['n_targets']:,} targets of {run['passage']}"
        if rows[0].get("passage") == "all":
            n_passages = len(run["passages"])
            targets = f"{n_passages * run['n_targets']:,} targets of {n_passages} passages"
            ax.set_xlabel(f"{ax.get_xlabel()}, {targets}")
        return titled(fig, f"{run['model']}: {PARTS[rows[0]['of']]}, {targets}") if title else fig


def spectrum_figure(rows: list[Row], run: dict[str, Any], *, width: float = TWO_COLUMNS, title: bool = True) -> Figure:
    """One panel of energies a stage, first before RoPE, with one colour bar for the layers."""
    stages = sorted({row["stage"] for row in rows}, key=list(STAGES).index)
    layers = sorted({row["layer"] for row in rows})
    with styled():
        fig, axes = panels(width, 2.9, len(stages), sharex=True, sharey=True)
        for ax, stage in zip(axes, stages, strict=True):
            draw_energy([row for row in rows if row["stage"] == stage], ax)
            ax.set_title(STAGES[stage])
        fig.colorbar(ScalarMappable(Normalize(layers[0], max(layers[-1], layers[0] + 1)), HEAT), ax=axes, label="layer")
        for ax in axes:
            ax.label_outer()
        return titled(fig, f"{run['model']}: {PARTS[rows[0]['of']]} over {run['passage']}" if title else "")
