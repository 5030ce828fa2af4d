"""Which text is meant by a name, and what exactly was read?"""

import hashlib
import http.client
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.progress import Progress, silent
from kvprobe.results import write_whole
from kvprobe.store import disk_error, home

BUNDLED_SHA256 = "72555202e7c2c0f1c15bda2728a389669f762087f929391c6705c60c3800d3a2"
TIME_MACHINE_URL = "https://www.gutenberg.org/cache/epub/35/pg35.txt"
TIMEOUT_S = 15


@dataclass(frozen=True)
class Text:
    """A text and its fingerprint: ``sha256`` is of the raw bytes read, ``name`` never holds a path."""

    name: str
    sha256: str
    text: str


def read_text(name: str | None = None, *, progress: Progress = silent) -> Text:
    """Read the bundled passage (None or its name), a named text, a UTF-8 file, or standard input (``-``).

    A catalogue name wins over a file of that name (``./bundled`` is the file). A byte-order mark is dropped and line
    ends become one newline character, as Python reads any text; nothing else is normalised. ``time-machine`` is
    H. G. Wells, The Time Machine (public domain): ``texts/time-machine.txt`` under kvprobe's own directory, fetched
    there from Project Gutenberg (ebook 35) if absent. Where Gutenberg's START and END lines stand in it, only what is
    between them is text; the SHA-256 is of the file.
    Raises KvprobeError for what is missing, unreadable, binary, not UTF-8 (with the byte offset) or empty.
    """
    name = "bundled" if name is None else name
    if name in TEXTS:
        data = TEXTS[name](progress)
        text = _decode(name, data)
        text = _between_markers(text) if name == "time-machine" else text
    elif name == "-":
        name, data = "stdin", sys.stdin.buffer.read()
        text = _decode("standard input", data)
    else:
        data = _read_file(name)
        text = _decode(name, data)
        name = Path(name).name
    return Text(name, hashlib.sha256(data).hexdigest(), text)


def _decode(shown: str, data: bytes) -> str:
    if (nul := data.find(b"\0")) >= 0:
        raise KvprobeError(f"{shown} is binary: a NUL byte at offset {nul}; give a plain UTF-8 text file")
    mark = b"\xef\xbb\xbf"
    try:
        text = data.removeprefix(mark).decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + len(mark) * data.startswith(mark)
        raise KvprobeError(
            f"{shown} is not UTF-8: byte 0x{data[at]:02x} at offset {at}; convert it to UTF-8 first"
        ) from None
    if not text.strip():
        raise KvprobeError(f"{shown} holds no text ({len(data)} bytes); give a file with words in it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_file(path: str) -> bytes:
    known = f"or use a built-in text: {', '.join(TEXTS)}"
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise KvprobeError(f"no text named {path!r}: there is no such file; check the path, {known}") from None
    except IsADirectoryError:
        raise KvprobeError(f"{path!r} is a directory; name one UTF-8 file in it, {known}") from None
    except OSError as error:
        raise KvprobeError(f"cannot read {path!r} ({error.strerror}); mend that, {known}") from None


def _bundled(progress: Progress) -> bytes:
    data = files("kvprobe").joinpath("data/passage.txt").read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != BUNDLED_SHA256:
        raise KvprobeError(f"the bundled passage was changed: SHA-256 {found}, not {BUNDLED_SHA256}; reinstall kvprobe")
    return data


def _time_machine(progress: Progress) -> bytes:
    path = home() / "texts" / "time-machine.txt"
    if not path.exists():
        try:
            data = _fetch(TIME_MACHINE_URL, progress)
        except (OSError, http.client.HTTPException) as error:
            raise KvprobeError(
                f"time-machine is not on this machine and {TIME_MACHINE_URL} could not be read ({error}); "
                f"put the text at {path}, or use the text 'bundled'"
            ) from None
        try:
            write_whole(path, data)
        except OSError as error:
            raise disk_error(error, path) from error
    return _read_file(str(path))


def _fetch(url: str, progress: Progress) -> bytes:
    """Raise OSError or HTTPException for anything but the whole file."""
    request = urllib.request.Request(url, headers={"User-Agent": "kvprobe"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        total = int(answer.headers["Content-Length"]) if "Content-Length" in answer.headers else None
        data = b""
        while block := answer.read(1 << 15):
            data += block
            progress("time-machine", len(data), total, "bytes")
    # A cut connection ends a plain read without an error.
    if total is not None and len(data) != total:
        raise OSError(f"{len(data)} of {total} bytes came")
    # The edition changes with the site's repairs, so no checksum can be pinned; its END line says that it is whole.
    if b"*** END OF" not in data:
        raise OSError("what came is not the book: it has no END line")
    return data


def _between_markers(text: str) -> str:
    """Drop Project Gutenberg's header and footer, where they stand, and the blank lines next to them."""
    lines = text.split("\n")
    starts = [i + 1 for i, line in enumerate(lines) if line.startswith("*** START OF")]
    ends = [i for i, line in enumerate(lines) if line.startswith("*** END OF")]
    if not starts and not ends:
        return text
    return "\n".join(lines[starts[0] if starts else 0 : ends[0] if ends else len(lines)]).strip("\n") + "\n"


TEXTS: dict[str, Callable[[Progress], bytes]] = {"bundled": _bundled, "time-machine": _time_machine}
"""Texts that need no path: name → its raw bytes."""
