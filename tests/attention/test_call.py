"""One attention call against plain numpy loops, and the laws between its methods."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.masks import causal_keep, window_keep

BATCH, Q_LEN = 2, 7


def call_of(
    *,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    q_len: int = Q_LEN,
    kv_len: int = Q_LEN,
    v_head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> AttentionCall:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = draw(BATCH, n_heads, q_len, 8)
    key, value = draw(BATCH, n_kv_heads, kv_len, 8), draw(BATCH, n_kv_heads, kv_len, v_head_dim)
    return AttentionCall(layer=0, query=query, key=key, value=value, **({"scale": 0.6} | settings))


def by_loops(call: AttentionCall, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Output, log-sum-exp, weights and scores in float64, one query of one head at a time.

    Nothing is taken from the call but its data; ``keep`` is ``[batch, n_heads, q_len, kv_len]``.
    """
    query, key, value = (x.double().numpy() for x in (call.query, call.key, call.value))
    batch, n_heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    output = np.zeros((batch, n_heads, q_len, value.shape[-1]))
    lse, weights, scores = (
        np.zeros((batch, n_heads, q_len)),
        np.zeros((batch, n_heads, q_len, kv_len)),
        np.full((batch, n_heads, q_len, kv_len), -np.inf),
    )
    for b, h, i in itertools.product(range(batch), range(n_heads), range(q_len)):
        shared = h * key.shape[1] // n_heads
        total = 0.0 if call.sink_logits is None else float(np.exp(call.sink_logits[h].double().item()))
        for j in range(kv_len):
            if keep[b, h, i, j]:
                score = call.scale * float(query[b, h, i] @ key[b, shared, j])
                scores[b, h, i, j] = score if call.softcap is None else call.softcap * np.tanh(score / call.softcap)
                total += np.exp(scores[b, h, i, j])
        if total:
            lse[b, h, i] = np.log(total)
            weights[b, h, i] = np.exp(scores[b, h, i]) / total
            output[b, h, i] = weights[b, h, i] @ value[b, shared]
    return output, lse, weights, scores


def assert_equals_loops(call: AttentionCall, keep: torch.Tensor, tolerance: float = 2e-6) -> None:
    shape = (BATCH, call.n_heads, call.query.shape[2], call.key.shape[2])
    output, lse, weights, scores = by_loops(call, keep.expand(shape).numpy())

    def same(got: torch.Tensor, want: np.ndarray, rounding: float = 2e-6) -> None:
        torch.testing.assert_close(got.double(), torch.from_numpy(want), rtol=0, atol=rounding)

    same(call.attend(), output, tolerance)
    with_lse, got_lse = call.attend_with_lse()
    same(with_lse, output, tolerance)
    assert got_lse.dtype == torch.float32
    same(got_lse, lse, max(tolerance / 2, 2e-6))
    same(torch.cat([part for _, part in call.weights()], dim=2), weights)
    for index in range(call.key.shape[2]):
        same(call.scores_of(index), scores[..., index], 4e-6)
    assert torch.equal(call.keep.expand(shape), keep.expand(shape))


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
PADDED = causal_keep(Q_LEN).repeat(BATCH, 1, 1, 1)
PADDED[1, ..., :3] = False  # left padding: the first three queries of row 1 see nothing at all


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("v_head_dim", [8, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sink_logits", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("mask", [None, PADDED, window_keep(Q_LEN, window=3)[None, None]], ids=["", "padded", "window"])
def test_every_road_equals_plain_loops(
    n_kv_heads: int, v_head_dim: int, softcap: float | None, sink_logits: torch.Tensor | None, mask: torch.Tensor | None
) -> None:
    call = call_of(
        n_kv_heads=n_kv_heads, v_head_dim=v_head_dim, softcap=softcap, sink_logits=sink_logits, mask=mask, scale=0.7
    )
    assert call.is_causal == (mask is None)
    assert_equals_loops(call, causal_keep(Q_LEN) if mask is None else mask)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("n_kv_heads", [2, 4])
@pytest.mark.parametrize("q_len", [1, 3])
def test_fewer_queries_than_keys_are_the_last_ones(q_len: int, n_kv_heads: int, softcap: float | None) -> None:
    call = call_of(q_len=q_len, n_kv_heads=n_kv_heads, softcap=softcap)
    assert_equals_loops(call, torch.ones(q_len, Q_LEN, dtype=torch.bool).tril(Q_LEN - q_len))


def test_each_head_may_have_its_own_mask() -> None:
    keep = causal_keep(Q_LEN).repeat(BATCH, 4, 1, 1)
    keep[:, 2] &= window_keep(Q_LEN, window=2)
    assert_equals_loops(call_of(mask=keep), keep)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("mask", [None, PADDED], ids=["", "padded"])
def test_half_precision_weights_are_reduced_in_float32(
    dtype: torch.dtype, tolerance: float, mask: torch.Tensor | None
) -> None:
    call = call_of(dtype=dtype, mask=mask)
    weights = torch.cat([part for _, part in call.weights()], dim=2)
    assert weights.dtype == torch.float32
    sees = call.keep.any(-1).expand(BATCH, call.n_heads, Q_LEN)
    torch.testing.assert_close(weights.sum(-1), sees.float(), rtol=0, atol=1e-6)
    assert call.attend().dtype == dtype
    # the loops work on the rounded data: only the kernel's own rounding is left
    assert_equals_loops(call, causal_keep(Q_LEN) if mask is None else mask, tolerance)


@pytest.mark.parametrize("mask", [None, PADDED], ids=["", "padded"])
@pytest.mark.parametrize("sink_logits", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("start", [0, 2, 6])
def test_blocks_of_any_size_give_the_same_weights(
    start: int, mask: torch.Tensor | None, sink_logits: torch.Tensor | None
) -> None:
    call = call_of(mask=mask, sink_logits=sink_logits)
    (first, whole), *others = call.weights(start=start)
    assert (first, others) == (start, [])
    for block in (1, 3, 5, 100):
        parts = list(call.weights(block, start=start))
        assert [first for first, _ in parts] == list(range(start, Q_LEN, block))
        assert all(part.shape[2] <= block for _, part in parts)
        torch.testing.assert_close(torch.cat([part for _, part in parts], dim=2), whole, rtol=0, atol=1e-6)
        for (first, seen), (_, part) in zip(call.visible_weights(block, start=start), parts, strict=True):
            assert torch.equal(seen, part[..., : seen.shape[-1]])
            assert not part[..., seen.shape[-1] :].any()
            assert seen.shape[-1] == (Q_LEN if mask is not None else first + part.shape[2])


def test_weights_beside_a_sink_logit_sum_to_what_it_leaves() -> None:
    call = call_of(sink_logits=SINKS)
    _, lse = call.attend_with_lse()
    (_, weights), *_ = call.weights()
    torch.testing.assert_close(weights.sum(-1), 1 - torch.exp(SINKS[None, :, None] - lse), rtol=0, atol=1e-6)


def test_zero_queries_spread_themselves_evenly() -> None:
    call = call_of().replaced(query=torch.zeros(BATCH, 4, Q_LEN, 8))
    _, lse = call.attend_with_lse()
    mass = torch.exp(call.scores_of(0) - lse)
    torch.testing.assert_close(mass, (1 / torch.arange(1.0, Q_LEN + 1)).expand_as(mass), rtol=1e-6, atol=0)


def test_attend_reads_what_is_replaced() -> None:
    call = call_of()
    ones = torch.ones(BATCH, 2, Q_LEN, 3)
    assert call.attend(value=ones).shape == (BATCH, 4, Q_LEN, 3)
    torch.testing.assert_close(call.attend(value=ones), torch.ones(BATCH, 4, Q_LEN, 3), rtol=0, atol=1e-6)
    # seeing only oneself returns one's own value
    itself = call.attend(keep=window_keep(Q_LEN, window=1))
    torch.testing.assert_close(itself, call.value.repeat_interleave(2, 1), rtol=0, atol=1e-6)
    # halving the keys is halving the scale
    torch.testing.assert_close(call.attend(key=call.key / 2), call_of(scale=0.3).attend(), rtol=0, atol=1e-6)
    torch.testing.assert_close(call.attend(query=call.query / 2), call_of(scale=0.3).attend(), rtol=0, atol=1e-6)


def test_replacing_leaves_the_call_itself_alone() -> None:
    call = call_of()
    before = call.attend()
    call.attend(key=call.key * 0, keep=window_keep(Q_LEN, window=1))
    assert torch.equal(call.attend(), before)
    assert call.mask is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"key": torch.zeros(BATCH, 2, Q_LEN, 6)}, "query has head_dim 8 but key 6"),
        ({"key": torch.zeros(BATCH, 2, 5, 8)}, r"differ in \[n_kv_heads, kv_len\]: \[2, 5\], \[2, 7\]"),
        ({"query": torch.zeros(BATCH, 3, Q_LEN, 8)}, "3 query heads cannot share 2 key/value heads evenly"),
        ({"keep": torch.zeros(Q_LEN, Q_LEN)}, r"keep must be boolean \(True = may see\), got torch.float32"),
        ({"keep": causal_keep(6)}, r"keep is \[1, 1, 6, 6\], needs \[.., .., 7, 7\]"),
        ({"keep": causal_keep(Q_LEN)[None]}, r"keep is \[1, 7, 7\], needs \[.., .., 7, 7\]"),
        (
            {"key": torch.zeros(BATCH, 2, 5, 8), "value": torch.zeros(BATCH, 2, 5, 8)},
            r"\[q_len, kv_len\] was \[7, 7\] and is now \[7, 5\]: say what each query sees, with keep=",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call_of().attend(**given)


def test_more_keys_than_before_are_read_under_the_mask_given_with_them() -> None:
    call = call_of()
    two = torch.zeros(BATCH, 2, 2, 8)
    keep = torch.cat([torch.zeros(Q_LEN, 2, dtype=torch.bool), causal_keep(Q_LEN)], dim=1)
    longer = call.attend(key=torch.cat([two, call.key], 2), value=torch.cat([two, call.value], 2), keep=keep)
    torch.testing.assert_close(longer, call.attend(), rtol=0, atol=1e-6)


def test_rotating_without_a_rotary_embedding_is_refused() -> None:
    call = call_of()
    with pytest.raises(ValueError, match="layer 0 was called without a rotary embedding"):
        call.rotate(call.key, 1)


@pytest.mark.parametrize("q_len", [1, 3, 7])
def test_the_last_keys_are_the_visible_ones_closest_to_the_query(q_len):
    # a key in between is hidden, as padding or a window hides it: the one before it counts in its place
    keep = causal_keep(q_len, Q_LEN)
    keep[:, Q_LEN - 3] = False
    call = call_of(q_len=q_len, mask=keep[None, None])
    for i, seen in enumerate(keep.tolist()):
        for n in (0, 2, 20):
            wanted = [j for j in range(Q_LEN) if seen[j]][-n:] if n else []
            assert call.last(n)[0, 0, i].nonzero().flatten().tolist() == wanted
    with pytest.raises(ValueError, match="at least 0 keys, got -1"):
        call.last(-1)


@pytest.mark.parametrize("of_queries", [False, True])
def test_the_top_keys_are_those_of_greatest_value_that_may_be_seen(of_queries):
    call = call_of()
    shape = (BATCH, 4, Q_LEN, Q_LEN) if of_queries else (BATCH, 2, Q_LEN)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    among = call.keep & ~call.last(2)
    chosen = call.top(2, values, among=among)
    for b, h, i in itertools.product(range(BATCH), range(4), range(Q_LEN)):
        by_key = values[b, h, i] if of_queries else values[b, h // 2]
        earlier = sorted(range(max(0, i - 1)), key=lambda j, of=by_key: -float(of[j]))
        assert set(chosen[b, h, i].nonzero().flatten().tolist()) == set(earlier[:2])
    assert call.top(20, values).equal(call.keep.expand(chosen.shape))
    with pytest.raises(ValueError, match=r"values \[2, 2, 7\] or \[2, 4, 7, 7\], got 2, \[2, 7\]"):
        call.top(2, torch.zeros(2, 7))
