"""How does text from files reach a terminal, a page or a picture, so that what cannot be seen is seen?"""

import re


def visible(text: str, *, keep: str = "") -> str:
    r"""``text`` with all that has no look of its own written as Python would: ``\x1b``, ``\u202e``, ``\n``.

    That is control characters, marks that turn the direction of writing, spaces of no width, line separators and halves
    of surrogate pairs. What is in ``keep`` stays as it is.

    >>> print(visible("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else escaped(one) for one in text)


def shown(text: str) -> str:
    """``text`` as one cell: as it is, or as Python writes it where its beginning, its end or a part is not seen."""
    # a token may be a line break, or begin with a space
    return text if text.isprintable() and text == text.strip() else repr(text)


def harmless(text: str) -> str:
    """Running text without what steers a terminal: control characters but for line breaks and tabs are made visible."""
    return _STEERING.sub(lambda found: escaped(found[0]), text)


def escaped(character: str) -> str:
    r"""One character as Python's ``ascii`` writes it: ``\n``, ``\x1b``, ``\u202e``, ``\U000e0041``."""
    return ascii(character)[1:-1]


# all controls but the tab and the line feed, marks of direction that outlast their line, halves of surrogate pairs
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
