"""Every probe runs on a Hugging Face model and on our decoder of the same weights, and gives the same."""

import pytest
import torch
from torch import nn

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.capture import capture
from kvprobe.attention.language_model import Attended, language_model, observe
from kvprobe.attention.layers import body_of
from kvprobe.attention.seam import attending
from kvprobe.decoder.model import from_hf
from kvprobe.errors import KvprobeError, NotIntercepted, UnsupportedModelError
from kvprobe.native.eligible import obstacle
from kvprobe.probes import mass, windows
from kvprobe.probes.losses import token_losses
from kvprobe.probes.quantised import quantising
from kvprobe.probes.truncation import sweep
from support.decoders import FAMILIES, rope_decoder
from support.tiny import tiny_ids, tiny_model

pytestmark = pytest.mark.contract

each_family = pytest.mark.parametrize("family", FAMILIES)


def both(family):
    model = tiny_model(family)
    return model, from_hf(model)


def close(ours, theirs, atol=2e-5):
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), atol=atol, rtol=1e-4)


@each_family
def test_body_logits_and_losses_are_the_same(family):
    model, decoder = both(family)
    ids = tiny_ids(40, batch=2)
    theirs, ours = language_model(model), language_model(decoder)
    hidden = theirs.body(ids)
    close(ours.body(ids), hidden)
    close(ours.logits(hidden[:, 5:20]), theirs.logits(hidden[:, 5:20]))
    close(theirs.logits(hidden), model(ids, use_cache=False).logits)
    close(token_losses(decoder, ids, score_from=10), token_losses(model, ids, score_from=10))
    attend = quantising(4)
    got, wanted = (token_losses(each, ids, score_from=10, attend=attend) for each in (decoder, model))
    # a rounded value may fall to the other side of a step
    assert (got - wanted).abs().mean() < 1e-2
    assert (got - token_losses(model, ids, score_from=10)).abs().max() > 1e-3


@each_family
def test_masses_keys_and_maps_are_the_same(family):
    model, decoder = both(family)
    ids = tiny_ids(40)
    theirs, ours = (mass.measure(each, ids, queries_from=8, positions=True) for each in (model, decoder))
    assert ours.layers == theirs.layers
    for field in ("token0", "uniform", "share"):
        close(getattr(ours, field), getattr(theirs, field))
    seen, wanted = (capture(each, ids, maps=[1]) for each in (decoder, model))
    assert seen.keys.keys() == wanted.keys.keys()
    for layer in wanted.keys:
        close(seen.keys[layer], wanted.keys[layer])
        close(seen.values[layer], wanted.values[layer])
    close(seen.maps[1], wanted.maps[1])


@each_family
@pytest.mark.parametrize("stage", ["post_rope", "pre_rope"])
def test_truncations_are_the_same(family, stage):
    if family == "gpt2" and stage == "pre_rope":
        pytest.skip("it has no rotation")
    model, decoder = both(family)
    ids = tiny_ids(60)[0]
    settings = {"ranks": (4, 12), "stage": stage, "score_from": 20}
    for ours, theirs in zip(sweep(decoder, ids, **settings).rows, sweep(model, ids, **settings).rows, strict=True):
        assert ours["rank"] == theirs["rank"]
        close(ours["loss"], theirs["loss"], atol=1e-3)


@each_family
@pytest.mark.parametrize("positions", ["absolute", "cache", "recompute"])
def test_windows_are_the_same(family, positions):
    model, decoder = both(family)
    ids = tiny_ids(40)[0]
    sinks = (0,) if positions == "recompute" else (0, 2)
    settings = {"windows": (6, 12), "sinks": sinks, "positions": positions, "score_from": 16}
    if family == "gpt2" and positions == "cache":
        for each in (model, decoder):
            with pytest.raises(UnsupportedModelError, match=r"positions cache: .*; positions absolute and recompute"):
                windows.grid(each, ids, **settings)
        return
    for ours, theirs in zip(windows.grid(decoder, ids, **settings), windows.grid(model, ids, **settings), strict=True):
        for name, value in theirs.items():
            if isinstance(value, float):
                assert ours[name] == pytest.approx(value, abs=2e-4), name
            else:
                assert ours[name] == value, name


def test_a_loss_that_is_not_finite_names_the_same_layer_in_both():
    model, decoder = both("llama")
    ids = tiny_ids(40)[0]
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
        decoder.blocks[1].mlp.up.weight[3, 5] = float("nan")
    for each, part in ((model, r"model\.layers\.1\.mlp\.up_proj"), (decoder, r"blocks\.1\.mlp\.up")):
        text = f"{part} is the first .* at float32; check the"
        with pytest.raises(KvprobeError, match=text):
            token_losses(each, ids, score_from=16)
        with pytest.raises(KvprobeError, match=text):
            windows.recompute_losses(each, ids, window=6, score_from=16)
        assert not any(module._forward_hooks for module in each.modules())


def test_observing_changes_nothing_and_leaves_the_model_as_it_was_also_on_an_error():
    model, ids = tiny_model("llama"), tiny_ids(12)
    expected = model(ids, use_cache=False).logits
    layers = observe(model, ids, lambda call: call.layer)
    assert layers == {0: 0, 1: 1, 2: 2}

    def fail(call):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        observe(model, ids, fail)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    # what a look has attended itself is what goes on
    zeros = observe(rope_decoder(), ids, lambda call: Attended(torch.zeros_like(call.query), call.query.norm()))
    assert zeros.keys() == {0, 1}


def silent(call):
    return call.attend(value=call.value * 0)


@each_family
def test_a_block_replaces_the_attention_of_both(family):
    model, decoder = both(family)
    ids = tiny_ids(20)
    plain = decoder(ids)
    with attending(model, silent), attending(decoder, silent):
        close(decoder(ids), model(ids, use_cache=False).logits)
    assert torch.equal(decoder(ids), plain)
    assert (decoder(ids, attend=silent) - plain).abs().max() > 1e-2


def test_in_the_decoder_the_inner_block_acts_and_what_a_pass_brings_acts_before_it():
    decoder, ids = rope_decoder(), tiny_ids(12)
    seen = []

    def note(name):
        return lambda call: (seen.append(name), call.attend())[1]

    with attending(decoder, note("outer")):
        with attending(decoder, note("inner")):
            decoder(ids)
            decoder(ids, attend=note("own"))
        # an operation that changes nothing is a block too
        with attending(decoder, AttentionCall.attend):
            decoder(ids)
        decoder(ids)
        assert "hooks" in obstacle(decoder, decoder.full_cache(12))
    decoder(ids)
    assert seen == ["inner"] * 2 + ["own"] * 2 + ["outer"] * 2
    assert obstacle(decoder, decoder.full_cache(12)) is None
    with pytest.raises(RuntimeError, match="stop"), attending(decoder, silent):
        raise RuntimeError("stop")
    assert not any(part._forward_pre_hooks for part in decoder.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo says what it leaves to Python
def test_a_decoder_compiled_before_the_block_is_seen():
    decoder, ids = rope_decoder(), tiny_ids(12)
    torch._dynamo.reset()
    compiled = torch.compile(decoder, backend="eager")
    plain = compiled(ids)
    wanted = decoder(ids, attend=silent)
    for entered in (decoder, compiled):
        with attending(entered, silent):
            close(compiled(ids), wanted)
    close(compiled(ids), plain)
    torch._dynamo.reset()


def test_a_look_that_is_never_called_is_said():
    decoder = rope_decoder()
    for block in decoder.blocks:
        block.attention.forward = lambda x, now: x
    with pytest.raises(NotIntercepted, match="family decoder: no layer attends"):
        observe(decoder, tiny_ids(6), lambda call: call.layer)


def test_a_block_on_what_is_no_language_model_is_refused():
    with (
        pytest.raises(UnsupportedModelError, match="Linear is neither a Hugging Face model"),
        attending(nn.Linear(2, 2), silent),
    ):
        pass


@each_family
def test_logits_need_no_pass_before(family):
    model, ids = tiny_model(family), tiny_ids(12)
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    close(language_model(model).logits(hidden), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", ["cache", "left_pad", "positions"])
def test_what_only_our_decoder_honours_is_refused_by_name_on_the_other(name):
    model, ids = tiny_model("llama"), tiny_ids(6)
    given = {"cache": from_hf(model).full_cache(6), "left_pad": torch.tensor([2]), "positions": torch.arange(3, 9)}[
        name
    ]
    with pytest.raises(UnsupportedModelError, match=f"family llama: {name} is an input of kvprobe's own decoder"):
        language_model(model).body(ids, **{name: given})


def test_what_is_not_a_language_model_is_refused_by_its_class():
    with pytest.raises(UnsupportedModelError, match="Linear is not a language model here"):
        language_model(nn.Linear(2, 2))
