"""Which way to read a prompt and to decode is the fastest here, and the same? Chosen once, named in every run record.

    reader, step = fast.reader(decoder, cache, n_tokens), fast.stepper(decoder, cache)
    x = reader.read(ids)               # as decoder.body, of the last token; reader.name is "numba" or "torch"
    logits = step.step(token)          # as generate.decode; step.name is "numba" or "torch"

The torch ways are the readable decoder itself. Those of numba (:mod:`kvprobe.native.decode_kernels`,
:mod:`kvprobe.native.prefill_kernels`) read the same weights and write the same cache buffers, so all can take turns.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from kvprobe.attention.call import AttentionCall
from kvprobe.caches.kv_cache import FullCache, KVCache, RollingCache
from kvprobe.decoder import linear
from kvprobe.decoder.model import MLP, Attend, Attention, Block, Decoder, DecoderConfig, Norm

Kind = Literal["auto", "numba", "torch"]

# what compiled code computes itself, where nobody would see a hook or another module
_KNOWN = {
    *(Decoder, Block, Attention, MLP, Norm),
    *(nn.Linear, nn.LayerNorm, nn.Embedding, nn.Identity, nn.ModuleList),
}


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


def stepper(decoder: Decoder, cache: KVCache, *, attend: Attend | None = None, kind: Kind = "auto") -> Stepper:
    """The fastest step that does the same, or the ``kind`` asked for.

    Raises ValueError where "numba" is asked for and cannot be, saying why.
    """
    why_not = _why_not(decoder, cache, attend, kind)
    if kind == "torch" or why_not:
        note = why_not and f"decode step: torch, since {why_not}"
        return TorchStep(decoder, cache, attend=attend or AttentionCall.attend, note=note)
    started = time.perf_counter()
    try:
        from kvprobe.native.decode_program import NumbaStep
    except ImportError as error:
        # installed, but not for this numpy or this Python
        why_not = f"numba cannot be imported ({error})"
        if kind == "numba":
            raise ValueError(f"the numba step cannot be used: {why_not}") from error
        return TorchStep(decoder, cache, note=f"decode step: torch, since {why_not}")
    step = NumbaStep(decoder, cache)
    step.start_up_s = time.perf_counter() - started
    return step


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


def reader(decoder: Decoder, cache: KVCache, n_tokens: int, *, chunk: int | None = None, kind: Kind = "auto") -> Reader:
    """The fastest way to read ``n_tokens`` tokens a row into ``cache`` as it stands, at most ``chunk`` at once.

    The compiled one where it is faster than torch on this machine, which is measured once ("numba": without asking),
    of prompts of at least `linear.FEWEST_TOKENS`, and where it can (:func:`unreadable`). Raises ValueError where
    "numba" is asked for and cannot be, whatever the prompt, saying why.
    """
    why_not = _why_not(decoder, cache, None, kind)
    few = min(n_tokens, chunk or n_tokens) < linear.FEWEST_TOKENS
    if kind == "torch" or why_not or few or unreadable(cache, n_tokens):
        return TorchReader(decoder, cache)
    try:
        from kvprobe.native.prefill_program import NumbaReader
    except ImportError as error:
        if kind == "numba":
            raise ValueError(f"the numba reader cannot be used: numba cannot be imported ({error})") from error
        return TorchReader(decoder, cache)
    if kind == "auto" and not compiled_reads_faster(decoder.embedding.weight.dtype, torch.get_num_threads()):
        return TorchReader(decoder, cache)
    return NumbaReader(decoder, cache)


@lru_cache(maxsize=8)
def compiled_reads_faster(dtype: torch.dtype, n_threads: int) -> bool:
    """Whether on this machine, with so many threads, prompts are read faster compiled than by torch: both timed."""
    from kvprobe.native.prefill_program import NumbaReader

    config = DecoderConfig(
        n_layers=2, n_heads=8, n_kv_heads=4, head_dim=64, hidden=512, mlp_width=1536, vocab=64, max_positions=256
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        decoder = Decoder(config).to(dtype)
        ids = torch.randint(config.vocab, (1, config.max_positions))
    cache = decoder.full_cache(config.max_positions)
    best: dict[str, float] = {}
    readers: list[Reader] = [NumbaReader(decoder, cache, n_threads=n_threads), TorchReader(decoder, cache)]
    for turn in range(4):
        for each in readers:
            cache.reset()
            # torch's threads wait some milliseconds for more work, on the cores that are needed
            time.sleep(0.02)
            started = time.perf_counter()
            each.read(ids)
            taken = time.perf_counter() - started
            if turn:
                # the first call sets up; of the others the best, since a busy machine only ever adds
                best[each.name] = min(best.get(each.name, taken), taken)
    return best["numba"] * linear.GAIN < best["torch"]


def unreadable(cache: KVCache, n_tokens: int) -> str | None:
    """Why the compiled reader cannot read ``n_tokens`` more tokens a row into ``cache``; None where it can."""
    if type(cache) is not FullCache:
        return f"it does not know the cache {type(cache).__name__}"
    if cache.pads is not None:
        return "it takes no padding"
    if any(cache.length + n_tokens > keys.shape[2] for keys in cache.keys):
        return "a ring of the cache would roll"
    return None


def _why_not(decoder: Decoder, cache: KVCache, attend: Attend | None, kind: Kind) -> str | None:
    """The obstacle, if it matters. Raises ValueError for a ``kind`` that is none, and for "numba" that cannot be."""
    if kind not in ("auto", "numba", "torch"):
        raise ValueError(f"the way to read and decode is auto, numba or torch, got {kind!r}")
    why_not = None if kind == "torch" else obstacle(decoder, cache, attend)
    if kind == "numba" and why_not:
        raise ValueError(f"numba cannot be used: {why_not}")
    return why_not


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


def obstacle(decoder: Decoder, cache: KVCache, attend: Attend | None = None) -> str | None:
    """Why compiled code cannot stand in for this decoder on this cache; None where it can."""
    weights = {parameter.dtype for parameter in decoder.parameters()}
    plain = (torch.float32, torch.bfloat16)
    if attend is not None:
        return "attention is replaced"
    if type(cache) not in (FullCache, RollingCache):
        return f"it does not know the cache {type(cache).__name__}"
    if any(parameter.device.type != "cpu" for parameter in decoder.parameters()) or cache.keys[0].device.type != "cpu":
        return "the model is not on the CPU"
    for name, module in decoder.named_modules():
        if type(module) not in _KNOWN:
            return f"{name} is a {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the decoder'} has hooks"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if len(weights) != 1 or not weights <= {*plain} or cache.keys[0].dtype not in plain:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in weights | {cache.keys[0].dtype})
        return f"it reads float32 or bfloat16, not {' and '.join(names)}"
    if find_spec("numba") is None:
        return "numba is not installed (pip install 'kvprobe[fast]')"
    if os.name != "posix":
        return "it needs a POSIX system"
    return None
