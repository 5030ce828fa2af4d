"""The drawn data equals the table."""

from matplotlib.figure import Figure

from kvprobe.plots import evaluate

ROWS = [
    {"attend": None, "delta": 0, "delta_low": 0, "delta_high": 0, "kld_mean": 0, "kld_p99": 0, "top1_agreement": 1},
    {"attend": "a", "delta": 0.5, "delta_low": 0.25, "delta_high": 1, "kld_mean": 0.125, "kld_p99": 2}
    | {"top1_agreement": 0.75},
    {"attend": "b", "delta": -0.5, "delta_low": -1, "delta_high": -0.25, "kld_mean": 0.25, "kld_p99": 1}
    | {"top1_agreement": 0.5},
]


def test_points_and_intervals_are_the_rows_of_functions():
    ax = evaluate.draw_loss(ROWS, Figure().subplots())
    (points,) = ax.containers
    assert points.lines[0].get_xydata().tolist() == [[0.5, 0], [-0.5, 1]]
    assert [segment[:, 0].tolist() for segment in points.lines[2][0].get_segments()] == [[0.25, 1], [-1, -0.25]]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b"]


def test_bars_are_the_mean_divergence_and_marks_the_percentile():
    ax = evaluate.draw_divergence(ROWS, Figure().subplots())
    assert [bar.get_width() for bar in ax.patches] == [0.125, 0.25]
    assert ax.lines[0].get_xydata().tolist() == [[2, 0], [1, 1]]
    assert [text.get_text() for text in ax.texts] == ["same first token: 75.0%", "same first token: 50.0%"]
