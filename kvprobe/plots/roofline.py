"""Which limit does each phase run into, and how near is it? FLOP/s against arithmetic intensity, under the roof."""

from matplotlib.axes import Axes

from kvprobe.plots.style import COLOURS, DOTS, INK, LINES, MARKERS, legend_above
from kvprobe.results import Row

# phase -> colour, marker and dashes
LOOK = {
    "naive": (COLOURS[5], MARKERS[1], "-."),
    "cached": (COLOURS[0], MARKERS[0], LINES[0]),
    "prefill": (COLOURS[2], MARKERS[2], LINES[2]),
}


def draw(rows: list[Row], ax: Axes, *, bandwidth: float, matrix_rate: float) -> Axes:
    """One mark a row under the measured roof: the slope is ``bandwidth`` (bytes/s), the flat part ``matrix_rate``.

    Rows need ``phase``, ``intensity`` (FLOPs a byte), ``flops_per_s``; both rates of the roof are those of one run.
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
        mine = [row for row in rows if row["phase"] == phase]
        if mine:
            ax.plot(
                [row["intensity"] for row in mine],
                [row["flops_per_s"] / giga for row in mine],
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
