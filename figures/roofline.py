"""Which limit do prefill and decode run into on this machine? From results/roofline.json: the roof and measured points.

python -m figures.roofline --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import roofline
from kvprobe.results.result import Result


def draw(result: Result, width: float) -> Figure:
    """FLOP/s against arithmetic intensity under the measured ceilings."""
    return roofline.figure(result.rows, result.run, width=width, title=False)


PICTURE = Picture("roofline", draw, needs="roofline", numbers="ms_median flops intensity fraction_of_ceiling")

if __name__ == "__main__":
    PICTURE.main()
