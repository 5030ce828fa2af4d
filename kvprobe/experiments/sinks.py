"""How much of a model's attention goes to token 0 of a passage, by layer and by head?"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvprobe.experiments.experiment import Experiment, seed, setting
from kvprobe.progress import Progress
from kvprobe.results.columns import Column
from kvprobe.results.phrases import passage_of
from kvprobe.results.result import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Sinks(Experiment):
    """How much of each layer's attention goes to token 0, the attention sink?

    \b
    Columns: mass         mean attention weight on token 0, over heads and queries
             uniform      the same if attention were spread evenly over what is visible
             sink_rate    share of heads with more than EPSILON on token 0
             top_*        the position that gets most of the layer's mass, whichever it is
             window       the layer's own sliding window, if it has one

    \b
    Examples:
      kvprobe sinks smollm2-135m --plot sinks.png
      kvprobe sinks smollm2-135m --control repeat     the sink needs tokens that differ
      kvprobe sinks gemma3-270m --bos drop            a model whose sink is its BOS
      kvprobe sinks MODEL --tokens 64 --queries-from 0  the published ε-sink protocol
    """

    name = "sinks"
    short = "How much of the attention is on token 0, the sink?"
    heading = "Its attention sinks"
    caption = "Attention on token 0 by layer, beside what it would be if spread evenly, and by layer and head."
    columns = (
        Column("layer", "layer"),
        Column("mass", "mass on token 0", ".3f"),
        Column("uniform", "if spread evenly", ".3f"),
        Column("sink_rate", "sink heads", ".1%"),
        Column("top_position", "heaviest position"),
        Column("top_token", "its token"),
        Column("top_mass", "its mass", ".3f"),
        Column("window", "own window"),
    )
    head_columns = ("layer", "head", "mass", "is_sink")

    queries_from: int = setting(64, "First query counted: earlier ones see little else.")
    epsilon: float = setting(0.3, "A head is a sink head if it puts more than this on token 0.", least=0, most=1)
    control: str = setting(
        "none",
        "Instead of the text: ids drawn uniformly, or one id repeated (never with BOS).",
        choices=("none", "random", "repeat"),
    )
    seed: int = seed()

    def measure(self, subject: "Subject", progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """A row a layer (:meth:`kvprobe.probes.mass.Mass.layer_rows`), the mass of its heads in ``head_mass``.

        ``control`` reads ids that mean nothing instead of the passage (:func:`kvprobe.text.passages.control`). The
        record has ``mass`` and ``sink_rate`` over all layers and heads. Raises ValueError for ``queries_from`` outside
        the passage, KvprobeError where attention is not finite.
        """
        from kvprobe.probes import mass
        from kvprobe.text import passages

        loaded = subject.loaded
        passage = passages.control(subject.passage, self.control, loaded.tokenizer, seed=self.seed)
        subject = replace(subject, passage=passage)
        measured = mass.measure(
            subject.model, subject.input_ids, queries_from=self.queries_from, positions=True, progress=progress
        )
        facts = subject.record() | {
            "control_id": passage.first_content_id if self.control == "repeat" else None,
            "mass": float(measured.token0.mean()),
            "sink_rate": float(measured.sink_rate(self.epsilon).mean()),
        }
        return measured.layer_rows(self.epsilon, loaded.spec.windows, passage.ids, loaded.tokenizer), facts

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence."""
        run = result.run
        return (
            f"{passage_of(run)}, queries from {run['queries_from']:,}: {run['mass']:.3f} of all attention is on token "
            f"0; {run['sink_rate']:.1%} of heads give it more than {run['epsilon']:g}"
        )

    @classmethod
    def table_columns(cls, result: Result) -> list[str]:
        """The fields that a table shows, of `by_head` too."""
        return [*cls.head_columns] if "head" in result.rows[0] else super().table_columns(result)

    @classmethod
    def figure(cls, result: Result, **how: Any) -> "Figure":
        """By layer and by layer and head. Raises ValueError for a result of `by_head`."""
        if "head_mass" not in result.rows[0]:
            raise ValueError("this result has a row for each head: plot the one with a row for each layer")
        return super().figure(result, **how)

    @staticmethod
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
