"""Which experiments are there? Every file of this folder that is not listed here holds one."""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

import kvprobe.experiments
from kvprobe.experiments.experiment import Experiment
from kvprobe.results.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELPERS = {"experiment", "registry", "streaming", "stream_checkpoint"}


def names() -> list[str]:
    """The names of all experiments; none is imported."""
    return sorted({module.name for module in pkgutil.iter_modules(kvprobe.experiments.__path__)} - HELPERS)


def experiment(name: str) -> type[Experiment]:
    """The experiment of that name. Raises KeyError for an unknown name."""
    if name not in names():
        raise KeyError(name)
    for value in vars(import_module(f"kvprobe.experiments.{name}")).values():
        if isinstance(value, type) and issubclass(value, Experiment) and value.__dict__.get("name") == name:
            return value
    raise KeyError(name)


def figure_of(result: Result, **how: Any) -> "Figure":
    """The picture that belongs to a result; ValueError for an analysis without one."""
    # the one result that is not called by its experiment's name
    name = {"relief_map": "relief"}.get(result.analysis, result.analysis)
    # gqa is a module of functions still
    if name in names() and name != "gqa":
        return experiment(name).figure(result, **how)
    if name not in ("roofline", "gqa"):
        raise ValueError(f"the analysis {result.analysis!r} has no picture; available: {', '.join(names())}, roofline")
    figure: Figure = import_module(f"kvprobe.plots.{name}").figure(result.rows, result.run, **how)
    return figure
