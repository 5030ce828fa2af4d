"""Which lever buys the most bytes for the least loss? From results/relief_map.json: every lever a point, and the front.

python -m figures.relief_map --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import relief
from kvprobe.results.result import Result


def draw(result: Result, width: float) -> Figure:
    """Loss against cache bytes a token."""
    return relief.figure(result.rows, result.run, width=width, title=False)


PICTURE = Picture(
    "relief_map",
    draw,
    needs="relief_map",
    arguments="MODEL --text bundled",
    numbers="loss delta delta_low delta_high bytes_per_token",
)

if __name__ == "__main__":
    PICTURE.main()
