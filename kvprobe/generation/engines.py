"""Which engine runs a decoder on a cache? By a rule of shapes, dtypes and devices; it is named in every run record.

    ours = engine(decoder, cache)
    logits = ours.prefill(ids)             # [batch, vocab]
    logits = ours.decode(tokens)           # [batch, n, vocab]

The torch engine is the readable decoder itself. That of numba reads the same weights and writes the same cache
buffers, so that the two can take turns. Nothing is timed in choosing: the same command gives the same bits again.
"""

from typing import Literal, get_args

from kvprobe.attention.call import AttentionCall
from kvprobe.caches.kv_cache import KVCache
from kvprobe.decoder.engine import Engine, TorchEngine
from kvprobe.decoder.model import Attend, Decoder
from kvprobe.native.eligible import obstacle

Kind = Literal["auto", "numba", "torch"]


def engine(decoder: Decoder, cache: KVCache, kind: Kind = "auto", *, attend: Attend | None = None) -> Engine:
    """The compiled engine where it does the same, else torch with a note that says why; or the ``kind`` asked for.

    Raises ValueError where "numba" is asked for and cannot be used, saying why.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"engine must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if kind == "torch":
        return TorchEngine(decoder, cache, attend=attend or AttentionCall.attend)
    why_not = obstacle(decoder, cache, attend)
    if why_not is None:
        try:
            from kvprobe.native.engine import NumbaEngine
        except ImportError as error:
            # installed, but not for this numpy or this Python
            why_not = f"numba cannot be imported ({error})"
        else:
            return NumbaEngine(decoder, cache)
    if kind == "numba":
        raise ValueError(f"the numba engine cannot be used: {why_not}")
    return TorchEngine(decoder, cache, attend=attend or AttentionCall.attend, note=f"engine: torch, since {why_not}")
