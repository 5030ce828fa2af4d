"""Which run was it? Its settings and versions, where and when."""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kvprobe import __version__

# the packages whose versions can change a number
VERSIONED = ("kvprobe", "torch", "transformers", "tokenizers", "numpy", "scipy", "numba")


def run_record(*parts: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The record of a run: ``parts`` (model, passage) and ``settings``, and where and when it ran.

    It names files by name and SHA-256, never by path, and the machine by its processor, never by host.
    """
    record: dict[str, Any] = {}
    for part in (*parts, settings):
        if twice := sorted(record.keys() & part.keys()):
            raise ValueError(f"a run record says {twice[0]} twice")
        record |= part
    record["versions"] = versions(*VERSIONED)
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


def versions(*packages: str) -> dict[str, str]:
    """The version of each of ``packages``, and before them Python's."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            # of kvprobe the code that runs, whatever else is installed
            found[package] = __version__ if package == "kvprobe" else metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
