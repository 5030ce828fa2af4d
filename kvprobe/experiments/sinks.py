"""How much of a model's attention goes to token 0 of a passage, by layer and by head?"""

import time
from dataclasses import replace

from kvprobe.models.subject import Subject
from kvprobe.probes import mass
from kvprobe.progress import Progress, silent
from kvprobe.results.phrases import passage_of
from kvprobe.results.record import run_record
from kvprobe.results.result import Result
from kvprobe.text import passages


def run(
    subject: Subject,
    *,
    queries_from: int = 64,
    epsilon: float = 0.3,
    control: str = "none",
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """A row a layer (:meth:`kvprobe.probes.mass.Mass.layer_rows`), the mass of its heads in ``head_mass``.

    ``control`` reads ids that mean nothing instead of the passage (:func:`kvprobe.text.passages.control`). The record
    has ``mass`` and ``sink_rate`` over all layers and heads. Raises ValueError for ``queries_from`` outside the passage
    and an ``epsilon`` outside 0 to 1, KvprobeError where attention is not finite.
    """
    # written so that nan is refused as well
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon must be a number between 0 and 1, got {epsilon}")
    started = time.perf_counter()
    loaded = subject.loaded
    passage = passages.control(subject.passage, control, loaded.tokenizer, seed=seed)
    subject = replace(subject, passage=passage)
    measured = mass.measure(
        subject.model, subject.input_ids, queries_from=queries_from, positions=True, progress=progress
    )
    record = run_record(
        subject.record(),
        queries_from=queries_from,
        epsilon=epsilon,
        control=control,
        control_id=passage.first_content_id if control == "repeat" else None,
        mass=float(measured.token0.mean()),
        sink_rate=float(measured.sink_rate(epsilon).mean()),
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("sinks", measured.layer_rows(epsilon, loaded.spec.windows, passage.ids, loaded.tokenizer), record)


def by_head(result: Result) -> Result:
    """The same result as a row a head: ``layer, head, mass, uniform, is_sink``."""
    rows = [
        {
            "layer": row["layer"],
            "head": head,
            "mass": mass_of_head,
            "uniform": row["uniform"],
            "is_sink": mass_of_head > result.run["epsilon"],
        }
        for row in result.rows
        for head, mass_of_head in enumerate(row["head_mass"])
    ]
    return Result(result.analysis, rows, result.run)


def sentence(result: Result) -> str:
    """What the rows support, in one plain sentence."""
    run = result.run
    return (
        f"{passage_of(run)}, queries from {run['queries_from']:,}: {run['mass']:.3f} of all attention is on token 0; "
        f"{run['sink_rate']:.1%} of heads give it more than {run['epsilon']:g}"
    )
