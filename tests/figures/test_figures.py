"""Every figure runs on small stored results, and what it draws is the table: no more, and nothing computed."""

import re
import subprocess
import sys
from contextlib import nullcontext
from io import BytesIO

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from figures import __main__ as every
from figures import _paper
from figures import latency as latency_figure
from figures import lowrank as lowrank_figure
from figures import window as window_figure
from figures._paper import Picture
from kvprobe.errors import KvprobeError
from kvprobe.experiments import registry
from kvprobe.plots import cache, explained, latency, lowrank, memory, relief, roofline, style, window
from kvprobe.results.phrases import PUBLISHED
from kvprobe.results.result import Result

RUN = {
    "model": "tiny",
    "passage": "bundled",
    "queries_from": 1,
    "n_tokens": 9,
    "score_from": 4,
    "n_targets": 4,
    "passages": [{}, {}],
    "positions": "absolute",
    "batch": 1,
    "batches": [1],
    "dtype": "float32",
    "device": "cpu",
    "cpu": "a processor",
    "bandwidth_bytes_per_s": 1e10,
    "matrix_flops_per_s": 2e11,
    "max_positions": 1000,
    "pool": False,
    "corpus": "letters",
    "corpus_kind": "characters",
    "missing": [],
    "steps": 9,
    "protocol": "tiny",
    "summary": [
        {"n_kv_heads": heads, "cache_bytes_per_token": 1536 * heads, "mean": 1.5 + 0.1 / heads, "low": 1.4, "high": 1.9}
        | {"n_seeds": 2}
        for heads in (8, 2, 1)
    ],
}


def scored(loss, delta, **fields):
    return fields | {"loss": loss, "delta": delta, "delta_low": delta - 0.25, "delta_high": delta + 0.5}


SINKS = [
    {"layer": 0, "mass": 0.1, "uniform": 0.02, "head_mass": [0.0, 0.2]},
    {"layer": 1, "mass": 0.6, "uniform": 0.01, "head_mass": [0.5, 0.7]},
]
FIXED = {"width": 32, "of": "kv", "allocate": "uniform", "passage": "all"}
LOWRANK = [
    scored(3.0, 0.0, rank=None, basis="oracle", **FIXED),
    scored(4.0, 1.0, rank=4, basis="oracle", **FIXED),
    scored(3.5, 0.5, rank=16, basis="oracle", **FIXED),
    scored(3.0, 0.0, rank=None, basis="heldout", **FIXED),
    scored(5.0, 2.0, rank=4, basis="heldout", **FIXED),
]
WINDOW = [scored(3.0, 0.0, window=None, n_sink=0, sink_choice=None)] + [
    scored(3 + loss, loss, window=size, n_sink=n_sink, sink_choice=choice)
    for size, n_sink, choice, loss in [
        (4, 0, None, 2.0),
        (4, 2, "first", 1.0),
        (4, 2, "random", 1.5),
        (8, 0, None, 1.0),
        (8, 2, "first", 0.5),
        (8, 2, "random", 0.75),
    ]
]


def timed(phase, context, ms, batch=1):
    return {
        "phase": phase,
        "context": context,
        "batch": batch,
        "ms_median": ms,
        "ms_low": ms - 0.5,
        "ms_high": ms + 1.0,
        "tokens_per_s": 1e3 * batch / ms,
        "ceiling_tokens_per_s": 4e3 * batch / ms,
        "fraction_of_ceiling": 0.25,
        "flops": 1e9,
        "intensity": 50.0 if phase == "prefill" else 0.5,
    }


LATENCY = [
    timed(phase, context, ms)
    for phase, context, ms in [("naive", 8, 4.0), ("cached", 8, 2.0), ("naive", 16, 8.0), ("cached", 16, 2.5)]
] + [timed("prefill", 16, 9.0)]
MEMORY = [
    {"cache": kind, "context": n, "formula_bytes": n << 20, "measured_bytes": n * by << 20, "pinned_bytes": pin << 20}
    for kind, by in (("full", 1), ("fused views", 3))
    for n, pin in ((4, 8 * (by - 1) // 2), (8, 16 * (by - 1) // 2))
]
NOTHING = {"window": None, "rank": None, "bits": None, "basis": None}
RELIEF = [
    scored(3.0, 0.0, **NOTHING, lever="as it is", kind="model", bytes_per_token=4096.0, on_front=True),
    scored(3.2, 0.2, **NOTHING | {"window": 4}, lever="w", kind="window", bytes_per_token=1024.0, on_front=True),
    scored(3.4, 0.4, **NOTHING | {"rank": 8, "basis": "heldout"}, lever="r", kind="latent", bytes_per_token=2048.0,
           on_front=False),
    scored(3.1, 0.1, **NOTHING | {"bits": 4}, lever="b", kind="bits", bytes_per_token=2000.0, on_front=True),
]  # fmt: skip
GQA = [
    {"n_kv_heads": heads, "seed": seed, "best_val_loss": 1.5 + 0.01 * seed + 0.1 / heads,
     "attention_params": 1000 * heads, "cache_bytes_per_token": 1536 * heads}
    for heads in (8, 2, 1)
    for seed in (0, 1, 2)
]  # fmt: skip
RESULTS = {
    "sinks": SINKS,
    "lowrank": LOWRANK,
    "window": WINDOW,
    "latency": LATENCY,
    "memory": MEMORY,
    "roofline": [timed("prefill", 16, 9.0), timed("cached", 16, 2.0)],
    "relief_map": RELIEF,
    "gqa": GQA,
}
ALL = {picture.name: picture for picture in every.pictures()}


@pytest.fixture
def results(tmp_path):
    for name, rows in RESULTS.items():
        Result(name, rows, RUN).save(tmp_path / "results" / name)
    return tmp_path / "results"


def axes():
    return Figure().subplots()


def bars_of(ax):
    """Of every errorbar of the axes, by label: x, y, and the ends of its bars."""
    found = {}
    for container in ax.containers:
        (line, _, (bars,)) = container.lines
        ends = [tuple(segment[:, 1]) for segment in bars.get_segments()]
        found[container.get_label()] = (line.get_xdata().tolist(), line.get_ydata().tolist(), ends)
    return found


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_figure_is_drawn_for_one_column_and_two_with_its_fonts_inside(name, results, tmp_path):
    paths = ALL[name].save(results, tmp_path / "drawn")
    assert [path.name for path in paths] == [f"{name}{size}.{kind}" for size in ("", "-wide")
                                             for kind in ("pdf", "svg", "png")]  # fmt: skip
    for suffix, inches in (("", 3.35), ("-wide", 6.9)):
        svg = (tmp_path / "drawn" / f"{name}{suffix}.svg").read_text()
        assert float(re.search(r'<svg[^>]* width="([0-9.]+)pt"', svg)[1]) == pytest.approx(72 * inches)
        # no text is left to a font of the reader's machine
        assert "<text" not in svg
        pdf = (tmp_path / "drawn" / f"{name}{suffix}.pdf").read_bytes()
        assert b"/FontFile2" in pdf
        assert b"/Type3" not in pdf


def test_the_same_results_give_the_same_files(results, tmp_path):
    first, second = (ALL["sinks"].save(results, tmp_path / part) for part in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_figures_need_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom figures.__main__ import pictures\npictures()\n"
        "import kvprobe.plots.relief, kvprobe.plots.latency, kvprobe.experiments.registry\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_result_says_what_makes_it(tmp_path):
    with pytest.raises(KvprobeError, match=r"sinks.json is not there: make it with `python -m analyses.sinks MODEL "):
        ALL["sinks"].save(tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []
    done = CliRunner().invoke(every.main, ["--results", str(tmp_path), "--out", str(tmp_path / "drawn")])
    assert done.exit_code == 1
    assert "python -m analyses.latency" in done.stderr
    # the drawings need no result
    assert (tmp_path / "drawn" / "cached_step-wide.pdf").is_file()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"analysis": "sinks", "rows": [], "run": {}}',
        "[]",
        '{"analysis": "sinks", "rows": [1], "run": {}}',
        '{"analysis": "sinks", "rows": [{"mass": 1}], "run": []}',
        '{"analysis": "sinks", "rows": [{"mass": NaN}], "run": {}}',
        '{"analysis": "sinks", "rows": [{"mass": 1}]}',
    ],
)
def test_a_file_that_is_no_result_is_named(text, tmp_path):
    (tmp_path / "sinks.json").write_text(text)
    with pytest.raises(KvprobeError, match=r"sinks.json is not a result .*python -m analyses.sinks"):
        ALL["sinks"].save(tmp_path, tmp_path)


def test_a_result_without_a_column_is_named_with_it(tmp_path):
    Result("sinks", [{"layer": 0, "mass": 0.5}], RUN).save(tmp_path / "sinks")
    with pytest.raises(
        KvprobeError, match=r"sinks\.json is not a result of sinks \(row 1: uniform is not there\): make"
    ):
        ALL["sinks"].save(tmp_path, tmp_path)
    Result("sinks", [{"layer": 0, "mass": 0.5, "uniform": 0.1}], RUN).save(tmp_path / "sinks")
    with pytest.raises(KvprobeError, match=r"sinks\.json cannot be drawn \(KeyError: 'head_mass'\): make it with"):
        ALL["sinks"].save(tmp_path, tmp_path)


def test_an_error_while_drawing_blames_the_figure_too_and_without_a_result_nothing_else(results, tmp_path):
    mistaken = Picture("sinks", lambda result, width: len(7), needs="sinks")
    with pytest.raises(KvprobeError, match=r"drawn \(TypeError: .*\): make it with .*; if a new .* figure is wrong"):
        mistaken.save(results, tmp_path)
    with pytest.raises(TypeError):
        Picture("drawn", lambda width: len(7)).save(results, tmp_path)


# what nobody can draw of nothing but zeros; the others are points at zero
ZEROS = {"latency": "ValueError: no row has batch 1", "roofline": "ZeroDivisionError: float division by zero"}


def with_every_number(value, name, folder):
    rows = [{field: value if isinstance(of, int | float) else of for field, of in row.items()} for row in RESULTS[name]]
    Result(name, rows, RUN).save(folder / name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RESULTS)
def test_zeros_are_drawn_where_they_can_be(name, tmp_path, monkeypatch):
    monkeypatch.setattr(_paper, "SIZES", {"": 3.3})
    monkeypatch.setattr(_paper, "UNDATED", {"svg": {"Date": None}})
    with_every_number(0, name, tmp_path)
    drawn = nullcontext()
    if name in ZEROS:
        drawn = pytest.raises(KvprobeError, match=re.escape(f"{name}.json cannot be drawn ({ZEROS[name]}): make it"))
    with drawn:
        ALL[name].save(tmp_path, tmp_path)
    assert (tmp_path / f"{name}.svg").exists() is (name not in ZEROS)


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize(
    ("value", "said"), [("x", "'x'"), (None, "None"), (10**400, "1000000000.*0000000"), (True, "True")]
)
def test_what_should_be_a_number_and_is_none_is_named_with_its_place(name, value, said, tmp_path):
    with_every_number(value, name, tmp_path)
    column = ALL[name].numbers.split()[0]
    wanted = rf"{name}\.json is not a result of {name} \(row 1: {column} is {said}, not a number\): make it with"
    with pytest.raises(KvprobeError, match=wanted):
        ALL[name].save(tmp_path, tmp_path)
    assert ALL[name].missing(tmp_path, "tiny") is not ALL[name].hours


def test_a_result_of_another_analysis_is_not_drawn(tmp_path):
    Result("window", SINKS, RUN).save(tmp_path / "sinks")
    with pytest.raises(KvprobeError, match=r"sinks\.json is a result of window, not of sinks: make it with"):
        ALL["sinks"].save(tmp_path, tmp_path)


def test_a_folder_where_a_result_should_be_is_named(tmp_path):
    (tmp_path / "sinks.json").mkdir()
    with pytest.raises(KvprobeError, match=r"sinks\.json is not a result .*irectory.*: make it with"):
        ALL["sinks"].save(tmp_path, tmp_path)


def test_the_name_of_a_corpus_is_no_mathematics():
    run = RUN | {"corpus": "a$b_{$.txt", "protocol": "mine"}
    figure = ALL["gqa"].draw(Result("gqa", GQA, run), 3.35)
    figure.savefig(BytesIO(), format="svg")


def test_a_place_that_cannot_be_written_is_named(results, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(KvprobeError, match=r"sinks\.pdf could not be written to .*choose another --out"):
        ALL["sinks"].save(results, tmp_path / "file")


def test_what_is_missing_for_a_model_is_what_is_not_of_it(results):
    assert not any(picture.missing(results, "tiny") for picture in ALL.values())
    assert not any(picture.missing(results, "elsewhere/tiny") for picture in ALL.values())
    (results / "window.json").unlink()
    done = CliRunner().invoke(every.main, ["--results", str(results), "--missing", "tiny"])
    assert done.output.startswith("analyses.window tiny --text bundled")
    assert len(done.output.splitlines()) == 1
    assert ALL["sinks"].missing(results, "other")
    assert not Picture("drawn", lambda width: None).missing(results, "other")
    assert ALL["sinks"].analysis("a model") == "analyses.sinks 'a model' --text bundled"


def test_lines_differ_in_colour_in_marker_and_in_dashes():
    looks = [style.look(i) for i in range(len(style.COLOURS))]
    for field in ("color", "marker", "linestyle"):
        assert len({str(look[field]) for look in looks}) == len(looks)
    assert str(style.DOTS) not in {str(look["linestyle"]) for look in looks}


def test_losses_by_rank_are_the_rows():
    ax = lowrank.draw_loss(LOWRANK, axes())
    drawn = bars_of(ax)
    x, y, ends = drawn["oracle: the scored tokens"]
    assert x == pytest.approx([4 * 0.99, 16 * 0.99])
    assert (y, ends) == ([4.0, 3.5], [(3.75, 4.5), (3.25, 4.0)])
    assert drawn["heldout: later tokens of the same text"][1:] == ([5.0], [(4.75, 5.5)])
    assert ax.lines[0].get_ydata()[0] == 3.0


def test_the_rank_figure_draws_all_passages_together_and_not_one():
    one = [row | {"passage": "bundled", "loss": 9.0} for row in LOWRANK]
    figure = lowrank_figure.draw(Result("lowrank", [*one, *LOWRANK], RUN), 3.35)
    assert bars_of(figure.axes[0])["oracle: the scored tokens"][1] == [4.0, 3.5]


def test_the_window_figure_is_the_grid_and_one_window_by_choice():
    grid, choices = window_figure.draw(Result("window", WINDOW, RUN), 6.9).axes
    assert bars_of(grid)["no sinks"][1:] == ([2.0, 1.0], [(1.75, 2.5), (0.75, 1.5)])
    assert bars_of(grid)["2 sinks"][1] == [1.0, 0.5]
    drawn = bars_of(choices)
    assert drawn["the first tokens"][1] == [1.0, 0.5]
    assert drawn["tokens at random"][1] == [1.0, 0.75]
    assert "window of 8" in choices.get_xlabel()


def test_a_single_window_is_drawn_by_sinks_with_every_choice():
    (ax,) = window_figure.draw(Result("window", WINDOW[:4], RUN), 3.35).axes
    assert {name: y for name, (_, y, _) in bars_of(ax).items()} == {
        "the first tokens": [2.0, 1.0],
        "tokens at random": [2.0, 1.5],
    }


def test_a_full_pass_without_sink_logits_is_a_line_of_its_own():
    ax = window.draw([*WINDOW[:3], WINDOW[0] | {"delta": 0.3, "sink_logits_dropped": True}], axes())
    assert [line.get_ydata()[0] for line in ax.lines[:2]] == [0, 0.3]


def test_milliseconds_by_context_are_the_rows():
    ax = latency.draw([roofline.with_rates(row) for row in LATENCY], axes())
    drawn = bars_of(ax)
    assert drawn["naive"] == ([8, 16], [4.0, 8.0], [(3.5, 5.0), (7.5, 9.0)])
    assert drawn["cached"][1] == [2.0, 2.5]
    (ceiling,) = (line for line in ax.lines if line.get_label() == "cached, at the ceiling")
    assert ceiling.get_ydata().tolist() == [0.5, 0.625]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_the_roof_is_the_ceilings_and_the_marks_are_the_rows():
    rows = [roofline.with_rates(row) for row in RESULTS["roofline"]]
    ax = roofline.draw(rows, axes(), bandwidth=1e10, matrix_rate=2e11)
    x, y = ax.lines[0].get_data()
    # the ridge is where both ceilings meet, 20 FLOP a byte; GFLOP/s = intensity × 10 GB/s below it
    assert (x[1], y[1], y[2]) == (20, 200, 200)
    assert y[0] == pytest.approx(10 * x[0])
    marks = {line.get_label(): line.get_xydata().tolist() for line in ax.lines[2:]}
    assert marks == {"cached": [[0.5, pytest.approx(500)]], "prefill": [[50.0, pytest.approx(1000 / 9)]]}


@pytest.mark.parametrize("title", [False, True])
def test_a_busy_machine_stands_on_the_picture_with_a_title_or_without(title):
    loaded = RUN | {"busy": ["other work used 1.00 of 2 cores while it was timed"]}
    pictures = {"latency": latency.figure, "roofline": roofline.figure}
    for name, figure in pictures.items():
        above = [figure(RESULTS[name], run, width=6.9, title=title).get_suptitle() for run in (RUN, loaded)]
        assert above[0].startswith("tiny") is title
        assert "busy" not in above[0]
        # broken to the width of the picture
        assert " ".join(above[1].split()).endswith("busy machine, not to be quoted")
    on_paper = latency_figure.draw(Result("latency", LATENCY, loaded), 3.35)
    assert on_paper.get_suptitle() == "busy machine, not to be quoted"
    assert latency_figure.draw(Result("latency", LATENCY, RUN), 3.35).get_suptitle() == ""


def test_bytes_held_are_the_rows():
    ax = memory.draw([row for row in MEMORY if row["context"] == 8], axes())
    widths = [bar.get_width() for bar in ax.patches]
    # of what is held, what is read and then what is pinned: 8 of 8, and 8 + 16 of 24
    assert widths == [8, 8, 0, 16]
    assert ax.lines[0].get_xdata().tolist() == [8, 8]
    growth = memory.draw_growth(MEMORY, axes())
    assert [line.get_ydata().tolist() for line in growth.lines] == [[4, 8], [12, 24], [4, 8]]


def test_the_relief_map_is_the_rows_and_its_front_the_flagged_ones():
    ax = relief.draw(RELIEF, axes())
    marks = {name: (x, y) for name, (x, y, _) in bars_of(ax).items()}
    assert marks["as it is"] == ([4096.0], [3.0])
    assert marks["rank, basis of later tokens"] == ([2048.0], [3.4])
    (front,) = (line for line in ax.lines if line.get_label().startswith("front"))
    assert front.get_xydata().tolist() == [[1024, 3.2], [2000, 3.1], [4096, 3.0]]
    assert sorted(text.get_text() for text in ax.texts) == ["4", "4", "8"]


def test_quality_by_cache_is_the_summary_and_every_seed():
    figure = ALL["gqa"].draw(Result("gqa", GQA, RUN | {"protocol": PUBLISHED}), 3.35)
    (ax,) = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert lines["mean over 2 seeds"] == [[1536, 1.6], [3072, 1.55], [12288, 1.5125]]
    assert len(lines["one seed"]) == len(GQA)
    assert (figure.get_suptitle(), ax.get_title()) == ("", "")


@pytest.mark.parametrize("width", [style.ONE_COLUMN, style.TWO_COLUMNS])
@pytest.mark.parametrize(
    ("of", "says"),
    [
        ({"protocol": "not the published protocol"}, "letters, 9 steps, not the published protocol"),
        (
            {"protocol": PUBLISHED, "missing": ["1 KV head, seed 1"] * 3},
            "not finished: 3 more models to train",
        ),
    ],
)
def test_a_training_of_other_settings_or_unfinished_is_named_over_its_legend(width, of, says):
    figure = ALL["gqa"].draw(Result("gqa", GQA, RUN | of), width)
    assert figure.get_suptitle().replace("\n", " ") == says
    figure.draw_without_rendering()
    (title,), (ax,) = figure.texts, figure.axes
    assert title.get_window_extent().y0 >= ax.get_legend().get_window_extent().y1


def test_the_bill_is_the_rows_and_beyond_the_models_positions_it_is_shaded():
    rows = [
        {"lever": lever, "kind": kind, "context": n, "bytes": n * by, "weights_bytes": 9000}
        for lever, kind, by in (("as it is", "model", 8), ("4 bits", "bits", 2))
        for n in (500, 1000, 2000)
    ]
    ax = cache.draw_growth(rows, axes(), max_positions=1000)
    assert [line.get_ydata().tolist() for line in ax.lines[:2]] == [[4000, 8000, 16000], [1000, 2000, 4000]]
    (shade,) = ax.patches
    assert shade.get_label() == "beyond its 1,000 positions"
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (1000, pytest.approx(ax.get_xlim()[1]))
    assert not cache.draw_growth(rows, axes(), max_positions=2000).patches
    left = cache.draw_relief([row for row in rows if row["context"] == 2000], axes())
    assert [text.get_text() for text in left.texts] == ["15.6 KiB", "3.91 KiB"]


def test_a_cached_step_computes_one_and_reads_the_others():
    made = style.COLOURS[0]

    def filled(cached):
        from matplotlib.colors import to_hex
        from matplotlib.patches import FancyBboxPatch

        ax = explained.draw_steps(axes(), cached=cached)
        boxes = [patch for patch in ax.patches if isinstance(patch, FancyBboxPatch)]
        return len(boxes), sum(to_hex(box.get_facecolor()).lower() == made.lower() for box in boxes)

    # the last three steps over five tokens see 3, 4 and 5 keys
    assert filled(cached=False) == (12, 12)
    assert filled(cached=True) == (12, 3)


def test_query_heads_point_at_the_kv_head_of_their_group():
    ax = explained.draw_sharing(axes(), n_heads=8, n_kv_heads=2)
    assert [line.get_xdata()[1] for line in ax.lines] == [2.0] * 4 + [6.0] * 4
    assert "4 vectors" in ax.texts[-1].get_text()


@pytest.mark.parametrize("analysis", RESULTS)
def test_a_result_plots_itself(analysis):
    rows = WINDOW[:3] if analysis == "window" else RESULTS[analysis]
    figure = Result(analysis, rows, RUN).plot()
    assert figure.axes
    # a trained model has no name
    assert ("letters" if analysis == "gqa" else "tiny") in figure.get_suptitle()


def test_a_result_without_a_picture_says_so():
    with pytest.raises(ValueError, match="the analysis 'generate' has no picture"):
        Result("generate", [{"text": "a"}], RUN).plot()
    with pytest.raises(ValueError, match="a row for each head"):
        Result("sinks", [{"layer": 0, "head": 0, "mass": 0.5}], RUN).plot()
    with pytest.raises(ValueError, match="streamed"):
        Result("window", WINDOW, RUN | {"stream": True}).plot()
    assert set(registry.names()) >= {"sinks", "lowrank", "window", "cache", "memory", "latency"}


def test_a_field_that_is_missing_is_named_and_not_the_analysis():
    with pytest.raises(KeyError, match="uniform"):
        Result("sinks", [{"layer": 0, "mass": 0.5, "head_mass": [0.5]}], RUN).plot()


def test_a_name_is_never_read_as_mathematics_and_long_titles_are_broken():
    name = r"a_$\nosuch$_" + "word " * 40
    figure = Result("sinks", SINKS, RUN | {"model": name}).plot()
    assert r"$\nosuch$" in figure.get_suptitle()
    assert "\n" in figure.get_suptitle()
    figure.draw_without_rendering()
    box = figure._suptitle.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
