"""What does it cost a model to see only the last tokens of a passage and a few sinks, masked or streamed?"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from kvprobe.experiments.experiment import Experiment, seed, setting
from kvprobe.progress import Progress, silent
from kvprobe.results.columns import Column
from kvprobe.results.phrases import LOSS_COLUMNS, change_of, interval_of, passage_of, sinks_of
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvprobe.decoder.model import Decoder
    from kvprobe.experiments.stream_checkpoint import StreamCheckpoint
    from kvprobe.experiments.streaming import StreamConfig
    from kvprobe.models.subject import Subject

ON_THE_PAGE = {"window", "n_sink", "loss", "perplexity", "delta", "delta_low", "delta_high", "cache_tokens"}


@dataclass(frozen=True, kw_only=True)
class Window(Experiment):
    """What does it cost to see only the last tokens and a few attention sinks?

    The first row is the full pass; delta is the difference to it in nat per token, with its 95 % interval from
    a paired bootstrap over blocks of tokens. cache_tokens is what a full layer holds at the end.

    \b
    Positions: absolute   keys stay where they were made; older context leaks through the layers
               cache      the sinks are as near as their slots in the cache (StreamingLLM)
               recompute  each prediction sees its last tokens only, from position 0 (and the BOS, if there is one)

    \b
    With --stream a text far longer than the model is read once, all of it unless --tokens is given; every token is
    predicted from what the cache holds. There is no full pass to compare with, so no first row and no delta.
    Positions absolute end where the model's do; cache has no end. After a kill the same command continues where it was.

    \b
    Examples:
      kvprobe window smollm2-135m --window 256 --sinks 0 --sinks 1 --sinks 4 --plot window.png
      kvprobe window smollm2-135m --window 256 --positions cache
      kvprobe window smollm2-135m --window 256 --sinks 4 --sink-choice random   are the first tokens special?
      kvprobe window smollm2-135m --window 128 --positions recompute
      kvprobe window smollm2-135m --stream --text book.txt --window 1020 --sinks 4 --positions cache --every 10000
    """

    name = "window"
    short = "What does it cost to see only a window and some sinks?"
    heading = "Loss by window size"
    caption = "Loss beyond full context by window and sinks. A window counts the query; sinks are in addition."
    columns = (
        Column("window", "window (tokens)"),
        Column("n_sink", "sinks"),
        Column("positions", "positions"),
        Column("sink_choice", "which sinks"),
        *LOSS_COLUMNS,
        Column("cache_tokens", "tokens in the cache"),
    )
    stream_columns = (
        "window", "n_sink", "positions", "at_token", "tokens_scored", "loss", "perplexity", "stretch_loss",
        "cache_tokens",
    )  # fmt: skip

    windows: tuple[int, ...] = setting(
        (256,), "Tokens seen, the query itself counted. Repeat for a grid.", kind=int, flag="--window"
    )
    sinks: tuple[int, ...] = setting(
        (),
        "Sink tokens kept in addition to the window. Repeat for a grid.",
        kind=int,
        shown="0, 1, 4",
    )
    positions: str = setting(
        "absolute",
        "absolute: a mask. cache: by slot of the cache (RoPE only). recompute: a fresh pass for each prediction.",
        choices=("absolute", "cache", "recompute"),
    )
    sink_choice: str = setting(
        "first",
        "Which tokens are the sinks; no choice looks at what is scored.",
        choices=("first", "bos", "random", "heaviest"),
    )
    drop_sink_logits: bool = setting(False, "Remove the model's learned sink logits (gpt-oss).")
    score_from: int | None = setting(
        None,
        "The token after this one is the first target.",
        kind=int,
        shown="half of --tokens; 0 with --stream",
    )
    seed: int = seed()

    def measure(self, subject: "Subject", progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """The full pass, then a row for each window and number of sinks (:func:`kvprobe.probes.windows.grid`).

        ``sinks`` default to 0, 1 and 4; with the choice ``bos`` to none and the BOS, and to none where positions are
        ``recompute``. ``score_from`` defaults to half of the passage. Raises as ``grid`` does.
        """
        from kvprobe.probes.intervals import default_block_length
        from kvprobe.probes.windows import grid

        passage = subject.passage
        score_from = passage.n_tokens // 2 if self.score_from is None else self.score_from
        sinks = self.sinks or _default_sinks(self.positions, self.sink_choice, passage.n_front)
        rows = grid(
            subject.model,
            subject.input_ids[0],
            windows=self.windows,
            sinks=sinks,
            positions=cast(Any, self.positions),
            score_from=score_from,
            sink_choice=cast(Any, self.sink_choice),
            drop_sink_logits=self.drop_sink_logits,
            n_front=passage.n_front,
            seed=self.seed,
            progress=progress,
        )
        n_targets = passage.n_tokens - 1 - score_from
        facts = {"sinks": [*sinks], "score_from": score_from, "n_targets": n_targets}
        return rows, facts | {"interval": interval_of(default_block_length(n_targets))}

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence: the smallest window, without and with sinks."""
        cells = [row for row in result.rows if row["window"] is not None]
        smallest = min(row["window"] for row in cells)
        if smallest >= result.run["n_tokens"]:
            return f"{passage_of(result.run)}: {_cuts_nothing(result)}"
        cells = [row for row in cells if row["window"] == smallest]
        few, many = (pick(cells, key=lambda row: row["n_sink"]) for pick in (min, max))
        said = f"{passage_of(result.run)}: with the last {smallest:,} tokens ({result.run['positions']} positions) and "
        said += f"{sinks_of(few['n_sink'])} the loss {change_of(few)}"
        return said if few is many else f"{said}; with {sinks_of(many['n_sink'])} it {change_of(many)}"

    @classmethod
    def table_columns(cls, result: Result) -> list[str]:
        """The fields that a table shows, of a `stream` too."""
        return [*cls.stream_columns] if result.run.get("stream") else super().table_columns(result)

    @classmethod
    def summary(cls, result: Result) -> list[str]:
        """The lines under the table, of a `stream` too."""
        run, first = result.run, result.rows[0]
        lines = [
            "",
            f"{passage_of(run)}, {run['n_targets']:,} targets from {run['score_from'] + 1:,} on; a window counts the "
            "query, sinks are in addition",
        ]
        if nothing := _cuts_nothing(result):
            lines.append(nothing)
        if run.get("stream"):
            what = "loss is the mean up to at_token, stretch_loss since the row before"
            lines.append(f"streamed once through a rolling cache; {what}")
        if first["local_layers"]:
            lines.append(f"layers with a window of their own: {first['local_layers']}")
        if first["has_sink_logits"]:
            dropped = any(row["sink_logits_dropped"] for row in result.rows)
            said = ", dropped in every row but the first" if dropped else ""
            lines.append(f"the model has learned sink logits{said}")
        return lines

    @classmethod
    def figure(cls, result: Result, **how: Any) -> "Figure":
        """Loss by window and sinks. Raises ValueError for a `stream`."""
        if result.run.get("stream"):
            raise ValueError("a streamed window has no picture: there is no full pass to compare with")
        return super().figure(result, **how)


def stream(
    subject: "Subject",
    decoder: "Decoder",
    config: "StreamConfig",
    *,
    state: "StreamCheckpoint",
    progress: Progress = silent,
) -> Result:
    """The whole passage once through a rolling cache: a row a result (:func:`kvprobe.experiments.streaming.stream`).

    ``decoder`` is the subject's model (:func:`kvprobe.decoder.model.from_hf`). It continues from ``state``, which
    stays at the end: the caller removes it once the result is kept. Raises as ``streaming.stream`` does.
    """
    from kvprobe.experiments.streaming import rows
    from kvprobe.experiments.streaming import stream as read_stream
    from kvprobe.probes.windows import describe_local_layers

    results = read_stream(decoder, subject.input_ids[0], config, state=state, progress=progress)
    finished = state.progress()
    assert finished is not None
    record = run_record(
        subject.record(),
        **asdict(config),
        stream=True,
        sink_choice="first",
        n_targets=subject.passage.n_tokens - 1 - config.score_from,
        n_resumed=finished.resumed,
        wall_s=round(finished.seconds, 3),
    )
    local_layers = describe_local_layers(subject.loaded.spec.windows)
    return Result("window", rows(config, results, n_front=subject.passage.n_front, local_layers=local_layers), record)


def _cuts_nothing(result: Result) -> str:
    """The windows that hold the whole passage, in a sentence; empty if there are none."""
    n_tokens = result.run["n_tokens"]
    whole = sorted({row["window"] for row in result.rows if row["window"] is not None and row["window"] >= n_tokens})
    if not whole:
        return ""
    sizes = " and ".join(f"{window:,}" for window in whole)
    return f"a window of {sizes} tokens cuts nothing: the passage has {n_tokens:,}"


def _default_sinks(positions: str, choice: str, n_front: int) -> tuple[int, ...]:
    if positions == "recompute":
        return (0,)
    return (0, n_front) if choice == "bos" else (0, 1, 4)
