"""What did a run find, and which run was it? A table in long form, and the record to repeat the run."""

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import KvprobeError, Wording
from kvprobe.files.whole import write_whole
from kvprobe.results.columns import Column, Row, table
from kvprobe.results.phrases import with_busy
from kvprobe.results.textcells import from_cell, to_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

__all__ = ["Result", "Row"]

# rows that a notebook shows before it only counts the rest
SHOWN_ROWS = 60


@dataclass(frozen=True, repr=False)
class Result:
    """One analysis: ``rows``, one an observation, all with the same fields, and ``run``, the record.

    Raises ValueError if there are no rows or if their fields differ.

    >>> result = Result("sinks", [{"layer": 0, "mass": 0.25}, {"layer": 1, "mass": 0.5}], {"model": "tiny"})
    >>> print(result.to_csv(), end="")
    layer,mass
    0,0.25
    1,0.5
    >>> Result.from_json(result.to_json()) == result
    True
    """

    analysis: str
    rows: list[Row]
    run: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"{self.analysis} produced no rows")
        for row in self.rows:
            if row.keys() != self.rows[0].keys():
                odd = sorted(row.keys() ^ self.rows[0].keys())
                raise ValueError(f"{self.analysis}: the fields of the rows differ: {', '.join(odd)}")

    def __repr__(self) -> str:
        """As in ``Result(sinks of smollm2-135m, 30 rows)``."""
        of = f" of {self.run['model']}" if "model" in self.run else ""
        return f"Result({self.analysis}{of}, {len(self.rows):,} row{'s' * (len(self.rows) > 1)})"

    def to_json(self) -> str:
        """One JSON document. Raises ValueError for a number that is not finite, since JSON has none."""
        for row in self.rows:
            for name, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    said = "{0}: {1} is {2}, and JSON has no such number: ask for {format} table or csv"
                    raise ValueError(Wording(said, self.analysis, name, value))
        document = {"analysis": self.analysis, "rows": self.rows, "run": self.run}
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        # invisible characters that json.dumps leaves: escaped as JSON allows, so that the value is the same
        return text if text.replace("\n", "").isprintable() else "".join(map(_json_escaped, text))

    def to_csv(self) -> str:
        """The rows with a header; an empty cell is a null, and texts are as in :mod:`kvprobe.results.textcells`.

        A field that is a list has a column an entry, ``NAME_0``, ``NAME_1``, …, as many as the longest list.

        >>> print(Result("sinks", [{"layer": 0, "head_mass": [0.25, 0.5]}]).to_csv(), end="")
        layer,head_mass_0,head_mass_1
        0,0.25,0.5
        """
        lists = {name for row in self.rows for name, value in row.items() if isinstance(value, list | tuple | dict)}
        # null in place of a list has empty cells, and no column of its own
        cells = [
            {name: dict(_cells(name, [] if value is None and name in lists else value)) for name, value in row.items()}
            for row in self.rows
        ]
        columns = {cell: None for name in self.rows[0] for row in cells for cell in row[name]}
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        for row in cells:
            writer.writerow({cell: value for parts in row.values() for cell, value in parts.items()})
        return text.getvalue()

    @staticmethod
    def rows_of_csv(text: str) -> list[dict[str, str]]:
        """The rows that :meth:`to_csv` wrote, each cell as a string: ``""`` is a null, ``"0.5"`` a number.

        >>> result = Result("sinks", [{"layer": 0, "top_token": "=1+1", "mass": -0.5}])
        >>> print(result.to_csv(), end="")
        layer,top_token,mass
        0,'=1+1,-0.5
        >>> Result.rows_of_csv(result.to_csv())
        [{'layer': '0', 'top_token': '=1+1', 'mass': '-0.5'}]
        """
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return [{name: from_cell(cell) for name, cell in row.items()} for row in rows]

    @classmethod
    def from_json(cls, text: str) -> "Result":
        """The result that :meth:`to_json` wrote. Raises KeyError or ValueError for any other text."""
        try:
            document = json.loads(text, parse_constant=_no_number)
        except RecursionError as error:
            raise ValueError("it is nested too deeply to be read") from error
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        analysis, rows, run = document["analysis"], document["rows"], document["run"]
        if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows) and isinstance(run, dict)):
            raise ValueError("its rows are not a list of objects, or its run is not an object")
        return cls(analysis, rows, run)

    @classmethod
    def load(cls, path: str | Path) -> "Result":
        """The result that :meth:`save`, or ``--out`` with ``--format json``, wrote to ``STEM.json``, by either name.

        Raises KvprobeError for a file that cannot be read or is not a result.
        """
        path = Path(path)
        path = path if path.suffix == ".json" else path.with_name(path.name + ".json")
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, KeyError, ValueError) as error:
            why = f"no {error} in it" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
            raise KvprobeError(f"{path} is not a result ({why})") from error

    def save(self, stem: str | Path) -> tuple[Path, Path]:
        """Write ``STEM.csv`` and ``STEM.json``, each whole or not at all; returns both paths."""
        stem = Path(stem)
        paths = stem.with_name(stem.name + ".csv"), stem.with_name(stem.name + ".json")
        for path, text in zip(paths, (self.to_csv(), self.to_json()), strict=True):
            write_whole(path, text)
        return paths

    @property
    def frame(self) -> "DataFrame":
        """The rows as a pandas frame with a column for each field; ``attrs["run"]`` is the record."""
        import pandas as pd

        frame = pd.DataFrame(self.rows)
        frame.attrs["run"] = self.run
        return frame

    def plot(self) -> "Figure":
        """The analysis's picture. Raises ValueError if it has none."""
        # by name: plots import results, so results cannot import plots
        return import_module("kvprobe.experiments.registry").figure_of(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the rows as a table, each text escaped."""
        some = self.rows[:SHOWN_ROWS]
        more = f", and {len(self.rows) - len(some):,} more rows" if len(some) < len(self.rows) else ""
        columns = [Column(name, name) for name in self.rows[0]]
        caption = with_busy(f"{self.analysis}, {self.run.get('model', 'no model')}{more}", self.run)
        return table(columns, some, caption=caption)


def _cells(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The cells of one field: its own, or one for each entry of a list or a record."""
    if isinstance(value, list | tuple | dict):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _cells(f"{name}_{part}", inner)
    else:
        yield name, to_cell(value) if isinstance(value, str) else value


def _json_escaped(character: str) -> str:
    return character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
