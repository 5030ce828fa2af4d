"""How fast could it be? The bytes and operations that a pass needs, and the ceiling that a machine sets for them.

The roofline of Williams, Waterman and Patterson (2009): a pass takes at least the time its bytes need at the memory's
rate, and at least the time its operations need at the rate of matrix products. Their ratio, the arithmetic intensity,
tells which is longer: below the machine's ridge point it is the bytes. No torch in here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from kvprobe.errors import Wording

if TYPE_CHECKING:
    from kvprobe.decoder.model import Decoder


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one pass needs; a multiply-add is two FLOPs.

    ``weight_bytes`` and ``cache_bytes`` (keys and values) are bytes moved between memory and processor;
    ``weight_flops`` are those of products with weight matrices, ``attention_flops`` those with keys and values.
    Activations, norms and the softmax are left out: they are thousandths at practical sizes.
    """

    weight_bytes: int
    cache_bytes: int
    weight_flops: int
    attention_flops: int

    @property
    def bytes_moved(self) -> int:
        """Weights, keys and values."""
        return self.weight_bytes + self.cache_bytes

    @property
    def flops(self) -> int:
        """Both kinds of products."""
        return self.weight_flops + self.attention_flops

    @property
    def intensity(self) -> float:
        """Arithmetic intensity of the whole pass, FLOPs a byte."""
        return self.flops / self.bytes_moved

    @property
    def attention_intensity(self) -> float:
        """The same for attention only. In decode it is 2 · (n_heads / n_kv_heads) / item size at every length."""
        return self.attention_flops / self.cache_bytes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What counts of a decoder. ``windows`` are its local windows, one a layer, the query included (None = global).

    Elements, not bytes: ``matrices`` of the blocks, that every token is multiplied with; ``head``, the matrix of the
    logits; ``vectors``, read with them (norms, biases); ``token``, the rows that a token looks up (embedding, unless
    that is the head, and learned position).
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    matrices: int
    head: int
    vectors: int
    token: int
    weight_itemsize: int = 4
    cache_itemsize: int = 4

    @classmethod
    def of(cls, decoder: "Decoder") -> "Shape":
        """The shape of a decoder, whose cache has its weights' dtype."""
        config = decoder.config
        of = dict(decoder.named_parameters())
        embedding, position = of.pop("embedding.weight"), of.pop("position.weight", None)
        head = of.pop("head.weight", embedding)
        return cls(
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            windows=config.windows or (None,) * config.n_layers,
            matrices=sum(parameter.numel() for parameter in of.values() if parameter.ndim == 2),
            head=head.numel(),
            vectors=sum(parameter.numel() for parameter in of.values() if parameter.ndim == 1),
            token=config.hidden * ((head is not embedding) + (position is not None)),
            weight_itemsize=embedding.element_size(),
            cache_itemsize=embedding.element_size(),
        )

    def decode(self, context: int, *, batch: int = 1) -> Work:
        """One decode step that attends to ``context`` tokens of each of ``batch`` rows, the new one included.

        Weights are read once for the whole batch, the head among them; of the cache the filled part, in a local layer
        no more than its window.
        """
        _check(context, batch)
        seen = sum(min(context, window or context) for window in self.windows)
        return Work(
            weight_bytes=self._weight_bytes(batch),
            cache_bytes=batch * seen * self._kv_bytes,
            weight_flops=2 * batch * (self.matrices + self.head),
            attention_flops=self.attend(seen, batch),
        )

    def prefill(self, n_tokens: int, *, batch: int = 1, all_logits: bool = False) -> Work:
        """One pass over ``n_tokens`` of each of ``batch`` rows: a prefill, or a naive step at that context.

        Weights move once, and so do the keys and values that are made. Logits are of the last token, or of each with
        ``all_logits``. A query attends to itself and what is before it, in a local layer to its window.
        """
        _check(n_tokens, batch)
        kept = sum(min(n_tokens, window or n_tokens) for window in self.windows)
        pairs = sum(_pairs(n_tokens, min(n_tokens, window or n_tokens)) for window in self.windows)
        n_logits = n_tokens if all_logits else 1
        return Work(
            weight_bytes=self._weight_bytes(batch * n_tokens),
            cache_bytes=batch * kept * self._kv_bytes,
            weight_flops=2 * batch * (n_tokens * self.matrices + n_logits * self.head),
            attention_flops=batch * pairs * self._pair_flops,
        )

    def attend(self, n_keys: int, batch: int = 1) -> int:
        """FLOPs of one query a row with ``n_keys`` keys, those of all layers together."""
        return batch * n_keys * self._pair_flops

    def _weight_bytes(self, n_tokens: int) -> int:
        return (self.matrices + self.head + self.vectors + n_tokens * self.token) * self.weight_itemsize

    @property
    def _kv_bytes(self) -> int:
        # key and value of one token in one layer
        return 2 * self.n_kv_heads * self.head_dim * self.cache_itemsize

    @property
    def _pair_flops(self) -> int:
        # one query with one key, all heads: a multiply-add an element for the score, another for the value
        return 4 * self.n_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """A machine's best rates: ``bandwidth`` in bytes/s read from memory, ``matrix_rate`` in FLOP/s."""

    bandwidth: float
    matrix_rate: float

    @property
    def ridge_point(self) -> float:
        """The arithmetic intensity, FLOPs a byte, from which arithmetic takes longer than the bytes."""
        return self.matrix_rate / self.bandwidth

    def seconds(self, work: Work) -> float:
        """The least time that ``work`` can take."""
        return max(work.bytes_moved / self.bandwidth, work.flops / self.matrix_rate)

    def bound(self, work: Work) -> Literal["bandwidth", "arithmetic"]:
        """Which of the two takes longer."""
        return "bandwidth" if work.intensity < self.ridge_point else "arithmetic"

    def binding_batch(self, shape: Shape, context: int) -> int | None:
        """The first batch whose decode step at ``context`` is bound by arithmetic; None if the cache prevents that.

        The rows of a batch share the weights but not the cache, so the intensity rises with the batch to a limit.
        """
        single = shape.decode(context)
        more = shape.decode(context, batch=2).bytes_moved - single.bytes_moved
        # a step of b rows moves shared + b · more bytes and does b · single.flops
        shared = single.bytes_moved - more
        margin = single.flops / self.ridge_point - more
        if margin <= 0:
            return None
        batch = max(1, int(shared / margin))
        while self.bound(shape.decode(context, batch=batch)) == "bandwidth":
            batch += 1
        return batch


def total(works: Iterable[Work]) -> Work:
    """The work of several passes together."""
    every = [vars(work) for work in works]
    return Work(**{field.name: sum(work[field.name] for work in every) for field in fields(Work)})


def _pairs(n_tokens: int, window: int) -> int:
    """Pairs of a query and a key that it sees: 1 + 2 + … + window, then ``window`` for each later query."""
    return window * (window + 1) // 2 + (n_tokens - window) * window


def _check(n_tokens: int, batch: int) -> None:
    if n_tokens < 1:
        raise ValueError(Wording("{context} must be at least 1 token, got {0}", n_tokens))
    if batch < 1:
        raise ValueError(Wording("{batch} must be at least 1, got {0}", batch))
