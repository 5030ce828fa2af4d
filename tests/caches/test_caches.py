import statistics
import time
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.masks import window_keep
from kvprobe.bench.storages import storage_bytes, tensors_of
from kvprobe.caches.full import FullCache
from kvprobe.caches.rolling import RollingCache
from kvprobe.decoder.model import from_hf
from kvprobe.probes.window_attention import windowed
from kvprobe.shape.layers import Layer
from support.decoders import held, rope_decoder
from support.tiny import tiny_ids, tiny_model

LENGTH = 48
SCHEMES = ("learned", "rope")
WINDOW = 9


def decoder_of(scheme, n_kv_heads=2, **settings):
    rotary = {"rotary": None} if scheme == "learned" else {}
    return rope_decoder(n_kv_heads=n_kv_heads, **rotary, **settings)


def in_parts(decoder, ids, cache, edges):
    """Logits of all tokens, fed to the cache in parts that end at `edges`."""
    return torch.cat([decoder(part, cache=cache) for part in ids.tensor_split(edges, dim=1)], dim=1)


def chunks(length, size):
    return list(range(size, length, size))


def equal(got, expected, atol=1e-5):
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [1, 3])
def test_cached_equals_uncached_at_every_split(scheme, n_kv_heads, batch):
    decoder, ids = decoder_of(scheme, n_kv_heads), tiny_ids(LENGTH, batch=batch)
    expected, cache = decoder(ids), decoder.full_cache(LENGTH, batch=batch)
    for split in range(1, LENGTH - 1):
        cache.reset()
        # prefill, one decoded token, and the rest as another prefill
        equal(in_parts(decoder, ids, cache, [split, split + 1]), expected)
    for size in (1, 7, 16):
        cache.reset()
        equal(in_parts(decoder, ids, cache, chunks(LENGTH, size)), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n_kv_heads", [4, 1])
def test_left_padding_changes_no_row_with_a_cache_or_without(scheme, n_kv_heads):
    decoder, ids, left_pad = decoder_of(scheme, n_kv_heads), tiny_ids(LENGTH, batch=3), torch.tensor([20, 0, 5])
    uncached = decoder(ids, left_pad=left_pad)
    for row, pad in enumerate(left_pad.tolist()):
        alone = decoder(ids[row : row + 1, pad:])
        equal(uncached[row : row + 1, pad:], alone)
        for size in (1, 7, 16, 47):
            cache = decoder.full_cache(LENGTH, batch=3)
            cache.left_pad = left_pad
            equal(in_parts(decoder, ids, cache, chunks(LENGTH, size))[row : row + 1, pad:], alone)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("bound_local", [False, True])
@pytest.mark.parametrize("left_pad", [None, torch.tensor([5, 0])])
def test_a_models_own_local_layers_keep_their_result_in_any_chunks(family, bound_local, left_pad):
    decoder, ids = from_hf(tiny_model(family)), tiny_ids(LENGTH, batch=2)
    seen = torch.arange(LENGTH) >= (torch.zeros(2, 1) if left_pad is None else left_pad[:, None])
    expected = decoder(ids, left_pad=left_pad)[seen]
    for size in (1, 5, 20, LENGTH):
        cache = decoder.full_cache(LENGTH, batch=2, bound_local=bound_local)
        cache.left_pad = left_pad
        equal(in_parts(decoder, ids, cache, chunks(LENGTH, size))[seen], expected)


ROLLING = [("gpt2", "absolute"), *product(("llama", "mistral", "qwen3", "gemma3_text"), ("absolute", "cache"))]


@pytest.mark.parametrize(("family", "positions"), ROLLING)
@pytest.mark.parametrize("n_sink", [0, 1, 4])
def test_rolling_equals_the_mask_in_any_chunks(family, n_sink, positions):
    decoder, ids = from_hf(tiny_model(family)), tiny_ids(LENGTH, batch=2)
    expected = decoder(ids, attend=two_part(n_sink) if positions == "cache" else masked(n_sink))
    # the last: tokens one by one, which move the sinks in the buffer, and then several at once, which read them
    for edges in (*(chunks(LENGTH, size) for size in (1, 5, 20, LENGTH)), [12, *range(13, 30), 37]):
        cache = decoder.rolling_cache(WINDOW, n_sink=n_sink, positions=positions, batch=2)
        equal(in_parts(decoder, ids, cache, edges), expected, atol=2e-5)


def masked(n_sink):
    def attend(call):
        return call.attend(keep=call.keep & window_keep(call.query.shape[2], window=WINDOW, n_sink=n_sink))

    return attend


def two_part(n_sink):
    """DESIGN's one call: q' = [q, q turned by -max(0, i - (n_sink + window - 1))], keys in the half meant for them."""

    def attend(call):
        length = call.query.shape[2]
        at = torch.arange(length)
        query = torch.cat([call.query, call.rotate(call.query, -(at - (n_sink + WINDOW - 1)).clamp(min=0))], dim=-1)
        sink = (at < n_sink)[:, None]
        key = torch.cat([call.key * ~sink, call.key * sink], dim=-1)
        keep = call.keep & window_keep(length, window=WINDOW, n_sink=n_sink)
        return call.attend(query=query, key=key, keep=keep)

    return attend


def test_a_query_sees_a_sink_from_the_distance_between_their_slots():
    # one layer, one repeated token: a score depends on the distance alone, and on that the same way everywhere
    decoder, n_sink, window = rope_decoder(n_layers=1), 2, 3
    by_distance, seen = {}, []
    ids = torch.full((1, 40), 7)

    def scores(call):
        return (call.query[:, :, -1:] @ call.key.transpose(-1, -2))[0, :, 0]

    def learn(call):
        for distance, score in enumerate(scores(call).flip(-1).T):
            by_distance[distance] = score
        return call.attend()

    def watch(call):
        seen.append(scores(call).T)
        return call.attend()

    decoder(ids, attend=learn)
    cache = decoder.rolling_cache(window, n_sink=n_sink, positions="cache")
    for i in range(40):
        decoder(ids[:, i : i + 1], cache=cache, attend=watch)
    # sinks 0 and 1 stand in slots 0 and 1, the window in 2 to 4, the query in the last
    expected = torch.stack([by_distance[4], by_distance[3]])
    for i in range(4, 40):
        equal(seen[i][:2], expected)
        equal(seen[i].sum(0), sum(by_distance[d] for d in range(5)), atol=1e-4)


@pytest.mark.parametrize(
    ("n_tokens", "expected"),
    [(1, [0]), (5, [0, 1, 2, 3, 4]), (6, [0, 1, 5, 3, 4]), (9, [0, 1, 8, 6, 7]), (100, [0, 1, 98, 99, 97])],
)
@pytest.mark.parametrize("size", [1, 4, 100])
def test_the_buffer_holds_the_sinks_and_the_last_of_the_others(n_tokens, expected, size):
    cache = RollingCache([Layer(kind="full", n_kv_heads=1, head_dim=1, v_head_dim=1)], window=3, n_sink=2)
    (layer,) = cache.layers
    # every key is its own index
    for part in torch.arange(n_tokens, dtype=torch.float32).split(size):
        cache.begin(1, len(part))
        layer.append(call_of(part, -part))
        cache.end()
    assert layer.keys[0, 0, : len(expected), 0].tolist() == expected
    assert layer.values[0, 0, : len(expected), 0].tolist() == [-index for index in expected]
    cache.begin(1, 4)
    more = torch.arange(n_tokens, n_tokens + 4, dtype=torch.float32)
    index = layer.index(4).tolist()
    assert layer.append(call_of(more, more)).key[0, 0, :, 0].tolist() == index


def call_of(key, value):
    key, value = (one[None, None, :, None] for one in (key, value))
    return AttentionCall(layer=0, query=key, key=key, value=value, scale=1.0)


def test_bytes_are_the_formula_and_no_other_storage_is_kept():
    decoder = rope_decoder(n_kv_heads=2)
    for cache, tokens in (
        (decoder.full_cache(64, batch=3), 64),
        (decoder.rolling_cache(10, n_sink=4, batch=3), 14),
        (decoder.rolling_cache(10, positions="cache", batch=3), 10),
    ):
        decoder(tiny_ids(20, batch=3), cache=cache)
        assert cache.nbytes == 2 * 2 * 2 * 8 * tokens * 3 * 4
        assert storage_bytes(tensors_of(cache)).measured_bytes == cache.nbytes == cache.formula_bytes
    # `cache` positions keep the sinks' keys as they were made, besides as they are seen
    cache = decoder.rolling_cache(10, n_sink=4, positions="cache", batch=3)
    assert cache.nbytes == cache.formula_bytes == 2 * 2 * 8 * (2 * 14 + 4) * 3 * 4


def test_bounded_local_layers_hold_no_more_than_their_window():
    decoder = from_hf(tiny_model("gemma3_text"))
    # two local layers of window 8, one global; 2 key/value heads of 12 components
    assert decoder.full_cache(40, bound_local=True).nbytes == 2 * 2 * 12 * (8 + 40 + 8) * 4
    assert decoder.full_cache(40).nbytes == 2 * 2 * 12 * 3 * 40 * 4
    assert decoder.rolling_cache(20, n_sink=4).nbytes == 2 * 2 * 12 * (12 + 24 + 12) * 4


def test_overflow_is_refused_before_anything_is_written():
    decoder, ids = rope_decoder(), tiny_ids(12)
    cache = decoder.full_cache(10)
    decoder(ids[:, :8], cache=cache)
    before = [x.clone() for x in held(cache)]
    with pytest.raises(ValueError, match="holds 8 of 10 tokens: 3 more do not fit"):
        decoder(ids[:, 8:11], cache=cache)
    assert all(torch.equal(x, y) for x, y in zip(before, held(cache), strict=True))
    equal(decoder(ids[:, 8:10], cache=cache), decoder(ids[:, :10])[:, 8:])


def test_nothing_reads_a_slot_that_was_not_written():
    decoder, ids = rope_decoder(), tiny_ids(30)
    for make in (
        lambda: decoder.full_cache(40),
        lambda: decoder.rolling_cache(12, n_sink=3),
        lambda: decoder.rolling_cache(12, n_sink=3, positions="cache"),
    ):
        clean, poisoned = make(), make()
        assert not any(x.any() for x in held(clean))
        for x in held(poisoned):
            x.fill_(torch.nan)
        for edges in ([10, 11, 20], chunks(30, 1)):
            expected = in_parts(decoder, ids, clean, edges)
            assert torch.equal(in_parts(decoder, ids, poisoned, edges), expected)
            clean.reset()
            poisoned.reset()


@pytest.mark.parametrize("kind", ["full", "absolute", "cache"])
def test_after_a_reset_nothing_is_left_of_the_sequence_before(kind):
    decoder, ids = rope_decoder(), tiny_ids(40)

    def make():
        return decoder.full_cache(40) if kind == "full" else decoder.rolling_cache(WINDOW, n_sink=2, positions=kind)

    used = make()
    in_parts(decoder, tiny_ids(37, seed=1), used, chunks(37, 1))
    used.reset()
    assert torch.equal(in_parts(decoder, ids, used, chunks(40, 1)), in_parts(decoder, ids, make(), chunks(40, 1)))


def test_a_pass_that_broke_off_must_be_forgotten_first():
    decoder, ids, calls = rope_decoder(), tiny_ids(20), []

    def breaks(call):
        calls.append(call.layer)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return call.attend()

    cache = decoder.rolling_cache(4)
    decoder(ids[:, :8], cache=cache)
    with pytest.raises(RuntimeError, match="broken"):
        decoder(ids[:, 8:12], cache=cache, attend=breaks)
    with pytest.raises(ValueError, match=r"reset\(\)"):
        decoder(ids[:, 8:12], cache=cache)
    cache.reset()
    equal(in_parts(decoder, ids, cache, [8, 12]), in_parts(decoder, ids, decoder.rolling_cache(4), [8, 12]))


def test_rope_goes_on_beyond_the_models_positions_by_slot_alone():
    decoder, ids = rope_decoder(max_positions=32), tiny_ids(300)
    with pytest.raises(ValueError, match=r"33 tokens are more than .* 32 positions.*positions='cache'"):
        in_parts(decoder, ids, decoder.rolling_cache(8, n_sink=2), chunks(300, 1))
    by_slot = in_parts(decoder, ids, decoder.rolling_cache(8, n_sink=2, positions="cache"), chunks(300, 1))
    whole = rope_decoder(max_positions=300)
    equal(by_slot, whole(ids, attend=windowed(window=8, sinks=range(2), by_slot=True)), atol=2e-5)
    # positions themselves stay small, however long the sequence
    cache = decoder.rolling_cache(8, n_sink=2, positions="cache")
    in_parts(decoder, ids, cache, chunks(300, 1))
    assert cache.positions(1).item() <= 20


def test_learned_positions_are_refused_by_slot_and_beyond_their_table_with_the_reason():
    decoder = decoder_of("learned", max_positions=32)
    with pytest.raises(ValueError, match="learned ones are added to the hidden state and cannot be moved"):
        decoder.rolling_cache(8, positions="cache")
    cache = decoder.rolling_cache(8, n_sink=1)
    with pytest.raises(ValueError, match="33 tokens are more than the model's 32 positions: learned positions have"):
        in_parts(decoder, tiny_ids(40), cache, chunks(40, 1))
    assert cache.length == 32


def test_what_cannot_be_cached_is_refused():
    decoder = rope_decoder()
    with pytest.raises(ValueError, match=r"window must be at least 1 .*got 0"):
        decoder.rolling_cache(0)
    with pytest.raises(ValueError, match="n_sink must be at least 0, got -1"):
        decoder.rolling_cache(4, n_sink=-1)
    with pytest.raises(ValueError, match="'recompute'"):
        decoder.rolling_cache(4, positions="recompute")
    with pytest.raises(ValueError, match="capacity must be at least 1 token, got 0"):
        decoder.full_cache(0)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        FullCache(decoder.config.layers, capacity=4, batch=0)
    with pytest.raises(ValueError, match="a batch of 2, got 1"):
        decoder(tiny_ids(4), cache=decoder.full_cache(4, batch=2))


@pytest.mark.smollm2
@pytest.mark.parametrize("n_sink", [0, 1, 4])
@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_on_smollm2_the_rolling_loss_is_the_masks_token_by_token(smollm2, positions, n_sink):
    from kvprobe.text import passages, texts

    ids = passages.encode(smollm2.tokenizer, texts.read_text("bundled"), n_tokens=192).ids[None]
    decoder, window = from_hf(smollm2.model), 48

    def losses(logits):
        return F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")

    mask = windowed(window=window, sinks=range(n_sink), by_slot=positions == "cache")
    expected = losses(decoder(ids, attend=mask))
    cache = decoder.rolling_cache(window, n_sink=n_sink, positions=positions)
    # token by token where the first keys have just gone, chunks for the rest
    edges = [40, *range(80, 104), 120, 190]
    equal(losses(in_parts(decoder, ids, cache, edges)), expected, atol=1e-3)
    assert (expected - losses(decoder(ids))).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.smollm2
def test_20_000_tokens_cost_the_last_tenth_what_the_first_one_did(smollm2):
    from kvprobe.generation.generate import Sampling, stream

    decoder = from_hf(smollm2.model)
    cache = decoder.rolling_cache(256, n_sink=4, positions="cache")
    prompt = smollm2.tokenizer("Once upon a time")["input_ids"]
    started, n_bytes, ms, resident = time.monotonic(), cache.nbytes, [], []
    for step in stream(
        decoder, [prompt], max_new_tokens=20_000, cache=cache, sampling=Sampling(temperature=1.0, top_k=50)
    ):
        ms.append(step.ms)
        resident.append(resident_bytes())
    print(f"{time.monotonic() - started:.0f} s, {statistics.median(ms):.1f} ms a token")
    assert len(ms) == 20_000
    assert cache.nbytes == n_bytes
    assert statistics.median(ms[-2000:]) < 1.25 * statistics.median(ms[300:2300])
    assert max(resident[-2000:]) < max(resident[300:2300]) + 32 * 2**20


def resident_bytes():
    import os
    from pathlib import Path

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
