"""How is a text written into a CSV cell, so that no spreadsheet evaluates it, and how is it read back?

A text that begins with ``=``, ``+``, ``-`` or ``@``, which a spreadsheet takes for a formula, gets an apostrophe before
it, as does one that begins with an apostrophe. In a text with invisible characters, such as a line break, these become
escapes (``\n``) and a backslash becomes two; so it does in a text that looks as if it had such escapes.
"""

import re

from kvprobe.results.visible import escaped

FORMULA = ("=", "+", "-", "@", "'")
_ESCAPE = re.compile(r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def to_cell(text: str) -> str:
    r"""A text as it is written into a cell.

    >>> print(to_cell("@cell"), to_cell("a\nb"), to_cell(r"C:\dir"), to_cell(r"a\nb"))
    '@cell a\nb C:\dir a\\nb
    """
    if not text.isprintable() or _ESCAPE.search(text):
        text = "".join(r"\\" if char == "\\" else char if char.isprintable() else escaped(char) for char in text)
    return f"'{text}" if text.startswith(FORMULA) else text


def from_cell(cell: str) -> str:
    """The text of a cell that :func:`to_cell` wrote; any other cell, such as a number, stays as it is."""
    text = cell.removeprefix("'") if cell[1:].startswith(FORMULA) else cell
    return _ESCAPE.sub(lambda match: _character(match[0][1:]), text)


def _character(escape: str) -> str:
    return _SHORT.get(escape) or chr(int(escape[1:], 16))
