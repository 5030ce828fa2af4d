"""What does one attention layer read and return? The call that every experiment sees, on any model or decoder.

Shapes: query ``[batch, n_heads, q_len, head_dim]``, key ``[batch, n_kv_heads, kv_len, head_dim]``, value
``[batch, n_kv_heads, kv_len, v_head_dim]``. Query head h reads key/value head ``h // (n_heads // n_kv_heads)``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprobe.attention.masks import additive, causal_keep

# float32 scores of one block of queries, in elements: 64 MiB, small beside the weights of any model worth probing
BLOCK_ELEMENTS = 1 << 24

Turn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention layer at work, with everything that the model itself would use.

    ``layer``: its index, as the model numbers its layers.
    ``query``: ``[batch, n_heads, q_len, head_dim]``, the last ``q_len`` of ``kv_len`` positions.
    ``key``, ``value``: ``[batch, n_kv_heads, kv_len, head_dim]`` and ``[…, v_head_dim]``, *realized*: after position
    encoding and QK-norm, as attention reads them.
    ``scale`` multiplies the scores; ``softcap`` bounds them (``softcap * tanh(score / softcap)``, Gemma 2).
    ``sink_logits``: ``[n_heads]``, learned logits that take part in the softmax and carry no value (gpt-oss).
    ``mask``: the model's own, or None for "causal, or one query that sees all"; read it as :attr:`keep`.
    ``turn(x, by)``: the layer's RoPE, or None; use it through :meth:`rotate`.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    turn: Turn | None = field(default=None, repr=False)

    @property
    def n_heads(self) -> int:
        """Query heads of this layer."""
        return self.query.shape[1]

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads of this layer; each serves ``n_heads // n_kv_heads`` query heads."""
        return self.key.shape[1]

    @property
    def is_causal(self) -> bool:
        """True if this is a plain causal call that needs no mask: as many queries as keys, each seeing up to itself."""
        return self.mask is None and self.query.shape[2] == self.key.shape[2] > 1

    @cached_property
    def keep(self) -> Tensor:
        """Bool ``[batch or 1, 1 or n_heads, q_len, kv_len]``: what the model itself lets each query see.

        Made on first use: a plain causal call that nobody looks at keeps the kernel without a mask.
        """
        if self.mask is not None:
            return self.mask
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        return causal_keep(q_len, kv_len, device=self.query.device)[None, None]

    def last(self, n: int) -> Tensor:
        """The last ``n`` keys that each query may see, its own included: bool, shaped as :attr:`keep`.

        Raises ValueError if ``n < 0``.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0 keys, got {n}")
        # how many visible keys there are from here on, whatever padding or window hides others
        return self.keep & (self.keep.flip(-1).cumsum(-1).flip(-1) <= n)

    def top(self, n: int, values: Tensor, *, among: Tensor | None = None) -> Tensor:
        """The ``n`` keys of the greatest ``values`` among those that each query may see, all of them if fewer.

        ``values`` are of keys, ``[batch, n_kv_heads, kv_len]``, or of each query's keys, ``[batch, n_heads, q_len,
        kv_len]``; negate them for the smallest. ``among`` is bool, as :attr:`keep`, its default. Returns bool
        ``[batch, n_heads, q_len, kv_len]`` for :meth:`attend`. Raises ValueError for ``n < 0`` or other shapes.
        """
        among = self.keep if among is None else among
        wanted = (*self.query.shape[:3], self.key.shape[2])
        if values.shape == self.key.shape[:3]:
            values = values.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)[:, :, None].expand(wanted)
        if n < 0 or values.shape != wanted:
            raise ValueError(
                f"n must be at least 0 and values {[*self.key.shape[:3]]} or {[*wanted]}, got {n}, {[*values.shape]}"
            )
        best = values.masked_fill(~among, -torch.inf).topk(min(n, wanted[-1]), dim=-1).indices
        return torch.zeros(wanted, dtype=torch.bool, device=values.device).scatter_(-1, best, True) & among

    def attend(
        self,
        *,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """The model's own attention with what is replaced: ``[batch, n_heads, q_len, v_head_dim]``.

        A replaced ``keep`` stands alone: combine it with :attr:`keep` to stay causal. Replaced keys must be as
        many as :attr:`keep` has columns.
        """
        return self.replaced(query=query, key=key, value=value, keep=keep)._output(with_lse=False)[0]

    def attend_with_lse(self) -> tuple[Tensor, Tensor]:
        """Attention and, from the same kernel run, the log-sum-exp of every query's scores.

        Returns the output ``[batch, n_heads, q_len, v_head_dim]`` and ``lse`` float32 ``[batch, n_heads, q_len]``;
        ``exp(score - lse)`` is a weight. Learned sink logits are in the sum (Xiao et al., 2024; gpt-oss), so
        weights of real keys then add up to less than one. Where a query may see nothing (padding) and there is no
        sink logit, ``lse`` is 0, so that the weights are 0 and not 0/0.
        """
        output, lse = self._output(with_lse=True)
        assert lse is not None
        return output, lse

    def attend_watched(self, see: Callable[[int, Tensor], None], *, block: int | None = None) -> Tensor:
        """The model's own attention, a block of queries at a time, ``see(first, weights)`` being shown each block's.

        For whoever wants every weight: scores are made once, for the weights and for the output, and not a second
        time beside a kernel that keeps them to itself. ``first`` and ``weights`` as in :meth:`visible_weights`.
        """
        outputs = []
        for first, weights in self.visible_weights(block):
            see(first, weights)
            outputs.append(self._weighted_values(weights))
        return torch.cat(outputs, dim=2)

    def replaced(
        self,
        *,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> "AttentionCall":
        """The same call with what is given in place of the model's own.

        ``keep`` may be ``[q_len, kv_len]`` as well; without one, the model's own needs as many queries and keys as
        before. Raises ValueError where shapes do not fit.
        """
        query = self.query if query is None else query
        key = self.key if key is None else key
        value = self.value if value is None else value
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(f"query has head_dim {query.shape[-1]} but key {key.shape[-1]}")
        if key.shape[1:3] != value.shape[1:3]:
            raise ValueError(
                f"key and value differ in [n_kv_heads, kv_len]: {[*key.shape[1:3]]}, {[*value.shape[1:3]]}"
            )
        if query.shape[1] % key.shape[1]:
            raise ValueError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key/value heads evenly")
        if keep is not None:
            if keep.dtype != torch.bool:
                raise ValueError(f"keep must be boolean (True = may see), got {keep.dtype}")
            # [q_len, kv_len] is what kvprobe.attention.masks makes
            keep = keep[None, None] if keep.ndim == 2 else keep
            if keep.ndim != 4 or keep.shape[-2:] != (query.shape[2], key.shape[2]):
                raise ValueError(f"keep is {[*keep.shape]}, needs [.., .., {query.shape[2]}, {key.shape[2]}]")
        elif (query.shape[2], key.shape[2]) != (self.query.shape[2], self.key.shape[2]):
            was, now = (self.query.shape[2], self.key.shape[2]), (query.shape[2], key.shape[2])
            raise ValueError(f"[q_len, kv_len] was {[*was]} and is now {[*now]}: say what each query sees, with keep=")
        return replace(self, query=query, key=key, value=value, mask=self.mask if keep is None else keep)

    def weights(self, block: int | None = None, *, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Attention weights, a block of queries at a time, so that no map of all queries is ever held.

        Yields ``(first, weights)`` with ``weights`` float32 ``[batch, n_heads, rows, kv_len]`` of the queries
        ``first`` to ``first + rows``, from query ``start`` on. Rows sum to one, to less where the layer has learned
        sink logits, and to zero where the query may see nothing. ``block`` is the most rows at once (default: about
        64 MiB of scores).
        """
        kv_len = self.key.shape[2]
        for first, seen in self.visible_weights(block, start=start):
            yield first, F.pad(seen, (0, kv_len - seen.shape[-1]))

    def visible_weights(self, block: int | None = None, *, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """As :meth:`weights`, but a plain causal call leaves out the keys after the block's last query.

        Yields ``weights`` ``[batch, n_heads, rows, keys]`` with ``keys <= kv_len``: half the work at no loss.
        """
        for first, scores in self.score_blocks(block, start=start):
            weights = self._with_sinks(scores).softmax(-1)[..., : scores.shape[-1]]
            if self.mask is not None and self.sink_logits is None:
                # a padding query that may see nothing would get 0/0
                weights = weights.masked_fill(~self._keep_rows(first, first + scores.shape[2]).any(-1, True), 0.0)
            yield first, weights

    def score_blocks(self, block: int | None = None, *, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """As :meth:`visible_weights`, before the softmax: scaled, capped, minus infinity where nothing may be seen."""
        batch, n_heads, q_len, _ = self.query.shape
        kv_len = self.key.shape[2]
        block = max(1, BLOCK_ELEMENTS // (batch * n_heads * kv_len)) if block is None else block
        for first in range(start, q_len, block):
            last = min(first + block, q_len)
            keys = last if self.is_causal else kv_len
            query = self._grouped(self.query[:, :, first:last]).float() * self.scale
            scores = query @ self.key[:, :, :keys].float().transpose(-1, -2)
            scores = _capped(scores.view(batch, n_heads, last - first, keys), self.softcap)
            if self.is_causal:
                # of the keys up to the block's last query, only the block's own can lie after a query
                own = causal_keep(last - first, device=scores.device)
                scores[..., first:].masked_fill_(~own, -torch.inf)
            else:
                scores.masked_fill_(~self._keep_rows(first, last), -torch.inf)
            yield first, scores

    def scores_of(self, index: int) -> Tensor:
        """Scores of every query on one key, as the softmax sees them: float32 ``[batch, n_heads, q_len]``.

        Minus infinity where the query may not see the key.
        """
        query = self._grouped(self.query)
        one = self.key[:, :, index, :, None].float()
        scores = (query.float() @ one).flatten(1, 2)[..., 0].unflatten(1, (self.n_heads, -1)) * self.scale
        scores = _capped(scores, self.softcap)
        if not self.is_causal:
            return scores.masked_fill(~self.keep[..., index], -torch.inf)
        scores[..., :index] = -torch.inf
        return scores

    def rotate(self, x: Tensor, by: Tensor | int) -> Tensor:
        """``x`` ``[batch, heads, length, head_dim]`` turned by ``by`` positions with this layer's own RoPE.

        ``by`` is an int or ``[length]`` or ``[batch, length]``, in positions; negative turns back, so
        ``rotate(key, -positions)`` is the key before position encoding. Raises UnsupportedModelError, naming the
        family, where a Hugging Face model has no rotary embedding or one whose turn depends on more than the distance,
        and ValueError for any other call without one.
        """
        if self.turn is None:
            raise ValueError(f"layer {self.layer} was called without a rotary embedding: there is nothing to turn")
        return self.turn(x, torch.as_tensor(by, device=x.device))

    def _grouped(self, query: Tensor) -> Tensor:
        # [batch, n_kv_heads, group_size * q_len, head_dim]: the heads that share a key/value head become its rows
        batch, n_heads, q_len, head_dim = query.shape
        return query.reshape(batch, self.n_kv_heads, n_heads // self.n_kv_heads * q_len, head_dim)

    def _keep_rows(self, first: int, last: int) -> Tensor:
        # a mask with one row stands for every query
        return self.keep[..., first:last, :] if self.keep.shape[-2] > 1 else self.keep

    def _with_sinks(self, scores: Tensor) -> Tensor:
        if self.sink_logits is None:
            return scores
        sinks = self.sink_logits.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], dim=-1)

    def _output(self, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        if self.softcap is None and self._flash_has_lse and (with_lse or self.sink_logits is not None):
            return self._flash()
        if self.softcap is not None or self.sink_logits is not None or with_lse:
            return self._blockwise()
        return self._sdpa(), None

    @property
    def _kernel_mask(self) -> Tensor | None:
        # with fewer queries than keys a kernel's own causal mask is aligned top-left: give it ours. One query sees all
        return self.mask if self.is_causal or self.query.shape[2] == 1 else self.keep

    @property
    def _flash_has_lse(self) -> bool:
        # torch's CPU flash kernel returns the log-sum-exp; it wants one head_dim and shares heads by itself
        return self.query.device.type == "cpu" and self.query.shape[-1] == self.value.shape[-1]

    def _sdpa(self) -> Tensor:
        key, value, mask = self.key, self.value, self._kernel_mask
        grouped = self.n_heads != self.n_kv_heads
        # the conditions under which transformers, too, lets the kernel share heads: bit-equal to the plain model
        shares = grouped and mask is None and key.shape[-1] == value.shape[-1] <= 256
        if grouped and not shares:
            key = key.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
            value = value.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
        return F.scaled_dot_product_attention(
            self.query, key, value, attn_mask=mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=shares
        )

    def _flash(self) -> tuple[Tensor, Tensor]:
        keep = self._kernel_mask
        mask = None if keep is None else additive(keep, self.query.dtype)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.query, self.key, self.value, 0.0, self.is_causal, attn_mask=mask, scale=self.scale
        )
        if self.sink_logits is None:
            return output, lse
        if keep is not None:
            # the kernel says 0 where a query sees nothing, but nothing beside a sink logit is minus infinity
            lse = lse.masked_fill(~keep.any(-1), -torch.inf)
        # a sink logit s only adds exp(s) to the denominator: weights shrink by exp(lse - logaddexp(lse, s))
        sunk = torch.logaddexp(lse, self.sink_logits.float()[None, :, None])
        return output * torch.exp(lse - sunk)[..., None].to(output.dtype), sunk

    def _blockwise(self) -> tuple[Tensor, Tensor]:
        outputs, sums = [], []
        for _, scores in self.score_blocks():
            lse = self._with_sinks(scores).logsumexp(-1)
            # a padding query that may see nothing gets zeros, as from torch's own kernel, and not 0/0
            lse = lse.masked_fill(lse.isneginf(), 0.0)
            outputs.append(self._weighted_values(torch.exp(scores - lse[..., None])))
            sums.append(lse)
        return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)

    def _weighted_values(self, weights: Tensor) -> Tensor:
        # of the first keys only, where the rest is not visible to the block
        batch, n_heads, rows, keys = weights.shape
        grouped = weights.to(self.value.dtype).reshape(batch, self.n_kv_heads, n_heads // self.n_kv_heads * rows, keys)
        return (grouped @ self.value[:, :, :keys]).view(batch, n_heads, rows, -1)


Attend = Callable[[AttentionCall], Tensor]
"""What stands in for attention: of a call, the output ``[batch, n_heads, q_len, v_head_dim]``."""


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
