"""The memory bill against published figures, closed forms worked by hand, and what transformers really holds."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.errors import UnsupportedModelError
from kvprobe.shape import published
from kvprobe.shape.cache_bytes import Amount, Bill, LayerCache, bill, describe
from kvprobe.shape.levers import levers, rows
from kvprobe.shape.parameters import attention_parameters
from kvprobe.shape.spec import Spec

KIB, MIB = 1024, 1024**2


def spec_of(name):
    return published.look_up(name).spec


def lever_of(name, spec, dtype="bfloat16", **settings):
    (found,) = [lever for lever in levers(spec, dtype, **settings) if lever.name == name]
    return found.bill


# bytes of one token at 16 bits: as published, and 2 (K and V) × layers × KV heads × head_dim × 2 B by hand
PUBLISHED_16_BIT = {
    "gpt2": (36 * KIB, 2 * 12 * 12 * 64 * 2),
    "gpt2-medium": (96 * KIB, 2 * 24 * 16 * 64 * 2),
    "gpt2-large": (180 * KIB, 2 * 36 * 20 * 64 * 2),
    "gpt2-xl": (300 * KIB, 2 * 48 * 25 * 64 * 2),
    "llama-2-7b": (512 * KIB, 2 * 32 * 32 * 128 * 2),
    "llama-2-13b": (800 * KIB, 2 * 40 * 40 * 128 * 2),
    "llama-2-70b": (320 * KIB, 2 * 80 * 8 * 128 * 2),
    "llama-3-8b": (128 * KIB, 2 * 32 * 8 * 128 * 2),
    "mistral-7b": (128 * KIB, 2 * 32 * 8 * 128 * 2),
    "tinyllama": (22 * KIB, 2 * 22 * 4 * 64 * 2),
    "smollm2-135m": (22.5 * KIB, 2 * 30 * 3 * 64 * 2),
    "qwen2.5-0.5b": (12 * KIB, 2 * 24 * 2 * 64 * 2),
    "falcon-7b": (8 * KIB, 2 * 32 * 1 * 64 * 2),
    "llama-3.1-405b": (516_096, 2 * 126 * 8 * 128 * 2),
    "qwen2.5-72b": (327_680, 2 * 80 * 8 * 128 * 2),
    # MLA: one latent of 512 and a rotary key of 64, no factor 2
    "deepseek-v2": (69_120, 60 * (512 + 64) * 2),
    "deepseek-v3": (70_272, 61 * (512 + 64) * 2),
}


@pytest.mark.parametrize("name", PUBLISHED_16_BIT)
def test_bytes_of_a_token_as_published(name):
    published, by_hand = PUBLISHED_16_BIT[name]
    row = rows(spec_of(name), contexts=[1024], dtype="float16")[0]
    assert row["lever"] == "as it is"
    assert row["bytes_per_token"] == published == by_hand
    assert row["bytes"] == 1024 * published


@pytest.mark.parametrize("name", ["gpt2", "gpt-124m"])
@pytest.mark.parametrize(("context", "mib"), [(1024, 72), (2048, 144), (4096, 288)])
def test_the_memory_bill_of_gpt2_in_float32(name, context, mib):
    row = rows(spec_of(name), contexts=[context])[0]
    assert row["bytes"] == mib * MIB == 2 * 12 * 12 * 64 * context * 4
    assert row["bytes_per_token"] == 72 * KIB


@pytest.mark.parametrize(
    ("n_kv_heads", "parameters", "n_bytes"),
    [(8, 262_144, 2048), (4, 196_608, 1024), (2, 163_840, 512), (1, 147_456, 256)],
)
def test_the_gqa_module(n_kv_heads, parameters, n_bytes):
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": n_kv_heads}
    spec = Spec.from_config({"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 28} | sizes)
    assert bill(spec).next_token(7) == n_bytes == 2 * n_kv_heads * 32 * 4
    made = attention_parameters(hidden_size=256, n_heads=8, n_kv_heads=n_kv_heads, head_dim=32)
    assert made == parameters == 2 * 256 * 256 + 2 * 256 * n_kv_heads * 32


def test_the_exercise_on_llama_2_70b():
    mha, mqa = (lever_of(name, spec_of("llama-2-70b")) for name in ("as MHA, 64 KV heads", "MQA, 1 KV head"))
    gqa = bill(spec_of("llama-2-70b"), "bfloat16")
    assert [one.next_token(0) for one in (gqa, mha, mqa)] == [320 * KIB, 2560 * KIB, 40 * KIB]
    weights = 140 * 10**9  # 70 billion parameters of two bytes
    # published: 427,246 tokens, which is 427,246.09 rounded down, and 53,406 as MHA, which is 53,405.8 rounded up
    assert gqa.total(427_246) <= weights < gqa.total(427_247)
    assert gqa.outgrows(weights) == 427_246 + 1
    assert mha.outgrows(weights) == 53_406


@pytest.mark.parametrize("context", [1, 511, 512, 513, 32_768])
def test_gemma_3_grows_in_its_global_layers_alone(context):
    as_it_is = bill(spec_of("gemma-3-270m"), "bfloat16")
    width = 2 * 1 * 256 * 2  # K and V, one head of 256, two bytes
    assert as_it_is.total(context) == width * (3 * context + 15 * min(context, 512))
    assert as_it_is.next_token(context) == width * (18 if context < 512 else 3)
    assert as_it_is.stops_at is None
    assert bill(spec_of("mistral-7b")).stops_at == 4096


def test_a_hybrid_has_a_constant_and_a_growing_part():
    as_it_is = bill(spec_of("qwen3-next-80b-a3b"), "bfloat16")
    recurrent = 32 * 128 * 128 * 4  # one key × value matrix a value head, in float32
    convolution = (2 * 16 * 128 + 32 * 128) * 4 * 2  # the last four inputs, in bfloat16
    assert as_it_is.state == 36 * (recurrent + convolution)
    assert as_it_is.next_token(9) == 12 * 2 * 2 * 256 * 2
    assert as_it_is.total(100, batch=3) == 3 * (as_it_is.state + 100 * as_it_is.next_token(0))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "qwen3_next"])
def test_the_formula_is_what_transformers_holds(family):
    import torch
    from transformers import DynamicCache

    from support.tiny import tiny_ids, tiny_model

    model = tiny_model(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tiny_ids(24, batch=2), cache=cache, use_cache=True)
    held = [
        tensor
        for layer in cache.layers
        for value in vars(layer).values()
        for tensor in (value.values() if isinstance(value, dict) else [value])
        if isinstance(tensor, torch.Tensor)
    ]
    spec = Spec.from_config(json.loads(model.config.to_json_string(use_diff=True)))
    assert bill(spec).total(24, batch=2) == sum(tensor.numel() * tensor.element_size() for tensor in held)


def test_levers_by_hand():
    spec = spec_of("gpt2")  # 12 layers, 12 heads of 64, no RoPE; 16 bits
    full = 12 * 2 * 768 * 2
    assert lever_of("as it is", spec).next_token(0) == full
    assert lever_of("GQA, 6 KV heads", spec).next_token(0) == full // 2
    assert lever_of("GQA, 3 KV heads", spec).next_token(0) == full // 4
    assert lever_of("MQA, 1 KV head", spec).next_token(0) == full // 12
    assert lever_of("latent of rank 384", spec).next_token(0) == 12 * 384 * 2
    # 768 elements are 12 groups of 64, each with a scale and a zero point of two bytes
    assert lever_of("8-bit storage", spec).next_token(0) == 12 * 2 * (768 + 12 * 4)
    assert lever_of("4-bit storage", spec).next_token(0) == 12 * 2 * (384 + 12 * 4)
    state = 12 * 64 * 64 * 4
    assert lever_of("linear, all layers", spec).total(5000) == 12 * state
    hybrid = lever_of("linear, 3 layers of 4", spec)
    assert hybrid.total(5000) == 9 * state + 5000 * full // 4
    assert [bool(layer.vectors) for layer in hybrid.layers[:5]] == [False, False, False, True, False]
    of_three = levers(replace(spec, layers=spec.layers[:3]))
    assert [lever.name for lever in of_three if lever.kind == "linear"] == ["linear, all layers"]
    windowed = lever_of("window 1,024 + 4 sinks", spec)
    assert [windowed.total(context) for context in (1027, 1028, 1029)] == [1027 * full, 1028 * full, 1028 * full]
    assert [windowed.next_token(context) for context in (1027, 1028)] == [full, 0]


def test_levers_of_special_shapes_by_hand():
    # a linear state for each of 8 KV heads, not for each of 32 query heads
    assert lever_of("linear, all layers", spec_of("llama-3-8b")).total(9) == 32 * 8 * 128 * 128 * 4
    # under RoPE a latent has a rotary key of half a head beside it
    assert lever_of("latent of rank 100", spec_of("llama-2-7b"), rank=100).next_token(0) == 32 * (100 + 64) * 2
    # undoing MLA: 128 heads, K of 128 + 64 and V of 128
    assert lever_of("without its latent", spec_of("deepseek-v2")).next_token(0) == 60 * 128 * (192 + 128) * 2
    assert lever_of("latent of rank 256", spec_of("deepseek-v2")).next_token(0) == 60 * (256 + 64) * 2
    # a layer whose own window is narrower keeps to it; a wider one is cut
    gemma = lever_of("window 700 + 4 sinks", spec_of("gemma-3-270m"), window=700)
    assert [layer.limit for layer in gemma.layers[:6]] == [512] * 5 + [704]
    assert lever_of("all layers full", spec_of("gemma-3-270m")).next_token(10**6) == 18 * 2 * 256 * 2
    # an odd width is rounded up to bytes and to groups
    assert Bill((LayerCache((65,)),), "float16", bits=4).next_token(0) == 33 + 2 * 4


@pytest.mark.parametrize("name", published.published())
def test_every_lever_changes_something_and_the_model_comes_first(name):
    found = levers(spec_of(name))
    assert [lever.kind for lever in found].count("model") == 1
    assert found[0].kind == "model"
    assert len({lever.bill for lever in found}) == len(found) == len({lever.name for lever in found})
    assert {"latent", "window", "bits", "linear"} <= {lever.kind for lever in found}


def test_only_head_counts_that_divide_the_query_heads_are_offered():
    # 9 query and 3 KV heads: neither a half nor a quarter of 3 is whole
    assert [lever.name for lever in levers(spec_of("smollm2-135m")) if lever.kind == "heads"] == ["MQA, 1 KV head"]
    # one KV head has nothing left to share
    assert not [lever for lever in levers(spec_of("falcon-7b")) if lever.kind == "heads"]


def test_relief_is_how_many_times_smaller():
    found = {row["lever"]: row["relief"] for row in rows(spec_of("llama-2-70b"), contexts=[4096], batch=3)}
    assert (found["as it is"], found["MQA, 1 KV head"], found["as MHA, 64 KV heads"]) == (1, 8, 1 / 8)


def test_equal_is_not_larger():
    growing, stopping = Bill((LayerCache((1,)),), "float16"), Bill((LayerCache((1,), limit=5),), "float16")
    assert [growing.outgrows(n_bytes) for n_bytes in (9, 10, 11)] == [5, 6, 6]
    assert [stopping.outgrows(n_bytes) for n_bytes in (8, 9, 10)] == [5, 5, None]


LAYERS = st.builds(
    LayerCache,
    vectors=st.lists(st.integers(1, 9), max_size=2).map(tuple),
    limit=st.none() | st.integers(1, 40),
    state=st.integers(0, 20),
    conv=st.integers(0, 20),
)


def test_a_vector_for_every_few_tokens_by_hand():
    # three of 10 elements for every 4 tokens, one of 7 for every token of the last 2; two bytes an element
    one = Bill((LayerCache((7,), limit=2, compressed=((4, 10), (4, 10), (4, 10))),), "float16")
    assert [one.total(context) for context in (0, 1, 2, 3, 4, 7, 8)] == [0, 14, 28, 28, 88, 88, 148]
    # a fourth of 60 bytes in each token, beside the 14 of those that still fit the window
    assert [one.next_token(context) for context in (0, 2, 3)] == [29, 15, 15]
    assert one.stops_at is None
    assert [one.outgrows(n_bytes) for n_bytes in (27, 28, 87, 88)] == [2, 4, 4, 8]


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=4).map(tuple),
    n_bytes=st.integers(1, 1000),
    batch=st.integers(1, 3),
    bits=st.sampled_from([None, 4, 8]),
)
def test_outgrows_is_the_first_context_beyond(layers, n_bytes, batch, bits):
    one = Bill(layers, "float16", bits)
    first = one.outgrows(n_bytes, batch=batch)
    beyond = [context for context in range(600) if one.total(context, batch=batch) > n_bytes]
    assert first == (beyond[0] if beyond else None)


@given(layers=st.lists(LAYERS, min_size=1, max_size=4).map(tuple), context=st.integers(0, 60))
def test_a_cache_is_its_state_and_its_tokens_until_it_stops(layers, context):
    one = Bill(layers)
    assert one.total(context) == one.state + sum(one.next_token(before) for before in range(context))
    if one.stops_at is not None:
        assert one.next_token(one.stops_at) == 0
        assert one.stops_at == 0 or one.next_token(one.stops_at - 1) > 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"contexts": [0]}, "context must be at least 1, got 0"),
        ({"contexts": [1024, -5]}, "context must be at least 1, got -5"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"n_sink": -1}, "n_sink must be at least 0, got -1"),
        ({"rank": 0}, "rank must be between 1 and 1536, got 0"),
        ({"rank": 1537}, "rank must be between 1 and 1536, got 1537"),
        ({"dtype": "int3"}, "dtype must be one of float32, bfloat16, float16, got 'int3'"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(settings, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        rows(spec_of("gpt2"), **({"contexts": [1024]} | settings))


def test_linear_layers_of_an_unknown_shape_are_refused_by_name():
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 97}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    with pytest.raises(UnsupportedModelError, match=r"linear-attention layers \(layer_types\).* family unheard_of"):
        Spec.from_config({"model_type": "unheard_of"} | sizes | kinds)


def test_what_grows_and_what_stops_in_words():
    assert describe(spec_of("gemma-3-270m")) == (
        "K and V of 1 of 4 heads (MQA), 256 wide; of 18 layers 3 keep every token, 15 stop growing at 512 tokens"
    )
    assert describe(spec_of("deepseek-v2")).startswith("one latent of 512 and a rotary key of 64 a token (MLA)")
    assert describe(spec_of("qwen3-next-80b-a3b")).endswith("12 keep every token, 36 keep a state of constant size")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (23_040, "22.5 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (1_342_177_280, "1.25 GiB"),
        (137_953_296_384, "128 GiB"),
        (3 * 2**52, "12,288 TiB"),
    ],
)
def test_amounts_in_binary_units(n_bytes, text):
    assert str(Amount(n_bytes)) == text
