"""How much does a bounded cache lose? The loss beyond the full pass for every window and number of sinks."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvprobe.plots.style import DOTS, INK, TWO_COLUMNS, error_bars, legend_above, look, panels, styled, titled
from kvprobe.results.phrases import sinks_of
from kvprobe.results.result import Row

CHOICES = {"first": "the first tokens", "bos": "BOS", "random": "tokens at random", "heaviest": "the heaviest keys"}


def draw(rows: list[Row], ax: Axes) -> Axes:
    """Points with 95 % intervals: windows across and one line a number of sinks, or sinks across for one window.

    Rows need ``window``, ``n_sink``, ``delta``, ``delta_low``, ``delta_high``; with several ``sink_choice``, each has a
    line that starts at the row without sinks. The full pass is the line at zero, and a second line shows it without its
    learned sink logits.
    """
    cells = [row for row in rows if row["window"] is not None]
    several = len({row["window"] for row in cells}) > 1
    across, series = ("window", "n_sink") if several else ("n_sink", "window")
    ticks = sorted({row[across] for row in cells})
    choices: list[Any] = list(dict.fromkeys(row.get("sink_choice") for row in cells if row["n_sink"])) or [None]
    groups = [(group, choice) for group in sorted({row[series] for row in cells}) for choice in choices]
    if several:
        # without sinks there is nothing to choose
        groups = [(group, choice) for group, choice in groups if group or choice == choices[0]]
    ax.axhline(0, color=INK, linewidth=1, linestyle=DOTS, label="full context")
    for row in rows:
        if row["window"] is None and row.get("sink_logits_dropped"):
            ax.axhline(row["delta"], color=INK, linewidth=1, linestyle="-.", label="full context, sink logits dropped")
    for i, (group, choice) in enumerate(groups):
        points = sorted(
            (row for row in cells if row[series] == group and (not row["n_sink"] or row.get("sink_choice") == choice)),
            key=lambda row: row[across],
        )
        # side by side, so that intervals do not cover each other
        places = [ticks.index(row[across]) + 0.12 * (i - (len(groups) - 1) / 2) for row in points]
        name = sinks_of(group) if several else CHOICES[choice] if len(choices) > 1 else f"window {group:,}"
        name += f", {CHOICES[choice]}" if several and group and len(choices) > 1 else ""
        ax.errorbar(
            places, [row["delta"] for row in points], error_bars(points), **look(i), capsize=3, elinewidth=1, label=name
        )
    ax.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks])
    ax.set(
        xlabel="window (tokens)" if several else f"sinks beside a window of {cells[0]['window']:,} tokens",
        ylabel="loss beyond full context\n(nat per token, 95 % intervals)",
        xlim=(-0.5, len(ticks) - 0.5),
    )
    legend_above(ax)
    return ax


def figure(rows: list[Row], run: dict[str, Any], *, width: float = 5.0, title: bool = True) -> Figure:
    """One panel, wide enough to be readable beside text."""
    with styled():
        fig, (ax,) = panels(width, 3.2 if width >= TWO_COLUMNS else 3.0)
        draw(rows, ax)
        targets = f"targets {run['score_from'] + 1:,} to {run['n_tokens'] - 1:,} of {run['passage']}"
        return titled(fig, f"{run['model']}: {run['positions']} positions, {targets}") if title else fig
