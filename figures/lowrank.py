"""What does a small rank cost in loss, from which basis? From results/lowrank.json: all passages together.

python -m figures.lowrank --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.experiments.lowrank import pooled
from kvprobe.plots import lowrank
from kvprobe.results.result import Result


def draw(result: Result, width: float) -> Figure:
    """One line a basis, with 95 % intervals."""
    return lowrank.figure(pooled(result.rows), result.run, width=width, title=False)


PICTURE = Picture(
    "lowrank", draw, needs="lowrank", arguments="MODEL --text bundled", numbers="loss delta delta_low delta_high"
)

if __name__ == "__main__":
    PICTURE.main()
