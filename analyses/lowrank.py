"""Can a truncated pass beat the full one, and if so, because its basis saw the scored tokens and their future?

\b
    python -m analyses.lowrank gpt2 --text time-machine

First part, the published GPT-2 protocol (Dive into Deep Learning, "Generation and the KV cache"): joint keys and
values of each layer, 1,024 tokens, uncentred, the basis an oracle, loss of the 511 targets 513 to 1023. Published:
full 3.58 (perplexity 36), rank 256 of 1536 3.49 (33), rank 128 3.66 (39). Those are 1/6 and 1/12 of the width, which
is what other models are cut to here, beside 1/2, 1/4 and 1/8.

Second part, the question that the text leaves open: why is rank 256 *better* than full? The same ranks with three
bases over several passages. The answer counts what beats the full pass with its whole 95 % interval; the basis is
the reason only if the oracle alone does.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import click
import torch
from torch import Tensor

from analyses.common import keep, script
from kvprobe.cli.console import emit, notice, progress_bar
from kvprobe.errors import KvprobeError
from kvprobe.models.subject import Subject, prepare
from kvprobe.probes.intervals import default_block_length
from kvprobe.probes.losses import loss_fields
from kvprobe.probes.truncation import BasisKind, Sweep, sweep
from kvprobe.progress import Progress, silent
from kvprobe.results.phrases import fitted_to
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row
from kvprobe.text import passages
from kvprobe.text.passages import Passage
from kvprobe.text.texts import Text, read_text

BASES: tuple[BasisKind, ...] = ("oracle", "prefix", "heldout")
PARTS = (2, 4, 6, 8, 12)
TEXTS = ("time-machine", "bundled")


def run(
    model: str = "gpt2",
    *,
    texts: Sequence[str] = TEXTS,
    tokens: int = 1024,
    score_from: int = 512,
    n_passages: int = 2,
    parts: Sequence[int] = PARTS,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """The rows of ``kvprobe lowrank`` for every passage and basis, with ``passage`` and ``offset``; then those of all.

    From each text ``n_passages`` consecutive passages are scored; ``heldout`` is fitted to the one after it. The
    first passage with the oracle is the published protocol (``part``). Rows of passage ``all`` are over the targets
    of all passages. A text that cannot be had is left out and named in the run record. ``answer`` there says, for
    each basis, at which ranks the whole interval over all passages is below the full pass and which it was worse at.
    """
    started = time.perf_counter()
    read, missing = _texts(texts)
    subject = prepare(model, text=texts[texts.index(read[0][0])], tokens=tokens, progress=progress)
    cuts = [
        pair for _, text in read for pair in pairwise(_consecutive(subject, text, tokens=tokens, number=n_passages + 1))
    ]
    ranks = _ranks(subject, parts, min(score_from, tokens))
    rows: list[Row] = []
    by_basis: dict[str, list[Sweep]] = {basis: [] for basis in BASES}
    for i, (scored, other) in enumerate(cuts):
        for basis in BASES:
            progress("passages and bases", len(BASES) * i + BASES.index(basis), len(BASES) * len(cuts))
            swept = sweep(
                subject.model,
                scored.ids.to(subject.loaded.device),
                ranks=ranks,
                basis=basis,
                fit_ids=other.ids.to(subject.loaded.device) if basis == "heldout" else None,
                score_from=score_from,
                seed=seed,
            )
            part = "published" if basis == "oracle" and i == 0 else "open question"
            rows += [{"part": part, "passage": scored.name, "offset": scored.offset, **row} for row in swept.rows]
            by_basis[basis].append(swept)
    pooled = [row for basis in BASES for row in _pooled(by_basis[basis], seed)]
    record = run_record(
        subject.record(),
        score_from=score_from,
        n_targets=tokens - 1 - score_from,
        passages=[{"name": cut.name, "sha256": cut.sha256, "offset": cut.offset} for cut, _ in cuts],
        missing_texts=missing,
        block_length=by_basis["oracle"][0].block_length,
        block_length_of_all=default_block_length((tokens - 1 - score_from) * len(cuts)),
        answer=answer(pooled),
        ranks=ranks,
        bases=[*BASES],
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("lowrank", rows + pooled, record)


def answer(rows: Sequence[Row]) -> dict[str, dict[str, list[int]]]:
    """By basis, the ranks whose whole interval is ``better`` than the full pass, ``worse``, and ``undecided``."""
    verdicts: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row["rank"] is None:
            continue
        verdict = "better" if row["delta_high"] < 0 else "worse" if row["delta_low"] > 0 else "undecided"
        of_basis = verdicts.setdefault(row["basis"], {"better": [], "undecided": [], "worse": []})
        of_basis[verdict].append(row["rank"])
    return verdicts


def _texts(names: Sequence[str]) -> tuple[list[tuple[str, Text]], list[str]]:
    read, missing, errors = [], [], []
    for name in names:
        try:
            read.append((name, read_text(name)))
        except KvprobeError as error:
            missing.append(name)
            errors.append(error)
    if not read:
        raise errors[0]
    return read, missing


def _consecutive(subject: Subject, text: Text, *, tokens: int, number: int) -> list[Passage]:
    # they share no token of the text; each has its own BOS, if the model has one
    cuts: list[Passage] = []
    while len(cuts) < number:
        offset = cuts[-1].next_offset if cuts else 0
        cuts.append(passages.encode(subject.loaded.tokenizer, text, n_tokens=tokens, offset=offset))
    return cuts


def _ranks(subject: Subject, parts: Sequence[int], most: int) -> list[int]:
    ranks = [subject.loaded.spec.joint_width // part for part in parts]
    return [rank for rank in ranks if 1 <= rank <= most]


def _pooled(sweeps: Sequence[Sweep], seed: int) -> list[Row]:
    """One row a rank over the targets of all passages, end to end (a block may span the seam of two)."""
    rows = []
    reference = torch.cat([swept.losses[0] for swept in sweeps])
    for i, first in enumerate(sweeps[0].rows):
        losses: Tensor = torch.cat([swept.losses[i] for swept in sweeps])
        row: dict[str, Any] = {"part": "open question", "passage": "all", "offset": None, **first}
        row |= {
            **loss_fields(losses, reference, seed=seed),
            "energy": sum(swept.rows[i]["energy"] for swept in sweeps) / len(sweeps),
        }
        rows.append(row)
    return rows


def summary(result: Result) -> list[str]:
    """The answer in words, a line a basis."""
    lines = ["", "over all passages, against the full pass (95 % intervals):"]
    for basis, verdicts in result.run["answer"].items():
        said = [f"{verdict} at {', '.join(map(str, ranks))}" for verdict, ranks in verdicts.items() if ranks]
        name = f"{basis} ({fitted_to(result.run)})" if basis == "heldout" else basis
        lines.append(f"  {name}: {'; '.join(said)}")
    better = [basis for basis, verdicts in result.run["answer"].items() if verdicts["better"]]
    if not better:
        lines.append("no truncated pass beats the full one")
    elif better == ["oracle"]:
        lines.append("a truncated pass beats the full one only where its basis saw the scored tokens and their future")
    else:
        lines.append("a truncated pass beats the full one also with a basis that never saw the scored tokens")
    return lines


@click.command(help=__doc__)
@click.argument("model", default="gpt2")
@click.option("--text", "texts", multiple=True, default=TEXTS, show_default=True, help="Repeat for several.")
@click.option("--tokens", type=int, default=1024, show_default=True)
@click.option("--score-from", type=int, default=512, show_default=True)
@click.option("--passages", "n_passages", type=int, default=2, show_default=True, help="From each text.")
@click.option("--quick", is_flag=True, help="One passage, two ranks.")
@click.option("--save/--no-save", default=None, help="Keep results/lowrank.{csv,json}.  [default: unless --quick]")
def main(
    model: str, texts: tuple[str, ...], tokens: int, score_from: int, n_passages: int, quick: bool, save: bool | None
) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(
            model,
            texts=texts[-1:] if quick else texts,
            tokens=tokens,
            score_from=score_from,
            n_passages=1 if quick else n_passages,
            parts=(6, 12) if quick else PARTS,
            progress=progress,
        )
    if result.run["missing_texts"]:
        notice(f"left out, since they are not available: {', '.join(result.run['missing_texts'])}")
    columns = ["part", "passage", "offset", "basis", "rank", "loss", "perplexity", "delta", "delta_low", "delta_high"]
    emit(result, format_="table", out=None, columns=[*columns, "energy", "ratio"], summary=summary(result))
    if save or (save is None and not quick):
        keep(result)


if __name__ == "__main__":
    script(main)
