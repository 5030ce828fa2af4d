"""Where does kvprobe keep what it fetches, and how does a directory appear there whole or not at all?"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError
from kvprobe.files.whole import sweep_temporaries
from kvprobe.progress import Progress, silent

MANIFEST = "kvprobe.json"
_PARTIAL = ".partial-"


def home() -> Path:
    """The directory of everything kvprobe fetches: ``KVPROBE_HOME``, or else the platform's cache directory.

    Raises KvprobeError if KVPROBE_HOME cannot be a directory.
    """
    if chosen := os.environ.get("KVPROBE_HOME"):
        try:
            chosen.encode()
            return Path(chosen).expanduser()
        except (RuntimeError, UnicodeEncodeError) as error:
            why = "whose user has no home directory" if isinstance(error, RuntimeError) else "not UTF-8"
            raise KvprobeError(f"KVPROBE_HOME is {chosen!r}, {why}: set it to a writable directory") from None
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvprobe", appauthor=False))


def sha256(path: Path, *, progress: Progress = silent) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            # what is read at once needs no progress
            if total > len(block):
                progress(f"checking {path.name}", done, total, "bytes")
    return digest.hexdigest()


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a finished directory; None if it is absent, or if a file it names is missing or truncated.

    Compares sizes, which costs nothing; `verify` compares the checksums.
    """
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        checked = [
            (directory / name).stat().st_size == of["bytes"]
            and isinstance(of["sha256"], str)
            # a foreign manifest may name files elsewhere, or devices that never end
            and Path(name).name == name
            and (directory / name).is_file()
            for name, of in files.items()
        ]
    # whatever a damaged entry holds, it must not stop work on the others
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return manifest if checked and all(checked) else None


def verify(directory: Path, *, progress: Progress = silent) -> str | None:
    """What is wrong with a finished directory, by its manifest's SHA-256 of every file; None if nothing is."""
    manifest = read_manifest(directory)
    if manifest is None:
        return "a file is missing or truncated"
    for name, of in manifest["files"].items():
        if (got := sha256(directory / name, progress=progress)) != of["sha256"]:
            return f"{name} has the SHA-256 {got}, not {of['sha256']}"
    return None


def write_manifest(directory: Path, about: dict[str, Any], *, progress: Progress = silent) -> None:
    """Write the manifest of a directory: `about`, and the size and SHA-256 of every file."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path, progress=progress)}
        for path in sorted(directory.iterdir())
    }
    text = json.dumps(about | {"files": files}, indent=2, ensure_ascii=False)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def locked(target: Path, *, progress: Progress = silent) -> Iterator[None]:
    """Let one process at a time work on `target`; another waits and reports it.

    The operating system releases the lock when its holder dies, so a killed run blocks nobody.
    """
    import filelock

    target.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(target.parent / f".{target.name}.lock")
    start = time.monotonic()
    while True:
        try:
            lock.acquire(timeout=0.5)
            break
        except filelock.Timeout:
            waited = int(time.monotonic() - start)
            progress(f"waiting for another run to make {target.name}", waited, None, "s")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def try_lock(target: Path) -> Iterator[bool]:
    """Lock the file `target` for the block if no other process has: yields whether it did, without waiting.

    The operating system releases the lock when its holder dies. Raises KvprobeError if the lock cannot be written.
    """
    import filelock

    place = target.with_name(f".{target.name}.lock")
    lock = filelock.FileLock(place, timeout=0)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        yield False
        return
    except OSError as error:
        raise disk_error(error, target) from error
    try:
        yield True
    finally:
        lock.release()
        # two processes that meet at this moment may both go on: writes are atomic, and both write the same
        with contextlib.suppress(OSError):
            place.unlink()


def sweep(folder: Path) -> None:
    """Remove what killed runs left half-made in one of our folders; a lock protects what a live run is making."""
    for stale in folder.glob(".*.partial*"):
        name = stale.name[1:].rpartition(".partial")[0]
        with contextlib.ExitStack() as locks:
            # a training run locks its name; its weights are in a file of that name with a suffix
            if all(_is_free(folder / f".{stem}.lock", locks) for stem in {name, name.removesuffix(".safetensors")}):
                if stale.is_dir():
                    shutil.rmtree(stale, ignore_errors=True)
                else:
                    stale.unlink(missing_ok=True)
    sweep_temporaries(folder)


def sweep_all() -> None:
    """Sweep all our folders. A file that cannot be removed must not make a command fail."""
    with contextlib.suppress(OSError, KvprobeError):
        for folder in home().iterdir():
            if folder.is_dir():
                sweep(folder)


def _is_free(lock: Path, locks: contextlib.ExitStack) -> bool:
    """Whether nobody holds a lock; it is then ours until ``locks`` closes. A held lock always has its file."""
    import filelock

    with contextlib.suppress(filelock.Timeout):
        if lock.exists():
            locks.enter_context(filelock.FileLock(lock, timeout=0))
        return True
    return False


def atomic_dir(target: Path, build: Callable[[Path], None], *, progress: Progress = silent) -> Path:
    """Make the directory `target` with `build(directory)`, so that it appears whole or not at all.

    `build` fills a directory beside the target, which is renamed at the end; a target that is already whole (by its
    manifest's sizes) is left alone. Nothing half-written remains, even on Ctrl-C; the next run removes what a killed
    one left. Raises KvprobeError if the disk is full or the target cannot be written.
    """
    try:
        sweep(target.parent)
        with locked(target, progress=progress):
            for stale in target.parent.glob(f".{target.name}{_PARTIAL}*"):
                shutil.rmtree(stale, ignore_errors=True)
            if read_manifest(target) is not None:
                return target
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}{_PARTIAL}", dir=target.parent))
            try:
                fresh = work / "new"
                fresh.mkdir()
                build(fresh)
                if target.exists():  # without a whole manifest: damaged
                    target.rename(work / "damaged")
                fresh.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, target) from error
    return target


def disk_full(said: str, place: Path) -> bool:
    """Whether a child process failed because the disk is full: its output says so, or the disk had no room for it."""
    return "No space left" in said or shutil.disk_usage(place).free < 1 << 20


def disk_error(error: OSError, target: Path, *, hint: str | None = None) -> KvprobeError:
    """The same failure as one sentence: what could not be written where, and ``hint``, what to do about it."""
    if hint is None and home() not in target.absolute().parents:
        hint = "choose a place on another disk" if error.errno == errno.ENOSPC else "choose a writable one"
    if error.errno == errno.ENOSPC:
        free = shutil.disk_usage(target.parent).free if target.parent.exists() else 0
        return KvprobeError(
            f"the disk is full: {target.name} could not be written to {target.parent} ({free / 2**20:,.0f} MiB free); "
            f"make room, or {hint or 'set KVPROBE_HOME to a directory on another disk'}"
        )
    return KvprobeError(
        f"{target.name} could not be written to {target.parent}: {error.strerror or error}; "
        f"{hint or 'set KVPROBE_HOME to a writable directory'}"
    )


def check_writable(target: Path, *, hint: str) -> None:
    """Raise KvprobeError if ``target`` cannot be written: before the work, not after it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise disk_error(error, target, hint=hint) from error


# asks the kernel to kill this process with its parent, checks that the parent still lives, and becomes the command
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def run_watched(
    command: list[str], *, log: Path, watch: Callable[[], None], environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command, calling `watch` a few times a second; returns its exit status and all its output.

    The command ends with this process: on Ctrl-C, on SIGTERM and, on Linux, on SIGKILL.
    """
    tied = [sys.executable, "-ISc", _TIED, str(os.getpid()), *command] if sys.platform == "linux" else command
    with log.open("wb") as output:
        process = subprocess.Popen(
            tied, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    watch()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return status, log.read_text(encoding="utf-8", errors="replace")
