from types import SimpleNamespace

import pytest
import torch

from kvprobe.bench.cache_memory import fused_views, rows
from kvprobe.bench.storages import Held, allocated, measure, storage_bytes, tensors_of
from kvprobe.caches.full import FullCache
from kvprobe.caches.rolling import RollingCache
from kvprobe.models.loading import Loaded
from kvprobe.shape.layers import Layer
from kvprobe.shape.spec import Spec
from support.tiny import tiny_model

# one query head's width is 8 in all of them
HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}


def loaded(family, **overrides):
    model = tiny_model(family, **overrides)
    spec = Spec.from_config(model.config.to_dict())
    settings = {"tokenizer": None, "name": family, "source": "test", "revision": "none", "device": "cpu"}
    return Loaded(model=model, spec=spec, dtype="float32", **settings)


def by_cache(found):
    return {row["cache"]: row for row in found}


def test_storages_count_once_and_only_what_is_read_of_them_is_addressed():
    fused = torch.zeros(2, 10, 12)
    alone = torch.zeros(5, dtype=torch.int64)
    assert storage_bytes([]) == Held(0, 0)
    assert storage_bytes([alone]) == Held(40, 40)
    assert storage_bytes([fused[..., 4:8], alone]) == Held(960 + 40, 320 + 40)
    # the second overlaps the first in half
    assert storage_bytes([fused[..., 4:8], fused[..., 6:10].transpose(0, 1)]) == Held(960, 480)
    assert storage_bytes([fused[..., 4:8], fused]) == Held(960, 960)
    # one element four times
    assert storage_bytes([torch.zeros(1).expand(4)]) == Held(4, 4)
    assert storage_bytes([fused[:, ::2]]).pinned_bytes == 480


def test_two_views_of_other_widths_share_their_bytes():
    words = torch.zeros(8, dtype=torch.int32)
    assert storage_bytes([words[:2], words.view(torch.int16)[2:6]]) == Held(32, 12)


def test_tensors_are_found_wherever_they_hang():
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=one), {"values": (two,)}], count=torch.tensor(7), name="x")
    cache.layers.append({"again": one, "deep": [[three]], "itself": cache})
    assert sorted(len(tensor) for tensor in tensors_of(cache)) == [1, 2, 3]


def test_rotations_are_the_models_and_not_the_caches():
    from support.decoders import rope_decoder

    decoder = rope_decoder(n_kv_heads=2)
    cache = decoder.rolling_cache(7, n_sink=3, positions="cache")
    # two layers, K and V of 2 heads of 8 in 10 slots, and the 3 sinks' keys once more
    assert storage_bytes(tensors_of(cache)) == Held(2 * 16 * 4 * (2 * 10 + 3), 2 * 16 * 4 * (2 * 10 + 3))


@pytest.mark.parametrize("n_kv_heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", [1, 3])
def test_measured_is_the_formula_to_the_byte(n_kv_heads, batch):
    found = by_cache(rows(loaded("llama", num_key_value_heads=n_kv_heads), [20], batch=batch, window=6, n_sink=2))
    # three layers, K and V of heads of 8, float32
    token = 3 * 2 * n_kv_heads * 8 * 4
    for name, slots in {"full": 20, "rolling": 8, "hf dynamic": 20, "hf static": 20}.items():
        assert found[name]["formula_bytes"] == batch * slots * token, name
        assert found[name]["measured_bytes"] == batch * slots * token, name
        assert found[name]["pinned_bytes"] == 0, name


@pytest.mark.parametrize(("n_kv_heads", "ratio"), [(4, 1.5), (2, 2.0), (1, 3.0)], ids=HEADS)
def test_views_of_a_fused_projection_are_caught_and_their_excess_named(n_kv_heads, ratio):
    row = by_cache(rows(loaded("llama", num_key_value_heads=n_kv_heads), [20]))["fused views"]
    own = 20 * 3 * 2 * n_kv_heads * 8 * 4
    assert (row["formula_bytes"], row["measured_bytes"], row["ratio"]) == (own, ratio * own, ratio)
    # the queries: 4 heads of 8 in three layers
    assert row["pinned_bytes"] == row["excess_bytes"] == 20 * 3 * 4 * 8 * 4


def test_contiguous_copies_cure_it():
    kept = fused_views(loaded("llama").spec, 20)
    assert storage_bytes(tensors_of(kept)).pinned_bytes > 0
    assert storage_bytes(tensor.contiguous() for tensor in tensors_of(kept)).pinned_bytes == 0


def test_sliding_layers():
    # two layers of window 8, one that sees everything; K and V of 2 heads of 12
    found = by_cache(rows(loaded("gemma3_text"), [20], window=6, n_sink=2))
    token = 2 * 2 * 12 * 4
    bounded = (20 + 8 + 8) * token
    assert found["full"]["formula_bytes"] == found["full"]["measured_bytes"] == bounded
    assert found["rolling"]["formula_bytes"] == found["rolling"]["measured_bytes"] == 3 * 8 * token
    assert found["hf static"]["measured_bytes"] == bounded
    # transformers keeps 7 of 20 tokens as a view of all 20
    assert found["hf dynamic"]["measured_bytes"] == 3 * 20 * token
    assert found["hf dynamic"]["pinned_bytes"] == 2 * 13 * token


@pytest.mark.parametrize(("window", "n_sink"), [(3, 0), (6, 2), (30, 4)])
def test_rolling_formula_is_its_buffers(window, n_sink):
    spec = loaded("gemma3_text").spec
    cache = RollingCache(spec.layers, window=window, n_sink=n_sink, batch=2)
    # K and V of 2 sequences, 2 heads of 12 elements: a global layer and two that see 8 tokens
    slots = 3 * n_sink + window + 2 * min(window, 8)
    assert cache.formula_bytes == cache.nbytes == 2 * 2 * slots * 2 * 12 * 4


def test_families_that_keep_other_things_have_transformers_caches_alone():
    mla = loaded("deepseek_v3")
    assert not mla.spec.keeps_plain_kv
    assert {row["cache"] for row in rows(mla, [8])} == {"hf dynamic", "hf static"}


def test_a_measurement_on_a_cpu_is_by_storages():
    shape = [Layer(kind="full", n_kv_heads=1, head_dim=4, v_head_dim=4)] * 2
    cache, found = measure(lambda: FullCache(shape, capacity=5), "cpu")
    assert found == Held(cache.nbytes, cache.nbytes)
    assert allocated("cpu") is None


def test_refusals():
    with pytest.raises(ValueError, match="context must be at most 256, the model's positions, got 257"):
        rows(loaded("gpt2"), [8, 257])
    with pytest.raises(ValueError, match="context must be at least 1 token, got 0"):
        rows(loaded("gpt2"), [0])
