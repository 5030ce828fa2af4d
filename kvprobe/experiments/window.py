"""What does it cost a model to see only the last tokens of a passage and a few sinks, masked or streamed?"""

import time
from collections.abc import Sequence
from dataclasses import asdict

from kvprobe.decoder.model import Decoder
from kvprobe.experiments.stream_checkpoint import State
from kvprobe.experiments.streaming import Plan, rows
from kvprobe.experiments.streaming import stream as read_stream
from kvprobe.models.subject import Subject
from kvprobe.probes.losses import default_block_length
from kvprobe.probes.windows import Positions, SinkChoice, describe_local_layers, grid
from kvprobe.progress import Progress, silent
from kvprobe.results.phrases import change_of, interval_of, passage_of
from kvprobe.results.record import run_record
from kvprobe.results.result import Result


def run(
    subject: Subject,
    *,
    windows: Sequence[int] = (256,),
    sinks: Sequence[int] | None = None,
    positions: Positions = "absolute",
    score_from: int | None = None,
    sink_choice: SinkChoice = "first",
    drop_sink_logits: bool = False,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """The untouched pass, then a row for each window and number of sinks (:func:`kvprobe.probes.windows.grid`).

    ``sinks`` default to 0, 1 and 4; with the choice ``bos`` to none and the BOS, and to none where positions are
    ``recompute``. ``score_from`` defaults to half of the passage. Raises as ``grid`` does.
    """
    started = time.perf_counter()
    passage = subject.passage
    score_from = passage.n_tokens // 2 if score_from is None else score_from
    sinks = sinks or _default_sinks(positions, sink_choice, passage.n_front)
    found = grid(
        subject.model,
        subject.input_ids[0],
        windows=windows,
        sinks=sinks,
        positions=positions,
        score_from=score_from,
        sink_choice=sink_choice,
        drop_sink_logits=drop_sink_logits,
        n_front=passage.n_front,
        seed=seed,
        progress=progress,
    )
    n_targets = passage.n_tokens - 1 - score_from
    record = run_record(
        subject.record(),
        windows=[*windows],
        sinks=[*sinks],
        positions=positions,
        sink_choice=sink_choice,
        drop_sink_logits=drop_sink_logits,
        score_from=score_from,
        n_targets=n_targets,
        interval=interval_of(default_block_length(n_targets)),
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("window", found, record)


def stream(subject: Subject, decoder: Decoder, plan: Plan, *, state: State, progress: Progress = silent) -> Result:
    """The whole passage once through a rolling cache: a row a result (:func:`kvprobe.experiments.streaming.stream`).

    ``decoder`` is the subject's model (:func:`kvprobe.decoder.model.from_hf`). It goes on where ``state`` stands and
    leaves it at the end, for whoever has kept the result to remove. Raises as ``streaming.stream`` does.
    """
    results = read_stream(decoder, subject.input_ids[0], plan, state=state, progress=progress)
    standing = state.read()
    assert standing is not None
    record = run_record(
        subject.record(),
        **asdict(plan),
        stream=True,
        sink_choice="first",
        n_targets=subject.passage.n_tokens - 1 - plan.score_from,
        n_resumed=standing.resumed,
        wall_s=round(standing.seconds, 3),
    )
    local_layers = describe_local_layers(subject.loaded.spec)
    return Result("window", rows(plan, results, n_front=subject.passage.n_front, local_layers=local_layers), record)


def sentence(result: Result) -> str:
    """What the rows of :func:`run` support, in one plain sentence: the smallest window, without and with sinks."""
    cells = [row for row in result.rows if row["window"] is not None]
    smallest = min(row["window"] for row in cells)
    cells = [row for row in cells if row["window"] == smallest]
    few, many = (pick(cells, key=lambda row: row["n_sink"]) for pick in (min, max))
    said = f"{passage_of(result.run)}: with the last {smallest:,} tokens ({result.run['positions']} positions) and "
    said += f"{_sinks(few['n_sink'])} the loss {change_of(few)}"
    return said if few is many else f"{said}; with {_sinks(many['n_sink'])} it {change_of(many)}"


def _sinks(n_sink: int) -> str:
    return "no sinks" if not n_sink else "1 sink" if n_sink == 1 else f"{n_sink} sinks"


def _default_sinks(positions: str, choice: str, n_front: int) -> tuple[int, ...]:
    if positions == "recompute":
        return (0,)
    return (0, n_front) if choice == "bos" else (0, 1, 4)
