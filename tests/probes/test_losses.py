"""Losses are those of the model's own logits on every family, also of a large vocabulary."""

import math

import pytest
import torch
import torch.nn.functional as F

from kvprobe.attention.layers import body_of
from kvprobe.errors import KvprobeError
from kvprobe.probes.losses import check_score_from, nll, perplexity, token_losses
from support.tiny import HOOKED, tiny_ids, tiny_model


def whole(model, ids, score_from):
    """Losses from all logits at once, in float64."""
    logits = model(input_ids=ids, use_cache=False).logits[:, score_from:-1].double()
    return -logits.log_softmax(-1).gather(-1, ids[:, score_from + 1 :, None])[..., 0]


def scaled(config_class, model_class, **settings):
    import transformers

    config = getattr(transformers, config_class)(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", HOOKED)
def test_losses_are_those_of_the_models_own_logits(family):
    model, ids = tiny_model(family), tiny_ids(24, batch=2)
    wanted = whole(model, ids, 5)
    torch.testing.assert_close(token_losses(model, ids, score_from=5, chunk=7), wanted, atol=3e-6, rtol=0)
    torch.testing.assert_close(token_losses(model, ids[0], score_from=5, chunk=17), wanted[0], atol=3e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("config_class", "model_class", "settings"),
    [
        ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 3.0}),
        ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.3}),
        ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "final_logit_softcapping": 0.5}),
    ],
)
def test_what_a_family_does_to_its_logits_is_kept(config_class, model_class, settings):
    model, ids = scaled(config_class, model_class, **settings), tiny_ids(24)
    head = model.get_output_embeddings()(body_of(model)(input_ids=ids).last_hidden_state)
    assert (head - model(input_ids=ids).logits).abs().max() > 0.1, "the family does nothing that could be lost"
    torch.testing.assert_close(token_losses(model, ids, score_from=5), whole(model, ids, 5)[0], atol=3e-6, rtol=0)


def test_512_of_1024_tokens_leave_the_511_targets_513_to_1023():
    model = tiny_model("gpt2", n_positions=1024)
    ids = tiny_ids(1024)
    losses = token_losses(model, ids, score_from=512)
    assert losses.shape == (511,)
    assert losses.dtype == torch.float64
    logits = model(input_ids=ids, use_cache=False).logits
    assert perplexity(losses) == pytest.approx(math.exp(F.cross_entropy(logits[0, 512:-1], ids[0, 513:])), rel=1e-5)


def test_attention_is_replaced_for_the_loss():
    model, ids = tiny_model("llama"), tiny_ids(24)
    plain = token_losses(model, ids, score_from=3)
    same = token_losses(model, ids, score_from=3, attend=lambda call: call.attend())
    other = token_losses(model, ids, score_from=3, attend=lambda call: call.attend(value=call.value * 0))
    assert torch.equal(same, plain)
    assert (other - plain).abs().min() > 1e-4


def test_the_logits_of_one_chunk_are_all_that_is_held():
    model, ids = tiny_model("llama"), tiny_ids(64)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output.shape[1]))
    token_losses(model, ids, score_from=20, chunk=16)
    handle.remove()
    assert seen == [16, 16, 11]


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_model_leaves_as_it_entered_also_after_an_error(family):
    model, ids = tiny_model(family), tiny_ids(24)
    before = model(input_ids=ids).logits
    handle = model.get_output_embeddings().register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        token_losses(model, ids, score_from=3)
    handle.remove()
    assert all("forward" not in part.__dict__ for part in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_forward_that_stood_on_the_instance_stands_there_again():
    # accelerate puts one on every module of a model that is spread over devices
    model, ids = tiny_model("llama"), tiny_ids(24)
    own = model.model.forward
    model.model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    placed = model.model.__dict__["forward"]
    token_losses(model, ids, score_from=3)
    assert model.model.__dict__["forward"] is placed


def test_a_loss_that_is_not_finite_names_the_layer_and_the_dtype():
    model, ids = tiny_model("llama"), tiny_ids(24)
    model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(KvprobeError, match=r"model\.layers\.1\.mlp\.up_proj is the first.*float32"):
        token_losses(model, ids, score_from=3)
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize(("n_tokens", "score_from"), [(24, -1), (24, 22), (24, 512)])
def test_score_from_outside_the_passage_names_the_allowed_range(n_tokens, score_from):
    with pytest.raises(ValueError, match=rf"^score_from must be between 0 and 21 for tokens 24.*got {score_from}"):
        check_score_from(n_tokens, score_from)
    with pytest.raises(ValueError, match="between 0 and 21"):
        token_losses(tiny_model("gpt2"), tiny_ids(n_tokens), score_from=score_from)


def test_score_from_at_either_end_is_allowed():
    check_score_from(24, 0)
    check_score_from(24, 21)
    with pytest.raises(ValueError, match="at least 3 tokens"):
        check_score_from(2, 0)


def test_perplexity_is_the_exponential_of_the_mean():
    assert perplexity(torch.log(torch.tensor([2.0, 8.0]))) == pytest.approx(4.0)


def test_the_loss_of_a_large_vocabulary_is_not_biased():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 49152, generator=generator)
    targets = torch.randint(49152, (64,), generator=generator)
    exact = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    error = nll(logits, targets) - exact
    assert error.abs().max() < 2e-6
    # far below what a float32 sum is off by, always to the same side
    assert error.mean().abs() < 2e-7
