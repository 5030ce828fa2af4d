"""Which published models are known by shape, without a network? Their configurations, with sources."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvprobe.shape.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published model's shape, without weights."""

    name: str
    also: tuple[str, ...]
    """Hub ids and other names of the same model."""
    source: str
    config: dict[str, Any]
    """The part of its ``config.json`` that matters for memory."""

    @property
    def spec(self) -> Spec:
        """The shape as a `Spec`."""
        return Spec.from_config(self.config)


@cache
def published() -> dict[str, Published]:
    """Every model of ``data/catalogue.toml`` by its name, in the file's order."""
    table = tomllib.loads(files("kvprobe").joinpath("data/catalogue.toml").read_text(encoding="utf-8"))
    return {
        name: Published(name=name, also=tuple(of.get("also", ())), source=of["source"], config=of["config"])
        for name, of in table.items()
    }


def look_up(name: str) -> Published | None:
    """The published model of that name or hub id, in upper or lower case; None if it is not in the catalogue."""
    wanted = name.lower()
    for item in published().values():
        if wanted in (item.name, *(other.lower() for other in item.also)):
            return item
    return None
