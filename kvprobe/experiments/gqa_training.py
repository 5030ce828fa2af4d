"""Which small GPTs does the study of shared heads train, on what, and what does it find? And pooling without training.

What the experiment ``gqa`` does; the settings and their words are there.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kvprobe.cells.run_store import RunStore, TrainingRun, finish_all, gpt_config, shape_row
from kvprobe.decoder.model import from_hf
from kvprobe.decoder.pool_kv_heads import pool_kv_heads
from kvprobe.errors import KvprobeError, Wording
from kvprobe.models.subject import Subject
from kvprobe.probes.equivalence import Equivalence, mean_interval, paired, tost
from kvprobe.probes.intervals import default_block_length
from kvprobe.probes.losses import check_score_from, loss_fields, token_losses
from kvprobe.progress import Progress
from kvprobe.results.phrases import PUBLISHED, interval_of
from kvprobe.results.result import Row
from kvprobe.text.corpus import Corpus
from kvprobe.training.loop import TrainConfig, check

N_HEADS = 8
"""Query heads of the models that are trained."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The model's size, how its text is cut and how it is trained; the defaults are the published ones."""

    n_layers: int = 6
    width: int = 256
    length: int = 128
    n_train: int = 100_000
    n_valid: int = 3_000
    plan: TrainConfig = field(default_factory=TrainConfig)


QUICK = Protocol(
    n_layers=4,
    width=128,
    n_valid=300,
    plan=TrainConfig(steps=60, batch=16, validate_every=30),
)


@dataclass(frozen=True)
class TrainingSubject:
    """A text to train on, the store of finished models and the device; ``collect`` trains nothing.

    ``protocol`` stands in for that of the experiment's settings.
    """

    corpus: Corpus
    store: RunStore
    device: str = "cpu"
    protocol: Protocol | None = None
    collect: bool = False

    def record(self) -> dict[str, Any]:
        """The text in a run record."""
        return dict(self.corpus.record())


def _uptrain_steps(uptrain: float, plan: TrainConfig) -> int:
    return max(1, round(uptrain * plan.steps))


def words_of(protocol: Protocol, corpus: Corpus) -> str:
    """How a training is described: as published only if every setting, the text and its cuts are."""
    cut = {name: getattr(protocol, name) for name in ("length", "n_train", "n_valid")}
    text = {"corpus": "time-machine", "corpus_kind": "characters", **cut}
    if protocol == Protocol() and text.items() <= corpus.record().items():
        return PUBLISHED
    if protocol == QUICK:
        return "not the published protocol: a smaller model, fewer steps, fewer windows a step and to validate on"
    return "not the published protocol: other settings or another text"


def cells(
    corpus: Corpus,
    protocol: Protocol,
    *,
    kv_heads: Sequence[int],
    seeds: Sequence[int],
    uptrain: float | None = None,
    device: str = "cpu",
) -> list[TrainingRun]:
    """What to train, seed by seed, so that an interrupted run has whole seeds; all checked before the first step.

    With ``uptrain``, a fraction of the steps, every seed has its multi-head model first and then that model with its
    heads pooled and trained further for that many steps; with 8 heads of 8, which pools nothing, the control. Raises
    ValueError and KvprobeError.
    """
    runs: list[TrainingRun] = []
    for seed in seeds:
        plan = replace(protocol.plan, seed=seed)
        size = {"vocab": corpus.vocab, "length": corpus.length, "n_layers": protocol.n_layers, "width": protocol.width}
        of_seed = [TrainingRun(gpt_config(n, n_heads=N_HEADS, **size), corpus, plan, device=device) for n in kv_heads]
        if uptrain is not None:
            multi_head = TrainingRun(gpt_config(N_HEADS, n_heads=N_HEADS, **size), corpus, plan, device=device)
            of_seed = [multi_head, *(multi_head.uptrained(n, steps=_uptrain_steps(uptrain, plan)) for n in kv_heads)]
        runs += of_seed
    for cell in runs:
        check(cell.config, corpus, cell.plan)
    return runs


def train(
    subject: TrainingSubject,
    protocol: Protocol,
    *,
    kv_heads: Sequence[int],
    seeds: Sequence[int],
    uptrain: float | None,
    margin: float,
    progress: Progress,
) -> tuple[list[Row], dict[str, Any]]:
    """A row a head count and seed, of models trained now or kept in the store; the facts have the :func:`summary`.

    A subject with ``collect`` trains nothing: rows are of the models that are kept, and the facts name those
    ``missing``. Raises ValueError and KvprobeError before the first step for what cannot be trained, and where nothing
    is kept.
    """
    tost([0.0], margin=margin)  # refused now, and not after hours
    store, device = subject.store, subject.device
    wanted = cells(subject.corpus, protocol, kv_heads=kv_heads, seeds=seeds, uptrain=uptrain, device=device)
    if not subject.collect:
        finish_all(wanted, store, progress=progress)
    shown = [cell for cell in wanted if (cell.parent is None) == (uptrain is None)]
    kept = {cell.words: store.read(cell) for cell in shown}
    finished = [cell for cell in kept.values() if cell is not None]
    if not finished:
        raise KvprobeError(
            f"none of these models is in {store.directory}: name the directory in which they were trained on "
            "this text, or train them first"
        )
    rows = [_row(cell) for cell in finished]
    plan = asdict(protocol.plan) | {"betas": [*protocol.plan.betas]}
    facts = {name: value for name, value in plan.items() if name != "seed"} | {
        "protocol": words_of(protocol, subject.corpus),
        "n_layers": protocol.n_layers,
        "width": protocol.width,
        "n_heads": N_HEADS,
        "kv_heads": [*kv_heads],
        "seeds": [*seeds],
        "uptrain_steps": None if uptrain is None else _uptrain_steps(uptrain, protocol.plan),
        "device": device,
        "missing": [words for words, cell in kept.items() if cell is None],
        "cells": [_of_cell(cell) for cell in finished],
        "summary": summary(rows, margin=margin),
        "interval": "95 % and, for differences paired by seed (the same batches, weights drawn for each), 90 %: "
        "Student's t over seeds, each comparison by itself",
    }
    return rows, facts


def summary(rows: Sequence[Row], *, margin: float, n_heads: int = N_HEADS) -> list[Row]:
    """A row a head count: mean best loss over seeds with its 95 % t-interval, and its difference to multi-head.

    The difference is paired by seed, over the ``n_pairs`` seeds that both have, with its 90 % interval, the p-value and
    the verdict of :func:`kvprobe.probes.equivalence.tost`. All of these are None for multi-head itself and without a
    pair. ``best_steps`` are where the best losses were reached, first and last of the seeds; ``last`` is the mean loss
    after the last step.
    """
    of_heads: dict[int, list[Row]] = {}
    for row in rows:
        of_heads.setdefault(row["n_kv_heads"], []).append(row)
    losses = {n: {row["seed"]: row["best_val_loss"] for row in of_head} for n, of_head in of_heads.items()}
    table = []
    for n, by_seed in losses.items():
        best_steps = [row["best_step"] for row in of_heads[n]]
        mean = mean_interval([*by_seed.values()])
        pairs = paired(by_seed, losses.get(n_heads, {})) if n != n_heads else []
        tested: Equivalence | None = tost(pairs, margin=margin) if pairs else None
        difference = tested.difference if tested else None
        table.append(
            {
                "n_kv_heads": n,
                "n_seeds": len(by_seed),
                "n_pairs": len(pairs) or None,
                "mean": mean.mean,
                "low": mean.low,
                "high": mean.high,
                "difference": difference.mean if difference else None,
                "difference_low": difference.low if difference else None,
                "difference_high": difference.high if difference else None,
                "p_value": tested.p_value if tested else None,
                "verdict": tested.verdict if tested else None,
                "best_steps": [min(best_steps), max(best_steps)],
                "last": mean_interval([row["last_val_loss"] for row in of_heads[n]]).mean,
                "cache_bytes_per_token": of_heads[n][0]["cache_bytes_per_token"],
            }
        )
    return table


@torch.no_grad()
def pool(
    subject: Subject, *, kv_heads: Sequence[int], score_from: int | None, seed: int, progress: Progress
) -> tuple[list[Row], dict[str, Any]]:
    """The loss of a pretrained model unchanged, and with its KV heads pooled to fewer, nothing trained.

    Without ``kv_heads`` every number that the model's heads can be pooled to. ``best_val_loss`` is the loss of the
    passage's targets after ``score_from`` (half of it), ``delta`` the difference to the unchanged model with its
    interval. Raises UnsupportedModelError for a family unknown to the decoder, ValueError for a number that does not
    divide the model's, and KvprobeError for a model with only one KV head.
    """
    decoder, passage = from_hf(subject.model), subject.passage
    has = decoder.config.n_kv_heads
    if has == 1:
        raise KvprobeError(f"{subject.loaded.name} has one KV head for all its query heads: nothing is left to pool")
    score_from = passage.n_tokens // 2 if score_from is None else score_from
    check_score_from(passage.n_tokens, score_from)
    divisors = [n for n in range(1, has + 1) if has % n == 0]
    rungs = sorted({*(kv_heads or divisors)} - {has}, reverse=True)
    if bad := [n for n in rungs if n not in divisors]:
        can = ", ".join(map(str, divisors))
        said = "{kv_heads}: {0} key/value heads cannot be pooled to {1} evenly: it can be {2}"
        raise ValueError(Wording(said, has, bad[0], can))
    rows: list[Row] = []
    reference = token_losses(decoder, subject.input_ids, score_from=score_from)
    for done, n in enumerate([has, *rungs]):
        progress("pooling", done, len(rungs) + 1, "head counts")
        shared = decoder if n == has else pool_kv_heads(decoder, n)
        losses = reference if n == has else token_losses(shared, subject.input_ids, score_from=score_from)
        scored = loss_fields(losses, reference, seed=seed)
        row: Row = {"n_kv_heads": n, "seed": None, "best_val_loss": scored.pop("loss")}
        rows.append(row | shape_row(shared.config, subject.loaded.dtype) | scored)
    progress("pooling", len(rungs) + 1, len(rungs) + 1, "head counts")
    n_targets = passage.n_tokens - 1 - score_from
    facts = {
        "n_heads": decoder.config.n_heads,
        "kv_heads": [has, *rungs],
        "score_from": score_from,
        "n_targets": n_targets,
        "interval": interval_of(default_block_length(n_targets)),
    }
    return rows, facts


def _row(kept: dict[str, Any]) -> Row:
    """The row of a kept cell, and after it the step of the best of its validations, and what the last one was."""
    steps = {loss: step for step, loss in reversed(kept["validations"])}
    row: Row = kept["row"]
    return row | {"best_step": steps[row["best_val_loss"]], "last_val_loss": kept["validations"][-1][1]}


def _of_cell(kept: dict[str, Any]) -> Row:
    """What the record says of a kept cell beyond its row: every validation, and when, where and how long."""
    row, run = kept["row"], kept["run"]
    validations = [[step, loss] for step, loss in kept["validations"]]
    about = {"n_kv_heads": row["n_kv_heads"], "seed": row["seed"], "validations": validations}
    about |= {"seconds": round(kept["seconds"], 1), "n_resumed": kept["resumed"]}
    return about | {name: run[name] for name in ("threads", "cpu", "date", "versions")}
