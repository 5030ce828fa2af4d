"""How is JSON read that somebody else wrote: damaged, nested without end, or too large to be what it should be?"""

import json
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError

LIMIT = 1 << 26
"""Bytes of the largest file that is read: no configuration or index comes near it."""


def read_json(path: Path, what: str) -> Any:
    """The value in a file, which errors call ``what``. Raises KvprobeError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise KvprobeError(f"{what} cannot be read: {error.strerror or error}") from error
    if len(data) > LIMIT:
        raise KvprobeError(f"{what} is larger than {LIMIT / 2**20:.0f} MiB, which no such file is")
    return parse_json(data, what)


def parse_json(data: str | bytes, what: str, *, unique: bool = False) -> Any:
    """The value that ``data`` spells. Raises KvprobeError, which calls it ``what``, for what is not JSON.

    So it does for JSON nested deeper than Python's stack, and with ``unique`` for an object that has a key twice.
    """
    try:
        return json.loads(data, object_pairs_hook=_object if unique else None)
    except RecursionError as error:
        raise KvprobeError(f"{what} is nested too deeply to be read") from error
    except ValueError as error:
        raise KvprobeError(f"{what} is not JSON: {error}") from error


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a file. Raises KvprobeError as `read_json` does, and for any other value."""
    found = read_json(path, what)
    if not isinstance(found, dict):
        raise KvprobeError(f"{what} holds no JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found
