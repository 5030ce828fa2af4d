"""What does Ctrl-C do? Wherever it lands, it ends a command with exit code 130 and one line; SIGTERM with 143.

Imported before anything that takes time, so it imports next to nothing. A program that only uses the library keeps its
own handlers.
"""

import os
import sys

TYPE_CHECKING = False  # as typing has it, without its import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERRUPT, TERMINATE = 2, 15
SAID = {INTERRUPT: "kvprobe: interrupted", TERMINATE: "kvprobe: terminated"}
# the program that was started, before its arguments: `kvprobe …`, `python -m kvprobe …`
STARTED = "".join(sys.orig_argv[-len(sys.argv) :][:1]).replace("\\", "/").rpartition("/")[2]
IS_PROGRAM = STARTED in ("kvprobe", "kvprobe.exe", "-mkvprobe")


def _leave(number: int) -> None:
    # a progress bar has hidden the terminal's cursor
    line = ("\x1b[?25h" if os.isatty(2) else "") + SAID[number] + "\n"
    try:
        os.write(2, line.encode())
    finally:
        os._exit(128 + number)


try:
    import atexit
    import signal
except KeyboardInterrupt:
    if IS_PROGRAM:
        _leave(INTERRUPT)
    raise

# only these defaults are replaced: a process in the background ignores Ctrl-C and must go on doing so
DEFAULTS: "dict[int, signal._HANDLER]" = {INTERRUPT: signal.default_int_handler, TERMINATE: signal.SIG_DFL}


class Interrupted(KeyboardInterrupt):
    """What a signal raises.

    If KeyboardInterrupt itself leaves an ``exec`` of a string (dataclasses and numba use it), Python ends the process
    by SIGINT, whatever its exit status.
    """


_seen: list[int] = []
_has_work = False


def _importing(frame: "FrameType | None") -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _note(number: int, frame: "FrameType | None") -> None:
    # an import leaves nothing half-written, and interrupting one may abort the process
    if _seen or not _has_work or _importing(frame):
        _leave(number)
    _seen.append(number)
    raise Interrupted


def guard() -> None:
    """From now on a signal ends the process at once: no work is in progress."""
    global _has_work
    _has_work = False
    try:
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) is default:
                signal.signal(number, _note)
    except ValueError:
        # only the main thread may set handlers, and only it is interrupted
        pass


def release() -> None:
    """Undo `guard`, unless this process is the kvprobe command itself."""
    if IS_PROGRAM:
        return
    for number, default in DEFAULTS.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, default)


def work() -> "Callable[[], None]":
    """From now on the first signal raises KeyboardInterrupt, so that work in progress can clean up.

    Returns a function to call once nothing is left to clean up.
    """
    global _has_work
    guard()
    _seen.clear()
    unraisable = sys.unraisablehook

    def swallowed(what: "sys.UnraisableHookArgs") -> None:
        # Python drops what is raised in a finalizer or a callback from C; the signal is recorded, so not lost
        if not (_seen and isinstance(what.exc_value, KeyboardInterrupt)):
            unraisable(what)

    def done() -> None:
        global _has_work
        _has_work = False
        sys.unraisablehook = unraisable

    sys.unraisablehook = swallowed
    # also while the interpreter shuts down
    atexit.unregister(guard)
    atexit.register(guard)
    _has_work = True
    return done


def seen() -> int | None:
    """The signal that ends this command, or None."""
    return _seen[0] if _seen else None


def check() -> None:
    """Raise KeyboardInterrupt if an earlier one was dropped by Python, as in a finalizer."""
    if _has_work and _seen:
        raise Interrupted


def _over() -> None:
    # nothing is left to interrupt
    if signal.getsignal(INTERRUPT) is _note:
        signal.signal(INTERRUPT, signal.SIG_IGN)


if IS_PROGRAM:
    guard()
    # registered first, called last
    atexit.register(_over)
