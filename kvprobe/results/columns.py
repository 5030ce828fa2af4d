"""How is a column of a table written, on a page or in a notebook? As HTML every text is escaped."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.results.visible import shown, visible
from kvprobe.shape.cache_bytes import Amount

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

Row = dict[str, Any]


def plain(value: Any) -> str:
    """A value for people to read: null as a dash, and text with invisible characters made visible."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return shown(value if isinstance(value, str) else _nested(value))


def _nested(value: Any) -> str:
    """Lists and records on one line, with short numbers."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_nested(part)}" for name, part in value.items()) or "–"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_nested, value))}]"
    return plain(value)


def amount(value: float) -> str:
    """Bytes in the unit that reads best."""
    return str(Amount(value))


@dataclass(frozen=True)
class Column:
    """One column of a table: the field of a row, its heading, and how a value that is not null is written.

    ``show`` is a format such as ``.3f`` or ``,.1f``, or a function.
    """

    field: str
    heading: str
    show: str | Callable[[Any], str] = plain

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of one cell, not yet escaped."""
        value = row[self.field]
        if value is None:
            return plain(None)
        return format(value, self.show) if isinstance(self.show, str) else self.show(value)


@functools.cache
def template(name: str) -> "Template":
    """A template of ``kvprobe/data``; what is put into it is escaped, and invisible characters become visible."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvprobe", "data"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else visible(str(value)),
    )
    environment.filters["plain"] = plain
    return environment.get_template(name)


def table(columns: Sequence[Column], rows: Sequence[Row], foot: Row | None = None, caption: str = "") -> "Markup":
    """Rows as an HTML table, with numbers right-aligned."""
    words = [
        column.field
        for column in columns
        if all(row[column.field] is None or isinstance(row[column.field], str) for row in rows)
    ]
    return template("table.html").module.table(columns, rows, foot, caption, words)  # type: ignore[attr-defined]
