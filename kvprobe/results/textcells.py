"""How does a text stand in a cell of a CSV file, so that no spreadsheet computes it, and how is it read back?

A text that begins with ``=``, ``+``, ``-`` or ``@``, which a spreadsheet takes for a formula, has an apostrophe before
it, and so has one that begins with an apostrophe. Where a text holds what cannot be seen, such as a line break, that is
written as an escape (``\n``), and a backslash as two; so is a text that would else be taken for such a one.
"""

import re

from kvprobe.results.visible import escaped

FORMULA = ("=", "+", "-", "@", "'")
_ESCAPE = re.compile(r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def to_cell(text: str) -> str:
    r"""A text as it is written.

    >>> print(to_cell("@cell"), to_cell("a\nb"), to_cell(r"C:\dir"), to_cell(r"a\nb"))
    '@cell a\nb C:\dir a\\nb
    """
    if not text.isprintable() or _ESCAPE.search(text):
        text = "".join(r"\\" if one == "\\" else one if one.isprintable() else escaped(one) for one in text)
    return f"'{text}" if text.startswith(FORMULA) else text


def from_cell(cell: str) -> str:
    """The text of a cell that :func:`to_cell` wrote; any other cell, as of a number, is as it stands."""
    text = cell.removeprefix("'") if cell[1:].startswith(FORMULA) else cell
    return _ESCAPE.sub(lambda found: _character(found[0][1:]), text)


def _character(escape: str) -> str:
    return _SHORT.get(escape) or chr(int(escape[1:], 16))
