"""What does it cost a model in loss to read keys and values of a smaller rank, and how much rank do they have?

Truncation is on-line: all layers at once, so each sees keys and values already made under truncation. All positions
are truncated, in local (sliding-window) layers too; only the targets after ``score_from`` are scored.

Three bases. ``oracle`` is fitted to the scored sequence itself, its future included, and ``prefix`` to its tokens
before ``score_from`` alone, both anew under every rank, to keys and values already made under truncation; ``heldout``
is fitted to what is not scored (later tokens of the same text, or another text), in one clean (untruncated) pass that
all ranks share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvprobe.attention.call import Attend, AttentionCall
from kvprobe.attention.language_model import observe
from kvprobe.errors import KvprobeError, Wording
from kvprobe.probes.intervals import default_block_length
from kvprobe.probes.losses import check_score_from, loss_fields, token_losses
from kvprobe.probes.lowrank import (
    Basis,
    Of,
    Stage,
    Storage,
    View,
    allocate,
    check_rank,
    effective_rank,
    energy_by_rank,
    energy_kept,
    fit,
    gram_vectors,
    limit_of,
    numerical_rank,
    one_of,
    rank_for,
    singular_squares,
    storage,
    truncate,
)
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Row

BasisKind = Literal["oracle", "prefix", "heldout"]
Allocation = Literal["uniform", "energy"]


def truncating(
    view: View,
    ranks: Mapping[int, int],
    bases: Mapping[int, Basis] | None = None,
    *,
    n_prefix: int | None = None,
    center: bool = False,
    energy: dict[int, float] | None = None,
    known: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> Attend:
    """Attention that reads keys and values cut to ``ranks[layer]``, for ``attending(model, ...)``.

    ``bases`` are those of :func:`fit_layers`; without them each layer's basis is fitted to the very matrix that it
    cuts: to its first ``n_prefix`` tokens, or to all of it, the oracle. ``energy`` is filled with the share that each
    layer keeps. ``known``, given to several such passes over the same tokens, saves the first layer's
    decomposition, which no truncation before it can change.
    """

    def own(call: AttentionCall, matrix: Tensor) -> Tensor:
        if n_prefix is not None:
            # causal attention: these rows are what they would be without the tokens after them
            return fit(matrix[:, :n_prefix], center=center).project(matrix, ranks[call.layer])
        vectors = None
        if known is not None and (not known or call.layer in known):
            if not known or not torch.equal(known[call.layer][0], matrix):
                known[call.layer] = matrix, gram_vectors(matrix, center=center)
            vectors = known[call.layer][1]
        return truncate(matrix, ranks[call.layer], center=center, vectors=vectors)

    def attend(call: AttentionCall) -> Tensor:
        matrix = _finite_matrix(view, call)
        cut = own(call, matrix) if bases is None else bases[call.layer].project(matrix, ranks[call.layer])
        if energy is not None:
            energy[call.layer] = energy_kept(matrix, cut, center=center)
        key, value = view.keys_values(call, cut)
        return call.attend(key=key, value=value)

    return attend


@torch.no_grad()
def fit_layers(model: Any, input_ids: Tensor, view: View, *, center: bool = False) -> dict[int, Basis]:
    """The basis of every layer, from one clean pass over ``input_ids`` ``[1, length]``; no keys are kept."""
    return observe(model, input_ids, lambda call: fit(_finite_matrix(view, call), center=center))


@torch.no_grad()
def spectra(
    model: Any, input_ids: Tensor, views: Mapping[Stage, View], *, center: bool = False
) -> dict[Stage, dict[int, Tensor]]:
    """Squared singular values, greatest first, of every layer in each of ``views``, from one clean pass.

    Returns ``{stage: {layer: float64 [limit]}}``; ``input_ids`` is ``[1, length]``.
    """
    found = observe(
        model,
        input_ids,
        lambda call: {
            name: singular_squares(_finite_matrix(view, call), center=center)[0] for name, view in views.items()
        },
    )
    return {name: {layer: squares[name] for layer, squares in found.items()} for name in views}


@dataclass(frozen=True)
class Sweep:
    """Rows of one sweep, the untruncated pass first, and what a run record says beside them.

    ``n_fitted`` are the tokens that the basis saw, ``block_length`` the interval's. ``ranks_by_layer`` has, for each
    rank allocated by energy, the ranks in order of the layers. ``losses`` are those of each row's targets, float64.
    """

    rows: list[Row]
    losses: list[Tensor]
    n_fitted: int
    block_length: int
    ranks_by_layer: dict[int, list[int]]


def sweep(
    model: Any,
    input_ids: Tensor,
    *,
    ranks: Sequence[int] = (),
    of: Of = "kv",
    stage: Stage = "post_rope",
    basis: BasisKind = "oracle",
    fit_ids: Tensor | None = None,
    center: bool = False,
    allocation: Allocation = "uniform",
    score_from: int = 512,
    seed: int = 0,
    progress: Progress = silent,
) -> Sweep:
    """Loss of ``input_ids`` ``[length]`` untruncated and at each of ``ranks``, with intervals, energy and bytes.

    ``ranks`` left empty are a half, a quarter and an eighth of the width. ``fit_ids`` ``[n_fitted]`` are the tokens of
    the basis ``heldout``, none of them scored. The allocation ``energy`` adds, after each rank for all layers, a row
    that spends rank × layers over the layers by the energy of the clean pass over what was fitted. A row's ``energy``
    is the mean over layers of what the truncated pass kept; its bytes are of the matrices that were cut, so ``of="k"``
    leaves the values out. Everything that can be refused is refused before the first long pass: ValueError for ranks,
    ``score_from`` and words, UnsupportedModelError where keys cannot be turned back.
    """
    ids = input_ids if input_ids.ndim == 2 else input_ids[None]
    n_tokens = ids.shape[1]
    check_score_from(n_tokens, score_from)
    one_of("allocate", allocation, Allocation)
    fitted = tokens_fitted(ids, basis=basis, score_from=score_from, fit_ids=fit_ids)
    view = View.on(model, of, stage)
    widths = _widths(model, ids, view)
    width = min(widths.values())
    limit = limit_of(fitted.shape[1], width, center=center)
    ranks = ranks or [max(1, min(limit, width // part)) for part in (2, 4, 8)]
    for rank in ranks:
        check_rank(rank, fitted.shape[1], width, center=center)

    bases = None
    if basis == "heldout":
        progress("fitting the heldout basis", 0, None)
        bases = fit_layers(model, fitted, view, center=center)
    jobs: list[tuple[int, Allocation, dict[int, int]]] = []
    squares = {} if bases is None else {layer: found.squares[0] for layer, found in bases.items()}
    if allocation == "energy" and not squares:
        squares = spectra(model, fitted, {stage: view}, center=center)[stage]
    for rank in dict.fromkeys(ranks):
        jobs.append((rank, "uniform", dict.fromkeys(widths, rank)))
        if allocation == "energy":
            jobs.append((rank, "energy", allocate(squares, rank * len(widths))))

    element_bytes = next(model.parameters()).element_size()
    reference = token_losses(model, ids, score_from=score_from)
    full = storage(widths, widths, n_tokens, element_bytes=element_bytes).bytes_full
    untruncated = Storage(full, full, 0, None, 1.0, 1.0)
    setting = {"of": of, "stage": stage, "basis": basis, "centered": center}

    def row(rank: int | None, losses: Tensor, energy: float, held: Storage, how: Allocation) -> Row:
        return {
            "rank": rank,
            "width": width,
            "limit": limit,
            **loss_fields(losses, reference, seed=seed),
            "energy": energy,
            **asdict(held),
            **setting,
            "allocate": how,
        }

    rows = [row(None, reference, 1.0, untruncated, "uniform")]
    all_losses = [reference]
    known: dict[int, tuple[Tensor, Tensor]] = {}
    for rank, how, by_layer in jobs:
        progress("low rank", len(rows), 1 + len(jobs), "passes")
        kept: dict[int, float] = {}
        attend = truncating(
            view,
            by_layer,
            bases,
            n_prefix=score_from if basis == "prefix" else None,
            center=center,
            energy=kept,
            known=known,
        )
        losses = token_losses(model, ids, score_from=score_from, attend=attend)
        all_losses.append(losses)
        held = storage(by_layer, widths, n_tokens, center=center, element_bytes=element_bytes)
        rows.append(row(rank, losses, sum(kept.values()) / len(kept), held, how))
    progress("low rank", len(rows), 1 + len(jobs), "passes")
    return Sweep(
        rows=rows,
        losses=all_losses,
        n_fitted=fitted.shape[1],
        block_length=default_block_length(len(reference)),
        ranks_by_layer={rank: [*by_layer.values()] for rank, how, by_layer in jobs if how == "energy"},
    )


def spectrum_rows(
    model: Any,
    input_ids: Tensor,
    *,
    ranks: Sequence[int] = (),
    of: Of = "kv",
    stages: Sequence[Stage] = ("post_rope", "pre_rope"),
    center: bool = False,
) -> list[Row]:
    """What rank the matrices of ``input_ids`` ``[length]`` have, from one clean pass: a row a stage, layer and rank.

    ``energy`` is what the best approximation of that ``rank`` keeps (``ranks`` default to 1, 2, 4, … up to the
    limit). Beside it stand, the same in all rows of a layer: ``effective_rank`` (Roy and Vetterli), ``rank_90``,
    ``rank_99`` and ``rank_99_9`` (the least rank that keeps so many per cent of the energy) and ``numerical_rank``
    (singular values above rounding). Raises as :func:`sweep`.
    """
    ids = input_ids if input_ids.ndim == 2 else input_ids[None]
    views = {stage: View.on(model, of, stage) for stage in stages}
    widths = {stage: _widths(model, ids, view) for stage, view in views.items()}
    for rank in ranks:
        check_rank(rank, ids.shape[1], min(min(by_layer.values()) for by_layer in widths.values()), center=center)
    eps = torch.finfo(next(model.parameters()).dtype).eps
    rows = []
    for stage, by_layer in spectra(model, ids, views, center=center).items():
        for layer, squares in by_layer.items():
            width, limit = widths[stage][layer], len(squares)
            kept = energy_by_rank(squares).tolist()
            of_layer = {
                "width": width,
                "limit": limit,
                "effective_rank": effective_rank(squares),
                "rank_90": rank_for(squares, 0.9),
                "rank_99": rank_for(squares, 0.99),
                "rank_99_9": rank_for(squares, 0.999),
                "numerical_rank": numerical_rank(squares, max(ids.shape[1], width), eps),
                "of": of,
                "centered": center,
            }
            # the doublings below the limit, and the limit itself
            for rank in ranks or [*(2**i for i in range((limit - 1).bit_length())), limit]:
                rows.append({"stage": stage, "layer": layer, "rank": rank, "energy": kept[rank - 1], **of_layer})
    return rows


def tokens_fitted(ids: Tensor, *, basis: BasisKind, score_from: int, fit_ids: Tensor | None = None) -> Tensor:
    """The tokens ``[1, n_fitted]`` that a basis may see when ``ids`` ``[1, length]`` is scored after ``score_from``.

    Raises ValueError where there are none: ``prefix`` with fewer than two tokens before the scored part, ``heldout``
    without ``fit_ids``.
    """
    one_of("basis", basis, BasisKind)
    if (fit_ids is not None) != (basis == "heldout"):
        raise ValueError(f"a text to fit on and the basis heldout belong together, got basis {basis}")
    if fit_ids is not None:
        return fit_ids if fit_ids.ndim == 2 else fit_ids[None]
    if basis == "oracle":
        return ids
    if score_from < 2:
        raise ValueError(Wording("{basis} prefix needs {score_from} to be at least 2, got {0}", score_from))
    return ids[:, :score_from]


def _widths(model: Any, ids: Tensor, view: View) -> dict[int, int]:
    # two tokens show every layer's width before any long pass
    return observe(model, ids[:, :2], lambda call: view.matrix(call).shape[-1])


def _finite_matrix(view: View, call: AttentionCall) -> Tensor:
    matrix = view.matrix(call)
    if not bool(matrix.isfinite().all()):
        name = str(matrix.dtype).removeprefix("torch.")
        raise KvprobeError(
            Wording("keys or values of layer {0} are not finite at {1}; try {dtype} float32", call.layer, name)
        )
    return matrix
