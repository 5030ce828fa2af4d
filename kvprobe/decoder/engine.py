"""How is a decoder run on a cache? The protocol of reading and of decoding, and the readable decoder as it stands."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from kvprobe.attention.call import AttentionCall
from kvprobe.caches.kv_cache import KVCache
from kvprobe.decoder import linear
from kvprobe.decoder.model import Attend, Decoder


class Stepper(Protocol):
    """A decode step bound to one decoder and one cache.

    ``name`` is "numba" or "torch"; ``note`` says why it is not the fastest, or None; ``start_up_s`` the seconds that
    making it ready took, compilation included.
    """

    name: str
    note: str | None
    start_up_s: float

    def step(self, token: Tensor) -> Tensor:
        """Feed one token a row, ``[batch]``, after what the cache holds; the next logits, ``[batch, vocab]``.

        Raises ValueError, before anything is written, where the cache or the model's positions do not suffice.
        """
        ...


class TorchStep:
    """The decoder as it stands, for any batch, device and ``attend``."""

    name = "torch"
    start_up_s = 0.0

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, attend: Attend = AttentionCall.attend, note: str | None = None
    ) -> None:
        self.note = note
        self._decoder, self._cache, self._attend = decoder, cache, attend

    @torch.no_grad()
    def step(self, token: Tensor) -> Tensor:
        """As :class:`Stepper` says, in the weights' dtype."""
        x = self._decoder.body(token[:, None], cache=self._cache, attend=self._attend)
        return self._decoder.logits(x[:, -1])


class Reader(Protocol):
    """A way to read prompts bound to one decoder and one cache; ``name`` is "numba" or "torch"."""

    name: str

    def read(self, ids: Tensor) -> Tensor:
        """Feed ``ids`` ``[batch, n_tokens]`` after what the cache holds; the last token's ``[batch, hidden]``.

        What :meth:`Decoder.body` gives of it. Raises ValueError, before anything is written, where the cache or the
        model's positions do not suffice.
        """
        ...


class TorchReader:
    """The decoder as it stands, with the matrix product that is the fastest here."""

    name = "torch"

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """As :class:`Reader` says."""
        with linear.fastest(self._decoder, ids.shape[1]):
            return self._decoder.body(ids, cache=self._cache)[:, -1]


@contextmanager
def one_thread(step: Stepper | Reader | None) -> Iterator[None]:
    """Inside, torch works on one thread if ``step`` has threads of its own.

    Two pools on the same cores take turns at them: the few small operations between two compiled steps would cost
    more than the steps.
    """
    n_threads = torch.get_num_threads()
    if step is None or step.name == "torch" or n_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
