"""Which way to read a prompt and to decode is the fastest here, and the same? Chosen once, named in every run record.

    reader, step = engines.reader(decoder, cache, n_tokens), engines.stepper(decoder, cache)
    x = reader.read(ids)               # as decoder.body, of the last token; reader.name is "numba" or "torch"
    logits = step.step(token)          # as generate.decode; step.name is "numba" or "torch"

The torch ways are the readable decoder itself. Those of numba (:mod:`kvprobe.native.decode_kernels`,
:mod:`kvprobe.native.prefill_kernels`) read the same weights and write the same cache buffers, so all can take turns.
"""

import time
from functools import lru_cache
from typing import Literal

import torch

from kvprobe.attention.call import AttentionCall
from kvprobe.caches.kv_cache import KVCache
from kvprobe.decoder import linear
from kvprobe.decoder.engine import Reader, Stepper, TorchReader, TorchStep
from kvprobe.decoder.model import Attend, Decoder, DecoderConfig
from kvprobe.native.eligible import obstacle, unreadable

Kind = Literal["auto", "numba", "torch"]


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


def _why_not(decoder: Decoder, cache: KVCache, attend: Attend | None, kind: Kind) -> str | None:
    """The obstacle, if it matters. Raises ValueError for a ``kind`` that is none, and for "numba" that cannot be."""
    if kind not in ("auto", "numba", "torch"):
        raise ValueError(f"the way to read and decode is auto, numba or torch, got {kind!r}")
    why_not = None if kind == "torch" else obstacle(decoder, cache, attend)
    if kind == "numba" and why_not:
        raise ValueError(f"numba cannot be used: {why_not}")
    return why_not
