"""What is shown: tables aligned, nulls as dashes, progress without a terminal as a few lines."""

import io
import sys

import pytest
from rich.console import Console

from kvprobe.cli import console
from kvprobe.report import page
from kvprobe.results import columns
from kvprobe.results.result import Result
from kvprobe.results.visible import harmless, visible


def test_numbers_stand_to_the_right_words_to_the_left_and_null_is_a_dash():
    rows = [
        {"positions": "cache", "window": 8, "loss": 3.25, "local": True},
        {"positions": None, "window": None, "loss": 12345.6, "local": False},
    ]
    assert console.table(rows, ["positions", "window", "loss", "local"]).splitlines() == [
        "positions  window       loss  local",
        "cache           8     3.2500    yes",
        "-               -  1.235e+04     no",
    ]


def test_without_a_terminal_progress_is_lines_on_standard_error(capsys):
    with console.progress_bar(quiet=False) as progress:
        for done in range(1, 6):
            progress("low rank", done * 1000, 5000, "tokens")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["low rank: 1,000 of 5,000 tokens", "low rank: 5,000 of 5,000 tokens"]
    assert captured.out == ""


def test_quiet_says_nothing(capsys):
    with console.progress_bar(quiet=True) as progress:
        progress("low rank", 1, 2, "passes")
    console.notice("something", quiet=True)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


# what steers a terminal, turns what is written round, or is not there to see
HOSTILE = "a\x1b[2Jb\x9bc\x7fd\u202ee\u2066f\u200bg\u2028h\ud800i\rj\nk"
SEEN = r"a\x1b[2Jb\x9bc\x7fd\u202ee\u2066f\u200bg\u2028h\ud800i\rj\nk"


def test_what_cannot_be_seen_is_written_as_python_would():
    assert visible(HOSTILE) == SEEN
    assert visible("Grüße, 日本 ε [red]$x$") == "Grüße, 日本 ε [red]$x$"
    assert visible("a\nb\tc", keep="\n") == "a\nb\\tc"


def test_running_text_keeps_its_lines_and_its_joiners():
    # the joiner of no width belongs to the spelling of Persian
    assert harmless("a\tb\n\u200c\x1b[2J\r\u202e") == "a\tb\n\u200c\\x1b[2J\\r\\u202e"


@pytest.mark.parametrize("terminal", [False, True])
def test_names_reach_standard_error_visible(capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    shown = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=shown, force_terminal=True, width=200))
    with console.progress_bar(quiet=False) as progress:
        progress(f"[red]{HOSTILE}[/nosuch]", 1, 2, "passes")
    console.notice(HOSTILE)
    rest = capsys.readouterr().err
    assert rest.endswith(SEEN + "\n")
    # a bar on a terminal, lines elsewhere
    assert (f"[red]{SEEN}[/nosuch]" in shown.getvalue(), f"[red]{SEEN}[/nosuch]" in rest) == (terminal, not terminal)


def test_names_reach_a_table_and_what_stands_under_it_visible(capsys):
    rows = [{"token": HOSTILE}]
    console.emit(Result("sinks", rows, {}), format_="table", out=None, columns=["token"], summary=["", HOSTILE])
    _, cell, empty, line = capsys.readouterr().out.splitlines()
    assert (cell, empty, line) == (repr(HOSTILE), "", SEEN)


def test_names_reach_a_page_visible_and_never_as_html():
    hostile = f"<b>{HOSTILE}&"
    section = page.Section(
        anchor="sinks",
        heading=hostile,
        sentences=[hostile],
        columns=[columns.Column("token", hostile), columns.Column("name", "name", show=str)],
        rows=[{"token": hostile, "name": hostile}],
        record={hostile: hostile},
    )
    text = page.document(hostile, hostile, [section]).decode()
    assert text.replace("\n", "").isprintable()
    assert "<b>" not in text
    # a column may write its values itself
    assert f"<td>&lt;b&gt;{SEEN}&amp;</td>" in text
