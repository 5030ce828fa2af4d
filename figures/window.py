"""What does a window cost in loss, with how many sinks and which? From results/window.json.

python -m figures.window --results results --out figures/drawn
"""

from matplotlib.figure import Figure

from figures._paper import Picture
from kvprobe.plots import window
from kvprobe.plots.style import TWO_COLUMNS, panels, styled
from kvprobe.results.result import Result, Row

# the published grid's window, drawn by sinks if it was measured
PUBLISHED = 256


def draw(result: Result, width: float) -> Figure:
    """The grid with the first tokens as sinks and, if there are several choices of sinks, one window with each."""
    parts = list(_parts(result.rows).values())
    with styled():
        height = 3.0 if width < TWO_COLUMNS or len(parts) > 1 else 3.3
        figure, axes = panels(width, height, len(parts))
        for ax, rows in zip(axes, parts, strict=True):
            window.draw(rows, ax)
    return figure


def _parts(rows: list[Row]) -> dict[str, list[Row]]:
    full = [row for row in rows if row["window"] is None]
    windows = sorted({row["window"] for row in rows if row["window"] is not None})
    choices = {row["sink_choice"] for row in rows if row["n_sink"]}
    parts = {}
    if len(windows) > 1:
        parts["grid"] = [row for row in rows if not row["n_sink"] or row["sink_choice"] == "first"]
    if len(choices) > 1 or not parts:
        chosen = PUBLISHED if PUBLISHED in windows else windows[-1]
        parts["choices"] = full + [row for row in rows if row["window"] == chosen]
    return parts


PICTURE = Picture(
    "window",
    draw,
    needs="window",
    arguments="MODEL --text bundled --window 64 --window 128 --window 256 --window 512",
    numbers="n_sink delta delta_low delta_high",
)

if __name__ == "__main__":
    PICTURE.main()
