"""How does a table read on a page or in a notebook? Every text in it escaped."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from typing import Any

from kvprobe.results.visible import shown, visible

Row = dict[str, Any]


def plain(value: Any) -> str:
    """A value as people read it: null as a dash, and text so that what cannot be seen is."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return shown(value if isinstance(value, str) else _nested(value))


def escape(text: str, *, quote: bool = True) -> str:
    """Text for a page: nothing in it is read as HTML, and what cannot be seen is."""
    return escape_html(visible(text), quote=quote)


def _nested(value: Any) -> str:
    """Lists and records on one line, their numbers as short as elsewhere."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_nested(part)}" for name, part in value.items()) or "–"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_nested, value))}]"
    return plain(value)


@dataclass(frozen=True)
class Column:
    """One column of a table: the field of a row, its heading, and how a value that is there is written."""

    field: str
    heading: str
    show: Callable[[Any], str] = plain

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of one cell, not yet escaped."""
        value = row[self.field]
        return plain(None) if value is None else self.show(value)


def table(columns: Sequence[Column], rows: Sequence[Row], foot: Row | None = None, caption: str = "") -> str:
    """Rows as an HTML table, numbers to the right."""
    words = {
        column.field
        for column in columns
        if all(row[column.field] is None or isinstance(row[column.field], str) for row in rows)
    }

    def line(row: Row, tag: str = "td") -> str:
        cells = (
            f"<{tag}{'' if column.field in words else ' class=n'}>{escape(column.cell(row))}</{tag}>"
            for column in columns
        )
        return f"<tr>{''.join(cells)}</tr>"

    head = "".join(
        f"<th scope=col{'' if column.field in words else ' class=n'}>{escape(column.heading)}</th>"
        for column in columns
    )
    return (
        f"<table>{f'<caption>{escape(caption)}</caption>' if caption else ''}<thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(map(line, rows))}</tbody>{f'<tfoot>{line(foot)}</tfoot>' if foot else ''}</table>"
    )
