"""The drawn data equals the table."""

import pytest
from matplotlib.figure import Figure

from kvprobe.plots import sinks

LAYERS = [
    {"layer": 0, "mass": 0.1, "uniform": 0.02, "head_mass": [0.0, 0.2, 0.1]},
    {"layer": 2, "mass": 0.6, "uniform": 0.01, "head_mass": [0.5, 0.6, 0.7]},
]


def test_bars_and_line_are_the_rows():
    ax = sinks.draw_layers(LAYERS, Figure().subplots())
    assert [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in ax.patches] == [
        (pytest.approx(0), 0.1),
        (pytest.approx(2), 0.6),
    ]
    assert ax.lines[0].get_xydata().tolist() == [[0, 0.02], [2, 0.01]]


def test_the_map_is_the_rows_layers_down_and_heads_across():
    ax = sinks.draw_heads(LAYERS, Figure().subplots())
    drawn = ax.collections[0].get_array().reshape(2, 3).tolist()
    assert drawn == [[0.0, 0.2, 0.1], [0.5, 0.6, 0.7]]
    assert ax.collections[0].get_clim() == (0, 1)


def test_nothing_global_changes():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    sinks.figure(LAYERS, {"model": "tiny", "queries_from": 1, "n_tokens": 9, "passage": "bundled"})
    assert dict(mpl.rcParams) == before
