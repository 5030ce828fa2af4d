"""What does attention read where only the last tokens and some sinks are seen, from their places or by slots?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from kvprobe.attention.call import Attend, AttentionCall
from kvprobe.attention.masks import window_keep
from kvprobe.errors import Wording

Sinks = Sequence[int] | Mapping[int, Sequence[int]]
"""Positions of the tokens kept as sinks, in order: one choice for all layers, or one by layer."""

# queries that share one slice of keys: fewer waste less on keys that only the neighbours see, more need fewer calls
BLOCK = 128


def windowed(*, window: int, sinks: Sinks = (), by_slot: bool = False) -> Attend:
    """Attention in which each query sees the last ``window`` keys, itself included, and the ``sinks``.

    For ``attending(model, ...)`` over whole passes. ``by_slot``: the sinks are seen from the distance between slots
    of the cache (``cache`` positions), else from where they are (``absolute``). A sink is never seen before it is
    there, and what the model itself hides stays hidden. Raises ValueError for ``window < 1`` or sinks out of order.
    """
    check_window(window)
    for chosen in sinks.values() if isinstance(sinks, Mapping) else (sinks,):
        if list(chosen) != sorted(set(chosen)) or (chosen and chosen[0] < 0):
            raise ValueError(f"sinks must be different positions in order, got {[*chosen]}")

    def attend(call: AttentionCall) -> Tensor:
        chosen = sinks[call.layer] if isinstance(sinks, Mapping) else sinks
        return attend_window(call, window=window, sinks=chosen, by_slot=by_slot)

    return attend


def attend_window(call: AttentionCall, *, window: int, sinks: Sequence[int], by_slot: bool = False) -> Tensor:
    """One layer of :func:`windowed`: ``[batch, n_heads, length, v_head_dim]``.

    The keys of a window and the sinks that have left it are two disjoint sets; attention over each gives an output
    and a log-sum-exp, and the two merge exactly. So no mask over all keys is ever made, and the sinks may be seen
    by a query that is turned for them alone.
    """
    length = call.query.shape[2]
    if call.key.shape[2] != length:
        raise ValueError(f"a window needs a whole pass, got {length} queries on {call.key.shape[2]} keys")
    if window >= length:
        return call.attend()
    output, lse = _recent(call, window)
    first = sinks[0] + window if sinks else length
    if first >= length:
        return output
    # queries from `first` on have lost a sink from their window
    old, old_lse = _sinks_outside(call, window, sinks, first, by_slot)
    recent, recent_lse = output[:, :, first:], lse[:, :, first:]
    total = torch.logaddexp(recent_lse, old_lse)
    # an indexer may hide a query from its window and from every sink: it gets nothing, and not 0/0
    total = total.masked_fill(total.isneginf(), 0.0)
    merged = recent * torch.exp(recent_lse - total)[..., None] + old * torch.exp(old_lse - total)[..., None]
    return torch.cat([output[:, :, :first], merged.to(output.dtype)], dim=2)


def _recent(call: AttentionCall, window: int) -> tuple[Tensor, Tensor]:
    """Attention over the window alone, block by block, each on its own slice of keys; with the log-sum-exp."""
    length = call.query.shape[2]
    outputs, sums = [], []
    # the first `window` queries are a plain causal pass
    edges = [0, *range(window, length, BLOCK), length]
    for first, last in pairwise(edges):
        start = max(0, first - window + 1)
        mask = None
        if first or not call.is_causal:
            near = window_keep(last - first, window=window, kv_len=last - start, device=call.query.device)[None, None]
            mask = near if call.is_causal else near & call.keep[..., first:last, start:last]
        part = replace(
            call,
            query=call.query[:, :, first:last],
            key=call.key[:, :, start:last],
            value=call.value[:, :, start:last],
            mask=mask,
        )
        output, lse = part.attend_with_lse()
        if mask is not None and call.sink_logits is None:
            # an indexer may hide all of the window, which then weighs nothing beside the sinks
            lse = lse.masked_fill(~mask.any(-1), -torch.inf)
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _sinks_outside(
    call: AttentionCall, window: int, sinks: Sequence[int], first: int, by_slot: bool
) -> tuple[Tensor, Tensor]:
    """Attention of the queries from ``first`` on over those sinks that have left their window."""
    length, device = call.query.shape[2], call.query.device
    at = torch.tensor(sinks, device=device)
    rows = torch.arange(first, length, device=device)
    keep = at + window <= rows[:, None]
    query, key = call.query[:, :, first:], call.key[:, :, at]
    if by_slot:
        # slots: the sinks that have left the window, in order, then the window; the query in the last one
        slot = keep.sum(-1) + window - 1
        query = call.rotate(query, slot - rows)
        key = call.rotate(key, torch.arange(len(sinks), device=device) - at)
    if not call.is_causal:
        keep = call.keep[..., first:, :][..., at] & keep
    # learned sink logits stand in the window's sum already
    bare = replace(call, sink_logits=None)
    output, lse = bare.replaced(query=query, key=key, value=call.value[:, :, at], keep=keep).attend_with_lse()
    # where the model itself hides every sink (local layers) this part weighs nothing
    return output, lse.masked_fill(~keep.any(-1), -torch.inf)


def check_window(window: int) -> None:
    """Raise ValueError for a window that does not even hold the query."""
    if window < 1:
        raise ValueError(Wording("{window} must be at least 1 (the query itself), got {0}", window))
