"""How long does a token take as the context grows, with a cache and without? From results/latency.json; log–log.

python -m figures.latency --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import latency, roofline
from kvprobe.plots.style import TWO_COLUMNS, panels, styled, titled
from kvprobe.results.phrases import with_busy
from kvprobe.results.result import Result


def draw(result: Result, width: float) -> Figure:
    """Medians with quartiles, and the cached step's lower bound; the title says if the machine was busy."""
    rows = [roofline.with_rates(row) for row in result.rows if row["batch"] == result.run["batches"][0]]
    if not rows:
        raise ValueError(f"no row has batch {result.run['batches'][0]}")
    with styled():
        figure, (ax,) = panels(width, 3.2 if width >= TWO_COLUMNS else 2.9)
        latency.draw(rows, ax)
        return titled(figure, with_busy("", result.run))


PICTURE = Picture(
    "latency", draw, needs="latency", numbers="context batch ms_median ms_low ms_high flops fraction_of_ceiling"
)

if __name__ == "__main__":
    PICTURE.main()
