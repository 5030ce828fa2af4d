"""Which lever buys the most bytes for the least loss? Loss against cache bytes a token, and the front of the best."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kvprobe.plots.cache import LOOK
from kvprobe.plots.style import DOTS, INK, TWO_COLUMNS, error_bars, panels, styled, titled
from kvprobe.results.result import Row
from kvprobe.shape.cache_bytes import Amount

# by kind and basis: the label of one kind of mark, and the field that its marks are numbered with
SERIES: dict[tuple[str, str | None], tuple[str, str | None]] = {
    ("model", None): ("as it is", None),
    ("window", None): ("window of that many tokens, and sinks", "window"),
    ("latent", "oracle"): ("rank, basis of the scored tokens", "rank"),
    ("latent", "prefix"): ("rank, basis of tokens before them", "rank"),
    ("latent", "heldout"): ("rank, basis of later tokens", "rank"),
    ("bits", None): ("stored in 8 or 4 bits", "bits"),
}
# where the number is, on a different side for each kind: above the interval, right of the mark, below the interval
SIDES = {"window": (0, 2, "center", "bottom"), "latent": (5, 0, "left", "center"), "bits": (0, -3, "center", "top")}


def draw(rows: list[Row], ax: Axes) -> Axes:
    """One mark a lever with the 95 % interval of its loss, and the front of rows that no other beats in both.

    Rows need ``lever``, ``kind``, ``basis``, ``bytes_per_token``, ``loss``, ``delta``, ``delta_low``, ``delta_high``,
    ``on_front``, and the number of each kind of lever: ``window``, ``rank``, ``bits``.
    """
    now = next(row for row in rows if row["kind"] == "model")
    ax.axhline(now["loss"], color=INK, linewidth=1, linestyle=DOTS, label="loss as it is", zorder=1)
    for kind, basis in dict.fromkeys((row["kind"], row["basis"]) for row in rows):
        points = [row for row in rows if (row["kind"], row["basis"]) == (kind, basis)]
        colour, marker, _ = LOOK[kind]
        name, number = SERIES[kind, basis]
        ax.errorbar(
            [row["bytes_per_token"] for row in points],
            [row["loss"] for row in points],
            yerr=error_bars(points),
            color=colour,
            marker=marker,
            # open if the basis was fitted to the scored tokens
            markerfacecolor="none" if basis == "oracle" else colour,
            markersize=5,
            linestyle="none",
            elinewidth=0.8,
            capsize=2,
            label=name,
        )
        if number is None:
            continue
        right, up, side, level = SIDES[kind]
        end = {"bottom": "delta_high", "center": "delta", "top": "delta_low"}[level]
        for row in points:
            ax.annotate(
                f"{row[number]:,}",
                (row["bytes_per_token"], row["loss"] - row["delta"] + row[end]),
                xytext=(right, up),
                textcoords="offset points",
                ha=side,
                va=level,
                fontsize=6,
                color=INK,
                # keep the dotted line out of the number
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
            )
    front = sorted((row for row in rows if row["on_front"]), key=lambda row: row["bytes_per_token"])
    ax.step(
        [row["bytes_per_token"] for row in front],
        [row["loss"] for row in front],
        where="post",
        color=INK,
        linewidth=1,
        label="front: none better in both",
        zorder=1,
    )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: str(Amount(round(value)))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.margins(0.12)
    ax.set(
        xlabel="cache bytes a token, its basis counted",
        ylabel="loss (nat per token; bars: 95 %\nof the difference to as it is)",
    )
    return ax


def figure(rows: list[Row], run: dict[str, Any], *, width: float = TWO_COLUMNS, title: bool = True) -> Figure:
    """One panel with its legend below."""
    with styled():
        fig, (ax,) = panels(width, 3.6 if width >= TWO_COLUMNS else 3.9)
        draw(rows, ax)
        ncols = 3 if width >= TWO_COLUMNS else 1
        fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=ncols)
        return titled(fig, f"{run['model']}: levers on its KV cache, measured") if title else fig
