"""What did a run find, and which run was it? A table in long form plus the record that can remake it."""

import csv
import io
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvprobe import __version__
from kvprobe.results.textcells import from_cell, to_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

_TEMPORARY = ".kvprobe-"
# the packages whose version can change a number
VERSIONED = ("kvprobe", "torch", "transformers", "tokenizers", "numpy", "scipy", "numba")
# a notebook shows so many rows and says how many more there are
SHOWN_ROWS = 60


@dataclass(frozen=True)
class Result:
    """One analysis: ``rows``, one an observation, all with the same fields, and ``run``, how they came about.

    Raises ValueError if there are no rows or if they differ in their fields.

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
                raise ValueError(f"{self.analysis}: rows differ in their fields: {', '.join(odd)}")

    def to_json(self) -> str:
        """One JSON document; a number that is not finite is refused (ValueError), since JSON has none."""
        for row in self.rows:
            for name, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    said = f"{self.analysis}: {name} is {value}, and JSON has no such number"
                    raise ValueError(f"{said}: ask for --format table or csv")
        document = {"analysis": self.analysis, "rows": self.rows, "run": self.run}
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        # what JSON leaves as it is and cannot be seen: as JSON escapes it, so that the value is the same
        return text if text.replace("\n", "").isprintable() else "".join(map(_json_escaped, text))

    def to_csv(self) -> str:
        """The rows alone, with a header; an empty cell is a null, texts as :mod:`kvprobe.results.textcells` says."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            cells = {name: to_cell(value) if isinstance(value, str) else value for name, value in row.items()}
            writer.writerow(cells)
        return text.getvalue()

    @staticmethod
    def rows_of_csv(text: str) -> list[dict[str, str]]:
        """The rows of a table that :meth:`to_csv` wrote, each cell as a text: ``""`` is a null, ``"0.5"`` a number.

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
        """The result that :meth:`to_json` wrote. Raises KeyError and ValueError for what it could not have written."""
        try:
            document = json.loads(text, parse_constant=_no_number)
        except RecursionError as error:
            raise ValueError("it is nested too deeply to be read") from error
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        analysis, rows, run = document["analysis"], document["rows"], document["run"]
        if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows) and isinstance(run, dict)):
            raise ValueError("its rows are no list of objects, or its run is none")
        return cls(analysis, rows, run)

    def save(self, stem: str | Path) -> tuple[Path, Path]:
        """Write ``STEM.csv`` and ``STEM.json``; each is there whole or not at all. Returns both paths."""
        stem = Path(stem)
        paths = stem.with_name(stem.name + ".csv"), stem.with_name(stem.name + ".json")
        for path, text in zip(paths, (self.to_csv(), self.to_json()), strict=True):
            write_whole(path, text)
        return paths

    def plot(self) -> "Figure":
        """The picture that belongs to the analysis; ValueError for one that has none."""
        from kvprobe.plots.named import figure_of

        return figure_of(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the rows as a table, each text escaped."""
        from kvprobe.bench.busy import said
        from kvprobe.report.page import Column, table

        some = self.rows[:SHOWN_ROWS]
        more = f", and {len(self.rows) - len(some):,} more rows" if len(some) < len(self.rows) else ""
        columns = [Column(name, name) for name in self.rows[0]]
        caption = said(f"{self.analysis}, {self.run.get('model', 'no model')}{more}", self.run)
        return table(columns, some, caption=caption)


def _json_escaped(character: str) -> str:
    return character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON's")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or, after a kill or on a full disk, as it was before.

    A link stays a link: what it points to is written. A device or a pipe is written into, never replaced.
    """
    path = Path(path).resolve()
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with path.open("wb") as special:
            special.write(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{_TEMPORARY}{os.getpid()}-")
    try:
        with os.fdopen(handle, "wb") as file:
            _is_ours(file)
            file.write(data)
        # mkstemp makes private files; a result is as readable as any file the user writes
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sweep_temporaries(folder: Path) -> None:
    """Remove what runs that were killed in the middle of `write_whole` left in a folder."""
    for stale in folder.glob(f"{_TEMPORARY}*-*"):
        owner = stale.name.removeprefix(_TEMPORARY).partition("-")[0]
        # another run may sweep as well, and what cannot be removed is no reason to write nothing
        with suppress(OSError):
            if owner.isdecimal() and not _lives(int(owner)):
                with stale.open("r+b") as file:
                    if _is_ours(file):
                        stale.unlink()


def _lives(process: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(process))


def _is_ours(file: BinaryIO) -> bool:
    """Lock a file, if nobody has, until it is closed: whose process is not of this machine may write it as well."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def run_record(*parts: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The record of a run: what ``parts`` (model, passage) and ``settings`` say, and where and when it ran.

    Files stand in it by name and SHA-256, never by path; the machine by its processor, never by host name.
    """
    record: dict[str, Any] = {}
    for part in (*parts, settings):
        if twice := sorted(record.keys() & part.keys()):
            raise ValueError(f"a run record says {twice[0]} twice")
        record |= part
    record["versions"] = _versions(VERSIONED)
    record["cpu"] = processor()
    record["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    return record


def processor() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            # a source tree on the path has a version as well
            found[package] = __version__ if package == "kvprobe" else "not installed"
    return found
