"""Masks: hand-worked tables, the words that must not blur, and the text of every refusal."""

import pytest
import torch

from kvprobe.attention.masks import additive, causal_keep, window_keep


def table(rows: str) -> list[list[bool]]:
    return [[mark == "x" for mark in row] for row in rows.split()]


def test_causal_by_hand() -> None:
    assert causal_keep(4).tolist() == table("x... xx.. xxx. xxxx")


def test_causal_is_aligned_bottom_right() -> None:
    # two queries, the last of five positions: torch's own is_causal would show the first of them one key only
    assert causal_keep(2, 5).tolist() == table("xxxx. xxxxx")
    assert causal_keep(1, 3).tolist() == table("xxx")


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 3), (4, 3), (-1, None)])
def test_causal_refuses_more_queries_than_keys(q_len: int, kv_len: int | None) -> None:
    limit = q_len if kv_len is None else kv_len
    with pytest.raises(ValueError, match=rf"q_len must be between 1 and kv_len {limit}, got {q_len}$"):
        causal_keep(q_len, kv_len)


@pytest.mark.parametrize(
    ("window", "n_sink", "expected"),
    [
        (1, 0, "x..... .x.... ..x... ...x.. ....x. .....x"),
        (2, 0, "x..... xx.... .xx... ..xx.. ...xx. ....xx"),
        (2, 1, "x..... xx.... xxx... x.xx.. x..xx. x...xx"),
        (1, 2, "x..... xx.... xxx... xx.x.. xx..x. xx...x"),
    ],
)
def test_window_by_hand(window: int, n_sink: int, expected: str) -> None:
    assert window_keep(6, window=window, n_sink=n_sink).tolist() == table(expected)


def test_window_of_the_last_queries_is_the_last_rows() -> None:
    assert window_keep(2, window=2, n_sink=1, kv_len=6).tolist() == table("x..xx. x...xx")


@pytest.mark.parametrize("window", [6, 7, 100])
@pytest.mark.parametrize("n_sink", [0, 3, 100])
def test_a_window_as_long_as_the_text_is_causal(window: int, n_sink: int) -> None:
    assert torch.equal(window_keep(6, window=window, n_sink=n_sink), causal_keep(6))


def test_sinks_are_in_addition_and_never_in_the_future() -> None:
    assert torch.equal(window_keep(6, window=1, n_sink=100), causal_keep(6))
    # a late query sees window + n_sink keys
    assert window_keep(20, window=5, n_sink=3)[-1].sum() == 8


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=rf"window must be at least 1 \(the query itself\), got {window}$"):
        window_keep(6, window=window)


def test_negative_sinks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"n_sink must be at least 0, got -1$"):
        window_keep(6, window=2, n_sink=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_is_zero_or_minus_infinity(dtype: torch.dtype) -> None:
    mask = additive(causal_keep(2), dtype)
    assert mask.dtype == dtype
    assert mask.tolist() == [[0.0, -torch.inf], [0.0, 0.0]]
