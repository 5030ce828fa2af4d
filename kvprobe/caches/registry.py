"""Which kinds of cache are there? A line each; a kind is a file of its own, imported when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.caches.layer import KVCache, Place

KINDS = {
    "full": "kvprobe.caches.full:FullCache",
    "rolling": "kvprobe.caches.rolling:RollingCache",
}


def kind(name: str) -> "type[KVCache]":
    """The class of a kind. Raises ValueError for an unknown name."""
    if name not in KINDS:
        raise ValueError(f"unknown kind of cache {name!r}; available: {', '.join(KINDS)}")
    module, _, attribute = KINDS[name].partition(":")
    return getattr(import_module(module), attribute)


def build(name: str, place: "Place", **settings: Any) -> "KVCache":
    """An empty cache of that kind (:meth:`kvprobe.caches.layer.KVCache.fit`), with the settings of its class."""
    return kind(name).fit(place, **settings)
