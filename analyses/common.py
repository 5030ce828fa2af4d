"""What do the analyses share? A model by name or by shape alone, and a table that is printed and kept."""

from collections.abc import Sequence

from kvprobe import catalogue, models
from kvprobe.console import emit
from kvprobe.models import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.results import Result
from kvprobe.unpretrained import load_random

PUBLISHED_GPT = "gpt-124m"
"""The shape that the published speed and memory were measured on. It was never trained: its weights are drawn."""


def load(model: str, *, random_weights: bool = False, dtype: str = "float32", progress: Progress = silent) -> Loaded:
    """The model on this machine's best device, or one of its shape with weights drawn at random."""
    item = catalogue.look_up(model)
    if random_weights or (item is not None and item.name == PUBLISHED_GPT):
        return load_random(model, dtype=dtype, progress=progress)
    return models.load(model, dtype=dtype, progress=progress)


def show(result: Result, *, save: bool, columns: Sequence[str] = (), summary: Sequence[str] = ()) -> None:
    """Print the table (all columns, or these) and, with ``save``, keep results/NAME.csv and NAME.json."""
    emit(result, format_="table", out=None, columns=columns or list(result.rows[0]), summary=summary)
    if save:
        result.save(f"results/{result.analysis}")
