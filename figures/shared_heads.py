"""What do query heads share? A drawing: the same query heads over eight, two and one KV head.

python -m figures.shared_heads --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import explained


def draw(width: float) -> Figure:
    """Multi-head, grouped-query and multi-query attention."""
    return explained.sharing_figure(width=width)


PICTURE = Picture("shared_heads", draw)

if __name__ == "__main__":
    PICTURE.main()
