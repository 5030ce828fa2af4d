"""How long does a token take, with a KV cache and without, beside what this machine allows?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.caches.registry import KINDS
from kvprobe.experiments.experiment import Experiment, seed, setting
from kvprobe.progress import Progress
from kvprobe.results import phrases
from kvprobe.results.columns import Column
from kvprobe.results.result import Result, Row

if TYPE_CHECKING:
    from kvprobe.models.loading import Loaded

DEFAULT_CONTEXTS = (128, 512, 1024)
PHASES = ("naive", "cached", "prefill")
ENGINES = ("auto", "numba", "torch")
ABOVE = "what it reads stays in the processor's caches, or the machine was busy while its ceilings were measured"
"""Why a row may be above its ceiling."""
ON_THE_PAGE = {"phase", "context", "ms_median", "ms_low", "ms_high", "tokens_per_s", "intensity", "bound"}
ON_THE_PAGE |= {"fraction_of_ceiling"}


@dataclass(frozen=True, kw_only=True)
class Latency(Experiment):
    """How long does a token take, with a KV cache and without, and how near is that to what the machine allows?

    The machine's own ceilings are measured too: the best rates at which real kernels read memory and multiply
    matrices in this dtype. So is its other load: times of a busy machine are marked as not to be quoted. Token ids are
    random; time does not depend on them. prefill and naive are timed with the first --batch only, the decode step with
    every --batch.

    \b
    Columns: phase        naive: one token, everything read again; cached: one decode step; prefill: a whole prompt
             step         what read or decoded: numba (compiled) or torch (the readable decoder)
             ms_*         median and quartiles of one run; tokens_per_s counts all rows of the batch
             MB_moved     the least a step must read: the weights, and keys and values of the context, in 10^6 bytes
             intensity    FLOPs a byte; attention_intensity: of attention alone, in decode the same at every length
             bound        what sets the ceiling: bandwidth, or arithmetic beyond the ridge point
             ceiling_*    tokens/s at the machine's measured best rates; fraction_of_ceiling: the share reached

    \b
    Examples:
      kvprobe latency smollm2-135m --plot latency.png
      kvprobe latency smollm2-135m --phase cached --batch 1 --batch 4 --batch 16 --batch 64
      kvprobe latency gpt-124m --random-weights --context 512 --context 1024 --context 2048 --context 4096
      kvprobe latency gpt-124m --random-weights --end-to-end --naive-samples 8
      kvprobe latency smollm2-135m --no-compile       what compiling brings
    """

    name = "latency"
    needs = "model"
    short = "How long does a token take, with a cache and without?"
    caption = "Milliseconds a token by context, with a cache and without, and both under the machine's own roofline"
    columns = (
        Column("phase", "phase"),
        Column("context", "context (tokens)"),
        Column("batch", "batch"),
        Column("step", "engine"),
        Column("ms_median", "ms, median", ",.1f"),
        Column("ms_low", "lower quartile", ",.1f"),
        Column("ms_high", "upper quartile", ",.1f"),
        Column("tokens_per_s", "tokens/s", ",.1f"),
        Column("MB_moved", "MB moved", ",.1f"),
        Column("GFLOP", "GFLOP", ",.1f"),
        Column("intensity", "FLOP/B", ",.1f"),
        Column("attention_intensity", "attention's FLOP/B", ",.1f"),
        Column("bound", "bound by"),
        Column("ceiling_tokens_per_s", "ceiling, tokens/s", ",.1f"),
        Column("fraction_of_ceiling", "of what that allows", ".0%"),
    )

    contexts: tuple[int, ...] = setting(
        (),
        "Tokens attended to, the newest included. Repeat for several.",
        kind=int,
        flag="--context",
        shown="128, 512 and 1024",
    )
    batches: tuple[int, ...] = setting((1,), "Rows decoded at once. Repeatable.", kind=int, flag="--batch", shown="1")
    phases: tuple[str, ...] = setting(PHASES, "Time only these.", kind=str, flag="--phase", choices=PHASES, shown="all")
    engine: str = setting(
        "auto",
        "What reads prompts and decodes: compiled code (numba), the readable decoder (torch), or auto: compiled code "
        "if it supports the CPU, the model and the cache.",
        choices=ENGINES,
    )
    cache_kind: str = setting(
        "full",
        "The kind of cache. Compiled code decodes with full and rolling, and reads prompts into full only; the rest is "
        "done by torch.",
        flag="--cache",
        choices=KINDS,
    )
    repeats: int = setting(20, "Most runs of each row.", least=1)
    seconds: float = setting(3.0, "A row stops repeating after this long, but not before three runs.", least=0)
    end_to_end: bool = setting(
        False, "Also time a whole answer, a prompt and then many tokens, with a cache and without."
    )
    prompt_tokens: int = setting(3584, "Length of the prompt with --end-to-end.")
    new_tokens: int = setting(256, "Tokens generated with --end-to-end.")
    naive_samples: int | None = setting(
        None,
        "With --end-to-end, time only this many tokens without a cache, spread evenly.",
        kind=int,
        shown="all",
    )
    seed: int = seed()

    def measure(self, subject: "Loaded", progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """A row a phase, context and batch (:meth:`kvprobe.bench.latency.Observation.row`).

        ``busy`` and ``load`` in the record say what else ran (:meth:`kvprobe.bench.busy.Watch.record`). ``contexts``
        default to those of 128, 512 and 1,024 that the model has positions for; without ``phases`` no phase is timed by
        itself. ``end_to_end`` adds two rows. For the other settings see :class:`kvprobe.bench.latency.Bench`, whose
        notes are ``notes`` in the record. Raises as it does.
        """
        import torch

        from kvprobe.bench import machine
        from kvprobe.bench.latency import Bench
        from kvprobe.bench.roofline import Shape
        from kvprobe.decoder.model import from_hf

        decoder = from_hf(subject.model)
        limit = decoder.config.max_positions
        contexts = [*self.contexts] or [n for n in DEFAULT_CONTEXTS if n <= limit] or [limit]
        how: dict[str, Any] = {
            name: getattr(self, name) for name in ("engine", "cache_kind", "repeats", "seconds", "seed")
        }
        timing = Bench(decoder=decoder, **how, progress=progress)
        # both refuse wrong settings before anything is timed
        parts = [timing.measure(contexts, batches=self.batches, phases=self.phases)] if self.phases else []
        if self.end_to_end:
            parts.append(timing.end_to_end(self.prompt_tokens, self.new_tokens, naive_samples=self.naive_samples))
        dtype = getattr(torch, subject.dtype)
        # before and after: a shared machine drifts, and a ceiling is the best it does
        with timing.watch.span():
            here = machine.measure_machine(dtype, subject.device, progress=progress)
        observations = [observation for part in parts for observation in part]
        with timing.watch.span():
            here = here.best_of(machine.measure_machine(dtype, subject.device))
        ceilings, shape = here.ceilings, Shape.of(decoder)
        rows = [observation.row(ceilings, subject.dtype) for observation in observations]
        facts = here.record() | timing.watch.record(rows, device=subject.device)
        facts |= {
            "contexts": contexts,
            "compiled": self.engine != "torch",
            "start_up_s": timing.start_ups,
            "notes": timing.notes,
            "prompt_tokens": self.prompt_tokens if self.end_to_end else None,
            "new_tokens": self.new_tokens if self.end_to_end else None,
            "arithmetic_binds_at_batch": {str(n): ceilings.binding_batch(shape, n) for n in contexts},
        }
        return rows, facts

    def settings(self) -> dict[str, Any]:
        """The settings as a record has them: ``phases`` and ``end_to_end`` are seen in the rows."""
        return {name: value for name, value in super().settings().items() if name not in ("phases", "end_to_end")}

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence: the longest context that was decoded with a cache.

        For a busy machine it ends with :data:`kvprobe.results.phrases.BUSY`.
        """
        return phrases.with_busy(_sentence(result), result.run)

    @classmethod
    def notices(cls, result: Result) -> list[str]:
        """The engine's notes."""
        return list(result.run["notes"])

    @classmethod
    def shown(cls, result: Result) -> Result:
        """With megabytes and GFLOPs in place of bytes and FLOPs."""
        extra = [{"MB_moved": row["bytes_moved"] / 1e6, "GFLOP": row["flops"] / 1e9} for row in result.rows]
        return Result("latency", [row | more for row, more in zip(result.rows, extra, strict=True)], result.run)

    @classmethod
    def summary(cls, result: Result) -> list[str]:
        """The lines under the table."""
        rows, run = result.rows, result.run
        lines = [
            "",
            *phrases.busy_lines(run),
            f"{run['model']} ({run['source']}), {run['dtype']}, {run['device']}: the machine reads "
            f"{run['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s and multiplies {run['matrix_flops_per_s'] / 1e9:,.0f} "
            f"GFLOP/s, ridge point {run['ridge_point']:.1f} FLOP/B",
            "start-up, once a process: " + ", ".join(f"{name} {s:.2f} s" for name, s in run["start_up_s"].items())
            if run["start_up_s"]
            else "",
        ]
        cached = [row for row in rows if row["phase"] == "cached"]
        if cached:
            best = max(cached, key=lambda row: row["fraction_of_ceiling"])
            lines.append(
                f"decode reaches {best['fraction_of_ceiling']:.0%} of its ceiling at {best['context']:,} tokens, batch "
                f"{best['batch']:,}; attention's own intensity is {best['attention_intensity']:g} FLOP/B at every "
                "length"
            )
        if any(row["fraction_of_ceiling"] > 1 for row in rows):
            lines.append(f"a row above 100%: {ABOVE}")
        binds = ", ".join(
            f"{int(context):,} tokens: "
            + ("never, the cache keeps bandwidth the limit" if batch is None else f"batch {batch:,}")
            for context, batch in run["arithmetic_binds_at_batch"].items()
        )
        lines.append(f"arithmetic binds decode from: {binds}")
        return [line for i, line in enumerate(lines) if line or i == 0]


def _sentence(result: Result) -> str:
    run = result.run
    cached = [row for row in result.rows if row["phase"] == "cached" and row["batch"] == result.rows[0]["batch"]]
    if not cached:
        first = result.rows[0]
        return f"{run['model']}: {first['phase']} at {first['context']:,} tokens takes {first['ms_median']:,.1f} ms"
    row = max(cached, key=lambda row: row["context"])
    said = f"{run['model']} on {run['gpu'] or run['cpu']}: at {row['context']:,} tokens one more takes "
    said += f"{row['ms_median']:,.1f} ms with a cache"
    naive = [other for other in result.rows if other["phase"] == "naive" and other["context"] == row["context"]]
    if naive:
        times = naive[0]["ms_median"] / row["ms_median"]
        said += f" and {naive[0]['ms_median']:,.1f} ms without ({times:,.1f} times as long)"
    bound = "its memory" if row["bound"] == "bandwidth" else "its arithmetic"
    if row["fraction_of_ceiling"] > 1:
        return f"{said}; with it, more than was measured of {bound}: {ABOVE}"
    return f"{said}; with it, {row['fraction_of_ceiling']:.0%} of what {bound} allows is reached"
