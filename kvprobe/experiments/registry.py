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
    """The experiment of that name. Raises KeyError for a name that is not one."""
    if name not in names():
        raise KeyError(name)
    for found in vars(import_module(f"kvprobe.experiments.{name}")).values():
        if isinstance(found, type) and issubclass(found, Experiment) and found.__dict__.get("name") == name:
            return found
    raise KeyError(name)


def figure_of(result: Result, **how: Any) -> "Figure":
    """The picture that belongs to a result; ValueError for an analysis without one."""
    # what a result is called that is not its experiment's name
    name = {"relief_map": "relief"}.get(result.analysis, result.analysis)
    try:
        return experiment(name).figure(result, **how)
    except KeyError:
        pass
    if name not in ("roofline", "gqa"):
        raise ValueError(
            f"the analysis {result.analysis!r} has no picture; these have one: {', '.join(names())}, roofline"
        )
    figure: Figure = import_module(f"kvprobe.plots.{name}").figure(result.rows, result.run, **how)
    return figure
