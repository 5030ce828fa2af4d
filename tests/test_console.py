"""What is shown: tables aligned, nulls as dashes, progress without a terminal as a few lines."""

from kvprobe import console


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


def test_without_a_terminal_progress_is_a_line_at_the_start_and_then_at_most_every_ten_seconds(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 9.9, 10.0, 10.5])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress_bar(quiet=False) as progress:
        for done in range(1, 6):
            progress("low rank", done * 1000, 5000, "tokens")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["low rank: 1,000 of 5,000 tokens", "low rank: 4,000 of 5,000 tokens"]
    assert captured.out == ""


def test_quiet_says_nothing(capsys):
    with console.progress_bar(quiet=True) as progress:
        progress("low rank", 1, 2, "passes")
    console.notice("something", quiet=True)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
