import pytest
import torch
import torch.nn.functional as F

from kvprobe.attention.masks import window_keep
from kvprobe.attention.seam import attending
from kvprobe.decoder.model import Decoder, DecoderConfig, Rotary, from_hf
from kvprobe.errors import UnsupportedModelError
from support.decoders import FAMILIES, VARIANTS, rope_decoder
from support.tiny import tiny_ids, tiny_model

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_hugging_face(family):
    model, ids = tiny_model(family), tiny_ids(48, batch=3)
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(from_hf(model)(ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_that_changes_the_model_is_read(variant):
    family, settings = VARIANTS[variant]
    model, ids = tiny_model(family, **settings), tiny_ids(48)
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(from_hf(model)(ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_is_hugging_faces_with_positions_from_the_first_token(family):
    model, ids, left_pad = tiny_model(family), tiny_ids(20, batch=3), torch.tensor([7, 0, 3])
    mask = (torch.arange(20) >= left_pad[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    seen = mask.bool()
    torch.testing.assert_close(from_hf(model)(ids, left_pad=left_pad)[seen], expected[seen], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_models_own_storage(family):
    model = tiny_model(family)
    theirs = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    ours = {parameter.untyped_storage().data_ptr() for parameter in from_hf(model).parameters()}
    assert ours == theirs


def test_another_family_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="unknown family gpt_neox: the decoder reads gpt2, llama"):
        from_hf(tiny_model("gpt_neox"))


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("gpt2", {"activation_function": "relu"}, "gpt2 with activation_function relu"),
        ("gpt2", {"add_cross_attention": True}, "gpt2 with add_cross_attention True"),
        ("llama", {"hidden_act": "gelu"}, "llama with activation gelu"),
        ("gemma3_text", {"hidden_activation": "silu"}, "gemma3_text with activation silu"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "gemma3_text with use_bidirectional_attention True"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic RoPE"),
    ],
)
def test_a_setting_that_the_decoder_has_not_is_refused_by_name(family, settings, words):
    with pytest.raises(UnsupportedModelError, match=words):
        from_hf(tiny_model(family, **settings))


def test_a_tensor_that_does_not_match_is_named():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(30, 32))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.q_proj\.weight' is \[30, 32\].*\[32, 32\]"):
        from_hf(model)
    model = tiny_model("llama")
    model.model.layers[2].mlp.extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(UnsupportedModelError, match=r"no place for the tensor 'model\.layers\.2\.mlp\.extra\.weight'"):
        from_hf(model)
    model = tiny_model("llama")
    del model.model.layers[0].mlp.up_proj
    with pytest.raises(UnsupportedModelError, match=r"has no tensor 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        from_hf(model)


def test_shared_heads_are_multi_head_attention_with_the_shared_weights_repeated():
    shared, full = rope_decoder(n_kv_heads=2), rope_decoder()
    state = shared.state_dict()
    for name in state:
        if ".key." in name or ".value." in name:
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    ids = tiny_ids(24)
    torch.testing.assert_close(shared(ids), full(ids), atol=1e-5, rtol=0)


def test_interleaved_rope_is_halves_with_query_and_key_rows_permuted_alike():
    halves, interleaved = rope_decoder(), rope_decoder(rotary=Rotary(interleaved=True))
    state = halves.state_dict()
    for name in state:
        if ".query." in name or ".key." in name:
            # component 2j is now what j was, 2j + 1 what j + head_dim / 2 was
            state[name] = state[name].unflatten(0, (4, 2, 4)).transpose(1, 2).flatten(0, 2)
    ids = tiny_ids(24)
    before = interleaved(ids)
    interleaved.load_state_dict(state)
    torch.testing.assert_close(halves(ids), interleaved(ids), atol=1e-5, rtol=0)
    assert (before - halves(ids)).abs().max() > 0.1


@pytest.mark.parametrize("rotary", [Rotary(), Rotary(interleaved=True), Rotary(theta=50.0)])
def test_the_call_turns_keys_as_the_decoder_does(rotary):
    # one token repeated: keys differ by their positions alone, so turned back they are all equal
    spread = []

    def watch(call):
        back = call.rotate(call.key, -torch.arange(call.key.shape[2]))
        spread.append((back - back[:, :, :1]).abs().max().item())
        assert (call.key - call.key[:, :, :1]).abs().max() > 0.1
        return call.attend()

    rope_decoder(rotary=rotary)(torch.full((1, 12), 5), attend=watch)
    assert len(spread) == 2
    assert max(spread) < 1e-5


def lowrank(call):
    def cut(x):
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return u[..., :3] * s[..., None, :3] @ vh[..., :3, :]

    return call.attend(key=cut(call.key), value=cut(call.value))


def windowed(call):
    return call.attend(keep=call.keep & window_keep(call.query.shape[2], window=5, n_sink=1))


def mass_of_token_0(into):
    def watch(call):
        output, lse = call.attend_with_lse()
        into.append(torch.exp(call.scores_of(0) - lse).mean((0, 2)))
        return output

    return watch


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_for_the_hooks_runs_on_the_decoder(family):
    model, ids = tiny_model(family), tiny_ids(32)
    decoder = from_hf(model)

    def loss(logits):
        return F.cross_entropy(logits[0, :-1], ids[0, 1:])

    plain = loss(decoder(ids))
    for attend in (lowrank, windowed):
        with attending(model, attend):
            expected = loss(model(ids, use_cache=False).logits)
        assert (expected - plain).abs() > 1e-3
        torch.testing.assert_close(loss(decoder(ids, attend=attend)), expected, atol=1e-5, rtol=0)
    theirs, ours = [], []
    with attending(model, mass_of_token_0(theirs)):
        model(ids, use_cache=False)
    decoder(ids, attend=mass_of_token_0(ours))
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-6, rtol=0)


def test_an_attend_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"= \[1, 4, 6, 8\], got \[1, 6, 4, 8\]"):
        rope_decoder()(tiny_ids(6), attend=lambda call: call.attend().transpose(1, 2))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_first_forbidden_position_is_refused_with_the_limit(family):
    decoder = from_hf(tiny_model(family))
    decoder(tiny_ids(256))
    with pytest.raises(ValueError, match="257 tokens are more than the model's 256 positions"):
        decoder(tiny_ids(257))


@pytest.mark.parametrize("rotary", [Rotary(), None])
def test_without_the_position_offset_the_logits_deviate(rotary):
    # the exercise: after a prefix, a token that believes it stands at position 0
    decoder, ids = rope_decoder(rotary=rotary), tiny_ids(65, batch=32)
    deviations = []
    for prefix in (1, 4, 16, 64):
        expected = decoder(ids[:, : prefix + 1])[:, -1]
        for positions in (torch.tensor([prefix]), torch.tensor([0])):
            cache = decoder.full_cache(65, batch=32)
            decoder(ids[:, :prefix], cache=cache)
            got = decoder(ids[:, prefix : prefix + 1], cache=cache, positions=positions)[:, -1]
            deviations.append((got - expected).abs().mean().item())
    right, wrong = deviations[0::2], deviations[1::2]
    assert max(right) < 1e-5
    assert min(wrong) > 1e-2


def test_without_the_offset_a_longer_prefix_deviates_more():
    # Under RoPE the error is a rotation by the prefix's length. Slow turns, of which no pair has yet come round, show
    # it undisturbed.
    decoder, ids = rope_decoder(rotary=Rotary(frequencies=(0.02, 0.01, 0.005, 0.002))), tiny_ids(65, batch=64)
    wrong = []
    for prefix in (4, 16, 64):
        cache = decoder.full_cache(65, batch=64)
        decoder(ids[:, :prefix], cache=cache)
        got = decoder(ids[:, prefix : prefix + 1], cache=cache, positions=torch.tensor([0]))[:, -1]
        wrong.append((got - decoder(ids[:, : prefix + 1])[:, -1]).abs().mean().item())
    assert wrong[0] < wrong[1] < wrong[2]


@pytest.mark.parametrize(("n_kv_heads", "count"), [(8, 262_144), (4, 196_608), (2, 163_840), (1, 147_456)])
def test_attention_parameters_are_the_published_ones(n_kv_heads, count):
    config = DecoderConfig(
        n_layers=1, n_heads=8, n_kv_heads=n_kv_heads, head_dim=32, hidden=256, mlp_width=8, vocab=2, max_positions=8
    )
    assert sum(parameter.numel() for parameter in Decoder(config).blocks[0].attention.parameters()) == count


def test_the_published_latency_model_has_its_123_6_million_parameters():
    with torch.device("meta"):
        decoder = Decoder(
            DecoderConfig(
                n_layers=12,
                n_heads=12,
                n_kv_heads=12,
                head_dim=64,
                hidden=768,
                mlp_width=2048,
                vocab=50_257,
                max_positions=4096,
            )
        )
    # embeddings, and a block's four projections, gated MLP and two norms, and the last norm
    by_hand = 50_257 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768
    assert sum(parameter.numel() for parameter in decoder.parameters()) == by_hand
    assert round(by_hand / 1e6, 1) == 123.6


def test_a_random_decoder_learns():
    torch.manual_seed(0)
    decoder = Decoder(rope_decoder().config)
    assert decoder.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    ids = tiny_ids(16, batch=2)
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(decoder(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_kv_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"windows": (4,)}, "one a layer, 2, got 1"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        rope_decoder(**settings)


def test_angles_stay_float32_in_half_precision():
    decoder = rope_decoder().to(torch.bfloat16)
    assert decoder.config.rope_of(0, torch.device("cpu")).inv_freq.dtype == torch.float32


@pytest.mark.smollm2
def test_on_smollm2_logits_are_within_hugging_faces_own_rounding(smollm2):
    from kvprobe.text import passages, texts

    ids = passages.encode(smollm2.tokenizer, texts.read_text("bundled"), n_tokens=512).ids[None]
    logits, implementation = {}, smollm2.model.config._attn_implementation
    try:
        for name in ("eager", "sdpa"):
            smollm2.model.set_attn_implementation(name)
            logits[name] = smollm2.model(ids, use_cache=False).logits
    finally:
        smollm2.model.set_attn_implementation(implementation)
    ours = from_hf(smollm2.model)(ids)
    allowed = 2 * (logits["sdpa"] - logits["eager"]).abs().max()
    assert (ours - logits["sdpa"]).abs().max() <= allowed
    assert torch.equal(ours.argmax(-1), logits["sdpa"].argmax(-1))
