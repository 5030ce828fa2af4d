"""What becomes of Ctrl-C? Wherever it lands, it ends a command with 130, in one line; SIGTERM does with 143.

Imported before anything that takes time, so it imports next to nothing. Whoever only uses the library keeps the
handlers that they have.
"""

import os
import sys

TYPE_CHECKING = False  # as typing has it, without its import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERRUPT, TERMINATE = 2, 15
SAID = {INTERRUPT: "kvprobe: interrupted", TERMINATE: "kvprobe: terminated"}
# what was started, before the arguments that are left: `kvprobe …`, `python -m kvprobe …`
STARTED = "".join(sys.orig_argv[-len(sys.argv) :][:1]).replace("\\", "/").rpartition("/")[2]
IS_PROGRAM = STARTED in ("kvprobe", "kvprobe.exe", "-mkvprobe")


def _leave(number: int) -> None:
    # a bar has hidden the cursor of its terminal
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

# the default of each, in whose place alone a handler is set: a process in the background ignores Ctrl-C
DEFAULTS: "dict[int, signal._HANDLER]" = {INTERRUPT: signal.default_int_handler, TERMINATE: signal.SIG_DFL}


class Interrupted(KeyboardInterrupt):
    """What a signal raises.

    Python ends a process by SIGINT, whatever its exit status, if KeyboardInterrupt itself left an ``exec`` of a string,
    as dataclasses and numba have.
    """


_seen: list[int] = []
_has_work = False


def _importing(frame: "FrameType | None") -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _note(number: int, frame: "FrameType | None") -> None:
    # nothing is half made while a library is imported, and one that is broken off there may abort the process
    if _seen or not _has_work or _importing(frame):
        _leave(number)
    _seen.append(number)
    raise Interrupted


def guard() -> None:
    """From here on a signal ends the process at once: nothing is under way."""
    global _has_work
    _has_work = False
    try:
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) is default:
                signal.signal(number, _note)
    except ValueError:
        # only the main thread may ask, and only it is interrupted
        pass


def release() -> None:
    """Undo `guard`, unless this is the program that ends with its command."""
    if IS_PROGRAM:
        return
    for number, default in DEFAULTS.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, default)


def work() -> "Callable[[], None]":
    """From here on the first signal raises KeyboardInterrupt, so that what is under way is cleared up.

    Returns what is to be called when nothing is left to clear up.
    """
    global _has_work
    guard()
    _seen.clear()
    unraisable = sys.unraisablehook

    def swallowed(what: "sys.UnraisableHookArgs") -> None:
        # Python drops what is raised in a finalizer or a callback from C; the signal is noted and not lost
        if not (_seen and isinstance(what.exc_value, KeyboardInterrupt)):
            unraisable(what)

    def done() -> None:
        global _has_work
        _has_work = False
        sys.unraisablehook = unraisable

    sys.unraisablehook = swallowed
    # while the interpreter ends as well
    atexit.unregister(guard)
    atexit.register(guard)
    _has_work = True
    return done


def seen() -> int | None:
    """The signal that ends this command; None if there was none."""
    return _seen[0] if _seen else None


def check() -> None:
    """Raise KeyboardInterrupt if one was raised before where Python drops it, as in a finalizer."""
    if _has_work and _seen:
        raise Interrupted


def _over() -> None:
    # nothing of the command is left that could be interrupted
    if signal.getsignal(INTERRUPT) is _note:
        signal.signal(INTERRUPT, signal.SIG_IGN)


if IS_PROGRAM:
    guard()
    # what is registered first is called last
    atexit.register(_over)
