"""What is a cache made of? Layers, each of which sees its attention call, and the lengths that they share.

One pass over ``q_len`` new tokens is ``begin``, ``attend`` once a layer, ``end``:

    cache.begin(batch, q_len)                               # refuses what does not fit; nothing has been written yet
    output = cache.layers[layer].attend(call, then=attend)  # the call holds the new tokens' query, key and value alone
    cache.end()

An *index* counts the tokens that a row was fed, from 0, left padding included. A new kind is a file like
:mod:`kvprobe.caches.full` and one line in :mod:`kvprobe.caches.registry`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from kvprobe.attention.call import Attend, AttentionCall
from kvprobe.attention.rope import Rope
from kvprobe.shape.layers import Layer


@dataclass(eq=False)
class Past:
    """What the layers of one cache share: how far each row is, and the pass under way.

    ``lengths`` are the tokens that each row holds, ``peaks`` the most that it ever held since the last reset, ``sure``
    those that will not be taken back. ``left_pad`` ``[batch]`` is the left padding of each row, if any; ``q_len`` the
    tokens announced; ``base`` what positions are counted from; ``keeps`` the masks of this pass, made once for layers
    that are alike.
    """

    lengths: list[int]
    peaks: list[int]
    sure: list[int]
    device: torch.device | str
    left_pad: Tensor | None = None
    q_len: int = 0
    base: int = 0
    keeps: dict[object, Tensor | None] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def alike(self) -> bool:
        """Whether all rows hold as many tokens."""
        return len(set(self.lengths)) == 1

    def queries(self, q_len: int) -> Tensor:
        """The index of each new token: ``[q_len]``, or ``[batch, q_len]`` where rows differ in length."""
        if self.alike:
            return torch.arange(self.length, self.length + q_len, device=self.device)
        return torch.tensor(self.lengths, device=self.device)[:, None] + torch.arange(q_len, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a cache is made for: a model's layers, the rope of each if it has any, and ``capacity`` tokens a row.

    On the device "meta" a cache takes no memory, and its :attr:`KVCache.formula_bytes` are the same.
    """

    shape: tuple[Layer, ...]
    capacity: int
    batch: int = 1
    ropes: tuple[Rope, ...] | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"


@dataclass(frozen=True, eq=False)
class Buffers:
    """Of one layer, for compiled code: slots ``[batch, n_kv_heads, slots, head_dim]``; sinks first, then a ring.

    ``made`` holds the keys of the sinks as they were made, where ``keys`` holds them as they are seen.
    """

    keys: Tensor
    values: Tensor
    made: Tensor | None = None


class CacheLayer:
    """What one layer keeps. A kind gives :meth:`append`, and overrides :meth:`attend` if handing over all of K and V
    would defeat the kind.
    """

    def __init__(self, shape: Layer, past: Past) -> None:
        self.shape, self.past = shape, past

    def append(self, call: AttentionCall) -> AttentionCall:
        """Store the call's new keys and values; the call with what attention shall read instead.

        Key and value ``[batch, n_kv_heads, kv_len, …]`` with a mask that says which of them each query may see, or
        None if that is plainly causal, or one query sees all.
        """
        raise NotImplementedError

    def attend(self, call: AttentionCall, then: Attend) -> Tensor:
        """The output ``[batch, n_heads, q_len, v_head_dim]``, by ``then`` of all that the queries may see."""
        return then(self.append(call))

    def index(self, q_len: int) -> Tensor:
        """The index of every key that ``q_len`` new tokens read: ``[kv_len]``, or ``[batch, n_kv_heads or 1, kv_len]``.

        The second where rows or heads hold other tokens; -1 marks a slot that holds none.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """All that is held, by name."""
        raise NotImplementedError

    @property
    def formula_bytes(self) -> int:
        """What it should hold, from its shape alone."""
        raise NotImplementedError

    def floor(self, row: int) -> int:
        """The fewest tokens to which a row can be taken back. By default what it once held stays."""
        return self.past.peaks[row]

    def rolled_back(self) -> None:
        """Called once rows have been taken back."""

    def buffers(self) -> Buffers:
        """For compiled code alone, which knows the kinds that have them."""
        raise NotImplementedError


class KVCache:
    """The layers of a decoder's cache, from ``layer(shape, past)`` of each, and one row length each.

    ``window`` is how many last tokens are seen, None for all; ``n_sink`` how many first ones beside. ``unbounded``
    caches have no last position. ``left_pad`` is set before the first token. Up to ``headroom`` tokens a row can be
    taken back where the kind would otherwise have forgotten what they pushed out.
    """

    window: int | None = None
    n_sink = 0
    unbounded = False

    def __init__(
        self,
        shape: Sequence[Layer],
        layer: Callable[[Layer, Past], CacheLayer],
        *,
        batch: int,
        headroom: int = 0,
        device: torch.device | str,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        if headroom < 0:
            raise ValueError(f"headroom must be at least 0, got {headroom}")
        self.shape, self.batch, self.headroom = tuple(shape), batch, headroom
        self.past = Past([0] * batch, [0] * batch, [0] * batch, device)
        self.layers = tuple(layer(shape_of_layer, self.past) for shape_of_layer in self.shape)

    @classmethod
    def fit(cls, place: Place, **settings: Any) -> Self:
        """A cache of this kind for ``place``, with its own ``settings``."""
        made: Any = cls
        where = {"batch": place.batch, "dtype": place.dtype, "device": place.device}
        return made(place.shape, capacity=place.capacity, **where, **settings)

    @property
    def length(self) -> int:
        """Tokens of the longest row since the last :meth:`reset`, left padding included."""
        return self.past.length

    @property
    def lengths(self) -> Tensor:
        """The tokens of each row, int64 ``[batch]``."""
        return torch.tensor(self.past.lengths)

    @property
    def alike(self) -> bool:
        """Whether all rows hold as many tokens."""
        return self.past.alike

    @property
    def left_pad(self) -> Tensor | None:
        """The left padding of each row, int ``[batch]``, or None."""
        return self.past.left_pad

    @left_pad.setter
    def left_pad(self, left_pad: Tensor | None) -> None:
        self.past.left_pad = left_pad

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, written or not."""
        return sum(tensor.untyped_storage().nbytes() for layer in self.layers for tensor in layer.tensors().values())

    @property
    def formula_bytes(self) -> int:
        """What :attr:`nbytes` should be, from the shape of each layer alone."""
        return sum(layer.formula_bytes for layer in self.layers)

    def reset(self) -> None:
        """Forget everything: the next token begins a new sequence."""
        for layer in self.layers:
            for tensor in layer.tensors().values():
                tensor.zero_()
        past = self.past
        past.lengths, past.peaks, past.sure = [0] * self.batch, [0] * self.batch, [0] * self.batch
        past.left_pad, past.q_len, past.base = None, 0, 0
        past.keeps.clear()

    def begin(self, batch: int, q_len: int) -> None:
        """Announce ``q_len`` tokens for each of ``batch`` rows. Raises ValueError before anything is written."""
        self.check(batch, q_len)
        if self.past.q_len:
            raise ValueError(
                "the last pass broke off and left the cache half written: reset() it, unless another thread is in the "
                "middle of one"
            )
        self.past.q_len = q_len

    def check(self, batch: int, q_len: int) -> None:
        """Raise ValueError if ``q_len`` more tokens for each of ``batch`` rows cannot be taken."""
        if batch != self.batch:
            raise ValueError(f"the cache was made for a batch of {self.batch}, got {batch}")
        if self.left_pad is not None:
            whole = isinstance(self.left_pad, Tensor) and self.left_pad.dtype in (torch.int64, torch.int32)
            if not whole or self.left_pad.shape != (batch,) or int(self.left_pad.min()) < 0:
                raise ValueError(
                    f"left_pad must be {batch} whole numbers, the left padding of each row, got {self.left_pad}"
                )

    def end(self) -> None:
        """Count the announced tokens as seen."""
        past = self.past
        past.lengths = [length + past.q_len for length in past.lengths]
        past.peaks = [*map(max, past.peaks, past.lengths)]
        past.sure = [max(sure, length - self.headroom) for sure, length in zip(past.sure, past.lengths, strict=True)]
        past.q_len = 0
        past.keeps.clear()

    def positions(self, q_len: int) -> Tensor:
        """The position of each new token, for position encoding: ``[q_len]``, or ``[batch, q_len]`` where rows differ.

        Under left padding it is cumsum(mask) − 1; padding itself gets 0.
        """
        places = self.past.queries(q_len)
        if self.left_pad is not None:
            places = (places - self.left_pad[:, None]).clamp(min=0)
        return places - self.past.base

    def truncate(self, lengths: Sequence[int] | Tensor) -> None:
        """Take back the last tokens of each row, as if they had never been fed: ``lengths`` ``[batch]`` remain.

        Raises ValueError, and changes nothing, for more tokens than a row holds and where what must be seen again has
        been overwritten: beyond the headroom.
        """
        wanted = self._checked(lengths)
        for row, length in enumerate(wanted):
            floor = max(layer.floor(row) for layer in self.layers)
            if length < min(floor, self.past.lengths[row]):
                held = self.past.lengths[row]
                raise ValueError(
                    f"row {row} holds {held} tokens and can be taken back to {floor}, not to {length}: "
                    f"make the cache with headroom={self.headroom + floor - length}, if its kind has one"
                )
        self.past.lengths = wanted
        for layer in self.layers:
            layer.rolled_back()

    def confirm(self, lengths: Sequence[int] | Tensor) -> None:
        """The first ``lengths`` ``[batch]`` tokens of each row will not be taken back: what waited may be done."""
        self.past.sure = [*map(max, self.past.sure, self._checked(lengths))]

    def state(self) -> dict[str, Tensor]:
        """All that :meth:`restore` needs, by name: the buffers themselves and the rows' lengths."""
        past = self.past
        numbers = {"rows": torch.tensor([past.lengths, past.peaks, past.sure]), "base": torch.tensor([past.base])}
        held = {
            f"{i}.{name}": tensor for i, layer in enumerate(self.layers) for name, tensor in layer.tensors().items()
        }
        return numbers | held | ({} if past.left_pad is None else {"left_pad": past.left_pad})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Be as the cache of the same make was whose :meth:`state` this is. Raises ValueError for another's."""
        self.reset()
        own, past = self.state(), self.past
        theirs = {name: tensor.shape for name, tensor in state.items() if name != "left_pad"}
        if theirs != {name: tensor.shape for name, tensor in own.items()}:
            raise ValueError("the state is of a cache of another make")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        past.lengths, past.peaks, past.sure = own["rows"].tolist()
        past.base = int(own["base"])
        past.left_pad = state["left_pad"].to(past.device) if "left_pad" in state else None

    def buffers(self) -> tuple[Buffers, ...]:
        """What compiled code reads and writes, one a layer; it does so between :meth:`begin` and :meth:`end`."""
        return tuple(layer.buffers() for layer in self.layers)

    def sink_lag(self) -> int:
        """How far the sinks of :meth:`buffers` must be turned, from ``made``, before the next token reads them."""
        return 0

    def _checked(self, lengths: Sequence[int] | Tensor) -> list[int]:
        wanted = [int(length) for length in lengths]
        held = self.past.lengths
        if len(wanted) != self.batch or any(not 0 <= n <= most for n, most in zip(wanted, held, strict=True)):
            raise ValueError(
                f"lengths must be {self.batch} whole numbers, each at most that of its row {held}, got {wanted}"
            )
        if self.past.q_len:
            raise ValueError("a pass over the cache is under way, or broke off: reset() it")
        return wanted
