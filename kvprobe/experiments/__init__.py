"""One experiment a file: from a loaded model, and a passage where it reads one, to a result with its run record.

Each class is here too, imported when it is first used: ``from kvprobe.experiments import Sinks``.
"""

from typing import Any


def _classes() -> dict[str, str]:
    """The name of each experiment by that of its class."""
    from kvprobe.experiments import registry

    return {name.title().replace("_", ""): name for name in registry.names()}


def __getattr__(name: str) -> Any:
    # no experiment's class begins with a small letter, and the registry itself asks for those
    if not name[:1].isupper() or (found := _classes().get(name)) is None:
        raise AttributeError(f"module 'kvprobe.experiments' has no attribute {name!r}")
    from kvprobe.experiments import registry

    return registry.experiment(found)


def __dir__() -> list[str]:
    return sorted({*globals(), *_classes()})
