"""What does a cached step save? A drawing: which keys and values a step computes, and which it reads.

python -m figures.cached_step --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import explained


def draw(width: float) -> Figure:
    """Three steps without a cache and with one."""
    return explained.step_figure(width=width)


PICTURE = Picture("cached_step", draw)

if __name__ == "__main__":
    PICTURE.main()
