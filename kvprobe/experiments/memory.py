"""Does each kind of KV cache hold what its formula says?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.caches.registry import KINDS
from kvprobe.experiments.experiment import Experiment, seed, setting
from kvprobe.progress import Progress
from kvprobe.results.columns import Column, amount
from kvprobe.results.result import Result, Row
from kvprobe.shape.cache_bytes import Amount

if TYPE_CHECKING:
    from kvprobe.models.loading import Loaded

DEFAULT_CONTEXTS = (128, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Memory(Experiment):
    """Does a KV cache hold what its formula says? Bytes by formula beside bytes really held.

    Every cache takes the context in one go. On a CPU the bytes of all storages that it keeps alive are summed, each
    once; on a GPU the allocator counts. Pinned bytes are storage that views keep alive and do not read.

    \b
    Caches: full         kvprobe's, preallocated; local layers keep their window
            rolling      kvprobe's sinks and window: constant, whatever the context
            fused views  K and V kept as slices of a fused QKV projection: a common mistake, on purpose
            hf dynamic   transformers' DynamicCache, after a forward of the model
            hf static    transformers' StaticCache, made for the context

    \b
    Columns: excess_bytes  measured beyond the formula
             ratio         measured over the formula

    \b
    Examples:
      kvprobe memory smollm2-135m
      kvprobe memory gemma3-270m --context 2048       sliding layers: what each cache keeps of them
      kvprobe memory gpt-124m --random-weights --context 1024 --context 2048 --context 4096
    """

    name = "memory"
    needs = "model"
    short = "Does a KV cache hold what its formula says?"
    columns = (
        Column("context", "context (tokens)"),
        Column("cache", "cache"),
        Column("formula_bytes", "by formula", amount),
        Column("measured_bytes", "held", amount),
        Column("pinned_bytes", "of these pinned", amount),
        Column("excess_bytes", "beyond the formula", amount),
        Column("ratio", "ratio"),
    )

    contexts: tuple[int, ...] = setting(
        (),
        "Tokens read into the cache. Repeat for several.",
        kind=int,
        flag="--context",
        shown="128, 512 and 1024",
    )
    batch: int = setting(1, "Sequences held at once.", least=1)
    kinds: tuple[str, ...] = setting(
        ("full", "rolling"),
        "Kinds of kvprobe's caches. Repeat for several.",
        kind=str,
        flag="--cache",
        choices=KINDS,
        shown="full and rolling",
    )
    window: int = setting(256, "Last tokens that the rolling cache keeps.")
    n_sink: int = setting(4, "Sink tokens that the rolling cache keeps.", flag="--sinks")
    seed: int = seed()

    def measure(self, subject: "Loaded", progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """A row a context and kind of cache: bytes by formula and bytes held (:mod:`kvprobe.bench.cache_memory`).

        ``contexts`` default to those of 128, 512 and 1,024 that the model has positions for. Raises ValueError beyond
        the model's positions, KvprobeError where a cache would not fit the free memory.
        """
        from kvprobe.bench.cache_memory import rows

        limit = subject.spec.max_positions
        contexts = [*self.contexts] or [n for n in DEFAULT_CONTEXTS if limit is None or n <= limit] or [limit or 1]
        settings: dict[str, Any] = {
            "kinds": self.kinds,
            "batch": self.batch,
            "window": self.window,
            "n_sink": self.n_sink,
        }
        table = rows(subject, contexts, **settings, seed=self.seed, progress=progress)
        counted_by = "allocator" if subject.device.startswith("cuda") else "unique storages"
        return table, {"contexts": contexts, "counted_by": counted_by}

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence."""
        exact, longest = exact_caches(result), max(row["context"] for row in result.rows)
        said = f"{result.run['model']}: " + (
            f"{', '.join(exact)} hold what the formula says, to the byte"
            if exact
            else "no cache holds what its formula says"
        )
        worst = max((row for row in result.rows if row["context"] == longest), key=lambda row: row["pinned_bytes"])
        if worst["pinned_bytes"]:
            said += (
                f"; {worst['cache']} keep {Amount(worst['pinned_bytes'])} alive at {longest:,} tokens that nothing "
                f"reads, {worst['ratio']:.2f} times the formula in all"
            )
        return said

    @classmethod
    def notices(cls, result: Result) -> list[str]:
        """Which caches the family leaves out."""
        if any(row["cache"] == "full" for row in result.rows):
            return []
        what = f"the {result.run['family']} family does not keep one K and one V for each KV head"
        return [f"kvprobe's own caches are left out: {what}"]

    @classmethod
    def summary(cls, result: Result) -> list[str]:
        """The lines under the table."""
        rows, run = result.rows, result.run
        lines = [
            "",
            f"{run['model']} ({run['source']}), {run['dtype']}, batch {run['batch']:,}, counted by {run['counted_by']}",
        ]
        if exact := exact_caches(result):
            lines.append(f"to the byte what the formula says: {', '.join(exact)}")
        for name in dict.fromkeys(row["cache"] for row in rows if row["pinned_bytes"]):
            worst = max((row for row in rows if row["cache"] == name), key=lambda row: row["pinned_bytes"])
            lines.append(
                f"{name}: at {worst['context']:,} tokens views keep {Amount(worst['pinned_bytes'])} alive that nothing "
                f"reads, {worst['ratio']:.2f} times the formula in all"
            )
        return lines


def exact_caches(result: Result) -> list[str]:
    """The kinds that hold, at every context, to the byte what their formula says."""
    kinds = dict.fromkeys(row["cache"] for row in result.rows)
    return [kind for kind in kinds if all(row["excess_bytes"] == 0 for row in result.rows if row["cache"] == kind)]
