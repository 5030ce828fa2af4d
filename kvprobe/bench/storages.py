"""How many bytes does a cache really hold? Its unique storages, and the part kept alive only by views.

A view keeps its entire storage alive. K sliced from a fused projection seems to be its own bytes but holds all of Q, K
and V: counting elements misses that, counting storages does not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.attention.rope import Rope


@dataclass(frozen=True)
class Held:
    """Bytes of all storages that some tensors keep alive, each counted once, and the part that the tensors address."""

    measured_bytes: int
    addressed_bytes: int

    @property
    def pinned_bytes(self) -> int:
        """Storage that is kept alive by views but not addressed by them."""
        return self.measured_bytes - self.addressed_bytes


def storage_bytes(tensors: Iterable[Tensor]) -> Held:
    """What the tensors hold together. A storage or an element that several of them share counts once."""
    by_storage: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(tensor)
    measured = addressed = 0
    for views in by_storage.values():
        n_bytes = views[0].untyped_storage().nbytes()
        measured += n_bytes
        addressed += _addressed(views, n_bytes)
    return Held(measured, addressed)


def tensors_of(cache: object) -> Iterator[Tensor]:
    """Every tensor reachable from ``cache`` through attributes and containers, except a model's rotations.

    Tensors without an axis are left out: they count tokens and are neither keys nor values.
    """
    seen: set[int] = set()
    waiting: list[object] = [cache]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, Rope | type | Callable):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.ndim:
                yield item
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, Sequence | set | frozenset) and not isinstance(item, str | bytes):
            waiting += item
        elif hasattr(item, "__dict__"):
            waiting += vars(item).values()


def allocated(device: torch.device | str) -> int | None:
    """Bytes that a GPU's allocator has given out; None on a device without such a counter."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def measure(make: Callable[[], Any], device: torch.device | str) -> tuple[Any, Held]:
    """The cache that ``make`` builds, and what it holds.

    On a CPU this counts storages. On a GPU the measured bytes are the allocator's difference, which rounds each storage
    up to a block of 512 bytes; pinned bytes count storages there too.
    """
    before = allocated(device)
    cache = make()
    held = storage_bytes(tensors_of(cache))
    after = allocated(device)
    if before is not None and after is not None:
        held = Held(after - before, after - before - held.pinned_bytes)
    return cache, held


def _addressed(views: Sequence[Tensor], n_bytes: int) -> int:
    plain = [view for view in views if view.is_contiguous() and view.numel() * view.element_size() == n_bytes]
    if plain:
        return n_bytes
    # one mark for every byte, set through the views' strides
    marks = torch.zeros(n_bytes, dtype=torch.bool)
    for view in views:
        size = view.element_size()
        marks.as_strided(
            (*view.shape, size), (*(stride * size for stride in view.stride()), 1), view.storage_offset() * size
        ).fill_(True)
    return int(marks.sum())
