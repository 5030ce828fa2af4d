"""What do shared keys and values cost in loss: trained from the start, uptrained, or pooled without training?"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kvprobe.cells.run_store import RunStore, TrainingRun, config_of, finish_all, shape_row
from kvprobe.decoder.model import from_hf
from kvprobe.decoder.pool_kv_heads import pool_kv_heads
from kvprobe.errors import KvprobeError
from kvprobe.models.subject import Subject
from kvprobe.probes.equivalence import Equivalence, mean_interval, paired, tost
from kvprobe.probes.losses import check_score_from, default_block_length, paired_interval, perplexity, token_losses
from kvprobe.progress import Progress, silent
from kvprobe.results.phrases import PUBLISHED, interval_of, passage_of, training_of
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row
from kvprobe.shape.cache_bytes import DTYPE_BYTES
from kvprobe.text.corpus import Corpus
from kvprobe.training.loop import TrainConfig, check

N_HEADS = 8
MARGIN = 0.05
"""Nat per token within which two losses count as the same for practice; by default."""


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
    if not kv_heads or not seeds:
        raise ValueError("a grid needs at least one number of KV heads and one seed")
    if twice := [n for n in kv_heads if list(kv_heads).count(n) > 1]:
        raise ValueError(f"{twice[0]} KV heads are given twice")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"each seed must be given once, got {[*seeds]}")
    if uptrain is not None and not 0 < uptrain <= 1:
        raise ValueError(f"uptrain must be a fraction of the steps, above 0 and at most 1, got {uptrain}")
    runs: list[TrainingRun] = []
    for seed in seeds:
        plan = replace(protocol.plan, seed=seed)
        size = {"vocab": corpus.vocab, "length": corpus.length, "n_layers": protocol.n_layers, "width": protocol.width}
        of_seed = [TrainingRun(config_of(n, n_heads=N_HEADS, **size), corpus, plan, device=device) for n in kv_heads]
        if uptrain is not None:
            multi_head = TrainingRun(config_of(N_HEADS, n_heads=N_HEADS, **size), corpus, plan, device=device)
            of_seed = [multi_head, *(multi_head.uptrained(n, steps=_uptrain_steps(uptrain, plan)) for n in kv_heads)]
        runs += of_seed
    for cell in runs:
        check(cell.config, corpus, cell.plan)
    return runs


def run(
    corpus: Corpus,
    store: RunStore,
    protocol: Protocol | None = None,
    *,
    kv_heads: Sequence[int] = (8, 4, 2, 1),
    seeds: Sequence[int] = (0, 1, 2),
    uptrain: float | None = None,
    margin: float = MARGIN,
    device: str = "cpu",
    collect: bool = False,
    progress: Progress = silent,
) -> Result:
    """A row a head count and seed, of models trained now or kept in ``store``; the record has the :func:`summary`.

    ``collect`` trains nothing: rows are of the models that are kept, and the record names those ``missing``. Raises
    ValueError and KvprobeError before the first step for what cannot be trained, and where nothing is kept.
    """
    started = time.perf_counter()
    protocol = Protocol() if protocol is None else protocol
    tost([0.0], margin=margin)  # refused now, and not after hours
    wanted = cells(corpus, protocol, kv_heads=kv_heads, seeds=seeds, uptrain=uptrain, device=device)
    if not collect:
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
    record = run_record(
        corpus.record(),
        {name: value for name, value in plan.items() if name != "seed"},
        protocol=words_of(protocol, corpus),
        n_layers=protocol.n_layers,
        width=protocol.width,
        n_heads=N_HEADS,
        kv_heads=[*kv_heads],
        seeds=[*seeds],
        uptrain=uptrain,
        uptrain_steps=None if uptrain is None else _uptrain_steps(uptrain, protocol.plan),
        pool=False,
        device=device,
        margin=margin,
        missing=[words for words, cell in kept.items() if cell is None],
        cells=[_of_cell(cell) for cell in finished],
        summary=summary(rows, margin=margin),
        interval="95 % and, for differences paired by seed (the same batches, weights drawn for each), 90 %: Student's "
        "t over seeds, each comparison by itself",
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("gqa", rows, record)


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
    subject: Subject,
    *,
    kv_heads: Sequence[int] = (),
    score_from: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """The loss of a pretrained model unchanged, and with its KV heads pooled to fewer, nothing trained.

    ``kv_heads`` default to every number that the model's heads can be pooled to. ``best_val_loss`` is the loss of the
    passage's targets after ``score_from`` (half of it), ``delta`` the difference to the unchanged model with its
    interval. Raises UnsupportedModelError for a family unknown to the decoder, ValueError for a number that does not
    divide the model's, and KvprobeError for a model with only one KV head.
    """
    started = time.perf_counter()
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
        raise ValueError(f"{has} key/value heads cannot be pooled to {bad[0]} evenly: it can be {can}")
    size = DTYPE_BYTES[subject.loaded.dtype]
    rows: list[Row] = []
    reference = token_losses(decoder, subject.input_ids, score_from=score_from)
    for done, n in enumerate([has, *rungs]):
        progress("pooling", done, len(rungs) + 1, "head counts")
        shared = decoder if n == has else pool_kv_heads(decoder, n)
        losses = reference if n == has else token_losses(shared, subject.input_ids, score_from=score_from)
        change = paired_interval(losses, reference, seed=seed)
        rows.append(
            {
                "n_kv_heads": n,
                "seed": None,
                "best_val_loss": float(losses.mean()),
                **shape_row(shared.config, bytes_per_element=size),
                "perplexity": perplexity(losses),
                "delta": change.delta,
                "delta_low": change.low,
                "delta_high": change.high,
            }
        )
    n_targets = passage.n_tokens - 1 - score_from
    record = run_record(
        subject.record(),
        n_heads=decoder.config.n_heads,
        kv_heads=[has, *rungs],
        pool=True,
        score_from=score_from,
        n_targets=n_targets,
        interval=interval_of(default_block_length(n_targets)),
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("gqa", rows, record)


def sentences(result: Result) -> list[str]:
    """What the rows support, a plain sentence a head count."""
    run = result.run
    if run["pool"]:
        first, *pooled = result.rows
        said = [f"{passage_of(run)}, {run['n_targets']:,} targets: KV heads pooled by mean, nothing trained"]
        for row in pooled:
            said.append(
                f"{first['n_kv_heads']} KV heads to {row['n_kv_heads']}: loss {first['best_val_loss']:.3f} to "
                f"{row['best_val_loss']:.3f}, {_between(row['delta'], row['delta_low'], row['delta_high'], 95)}"
            )
        return said
    said = [training_of(run)]
    for row in run["summary"]:
        seeds = f"{row['n_seeds']} seed{'s' if row['n_seeds'] > 1 else ''}"
        within = "no interval" if row["low"] is None else f"95 % interval {row['low']:.3f} to {row['high']:.3f}"
        first, last = row["best_steps"]
        at = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        line = f"{_heads(row['n_kv_heads'])}: best validation loss {row['mean']:.3f} ({within}, {seeds}; at {at}, "
        line += f"{row['last']:.3f} after the last)"
        if row["verdict"] is not None:
            change = _between(row["difference"], row["difference_low"], row["difference_high"], 90)
            pairs = f" over the {row['n_pairs']} seeds of both" if row["n_pairs"] < row["n_seeds"] else ""
            line += f"; against multi-head{pairs} {change}: {row['verdict']} at a margin of {run['margin']:g} nat"
        elif row["n_kv_heads"] != run["n_heads"] and any(
            other["n_kv_heads"] == run["n_heads"] for other in run["summary"]
        ):
            line += "; not compared: no seed in common with multi-head"
        said.append(line)
    if any(row["verdict"] == "undecided" for row in run["summary"]):
        said.append("undecided: the interval includes the margin, or one seed gives no interval; more seeds narrow it")
    if run["n_heads"] not in run["kv_heads"]:
        said.append(f"nothing is compared without the multi-head model: add --kv-heads {run['n_heads']}")
    if run["missing"]:
        said.append(f"not trained yet: {'; '.join(run['missing'])}")
    return said


def _heads(number: int) -> str:
    return f"{number} KV head{'s' if number > 1 else ''}"


def _between(mean: float, low: float | None, high: float | None, level: int) -> str:
    within = "one seed, no interval" if low is None else f"{level} % interval {low:+.3f} to {high:+.3f}"
    return f"{mean:+.3f} nat a token ({within})".replace("-", "−")


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
