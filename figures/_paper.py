"""How does a figure come from result files onto paper? Read, draw for one column and for two, save in three formats."""

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

# fonts inside the pdf as TrueType and the svg as outlines; no dates: the same results give the same files
SETTINGS = {"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "kvprobe"}
UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
# what a result without a field or a row, or with a strange value in its record, raises while it is drawn; what also may
# come of the figure's own mistake, so that the error says both
UNDRAWN = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
SIZES = {"": ONE_COLUMN, "-wide": TWO_COLUMNS}


@dataclass(frozen=True)
class Picture:
    """One figure: its file ``name``, how it is drawn at a width, and the result it needs (None: a drawn explanation).

    ``draw(result, width)`` gets that result, or ``draw(width)`` nothing. ``arguments`` are what its analysis is given;
    with MODEL among them the result is of one model, and has to be made anew for another. Where it takes ``hours``,
    ``make figures`` leaves it to be asked for. ``numbers`` are the columns, by name, that hold a finite number in every
    row of the result.
    """

    name: str
    draw: Callable[..., Figure]
    needs: str | None = None
    arguments: str = "MODEL"
    hours: bool = False
    numbers: str = ""

    def save(self, results: Path, out: Path) -> list[Path]:
        """Write NAME (one column) and NAME-wide (two) as pdf, svg and png; returns the paths.

        Raises KvprobeError if the result is not there, saying what makes it, or cannot be read, and where the pictures
        cannot be written.
        """
        inputs = () if self.needs is None else (self.read(results),)
        paths = []
        for suffix, width in SIZES.items():
            for kind, metadata in UNDATED.items():
                data = BytesIO()
                try:
                    # a figure a format: laying it out for one must not move it for the next
                    figure = self.draw(*inputs, width)
                    with mpl.rc_context(SETTINGS):
                        figure.savefig(data, format=kind, dpi=300, metadata=metadata)
                except UNDRAWN as error:
                    if not inputs:
                        raise
                    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    said = f"{self._file(results)} cannot be drawn ({why}): {self._hint()}"
                    raise KvprobeError(f"{said}; if a new one cannot be drawn, the figure is at fault") from error
                path = out / f"{self.name}{suffix}.{kind}"
                try:
                    write_whole(path, data.getvalue())
                except OSError as error:
                    raise disk_error(error, path, hint="choose another --out") from error
                paths.append(path)
        return paths

    def read(self, results: Path) -> Result:
        """The result that is drawn. Raises as :meth:`save`."""
        path = self._file(results)
        try:
            found = Result.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise KvprobeError(f"{path} is not there: {self._hint()}") from None
        except (OSError, KeyError, ValueError) as error:
            raise KvprobeError(f"{path} is no result ({error}): {self._hint()}") from error
        if found.analysis != self.needs:
            raise KvprobeError(f"{path} is a result of {found.analysis}, not of {self.needs}: {self._hint()}")
        for i, row in enumerate(found.rows, start=1):
            for field in self.numbers.split():
                if not _is_number(row.get(field)):
                    what = f"is {reprlib.repr(row[field])}, no number" if field in row else "is not there"
                    why = f"row {i}: {field} {what}"
                    raise KvprobeError(f"{path} is no result of {self.needs} ({why}): {self._hint()}")
        return found

    def missing(self, results: Path, model: str) -> bool:
        """Whether the result has still to be made for ``model``, and can be in minutes."""
        if self.needs is None or self.hours:
            return False
        try:
            found = self.read(results)
        except KvprobeError:
            return True
        # a hub id is the whole name, a directory or a file its last part without an ending
        names = {model, Path(model).name, Path(model).stem}
        return "MODEL" in self.arguments and found.run.get("model") not in names

    def analysis(self, model: str) -> str:
        """What to give to ``python -m``, quoted for a shell, to make the result for ``model``."""
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
