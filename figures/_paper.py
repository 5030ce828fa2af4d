"""How does a result file become a figure on paper? Read it, draw for one column and two, save in three formats."""

import reprlib
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import click
import matplotlib as mpl
from matplotlib.figure import Figure

from kvprobe.errors import KvprobeError
from kvprobe.files.store import disk_error
from kvprobe.files.whole import write_whole
from kvprobe.plots.style import ONE_COLUMN, TWO_COLUMNS
from kvprobe.results.result import Result

# TrueType fonts in pdf, outlines in svg, and no dates: the same results give the same files
SETTINGS = {"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "kvprobe"}
UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
# what drawing raises if a result lacks a field or a row, or its record has a strange value; the figure's own mistakes
# raise the same, so the error names both
UNDRAWN = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
SIZES = {"": ONE_COLUMN, "-wide": TWO_COLUMNS}


@dataclass(frozen=True)
class Picture:
    """One figure: its file ``name``, how to draw it at a width, and the result it needs (None: a drawn explanation).

    It is drawn by ``draw(result, width)``, or ``draw(width)`` without a result. ``arguments`` are its analysis's; with
    MODEL among them the result is of one model. ``make figures`` does not run an analysis that takes ``hours``.
    ``numbers`` names the columns that must hold a finite number in every row.
    """

    name: str
    draw: Callable[..., Figure]
    needs: str | None = None
    arguments: str = "MODEL"
    hours: bool = False
    numbers: str = ""

    def save(self, results: Path, out: Path) -> list[Path]:
        """Write NAME (one column) and NAME-wide (two) as pdf, svg and png; returns the paths.

        Raises KvprobeError if the result is missing, naming the command that makes it, if it cannot be read, and if the
        pictures cannot be written.
        """
        inputs = () if self.needs is None else (self.read(results),)
        paths = []
        for suffix, width in SIZES.items():
            for kind, metadata in UNDATED.items():
                data = BytesIO()
                try:
                    # one figure for each format: layout for one must not shift the next
                    figure = self.draw(*inputs, width)
                    with mpl.rc_context(SETTINGS):
                        figure.savefig(data, format=kind, dpi=300, metadata=metadata)
                except UNDRAWN as error:
                    if not inputs:
                        raise
                    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    said = f"{self._file(results)} cannot be drawn ({why}): {self._hint()}"
                    raise KvprobeError(f"{said}; if a new one cannot be drawn, the figure is wrong") from error
                path = out / f"{self.name}{suffix}.{kind}"
                try:
                    write_whole(path, data.getvalue())
                except OSError as error:
                    raise disk_error(error, path, hint="choose another --out") from error
                paths.append(path)
        return paths

    def read(self, results: Path) -> Result:
        """The result to draw. Raises as :meth:`save` does."""
        path = self._file(results)
        if not path.exists():
            raise KvprobeError(f"{path} is not there: {self._hint()}")
        try:
            result = Result.load(path)
        except KvprobeError as error:
            raise KvprobeError(f"{error}: {self._hint()}") from error
        if result.analysis != self.needs:
            raise KvprobeError(f"{path} is a result of {result.analysis}, not of {self.needs}: {self._hint()}")
        for i, row in enumerate(result.rows, start=1):
            for field in self.numbers.split():
                if not _is_number(row.get(field)):
                    what = f"is {reprlib.repr(row[field])}, not a number" if field in row else "is not there"
                    why = f"row {i}: {field} {what}"
                    raise KvprobeError(f"{path} is not a result of {self.needs} ({why}): {self._hint()}")
        return result

    def missing(self, results: Path, model: str) -> bool:
        """Whether the result for ``model`` is still to be made, and takes only minutes."""
        if self.needs is None or self.hours:
            return False
        try:
            result = self.read(results)
        except KvprobeError:
            return True
        # a record holds a hub id in full, but only the last part of a path, without its suffix
        names = {model, Path(model).name, Path(model).stem}
        return "MODEL" in self.arguments and result.run.get("model") not in names

    def analysis(self, model: str) -> str:
        """The arguments of ``python -m``, quoted for a shell, that make the result for ``model``."""
        words = [model if word == "MODEL" else word for word in self.arguments.split()]
        return shlex.join([f"analyses.{self.needs}", *words])

    def main(self) -> None:
        """The command line of one figure."""

        @click.command(help=sys.modules["__main__"].__doc__)
        @click.option("--results", type=click.Path(path_type=Path), default="results", show_default=True)
        @click.option("--out", type=click.Path(path_type=Path), default="figures/drawn", show_default=True)
        def command(results: Path, out: Path) -> None:
            try:
                paths = self.save(results, out)
            except KvprobeError as error:
                raise click.ClickException(str(error)) from error
            click.echo(f"{paths[0].parent}: {', '.join(path.name for path in paths)}")

        command()

    def _file(self, results: Path) -> Path:
        return results / f"{self.needs}.json"

    def _hint(self) -> str:
        return f"make it with `python -m {self.analysis('MODEL')}`" + (", which takes hours" if self.hours else "")


def _is_number(value: object) -> bool:
    # JSON holds whole numbers of any length
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
