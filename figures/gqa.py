"""What does sharing keys and values cost in quality? From results/gqa.json: loss against cache bytes, with intervals.

python -m figures.gqa --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import gqa
from kvprobe.plots.style import TWO_COLUMNS, legend_above, panels, styled, titled
from kvprobe.results.phrases import PUBLISHED, training_of
from kvprobe.results.result import Result


def draw(result: Result, width: float) -> Figure:
    """Best validation loss of each number of KV heads, with the interval of its mean, and every seed."""
    with styled():
        figure, (ax,) = panels(width, 3.2 if width >= TWO_COLUMNS else 2.8)
        gqa.draw_training(result.rows, result.run, ax)
        # say so if it is not the published training
        said = [training_of(result.run)] if result.run["protocol"] != PUBLISHED else []
        if missing := len(result.run["missing"]):
            said.append(f"not finished: {missing} more models to train")
        legend_above(ax, ncols=3)
        return titled(figure, "; ".join(said)) if said else figure


PICTURE = Picture(
    "gqa", draw, needs="gqa", arguments="--cells results/gqa", hours=True, numbers="best_val_loss cache_bytes_per_token"
)

if __name__ == "__main__":
    PICTURE.main()
