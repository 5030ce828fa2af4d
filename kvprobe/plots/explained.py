"""What does a cached step save, and what do query heads share? Two drawings that measure nothing."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from kvprobe.plots.style import COLOURS, INK, ONE_COLUMN, TWO_COLUMNS, panels, styled
from kvprobe.results.phrases import counted

TOKENS = ("The", "tide", "came", "in", "over")
# light, and still apart from white in grey print
PALE = "#CFE3F1"


def draw_steps(ax: Axes, *, cached: bool, tokens: tuple[str, ...] = TOKENS, n_steps: int = 3) -> Axes:
    """The last ``n_steps`` steps over ``tokens``, one a row: which keys and values are computed, and which are read.

    A filled box is computed in that step, a pale one is read from the cache.
    """
    n_tokens = len(tokens)
    for column, token in enumerate(tokens):
        ax.text(column + 0.5, 0.35, token, ha="center", va="bottom", fontsize=7, color=INK)
    for step in range(n_steps):
        newest = n_tokens - n_steps + step
        top = -0.1 - 1.15 * step
        for column in range(newest + 1):
            made = column == newest or not cached
            _box(ax, column + 0.08, top - 0.8, 0.84, 0.8, "k, v", made=made)
        _arrow(ax, (n_tokens + 0.6, top - 0.4), (newest + 1.05, top - 0.4))
        ax.text(n_tokens + 0.7, top - 0.4, f"query {newest + 1}", ha="left", va="center", fontsize=7, color=INK)
    ax.set(xlim=(-0.1, n_tokens + 2.1), ylim=(-0.1 - 1.15 * n_steps, 0.95))
    ax.set_title("with a cache: one computed, the others read" if cached else "without: every step recomputes all")
    ax.set_axis_off()
    return ax


def draw_sharing(ax: Axes, *, n_heads: int, n_kv_heads: int) -> Axes:
    """Query heads in a row above the KV heads that they read, and how many vectors a token keeps in each layer."""
    group = n_heads // n_kv_heads
    for head in range(n_heads):
        _box(ax, head + 0.12, 1.6, 0.76, 0.7, "q", made=None)
        shared = (head // group + 0.5) * group
        ax.plot([head + 0.5, shared], [1.6, 0.78], color=INK, linewidth=0.8)
    for kv_head in range(n_kv_heads):
        middle = (kv_head + 0.5) * group
        width = 0.92 if group == 1 else 1.3
        _box(ax, middle - width / 2, 0, width, 0.78, "k, v" if group > 1 else "kv", made=True)
    form = {n_heads: "multi-head (MHA)", 1: "multi-query (MQA)"}.get(n_kv_heads, "grouped-query (GQA)")
    ax.set_title(form)
    ax.text(
        n_heads / 2,
        -0.3,
        f"{counted(n_kv_heads, 'KV head')}: {2 * n_kv_heads} vectors a token and layer",
        ha="center",
        va="top",
        fontsize=7,
        color=INK,
    )
    ax.set(xlim=(-0.1, n_heads + 0.1), ylim=(-0.95, 2.45))
    ax.set_axis_off()
    return ax


def step_figure(*, width: float = TWO_COLUMNS) -> Figure:
    """Both ways, first without a cache, and a legend of the fills."""
    with styled():
        fig, axes = panels(width, 1.9, 2)
        for ax, cached in zip(axes, (False, True), strict=True):
            draw_steps(ax, cached=cached)
        _legend(fig, {"computed in this step": True, "read from the cache": False})
        return fig


def sharing_figure(*, n_heads: int = 8, n_kv_heads: tuple[int, ...] = (8, 2, 1), width: float = TWO_COLUMNS) -> Figure:
    """The same query heads over fewer and fewer KV heads."""
    with styled():
        fig, axes = panels(width, 1.5 if width <= ONE_COLUMN else 1.6, len(n_kv_heads))
        for ax, number in zip(axes, n_kv_heads, strict=True):
            draw_sharing(ax, n_heads=n_heads, n_kv_heads=number)
        return fig


def _box(ax: Axes, x: float, y: float, width: float, height: float, text: str, *, made: bool | None) -> None:
    # None: neither computed nor read, a query
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=COLOURS[0] if made else PALE,
            edgecolor=COLOURS[0],
            linewidth=0.8,
            linestyle=(0, (2, 1)) if made is False else "-",
        )
    )
    # black on pale on any page, since the fill stays pale on a dark one
    colour = "white" if made else "black"
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=6, color=colour)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=7, color=INK, linewidth=0.8))


def _legend(fig: Figure, entries: dict[str, bool]) -> None:
    handles: list[Any] = [
        FancyBboxPatch((0, 0), 1, 1, facecolor=COLOURS[0] if made else PALE, edgecolor=COLOURS[0], linewidth=0.8)
        for made in entries.values()
    ]
    fig.legend(handles, list(entries), loc="outside lower center", ncols=len(entries))
