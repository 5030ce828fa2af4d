import pytest

from kvprobe.bench.roofline import Ceilings, Shape, Work, total
from support.decoders import rope_decoder

# two layers, the second local, 4 query heads on 2 key/value heads of 8; every count below is worked by hand
SMALL = Shape(
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    windows=(None, 4),
    matrices=1000,
    head=300,
    vectors=20,
    token=7,
    weight_itemsize=2,
    cache_itemsize=4,
)
GPT_124M = Shape(
    n_heads=12,
    n_kv_heads=12,
    head_dim=64,
    windows=(None,) * 12,
    matrices=12 * (4 * 768 * 768 + 3 * 768 * 2048),
    head=50_257 * 768,
    vectors=25 * 768,
    token=0,
)


def test_one_decode_step_by_hand():
    work = SMALL.decode(10, batch=3)
    # 1,320 elements once, 7 looked up by each of 3 rows
    assert work.weight_bytes == 2 * (1320 + 21)
    # 10 and 4 tokens, K and V of 2 heads of 8
    assert work.cache_bytes == 3 * 14 * 2 * 16 * 4
    assert work.weight_flops == 3 * 2 * 1300
    # score and value of 4 heads of 8: 2 · 2 · 32 FLOPs a key
    assert work.attention_flops == 3 * 14 * 128
    assert (work.bytes_moved, work.flops) == (2682 + 5376, 7800 + 5376)
    assert work.intensity == 13_176 / 8058


def test_one_prefill_by_hand():
    work = SMALL.prefill(6, batch=2)
    assert work.weight_bytes == 2 * (1320 + 12 * 7)
    assert work.cache_bytes == 2 * (6 + 4) * 2 * 16 * 4
    # the head for the last token alone
    assert work.weight_flops == 2 * 2 * (6 * 1000 + 300)
    # 1 + 2 + … + 6 keys, and 1 + 2 + 3 + 4 + 4 + 4
    assert work.attention_flops == 2 * (21 + 18) * 128
    assert SMALL.prefill(6, batch=2, all_logits=True).weight_flops == 2 * 2 * 6 * 1300
    assert SMALL.prefill(1) == SMALL.decode(1)


def test_the_published_roofline_counts_the_products_with_weights():
    decode, prefill = GPT_124M.decode(2048), GPT_124M.prefill(2048, all_logits=True)
    assert decode.weight_flops == 247_064_064
    assert decode.bytes_moved == 494_204_928 + 150_994_944
    assert round(decode.weight_flops / decode.bytes_moved, 1) == 0.4
    assert prefill.bytes_moved == decode.bytes_moved
    assert round(prefill.weight_flops / prefill.bytes_moved) == 784
    # attention comes on top of what was published: 12 layers · 4 · 768 · 2,048
    assert decode.attention_flops == 75_497_472


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(8, 8), (8, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("context", [1, 5, 4096])
def test_decode_attention_has_one_intensity_at_every_length(n_heads, n_kv_heads, itemsize, context):
    sizes = {"head_dim": 16, "matrices": 1, "head": 1, "vectors": 1, "token": 1, "cache_itemsize": itemsize}
    shape = Shape(n_heads=n_heads, n_kv_heads=n_kv_heads, windows=(None, 3), **sizes)
    assert shape.decode(context, batch=2).attention_intensity == 2 * (n_heads / n_kv_heads) / itemsize


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("position", [{}, {"rotary": None}])
def test_a_decoder_is_counted_whole(tied_head, position):
    decoder = rope_decoder(tied_head=tied_head, n_kv_heads=2, windows=(None, 5), **position)
    shape = Shape.of(decoder)
    # of 32: query and out 32 wide, key and value 16; three matrices of 48
    assert shape.matrices == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert (shape.head, shape.vectors, shape.windows) == (97 * 32, 5 * 32, (None, 5))
    assert shape.token == 32 * ((not tied_head) + (position != {}))
    looked_up = 97 * 32 * (not tied_head) + 256 * 32 * (position != {})
    assert shape.matrices + shape.head + shape.vectors + looked_up == sum(p.numel() for p in decoder.parameters())
    assert (shape.weight_itemsize, shape.cache_itemsize) == (4, 4)
    assert Shape.of(decoder.bfloat16()).decode(9).bytes_moved * 2 == shape.decode(9).bytes_moved


@pytest.mark.parametrize("context", [3, 5, 9])
def test_the_cache_of_a_decode_step_is_what_the_buffers_hold(context):
    decoder = rope_decoder(n_kv_heads=2, windows=(None, 5))
    cache = decoder.full_cache(context, batch=3, bound_local=True)
    assert Shape.of(decoder).decode(context, batch=3).cache_bytes == cache.nbytes


def test_ceilings():
    ceilings = Ceilings(bandwidth=10.0, matrix_rate=40.0)
    assert ceilings.ridge_point == 4.0
    low = Work(weight_bytes=60, cache_bytes=40, weight_flops=100, attention_flops=20)
    high = Work(weight_bytes=60, cache_bytes=40, weight_flops=500, attention_flops=100)
    assert (ceilings.seconds(low), ceilings.bound(low)) == (10.0, "bandwidth")
    assert (ceilings.seconds(high), ceilings.bound(high)) == (15.0, "arithmetic")
    at_the_ridge = Work(weight_bytes=100, cache_bytes=0, weight_flops=400, attention_flops=0)
    assert (ceilings.seconds(at_the_ridge), ceilings.bound(at_the_ridge)) == (10.0, "arithmetic")
    assert total([low, high]) == Work(weight_bytes=120, cache_bytes=80, weight_flops=600, attention_flops=120)


@pytest.mark.parametrize("ridge", [0.2, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("context", [1, 4, 30])
def test_arithmetic_binds_from_the_first_batch_that_reaches_the_ridge(ridge, context):
    ceilings = Ceilings(bandwidth=1.0, matrix_rate=ridge)
    batch = ceilings.binding_batch(SMALL, context)
    bounds = [ceilings.bound(SMALL.decode(context, batch=b)) for b in range(1, 400)]
    assert batch == (bounds.index("arithmetic") + 1 if "arithmetic" in bounds else None)


def test_the_batch_that_binds_may_be_far_out():
    one = SMALL.decode(1)
    # a row brings 7 looked-up elements and 256 bytes of cache, and its FLOPs pay for half a byte more
    ceilings = Ceilings(bandwidth=1.0, matrix_rate=one.flops / (14 + 256 + 0.5))
    batch = ceilings.binding_batch(SMALL, 1)
    # the 2 · 1,320 bytes that all rows share, by halves
    assert batch == pytest.approx(5280, abs=1)


def test_a_cache_of_low_intensity_keeps_bandwidth_the_limit_at_every_batch():
    # attention has 1 FLOP/B here, and at long contexts nothing else counts
    assert Ceilings(bandwidth=1.0, matrix_rate=1.2).binding_batch(SMALL, 100_000) is None
    assert Ceilings(bandwidth=1.0, matrix_rate=0.9).binding_batch(SMALL, 100_000) is not None


@pytest.mark.parametrize("way", [SMALL.decode, SMALL.prefill])
def test_refusals(way):
    with pytest.raises(ValueError, match="context must be at least 1 token, got 0"):
        way(0)
    with pytest.raises(ValueError, match="batch must be at least 1, got -2"):
        way(4, batch=-2)
