"""What rank do a layer's keys and values have, which bases cut them to a smaller one, and what would that store?

One matrix a layer: ``[length, width]``, a row a token, the heads side by side, keys before values. What this costs a
model in loss is measured by :mod:`kvprobe.probes.truncation`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.language_model import language_model
from kvprobe.errors import Wording

if TYPE_CHECKING:
    from kvprobe.attention.rope import Rope

Of = Literal["kv", "k", "v"]
Stage = Literal["post_rope", "pre_rope"]


@dataclass(frozen=True)
class View:
    """Which part of a layer's keys and values is the matrix: ``of`` joint, keys or values; at which ``stage``.

    ``pre_rope`` is the realized key turned back by its position, the same as ``post_rope`` where ``ropes`` is empty
    (a model without RoPE). Where only the last components of a head are turned (multi-head latent attention: one
    rotary part beside the latent), ``pre_rope`` leaves them out and never changes them.
    """

    of: Of = "kv"
    stage: Stage = "post_rope"
    ropes: "Mapping[int, Rope]" = field(default_factory=dict, repr=False)

    @classmethod
    def on(cls, model: Any, of: Of = "kv", stage: Stage = "post_rope") -> "View":
        """The view of ``model``, its rotation read off where the stage needs it.

        Raises ValueError for an unknown ``of`` or ``stage`` and UnsupportedModelError, naming the family, where keys
        cannot be turned back.
        """
        one_of("of", of, Of)
        one_of("stage", stage, Stage)
        if stage == "post_rope":
            return cls(of, stage)
        subject = language_model(model)
        ropes = {layer: subject.rope(layer) for layer in subject.layers()}
        return cls(of, stage, {layer: rope for layer, rope in ropes.items() if rope is not None})

    def matrix(self, call: AttentionCall) -> Tensor:
        """The matrix of one call: ``[batch, length, width]`` in the model's dtype."""
        parts = []
        if self.of != "v":
            parts.append(self._turned(call.layer, call.key, -1)[..., : self._start(call.layer)])
        if self.of != "k":
            parts.append(call.value)
        return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1)

    def keys_values(self, call: AttentionCall, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The key and value of ``call`` with ``matrix`` in place of what :meth:`matrix` took out."""
        matrix = matrix.to(call.key.dtype)
        heads = call.n_kv_heads
        key, value = call.key, call.value
        value_width = 0 if self.of == "k" else heads * value.shape[-1]
        if self.of != "k":
            value = matrix[..., matrix.shape[-1] - value_width :].unflatten(-1, (heads, -1)).transpose(1, 2)
        if self.of != "v":
            key = matrix[..., : matrix.shape[-1] - value_width].unflatten(-1, (heads, -1)).transpose(1, 2)
            rest = call.key[..., key.shape[-1] :]
            key = torch.cat([key, rest], dim=-1) if rest.shape[-1] else self._turned(call.layer, key, 1)
        return key, value

    def _start(self, layer: int) -> int | None:
        return (self.ropes[layer].start or None) if self.ropes else None

    def _turned(self, layer: int, key: Tensor, sign: int) -> Tensor:
        if not self.ropes or self.ropes[layer].start:
            return key
        return self.ropes[layer].turn(key, sign * torch.arange(key.shape[2], device=key.device))


@dataclass(frozen=True, eq=False)
class Basis:
    """Right singular vectors ``vectors`` ``[batch, width, n]`` of a fitted matrix, greatest singular value first.

    There are as many as the matrix really has: its numerical rank, which can be less than its limit, and a greater
    rank than that projects on these. ``squares`` float64 ``[batch, limit]`` are the squared singular values; ``mean``
    ``[batch, 1, width]`` was taken out before, if the fit was centred.
    """

    vectors: Tensor
    squares: Tensor
    mean: Tensor | None = None

    def project(self, matrix: Tensor, rank: int) -> Tensor:
        """``matrix`` ``[batch, length, width]`` on the first ``rank`` vectors, as float32: a latent and back."""
        rows = matrix.float() if self.mean is None else matrix.float() - self.mean
        vectors = self.vectors[..., :rank].to(rows)
        # two thin products; the width × width projector is never made
        back = (rows @ vectors) @ vectors.mT
        return back if self.mean is None else back + self.mean


def fit(matrix: Tensor, *, center: bool = False) -> Basis:
    """The basis of ``matrix`` ``[batch, length, width]``: its right singular vectors, as many as it can have."""
    rows, mean = _centered(matrix, center)
    squares, vectors = _eigen(rows)
    if rows.shape[-2] < rows.shape[-1]:
        # eigenvectors of the small Gram matrix are the left ones; QR, unlike a division by the singular values,
        # also makes the directions orthonormal whose singular value is lost in rounding
        vectors = torch.linalg.qr(rows.double().mT @ vectors.to(rows.device)).Q
    keep = limit_of(*rows.shape[-2:], center=center)
    squares = squares[..., :keep]
    # a direction whose singular value is lost in float32's rounding is arbitrary, and would carry noise, not what
    # was fitted: fewer different tokens than the rank leave such directions
    real = numerical_rank(squares, max(rows.shape[-2:]), torch.finfo(torch.float32).eps)
    return Basis(vectors[..., : max(1, real)].to(rows), squares, mean)


def truncate(matrix: Tensor, rank: int, *, center: bool = False, vectors: Tensor | None = None) -> Tensor:
    """The best approximation of ``matrix`` ``[batch, length, width]`` of that rank (Eckart and Young, 1936), float32.

    The same as ``fit(matrix).project(matrix, rank)``, but a matrix of fewer rows than columns is projected from the
    left, which needs no right vectors. ``vectors`` are those of :func:`gram_vectors` where they are known already.
    Raises ValueError for a rank outside 1 to :func:`limit_of`.
    """
    rows, mean = _centered(matrix, center)
    check_rank(rank, *rows.shape[-2:], center=center)
    vectors = (gram_vectors(matrix, center=center) if vectors is None else vectors)[..., :rank]
    left = rows.shape[-2] < rows.shape[-1]
    back = vectors @ (vectors.mT @ rows) if left else (rows @ vectors) @ vectors.mT
    return back if mean is None else back + mean


def gram_vectors(matrix: Tensor, *, center: bool = False) -> Tensor:
    """Singular vectors of the shorter side of ``matrix``, greatest singular value first, as float32 columns."""
    rows, _ = _centered(matrix, center)
    return _eigen(rows)[1].to(rows)


def singular_squares(matrix: Tensor, *, center: bool = False) -> Tensor:
    """Squared singular values of ``matrix`` ``[batch, length, width]``, greatest first: float64 ``[batch, limit]``."""
    rows, _ = _centered(matrix, center)
    squares = torch.linalg.eigvalsh(_gram(rows)).flip(-1).clamp(min=0)
    return squares[..., : limit_of(*rows.shape[-2:], center=center)]


def limit_of(n_fitted: int, width: int, *, center: bool = False) -> int:
    """The greatest rank that a matrix of ``n_fitted`` rows can have; centring takes one row's freedom away."""
    return min(n_fitted - center, width)


def energy_kept(matrix: Tensor, truncated: Tensor, *, center: bool = False) -> float:
    """Share of the squared norm that a truncation keeps: 1 − |X − X̂|² / |X|², around the mean if centred."""
    rows, _ = _centered(matrix, center)
    lost = (matrix.float() - truncated).square().sum(dtype=torch.float64)
    total = rows.square().sum(dtype=torch.float64)
    return float(1 - lost / total) if total > 0 else 1.0


@dataclass(frozen=True)
class Storage:
    """Bytes of one sequence's truncated matrices, all layers; ``basis_bytes`` counts the mean of a centred fit.

    ``break_even_tokens`` is the first length at which latent and basis together are smaller than the full cache,
    None if no length is. ``ratio`` is the honest one, full over latent plus basis at this length; ``notional_ratio``
    is width over rank, which leaves the basis out.
    """

    bytes_full: int
    latent_bytes: int
    basis_bytes: int
    break_even_tokens: int | None
    ratio: float
    notional_ratio: float


def storage(
    ranks: Mapping[int, int], widths: Mapping[int, int], n_tokens: int, *, center: bool = False, element_bytes: int = 4
) -> Storage:
    """What layers of ``widths`` cost at ``ranks`` and ``n_tokens``: rank × (tokens + width) elements each."""
    full = sum(widths.values())
    latent = sum(ranks[layer] for layer in widths)
    basis = sum((ranks[layer] + center) * width for layer, width in widths.items())
    return Storage(
        bytes_full=full * n_tokens * element_bytes,
        latent_bytes=latent * n_tokens * element_bytes,
        basis_bytes=basis * element_bytes,
        break_even_tokens=basis // (full - latent) + 1 if latent < full else None,
        ratio=full * n_tokens / (latent * n_tokens + basis),
        notional_ratio=full / latent,
    )


def allocate(squares: Mapping[int, Tensor], total: int) -> dict[int, int]:
    """Ranks by layer that add up to ``total`` and keep the most energy over all layers, one each at least.

    ``squares[layer]`` are squared singular values, greatest first: taking the greatest of all layers together is
    the optimum of the sum. Raises ValueError for a total outside one a layer to all there are.
    """
    most = sum(len(values) for values in squares.values())
    if not len(squares) <= total <= most:
        raise ValueError(f"total rank must be between {len(squares)} and {most}, got {total}")
    ranks = dict.fromkeys(squares, 1)
    layers = [layer for layer, values in squares.items() for _ in values[1:]]
    rest = torch.cat([values[1:].double().cpu() for values in squares.values()])
    # stable: within a layer the order of equal values stays
    for index in rest.argsort(descending=True, stable=True)[: total - len(squares)].tolist():
        ranks[layers[index]] += 1
    return ranks


def effective_rank(squares: Tensor) -> float:
    """Roy and Vetterli's (2007): exp of the entropy of the singular values' shares, from their squares; 0 of zeros."""
    values = squares.double().clamp(min=0).sqrt()
    if not values.any():
        return 0.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())


def energy_by_rank(squares: Tensor) -> Tensor:
    """Share of the energy that each rank from 1 on keeps, float64 like ``squares``; all of it where there is none."""
    total = squares.double().sum()
    return squares.double().cumsum(-1) / total if total > 0 else torch.ones_like(squares, dtype=torch.float64)


def rank_for(squares: Tensor, share: float) -> int:
    """The least rank that keeps ``share`` of the energy."""
    return min(int((energy_by_rank(squares) < share).sum()) + 1, len(squares))


def numerical_rank(squares: Tensor, longest: int, eps: float) -> int:
    """Singular values above the greatest × ``longest`` side × ``eps`` of the dtype, as numpy's ``matrix_rank``.

    ``squares`` ``[..., limit]``; of several matrices the greatest rank.
    """
    size = squares.double().clamp(min=0).sqrt()
    return int((size > size.amax(-1, keepdim=True) * longest * eps).sum(-1).max())


def check_rank(rank: int, n_fitted: int, width: int, *, center: bool = False) -> None:
    """Raise ValueError for a rank outside 1 to :func:`limit_of`."""
    limit = limit_of(n_fitted, width, center=center)
    if not 1 <= rank <= limit:
        fitted = f"{n_fitted} tokens fitted{', centred' if center else ''}, width {width}"
        raise ValueError(Wording("{rank} must be between 1 and {0} ({1}), got {2}", limit, fitted, rank))


def one_of(what: str, word: str, words: Any) -> None:
    """Raise ValueError if ``word`` is none of the ``words`` of a Literal."""
    if word not in get_args(words):
        raise ValueError(f"{what} must be one of {', '.join(get_args(words))}, got {word!r}")


def _centered(matrix: Tensor, center: bool) -> tuple[Tensor, Tensor | None]:
    rows = matrix.float()
    if not center:
        return rows, None
    mean = rows.mean(dim=-2, keepdim=True)
    return rows - mean, mean


def _gram(rows: Tensor) -> Tensor:
    # float64: the tail of a squared float32 spectrum is below its own rounding. On the CPU where the device has none
    double = (rows.cpu() if rows.device.type == "mps" else rows).double()
    return double @ double.mT if rows.shape[-2] < rows.shape[-1] else double.mT @ double


def _eigen(rows: Tensor) -> tuple[Tensor, Tensor]:
    # of the smaller Gram matrix: several times faster than an SVD of the matrix, and without gesdd's outliers
    squares, vectors = torch.linalg.eigh(_gram(rows))
    return squares.flip(-1).clamp(min=0), vectors.flip(-1)
