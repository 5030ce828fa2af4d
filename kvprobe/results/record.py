"""Which run was it? What it was given, with which versions, where and when."""

import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kvprobe import __version__

# the packages whose version can change a number
VERSIONED = ("kvprobe", "torch", "transformers", "tokenizers", "numpy", "scipy", "numba")


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
