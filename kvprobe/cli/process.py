"""Which settings of its process does a command change, so that memory and imports cost less?

Only for a process that ends with its command, not for a library: the settings hold for the whole interpreter.
"""

import atexit
import ctypes
import gc
import sys

# parameters of glibc's mallopt
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def tune_process() -> None:
    """Collect garbage rarely, never at the end, and keep freed memory for the next tensor."""
    # importing torch and transformers makes a million permanent objects: a collector that walks them repeatedly, and
    # once more at exit, takes 1.5 s of a 12 s command
    gc.set_threshold(100_000)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    if sys.platform != "linux":
        return
    # By default every large tensor is mapped anew and unmapped when freed, with a page fault for each 4 KiB: 0.8 of the
    # 3.9 s of a 1,024-token pass. C libraries other than glibc have no mallopt, or ignore it.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
