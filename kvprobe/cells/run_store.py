"""Which cells of the grid, head counts by seeds, are trained? Each finished cell is kept and not run again.

The models of the cells differ only in ``n_kv_heads``: pre-norm blocks with RMSNorm, RoPE (theta 10,000,
interleaved), SwiGLU of 8/3 the width, no biases, no dropout, and a head tied to the embedding.
"""

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvprobe.decoder.config import DecoderConfig, Rotary
from kvprobe.decoder.model import Decoder
from kvprobe.decoder.pool_kv_heads import pool_kv_heads
from kvprobe.errors import KvprobeError
from kvprobe.files.store import disk_error, try_lock
from kvprobe.files.whole import write_whole
from kvprobe.progress import Progress, silent
from kvprobe.results.phrases import counted
from kvprobe.results.record import run_record
from kvprobe.results.result import Row
from kvprobe.shape.cache_bytes import Bill, caches
from kvprobe.shape.parameters import attention_parameters
from kvprobe.text.corpus import Corpus
from kvprobe.training.checkpoint import Snapshot, fingerprint
from kvprobe.training.loop import TrainConfig, restore_weights, seeded, train, validate, weights_of

FORMAT = 1
UPTRAINED = ("loss_before", "loss_pooled", "uptrain_steps", "loss_after")
PATIENCE = 2.0  # seconds between looks at a cell that another process is training


def gpt_config(
    n_kv_heads: int, *, vocab: int, length: int = 128, n_layers: int = 6, n_heads: int = 8, width: int = 256
) -> DecoderConfig:
    """The published small GPT with ``n_kv_heads`` key/value heads; ValueError if they do not divide the heads."""
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(
            f"{n_heads} query heads cannot share {n_kv_heads} key/value heads evenly: it must be a divisor"
        )
    return DecoderConfig(
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=width // n_heads,
        hidden=width,
        mlp_width=8 * width // 3,
        vocab=vocab,
        max_positions=length,
        rotary=Rotary(theta=10_000.0, interleaved=True),
    )


def shape_row(config: DecoderConfig, dtype: str = "float32") -> Row:
    """``attention_params`` of one layer, without biases, and ``cache_bytes_per_token`` of all layers together."""
    parameters = attention_parameters(
        hidden_size=config.hidden, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, head_dim=config.head_dim
    )
    cache = Bill(caches(config.layers), dtype)
    return {"attention_params": parameters, "cache_bytes_per_token": cache.next_token(0)}


@dataclass(frozen=True)
class TrainingRun:
    """One cell, a model to train: shape, corpus and plan, whose seed draws the weights and orders the batches.

    With a multi-head ``parent`` the weights are not drawn: they are the parent's with its heads pooled, and the plan
    continues with the batches that the parent would have read next (uptraining; Ainslie et al., 2023).
    """

    config: DecoderConfig
    corpus: Corpus
    plan: TrainConfig
    parent: "TrainingRun | None" = None
    device: str = "cpu"

    @property
    def keeps_weights(self) -> bool:
        """Whether its weights are kept for uptraining: it is multi-head and trained from the start."""
        return self.parent is None and self.config.n_kv_heads == self.config.n_heads

    @property
    def identity(self) -> dict[str, Any]:
        """Every setting that could change a bit of the result, except those at their defaults.

        The number of threads, torch's version and the processor could too: they are in the cell's record.
        """
        settings = {"config": _set(self.config), "corpus": dict(self.corpus.record()), "plan": _set(self.plan)}
        identity = {"format": FORMAT, **settings, "seed": self.plan.seed}
        identity |= {} if self.parent is None else {"parent": self.parent.identity}
        return identity | ({} if self.device == "cpu" else {"device": self.device})

    @property
    def name(self) -> str:
        """A unique file name: the cell in words and a fingerprint of its identity."""
        kind = "" if self.parent is None else "-uptrained"
        return f"kv{self.config.n_kv_heads}-seed{self.plan.seed}{kind}-{fingerprint(self.identity)}"

    @property
    def words(self) -> str:
        """Its name in progress and records."""
        kind = "" if self.parent is None else ", uptrained"
        return f"{counted(self.config.n_kv_heads, 'KV head')}, seed {self.plan.seed}{kind}"

    def uptrained(self, n_kv_heads: int, *, steps: int) -> "TrainingRun":
        """The cell that pools this multi-head one's heads and trains on for ``steps``."""
        plan = replace(self.plan, steps=steps, skip=self.plan.skip + self.plan.steps)
        return replace(self, config=replace(self.config, n_kv_heads=n_kv_heads), plan=plan, parent=self)


@dataclass(frozen=True)
class RunStore:
    """The directory of finished cells, one small JSON file each, and of the snapshots of unfinished ones.

    The weights of a finished multi-head cell are kept too, so that it can be uptrained.
    """

    directory: Path

    def read(self, cell: TrainingRun) -> dict[str, Any] | None:
        """What is kept for ``cell``; None if it is not finished."""
        try:
            kept = json.loads(self._path(cell).read_text(encoding="utf-8"))
            # an edited file is trained again
            return kept if _is_complete(kept, cell) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def finish(self, cell: TrainingRun, *, progress: Progress = silent) -> dict[str, Any] | None:
        """Train ``cell``, or resume it after a kill, and keep it; None if another process is training it.

        Kept are ``identity``, the ``row`` of the result, the fields of the training's history and the ``run`` record.
        """
        with try_lock(self.directory / cell.name) as ours:
            if not ours:
                return None
            kept = self.read(cell) or self._finish(cell, progress)
            if not cell.keeps_weights:
                # also a snapshot that a kill left beside a finished cell; a file that is not ours stays
                with suppress(KvprobeError):
                    self._snapshot(cell).remove()
            return kept

    def weights(self, cell: TrainingRun) -> Decoder:
        """The decoder of a finished multi-head cell. Raises KvprobeError if its weights are no longer there."""
        kept = self._snapshot(cell).read()
        if kept is None:
            raise KvprobeError(
                f"the weights of {cell.words} are no longer in {self.directory}: remove {cell.name}.json there too, "
                "and the cell is trained again"
            )
        decoder = seeded(cell.config, seed=cell.plan.seed)
        try:
            restore_weights(decoder, kept[1])
        except ValueError:
            raise self._snapshot(cell).foreign() from None
        return decoder.to(cell.device)

    def _finish(self, cell: TrainingRun, progress: Progress) -> dict[str, Any]:
        row: Row = {"n_kv_heads": cell.config.n_kv_heads, "seed": cell.plan.seed}
        if cell.parent is None:
            decoder, before = seeded(cell.config, seed=cell.plan.seed).to(cell.device), {}
        else:
            parent = self.weights(cell.parent)
            decoder = pool_kv_heads(parent, cell.config.n_kv_heads)
            losses = [validate(model, cell.corpus, cell.plan) for model in (parent, decoder)]
            self._check_weights(cell.parent, losses[0])
            before = {"loss_before": losses[0], "loss_pooled": losses[1], "uptrain_steps": cell.plan.steps}
        snapshot = self._snapshot(cell)
        history = train(decoder, cell.corpus, cell.plan, snapshot=snapshot, progress=progress, what=cell.words)
        row |= {"best_val_loss": history.best.loss, **shape_row(cell.config), **before}
        row |= {} if cell.parent is None else {"loss_after": history.last.loss}
        run = run_record(threads=torch.get_num_threads(), device=cell.device)
        finished = {"identity": cell.identity, "row": row, **asdict(history), "run": run}
        text = json.dumps(finished, indent=1, allow_nan=False)
        try:
            write_whole(self._path(cell), text + "\n")
        except OSError as error:
            raise disk_error(error, self._path(cell)) from error
        if cell.keeps_weights:
            # without the optimizer's moments, which are twice as large
            snapshot.write(asdict(history), weights_of(decoder))
        # as the next reader has it
        return json.loads(text)

    def _check_weights(self, cell: TrainingRun, loss: float) -> None:
        """Raise KvprobeError if the kept weights' ``loss`` is not the one that the cell ended with."""
        kept = self.read(cell)
        # other thread counts and kernels round differently
        if kept is not None and not math.isclose(kept["validations"][-1][1], loss, rel_tol=1e-3):
            raise KvprobeError(
                f"the kept weights of {cell.words} have a loss of {loss:.3f}, but training ended at "
                f"{kept['validations'][-1][1]:.3f}: remove {cell.name}.json and .safetensors in {self.directory}, and "
                "the cell is trained again"
            )

    def _snapshot(self, cell: TrainingRun) -> Snapshot:
        return Snapshot(self.directory / f"{cell.name}.safetensors", cell.identity)

    def _path(self, cell: TrainingRun) -> Path:
        return self.directory / f"{cell.name}.json"


def _is_complete(kept: dict[str, Any], cell: TrainingRun) -> bool:
    """Whether ``kept`` is a complete result of ``cell``, as far as that can be told."""
    row, validations = kept["row"], kept["validations"]
    losses = [row["best_val_loss"], *(loss for name, loss in row.items() if name.startswith("loss_"))]
    expected = {"n_kv_heads": cell.config.n_kv_heads, "seed": cell.plan.seed, **shape_row(cell.config)}
    return (
        kept["identity"] == cell.identity
        and expected.items() <= row.items()
        and row.keys() == {*expected, "best_val_loss", *(() if cell.parent is None else UPTRAINED)}
        and validations[-1][0] == cell.plan.steps
        and row["best_val_loss"] == min(loss for _, loss in validations)
        and all(math.isfinite(loss) for loss in losses)
        and math.isfinite(kept["seconds"])
        and kept["resumed"] >= 0
        and {"threads", "cpu", "date", "versions"} <= kept["run"].keys()
    )


def finish_all(cells: Sequence[TrainingRun], store: RunStore, *, progress: Progress = silent) -> list[dict[str, Any]]:
    """Finish every cell, first those that no other process is training; cells of a dead process are resumed.

    Raises ValueError for a cell whose parent is not among them: nobody would train the parent.
    """
    names = {cell.name for cell in cells}
    if orphans := [cell.words for cell in cells if cell.parent is not None and cell.parent.name not in names]:
        raise ValueError(f"the multi-head cell from which {orphans[0]} continues is not among the cells")
    kept: dict[str, dict[str, Any]] = {}
    while True:
        for cell in cells:
            waits = cell.parent is not None and cell.parent.name not in kept
            if cell.name not in kept and not waits and (done := store.finish(cell, progress=progress)) is not None:
                kept[cell.name] = done
        if len(kept) == len(cells):
            return [kept[cell.name] for cell in cells]
        progress("waiting for another process's cells", len(kept), len(cells), "cells")
        time.sleep(PATIENCE)


def _set(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults, as JSON: a new field invalidates no kept cell."""
    given = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value != default:
            given[field.name] = _set(value) if is_dataclass(value) else value
    return json.loads(json.dumps(given))
