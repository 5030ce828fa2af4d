"""Which keys may each query see? Boolean everywhere (True = may see), made additive in one place."""

import torch
from torch import Tensor


def causal_keep(q_len: int, kv_len: int | None = None, *, device: torch.device | str | None = None) -> Tensor:
    """Every key up to the query's own position, queries being the last ``q_len`` of ``kv_len`` positions.

    Returns bool ``[q_len, kv_len]`` indexed ``[query, key]``. The alignment is bottom-right: with fewer queries
    than keys the last query still sees everything (``is_causal=True`` in torch aligns top-left and would hide it).
    """
    kv_len = q_len if kv_len is None else kv_len
    if not 1 <= q_len <= kv_len:
        raise ValueError(f"q_len must be between 1 and kv_len {kv_len}, got {q_len}")
    query = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    return torch.arange(kv_len, device=device) <= query


def window_keep(
    q_len: int, *, window: int, n_sink: int = 0, kv_len: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Which keys each query may see: the last ``window``, itself included, and the first ``n_sink``.

    Returns bool ``[q_len, kv_len]`` indexed ``[query, key]``; queries are the last ``q_len`` of ``kv_len``
    positions. Sinks are in addition to the window (StreamingLLM counts them inside its budget: its "4+1020" is
    ``n_sink=4, window=1020``). Raises ValueError if ``window < 1`` or ``n_sink < 0``.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 (the query itself), got {window}")
    if n_sink < 0:
        raise ValueError(f"n_sink must be at least 0, got {n_sink}")
    causal = causal_keep(q_len, kv_len, device=device)
    kv_len = causal.shape[1]
    key = torch.arange(kv_len, device=device)
    query = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    return causal & ((key > query - window) | (key < n_sink))


def keep_by_index(
    query: Tensor,
    key: Tensor,
    *,
    window: int | None = None,
    n_sink: int = 0,
    local: int | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """The same of tokens that lie in any order: bool ``[batch or 1, heads or 1, q_len, kv_len]``.

    ``query`` ``[q_len]`` or ``[batch, q_len]`` and ``key`` ``[kv_len]`` or ``[batch, heads or 1, kv_len]`` are indices;
    None of ``window`` is everything. ``local`` is a window that is applied to sinks as well. ``first`` ``[batch]`` is
    the index of each row's first token: what is before it is padding, or no key at all.
    """
    query = query[None, None, :, None] if query.ndim == 1 else query[:, None, :, None]
    key = key[None, None, None] if key.ndim == 1 else key[:, :, None]
    first = None if first is None else first[:, None, None, None]
    keep = key <= query
    if window is not None:
        keep = keep & ((key > query - window) | (key < (n_sink if first is None else first + n_sink)))
    if local is not None:
        keep = keep & (key > query - local)
    return keep if first is None else keep & (key >= first)


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that is added to scores: 0 where ``keep``, minus infinity elsewhere; same shape, of ``dtype``."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, -torch.inf)
