"""What does every lever on a model's KV cache cost in loss, and how many bytes a token does it leave?

The relief map of :mod:`kvprobe.shape.levers` is arithmetic; this is the same map measured: only the levers that can be
pulled on a trained model as it is.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvprobe.bench.cache_memory import own_shape
from kvprobe.errors import UnsupportedModelError
from kvprobe.experiments import lowrank, window
from kvprobe.models.subject import Subject
from kvprobe.probes.losses import default_block_length, paired_interval, perplexity, token_losses
from kvprobe.probes.quantised import check_bits, quantising
from kvprobe.probes.truncation import BasisKind
from kvprobe.progress import Progress, silent
from kvprobe.results.phrases import change_of, fitted_to, interval_of, passage_of
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row
from kvprobe.shape.cache_bytes import Bill, bill
from kvprobe.shape.spec import Spec

BASES: tuple[BasisKind, ...] = ("oracle", "heldout")


def run(
    subject: Subject,
    *,
    windows: Sequence[int] = (),
    n_sink: int = 4,
    ranks: Sequence[int] = (),
    bases: Sequence[BasisKind] = BASES,
    bits: Sequence[int] = (8, 4),
    score_from: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """The model as it is, then a row a lever: its loss with interval, and the bytes it holds after the passage.

    ``kind`` is the factor that is attacked, as in :mod:`kvprobe.shape.levers`: ``window`` (last tokens and ``n_sink``
    sinks, absolute positions), ``latent`` (joint keys and values cut to a rank; its bytes count the basis), ``bits``
    (stored with a 16-bit scale and zero point for every 64 elements). ``bytes_per_token`` is the mean over the passage,
    ``bytes`` over its tokens; ``on_front``: no row has at most its bytes and at most its loss, and one of them less,
    intervals left aside; rows of an oracle basis, which saw the scored tokens, are on no front and keep none off it.
    The basis ``heldout`` is of later tokens of the same text. ``windows`` default to 1/2, 1/4 and 1/8 of the passage,
    ``ranks`` to those parts of the width. Raises UnsupportedModelError for a model that keeps other things than one K
    and V a KV head, and as :func:`kvprobe.experiments.window.run` and :func:`kvprobe.experiments.lowrank.run` do.
    """
    started = time.perf_counter()
    spec, n_tokens = subject.loaded.spec, subject.passage.n_tokens
    if own_shape(spec) is None:
        raise UnsupportedModelError(
            f"the {spec.family} family keeps other things than one K and V a KV head: the bytes of its levers are not "
            "known here"
        )
    for n_bits in bits:
        check_bits(n_bits)
    score_from = n_tokens // 2 if score_from is None else score_from
    windows = [*windows] or sorted({max(1, n_tokens // part) for part in (2, 4, 8)}, reverse=True)
    shared: dict[str, Any] = {"score_from": score_from, "seed": seed, "progress": progress}
    now = bill(spec, subject.loaded.dtype)
    found: list[Row] = []
    # what can be refused is, before the first long pass of the next lever
    cells = window.run(subject, windows=windows, sinks=(n_sink,), **shared).rows
    found.append(_row("as it is", "model", cells[0], now.total(n_tokens)))
    for cell in cells[1:]:
        name = f"window {cell['window']:,} + {n_sink} sinks"
        kept = _windowed(now, cell["window"] + n_sink).total(n_tokens)
        found.append(_row(name, "window", cell, kept, window=cell["window"], n_sink=n_sink))
    for basis in bases:
        for cell in lowrank.run(subject, ranks=ranks, basis=basis, **shared).rows[1:]:
            name, rank = f"rank {cell['rank']:,}, {basis} basis", cell["rank"]
            latent, once = _latent_bytes(spec, now, rank, n_tokens)
            found.append(_row(name, "latent", cell, latent + once, basis_bytes=once, rank=rank, basis=basis))
    found += _quantised(subject, now, bits, **shared)
    n_targets = n_tokens - 1 - score_from
    record = run_record(
        subject.record(),
        windows=windows,
        n_sink=n_sink,
        ranks=sorted({row["rank"] for row in found if row["rank"]}, reverse=True),
        bases=[*bases],
        bits=[*bits],
        score_from=score_from,
        n_targets=n_targets,
        interval=interval_of(default_block_length(n_targets)),
        seed=seed,
        wall_s=round(time.perf_counter() - started, 3),
    )
    return Result("relief_map", _finished(found, n_tokens), record)


def sentence(result: Result) -> str:
    """What the rows support, in one plain sentence: the smallest cache whose loss is not told apart from the full.

    An oracle basis is left out: it saw the tokens that it is scored on.
    """
    levers = [row for row in result.rows[1:] if row["basis"] != "oracle"]
    free = [row for row in levers if row["delta_low"] <= 0 and row["relief"] > 1]
    said = f"{passage_of(result.run)}: of {len(levers)} levers that never saw the scored tokens "
    if not free:
        return f"{said}none takes less memory without a rise in loss that is told apart from zero"
    best = min(free, key=lambda row: row["bytes"])
    fitted = f" (of {fitted_to(result.run)})" if best["basis"] == "heldout" else ""
    return (
        f"{said}the smallest cache whose rise in loss is not told apart from zero is {best['lever']}"
        f"{fitted}, "
        f"{best['relief']:.1f} times smaller: there the loss {change_of(best)}"
    )


def _row(lever: str, kind: str, scored: Row, n_bytes: int, **settings: Any) -> Row:
    row: Row = {"lever": lever, "kind": kind}
    row |= {"window": None, "n_sink": None, "rank": None, "basis": None, "bits": None} | settings
    row |= {name: scored[name] for name in ("loss", "perplexity", "delta", "delta_low", "delta_high")}
    row["basis_bytes"] = settings.get("basis_bytes", 0)
    return row | {"bytes": n_bytes}


def _quantised(
    subject: Subject, now: Bill, bits: Sequence[int], *, score_from: int, seed: int, progress: Progress
) -> Iterator[Row]:
    model, ids = subject.model, subject.input_ids
    reference = token_losses(model, ids, score_from=score_from)
    for done, n_bits in enumerate(bits):
        progress("quantised storage", done, len(bits), "passes")
        losses = token_losses(model, ids, score_from=score_from, attend=quantising(n_bits))
        interval = paired_interval(losses, reference, seed=seed)
        scored = {
            "loss": float(losses.mean()),
            "perplexity": perplexity(losses),
            "delta": interval.delta,
            "delta_low": interval.low,
            "delta_high": interval.high,
        }
        n_bytes = replace(now, bits=n_bits).total(subject.passage.n_tokens)
        yield _row(f"{n_bits}-bit storage", "bits", scored, n_bytes, bits=n_bits)


def _windowed(now: Bill, kept: int) -> Bill:
    layers = tuple(replace(layer, limit=min(kept, layer.limit or kept)) for layer in now.layers)
    return replace(now, layers=layers)


def _latent_bytes(spec: Spec, now: Bill, rank: int, n_tokens: int) -> tuple[int, int]:
    """Bytes of every layer's latents, in a local layer those of its window, and of the bases they are made from."""
    width = spec.joint_width
    full = replace(now, layers=tuple(replace(layer, vectors=(rank,)) for layer in now.layers))
    # a basis is `width` vectors of `rank` elements a layer, whatever the length
    basis = replace(full, layers=tuple(replace(layer, limit=None) for layer in full.layers))
    return full.total(n_tokens), basis.total(width)


def _finished(rows: Sequence[Row], n_tokens: int) -> list[Row]:
    """The rows with what needs all of them: relief against the first, the Pareto front; bytes a token."""

    def beaten(row: Row) -> bool:
        return row["basis"] == "oracle" or any(
            other["bytes"] <= row["bytes"]
            and other["loss"] <= row["loss"]
            and (other["bytes"] < row["bytes"] or other["loss"] < row["loss"])
            for other in rows
            if other["basis"] != "oracle"
        )

    return [
        row
        | {
            "n_tokens": n_tokens,
            "bytes_per_token": row["bytes"] / n_tokens,
            "relief": rows[0]["bytes"] / row["bytes"],
            "on_front": not beaten(row),
        }
        for row in rows
    ]
