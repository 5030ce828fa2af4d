"""The seam in every family: it changes nothing by itself, what it changes is read, and it leaves no trace."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.capture import Captured, capture
from kvprobe.attention.masks import causal_keep, window_keep
from kvprobe.attention.seam import attending, family_of, rope_of
from kvprobe.bench.cache_memory import cache_argument
from kvprobe.errors import NotIntercepted, UnsupportedModelError
from support.tiny import BYPASSING, HOOKED, TESTED, WINDOW, skip_before, tiny_ids, tiny_model

pytestmark = pytest.mark.contract

every_family = pytest.mark.parametrize("family", HOOKED)
either_side = pytest.mark.parametrize("side", ["left", "right"])

# sdpa has no soft-cap and no sink logit, so their plain models are eager: equal to rounding, not bit for bit
EAGER = ("gemma2", "gpt_oss")
LOCAL = {"mistral": (0, 1, 2), "gemma2": (0, 2), "gemma3_text": (0, 2), "gpt_oss": (0, 2)}
LENGTH, N_PAD = 24, 5


@cache
def model_of(family: str) -> Any:
    """One model a family for the tests that leave it alone, which is what most of them show."""
    return tiny_model(family)


def untouched(call: AttentionCall) -> Tensor:
    return call.attend()


@torch.no_grad()
def logits_of(
    model: Any, ids: Tensor, attend: Callable[[AttentionCall], Tensor] | None = None, **inputs: Any
) -> Tensor:
    if attend is None:
        return model(ids, use_cache=False, **inputs).logits
    with attending(model, attend):
        return model(ids, use_cache=False, **inputs).logits


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def assert_plain(model: Any, got: Tensor, want: Tensor) -> None:
    assert model.config._attn_implementation == ("eager" if family_of(model) in EAGER else "sdpa")
    close(got, want, 1e-5 if family_of(model) in EAGER else 0.0)


def padded(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and positions of two rows; the first has N_PAD tokens of padding on one side."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, slice(0, N_PAD) if side == "left" else slice(LENGTH - N_PAD, None)] = 0
    return tiny_ids(LENGTH, batch=2), mask, (mask.cumsum(1) - 1).clamp(min=0)


# --- it changes nothing by itself ---


@every_family
def test_hooked_logits_equal_the_plain_models(family: str) -> None:
    model, ids = model_of(family), tiny_ids(LENGTH, batch=2)
    assert_plain(model, logits_of(model, ids, untouched), logits_of(model, ids))


@every_family
@either_side
def test_padding_is_honoured(family: str, side: str) -> None:
    model = model_of(family)
    ids, mask, positions = padded(side)
    real = mask.bool()
    inputs = {"attention_mask": mask, "position_ids": positions}
    hooked = logits_of(model, ids, untouched, **inputs)
    # what a padding query computes is nobody's business: eager spreads it over keys that it may not see
    assert_plain(model, hooked[real], logits_of(model, ids, **inputs)[real])
    other = torch.where(real, ids, (ids + 11) % 97)
    close(logits_of(model, other, untouched, **inputs)[real], hooked[real])
    alone = logits_of(model, ids[:1][real[:1]][None], untouched)
    close(hooked[:1][real[:1]][None], alone, 2e-5)
    seen = keeps(model, ids, **inputs)
    assert all(not keep[0, 0, :, ~real[0]].any() for keep in seen.values())
    assert all(keep[1, 0].diagonal().all() for keep in seen.values())


@every_family
def test_rows_of_a_batch_do_not_see_each_other(family: str) -> None:
    model, ids = model_of(family), tiny_ids(LENGTH, batch=3)
    whole = logits_of(model, ids, untouched)
    for row in range(3):
        close(logits_of(model, ids[row : row + 1], untouched)[0], whole[row])


@every_family
def test_a_future_token_changes_no_past_logit(family: str) -> None:
    model, ids = model_of(family), tiny_ids(LENGTH)
    other = ids.clone()
    other[0, 15] = (ids[0, 15] + 11) % 97
    for attend in (untouched, lambda call: call.attend_with_lse()[0], lambda call: call.attend(keep=call.keep)):
        before, after = logits_of(model, ids, attend), logits_of(model, other, attend)
        close(after[:, :15], before[:, :15])
        assert (after[:, 15:] - before[:, 15:]).abs().amax(-1).min() > 1e-3


def keeps(model: Any, ids: Tensor, **inputs: Any) -> dict[int, Tensor]:
    seen: dict[int, Tensor] = {}

    def watch(call: AttentionCall) -> Tensor:
        seen[call.layer] = call.keep
        return call.attend()

    logits_of(model, ids, watch, **inputs)
    return seen


@every_family
def test_a_models_own_window_is_what_keep_says(family: str) -> None:
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    for layer, keep in keeps(model_of(family), tiny_ids(LENGTH)).items():
        reach = WINDOW if layer in LOCAL.get(family, ()) else LENGTH
        assert torch.equal(keep[0, 0], (key <= query) & (query - key < reach))


def test_layers_of_windows_reach_no_further_than_their_sum() -> None:
    model, ids = model_of("mistral"), tiny_ids(40)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 11) % 97
    moved = (logits_of(model, ids, untouched) - logits_of(model, other, untouched)).abs().amax(-1)[0]
    reach = 3 * (WINDOW - 1)
    assert moved[: reach + 1].min() > 0
    assert moved[reach + 1 :].max() == 0


@pytest.mark.parametrize("additive_mask", [True, False], ids=["additive", "boolean"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "deepseek_v3"])
def test_a_four_dimensional_mask_of_ones_own_is_honoured(family: str, additive_mask: bool) -> None:
    model, ids = model_of(family), tiny_ids(LENGTH, batch=2)
    keep = causal_keep(LENGTH).repeat(2, 1, 1, 1)
    keep[1] &= window_keep(LENGTH, window=4, n_sink=1)
    # transformers' own habit is the lowest finite number, not minus infinity: both must be read
    low = torch.finfo(torch.float32).min
    masks = [torch.zeros(keep.shape).masked_fill(~keep, x) for x in (low, -torch.inf)] if additive_mask else [keep]
    for mask in masks:
        assert all(torch.equal(seen, keep) for seen in keeps(model, ids, attention_mask=mask).values())
        hooked = logits_of(model, ids, untouched, attention_mask=mask)
        close(hooked, logits_of(model, ids, attention_mask=mask))
        assert (hooked[1] - logits_of(model, ids)[1]).abs().max() > 1e-2


def test_a_mask_that_is_a_bias_is_refused() -> None:
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~causal_keep(LENGTH), -torch.inf)
    mask[..., 0] = -2.0
    with pytest.raises(UnsupportedModelError, match="family llama was given a mask that is neither 0 nor minus inf"):
        logits_of(model_of("llama"), tiny_ids(LENGTH), untouched, attention_mask=mask)


def test_an_encoder_without_a_mask_stays_bidirectional() -> None:
    skip_before("5", "BERT is not sent through the attention interface")
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    model, ids = transformers.BertModel(config).eval(), tiny_ids()
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        with attending(model, untouched):
            assert torch.equal(model(ids).last_hidden_state, plain)


@every_family
def test_bfloat16_goes_through_unchanged(family: str) -> None:
    model, ids = tiny_model(family).to(torch.bfloat16), tiny_ids(LENGTH)
    plain, hooked = logits_of(model, ids), logits_of(model, ids, untouched)
    assert hooked.dtype == torch.bfloat16
    if family in EAGER:
        # two orders of rounding to 8 bits: no further from float32 than the plain model is, times two
        exact = logits_of(model_of(family), ids).log_softmax(-1)

        def divergence(logits: Tensor) -> float:
            return float((exact.exp() * (exact - logits.float().log_softmax(-1))).sum(-1).mean())

        assert divergence(hooked) < 2 * divergence(plain) < 0.02
    else:
        assert torch.equal(hooked, plain)
    for attention in capture(model, ids, maps=True).maps.values():
        assert attention.dtype == torch.float32
        if family != "gpt_oss":
            close(attention.sum(-1), torch.ones(attention.shape[:3]), 1e-6)


# --- what it sees is what the model computes ---


def eager_maps(family: str, ids: Tensor, **inputs: Any) -> tuple[Tensor, ...]:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, use_cache=False, output_attentions=True, **inputs).attentions


@every_family
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_maps_equal_the_models_own_eager_maps(family: str, side: str | None) -> None:
    ids, mask, positions = padded("left" if side is None else side)
    inputs = {} if side is None else {"attention_mask": mask, "position_ids": positions}
    maps = capture(model_of(family), ids, maps=True, **inputs).maps
    theirs = eager_maps(family, ids, **inputs)
    assert len(maps) == len(theirs) == (2 if family == "qwen3_next" else 3)
    real = torch.ones_like(mask, dtype=torch.bool) if side is None else mask.bool()
    for layer, eager in zip(sorted(maps), theirs, strict=True):
        mine = maps[layer].transpose(1, 2)
        close(mine[real], eager.transpose(1, 2)[real])
        total = mine.sum(-1)
        if family == "gpt_oss":  # the learned sink logit takes the rest
            assert total[real].max() < 1 - 1e-4
        else:
            close(total[real], torch.ones_like(total[real]), 2e-6)
        if side == "left":
            # a query of padding may see nothing: no weight, and no NaN
            close(total[~real], torch.zeros_like(total[~real]), 0.0)


@every_family
@pytest.mark.parametrize("side", [None, "left"])
def test_the_log_sum_exp_the_scores_and_the_weights_agree(family: str, side: str | None) -> None:
    ids, mask, positions = padded("left")
    inputs = {} if side is None else {"attention_mask": mask, "position_ids": positions}
    layers = []

    def check(call: AttentionCall) -> Tensor:
        layers.append(call.layer)
        output, lse = call.attend_with_lse()
        close(output, call.attend())
        key = call.key.double().repeat_interleave(call.n_heads // call.n_kv_heads, dim=1)
        scores = torch.einsum("bhqd,bhkd->bhqk", call.query.double(), key) * call.scale
        scores = scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.masked_fill(~call.keep, -torch.inf)
        sinks = torch.full((call.n_heads,), -torch.inf) if call.sink_logits is None else call.sink_logits
        total = torch.logaddexp(scores.logsumexp(-1), sinks.double()[None, :, None])
        close(lse.double(), total.masked_fill(total.isneginf(), 0.0))
        weights = torch.cat([part for _, part in call.weights()], dim=2)
        for index in (0, 7, LENGTH - 1):
            close(call.scores_of(index).double(), scores[..., index])
            close(torch.exp(call.scores_of(index) - lse), weights[..., index], 2e-6)
        for block in (1, 3, 5):
            close(torch.cat([part for _, part in call.weights(block)], dim=2), weights, 1e-6)
        assert not any(x.isnan().any() for x in (output, lse, weights))
        return output

    logits_of(model_of(family), ids, check, **inputs)
    assert layers == ([1, 2] if family == "qwen3_next" else [0, 1, 2])


def test_each_familys_own_ways_are_read() -> None:
    calls: dict[str, AttentionCall] = {}
    for family in ("gemma2", "gemma3_text", "gpt_oss", "deepseek_v2", "llama", "gpt2"):

        def watch(call: AttentionCall, family: str = family) -> Tensor:
            calls.setdefault(family, call)
            return call.attend()

        logits_of(model_of(family), tiny_ids(), watch)
    assert calls["gemma2"].softcap == 2.0
    assert calls["gemma2"].scale == pytest.approx(12**-0.5)
    assert calls["gemma3_text"].scale == pytest.approx(10**-0.5)  # and not head_dim, which is 12
    assert calls["deepseek_v2"].scale == pytest.approx(12**-0.5)
    assert torch.equal(calls["gpt_oss"].sink_logits, model_of("gpt_oss").model.layers[0].self_attn.sinks)
    assert (calls["llama"].n_heads, calls["llama"].n_kv_heads) == (4, 2)
    assert (calls["gpt2"].n_heads, calls["gpt2"].n_kv_heads) == (4, 4)
    assert calls["deepseek_v2"].value.shape[-1] == 6
    assert calls["llama"].softcap is None
    assert calls["llama"].sink_logits is None


# --- what it changes is read ---


def silence(layer: int) -> Callable[[AttentionCall], Tensor]:
    return lambda call: call.attend(value=call.value * 0) if call.layer == layer else call.attend()


@every_family
def test_zeroed_values_change_every_later_layer_and_no_earlier_one(family: str) -> None:
    model, ids = model_of(family), tiny_ids(LENGTH)
    plain = capture(model, ids).keys
    logits = logits_of(model, ids, untouched)
    for cut in plain:
        keys: dict[int, Tensor] = {}

        def watch(call: AttentionCall, cut: int = cut, keys: dict[int, Tensor] = keys) -> Tensor:
            keys[call.layer] = call.key
            return silence(cut)(call)

        assert (logits_of(model, ids, watch) - logits).abs().amax(-1).min() > 1e-3
        for layer in plain:
            if layer <= cut:
                assert torch.equal(keys[layer], plain[layer])
            else:
                assert (keys[layer] - plain[layer]).abs().amax((1, 3)).min() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text", "mistral", "opt"])
def test_zeroed_values_are_a_model_whose_value_projection_is_zero(family: str) -> None:
    model, other, ids = model_of(family), tiny_model(family), tiny_ids(LENGTH)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "v_proj" in name:
                parameter.zero_()
    close(logits_of(model, ids, lambda call: call.attend(value=call.value * 0)), logits_of(other, ids))


def test_a_mask_added_by_hand_is_a_model_with_that_window() -> None:
    llama, ids = tiny_model("llama"), tiny_ids(LENGTH)
    mistral = model_of("mistral")
    llama.load_state_dict(mistral.state_dict())
    hooked = logits_of(llama, ids, lambda call: call.attend(keep=call.keep & window_keep(LENGTH, window=WINDOW)))
    close(hooked, logits_of(mistral, ids))


@pytest.mark.parametrize(
    ("attend", "got"),
    [
        (lambda call: call.attend().transpose(1, 2), r"\[1, 24, 4, 8\]"),
        (lambda call: call.attend()[:, :, :-1], r"\[1, 4, 23, 8\]"),
        (lambda call: (call.attend(), None), "tuple"),
        (lambda call: None, "NoneType"),
    ],
)
def test_an_output_of_another_shape_is_refused(attend: Any, got: str) -> None:
    text = r"attend must return \[batch, n_heads, q_len, v_head_dim\] = \[1, 4, 24, 8\], got " + got
    with pytest.raises(ValueError, match=text):
        logits_of(model_of("llama"), tiny_ids(LENGTH), attend)


# --- GPT-2: its options, and a second road ---


def test_gpt2_scaled_by_the_inverse_layer_index() -> None:
    model, ids = tiny_model("gpt2", scale_attn_by_inverse_layer_idx=True), tiny_ids(LENGTH)
    scales = {}

    def watch(call: AttentionCall) -> Tensor:
        scales[call.layer] = call.scale
        return call.attend()

    exact = model.config._attn_implementation == "sdpa"
    close(logits_of(model, ids, watch), logits_of(model, ids), 0.0 if exact else 1e-5)
    assert scales == pytest.approx({layer: 8**-0.5 / (layer + 1) for layer in range(3)})


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)])
def test_gpt2_reordered_and_upcast(dtype: torch.dtype, ulp: float) -> None:
    model, ids = tiny_model("gpt2", reorder_and_upcast_attn=True).to(dtype), tiny_ids(LENGTH)
    given, fused = [], []
    hooks = [
        model.transformer.h[0].attn.c_proj.register_forward_pre_hook(lambda module, args: given.append(args[0])),
        model.transformer.h[0].attn.c_attn.register_forward_hook(lambda module, args, output: fused.append(output)),
    ]
    dtypes = set()

    def watch(call: AttentionCall) -> Tensor:
        dtypes.add(call.query.dtype)
        return call.attend()

    hooked = logits_of(model, ids, watch)
    for hook in hooks:
        hook.remove()
    assert dtypes == {torch.float32}
    query, key, value = (x.view(1, LENGTH, 4, 8).transpose(1, 2).double() for x in fused[0].split(32, dim=2))
    scores = (query @ key.transpose(-1, -2) * 8**-0.5).masked_fill(~causal_keep(LENGTH), -torch.inf)
    exact = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    # one rounding to half precision, at the very end
    torch.testing.assert_close(given[0].double(), exact, rtol=0.6 * ulp, atol=1e-5)
    model.set_attn_implementation("eager")  # where transformers itself upcasts
    close(hooked.float(), logits_of(model, ids).float(), 40 * ulp)


def test_plain_forward_hooks_on_gpt2_see_the_same_keys_values_and_maps() -> None:
    # a head_dim of 16 scales by exactly 1/4, so that the order of scaling rounds nothing
    model, ids = tiny_model("gpt2", n_embd=64), tiny_ids(LENGTH, batch=2)
    fused: list[Tensor] = []
    maps: list[Tensor] = []
    hooks = []
    for block in model.transformer.h:
        hooks += [
            block.attn.c_attn.register_forward_hook(lambda module, args, output: fused.append(output)),
            block.attn.register_forward_hook(lambda module, args, output: maps.append(output[1])),
        ]
    model.set_attn_implementation("eager")
    plain = logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    assert [x.shape[-1] for x in fused] == [192] * 3  # q|k|v on the last axis of a Conv1D
    seen = []

    def watch(call: AttentionCall) -> Tensor:
        _, key, value = fused[call.layer].split(64, dim=2)
        for mine, theirs in ((call.key, key), (call.value, value)):
            assert torch.equal(mine, theirs.view(2, LENGTH, 4, 16).transpose(1, 2))
        (_, weights), *others = call.weights()
        assert not others
        assert torch.equal(weights, maps[call.layer])
        seen.append(call.layer)
        # GPT-2's own arithmetic, so that the next layer reads the very same bits
        mask = torch.zeros(call.keep.shape).masked_fill(~call.keep, -torch.inf)
        block = model.transformer.h[call.layer].attn
        output, _ = eager_attention_forward(block, call.query, call.key, call.value, mask, scaling=call.scale)
        return output.transpose(1, 2)

    assert torch.equal(logits_of(model, ids, watch), plain)
    assert seen == [0, 1, 2]


# --- capture ---


@pytest.mark.parametrize("to_cpu", [True, False])
def test_capture_returns_copies_that_keep_nothing_else_alive(to_cpu: bool) -> None:
    model, ids = model_of("gpt2"), tiny_ids(LENGTH)
    seen = capture(model, ids, maps=True, to_cpu=to_cpu)
    for kept in (seen.keys, seen.values, seen.maps):
        assert sorted(kept) == [0, 1, 2]
        for x in kept.values():
            # GPT-2's own keys and values are views of q|k|v: three units kept alive for two
            assert x.is_contiguous()
            assert x.untyped_storage().nbytes() == x.numel() * 4
            assert not x.requires_grad
    assert len({x.data_ptr() for x in (*seen.keys.values(), *seen.values.values())}) == 6


def test_capture_keeps_what_was_asked_for_and_computes_no_logits() -> None:
    model, ids = model_of("llama"), tiny_ids(LENGTH)
    spoke = []
    hook = model.lm_head.register_forward_hook(lambda *_: spoke.append(True))
    whole = capture(model, ids, maps=True)
    some = capture(model, ids, layers=[2], maps=[0])
    none = capture(model, ids, layers=[1])
    hook.remove()
    assert (sorted(some.keys), sorted(some.values), sorted(some.maps)) == ([2], [2], [0])
    assert none.maps == {}
    assert torch.equal(some.keys[2], whole.keys[2])
    assert torch.equal(some.maps[0], whole.maps[0])
    assert not spoke
    assert isinstance(some, Captured)


@pytest.mark.parametrize(("family", "layer", "holding"), [("llama", 3, "0, 1, 2"), ("qwen3_next", 0, "1, 2")])
def test_capture_refuses_a_layer_that_holds_nothing(family: str, layer: int, holding: str) -> None:
    text = rf"layer {layer} holds no keys and values; those that do are \[{holding}\]"
    with pytest.raises(ValueError, match=text):
        capture(model_of(family), tiny_ids(), layers=[layer])
    with pytest.raises(ValueError, match=text):
        capture(model_of(family), tiny_ids(), maps=[layer])


# --- it leaves no trace ---


def state_of(model: nn.Module) -> tuple[Any, ...]:
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    return (
        [config._attn_implementation for config in configs],
        [sorted(vars(config)) for config in configs],
        [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()],
        [sorted(vars(part)) for part in model.modules()],
        sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()),
        sorted(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
    )


def fails(error: BaseException, at: int) -> Callable[[AttentionCall], Tensor]:
    def attend(call: AttentionCall) -> Tensor:
        if call.layer == at:
            raise error
        return call.attend() * 0

    return attend


@every_family
def test_the_model_leaves_as_it_entered(family: str) -> None:
    model, ids = tiny_model(family), tiny_ids(LENGTH)
    before, plain = state_of(model), logits_of(model, ids)
    with attending(model, untouched):
        assert state_of(model) != before
    assert state_of(model) == before
    logits_of(model, ids, silence(1))
    assert state_of(model) == before
    for error in (RuntimeError("out of luck"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            logits_of(model, ids, fails(error, at=2))
        assert state_of(model) == before
        with pytest.raises(type(error)), attending(model, untouched):
            raise error
        assert state_of(model) == before
    assert torch.equal(logits_of(model, ids), plain)


def test_of_nested_blocks_the_inner_one_acts() -> None:
    model, ids = tiny_model("llama"), tiny_ids(LENGTH)
    before, plain = state_of(model), logits_of(model, ids)
    seen: list[str] = []

    def note(name: str) -> Callable[[AttentionCall], Tensor]:
        def attend(call: AttentionCall) -> Tensor:
            seen.append(name)
            return call.attend()

        return attend

    with torch.no_grad(), attending(model, note("outer")):
        with attending(model, note("inner")):
            model(ids, use_cache=False)
        assert seen == ["inner"] * 3
        with (
            pytest.raises(RuntimeError, match="out of luck"),
            attending(model, fails(RuntimeError("out of luck"), at=0)),
        ):
            model(ids, use_cache=False)
        assert torch.equal(model(ids, use_cache=False).logits, plain)
        assert seen == ["inner"] * 3 + ["outer"] * 3
    assert state_of(model) == before
    # the outer block ran no forward of its own: nothing of it is to be proved
    with torch.no_grad(), attending(model, note("outer")), attending(model, note("inner")):
        model(ids, use_cache=False)


def test_two_models_may_be_open_at_once() -> None:
    llama, gpt2, ids = tiny_model("llama"), tiny_model("gpt2"), tiny_ids()
    with attending(llama, silence(0)):
        assert torch.equal(logits_of(gpt2, ids, untouched), logits_of(gpt2, ids))


# --- proof of effect ---


def attention_of(model: Any, layer: int) -> nn.Module:
    block = (model.transformer.h if hasattr(model, "transformer") else model.get_decoder().layers)[layer]
    return block.attn if hasattr(block, "attn") else block.self_attn


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "deepseek_v3", "opt"])
def test_a_layer_that_goes_round_the_interface_is_named(family: str, layer: int) -> None:
    model = tiny_model(family)
    part = attention_of(model, layer)
    part.forward = lambda hidden_states, *args, **given: (hidden_states * 0.5, None)  # type: ignore[method-assign]
    text = rf"^family {family}: layer {layer} \({type(part).__name__}\) does not go through"
    with pytest.raises(NotIntercepted, match=text):
        logits_of(model, tiny_ids(), untouched)
    with pytest.raises(NotIntercepted, match=text):
        capture(model, tiny_ids())


def test_without_a_whole_forward_there_is_nothing_to_prove() -> None:
    model = model_of("llama")
    with attending(model, untouched):
        pass
    # a forward that fails is reported as itself
    with pytest.raises(IndexError), attending(model, untouched):
        model(torch.tensor([[1000]]), use_cache=False)


@pytest.mark.parametrize("family", BYPASSING)
def test_families_that_bypass_the_interface_are_refused_by_name(family: str) -> None:
    model = tiny_model(family)
    before = state_of(model)
    for use in (
        lambda: logits_of(model, tiny_ids(), untouched),
        lambda: capture(model, tiny_ids()),
    ):
        with pytest.raises(NotIntercepted, match=rf"^family {family}: "):
            use()
        assert state_of(model) == before


def test_training_mode_is_refused() -> None:
    model = tiny_model("gpt2").train()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"training mode, where dropout changes attention: call model.eval\(\) first"):
        logits_of(model, tiny_ids(), untouched)
    assert state_of(model) == before


# --- caches of transformers, and models spread over devices ---


def in_steps(model: Any, ids: Tensor, cache_of_theirs: Any) -> Tensor:
    """Logits of a prefill of 9, a chunk of 4, and then a token at a time, through one cache."""
    cuts = [9, 4] + [1] * (ids.shape[1] - 13)
    parts, done = [], 0
    for size in cuts:
        output = model(ids[:, done : done + size], **{cache_argument(model): cache_of_theirs}, use_cache=True)
        parts.append(output.logits)
        done += size
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@every_family
def test_decoding_through_the_models_own_cache_equals_one_forward(family: str, kind: str) -> None:
    model, ids = model_of(family), tiny_ids(18, batch=2)

    def fresh() -> Any:
        if kind == "dynamic":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=30)

    calls: list[int] = []

    def watch(call: AttentionCall) -> Tensor:
        calls.append(call.layer)
        return call.attend()

    with torch.no_grad():
        try:
            plain = in_steps(model, ids, fresh())
        except (AttributeError, RuntimeError) as error:
            skip_before(TESTED, f"its own cache fails ({error})")
            raise
        with attending(model, watch):
            hooked = in_steps(model, ids, fresh())
    close(hooked, plain)
    close(hooked, logits_of(model, ids), 2e-5)
    assert len(calls) == 7 * (2 if family == "qwen3_next" else 3)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "gpt_oss", "deepseek_v2"])
def test_a_model_that_accelerate_spreads_goes_through_unchanged(family: str, where: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), tiny_ids(LENGTH)
    plain, keys = logits_of(model, ids), capture(model, ids).keys
    if where == "cpu":
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model = accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert any(parameter.is_meta for parameter in model.parameters())
    before = state_of(model)
    if not torch.allclose(logits_of(model, ids), plain, atol=1e-3):
        skip_before(TESTED, "its offloaded model gives other logits by itself")
    assert_plain(model, logits_of(model, ids, untouched), plain)
    assert all(torch.equal(x, keys[layer]) for layer, x in capture(model, ids, to_cpu=True).keys.items())
    assert (logits_of(model, ids, silence(1)) - plain).abs().max() > 1e-2
    if family != "gpt2":
        whole = rope_of(tiny_model(family))
        for layer, rope in rope_of(model).items():
            close(rope.inv_freq, whole[layer].inv_freq, 0.0)
            assert (rope.start, rope.interleaved) == (whole[layer].start, whole[layer].interleaved)
    assert state_of(model) == before


def few_keys(call: AttentionCall) -> Tensor:
    last = call.last(4)
    return call.attend(keep=last | call.top(3, -call.key.norm(dim=-1), among=call.keep & ~last))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_generate_with_a_cache_gives_the_tokens_of_no_cache(family: str) -> None:
    model, ids = model_of(family), torch.cat([tiny_ids(LENGTH), tiny_ids(LENGTH).flip(1)])
    # a row of padding: what a query sees is then more than causal
    mask = torch.ones_like(ids)
    mask[0, :N_PAD] = 0
    lengths = set()

    def attend(call: AttentionCall) -> Tensor:
        lengths.add(call.query.shape[2])
        return few_keys(call)

    def generated(**settings: Any) -> Tensor:
        plain = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=mask, **plain, **settings)

    with attending(model, attend):
        cached = generated(use_cache=True)
        assert lengths == {LENGTH, 1}
        fresh = generated(use_cache=False)
    assert max(lengths) == LENGTH + 11
    assert cached.equal(fresh)
    assert not cached.equal(generated(use_cache=False))
