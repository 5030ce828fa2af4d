"""How does text from files reach a terminal, a page or a picture with its invisible characters made visible?"""

import re


def visible(text: str, *, keep: str = "") -> str:
    r"""``text`` with its invisible characters written as in Python: ``\x1b``, ``\u202e``, ``\n``.

    These are control characters, marks of writing direction, spaces of no width, line separators and halves of
    surrogate pairs. Those in ``keep`` stay as they are.

    >>> print(visible("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else escaped(char) for char in text)


def shown(text: str) -> str:
    """``text`` as one cell: as it is, or as its repr if a part of it, its beginning or its end is invisible."""
    # a token may be a line break, or begin with a space
    return text if text.isprintable() and text == text.strip() else repr(text)


def harmless(text: str) -> str:
    """Running text that cannot steer a terminal: control characters except line breaks and tabs made visible."""
    return _STEERING.sub(lambda match: escaped(match[0]), text)


def escaped(character: str) -> str:
    r"""One character as Python's ``ascii`` writes it: ``\n``, ``\x1b``, ``\u202e``, ``\U000e0041``."""
    return ascii(character)[1:-1]


# all controls except tab and line feed, marks of direction that outlast their line, halves of surrogate pairs
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
