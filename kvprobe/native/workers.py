"""Which threads compute a table's pieces, and what keeps the memory alive that they point into?"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprobe.decoder.model import Norm
from kvprobe.native import queue

# takes pieces until none is left: (table, number of the thread, zeros of the stored types)
Work = Callable[..., None]
_ZEROS: dict[torch.dtype, Any] = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}


class Arena:
    """What the addresses in the table point into, kept alive as long as they are used."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def hold(self, *tensors: Tensor) -> None:
        """Keep the memory of ``tensors``, even if a parameter is given other memory (``.to``, ``.data``) later."""
        self.kept += [tensor.detach() for tensor in tensors]

    def floats(self, count: int) -> Tensor:
        """A new float32 vector of zeros."""
        return self.room(count).zero_()

    def room(self, count: int) -> Tensor:
        """A new float32 vector with arbitrary content, whose memory is committed as it is written."""
        # whatever the user's default dtype and device
        self.kept.append(torch.empty(count, dtype=torch.float32, device="cpu"))
        return self.kept[-1]

    def words(self, count: int) -> Any:
        """A new int64 vector of zeros, a cache line for each if they are counters."""
        self.kept.append(np.zeros(count, dtype=np.int64))
        return self.kept[-1]

    def vector(self, *parts: Tensor) -> int:
        """The address of a float32 copy of ``parts``, one after the other."""
        self.kept.append(torch.cat([part.detach().float().reshape(-1) for part in parts]))
        return int(self.kept[-1].data_ptr())

    def matrix(self, weight: Tensor) -> tuple[int, bool]:
        """The address of a weight ``[out, in]`` and whether it is stored as ``[in, out]`` (GPT-2's)."""
        if not weight.is_contiguous() and not (weight.stride(0) == 1 and weight.stride(1) >= weight.shape[0]):
            weight = weight.contiguous()
        self.hold(weight)
        return int(weight.data_ptr()), not weight.is_contiguous()

    def biases(self, *modules: Any) -> int:
        """The address of the biases that ``modules`` have, one after the other; 0 if there are none."""
        biases = [module.bias for module in modules if getattr(module, "bias", None) is not None]
        return self.vector(*biases) if biases else 0


def vector_of(norm: Any, arena: Arena) -> int:
    """The address of what a norm multiplies with and, for a LayerNorm, after it of what it adds."""
    if isinstance(norm, Norm):
        return arena.vector(norm.weight.float() + norm.offset)
    return arena.vector(norm.weight, norm.bias)


class WorkerPool:
    """Threads that wait for a step to open. They hold nothing but the arena, and end with the pool.

    ``stored`` are the dtypes of weights and cache.
    """

    def __init__(
        self, work: Work, n_threads: int, table: Any, stored: tuple[torch.dtype, torch.dtype], arena: Arena
    ) -> None:
        kinds = tuple(_ZEROS[dtype] for dtype in stored)
        self._work, self._table, self._kinds = work, table, kinds
        self._gates = [threading.Lock() for _ in range(n_threads - 1)]
        closing = threading.Event()
        threads = []
        for number, gate in enumerate(self._gates, start=1):
            gate.acquire()
            # daemons, since the interpreter waits for others before it lets us close the pool
            arguments = (work, gate, closing, table, number, kinds, arena)
            threads.append(threading.Thread(target=_serve, args=arguments, name=f"kvprobe step {number}", daemon=True))
            threads[-1].start()
        weakref.finalize(self, _close, self._gates, closing, threads)
        # no piece is open yet: this compiles, or loads what an earlier process compiled
        work(table, 1, *kinds)

    def finish(self) -> None:
        """Finish what an interrupt left open, so that the next step starts from its own first piece.

        Only once the cache has begun a pass: before, the open pieces may be another thread's.
        """
        if queue.is_open(self._table):
            self._work(self._table, 0, *self._kinds)

    def run(self) -> None:
        """One step, from opening it to its last piece; nothing may stand open (:meth:`finish`)."""
        try:
            queue.open_step(self._table)
            for gate in self._gates:
                _release(gate)
            self._work(self._table, 0, *self._kinds)
        except BaseException:
            # otherwise the open pieces would be written into whatever the cache holds later
            self.finish()
            raise


def _serve(work: Work, gate: Any, closing: Any, table: Any, thread: int, kinds: tuple[Any, ...], arena: Arena) -> None:
    while True:
        gate.acquire()
        if closing.is_set():
            return
        work(table, thread, *kinds)


def _release(gate: Any) -> None:
    # a thread still at the step before finds the gate open when it returns
    if gate.locked():
        gate.release()


def _close(gates: list[Any], closing: Any, threads: list[threading.Thread]) -> None:
    closing.set()
    for gate in gates:
        _release(gate)
    for thread in threads:
        # a daemon that asks for the interpreter while it shuts down is ended inside compiled code, which aborts
        # the whole process: let each return first
        if thread is not threading.current_thread():
            thread.join(timeout=10)
