"""Which limit does each phase run into, and how close is it? FLOP/s against arithmetic intensity, under the roof."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvprobe.plots.style import COLOURS, DOTS, INK, LINES, MARKERS, TWO_COLUMNS, legend_above, panels, styled, titled
from kvprobe.results.phrases import with_busy
from kvprobe.results.result import Row

# phase -> colour, marker and dashes
LOOK = {
    "naive": (COLOURS[5], MARKERS[1], "-."),
    "cached": (COLOURS[0], MARKERS[0], LINES[0]),
    "prefill": (COLOURS[2], MARKERS[2], LINES[2]),
}


def draw(rows: list[Row], ax: Axes, *, bandwidth: float, matrix_rate: float) -> Axes:
    """One mark a row under the measured roof: the slope is ``bandwidth`` (bytes/s), the flat part ``matrix_rate``.

    Rows need ``phase``, ``intensity`` (FLOPs a byte), ``flops_per_s``; the roof's two rates come from one run.
    """
    ridge, giga = matrix_rate / bandwidth, 1e9
    reach = [row["intensity"] for row in rows] + [ridge]
    left, right = min(reach) / 3, max(reach) * 3
    ax.plot(
        [left, ridge, right],
        [left * bandwidth / giga, matrix_rate / giga, matrix_rate / giga],
        color=INK,
        linewidth=1.2,
    )
    ax.axvline(ridge, color=INK, linewidth=0.8, linestyle=DOTS)
    ax.annotate(
        f"ridge {ridge:.1f}",
        (ridge, 0),
        xycoords=("data", "axes fraction"),
        xytext=(3, 4),
        textcoords="offset points",
        fontsize=7,
        color=INK,
    )
    for phase, (colour, marker, _) in LOOK.items():
        points = [row for row in rows if row["phase"] == phase]
        if points:
            ax.plot(
                [row["intensity"] for row in points],
                [row["flops_per_s"] / giga for row in points],
                color=colour,
                marker=marker,
                markersize=5,
                linestyle="none",
                label=phase,
            )
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/B)", ylabel="GFLOP/s", xlim=(left, right))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,g}")
    legend_above(ax, ncols=3, narrow=3)
    return ax


def with_rates(row: Row) -> Row:
    """``row`` with the numbers that are drawn: ``flops_per_s``, and ``ms_ceiling`` of one run."""
    seconds = row["ms_median"] / 1e3
    return row | {
        "flops_per_s": row["flops"] / seconds,
        "ms_ceiling": row["ms_median"] * row["fraction_of_ceiling"],
    }


def figure(rows: list[Row], run: dict[str, Any], *, width: float = 5.0, title: bool = True) -> Figure:
    """One panel of a result's rows under the ceilings in its record; the heading says if the machine was busy."""
    with styled():
        fig, (ax,) = panels(width, 3.2 if width >= TWO_COLUMNS else 2.8)
        roof = {"bandwidth": run["bandwidth_bytes_per_s"], "matrix_rate": run["matrix_flops_per_s"]}
        draw([with_rates(row) for row in rows], ax, **roof)
        where = run["cpu"] if run["device"] == "cpu" else run["device"]
        return titled(fig, with_busy(f"{run['model']} in {run['dtype']} on {where}" if title else "", run))
