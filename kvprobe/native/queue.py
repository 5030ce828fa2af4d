"""How do threads share a list of pieces without a barrier? By tickets, and counts of what is done.

A thread that wants work takes the next ticket and waits until the pieces that it depends on are done; no thread owns
a part. A table of int64 words begins with what is needed for this, and `open_step` lets its pieces be taken.
"""

from typing import Any

import numpy as np

from kvprobe.native.intrinsics import add, at, compiled, read, swap, yield_core

# The first words of every table: how many pieces a step has, and the addresses of three counters that only rise, of
# pieces taken, done, and there to be taken.
TOTAL, TAKEN, DONE, LIMIT = range(4)

_WORD = np.int64(0)


@compiled
def wait(counter: int, wanted: int) -> None:
    """Wait until the counter at this address is ``wanted``."""
    spins = 0
    while read(counter) < wanted:
        spins += 1
        # the thread waited for may need this very core
        if spins > 2000:
            yield_core()


@compiled
def take(taken: int, limit: int) -> int:
    """The next ticket below ``limit`` of the counter at this address, or -1."""
    while True:
        ticket = read(taken)
        if ticket >= limit:
            return -1
        if swap(taken, ticket, ticket + 1):
            return ticket


@compiled
def open_step(shared: Any) -> None:
    """Let the pieces of one more step be taken; a thread that takes one sees all that was written before."""
    table = at(shared.ctypes.data, _WORD)
    add(table[LIMIT], table[TOTAL])


@compiled
def is_open(shared: Any) -> bool:
    """Whether pieces of the last step are not done yet."""
    table = at(shared.ctypes.data, _WORD)
    return read(table[DONE]) < read(table[LIMIT])
