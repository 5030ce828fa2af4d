"""Rows of one cache that are taken back, padded, kept and restored, each by itself."""

import pytest
import torch

from kvprobe.decoder.model import from_hf
from support.decoders import close, held, rope_decoder
from support.tiny import tiny_ids, tiny_model

LENGTH, WINDOW, HEADROOM = 30, 6, 4


def make(decoder, kind, batch=2, headroom=HEADROOM):
    if kind in ("full", "bounded"):
        return decoder.full_cache(2 * LENGTH, batch=batch, bound_local=kind == "bounded", headroom=headroom)
    return decoder.rolling_cache(WINDOW, n_sink=2, positions=kind, batch=batch, headroom=headroom)


def decoder_of(kind):
    return from_hf(tiny_model("gemma3_text")) if kind == "bounded" else rope_decoder(n_kv_heads=2)


def fed(decoder, cache, ids, sizes):
    """Logits of ``ids`` ``[batch, length]``, fed in parts of ``sizes``."""
    return torch.cat([decoder(part, cache=cache) for part in ids.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("kind", ["full", "bounded", "absolute", "cache"])
@pytest.mark.parametrize("prompt", [2, 9, 20])
@pytest.mark.parametrize("sizes", [[1] * 8, [3, 1, 4]])
@pytest.mark.parametrize("draft", [[1] * 4, [4]])
def test_decoding_after_rows_were_taken_back_is_as_if_they_had_never_been_fed(kind, prompt, sizes, draft):
    decoder, ids, more = decoder_of(kind), tiny_ids(prompt + 4, batch=2), tiny_ids(8, batch=2, seed=1)
    cache = make(decoder, kind)
    fed(decoder, cache, ids, [prompt, *draft])
    # the first row keeps one token of the draft, the second three
    kept = [prompt + 1, prompt + 3]
    cache.truncate(torch.tensor(kept))
    assert cache.lengths.tolist() == kept
    got = fed(decoder, cache, more, sizes)
    assert cache.lengths.tolist() == [length + 8 for length in kept]
    for row, length in enumerate(kept):
        alone = make(decoder, kind, batch=1)
        fed(decoder, alone, ids[row : row + 1, :length], [1] * length)
        close(got[row : row + 1], fed(decoder, alone, more[row : row + 1], [1] * 8))


@pytest.mark.parametrize("kind", ["bounded", "absolute", "cache"])
def test_a_ring_is_taken_back_within_its_headroom_and_no_further(kind):
    decoder, ids = decoder_of(kind), tiny_ids(LENGTH, batch=2)
    cache = make(decoder, kind)
    fed(decoder, cache, ids, [LENGTH])
    before = [one.clone() for one in held(cache)]
    # the last token needs no headroom, since the next one takes its slot
    least = LENGTH - HEADROOM - 1
    with pytest.raises(
        ValueError, match=rf"row 1 holds 30 tokens and can be taken back to {least}, not to {least - 1}"
    ):
        cache.truncate([LENGTH, least - 1])
    assert cache.lengths.tolist() == [LENGTH, LENGTH]
    assert all(map(torch.equal, before, held(cache)))
    cache.truncate([least, LENGTH])
    # what was overwritten does not come back with tokens that are fed again
    fed(decoder, cache, ids[:, :2], [2])
    with pytest.raises(ValueError, match=f"row 0 holds {least + 2} tokens and can be taken back to {least}"):
        cache.truncate([least - 1, LENGTH])


@pytest.mark.parametrize("lengths", [[5], [5, 11], [-1, 5], [1, 2, 3]])
def test_lengths_that_no_row_has_are_refused(lengths):
    decoder = rope_decoder()
    cache = make(decoder, "full")
    fed(decoder, cache, tiny_ids(10, batch=2), [10])
    for change in (cache.truncate, cache.confirm):
        with pytest.raises(ValueError, match="lengths must be 2 whole numbers"):
            change(lengths)


def test_everything_in_a_full_cache_can_be_taken_back():
    decoder, ids = rope_decoder(), tiny_ids(10, batch=2)
    cache = make(decoder, "full", headroom=0)
    expected = fed(decoder, cache, ids, [10])
    cache.truncate([0, 0])
    assert torch.equal(fed(decoder, cache, ids, [10]), expected)


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("n_sink", [0, 1, 4])
@pytest.mark.parametrize("size", [1, 5, 11, LENGTH])
def test_under_left_padding_each_row_of_a_rolling_cache_has_sinks_of_its_own(family, positions, n_sink, size):
    decoder, ids, left_pad = from_hf(tiny_model(family)), tiny_ids(LENGTH, batch=3), torch.tensor([12, 0, 5])
    cache = decoder.rolling_cache(WINDOW, n_sink=n_sink, positions=positions, batch=3)
    cache.left_pad = left_pad
    got = fed(decoder, cache, ids, size)
    for row, pad in enumerate(left_pad.tolist()):
        alone = decoder.rolling_cache(WINDOW, n_sink=n_sink, positions=positions)
        close(got[row : row + 1, pad:], fed(decoder, alone, ids[row : row + 1, pad:], 1))


@pytest.mark.parametrize("kind", ["full", "bounded", "absolute", "cache"])
@pytest.mark.parametrize("left_pad", [None, torch.tensor([3, 0])])
def test_a_cache_goes_on_from_its_state_to_the_bit(kind, left_pad):
    decoder, ids = decoder_of(kind), tiny_ids(40, batch=2)
    cache, other = (make(decoder, kind) for _ in range(2))
    cache.left_pad = left_pad
    fed(decoder, cache, ids[:, :30], 5)
    cache.truncate([29, 27])
    state = {name: one.clone() for name, one in cache.state().items()}
    expected = fed(decoder, cache, ids[:, 30:], 1)
    fed(decoder, other, ids[:, :7], 7)
    other.restore(state)
    assert other.lengths.tolist() == [29, 27]
    assert torch.equal(fed(decoder, other, ids[:, 30:], 1), expected)


def test_a_state_of_another_make_is_refused():
    decoder = rope_decoder()
    with pytest.raises(ValueError, match="another make"):
        make(decoder, "cache").restore(make(decoder, "absolute").state())
