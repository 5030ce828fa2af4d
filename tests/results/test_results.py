"""A result is a table plus the run that made it: whole files, no rows refused, the same thing read back."""

import json
import os
from pathlib import Path

import pytest

import kvprobe
from kvprobe.files.whole import write_whole
from kvprobe.results.record import processor, run_record
from kvprobe.results.result import Result
from kvprobe.results.textcells import from_cell, to_cell


def result(**changes):
    rows = [{"layer": 0, "mass": 0.25, "window": None}, {"layer": 1, "mass": 0.5, "window": 8}]
    return Result(**({"analysis": "sinks", "rows": rows, "run": {"model": "tiny", "seed": 0}} | changes))


def test_json_holds_everything_and_reads_back():
    assert Result.from_json(result().to_json()) == result()
    assert list(json.loads(result().to_json())) == ["analysis", "rows", "run"]


def test_csv_has_a_column_for_each_entry_of_a_list():
    rows = [{"layer": 0, "head_mass": [0.5], "window": None}, {"layer": 1, "head_mass": [0.25, 1.0], "window": 8}]
    assert result(rows=rows).to_csv() == "layer,head_mass_0,head_mass_1,window\n0,0.5,,\n1,0.25,1.0,8\n"
    assert result(rows=[{"ids": None, "n": 0}, {"ids": [7], "n": 1}]).to_csv() == "ids_0,n\n,0\n7,1\n"
    assert result(rows=[{"of": {"k": [1, 2], "v": "=x"}}]).to_csv() == "of_k_0,of_k_1,of_v\n1,2,'=x\n"


def test_csv_has_a_header_and_an_empty_cell_for_null():
    assert result().to_csv() == "layer,mass,window\n0,0.25,\n1,0.5,8\n"


HOSTILE = [
    "=1+1",
    "+1",
    "-0.5",
    "@a",
    "'",
    "'=1",
    "''-",
    "a\nb",
    r"a\nb",
    "\\",
    r"C:\dir",
    r"\\",
    "\r",
    "\t=1",
    "\x1b[31m",
]
HOSTILE += ["\u202e", "\u2028", "\ud800", "\U000e0041", "=\n", "'\x00", "", " ", "naïve", "日本", '"', ",", "-"]


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_comes_back_from_a_cell_in_which_nothing_is_computed_or_hidden(text):
    cell = to_cell(text)
    assert from_cell(cell) == text
    assert cell.isprintable()
    assert not cell.startswith(("=", "+", "-", "@"))
    # and through a whole table
    table = result(rows=[{"layer": -1, "token": text, "mass": -0.5}]).to_csv()
    assert Result.rows_of_csv(table) == [{"layer": "-1", "token": text, "mass": "-0.5"}]


def test_only_a_text_that_would_be_computed_has_an_apostrophe_before_it():
    rows = [{"loss": -0.5, "rank": -1, "token": "=A1"}, {"loss": 1e-7, "rank": 3, "token": "a=b"}]
    assert result(rows=rows).to_csv() == "loss,rank,token\n-0.5,-1,'=A1\n1e-07,3,a=b\n"


def test_no_two_texts_have_the_same_cell():
    assert len(set(map(to_cell, HOSTILE))) == len(HOSTILE)


def test_json_shows_what_cannot_be_seen_and_holds_it_exactly():
    hostile = result(rows=[{"token": text} for text in HOSTILE])
    text = hostile.to_json()
    assert text.replace("\n", "").isprintable()
    assert "日本" in text
    assert text.encode()
    assert Result.from_json(text) == hostile


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="sinks produced no rows"):
        result(rows=[])


def test_rows_that_differ_in_their_fields_are_an_error():
    with pytest.raises(ValueError, match="the fields of the rows differ: b"):
        result(rows=[{"a": 1}, {"a": 1, "b": 2}])


def test_a_number_that_is_not_finite_never_reaches_a_file():
    with pytest.raises(ValueError, match="sinks: loss is nan, and JSON has no such number: ask for format table or"):
        result(rows=[{"loss": float("nan")}]).to_json()


def test_save_writes_both_files_and_makes_the_folder(tmp_path):
    csv_path, json_path = result().save(tmp_path / "results" / "sinks")
    assert csv_path.read_text() == result().to_csv()
    assert Result.from_json(json_path.read_text()) == result()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_written_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_the_run_record_names_versions_and_processor_but_no_host_and_no_path(tmp_path):
    record = run_record({"model": "tiny"}, {"passage": "a.txt"}, seed=3)
    assert record["model"] == "tiny"
    assert record["seed"] == 3
    assert record["versions"]["torch"].startswith("2.")
    assert record["cpu"] == processor()
    text = json.dumps(record)
    assert os.uname().nodename not in text
    assert str(Path.cwd()) not in text


def test_the_run_record_names_the_kvprobe_that_runs_not_the_one_installed(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: f"installed {package}")
    versions = run_record()["versions"]
    assert (versions["kvprobe"], versions["torch"]) == (kvprobe.__version__, "installed torch")


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_the_frame_has_a_column_a_field_and_the_record_beside_it():
    result = Result("sinks", [{"layer": 0, "mass": 0.25}, {"layer": 1, "mass": None}], {"model": "tiny"})
    frame = result.frame
    assert [*frame.columns] == ["layer", "mass"]
    assert frame["mass"].isna().tolist() == [False, True]
    assert frame["layer"].sum() == 1
    assert frame.attrs == {"run": {"model": "tiny"}}
