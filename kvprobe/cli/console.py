"""What does the user see? Results on standard output, progress and notices on standard error."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvprobe import interrupts
from kvprobe.errors import KvprobeError
from kvprobe.files.whole import write_whole
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result
from kvprobe.results.visible import shown, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# without a terminal a bar would be noise: lines at least this far apart, and in long work at most so far
SECONDS_BETWEEN_LINES = 10.0
MOST_SECONDS_BETWEEN_LINES = 60.0


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """A progress bar on standard error, or lines if that is not a terminal; nothing if ``quiet``."""
    if quiet:
        yield _watchful(silent)
    elif sys.stderr.isatty():
        with _rich_bar() as bar:
            yield _watchful(bar)
    else:
        yield _watchful(Lines())


def _watchful(progress: Progress) -> Progress:
    """The same, but each step raises a Ctrl-C that Python dropped."""

    def step(what: str, done: int, total: int | None, unit: str = "") -> None:
        interrupts.check()
        progress(what, done, total, unit)

    return step


@contextmanager
def _rich_bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    class Amount(ProgressColumn):
        """Bytes with their rate; anything else as counts."""

        def render(self, task: Any) -> Any:
            if task.fields["unit"] == "bytes":
                return DownloadColumn().render(task) + " " + TransferSpeedColumn().render(task)
            return MofNCompleteColumn().render(task)

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), Amount(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None, unit: str = "") -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(visible(what), total=total, unit=unit)
            bars.update(tasks[what], completed=done, total=total)

        yield show


class Lines:
    """Progress for logs and pipes: a line for the first step of each piece of work, for its last, and some between.

    Those between come after 10 s or a tenth of the time that the piece has taken, but after a minute at the latest.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[str, float] = {}
        self._said: dict[str, float] = {}
        self._before: tuple[str, int, int | None] | None = None

    def __call__(self, what: str, done: int, total: int | None, unit: str = "") -> None:
        """Say it, if it is time."""
        now, step, last = self._clock(), (what, done, total), total is not None and done >= total
        wait = max(SECONDS_BETWEEN_LINES, (now - self._began.setdefault(what, now)) / 10)
        early = what in self._said and now - self._said[what] < min(wait, MOST_SECONDS_BETWEEN_LINES)
        again, self._before = step == self._before, step
        if last:
            del self._began[what]
        if again or (early and not last):
            return
        self._said[what] = now
        amount = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
        click.echo(visible(f"{what}: {amount} {unit}".rstrip() if amount else what), err=True)


def notice(text: str, *, quiet: bool = False) -> None:
    """One line on standard error."""
    if not quiet:
        click.echo(visible(text), err=True)


def emit(result: Result, *, format_: str, out: str | None, columns: Sequence[str], summary: Sequence[str] = ()) -> None:
    """Print or write a result; a table shows the fields ``columns`` and below it the lines ``summary``."""
    interrupts.check()
    if out is None and sys.stdout is None:
        raise KvprobeError("standard output is closed: name a file with --out")
    if format_ == "json":
        text = result.to_json()
    elif format_ == "csv":
        text = result.to_csv()
    else:
        text = "\n".join([table(result.rows, columns), *map(visible, summary)]) + "\n"
    if out is None:
        click.echo(text, nl=False)
    else:
        write_whole(out, text)


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned plain text, with numbers right-aligned and a dash for null."""
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    left = [all(isinstance(row[column], str) or row[column] is None for row in rows) for column in columns]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    lines = []
    for line in [list(columns), *cells]:
        padded = (
            cell.ljust(w) if to_left else cell.rjust(w) for cell, w, to_left in zip(line, widths, left, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return shown(str(value))


def save_plot(figure: "Figure", paths: Sequence[str]) -> None:
    """Write a figure to each path, whole or not at all, in the format of the path's suffix."""
    import io
    from pathlib import Path

    import matplotlib as mpl

    for path in paths:
        buffer = io.BytesIO()
        # text as text in svg and TrueType in pdf, as publishers ask
        with mpl.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
            figure.savefig(buffer, format=Path(path).suffix[1:].lower(), dpi=200)
        write_whole(path, buffer.getvalue())
