"""What does each lever on a model's KV cache cost in loss, and how many bytes a token does it leave?

The relief map of :mod:`kvprobe.shape.levers` is arithmetic; this is the same map measured: only the levers that can be
pulled on a trained model as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvprobe.errors import UnsupportedModelError
from kvprobe.experiments.experiment import Experiment, seed, setting
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.experiments.window import Window
from kvprobe.progress import Progress
from kvprobe.results.columns import Column, amount
from kvprobe.results.phrases import LOSS_COLUMNS, change_of, fitted_to, interval_of, passage_of
from kvprobe.results.result import Result, Row
from kvprobe.shape.cache_bytes import Bill, bill
from kvprobe.shape.spec import Spec

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

BASES = ("oracle", "heldout")


@dataclass(frozen=True, kw_only=True)
class Relief(Experiment):
    """What does each lever on the KV cache cost in loss, and how many bytes does it leave? Measured, on one model.

    Levers that a trained model takes as it is: a window with sinks (absolute positions), a rank of joint keys and
    values (the bytes count the basis), and storage in few bits (a 16-bit scale and zero point for every 64 elements).
    Ranks and bits change what attention reads; their bytes are by formula, since no cache of kvprobe stores either.
    Every other way to a smaller cache needs training.

    \b
    Columns: kind             the factor of the cache that the lever attacks
             delta            loss beyond the unchanged model, nat a token; delta_low to delta_high: 95 % interval
             bytes            of the whole cache after the passage
             bytes_per_token  the mean over the passage
             relief           times smaller than the cache of the unchanged model
             on_front         no other lever has at most its bytes and at most its loss; an oracle basis, which saw
                              the scored tokens, is on no front

    \b
    Examples:
      kvprobe relief smollm2-135m --plot relief.png
      kvprobe relief smollm2-135m --window 256 --sinks 1 --bits 8 --bits 4 --bits 2
      kvprobe relief smollm2-135m --rank 192 --basis heldout --basis oracle
    """

    name = "relief"
    analysis = "relief_map"
    short = "What does each lever on the cache cost, and leave?"
    heading = "What each lever costs and leaves"
    caption = "Loss against bytes a token: what each lever costs and leaves. Joined: the levers that no other beats."
    columns = (
        Column("lever", "lever"),
        Column("kind", "factor"),
        *(column for column in LOSS_COLUMNS if column.field != "perplexity"),
        Column("bytes", "cache", amount),
        Column("bytes_per_token", "bytes a token", amount),
        Column("relief", "times smaller", ",.2f"),
        Column("on_front", "on the front"),
    )
    in_units = ("bytes", "bytes_per_token")

    windows: tuple[int, ...] = setting(
        (),
        "Tokens seen, the query itself counted. Repeat for several.",
        kind=int,
        flag="--window",
        shown="1/2, 1/4 and 1/8 of the passage",
    )
    n_sink: int = setting(4, "Sink tokens beside each window.", flag="--sinks")
    ranks: tuple[int, ...] = setting(
        (),
        "Rank of joint keys and values. Repeat for several.",
        kind=int,
        flag="--rank",
        shown="1/2, 1/4 and 1/8 of the width",
    )
    bases: tuple[str, ...] = setting(
        ("heldout",),
        "What the bases are fitted to: later tokens of the same text, or the scored tokens themselves (a bound, no "
        "cache). Repeat for both.",
        kind=str,
        flag="--basis",
        choices=BASES,
    )
    bits: tuple[int, ...] = setting((8, 4), "Bits that an element is stored in. Repeat for several.", kind=int)
    score_from: int | None = setting(
        None, "The token after this one is the first target.", kind=int, shown="half of --tokens"
    )
    seed: int = seed()

    def measure(self, subject: "Subject", progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """The model as it is, then a row a lever: its loss with interval, and the bytes it holds after the passage.

        ``kind`` is the factor that is attacked, as in :mod:`kvprobe.shape.levers`. Rows of an oracle basis are on no
        front and keep none off it; intervals are left aside there. Raises UnsupportedModelError for a model that does
        not keep one K and one V for each KV head, and as the experiments ``window`` and ``lowrank`` do.
        """
        from kvprobe.probes.intervals import default_block_length
        from kvprobe.probes.losses import loss_fields, token_losses
        from kvprobe.probes.quantised import check_bits, quantising

        spec, n_tokens = subject.loaded.spec, subject.passage.n_tokens
        if not spec.keeps_plain_kv:
            raise UnsupportedModelError(
                f"the {spec.family} family does not keep one K and one V for each KV head: the bytes of its levers are "
                "not known"
            )
        for n_bits in self.bits:
            check_bits(n_bits)
        score_from = n_tokens // 2 if self.score_from is None else self.score_from
        windows = [*self.windows] or sorted({max(1, n_tokens // part) for part in (2, 4, 8)}, reverse=True)
        shared: dict[str, Any] = {"score_from": score_from, "seed": self.seed}
        now = bill(spec, subject.loaded.dtype)
        rows: list[Row] = []
        # each lever refuses wrong settings before its own first long pass
        cells = Window(windows=tuple(windows), sinks=(self.n_sink,), **shared).run(subject, progress=progress).rows
        rows.append(_row("as it is", "model", cells[0], now.total(n_tokens)))
        for cell in cells[1:]:
            name = f"window {cell['window']:,} + {self.n_sink} sinks"
            kept = now.windowed(cell["window"] + self.n_sink).total(n_tokens)
            rows.append(_row(name, "window", cell, kept, window=cell["window"], n_sink=self.n_sink))
        for basis in self.bases:
            for cell in Lowrank(ranks=self.ranks, basis=basis, **shared).run(subject, progress=progress).rows[1:]:
                name, rank = f"rank {cell['rank']:,}, {basis} basis", cell["rank"]
                latent, once = _latent_bytes(spec, now, rank, n_tokens)
                rows.append(_row(name, "latent", cell, latent + once, basis_bytes=once, rank=rank, basis=basis))
        model, ids = subject.model, subject.input_ids
        reference = token_losses(model, ids, score_from=score_from)
        for done, n_bits in enumerate(self.bits):
            progress("quantised storage", done, len(self.bits), "passes")
            losses = token_losses(model, ids, score_from=score_from, attend=quantising(n_bits))
            scored, n_bytes = loss_fields(losses, reference, seed=self.seed), replace(now, bits=n_bits).total(n_tokens)
            rows.append(_row(f"{n_bits}-bit storage", "bits", scored, n_bytes, bits=n_bits))
        progress("quantised storage", len(self.bits), len(self.bits), "passes")
        n_targets = n_tokens - 1 - score_from
        facts = {
            "windows": windows,
            "ranks": sorted({row["rank"] for row in rows if row["rank"]}, reverse=True),
            "score_from": score_from,
            "n_targets": n_targets,
            "interval": interval_of(default_block_length(n_targets)),
        }
        return _finished(rows, n_tokens), facts

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence: the smallest cache without a measurable rise in loss.

        An oracle basis is left out: it saw the tokens that it is scored on.
        """
        levers = [row for row in result.rows[1:] if row["basis"] != "oracle"]
        free = [row for row in levers if row["delta_low"] <= 0 and row["relief"] > 1]
        said = f"{passage_of(result.run)}: of {len(levers)} levers that never saw the scored tokens "
        if not free:
            return f"{said}none takes less memory without a measurable rise in loss"
        # of what no other lever beats; of equal bytes, the lower loss
        best = min(free, key=lambda row: (not row["on_front"], row["bytes"], row["loss"]))
        fitted = f" (of {fitted_to(result.run)})" if best["basis"] == "heldout" else ""
        return (
            f"{said}the smallest cache without a measurable rise in loss is {best['lever']}{fitted}, "
            f"{best['relief']:.1f} times smaller: there the loss {change_of(best)}"
        )


def _row(lever: str, kind: str, scored: Row, n_bytes: int, **settings: Any) -> Row:
    row: Row = {"lever": lever, "kind": kind}
    row |= {"window": None, "n_sink": None, "rank": None, "basis": None, "bits": None} | settings
    row |= {name: scored[name] for name in ("loss", "perplexity", "delta", "delta_low", "delta_high")}
    row["basis_bytes"] = settings.get("basis_bytes", 0)
    return row | {"bytes": n_bytes}


def _latent_bytes(spec: Spec, now: Bill, rank: int, n_tokens: int) -> tuple[int, int]:
    """Bytes of every layer's latents, in a local layer those of its window, and of the bases they are made from."""
    width = spec.joint_width
    full = replace(now, layers=tuple(replace(layer, vectors=(rank,)) for layer in now.layers))
    # a basis is `width` vectors of `rank` elements a layer, whatever the length
    basis = replace(full, layers=tuple(replace(layer, limit=None) for layer in full.layers))
    return full.total(n_tokens), basis.total(width)


def _finished(rows: Sequence[Row], n_tokens: int) -> list[Row]:
    """Adds the columns that depend on all rows, relief against the first and the Pareto front, and bytes a token."""

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
