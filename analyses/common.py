"""What do the analyses share? A model by name or by shape alone, and a table that is printed and kept."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from kvprobe.cli.console import emit
from kvprobe.cli.main import run
from kvprobe.files.store import disk_error
from kvprobe.models import loading
from kvprobe.models.loading import Loaded
from kvprobe.models.random_weights import load_random
from kvprobe.progress import Progress, silent
from kvprobe.results import phrases
from kvprobe.results.result import Result
from kvprobe.shape import published

PUBLISHED_GPT = "gpt-124m"
"""The shape that the published speed and memory were measured on. It was never trained: its weights are drawn."""


def load(model: str, *, random_weights: bool = False, dtype: str = "float32", progress: Progress = silent) -> Loaded:
    """The model on this machine's best device, or one of its shape with weights drawn at random."""
    item = published.look_up(model)
    if random_weights or (item is not None and item.name == PUBLISHED_GPT):
        return load_random(model, dtype=dtype, progress=progress)
    return loading.load(model, dtype=dtype, progress=progress)


def script(command: click.Command) -> None:
    """Run an analysis as a program, its errors in one line, as those of ``kvprobe``."""
    run(command, name=f"python -m analyses.{Path(sys.argv[0]).stem}")


def keep(result: Result) -> None:
    """Write results/NAME.csv and NAME.json. Raises KvprobeError where they cannot be written."""
    stem = Path("results", result.analysis)
    try:
        result.save(stem)
    except OSError as error:
        raise disk_error(error, stem.with_suffix(".json"), hint="use --no-save") from error


def show(result: Result, *, save: bool, columns: Sequence[str] = (), summary: Sequence[str] = ()) -> None:
    """Print the table (all columns, or these) and, with ``save``, keep results/NAME.csv and NAME.json.

    Below it stand the lines of ``summary`` and, of what was timed on a busy machine, that it is not to be quoted.
    """
    below = [*summary, *phrases.busy_lines(result.run)]
    emit(result, format_="table", out=None, columns=columns or list(result.rows[0]), summary=below)
    if save:
        keep(result)
