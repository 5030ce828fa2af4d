"""Which limit do prefill and decode run into on this machine? From results/roofline.json: the roof and measured points.

python -m figures.roofline --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import latency, roofline
from kvprobe.plots.style import TWO_COLUMNS, panels, styled
from kvprobe.results import Result


def draw(result: Result, width: float) -> Figure:
    """FLOP/s against arithmetic intensity under the measured ceilings."""
    run = result.run
    rows = [latency.with_rates(row) for row in result.rows]
    with styled():
        figure, (ax,) = panels(width, 3.2 if width >= TWO_COLUMNS else 2.8)
        roofline.draw(rows, ax, bandwidth=run["bandwidth_bytes_per_s"], matrix_rate=run["matrix_flops_per_s"])
    return figure


PICTURE = Picture("roofline", draw, needs="roofline")

if __name__ == "__main__":
    PICTURE.main()
