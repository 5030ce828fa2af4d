"""How is a decoder run on a cache? The protocol of an engine, and the one that is the readable decoder itself."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from kvprobe.attention.call import Attend, AttentionCall
from kvprobe.caches.layer import KVCache
from kvprobe.decoder.model import Decoder
from kvprobe.decoder.widening import widening

Clock = Callable[[], float]


class Engine(Protocol):
    """What reads prompts and decodes, bound to one decoder and one cache.

    ``name`` is "torch" or "numba"; ``note`` says why it is not the compiled one, or None. ``start_up_s`` has the
    seconds that getting ready took, compilation included, by what was made: "numba step", "numba reader".
    """

    name: str
    note: str | None
    start_up_s: dict[str, float]
    cache: KVCache

    def reads(self, n_tokens: int) -> str:
        """What would read ``n_tokens`` more tokens a row: "torch" or "numba". A rule decides; nothing is measured."""

    def ready(self, n_prompt: int = 0) -> None:
        """Get ready now, rather than at first use, for a prompt of ``n_prompt`` tokens a row and for decoding."""

    def prefill(self, ids: Tensor, *, left_pad: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """Feed a prompt ``[batch, length]`` after what the cache holds; the logits after it, ``[batch, vocab]``.

        ``chunk`` is the most tokens at once (default: all, or as many as the window of a rolling cache, so that memory
        does not grow with the prompt); the result is the same in any chunks. ``left_pad`` int ``[batch]`` is the left
        padding of each row, for a cache that is still empty. Raises ValueError, before anything is written, if the
        cache or the model's positions do not suffice.
        """

    def decode(self, tokens: Tensor) -> Tensor:
        """Feed ``[batch, n]`` tokens after what the cache holds; the logits after each, ``[batch, n, vocab]``.

        One token a row is a step; several verify a draft. Raises ValueError as `prefill`.
        """


class TorchEngine:
    """The decoder as it stands, for any batch, device, cache and ``attend``; logits in the weights' dtype."""

    name = "torch"

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, attend: Attend = AttentionCall.attend, note: str | None = None
    ) -> None:
        if cache.shape != decoder.config.layers:
            raise ValueError(f"the cache belongs to another model: {cache.shape}, not {decoder.config.layers}")
        self.note, self.start_up_s = note, dict[str, float]()
        self.decoder, self.cache, self._attend = decoder, cache, attend

    def reads(self, n_tokens: int) -> str:
        """As :class:`Engine` says."""
        return "torch"

    def ready(self, n_prompt: int = 0) -> None:
        """As :class:`Engine` says: there is nothing to prepare."""

    @torch.no_grad()
    def prefill(self, ids: Tensor, *, left_pad: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """As :class:`Engine` says."""
        cache = self.cache
        chunk = (cache.window or ids.shape[1]) if chunk is None else chunk
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        if ids.shape[1] < 1:
            raise ValueError("the prompt has no tokens: there is nothing to continue")
        if left_pad is not None:
            if cache.length:
                raise ValueError(f"padding comes first, but the cache already holds {cache.length} tokens")
            cache.left_pad = left_pad
        cache.check(*ids.shape)
        if cache.left_pad is not None and int(cache.left_pad.max()) >= cache.length + ids.shape[1]:
            raise ValueError(f"a row is only padding: {cache.left_pad.tolist()} of {ids.shape[1]} tokens")
        for part in ids.split(chunk, dim=1):
            x = self._read(part)
        return self.decoder.logits(x)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """As :class:`Engine` says."""
        x = self.decoder.body(tokens, cache=self.cache, attend=self._attend)
        if tokens.shape[1] == 1:
            # one product of a matrix and a vector a row: it rounds otherwise than the product of several
            return self.decoder.logits(x[:, -1])[:, None]
        return self.decoder.logits(x)

    def _read(self, ids: Tensor) -> Tensor:
        """What :meth:`Decoder.body` gives for the last of ``ids``: ``[batch, hidden]``."""
        with widening(self.decoder, ids.shape[1]):
            return self.decoder.body(ids, cache=self.cache, attend=self._attend)[:, -1]


@torch.no_grad()
def reread(decoder: Decoder, ids: Tensor, left_pad: Tensor | None = None) -> Tensor:
    """The logits after ``ids`` ``[batch, length]`` without a cache, everything read again: ``[batch, vocab]``."""
    return decoder.logits(decoder.body(ids, left_pad=left_pad)[:, -1])


@contextmanager
def one_thread(active: bool = True) -> Iterator[None]:
    """Inside, torch works on one thread if ``active``: compiled code has threads of its own.

    Two pools compete for the same cores: the few small operations between two compiled steps would cost more than
    the steps.
    """
    n_threads = torch.get_num_threads()
    if not active or n_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def device_clock(device: torch.device | str) -> Clock:
    """A clock in seconds that first waits for ``device``; without that it would time only the launch."""
    device = torch.device(device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    return now


@contextmanager
def timed(start_up_s: dict[str, float], what: str) -> Iterator[None]:
    """Adds the seconds that the block took to ``start_up_s`` under ``what``."""
    started = time.perf_counter()
    yield
    start_up_s[what] = start_up_s.get(what, 0.0) + time.perf_counter() - started
