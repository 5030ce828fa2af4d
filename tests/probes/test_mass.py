"""Laws of attention mass, and its agreement with maps that another road computed."""

import math

import pytest
import torch

from kvprobe.attention.capture import capture
from kvprobe.errors import KvprobeError
from kvprobe.probes import mass
from support.tiny import HOOKED, WINDOW, tiny_model

LENGTH = 24


def ids(seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def eager_maps(model, input_ids):
    """Attention maps as transformers' own eager attention returns them, by layer."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(input_ids, use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("family", [family for family in HOOKED if family != "qwen3_next"])
def test_mass_equals_the_mean_of_eager_maps(family):
    model, queries_from = tiny_model(family), 5
    measured = mass.measure(model, ids(batch=2), queries_from=queries_from, positions=True)
    for layer, attention in zip(measured.layers, eager_maps(model, ids(batch=2)), strict=True):
        scored = attention[:, :, queries_from:]
        torch.testing.assert_close(measured.token0[layer], scored[..., 0].mean((0, 2)), atol=1e-5, rtol=0)
        torch.testing.assert_close(measured.share[layer], scored.mean((0, 1, 2)), atol=1e-5, rtol=0)


def test_a_hybrid_model_reports_only_the_layers_that_attend():
    model = tiny_model("qwen3_next")
    measured = mass.measure(model, ids(), queries_from=4)
    maps = capture(model, ids(), maps=True).maps
    assert measured.layers == (1, 2)
    for row, layer in enumerate(measured.layers):
        torch.testing.assert_close(measured.token0[row], maps[layer][:, :, 4:, 0].mean((0, 2)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_zeroed_queries_give_exactly_the_uniform_reference(family):
    model, queries_from = tiny_model(family), 3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
            elif "c_attn.weight" in name:
                parameter[:, :32] = 0
            elif "c_attn.bias" in name:
                parameter[:32] = 0
    measured = mass.measure(model, ids(), queries_from=queries_from)
    by_hand = sum(1 / (i + 1) for i in range(queries_from, LENGTH)) / (LENGTH - queries_from)
    assert measured.uniform.tolist() == pytest.approx([by_hand] * 3, abs=1e-7)
    torch.testing.assert_close(measured.token0, torch.full_like(measured.token0, by_hand), atol=1e-6, rtol=0)


def test_the_uniform_reference_of_a_local_layer_is_zero_once_token_0_is_out_of_sight():
    measured = mass.measure(tiny_model("gemma3_text"), ids(), queries_from=4)
    # queries 4 to 7 see token 0 among 5 to 8 keys; from query 8 on the window of 8 has passed it
    local = sum(1 / (i + 1) for i in range(4, WINDOW)) / (LENGTH - 4)
    full = sum(1 / (i + 1) for i in range(4, LENGTH)) / (LENGTH - 4)
    assert measured.uniform.tolist() == pytest.approx([local, full, local], abs=1e-7)


def test_a_planted_key_of_large_norm_on_token_0_is_found():
    model = tiny_model("gpt2")
    planted = ids()
    planted[0, 0] = 95
    assert (planted[0, 1:] != 95).all()
    with torch.no_grad():
        before = mass.token0_mass(model, planted, queries_from=8)
        # only token 95 has this direction, and every query looks along it: position 0 is the sink of layer 0
        model.transformer.wpe.weight[0] = 0
        model.transformer.wpe.weight[0, 0] = 60.0
        attention = model.transformer.h[0].attn.c_attn
        attention.bias[:32] = 3.0
        attention.weight[:, 32:64] = 0
        attention.weight[0, 32:64] = 3.0
        after = mass.token0_mass(model, planted, queries_from=8)
    assert before[0].max() < 0.5
    assert after[0].min() > 0.99


def test_queries_before_the_first_counted_do_not_count():
    model, maps = tiny_model("llama"), None
    maps = eager_maps(model, ids())
    for queries_from in (0, 1, LENGTH - 1):
        got = mass.token0_mass(model, ids(), queries_from=queries_from)
        wanted = torch.stack([m[0, :, queries_from:, 0].mean(-1) for m in maps])
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_query_0_gives_all_its_attention_to_itself():
    model = tiny_model("llama")
    only = mass.measure(model, ids()[:, :1], queries_from=0)
    assert only.token0.tolist() == [[1.0] * 4] * 3
    assert only.uniform.tolist() == [1.0] * 3


def test_sink_rate_counts_heads_strictly_above_epsilon():
    measured = mass.Mass(
        layers=(0, 4),
        queries_from=0,
        token0=torch.tensor([[0.25, 0.5, 0.75, 0.5], [0.0, 0.1, 0.2, 1.0]]),
        uniform=torch.tensor([0.1, 0.2]),
    )
    assert measured.sink_rate(0.5).tolist() == [0.25, 0.25]
    assert measured.sink_rate(0.0).tolist() == [1.0, 0.75]


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_shares_of_all_positions_sum_to_one_and_hold_token_0(family):
    measured = mass.measure(tiny_model(family), ids(), queries_from=6, positions=True)
    torch.testing.assert_close(measured.share.sum(-1), torch.ones(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(measured.share[:, 0], measured.token0.mean(-1), atol=1e-6, rtol=0)


def test_learned_sink_logits_take_their_part_of_the_mass():
    measured = mass.measure(tiny_model("gpt_oss"), ids(), queries_from=6, positions=True)
    assert (measured.share.sum(-1) < 0.999).all()


@pytest.mark.parametrize("queries_from", [-1, LENGTH])
def test_queries_from_outside_the_passage_is_refused_with_the_range(queries_from):
    with pytest.raises(ValueError, match=rf"between 0 and {LENGTH - 1} for tokens {LENGTH}, got {queries_from}"):
        mass.measure(tiny_model("llama"), ids(), queries_from=queries_from)


def test_weights_that_are_not_finite_are_reported_by_layer_and_dtype():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = math.nan
    with pytest.raises(KvprobeError, match="not finite in layer 1 at float32"):
        mass.measure(model, ids(), queries_from=1)


@pytest.mark.smollm2
def test_on_smollm2_mass_equals_eager_maps_and_the_sink_is_where_it_is_known(smollm2):
    from kvprobe.text import passages, texts

    passage = passages.encode(smollm2.tokenizer, texts.read_text("bundled"), n_tokens=256)
    measured = mass.measure(smollm2.model, passage.ids[None], queries_from=64, positions=True)
    maps = eager_maps(smollm2.model, passage.ids[None])
    eager = torch.stack([m[0, :, 64:, 0].mean(-1) for m in maps])
    torch.testing.assert_close(measured.token0, eager, atol=1e-4, rtol=0)
    longer = passages.encode(smollm2.tokenizer, texts.read_text("bundled"), n_tokens=1024)
    by_layer = mass.token0_mass(smollm2.model, longer.ids[None]).mean(-1)
    assert by_layer[12:].min() > 0.27
    assert by_layer[12:].max() < 0.62
    repeated = passages.control(passage, "repeat", smollm2.tokenizer, seed=0)
    without = mass.measure(smollm2.model, repeated.ids[None], queries_from=64)
    # under RoPE identical tokens have identical values: no token can be told from another, and none is a sink
    assert without.token0.mean(-1).max() < 0.05
