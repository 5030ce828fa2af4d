"""What does each attention function cost? Loss beyond the full pass, and how far the next-token distribution is."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvprobe.plots.style import COLOURS, DOTS, INK, TWO_COLUMNS, error_bars, legend_above, panels, styled, titled
from kvprobe.results.result import Row


def draw_loss(rows: list[Row], ax: Axes) -> Axes:
    """A point a function with its 95 % interval; rows need ``attend``, ``delta``, ``delta_low``, ``delta_high``."""
    own = [row for row in rows if row["attend"] is not None]
    ax.axvline(0, color=INK, linewidth=1, linestyle=DOTS, label="full pass")
    ax.errorbar(
        [row["delta"] for row in own],
        range(len(own)),
        xerr=error_bars(own),
        color=COLOURS[0],
        marker="o",
        linestyle="none",
        capsize=3,
        elinewidth=1,
        label="95 % interval",
    )
    ax.set_yticks(range(len(own)), [row["attend"] for row in own])
    ax.set(xlabel="loss beyond the full pass\n(nat per token)", ylim=(len(own) - 0.5, -0.7))
    legend_above(ax)
    return ax


def draw_divergence(rows: list[Row], ax: Axes) -> Axes:
    """Bars of the mean divergence, a mark at the 99th percentile, and top-1 agreement written beside it.

    Rows need ``attend``, ``kld_mean``, ``kld_p99``, ``top1_agreement``.
    """
    own = [row for row in rows if row["attend"] is not None]
    ax.barh(range(len(own)), [row["kld_mean"] for row in own], color=COLOURS[0], height=0.5, label="mean")
    ax.plot([row["kld_p99"] for row in own], range(len(own)), "|", color=COLOURS[5], label="99th percentile")
    for place, row in enumerate(own):
        ax.annotate(
            f"same first token: {row['top1_agreement']:.1%}",
            (0, place - 0.3),
            xytext=(2, 1),
            textcoords="offset points",
            va="bottom",
            fontsize=6,
            color=INK,
        )
    ax.set_yticks(range(len(own)), [row["attend"] for row in own])
    ax.set(xlabel="KL divergence from the full pass\n(nat per token)", ylim=(len(own) - 0.5, -0.7))
    ax.set_xlim(left=0)
    legend_above(ax)
    return ax


def figure(rows: list[Row], run: dict[str, Any], *, width: float = TWO_COLUMNS, title: bool = True) -> Figure:
    """Both panels, side by side in two columns and stacked in one."""
    with styled():
        fig, (first, second) = panels(width, 1.4 + 0.35 * len(rows), 2)
        draw_loss(rows, first)
        draw_divergence(rows, second)
        targets = f"targets {run['score_from'] + 1:,} to {run['n_tokens'] - 1:,} of {run['passage']}"
        return titled(fig, f"{run['model']}: {targets}") if title else fig
