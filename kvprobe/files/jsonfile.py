"""How is JSON read that somebody else wrote, and that may be damaged, endlessly nested or far too large?"""

import json
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError

LIMIT = 1 << 26
"""Size in bytes of the largest file that is read; no configuration or index comes near it."""


def read_json(path: Path, what: str) -> Any:
    """The value in a file, which errors call ``what``. Raises KvprobeError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise KvprobeError(f"{what} cannot be read: {error.strerror or error}") from error
    if len(data) > LIMIT:
        raise KvprobeError(f"{what} is larger than {LIMIT / 2**20:.0f} MiB, too large for such a file")
    return parse_json(data, what)


def parse_json(data: str | bytes, what: str, *, unique: bool = False) -> Any:
    """The value in ``data``, which errors call ``what``.

    Raises KvprobeError for data that is not JSON or nests deeper than Python's stack and, with ``unique``, if an object
    has a key twice.
    """
    try:
        return json.loads(data, object_pairs_hook=_object if unique else None)
    except RecursionError as error:
        raise KvprobeError(f"{what} is nested too deeply to be read") from error
    except ValueError as error:
        raise KvprobeError(f"{what} is not JSON: {error}") from error


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a file. Raises KvprobeError as `read_json` does, and if the value is not an object."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise KvprobeError(f"{what} is not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return fields
