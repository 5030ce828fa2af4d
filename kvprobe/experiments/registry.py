"""Which experiments are there? Every file of this folder that is not listed here holds one."""

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvprobe.plots
from kvprobe.experiments.experiment import Experiment
from kvprobe.results.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELPERS = {"experiment", "registry", "streaming", "stream_checkpoint", "gqa_training"}


def names() -> list[str]:
    """The names of all experiments; none is imported."""
    return sorted({module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])} - HELPERS)


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
    for kind in map(experiment, names()):
        if result.analysis == (kind.analysis or kind.name):
            return kind.figure(result, **how)
    # an analysis may have a picture without being an experiment
    if result.analysis in {module.name for module in pkgutil.iter_modules(kvprobe.plots.__path__)}:
        draw = getattr(import_module(f"kvprobe.plots.{result.analysis}"), "figure", None)
        if draw is not None:
            return draw(result.rows, result.run, **how)
    raise ValueError(f"the analysis {result.analysis!r} has no picture; available: {', '.join(names())}, roofline")
