"""What does cutting keys and values to a rank cost a model on a passage, and what rank do they have?"""

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvprobe.experiments.experiment import Experiment, SettingError, seed, setting
from kvprobe.progress import Progress, silent
from kvprobe.results.columns import Column, amount
from kvprobe.results.phrases import LOSS_COLUMNS, change_of, fitted_to, interval_of, passage_of
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject
    from kvprobe.text.passages import Passage
    from kvprobe.text.texts import Text

STAGES = ("post_rope", "pre_rope")


@dataclass(frozen=True, kw_only=True)
class Lowrank(Experiment):
    """What rank do a model's keys and values have, and what does truncating them cost in loss?

    All positions of all layers, local ones too, are truncated at once; each layer reads what the truncated ones
    before it give. The first row is the full pass; delta is the difference to it in nat per token, with its 95 %
    interval from a paired bootstrap over blocks of tokens. Bytes count the truncated matrices.

    \b
    Columns: energy             share of the squared norm of all tokens' K/V that is kept, mean over layers
             ratio              full over latent plus basis, at this length
             notional_ratio     width over rank, as if the basis were free
             break_even_tokens  from this length on latent plus basis are smaller than the full cache

    \b
    Examples:
      kvprobe lowrank smollm2-135m --rank 192 --rank 96 --rank 48 --plot lowrank.png
      kvprobe lowrank smollm2-135m --rank 96 --basis heldout     fitted to later tokens of the same text
      kvprobe lowrank smollm2-135m --rank 96 --basis heldout --fit-text manual     fitted to another text
      kvprobe lowrank smollm2-135m --spectrum                    keys before and after RoPE
      kvprobe lowrank smollm2-135m --rank 96 --allocate energy   more rank where there is more energy
    """

    name = "lowrank"
    short = "What does a low-rank latent for K and V cost in loss?"
    heading = "Loss by rank"
    caption = "Loss with keys and values cut to a rank in every layer at once, from each basis."
    columns = (
        Column("rank", "rank"),
        *LOSS_COLUMNS,
        Column("energy", "energy kept", ".1%"),
        Column("latent_bytes", "latent", amount),
        Column("basis_bytes", "its basis", amount),
        Column("ratio", "times smaller", ",.2f"),
        Column("notional_ratio", "if the basis were free", ",.2f"),
        Column("break_even_tokens", "smaller from (tokens)"),
    )
    spectrum_columns = ("numerical_rank", "effective_rank", "rank_90", "rank_99", "rank_99_9")

    ranks: tuple[int, ...] = setting(
        (),
        "Singular directions kept in every layer. Repeat for a curve.",
        kind=int,
        flag="--rank",
        shown="1/2, 1/4 and 1/8 of the width",
    )
    of: str = setting(
        "kv",
        "What is truncated in each layer: keys and values as one matrix, keys alone, or values alone.",
        choices=("kv", "k", "v"),
    )
    stage: str = setting(
        "post_rope", "Keys as attention reads them, or turned back to before position encoding.", choices=STAGES
    )
    basis: str = setting(
        "oracle",
        "What the basis is fitted to: the scored passage itself, its tokens before --score-from, or (untruncated) "
        "later tokens of the same text or those of --fit-text.",
        choices=("oracle", "prefix", "heldout"),
    )
    fit_text: "str | Text | None" = setting(
        None,
        "Another text to fit the heldout basis to: a file or a name, as for --text.",
        kind=str,
        loose=True,
        shown="later tokens of the same text",
    )
    center: bool = setting(False, "Subtract the mean of the fitted tokens first (it is stored as well).")
    score_from: int | None = setting(
        None, "The token after this one is the first target.", kind=int, shown="half of --tokens"
    )
    allocate: str = setting(
        "uniform",
        "energy: also distribute the same rank × layers over the layers by energy, at equal bytes.",
        choices=("uniform", "energy"),
    )
    seed: int = seed()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit_text is not None and self.basis != "heldout":
            raise SettingError("{fit_text} needs {basis} heldout, not {basis} {0}", self.basis)

    def measure(self, subject: "Subject", progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """The full pass, then a row a rank: loss, interval, energy and bytes (`kvprobe.probes.truncation.sweep`).

        ``fit_text``, a name or a text that was read, is for the basis ``heldout`` alone; without it, or where it begins
        as the passage does, that is fitted to later tokens of the same text, as many as the passage has and next to it.
        ``score_from`` defaults to half of the passage. Raises ValueError for what is out of range, KvprobeError for a
        text that is too short.
        """
        import torch

        from kvprobe.probes.truncation import sweep
        from kvprobe.text import passages
        from kvprobe.text.texts import read_text

        loaded, n_tokens, bos = subject.loaded, subject.passage.n_tokens, subject.passage.bos
        fit = None
        if self.basis == "heldout":
            text = self.fit_text
            if isinstance(text, str):
                text = read_text(text, n_bytes=passages.enough(n_tokens))
            fit = None if text is None else passages.encode(loaded.tokenizer, text, n_tokens=n_tokens, bos=bos)
            # the same text again, or a copy of it, would begin with the scored tokens
            if fit is None or fit.sha256 == subject.text.sha256 or torch.equal(fit.ids, subject.passage.ids):
                fit = passages.heldout(loaded.tokenizer, subject.text, n_tokens=n_tokens, bos=bos)
        score_from = n_tokens // 2 if self.score_from is None else self.score_from
        swept = sweep(
            subject.model,
            subject.input_ids[0],
            ranks=self.ranks,
            of=cast(Any, self.of),
            stage=cast(Any, self.stage),
            basis=cast(Any, self.basis),
            fit_ids=None if fit is None else fit.ids.to(loaded.device),
            center=self.center,
            allocation=cast(Any, self.allocate),
            score_from=score_from,
            seed=self.seed,
            progress=progress,
        )
        facts = {
            "ranks": [row["rank"] for row in swept.rows[1:] if row["allocate"] == "uniform"],
            "score_from": score_from,
            "n_targets": n_tokens - 1 - score_from,
            "n_fitted": swept.n_fitted,
            "fit_text": None if fit is None else _about(fit),
            "ranks_by_layer": swept.ranks_by_layer,
            "interval": interval_of(swept.block_length),
            "has_local_layers": any(window is not None for window in loaded.spec.windows),
        }
        return swept.rows, facts

    def settings(self) -> dict[str, Any]:
        """The settings as a record has them."""
        settings = super().settings()
        return settings | {"centered": settings.pop("center")}

    def spectrum(self, subject: "Subject", *, stages: tuple[str, ...] = STAGES, progress: Progress = silent) -> Result:
        """What rank each layer has, from one full pass: a row a stage, layer and rank; ``spectrum`` in the record.

        Of the settings ``ranks``, ``of``, ``center`` and ``seed`` count. For the fields and what is raised see
        :func:`kvprobe.probes.truncation.spectrum_rows`.
        """
        from kvprobe.probes.truncation import spectrum_rows

        started = time.perf_counter()
        progress("spectrum", 0, None)
        how: dict[str, Any] = {"ranks": self.ranks, "of": self.of, "center": self.center}
        rows = spectrum_rows(subject.model, subject.input_ids[0], stages=cast(Any, stages), **how)
        record = run_record(
            subject.record(),
            spectrum=True,
            ranks=[*self.ranks],
            of=self.of,
            stages=[*stages],
            centered=self.center,
            seed=self.seed,
            wall_s=round(time.perf_counter() - started, 3),
        )
        return Result("lowrank", rows, record)

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence; of a `spectrum` too."""
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
        said = f"{passage_of(run)}: with {what} at rank {best['rank']:,} of {best['width']:,} in every layer ({saw}) "
        said += f"the loss {change_of(best)}"
        return said if best is worst else f"{said}; at rank {worst['rank']:,} it {change_of(worst)}"

    @classmethod
    def table_columns(cls, result: Result) -> list[str]:
        """The fields that a table shows, of a `spectrum` too."""
        run, fields = result.run, super().table_columns(result)
        if run.get("spectrum"):
            return ["stage", "layer", *(("rank", "energy") if run["ranks"] else ("width",)), *cls.spectrum_columns]
        return [fields[0], "allocate", *fields[1:]] if run["allocate"] == "energy" else fields

    @classmethod
    def shown(cls, result: Result) -> Result:
        """Of a `spectrum` without ``ranks`` each layer once: its doubling ranks are for curves."""
        if not result.run.get("spectrum") or result.run["ranks"]:
            return result
        return Result(result.analysis, [row for row in result.rows if row["rank"] == 1], result.run)

    @classmethod
    def summary(cls, result: Result) -> list[str]:
        """The lines under the table."""
        run = result.run
        if run.get("spectrum"):
            centred = ", centred" if run["centered"] else ""
            return ["", f"{passage_of(run)}, {run['of']}{centred}: one full pass"]
        first = result.rows[0]
        fitted = (f"{fitted_to(run)}, " if run["fit_text"] else "") + f"{run['n_fitted']:,} tokens"
        lines = [
            "",
            f"{passage_of(run)}, {run['n_targets']:,} targets from {run['score_from'] + 1:,} on",
            f"{first['of']} {first['stage']}, width {first['width']:,}, {first['bytes_full']:,} bytes in full; "
            f"{first['basis']} basis{', centred' if first['centered'] else ''}, fitted on {fitted}: rank at most "
            f"{first['limit']:,}",
            f"interval: {run['interval']}",
        ]
        if run.get("has_local_layers"):
            lines.append("layers with their own window are truncated over the whole passage as well")
        return lines

    @classmethod
    def figure(cls, result: Result, **how: Any) -> "Figure":
        """Loss by rank, of several passages that of all together; of a `spectrum` the energy by rank."""
        from kvprobe.plots import lowrank

        if result.run.get("spectrum"):
            return lowrank.spectrum_figure(result.rows, result.run, **how)
        return lowrank.figure(pooled(result.rows), result.run, **how)


def pooled(rows: list[Row]) -> list[Row]:
    """Of several passages, only the rows of all passages together; other rows unchanged."""
    return [row for row in rows if row.get("passage") == "all"] or rows


def _about(fit: "Passage") -> dict[str, Any]:
    """What the record says of the text that a basis was fitted to."""
    about: dict[str, Any] = {"name": fit.name, "sha256": fit.sha256, "offset": fit.offset}
    return about if fit.cut is None else about | fit.cut.record()
