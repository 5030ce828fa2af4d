"""Where a language model's attention goes, how small its KV cache could be, and what that would cost.

The few names that most work begins with; each is imported when it is first used, so that ``import kvprobe`` loads
nothing heavy. The measurements of the command line are in :mod:`kvprobe.experiments`, one a module.
"""

# first: if this is the command, Ctrl-C is handled before anything slow is imported
from kvprobe import interrupts as _interrupts  # noqa: F401, I001

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.attention.capture import capture
    from kvprobe.attention.seam import attending
    from kvprobe.experiments.evaluate import evaluate
    from kvprobe.generation.texts import generate
    from kvprobe.models.loading import load
    from kvprobe.models.subject import prepare
    from kvprobe.probes.mass import token0_mass
    from kvprobe.results.result import Result

# the version's one place: the package's metadata is made from it
__version__ = "0.1.0"
__all__ = ["Result", "attending", "capture", "evaluate", "generate", "load", "prepare", "token0_mass"]

_MODULES = {
    "Result": "results.result",
    "attending": "attention.seam",
    "capture": "attention.capture",
    "evaluate": "experiments.evaluate",
    "generate": "generation.texts",
    "load": "models.loading",
    "prepare": "models.subject",
    "token0_mass": "probes.mass",
}


# a type checker sees the names above, and no others
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'kvprobe' has no attribute {name!r}")
        value = globals()[name] = getattr(_import_module(f"kvprobe.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
