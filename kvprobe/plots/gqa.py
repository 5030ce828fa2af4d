"""What does a smaller cache cost? Loss against cache bytes a token, one point for each number of KV heads."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvprobe.plots.style import COLOURS, INK, error_bars, look, panels, styled, titled
from kvprobe.results.phrases import counted, training_of
from kvprobe.results.result import Row
from kvprobe.shape.cache_bytes import Amount


def draw(
    rows: Sequence[Row],
    ax: Axes,
    *,
    cells: Sequence[Row] = (),
    names: tuple[str, str] = ("mean over seeds", "95 % interval"),
    loss: str = "loss (nat per token)",
) -> Axes:
    """Losses with intervals, one for each number of KV heads, and beside them the ``cells``, one for each seed.

    ``rows`` need ``n_kv_heads``, ``cache_bytes_per_token``, ``mean``, ``low`` and ``high`` (None: no interval);
    ``cells`` need ``cache_bytes_per_token`` and ``best_val_loss``. ``loss`` is the label of the loss axis.
    """
    rows = sorted(rows, key=lambda row: row["cache_bytes_per_token"])
    at = [row["cache_bytes_per_token"] for row in rows]
    sure = [row for row in rows if row["low"] is not None]
    ax.plot(at, [row["mean"] for row in rows], **look(0), label=names[0])
    if sure:
        ax.errorbar(
            [row["cache_bytes_per_token"] for row in sure],
            [row["mean"] for row in sure],
            yerr=error_bars(sure, "mean", low="low", high="high"),
            color=COLOURS[0],
            linestyle="none",
            capsize=3,
            elinewidth=1,
            label=names[1],
        )
    if cells:
        # hollow and to the right, where no interval hides them
        ax.plot(
            [1.06 * cell["cache_bytes_per_token"] for cell in cells],
            [cell["best_val_loss"] for cell in cells],
            color=INK,
            marker="o",
            markersize=3,
            markerfacecolor="none",
            linestyle="none",
            label="one seed",
        )
    ax.set_xscale("log", base=2)
    heads = [counted(row["n_kv_heads"], "KV head") for row in rows]
    ax.set_xticks(at, [f"{Amount(n_bytes)}\n{name}" for n_bytes, name in zip(at, heads, strict=True)])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.margins(x=0.12)
    ax.set(xlabel="cache a token", ylabel=loss)
    ax.legend(loc="best")
    return ax


def draw_training(rows: Sequence[Row], run: dict[str, Any], ax: Axes) -> Axes:
    """The trained cells ``rows``, and the summary in their record ``run``."""
    of = "character" if run["corpus_kind"] == "characters" else "token"
    seeds = {row["n_seeds"] for row in run["summary"]}
    few, many = min(seeds), max(seeds)
    mean = "one seed each" if many == 1 else f"mean over {few if few == many else f'{few} to {many}'} seeds"
    # a single seed is already a point
    cells = rows if many > 1 else ()
    names = (mean, "95 % interval")
    return draw(run["summary"], ax, cells=cells, names=names, loss=f"best validation loss (nat per {of})")


def figure(rows: list[Row], run: dict[str, Any], *, width: float = 5.0, title: bool = True) -> Figure:
    """One panel: seeds and their means, or a pretrained model with its heads pooled."""
    with styled():
        fig, (ax,) = panels(width, 3.0)
        if run["pool"]:
            names = ("loss", "95 % interval of the difference")
            draw([_pooled(row, rows[0]) for row in rows], ax, names=names)
            said = f"{run['model']}, {run['passage']}: KV heads pooled, nothing trained"
        else:
            draw_training(rows, run, ax)
            said = training_of(run)
        return titled(fig, said) if title else fig


def _pooled(row: Row, first: Row) -> Row:
    """A pooled row with a summary's fields: the interval is of the difference from the model as it is."""
    low, high = (first["best_val_loss"] + row[end] for end in ("delta_low", "delta_high"))
    if row is first:
        low = high = None
    return row | {"mean": row["best_val_loss"], "low": low, "high": high}
