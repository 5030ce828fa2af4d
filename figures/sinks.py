"""How much attention is on token 0, by layer, and by layer and head? From results/sinks.json.

python -m figures.sinks --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import sinks
from kvprobe.results.result import Result


def draw(result: Result, width: float) -> Figure:
    """Bars by layer, and the map of heads."""
    return sinks.figure(result.rows, result.run, width=width, title=False)


PICTURE = Picture("sinks", draw, needs="sinks", arguments="MODEL --text bundled", numbers="layer mass uniform")

if __name__ == "__main__":
    PICTURE.main()
