"""What does sharing keys and values cost in quality? From results/gqa.json: loss against cache bytes, with intervals.

python -m figures.gqa --results results --out figures/drawn
"""

from textwrap import fill

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.experiments.words import PUBLISHED, training_of
from kvprobe.plots import gqa
from kvprobe.plots.style import TWO_COLUMNS, legend_above, panels, styled
from kvprobe.results import Result


def draw(result: Result, width: float) -> Figure:
    """Best validation loss of each number of KV heads, with the interval of its mean, and every seed."""
    with styled():
        figure, (ax,) = panels(width, 3.2 if width >= TWO_COLUMNS else 2.8)
        gqa.draw(result.run["summary"], ax, cells=result.rows)
        if result.run["protocol"] != PUBLISHED:
            # not what a reader of the paper takes it for
            ax.set_title(fill(training_of(result.run), 60 if width >= TWO_COLUMNS else 40), fontsize="small")
        legend_above(ax, ncols=3)
    return figure


PICTURE = Picture("gqa", draw, needs="gqa", arguments="--cells results/gqa", hours=True)

if __name__ == "__main__":
    PICTURE.main()
