"""What does cutting keys and values to a rank cost a model on a passage, and what rank have they?"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvprobe.models.subject import Subject
from kvprobe.probes.lowrank import Of, Stage
from kvprobe.probes.truncation import Allocation, BasisKind, spectrum_rows, sweep
from kvprobe.progress import Progress, silent
from kvprobe.results.phrases import change_of, fitted_to, interval_of, passage_of
from kvprobe.results.record import run_record
from kvprobe.results.result import Result
from kvprobe.text import passages
from kvprobe.text.passages import Passage, Text

STAGES: tuple[Stage, ...] = ("post_rope", "pre_rope")


def run(
    subject: Subject,
    *,
    ranks: Sequence[int] = (),
    of: Of = "kv",
    stage: Stage = "post_rope",
    basis: BasisKind = "oracle",
    fit_text: Text | None = None,
    center: bool = False,
    score_from: int | None = None,
    allocate: Allocation = "uniform",
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """The untruncated pass, then a row a rank: loss, interval, energy and bytes (`kvprobe.probes.truncation.sweep`).

    ``fit_text`` is for the basis ``heldout`` alone; without it, or where it begins as the passage does, that is fitted
    to later tokens of the same text, as many as the passage has and next to it. ``score_from`` defaults to half of the
    passage. Raises ValueError for what is out of range, KvprobeError for a text that is too short.
    """
    if fit_text is not None and basis != "heldout":
        raise ValueError(f"a text to fit on is for the basis heldout, got basis {basis}")
    started = time.perf_counter()
    loaded, n_tokens, bos = subject.loaded, subject.passage.n_tokens, subject.passage.bos
    fit = None
    if basis == "heldout":
        fit = None if fit_text is None else passages.encode(loaded.tokenizer, fit_text, n_tokens=n_tokens, bos=bos)
        # the same text again, or a copy of it, would begin with the scored tokens
        if fit is None or fit.sha256 == subject.text.sha256 or torch.equal(fit.ids, subject.passage.ids):
            fit = passages.heldout(loaded.tokenizer, subject.text, n_tokens=n_tokens, bos=bos)
    score_from = n_tokens // 2 if score_from is None else score_from
    swept = sweep(
        subject.model,
        subject.input_ids[0],
        ranks=ranks,
        of=of,
        stage=stage,
        basis=basis,
        fit_ids=None if fit is None else fit.ids.to(loaded.device),
        center=center,
        allocation=allocate,
        score_from=score_from,
        seed=seed,
        progress=progress,
    )
    record = run_record(
        subject.record(),
        ranks=[row["rank"] for row in swept.rows[1:] if row["allocate"] == "uniform"],
        of=of,
        stage=stage,
        basis=basis,
        allocate=allocate,
        centered=center,
        score_from=score_from,
        n_targets=n_tokens - 1 - score_from,
        n_fitted=swept.n_fitted,
        fit_text=None if fit is None else _about(fit),
        ranks_by_layer=swept.ranks_by_layer,
        interval=interval_of(swept.block_length),
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("lowrank", swept.rows, record)


def spectrum(
    subject: Subject,
    *,
    ranks: Sequence[int] = (),
    of: Of = "kv",
    stages: Sequence[Stage] = STAGES,
    center: bool = False,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """What rank each layer has, from one untruncated pass: a row a stage, layer and rank; ``spectrum`` in the record.

    The fields are those of :func:`kvprobe.probes.truncation.spectrum_rows`, which is also where to read what is raised.
    """
    started = time.perf_counter()
    progress("spectrum", 0, None)
    rows = spectrum_rows(subject.model, subject.input_ids[0], ranks=ranks, of=of, stages=stages, center=center)
    record = run_record(
        subject.record(),
        spectrum=True,
        ranks=[*ranks],
        of=of,
        stages=[*stages],
        centered=center,
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("lowrank", rows, record)


def _about(fit: Passage) -> dict[str, Any]:
    """What the record says of the text that a basis was fitted to."""
    found: dict[str, Any] = {"name": fit.name, "sha256": fit.sha256, "offset": fit.offset}
    return found if fit.cut is None else found | fit.cut.record()


def sentence(result: Result) -> str:
    """What the rows support, in one plain sentence; of a :func:`spectrum` too."""
    run = result.run
    what = {"kv": "keys and values", "k": "keys", "v": "values"}[run["of"]]
    if run.get("spectrum"):
        stage, width = result.rows[0]["stage"], result.rows[0]["width"]
        ranks = {row["layer"]: row["rank_99"] for row in result.rows if row["stage"] == stage}
        return (
            f"{passage_of(run)}: 99 % of the energy of the {what} ({stage}) lie in {min(ranks.values()):,} to "
            f"{max(ranks.values()):,} of {width:,} directions, by layer; the median is "
            f"{statistics.median_low(ranks.values()):,}"
        )
    rows = [row for row in result.rows if row["rank"] is not None and row["allocate"] == "uniform"]
    best, worst = (pick(rows, key=lambda row: row["rank"]) for pick in (max, min))
    saw = {
        "oracle": "an oracle basis, which saw the scored tokens",
        "prefix": "a basis of the tokens before the scored ones",
        "heldout": f"a basis of {fitted_to(run)}",
    }[run["basis"]]
    said = f"{passage_of(run)}: with {what} at rank {best['rank']:,} of {best['width']:,} in every layer ({saw}) the "
    said += f"loss {change_of(best)}"
    return said if best is worst else f"{said}; at rank {worst['rank']:,} it {change_of(worst)}"
