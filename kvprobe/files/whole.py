"""How is a file written so that, even after a kill, it is either new and complete or as it was before?"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = ".kvprobe-"


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or, after a kill or on a full disk, leave it as it was.

    A link stays a link: its target is written. A device or a pipe is written into, never replaced.
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
        # mkstemp makes private files; a result should be as readable as any file the user writes
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sweep_temporaries(folder: Path) -> None:
    """Remove what runs killed inside `write_whole` left in a folder."""
    for stale in folder.glob(f"{_TEMPORARY}*-*"):
        owner = stale.name.removeprefix(_TEMPORARY).partition("-")[0]
        # another run may sweep too, and a file that cannot be removed must not stop the write
        with suppress(OSError):
            if owner.isdecimal() and not _lives(int(owner)):
                with stale.open("r+b") as file:
                    if _is_ours(file):
                        stale.unlink()


def _lives(process: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(process))


def _is_ours(file: BinaryIO) -> bool:
    """Lock a file until it is closed, if nobody has: its writer may be a process on another machine."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
