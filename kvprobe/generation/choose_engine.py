"""Which engine runs a decoder on a cache? A rule of shapes, dtypes and devices says; every run record names it.

    engine = choose_engine(decoder, cache)
    logits = engine.prefill(ids)           # [batch, vocab]
    logits = engine.decode(tokens)         # [batch, n, vocab]

The torch engine is the readable decoder itself. The numba engine reads the same weights and writes the same cache
buffers, so the two can alternate. The choice times nothing: the same command gives the same bits.
"""

from typing import Literal, get_args

from kvprobe.attention.call import Attend, AttentionCall
from kvprobe.caches.layer import KVCache
from kvprobe.decoder.model import Decoder
from kvprobe.decoder.torch_engine import Engine, TorchEngine
from kvprobe.errors import Wording
from kvprobe.native.eligible import obstacle

EngineChoice = Literal["auto", "numba", "torch"]


def choose_engine(
    decoder: Decoder, cache: KVCache, choice: EngineChoice = "auto", *, attend: Attend | None = None
) -> Engine:
    """The compiled engine if it can stand in, else torch with a note that says why; or what ``choice`` asks for.

    Raises ValueError, saying why, if "numba" is asked for and cannot be used.
    """
    if choice not in get_args(EngineChoice):
        raise ValueError(Wording("{engine} must be one of {0}, got {1!r}", ", ".join(get_args(EngineChoice)), choice))
    if choice == "torch":
        return TorchEngine(decoder, cache, attend=attend or AttentionCall.attend)
    why_not = obstacle(decoder, cache, attend)
    if why_not is None:
        try:
            from kvprobe.native.numba_engine import NumbaEngine
        except ImportError as error:
            # installed, but not for this numpy or this Python
            why_not = f"numba cannot be imported ({error})"
        else:
            return NumbaEngine(decoder, cache)
    if choice == "numba":
        raise ValueError(Wording("{engine} numba cannot be used: {0}; use {engine} auto or torch", why_not))
    return TorchEngine(decoder, cache, attend=attend or AttentionCall.attend, note=f"engine: torch, since {why_not}")
