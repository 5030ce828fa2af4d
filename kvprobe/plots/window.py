"""How much does a bounded cache lose? The loss beyond the untouched pass for every window and number of sinks."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvprobe.plots.style import COLOURS, INK, MARKERS, styled
from kvprobe.results import Row


def draw(rows: list[Row], ax: Axes) -> Axes:
    """Points with 95 % intervals: windows across and a colour per number of sinks, or sinks across for one window.

    Rows need ``window``, ``n_sink``, ``delta``, ``delta_low``, ``delta_high``; the full pass is the line at zero,
    dotted where it stands without its learned sink logits.
    """
    cells = [row for row in rows if row["window"] is not None]
    several = len({row["window"] for row in cells}) > 1
    across, series = ("window", "n_sink") if several else ("n_sink", "window")
    ticks = sorted({row[across] for row in cells})
    groups = sorted({row[series] for row in cells})
    ax.axhline(0, color=INK, linewidth=1, linestyle="--", label="full context")
    for row in rows:
        if row["window"] is None and row.get("sink_logits_dropped"):
            ax.axhline(row["delta"], color=INK, linewidth=1, linestyle=":", label="full context, sink logits dropped")
    for i, group in enumerate(groups):
        mine = sorted((row for row in cells if row[series] == group), key=lambda row: row[across])
        # side by side, so that intervals do not cover each other
        places = [ticks.index(row[across]) + 0.12 * (i - (len(groups) - 1) / 2) for row in mine]
        below = [row["delta"] - row["delta_low"] for row in mine]
        above = [row["delta_high"] - row["delta"] for row in mine]
        ax.errorbar(
            places,
            [row["delta"] for row in mine],
            yerr=[below, above],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            linewidth=1.2,
            capsize=3,
            label=_sinks(group) if several else f"window {group:,}",
        )
    ax.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks])
    ax.set(
        xlabel="window (tokens)" if several else "sinks (tokens beside the window)",
        ylabel="loss beyond full context (nat per token)",
        xlim=(-0.5, len(ticks) - 0.5),
    )
    ax.legend(loc="best")
    return ax


def figure(rows: list[Row], run: dict[str, Any]) -> Figure:
    """One panel, as wide as it needs to be readable beside text."""
    with styled():
        fig = Figure(figsize=(5.0, 3.2), layout="constrained")
        draw(rows, fig.subplots())
        fig.suptitle(
            f"{run['model']}: {run['positions']} positions, targets {run['score_from'] + 1:,} to "
            f"{run['n_tokens'] - 1:,} of {run['passage']}",
            fontsize=9,
            color=INK,
        )
    return fig


def _sinks(number: int) -> str:
    return "no sinks" if number == 0 else f"{number} sink{'s' if number > 1 else ''}"
