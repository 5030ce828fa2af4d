"""Small decoders: those of real families, each setting that changes one, and any that can be drawn."""

import torch
from hypothesis import strategies as st

from kvprobe.decoder.model import Decoder, DecoderConfig, Rotary
from kvprobe.decoder.torch_engine import TorchEngine
from kvprobe.decoder.weights import FAMILIES as OURS
from kvprobe.generation.choose_engine import choose_engine

FAMILIES = tuple(OURS)


# settings that change what is computed, one at a time
VARIANTS = {
    "scores divided by the layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "scores not scaled": ("gpt2", {"scale_attn_weights": False}),
    "float32 scores": ("gpt2", {"reorder_and_upcast_attn": True}),
    "another mlp width": ("gpt2", {"n_inner": 40}),
    "attention biases": ("llama", {"attention_bias": True}),
    "mlp biases": ("llama", {"mlp_bias": True}),
    "tied head": ("llama", {"tie_word_embeddings": True}),
    "multi-head": ("llama", {"num_key_value_heads": 4}),
    "multi-query": ("llama", {"num_key_value_heads": 1}),
    "another theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "linear RoPE": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "Llama 3 RoPE": (
        "llama",
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        },
    ),
    "YaRN": (
        "qwen3",
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
            | {"original_max_position_embeddings": 64}
        },
    ),
    "no window": ("mistral", {"sliding_window": None}),
    "some layers local": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "bounded logits": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "only local layers": ("gemma3_text", {"layer_types": ["sliding_attention"] * 3}),
}


def rope_decoder(**settings):
    """A small random decoder with RoPE, sharp enough that positions matter."""
    config = DecoderConfig(
        **{"n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 8, "hidden": 32, "mlp_width": 48, "vocab": 97}
        | {"max_positions": 256}
        | settings
    )
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return decoder.eval().requires_grad_(False)


def close(got, expected, atol=2e-5):
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-5)


def held(cache):
    """Every buffer of a cache, keys and values."""
    return [one for layer in cache.layers for one in layer.tensors().values()]


def same_memory(cache, other, atol=2e-5):
    assert cache.length == other.length
    for ours, theirs in zip(held(cache), held(other), strict=True):
        close(ours, theirs, atol)


def drawn_config(draw):
    n_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n_layers, rotary = draw(st.integers(1, 3)), None
    if draw(st.booleans()):
        rotary = Rotary(
            theta=draw(st.sampled_from([100.0, 10_000.0])),
            scale=draw(st.sampled_from([1.0, 1.3])),
            interleaved=draw(st.booleans()),
        )
    windows = tuple(draw(st.lists(st.none() | st.integers(1, 9), min_size=n_layers, max_size=n_layers)))
    return DecoderConfig(
        n_layers=n_layers,
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        # widths that are no multiple of anything, and one beyond a long row
        head_dim=2 * draw(st.integers(1, 9)),
        hidden=draw(st.sampled_from([2, 31, 40, 131, 300])),
        mlp_width=draw(st.sampled_from([1, 7, 48, 129, 257])),
        vocab=draw(st.sampled_from([97, 103])),
        max_positions=64,
        rotary=rotary,
        local_rotary=None if rotary is None else draw(st.none() | st.just(Rotary(theta=50.0))),
        windows=windows if any(windows) else (),
        norm=draw(st.sampled_from(["layer", "rms"])),
        norm_eps=draw(st.sampled_from([1e-5, 1e-2])),
        post_norms=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        activation=draw(st.sampled_from(["gelu_tanh", "swiglu", "geglu"])),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.05, 1.0)),
        scale_by_layer=draw(st.booleans()),
        embedding_scale=draw(st.sampled_from([1.0, 3.3])),
        tied_head=draw(st.booleans()),
        final_softcap=draw(st.none() | st.just(2.0)),
    )


def rounding(decoder, ids):
    """What may come of rounding alone: some times what comes of it when every weight is off in its last two bits.

    Mostly next to nothing; but a norm of few numbers, or of nearly nothing, magnifies whatever it gets.
    """
    other = Decoder(decoder.config)
    other.load_state_dict(decoder.state_dict())
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 2.0**-22 * torch.empty_like(parameter).uniform_(-1, 1, generator=noise))
        caches = [each.full_cache(ids.shape[1], batch=len(ids)) for each in (decoder, other)]
        logits = [each(ids, cache=cache) for each, cache in zip((decoder, other), caches, strict=True)]
    apart = [logits, *zip(*(held(cache) for cache in caches), strict=True)]
    return max(1e-4, *(4 * float((one - two).abs().max()) for one, two in apart))


def random_decoder(config, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder = Decoder(config)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.add_(
                    torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
                )
    return decoder.to(dtype).eval().requires_grad_(False)


def in_bfloat16(decoder):
    """The decoder with its weights rounded to bfloat16, and the same numbers in float32."""
    low = from_config(decoder, torch.bfloat16)
    high = from_config(low, torch.float32)
    return low, high


def from_config(decoder, dtype):
    made = Decoder(decoder.config)
    made.load_state_dict(decoder.state_dict())
    return made.to(dtype).eval().requires_grad_(False)


def prefill(decoder, ids, cache, *, kind="auto", **settings):
    """The logits after a prompt, by an engine of its own."""
    return choose_engine(decoder, cache, kind).prefill(ids, **settings)


def decode(decoder, token, cache):
    """The readable decoder's logits after one token a row, ``[batch, vocab]``."""
    return TorchEngine(decoder, cache).decode(token[:, None])[:, 0]


class stepper:  # noqa: N801
    """An engine fed one token a row at a time: `.step(token)` is its logits ``[batch, vocab]``."""

    def __init__(self, decoder, cache, choice="auto", **how):
        self.engine = choose_engine(decoder, cache, choice, **how)
        self.name, self.note = self.engine.name, self.engine.note

    def step(self, token):
        return self.engine.decode(token[:, None])[:, 0]
