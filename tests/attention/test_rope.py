"""Turning by position: the laws of a rotation, and that what was read off each family is that family's own."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.capture import capture
from kvprobe.attention.layers import body_of
from kvprobe.attention.rope import Rope
from kvprobe.attention.seam import attending, rope_of
from kvprobe.errors import UnsupportedModelError
from support.tiny import HOOKED, tiny_ids, tiny_model

WITHOUT_ROPE = ("gpt2", "opt")
ROTARY = tuple(family for family in HOOKED if family not in WITHOUT_ROPE)

INV_FREQ = torch.tensor([1.0, 0.3, 0.01])
KINDS = [
    Rope(INV_FREQ),
    Rope(INV_FREQ, interleaved=True),
    Rope(INV_FREQ, start=2),
    Rope(INV_FREQ, start=2, interleaved=True),
]
kinds = pytest.mark.parametrize("rope", KINDS, ids=["halves", "interleaved", "halves at 2", "interleaved at 2"])
places = st.integers(-300, 300)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def test_a_quarter_turn_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    quarter, half = math.pi / 2, math.pi
    halves = Rope(torch.tensor([quarter, half])).turn(x, torch.tensor(1))
    # (1, 3) by 90 degrees is (-3, 1); (2, 4) by 180 degrees is (-2, -4)
    close(halves.flatten(), torch.tensor([-3.0, -2.0, 1.0, -4.0]))
    pairs = Rope(torch.tensor([quarter, half]), interleaved=True).turn(x, torch.tensor(1))
    # (1, 2) by 90 degrees is (-2, 1); (3, 4) by 180 degrees is (-3, -4)
    close(pairs.flatten(), torch.tensor([-2.0, 1.0, -3.0, -4.0]))
    last = Rope(torch.tensor([quarter]), start=2).turn(x, torch.tensor(1))
    close(last.flatten(), torch.tensor([1.0, 2.0, -4.0, 3.0]))
    close(Rope(torch.tensor([quarter])).turn(x, torch.tensor(-1)).flatten(), torch.tensor([2.0, -1.0, 3.0, 4.0]))


@kinds
@settings(max_examples=20, deadline=None)
@given(a=places, b=places)
def test_two_turns_are_one_turn_by_their_sum(rope: Rope, a: int, b: int) -> None:
    x = draw(1, 2, 3, 9)
    twice = rope.turn(rope.turn(x, torch.tensor(a)), torch.tensor(b))
    # 300 positions of one radian in float32: angles are right to 2e-5
    close(twice, rope.turn(x, torch.tensor(a + b)), 1e-4)


@kinds
@settings(max_examples=20, deadline=None)
@given(a=places)
def test_turning_back_gives_it_back(rope: Rope, a: int) -> None:
    x = draw(1, 2, 3, 9)
    close(rope.turn(rope.turn(x, torch.tensor(a)), torch.tensor(-a)), x, 3e-6)


@kinds
@settings(max_examples=20, deadline=None)
@given(query_at=places, key_at=places, shift=places)
def test_scores_depend_on_the_distance_alone(rope: Rope, query_at: int, key_at: int, shift: int) -> None:
    query, key = draw(1, 1, 1, 9), draw(1, 1, 1, 9, seed=1)

    def score(i: int, j: int) -> Tensor:
        return (rope.turn(query, torch.tensor(i)) * rope.turn(key, torch.tensor(j))).sum()

    close(score(query_at + shift, key_at + shift), score(query_at, key_at), 1e-3)


@kinds
def test_a_turn_keeps_the_norm_and_moves_only_its_own_components(rope: Rope) -> None:
    x = draw(2, 2, 3, 9)
    turned = rope.turn(x, torch.tensor(5))
    close(turned.norm(dim=-1), x.norm(dim=-1))
    mine = torch.zeros(9, dtype=torch.bool)
    mine[rope.start : rope.start + 6] = True
    assert rope.rotary_dim == 6
    assert torch.equal(turned[..., ~mine], x[..., ~mine])
    assert (turned[..., mine] != x[..., mine]).all()
    assert torch.equal(rope.turn(x, torch.tensor(0)), x)


@kinds
def test_by_may_differ_by_place_and_by_row(rope: Rope) -> None:
    x = draw(2, 3, 4, 9)
    by = torch.tensor([[0, 1, 2, 3], [7, -5, 40, 0]])
    turned = rope.turn(x, by)
    for row in range(2):
        close(turned[row], rope.turn(x[row : row + 1], by[row])[0], 0)
        for place in range(4):
            one = x[row : row + 1, :, place : place + 1]
            close(turned[row, :, place], rope.turn(one, by[row, place])[0, :, 0], 0)


def test_interleaved_is_halves_with_the_components_permuted() -> None:
    x, by = draw(1, 2, 3, 6), torch.tensor([1, 4, 9])
    order = [0, 2, 4, 1, 3, 5]  # even components first, odd ones after
    close(Rope(INV_FREQ, interleaved=True).turn(x, by)[..., order], Rope(INV_FREQ).turn(x[..., order], by), 0)
    assert not torch.allclose(Rope(INV_FREQ, interleaved=True).turn(x, by), Rope(INV_FREQ).turn(x, by))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@kinds
def test_half_precision_is_turned_in_float32(rope: Rope, dtype: torch.dtype) -> None:
    by = torch.tensor([1000, 4001])  # neither bfloat16 nor float16 holds 4001
    for head_dim in {9, rope.start + 6}:
        x = draw(1, 1, 2, head_dim).to(dtype)
        turned = rope.turn(x, by)
        assert turned.dtype == dtype
        assert torch.equal(turned, rope.turn(x.float(), by).to(dtype))


def values_alone(call: AttentionCall) -> Tensor:
    # whatever the weights: with one token repeated every position then computes the same, sink logits or not
    return call.value.repeat_interleave(call.n_heads // call.n_kv_heads, dim=1)


def hush_linear_layers(model: Any) -> None:
    for layer in getattr(body_of(model), "layers", []):
        if hasattr(layer, "linear_attn"):  # it counts, so its output depends on the position
            layer.linear_attn.register_forward_hook(lambda module, given, output: torch.zeros_like(output))


@pytest.mark.parametrize("offset", [0, 100])
@pytest.mark.parametrize("family", ROTARY)
def test_keys_of_one_token_repeated_are_all_equal_when_turned_back(family: str, offset: int) -> None:
    model, length = tiny_model(family), 40
    hush_linear_layers(model)
    positions = torch.arange(offset, offset + length)
    keys, back, again = {}, {}, {}

    def watch(call: AttentionCall) -> Tensor:
        keys[call.layer] = call.key
        back[call.layer] = call.rotate(call.key, -positions)
        again[call.layer] = call.rotate(back[call.layer], positions)
        return values_alone(call)

    with torch.no_grad(), attending(model, watch):
        model(torch.full((2, length), 7), position_ids=positions.expand(2, -1), use_cache=False)
    assert sorted(back) == sorted(rope_of(model))
    for layer in back:
        spread = (keys[layer] - keys[layer][:, :, :1]).abs().amax()
        assert spread > 0.1, f"layer {layer}: nothing was turned in the first place"
        close(back[layer], back[layer][:, :, :1].expand_as(back[layer]), 2e-5)
        close(again[layer], keys[layer], 2e-5)


@pytest.mark.parametrize(
    ("family", "before_rope"),
    [
        ("llama", "k_proj"),
        ("mistral", "k_proj"),
        ("qwen2", "k_proj"),
        ("phi", "k_proj"),
        ("gemma2", "k_proj"),
        ("qwen3", "k_norm"),
        ("gemma3_text", "k_norm"),
        ("qwen3_next", "k_norm"),
    ],
)
def test_keys_turned_back_are_what_the_models_own_module_gave(family: str, before_rope: str) -> None:
    model, ids = tiny_model(family), tiny_ids(20)
    made: dict[int, Tensor] = {}

    def note(index: int) -> Callable[..., None]:
        def hook(module: Any, given: Any, output: Tensor) -> None:
            made[index] = output

        return hook

    for index, layer in enumerate(body_of(model).layers):
        if hasattr(layer, "self_attn"):
            getattr(layer.self_attn, before_rope).register_forward_hook(note(index))
    seen = capture(model, ids)
    ropes = rope_of(tiny_model(family))  # a second model: finding them would run the hooks again
    assert sorted(seen.keys) == sorted(made)
    for index, key in seen.keys.items():
        want = made[index]
        if want.shape[1] == 20:  # made before heads and places changed their order
            want = want.view(1, 20, key.shape[1], -1).transpose(1, 2)
        close(ropes[index].turn(key, -torch.arange(20)), want)


def test_what_is_read_off_a_model_is_what_its_configuration_says() -> None:
    llama = rope_of(tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    assert sorted(llama) == [0, 1, 2]
    for rope in llama.values():
        # inv_freq_j = theta ** (-2j / head_dim), head_dim 8
        close(rope.inv_freq, torch.tensor([500.0 ** (-j / 4) for j in range(4)]), 1e-7)
        assert (rope.start, rope.interleaved) == (0, False)
    partial = rope_of(tiny_model("gpt_neox"))[1]  # half of head_dim 8
    assert (partial.rotary_dim, partial.start, partial.interleaved) == (4, 0, False)
    latent = rope_of(tiny_model("deepseek_v2"))[2]  # the last 4 of 8 + 4, as complex numbers
    assert (latent.rotary_dim, latent.start, latent.interleaved) == (4, 8, True)


def test_local_and_global_layers_have_each_their_own_theta() -> None:
    ropes = rope_of(tiny_model("gemma3_text"))
    local, whole = (torch.tensor([theta ** (-j / 6) for j in range(6)]) for theta in (10_000.0, 1_000_000.0))
    close(ropes[0].inv_freq, local, 1e-7)
    close(ropes[1].inv_freq, whole, 1e-7)
    close(ropes[2].inv_freq, local, 1e-7)


@pytest.mark.parametrize("family", WITHOUT_ROPE)
def test_learned_positions_cannot_be_turned(family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(UnsupportedModelError, match=rf"^family {family} has no rotary position embedding"):
        rope_of(model)
    with (
        pytest.raises(UnsupportedModelError, match=rf"^family {family} "),
        torch.no_grad(),
        attending(model, lambda call: call.attend(key=call.rotate(call.key, 1))),
    ):
        model(tiny_ids(), use_cache=False)


@pytest.mark.parametrize(
    ("family", "rope_type", "more"),
    [
        ("llama", "dynamic", {"factor": 2.0}),
        ("phi3", "longrope", {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}),
    ],
)
def test_frequencies_that_depend_on_the_length_are_refused(family: str, rope_type: str, more: dict[str, Any]) -> None:
    model = tiny_model(family, rope_parameters={"rope_type": rope_type, "rope_theta": 10000.0} | more)
    with pytest.raises(UnsupportedModelError, match=rf"^family {family} uses {rope_type} RoPE"):
        rope_of(model)


def test_a_rotation_that_is_not_known_is_refused_by_name() -> None:
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward
    # a layer that turns by the square root of the position
    rotary.forward = lambda x, position_ids: plain(x, position_ids.float().sqrt())
    with pytest.raises(UnsupportedModelError, match=r"family llama: the keys of layer 0 are not turned by a rotation"):
        rope_of(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "deepseek_v2", "gpt_oss"])
def test_a_model_in_half_precision_has_the_same_ropes(family: str, dtype: torch.dtype) -> None:
    whole, half = rope_of(tiny_model(family)), rope_of(tiny_model(family).to(dtype))
    for layer, rope in half.items():
        assert (rope.start, rope.interleaved) == (whole[layer].start, whole[layer].interleaved)
        torch.testing.assert_close(rope.inv_freq.float(), whole[layer].inv_freq, rtol=1e-2, atol=0)


def test_the_ropes_are_found_while_another_block_runs() -> None:
    model, ids = tiny_model("llama"), tiny_ids()
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        # turning queries and keys alike changes no score
        with attending(model, lambda call: call.attend(query=call.rotate(call.query, 9), key=call.rotate(call.key, 9))):
            turned = model(ids, use_cache=False).logits
    close(turned, plain)
