"""Does a cache hold what its formula says? The memory bill by context, and by kind of cache. From results/memory.json.

python -m figures.memory --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import memory
from kvprobe.plots.style import TWO_COLUMNS, panels, styled
from kvprobe.results.result import Result


def draw(result: Result, width: float) -> Figure:
    """Bytes held against context, and at the longest context the part that nothing reads."""
    longest = max(row["context"] for row in result.rows)
    with styled():
        figure, (growth, kinds) = panels(width, 2.9, 2)
        memory.draw_growth(result.rows, growth)
        memory.draw([row for row in result.rows if row["context"] == longest], kinds)
        kinds.set_xlabel(f"held at {longest:,} tokens (MiB)")
        lines, bars = growth.get_legend_handles_labels(), kinds.get_legend_handles_labels()
        wide = width >= TWO_COLUMNS
        figure.legend(*lines, loc="outside upper left", ncols=4 if wide else 2)
        figure.legend(*bars, loc="outside lower right", ncols=3 if wide else 2)
    return figure


PICTURE = Picture("memory", draw, needs="memory", numbers="context formula_bytes measured_bytes pinned_bytes")

if __name__ == "__main__":
    PICTURE.main()
