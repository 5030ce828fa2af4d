"""What does a cache save, and what a batch? Milliseconds a token by context, tokens/s by batch, and the roofline."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from kvprobe.plots import roofline
from kvprobe.plots.style import DOTS, INK, TWO_COLUMNS, error_bars, legend_above, look, panels, styled, titled
from kvprobe.results.phrases import with_busy
from kvprobe.results.result import Row


def draw(rows: list[Row], ax: Axes) -> Axes:
    """Milliseconds a token against context with quartiles, naive and cached, and the cached step's lower bound.

    Rows of one batch; they need ``phase``, ``context``, ``ms_median``, ``ms_low``, ``ms_high``, ``ms_ceiling``.
    """
    for phase in ("naive", "cached"):
        points = sorted((row for row in rows if row["phase"] == phase), key=lambda row: row["context"])
        if not points:
            continue
        colour, marker, dashes = roofline.LOOK[phase]
        contexts, medians = [row["context"] for row in points], [row["ms_median"] for row in points]
        ax.errorbar(
            contexts,
            medians,
            yerr=error_bars(points, "ms_median", low="ms_low", high="ms_high"),
            color=colour,
            marker=marker,
            linestyle=dashes,
            markersize=4.5,
            linewidth=1.2,
            capsize=3,
            elinewidth=1,
            label=phase,
        )
        if phase == "cached":
            ceilings = [row["ms_ceiling"] for row in points]
            ax.plot(contexts, ceilings, color=colour, linewidth=1.4, linestyle=DOTS, label="cached, at the ceiling")
    ax.set(yscale="log", xlabel="context (tokens)", ylabel="ms a step (median, quartiles)")
    _ticks(ax, [row["context"] for row in rows])
    # first what was measured, then the ceiling
    handles, labels = ax.get_legend_handles_labels()
    legend_above(ax, handles=sorted(handles, key=lambda handle: "ceiling" in labels[handles.index(handle)]))
    return ax


def draw_batches(rows: list[Row], ax: Axes) -> Axes:
    """Tokens/s of the whole batch against the batch size, one line a context; the ceiling is dotted.

    Rows of the cached phase: ``batch``, ``context``, ``tokens_per_s``, ``ceiling_tokens_per_s``.
    """
    for i, context in enumerate(sorted({row["context"] for row in rows})):
        points = sorted((row for row in rows if row["context"] == context), key=lambda row: row["batch"])
        batches = [row["batch"] for row in points]
        looks = look(i)
        ax.plot(batches, [row["tokens_per_s"] for row in points], **looks, label=f"{context:,} tokens")
        ceilings = [row["ceiling_tokens_per_s"] for row in points]
        ax.plot(batches, ceilings, color=looks["color"], linewidth=1.4, linestyle=DOTS)
    ax.set(yscale="log", xlabel="batch (rows decoded at once)", ylabel="tokens/s")
    _ticks(ax, [row["batch"] for row in rows])
    ax.plot([], [], color=INK, linewidth=1.4, linestyle=DOTS, label="ceiling")
    legend_above(ax)
    return ax


def figure(rows: list[Row], run: dict[str, Any], *, width: float | None = None, title: bool = True) -> Figure:
    """Context, batch if there are several, and the roofline, side by side; stacked in one column.

    If the machine was busy, the heading says so, with or without a title.
    """
    rows = [roofline.with_rates(row) for row in rows if row["phase"] in roofline.LOOK]
    cached = [row for row in rows if row["phase"] == "cached"]
    by_batch = len({row["batch"] for row in cached}) > 1
    first = [row for row in rows if row["batch"] == run["batches"][0]]
    by_context = any(row["phase"] != "prefill" for row in first)
    n_panels = by_context + by_batch + 1
    with styled():
        fig, panes = panels(width or TWO_COLUMNS * max(n_panels, 2) / 2, 2.9, n_panels)
        axes = iter(panes)
        if by_context:
            draw(first, next(axes))
        if by_batch:
            draw_batches(cached, next(axes))
        roofline.draw(rows, next(axes), bandwidth=run["bandwidth_bytes_per_s"], matrix_rate=run["matrix_flops_per_s"])
        where = run["cpu"] if run["device"] == "cpu" else run["device"]
        measured = f"{run['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s, {run['matrix_flops_per_s'] / 1e9:,.0f} GFLOP/s"
        heading = f"{run['model']}, {run['dtype']} on {where}: {measured} measured" if title else ""
        return titled(fig, with_busy(heading, run))


def _ticks(ax: Axes, values: list[int]) -> None:
    """Ticks: the measured values across, and plain numbers upwards, 1, 2 and 5 of every power of ten."""
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xscale("log", base=2)
    ticks = sorted(set(values))
    ax.set_xticks(ticks)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_minor_locator(NullLocator())
