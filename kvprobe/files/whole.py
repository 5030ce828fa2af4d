"""How is a file written so that it is there whole or, after a kill, as it was before?"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = ".kvprobe-"


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or, after a kill or on a full disk, as it was before.

    A link stays a link: what it points to is written. A device or a pipe is written into, never replaced.
    """
    path = Path(path).resolve()
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with path.open("wb") as special:
            special.write(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(path.parent)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{_TEMPORARY}{os.getpid()}-")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # the name that the user knows
    try:
        with os.fdopen(handle, "wb") as file:
            _is_ours(file)
            file.write(data)
        # mkstemp makes private files; a result is as readable as any file the user writes
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sweep_temporaries(folder: Path) -> None:
    """Remove what runs that were killed in the middle of `write_whole` left in a folder."""
    for stale in folder.glob(f"{_TEMPORARY}*-*"):
        owner = stale.name.removeprefix(_TEMPORARY).partition("-")[0]
        # another run may sweep as well, and what cannot be removed is no reason to write nothing
        with suppress(OSError):
            if owner.isdecimal() and not _lives(int(owner)):
                with stale.open("r+b") as file:
                    if _is_ours(file):
                        stale.unlink()


def _lives(process: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(process))


def _is_ours(file: BinaryIO) -> bool:
    """Lock a file, if nobody has, until it is closed: whose process is not of this machine may write it as well."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
