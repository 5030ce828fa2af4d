"""Families of whom one thing is special, each held against transformers itself: indexers, two attentions a layer,
layers without position encoding, sines in a table, towers for images; and what is not known is refused by name."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvprobe.attention import rope_finding
from kvprobe.attention.arguments import read_call
from kvprobe.attention.call import AttentionCall
from kvprobe.attention.capture import capture
from kvprobe.attention.masks import window_keep
from kvprobe.attention.seam import attending, rope_of
from kvprobe.errors import KvprobeError, NotIntercepted, UnsupportedModelError
from kvprobe.probes import mass, windows
from kvprobe.probes.lowrank import View
from kvprobe.probes.window_attention import attend_window, windowed
from support.tiny import SPECIAL, WINDOW, tiny_ids, tiny_model

pytestmark = pytest.mark.contract

INDEXED = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "minimax_m3_vl_text")
MULTIMODAL = ("gemma3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WITHOUT_POSITIONS = ("smollm3", "cohere2", "exaone4", "afmoe", "llama4_text")
FOUR = (*WITHOUT_POSITIONS, "longcat_flash")  # layers; the others have three
LENGTH = 24

every = pytest.mark.parametrize("family", SPECIAL)


@cache
def model_of(family: str) -> Any:
    return tiny_model(family)


def same(call: AttentionCall) -> Tensor:
    return call.attend()


@torch.no_grad()
def logits_of(model: Any, attend: Any = None, ids: Tensor | None = None, **inputs: Any) -> Tensor:
    ids = tiny_ids(LENGTH, batch=2) if ids is None else ids
    if attend is None:
        return model(ids, use_cache=False, **inputs).logits
    with attending(model, attend):
        return model(ids, use_cache=False, **inputs).logits


@torch.no_grad()
def eager(model: Any, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits and attention maps of transformers' own eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        output = model(ids, use_cache=False, output_attentions=True)
        return output.logits, output.attentions
    finally:
        model.set_attn_implementation(before)


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@every
def test_logits_maps_and_masses_are_those_of_eager_attention(family: str) -> None:
    model, ids = model_of(family), tiny_ids(LENGTH, batch=2)
    logits, maps = eager(model, ids)
    # sums in another order: sdpa's own logits differ by as much
    close(logits_of(model, same), logits, 1e-5)
    seen = capture(model, ids, maps=True)
    assert sorted(seen.keys) == sorted(seen.maps) == list(range(4 if family in FOUR else 3))
    measured = mass.measure(model, ids, queries_from=5, positions=True)
    for layer, theirs in enumerate(maps):
        close(seen.maps[layer], theirs, 1e-5)
        close(measured.token0[layer], theirs[:, :, 5:, 0].mean((0, 2)), 1e-5)
        close(measured.share[layer], theirs[:, :, 5:].mean((0, 1, 2)), 1e-5)  # type: ignore[index]


@pytest.mark.parametrize("family", [family for family in SPECIAL if family != "hy_v4"])
def test_logits_are_those_of_sdpa_bit_for_bit(family: str) -> None:
    model = model_of(family)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits_of(model, same), logits_of(model))


@every
def test_a_layer_that_is_silenced_changes_every_logit(family: str) -> None:
    model = model_of(family)
    plain = logits_of(model)
    for layer in range(4 if family in FOUR else 3):
        silenced = logits_of(model, lambda call, at=layer: call.attend() * (call.layer != at))
        assert (silenced - plain).abs().amax(-1).min() > 1e-5


# --- keys chosen by an indexer ---


@pytest.mark.parametrize("family", INDEXED)
def test_no_query_sees_more_keys_than_its_indexer_chose(family: str) -> None:
    # 4 keys, or two blocks of 4 keys, at most; a dense layer of MiniMax-M3 sees all
    most = 8 if family == "minimax_m3_vl_text" else 4
    sees = {}

    def watch(call: AttentionCall) -> Tensor:
        sees[call.layer] = call.keep.expand(2, -1, LENGTH, -1).sum(-1)
        return call.attend()

    logits_of(model_of(family), watch)
    for layer, n in sees.items():
        dense = family == "minimax_m3_vl_text" and layer == 0
        assert int(n.max()) == (LENGTH if dense else most)
        assert torch.equal(n[..., 0], torch.ones_like(n[..., 0]))


@pytest.mark.parametrize("n_sink", [0, 2])
@pytest.mark.parametrize("family", INDEXED)
def test_a_window_over_chosen_keys_is_a_mask(family: str, n_sink: int) -> None:
    # an indexer may choose nothing of the window: then the query sees sinks alone, or nothing
    model = model_of(family)
    keep = window_keep(LENGTH, window=3, n_sink=n_sink)
    masked = logits_of(model, lambda call: call.attend(keep=call.keep & keep))
    close(logits_of(model, windowed(window=3, sinks=range(n_sink))), masked, 1e-5)
    assert (masked - logits_of(model)).abs().max() > 1e-2


# --- what is not known ---


@pytest.mark.parametrize("name", ["head_mask", "block_table", "mystery"])
def test_an_argument_that_is_not_known_is_refused_by_name(name: str) -> None:
    model = tiny_model("llama")
    text = rf"^family llama: attention is given {name}, which kvprobe does not honour in layer 0 \(LlamaAttention\)"
    with pytest.raises(NotIntercepted, match=text):
        logits_of(model, same, **{name: torch.ones(1)})
    assert torch.equal(logits_of(model, same, **{name: None}), logits_of(model))


@pytest.mark.parametrize("given", [{"dropout": 0.1}, {"cu_seq_lens_q": torch.tensor([0, 2, 4])}])
def test_what_a_kernel_would_honour_is_refused(given: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotIntercepted, match=f"family odd: attention is given {next(iter(given))}"):
        read_call("odd", nn.Identity(), 0, x, x, x, None, given, flash=True)
    # sdpa and eager attention, too, read no lengths
    known = {name: value for name, value in given.items() if name != "dropout"} | {"dropout": 0.0}
    assert torch.equal(read_call("odd", nn.Identity(), 0, x, x, x, None, known).attend()[:, :, 0], x[:, :, 0])


class Mixer(nn.Module):
    """A layer's attention under a name that says nothing, and round the interface."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden_states * 0.5, None


@pytest.mark.parametrize("kind", ["full_attention", "brand_new_attention"])
def test_a_layer_of_any_type_is_to_be_reached(kind: str) -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", kind, "full_attention"]  # which Llama itself does not read
    assert torch.equal(logits_of(model, same), logits_of(model))
    assert sorted(capture(model, tiny_ids()).keys) == [0, 1, 2]
    model.model.layers[1].self_attn = Mixer()
    for use in (lambda: logits_of(model, same), lambda: capture(model, tiny_ids())):
        with pytest.raises(NotIntercepted, match=r"^family llama: layer 1 \(LlamaDecoderLayer\) does not go through"):
            use()


def test_capture_of_a_layer_that_never_attends_is_an_error() -> None:
    model = tiny_model("llama")
    model.model.layers[2].forward = lambda hidden_states, *_, **__: hidden_states
    assert sorted(capture(model, tiny_ids()).keys) == [0, 1]
    with pytest.raises(NotIntercepted, match=r"layer 2 \(LlamaAttention\)"):
        capture(model, tiny_ids(), layers=[1, 2])
    with pytest.raises(NotIntercepted, match=r"layer 2 \(LlamaAttention\)"):
        capture(model, tiny_ids(), layers=[1], maps=[2])


def test_layers_that_attend_twice_cannot_be_told_apart() -> None:
    model = tiny_model("llama")
    model.model.layers[1] = model.model.layers[0]
    assert torch.equal(logits_of(model, same), logits_of(model))
    for use in (lambda: capture(model, tiny_ids()), lambda: mass.measure(model, tiny_ids(), queries_from=1)):
        with pytest.raises(NotIntercepted, match="family llama: layer 0 attends more than once in a forward"):
            use()


def test_masks_reach_a_family_without_sdpa_as_it_knows_them() -> None:
    # HY-V4 has only eager attention; a mask of its own kind is additive
    calls = []

    def watch(call: AttentionCall) -> Tensor:
        calls.append(call.mask)
        return call.attend()

    logits_of(model_of("hy_v4"), watch)
    assert all(mask is not None and mask.dtype == torch.bool for mask in calls)


# --- towers for images ---


@pytest.mark.parametrize("family", MULTIMODAL)
def test_only_the_layers_that_read_text_are_expected(family: str) -> None:
    model = tiny_model(family)
    # the tower for images has five layers, and is never called on text
    text = model.get_decoder()
    text.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states * 0.5, None)
    with pytest.raises(NotIntercepted, match=rf"^family {family}: layer 1 \(\w+Attention\) does not go through"):
        logits_of(model, same)
    with pytest.raises(ValueError, match=r"layer 3 holds no keys and values; those that do are \[0, 1, 2\]"):
        capture(model, tiny_ids(), layers=[3])


def test_an_image_is_read_by_the_plain_tower_and_its_tokens_by_the_block() -> None:
    model = tiny_model("gemma3", image_token_id=90, boi_token_index=91, eoi_token_index=92)
    ids = tiny_ids(LENGTH) % 80 + 3
    ids[0, 4:8] = 90
    inputs = {"pixel_values": torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))}
    inputs["token_type_ids"] = (ids == 90).long()
    calls: list[AttentionCall] = []

    def watch(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.attend()

    plain = logits_of(model, None, ids, **inputs)
    assert torch.equal(logits_of(model, watch, ids, **inputs), plain)
    assert [call.layer for call in calls] == [0, 1, 2]
    # tokens of one image see each other in both directions
    assert bool(calls[1].keep[0, 0, 4:8, 4:8].all())
    assert (plain - logits_of(model, None, ids % 80)).abs().max() > 1e-3


# --- positions ---


@pytest.mark.parametrize("family", WITHOUT_POSITIONS)
def test_where_keys_do_not_move_the_rotation_is_the_identity(family: str) -> None:
    model = model_of(family)
    assert [rope.rotary_dim for _, rope in sorted(rope_of(model).items())] == [8, 8, 8, 0]
    calls = {}

    def watch(call: AttentionCall) -> Tensor:
        calls[call.layer] = call
        return call.attend()

    logits_of(model, watch)
    assert torch.equal(calls[3].rotate(calls[3].key, 17), calls[3].key)
    assert (calls[0].rotate(calls[0].key, 17) - calls[0].key).abs().max() > 1e-2
    moved, kept = (
        [attend_window(calls[layer], window=4, sinks=[0, 1], by_slot=by_slot) for by_slot in (True, False)]
        for layer in (0, 3)
    )
    close(kept[0], kept[1], 0)
    if family == "smollm3":  # a window of its own hides the sinks of the others' local layers
        assert (moved[0] - moved[1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", WITHOUT_POSITIONS)
def test_half_precision_tells_unmoved_keys_from_turned_ones(family: str) -> None:
    ropes = rope_of(tiny_model(family).to(torch.bfloat16))
    assert [rope.rotary_dim for _, rope in sorted(ropes.items())] == [8, 8, 8, 0]


@pytest.mark.parametrize(("family", "weight"), [("smollm3", "k_proj"), ("gptj", "k_proj")])
def test_keys_before_their_positions_are_the_projections(family: str, weight: str) -> None:
    model, made = tiny_model(family), {}
    layers = model.model.layers if family == "smollm3" else model.transformer.h
    for index, layer in enumerate(layers):
        attention = layer.self_attn if family == "smollm3" else layer.attn
        getattr(attention, weight).register_forward_hook(lambda _, __, out, index=index: made.update({index: out}))
    view = View.on(tiny_model(family), of="k", stage="pre_rope")
    matrices = {}

    def watch(call: AttentionCall) -> Tensor:
        matrices[call.layer] = view.matrix(call)
        return call.attend()

    logits_of(model, watch)
    assert sorted(matrices) == sorted(made)
    for layer, matrix in matrices.items():
        close(matrix, made[layer], 1e-5)


@pytest.mark.parametrize("family", ["gptj", "codegen"])
def test_gptj_turns_four_of_eight_components_in_pairs(family: str) -> None:
    for rope in rope_of(model_of(family)).values():
        # inv_freq_j = 10000 ** (-2j / 4)
        close(rope.inv_freq, torch.tensor([1.0, 0.01]), 1e-9)
        assert (rope.start, rope.interleaved) == (0, True)
    short = tiny_model(family, n_positions=32)
    assert rope_of(short)[0].rotary_dim == 4
    check = {"windows": [4], "sinks": [1], "positions": "cache", "score_from": 8}
    windows.check(short, 32, **check)
    with pytest.raises(KvprobeError, match=r"33 tokens are more than the 32 positions .*; ask for at most tokens 32$"):
        windows.check(short, 33, **check)


def test_nanochat_turns_the_other_way() -> None:
    # inv_freq_j = theta ** (-2j / 8), and minus that
    for rope in rope_of(model_of("nanochat")).values():
        assert bool((rope.inv_freq < 0).all())
        close(rope.inv_freq[0], torch.tensor(-1.0), 1e-7)


def test_frequencies_that_are_not_found_are_not_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_finding, "_tables", lambda model: [])
    llama, gpt2 = tiny_model("llama"), tiny_model("gpt2")
    with pytest.raises(UnsupportedModelError, match=r"^family llama turns its keys by positions with frequencies that"):
        rope_of(llama)
    assert rope_finding.rotates(llama)
    assert not rope_finding.rotates(gpt2)


def test_llama4_gives_no_other_position_to_a_query_that_is_scaled_by_its_own() -> None:
    scaled, even = (tiny_model("llama4_text", floor_scale=16, attn_temperature_tuning=tuned) for tuned in (True, False))
    # log1p(floor((position + 1) / 16)) is above 0 from position 15 on
    moved = (logits_of(scaled) - logits_of(even)).abs().amax((0, 2)) > 1e-6
    assert moved.tolist() == [False] * 15 + [True] * 9
    check = {"windows": [4], "sinks": [1], "positions": "cache", "score_from": 8}
    windows.check(scaled, 15, **check)
    with pytest.raises(UnsupportedModelError, match=r"positions cache: family llama4_text scales queries by .* 15 on"):
        windows.check(scaled, 16, **check)
    windows.check(even, 24, **check)


def test_llama4s_chunks_are_what_keep_says() -> None:
    keep = {}

    def watch(call: AttentionCall) -> Tensor:
        keep[call.layer] = call.keep
        return call.attend()

    logits_of(model_of("llama4_text"), watch)
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    same_chunk = (key <= query) & (query // WINDOW == key // WINDOW)
    for layer in range(4):
        assert torch.equal(keep[layer][0, 0], same_chunk if layer < 3 else key <= query)


def test_longcat_has_a_row_for_each_of_its_attentions() -> None:
    model, ids = model_of("longcat_flash"), tiny_ids(LENGTH)
    measured = mass.measure(model, ids, queries_from=4, positions=True)
    assert measured.layers == (0, 1, 2, 3)
    assert sorted(rope_of(model)) == [0, 1, 2, 3]
    cut = windowed(window=4, sinks=[0], by_slot=True)
    assert (logits_of(model, cut) - logits_of(model)).abs().max() > 1e-3
