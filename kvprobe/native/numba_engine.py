"""How is a decoder run compiled? Prompts by phases, tokens by steps; torch runs what neither can."""

from functools import cached_property

import torch
from torch import Tensor

from kvprobe.caches.layer import KVCache
from kvprobe.decoder.model import Decoder
from kvprobe.decoder.torch_engine import TorchEngine, one_thread, timed
from kvprobe.decoder.widening import FEWEST_TOKENS
from kvprobe.native.decode_program import NumbaStep
from kvprobe.native.eligible import unreadable
from kvprobe.native.prefill_program import NumbaReader


class NumbaEngine(TorchEngine):
    """Compiled code between the decoder's own weights and the cache's own buffers, on a CPU.

    Prompts of at least `FEWEST_TOKENS` are read compiled where the cache allows it, shorter ones by torch; every token
    is decoded compiled, its logits in float32. As many threads as torch has at the first use, or ``n_threads``.
    """

    name = "numba"

    def __init__(self, decoder: Decoder, cache: KVCache, *, n_threads: int | None = None) -> None:
        super().__init__(decoder, cache)
        self._n_threads = n_threads

    def reads(self, n_tokens: int) -> str:
        """As :class:`kvprobe.decoder.torch_engine.Engine` says."""
        n_tokens = min(n_tokens, self.cache.window or n_tokens)
        return "torch" if n_tokens < FEWEST_TOKENS or unreadable(self.cache, n_tokens) else "numba"

    def ready(self, n_prompt: int = 0) -> None:
        """As :class:`kvprobe.decoder.torch_engine.Engine` says."""
        _ = self._step
        if n_prompt and self.reads(n_prompt) == "numba":
            _ = self._reader

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """As :class:`kvprobe.decoder.torch_engine.Engine` says."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [batch, n], got {[*tokens.shape]}")
        if not self.cache.alike or (self.cache.n_sink and self.cache.left_pad is not None):
            # rows of another length each, or with sinks of their own: one row's place is not the other's
            return super().decode(tokens)
        # torch's threads, woken to stack the logits, would wait for more work on the cores that the next step needs
        with one_thread():
            return torch.stack([self._step.step(token) for token in tokens.unbind(1)], dim=1)

    @cached_property
    def _step(self) -> NumbaStep:
        with timed(self.start_up_s, "numba step"):
            return NumbaStep(self.decoder, self.cache, n_threads=self._n_threads)

    @cached_property
    def _reader(self) -> NumbaReader:
        with timed(self.start_up_s, "numba reader"):
            return NumbaReader(self.decoder, self.cache, n_threads=self._n_threads)

    def _read(self, ids: Tensor) -> Tensor:
        return self._reader.read(ids) if self.reads(ids.shape[1]) == "numba" else super()._read(ids)
