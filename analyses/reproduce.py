"""Which published figures do we get as well? Every row of `published.toml` beside ours: agrees, differs, or not run.

\b
    python -m analyses.reproduce gpt2                        what needs GPT-2's weights too, where they are here
    python -m analyses.reproduce DIRECTORY --reference FILE  a copy in another file, compared tensor by tensor
    python -m analyses.reproduce --quick                     leaves out what takes minutes

MODEL is compared with GPT-2's figures only if its weights are GPT-2's (`analyses.identity`). Times of a GPU are never
compared with those of another machine, and no row is silently left out. That a row differs is a finding, not an error:
the exit code is 0.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from analyses import gqa_module, memory, roofline, same_logits, sinks, window
from analyses.common import PUBLISHED_GPT, keep, load, script, show
from analyses.gqa import KV_HEADS
from analyses.identity import Identity, check_reference, identify
from kvprobe.cli.console import progress_bar
from kvprobe.decoder.model import from_hf
from kvprobe.errors import KvprobeError
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.models.loading import Loaded
from kvprobe.models.subject import prepare
from kvprobe.progress import Progress, silent
from kvprobe.results import phrases
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row
from kvprobe.shape import published
from kvprobe.shape.cache_bytes import bill
from kvprobe.shape.levers import levers

PUBLISHED = Path(__file__).with_name("published.toml")
REASONS = {
    "gpu": "it is a time of a GPU that the text does not name, and times of two machines say nothing of each other",
    "jax": "kvprobe computes with torch and has no JAX",
}
GB_140 = 140_000_000_000


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure; what the fields mean stands at the head of published.toml."""

    block: str
    what: str
    value: float
    unit: str
    source: str
    run: str
    where: dict[str, Any] = field(default_factory=dict)
    field: str = ""
    times: float = 1.0
    abs: float | None = None
    rel: float | None = None
    factor: float | None = None
    needs: str | None = None
    because: str | None = None

    def agrees(self, ours: float) -> bool:
        """Whether ours is within the tolerance of the published value."""
        if self.factor is not None:
            return self.value / self.factor <= ours <= self.value * self.factor
        room = self.abs if self.abs is not None else (self.rel or 0.0) * abs(self.value)
        # rounding by a unit's factor is not a difference
        return abs(ours - self.value) <= room + 1e-9 * abs(self.value)

    @property
    def tolerance(self) -> str:
        """In words."""
        if self.factor is not None:
            return f"× {self.factor:g} either way"
        return f"± {self.abs:g}" if self.abs is not None else f"± {self.rel or 0:.0%}"

    def find(self, rows: list[Row]) -> float:
        """Ours, in the published unit: the field of the one row that ``where`` selects."""
        wanted = {name: None if value == "null" else value for name, value in self.where.items()}
        matches = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
        if len(matches) != 1:
            raise ValueError(f"{self.block}, {self.what}: {len(matches)} rows are {wanted}, and one must be")
        return self.times * float(matches[0][self.field])


def claims(path: Path = PUBLISHED) -> list[Claim]:
    """Every row of the published table, in order."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Claim(block=block, **({key: value for key, value in part.items() if key != "rows"} | row))
        for block, parts in table.items()
        for part in parts.values()
        for row in part["rows"]
    ]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the blocks share: which model stands for GPT-2, which text, how much time there is, where results are."""

    model: str
    text: str
    quick: bool
    progress: Progress
    results: Path = Path("results")

    @cached_property
    def gpt(self) -> Loaded:
        """The GPT of the published speed and memory, with random weights, drawn once."""
        return load(PUBLISHED_GPT, progress=self.progress)

    def lowrank(self) -> list[Row]:
        """The first part of `analyses.lowrank`, which is the published one, at the published ranks."""
        if self.quick:
            raise KvprobeError("--quick leaves it out")
        subject = prepare(self.model, text=self.text, tokens=1024, progress=self.progress)
        return Lowrank(ranks=(256, 128), score_from=512).run(subject, progress=self.progress).rows

    def memory(self) -> list[Row]:
        """At every published context, or with ``quick`` at the first."""
        contexts = memory.CONTEXTS[:1] if self.quick else memory.CONTEXTS
        return memory.measured(self.gpt, contexts, progress=self.progress).rows

    def roofline(self) -> list[Row]:
        """What is arithmetic of it; the times are the GPU's."""
        decoder = from_hf(self.gpt.model)
        return [{"phase": phase} | roofline.counted(decoder, phase, 2048) for phase in ("prefill", "cached")]

    def gqa(self) -> list[Row]:
        """A row a head count of the kept results: nothing is trained for hours to fill a table."""
        kept = self.results / "gqa.json"
        if not kept.is_file():
            raise KvprobeError("it takes hours of training: python -m analyses.gqa --cells DIRECTORY")
        try:
            run = Result.from_json(kept.read_text(encoding="utf-8")).run
            summary_rows: list[Row] = run["summary"]
            there = {row["n_kv_heads"] for row in summary_rows if math.isfinite(row["mean"])}
            missing = [*run["missing"], *(f"{n} KV heads" for n in KV_HEADS if n not in there)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KvprobeError(f"{kept} cannot be read: {error}") from error
        published = {"protocol": phrases.PUBLISHED, "corpus": "time-machine", "uptrain": None, "pool": False}
        if {name: run.get(name) for name in published} != published:
            raise KvprobeError(f"the training kept in {kept} is not of the published protocol")
        if missing:
            raise KvprobeError(f"the training kept in {kept} is not finished: {'; '.join(missing)}")
        return summary_rows

    def blocks(self) -> dict[str, Callable[[], list[Row]]]:
        """The name of a block → how to find our rows of it."""
        on_model: dict[str, Any] = {"text": self.text, "progress": self.progress}
        return {
            "same_logits": lambda: same_logits.run().rows,
            "memory": self.memory,
            "roofline": self.roofline,
            "gqa_module": lambda: gqa_module.run().rows,
            "gqa": self.gqa,
            "bills": bills,
            "sinks": lambda: sinks.run(self.model, **on_model).rows,
            "window": lambda: window.run(self.model, choices=("first",), **on_model).rows,
            "lowrank": self.lowrank,
        }


def bills() -> list[Row]:
    """The bill of every model of the catalogue at 16 bits, and what the text's exercises ask of one."""
    rows = []
    for name, item in published.published().items():
        spec = item.spec
        by_kind = {lever.name: lever.bill for lever in levers(spec, "bfloat16")}
        per_token = {"": bill(spec, "bfloat16").next_token(0)}
        per_token["_mha"] = by_kind.get(f"as MHA, {spec.n_heads} KV heads", by_kind["as it is"]).next_token(0)
        per_token["_mqa"] = by_kind.get("MQA, 1 KV head", by_kind["as it is"]).next_token(0)
        row: Row = {"model": name, "n_parameters": spec.n_parameters}
        row["float32_bytes_per_token"] = bill(spec).next_token(0)
        for suffix, n_bytes in per_token.items():
            row[f"bytes_per_token{suffix}"] = n_bytes
            # whole tokens that fit
            row[f"tokens_of_140_gb{suffix}"] = GB_140 // n_bytes if n_bytes else None
        rows.append(row)
    return rows


def run(
    model: str = "gpt2",
    *,
    text: str = "time-machine",
    reference: str | None = None,
    trust: bool = False,
    quick: bool = False,
    progress: Progress = silent,
) -> Result:
    """Rows ``block, what, published, ours, unit, tolerance, verdict, because, source``, one a published figure.

    ``verdict`` is ``agrees``, ``differs`` or ``not run here``; ``because`` is the reason of the last, or why the
    tolerance is what it is. ``gpt2_weights`` in the record says what MODEL's weights were taken for. Raises
    KvprobeError for a ``reference`` that is not the published file, and for a MODEL that is a path to nothing.
    """
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        # mistyped, too
        raise KvprobeError(f"there is no directory {model}: name the one with GPT-2's weights, or leave out MODEL")
    if reference is not None:
        # a mistyped file is the user's error, not a reason to leave rows out
        check_reference(Path(reference))
    try:
        identity = identify(model, reference=reference, trust=trust)
    except KvprobeError as error:
        identity = Identity(False, str(error))
    blocks = Bench(model=model, text=text, quick=quick, progress=progress).blocks()
    done: dict[str, list[Row] | str] = {}
    rows = []
    for claim in claims():
        reason = REASONS.get(claim.needs or "")
        if claim.needs == "weights" and not identity.is_gpt2:
            reason = f"{model if not Path(model).is_dir() else Path(model).name} is not taken for GPT-2: "
            reason += identity.because
        ours = None
        if reason is None:
            outcome = done[claim.run] if claim.run in done else done.setdefault(claim.run, _try(blocks[claim.run]))
            if isinstance(outcome, str):
                reason = outcome
            else:
                ours, reason = _find(claim, outcome, quick)
        verdict = "not run here" if ours is None else "agrees" if claim.agrees(ours) else "differs"
        rows.append(
            {
                "block": claim.block,
                "what": claim.what,
                "published": claim.value,
                "ours": ours,
                "unit": claim.unit,
                "tolerance": claim.tolerance if ours is not None else None,
                "verdict": verdict,
                "because": reason if ours is None else claim.because,
                "source": claim.source,
            }
        )
    name = Path(model).name
    settings = {"quick": quick, "text": text if not Path(text).is_file() else Path(text).name}
    return Result("reproduce", rows, run_record({"model": name}, settings, gpt2_weights=identity.because))


def summary(result: Result) -> list[str]:
    """How many rows agree, differ and were not run, and each reason once."""
    by_verdict: dict[str, list[Row]] = {"agrees": [], "differs": [], "not run here": []}
    for row in result.rows:
        by_verdict[row["verdict"]].append(row)
    counts = [f"{len(rows)} {'agree' if verdict == 'agrees' else verdict}" for verdict, rows in by_verdict.items()]
    lines = ["", f"{len(result.rows)} published figures: {', '.join(counts)}"]
    reasons: dict[str, int] = {}
    for row in by_verdict["not run here"]:
        reasons[row["because"]] = reasons.get(row["because"], 0) + 1
    return lines + [f"{n} not run here, because {reason}" for reason, n in reasons.items()]


def _try(block: Callable[[], list[Row]]) -> list[Row] | str:
    try:
        return block()
    except KvprobeError as error:
        return str(error)


def _find(claim: Claim, rows: list[Row], quick: bool) -> tuple[float | None, str | None]:
    context = claim.where.get("context")
    if quick and context is not None and context not in [row["context"] for row in rows]:
        return None, "--quick leaves it out"
    return claim.find(rows), None


@click.command(help=__doc__)
@click.argument("model", default="gpt2")
@click.option("--text", default="time-machine", show_default=True)
@click.option("--reference", type=click.Path(dir_okay=False), help="GPT-2's weights as published, in safetensors.")
@click.option("--trust", is_flag=True, help="MODEL's weights are GPT-2's, whatever their checksum.")
@click.option("--quick", is_flag=True, help="Leave out what takes minutes.")
@click.option("--save/--no-save", default=None, help="Keep results/reproduce.{csv,json}.  [default: unless --quick]")
def main(model: str, save: bool | None, **options: Any) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, **options, progress=progress)
    # enough digits to read both a difference of 1e-7 and a bill of 2^20 bytes
    shown = [row | {name: _digits(row[name]) for name in ("published", "ours")} for row in result.rows]
    columns = ["block", "what", "published", "ours", "unit", "tolerance", "verdict"]
    show(Result("reproduce", shown, result.run), save=False, columns=columns, summary=summary(result))
    if save or (save is None and not options["quick"]):
        keep(result)


def _digits(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    script(main)
