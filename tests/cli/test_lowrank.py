"""``kvprobe lowrank`` and its pictures: one document, errors in one line; the drawn data is the table."""

import json
from functools import partial

import pytest
from matplotlib.figure import Figure

from kvprobe.experiments.lowrank import Lowrank
from kvprobe.plots import lowrank as plots
from kvprobe.results.result import Result
from support.models import document

FIELDS = {
    "rank", "width", "limit", "loss", "perplexity", "delta", "delta_low", "delta_high", "energy", "bytes_full",
    "latent_bytes", "basis_bytes", "break_even_tokens", "of", "stage", "basis", "centered", "allocate", "ratio",
    "notional_ratio",
}  # fmt: skip


@pytest.fixture
def run(main):
    return partial(main, "lowrank")


def test_json_is_one_document_with_the_fields_and_the_run(run, tiny_llama):
    arguments = ("--tokens", 96, "--rank", 8, "--rank", 4, "--seed", 7, "--format", "json")
    found = document(run(tiny_llama, *arguments))
    assert found["analysis"] == "lowrank"
    assert [row["rank"] for row in found["rows"]] == [None, 8, 4]
    assert all(set(row) == FIELDS for row in found["rows"])
    record = found["run"]
    assert (record["score_from"], record["n_targets"], record["n_fitted"], record["seed"]) == (48, 47, 96, 7)
    assert "blocks of 7 tokens" in record["interval"]
    assert str(tiny_llama.parent) not in json.dumps(found)


def test_the_library_gives_the_same_numbers(run, tiny_llama):
    from kvprobe.models.subject import prepare
    from kvprobe.probes.truncation import sweep

    found = document(run(tiny_llama, "--tokens", 96, "--rank", 6, "--of", "k", "--stage", "pre_rope",
                         "--basis", "prefix", "--center", "--allocate", "energy", "--score-from", 40,
                         "--format", "json"))  # fmt: skip
    subject = prepare(str(tiny_llama), tokens=96)
    swept = sweep(subject.model, subject.input_ids, ranks=[6], of="k", stage="pre_rope", basis="prefix", center=True,
                  allocation="energy", score_from=40)  # fmt: skip
    assert found["rows"] == swept.rows
    assert found["run"]["ranks_by_layer"] == {"6": swept.ranks_by_layer[6]}
    assert found["run"]["n_fitted"] == 40


def test_heldout_is_the_text_after_the_passage_or_another(run, tiny_llama, tmp_path):
    passage = tmp_path / "passage.txt"
    passage.write_text("".join(chr(33 + (7 * i * i + i // 5) % 90) for i in range(400)))
    changed = tmp_path / "changed.txt"
    # the first 96 tokens (a character each) stand; what follows is another text
    changed.write_text(passage.read_text()[:96] + passage.read_text()[:30:-1])
    common = ("--tokens", 96, "--rank", 4, "--basis", "heldout", "--format", "json", "--bos", "drop")
    own = document(run(tiny_llama, "--text", passage, *common))
    other = document(run(tiny_llama, "--text", changed, *common))
    assert own["run"]["fit_text"] == {"name": "passage.txt", "sha256": own["run"]["passage_sha256"], "offset": 96}
    assert own["rows"][0]["loss"] == other["rows"][0]["loss"]
    assert own["rows"][1]["loss"] != other["rows"][1]["loss"]
    # the text named again is not fitted on the passage itself
    again = document(run(tiny_llama, "--text", passage, "--fit-text", passage, *common))
    assert again["rows"] == own["rows"]
    named = document(run(tiny_llama, "--text", passage, "--fit-text", "bundled", *common))
    assert named["run"]["fit_text"]["name"] == "bundled"
    assert named["run"]["fit_text"]["offset"] == 0


def test_a_heldout_basis_is_called_what_it_was_fitted_to(run, tiny_llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"line %d of a text\n" % i for i in range(40)))
    copy = tmp_path / "copy.txt"
    # the same words, and another fingerprint
    copy.write_bytes(text.read_bytes().replace(b"\n", b"\r\n"))
    common = ("--tokens", 96, "--rank", 4, "--basis", "heldout", "--text", text, "--quiet")
    later, other = "later tokens of the same text", "another text (manual)"
    own, again, manual = (
        run(tiny_llama, *common, *fitted).stdout for fitted in ((), ("--fit-text", copy), ("--fit-text", "manual"))
    )
    assert f"fitted on {later}, 96 tokens" in own
    assert again == own
    assert f"fitted on {other}, 96 tokens" in manual
    for fitted, said in (((), later), (("--fit-text", "manual"), other)):
        picture = tmp_path / "loss.svg"
        run(tiny_llama, *common, *fitted, "--plot", picture)
        assert f"heldout: {said}" in picture.read_text()
    assert later in run("--help").stdout
    assert run(tiny_llama, "--basis", "heldout", "--text", "-", "--fit-text", "-").returncode == 2


def test_the_spectrum_shows_both_stages_or_the_one_asked_for(run, tiny_llama):
    found = document(run(tiny_llama, "--tokens", 96, "--spectrum", "--format", "json"))
    assert {row["stage"] for row in found["rows"]} == {"post_rope", "pre_rope"}
    assert {"energy", "effective_rank", "rank_90", "rank_99", "rank_99_9"} <= set(found["rows"][0])
    one = document(
        run(tiny_llama, "--tokens", 96, "--spectrum", "--stage", "pre_rope", "--rank", 3, "--format", "json")
    )
    assert [(row["stage"], row["rank"]) for row in one["rows"]] == [("pre_rope", 3)] * 3
    table = run(tiny_llama, "--tokens", 96, "--spectrum").stdout.splitlines()
    assert table[0].split()[:2] == ["stage", "layer"]
    assert len(table) == 1 + 6 + 2


def test_the_table_says_what_was_scored_and_fitted(run, tiny_llama):
    done = run(tiny_llama, "--tokens", 96, "--rank", 4, "--quiet")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "47 targets from 49 on" in done.stdout
    assert "oracle basis, fitted on 96 tokens: rank at most 32" in done.stdout
    assert "blocks of 7 tokens" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rank", "0"], "--rank must be between 1 and 32 (96 tokens fitted, width 32), got 0"),
        (["--rank", "33"], "--rank must be between 1 and 32 (96 tokens fitted, width 32), got 33"),
        (["--rank", "17", "--of", "v"], "between 1 and 16"),
        (["--rank", "21", "--basis", "prefix", "--score-from", "20"], "between 1 and 20 (20 tokens fitted"),
        (["--rank", "4", "--score-from", "95"], "--score-from must be between 0 and 93 for --tokens 96"),
        (["--rank", "4", "--score-from", "-1"], "got -1"),
        (["--rank", "4", "--basis", "heldout", "--text", "SHORT"], "is too short: 96 tokens from token 96 on"),
        (["--rank", "4", "--tokens", "300"], "has 256 positions, fewer than 300 tokens"),
        (["--rank", "4", "--basis", "heldout", "--fit-text", "nosuch.txt"], "nosuch.txt"),
        (["--tokens", "2"], "at least 3 tokens to be scored (two targets), got --tokens 2"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_one(run, tiny_llama, tmp_path, arguments, says):
    short = tmp_path / "short.txt"
    short.write_text("abcdefgh" * 16)
    arguments = [str(short) if argument == "SHORT" else argument for argument in arguments]
    tokens = () if "--tokens" in arguments else ("--tokens", 96)
    done = run(tiny_llama, *tokens, "--quiet", *arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_text_to_fit_on_needs_the_basis_that_uses_it(run, tiny_llama):
    done = run(tiny_llama, "--fit-text", "bundled")
    assert done.returncode == 2
    assert "--fit-text needs --basis heldout, not --basis oracle" in done.stderr


def test_pictures_are_written(run, tiny_llama, tmp_path):
    loss, spectrum = tmp_path / "loss.svg", tmp_path / "spectrum.svg"
    assert run(tiny_llama, "--tokens", 96, "--rank", 8, "--rank", 4, "--plot", loss).returncode == 0
    assert run(tiny_llama, "--tokens", 96, "--spectrum", "--plot", spectrum).returncode == 0
    assert "nat per token" in loss.read_text()
    assert "energy kept" in spectrum.read_text()


def rows_of(basis, losses, allocate="uniform"):
    full = {"rank": None, "loss": 3.0, "delta": 0.0, "delta_low": 0.0, "delta_high": 0.0, "basis": basis,
            "allocate": "uniform", "of": "kv", "width": 96}  # fmt: skip
    return [full] + [
        full
        | {
            "rank": rank,
            "loss": loss,
            "delta": loss - 3,
            "delta_low": loss - 3.2,
            "delta_high": loss - 2.9,
            "allocate": allocate,
        }
        for rank, loss in losses.items()
    ]


def test_losses_and_intervals_are_the_rows_one_line_a_basis():
    rows = rows_of("oracle", {8: 3.1, 4: 3.5}) + rows_of("heldout", {8: 3.4, 4: 4.0})
    ax = plots.draw_loss(rows, Figure().subplots())
    dashed, *points = [line for line in ax.lines if len(line.get_xydata()) == 2 and line.get_linestyle() != "None"]
    assert [*dashed.get_ydata()] == [3.0, 3.0]
    assert [[*line.get_ydata()] for line in points] == [[3.5, 3.1], [4.0, 3.4]]
    assert [[*line.get_xdata()] for line in points] == [[pytest.approx(4, rel=0.02), pytest.approx(8, rel=0.02)]] * 2
    bars = [segment[:, 1].tolist() for part in ax.collections for segment in part.get_segments()]
    assert bars == [pytest.approx(ends) for ends in ([3.3, 3.6], [2.9, 3.2], [3.8, 4.1], [3.2, 3.5])]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "not truncated", "oracle: the scored tokens", "heldout: later tokens of the same text",
    ]  # fmt: skip


def test_an_allocation_has_a_line_of_its_own():
    rows = rows_of("oracle", {8: 3.1, 4: 3.5}) + rows_of("oracle", {8: 3.2, 4: 3.6}, "energy")[1:]
    ax = plots.draw_loss(rows, Figure().subplots())
    assert [text.get_text() for text in ax.get_legend().get_texts()][2] == "oracle: the scored tokens, rank by energy"


def test_energies_are_the_rows_one_line_a_layer():
    rows = [{"layer": layer, "rank": rank, "energy": 0.1 * layer + 0.2 * i, "stage": "pre_rope", "of": "kv"}
            for layer in (0, 2) for i, rank in enumerate((1, 2, 4))]  # fmt: skip
    ax = plots.draw_energy(list(reversed(rows)), Figure().subplots())
    assert [line.get_xydata().tolist() for line in ax.lines] == [
        [[1, 0.0], [2, 0.2], [4, 0.4]],
        [[1, 0.2], [2, pytest.approx(0.4)], [4, pytest.approx(0.6)]],
    ]


@pytest.mark.parametrize("width", [3.35, 6.9])
def test_a_spectrum_has_a_picture_of_any_width(width):
    rows = [{"layer": layer, "rank": rank, "energy": rank / 4, "stage": stage, "of": "kv"}
            for stage in ("post_rope", "pre_rope") for layer in (0, 2) for rank in (1, 2, 4)]  # fmt: skip
    run = {"spectrum": True, "model": "tiny", "passage": "bundled"}
    figure = Lowrank.figure(Result("lowrank", rows, run), width=width, title=False)
    assert (figure.get_figwidth(), figure.get_suptitle()) == (width, "")
    panes = figure.axes[:2]
    assert [ax.get_title() for ax in panes] == ["keys before RoPE", "keys as attention reads them"]
    # beside each other they share the label on the left, one above the other the label below
    said = [(ax.get_xlabel(), ax.get_ylabel()) for ax in panes]
    beside, stacked = [("rank", "energy kept"), ("rank", "")], [("", "energy kept"), ("rank", "energy kept")]
    assert said == (beside if width > 5 else stacked)
    assert Lowrank.figure(Result("lowrank", rows, run)).get_suptitle() == "tiny: keys and values over bundled"


def test_the_analysis_asks_three_bases_on_several_passages(tiny_llama):
    from analyses import lowrank

    result = lowrank.run(str(tiny_llama), texts=["bundled"], tokens=96, score_from=48, n_passages=2, parts=(4, 8))
    rows = result.rows
    assert {row["basis"] for row in rows} == {"oracle", "prefix", "heldout"}
    assert [row["rank"] for row in rows if row["part"] == "published"] == [None, 8, 4]
    assert len(rows) == 3 * 3 * (2 + 1)
    offsets = sorted({row["offset"] for row in rows if row["passage"] == "bundled"})
    assert offsets == [0, 96]
    # of equally long passages the pooled loss is the mean
    for basis in ("oracle", "prefix", "heldout"):
        each = [row["loss"] for row in rows if (row["basis"], row["rank"]) == (basis, 4)]
        assert each[2] == pytest.approx((each[0] + each[1]) / 2)
    assert result.run["missing_texts"] == []
    assert lowrank.summary(result)
    result.to_json()


def test_the_answer_needs_the_whole_interval():
    from analyses.lowrank import answer

    rows = [
        {"basis": "oracle", "rank": None, "delta_low": 0.0, "delta_high": 0.0},
        {"basis": "oracle", "rank": 8, "delta_low": -0.2, "delta_high": -0.1},
        {"basis": "oracle", "rank": 4, "delta_low": -0.2, "delta_high": 0.1},
        {"basis": "prefix", "rank": 8, "delta_low": 0.1, "delta_high": 0.2},
    ]
    assert answer(rows) == {
        "oracle": {"better": [8], "undecided": [4], "worse": []},
        "prefix": {"better": [], "undecided": [], "worse": [8]},
    }


def test_the_cost_benchmark_compares_with_a_plain_forward(tiny_llama):
    from analyses import lowrank_cost

    rows = lowrank_cost.run(str(tiny_llama), tokens=96, repeats=2).rows
    assert rows[0]["way"] == "plain"
    assert rows[0]["ratio"] == 1.0
    swept = next(row for row in rows if "sweep" in row["way"])
    assert swept["ratio_per_rank"] == pytest.approx(swept["ratio"] / 8)
