import json
import subprocess
import sys

import pytest

from kvprobe.errors import UnsupportedModelError
from kvprobe.shape.spec import Spec
from support.tiny import FAMILIES, N_LAYERS, VOCAB, WINDOW, tiny_config


def written(family, **overrides):
    """What transformers writes into config.json."""
    return json.loads(tiny_config(family, **overrides).to_json_string(use_diff=True))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tiny_configs_read_as_they_were_made(family):
    spec = Spec.from_config(written(family))
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.n_heads) == (family, VOCAB, 32, 4)
    assert spec.n_layers == len(spec.kinds) == len(spec.windows) == (2 if family == "gpt_neo" else N_LAYERS)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen3", "gemma3_text", "gpt_neox", "opt", "phi"])
def test_widths_are_those_of_the_keys_a_model_caches(family):
    import torch
    from transformers import DynamicCache

    from support.tiny import tiny_model

    cache = DynamicCache()
    tiny_model(family)(torch.arange(3, 9)[None], cache=cache, use_cache=True)
    spec = Spec.from_config(written(family))
    for layer in cache.layers:
        assert (layer.keys.shape[1], layer.keys.shape[-1]) == (spec.n_kv_heads, spec.head_dim)
        assert layer.keys.shape[1] * layer.keys.shape[-1] == spec.kv_width
        assert layer.values.shape[-1] == spec.v_head_dim


# what the published repositories' config.json say, by hand
PUBLISHED = {
    "gpt2": (
        {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
        | {"vocab_size": 50257},
        {"n_kv_heads": 12, "head_dim": 64, "intermediate_size": 3072, "position": "learned", "max_positions": 1024}
        | {"rope_theta": None, "tied": True},
    ),
    "llama-3-8b": (
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
        | {"num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256}
        | {"max_position_embeddings": 8192, "rope_scaling": None, "tie_word_embeddings": False},
        {"kv_width": 1024, "rope_theta": 500000.0, "tied": False, "max_positions": 8192},
    ),
    "mistral-7b-v0.1": (
        {"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 32000},
        {"windows": (4096,) * 32, "kinds": ("sliding",) * 32},
    ),
    "mistral-7b-v0.3": (
        {"model_type": "mistral", "sliding_window": None, "vocab_size": 32768, "rope_theta": 1000000.0},
        {"windows": (None,) * 32, "kinds": ("full",) * 32},
    ),
    "qwen2.5-0.5b": (
        {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_hidden_layers": 24}
        | {"num_key_value_heads": 2, "sliding_window": 32768, "max_window_layers": 24, "use_sliding_window": False}
        | {"vocab_size": 151936, "tie_word_embeddings": True},
        {"kv_width": 128, "windows": (None,) * 24, "tied": True},
    ),
    "qwen2 with its window switched on": (
        {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 7}
        | {"max_window_layers": 2},
        {"windows": (None, None, 7, 7)},
    ),
    "gemma-3-270m": (
        {"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4}
        | {"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "_sliding_window_pattern": 6}
        | {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        {"kv_width": 256, "windows": ((512,) * 5 + (None,)) * 3, "rope_theta": 1e6, "rope_theta_local": 1e4},
    ),
    "gemma-3-4b (text part of a multimodal model)": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34}},
        {"family": "gemma3_text", "n_layers": 34, "tied": True},
    ),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
        | {"multi_query": True, "new_decoder_architecture": False, "alibi": False},
        {"kv_width": 64, "n_kv_heads": 1, "position": "rope"},
    ),
    "falcon-40b": (
        {"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60}
        | {"num_kv_heads": 8, "new_decoder_architecture": True},
        {"n_kv_heads": 8, "head_dim": 64},
    ),
    "bloom-560m": (
        {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880},
        {"position": "alibi", "max_positions": None, "n_heads": 16, "hidden_size": 1024},
    ),
    "mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048}
        | {"attn_config": {"alibi": True, "attn_type": "multihead_attention"}},
        {"position": "alibi", "max_positions": None, "n_kv_heads": 32, "intermediate_size": 16384},
    ),
    "deepseek-v3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61}
        | {"num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        | {"v_head_dim": 128},
        {"head_dim": 192, "v_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_kv_heads": 128},
    ),
    "pythia with another base": (
        {"model_type": "gpt_neox", "rotary_emb_base": 5000, "rotary_pct": 0.25},
        {"rope_theta": 5000.0, "position": "rope"},
    ),
    "qwen3-next": (
        {"model_type": "qwen3_next", "num_hidden_layers": 8, "full_attention_interval": 4},
        {"kinds": ("linear", "linear", "linear", "full") * 2, "windows": (None,) * 8},
    ),
    "gpt-neo": (
        {"model_type": "gpt_neo", "num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9},
        {"windows": (None, 9, None, 9), "position": "learned"},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    config, expected = PUBLISHED[name]
    spec = Spec.from_config(config)
    assert {key: getattr(spec, key) for key in expected} == expected


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "gpt_neo"])
def test_windows_are_where_a_change_of_an_old_token_stops_being_seen(family):
    from support.tiny import tiny_ids, tiny_model

    # one layer of each kind alone: its reach is its window, itself counted
    for kind in ("sliding_attention", "full_attention"):
        if family == "gpt_neo":
            name = "local" if kind.startswith("sliding") else "global"
            overrides = {"num_layers": 1, "attention_types": [[[name], 1]]}
        elif family == "mistral":
            overrides = {"num_hidden_layers": 1, "sliding_window": WINDOW if kind.startswith("sliding") else None}
        else:
            overrides = {"num_hidden_layers": 1, "layer_types": [kind]}
        window = Spec.from_config(written(family, **overrides)).windows[0]
        model, ids = tiny_model(family, **overrides), tiny_ids(20)
        seen = []
        for reach in range(1, 20):
            other = ids.clone()
            other[0, 19 - reach + 1] = (ids[0, 19 - reach + 1] + 1) % VOCAB
            before, after = (model(x, use_cache=False).logits[0, -1] for x in (ids, other))
            seen.append((before - after).abs().max() > 1e-4)  # experts sum other tokens in another order: 1e-7
        assert sum(seen) == (window or 19), (kind, seen)
        assert seen == sorted(seen, reverse=True)


def test_layers_of_an_unknown_type_are_refused_by_name():
    config = {"model_type": "llama4_text", "layer_types": ["spiral_attention"], "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "hidden_size": 8, "vocab_size": 9, "rope_theta": 1.0}
    with pytest.raises(UnsupportedModelError, match=r"llama4_text.*spiral_attention"):
        Spec.from_config(config)


def test_an_unlisted_family_must_state_its_shape():
    with pytest.raises(UnsupportedModelError, match=r"novel.*n_layers.*num_hidden_layers"):
        Spec.from_config({"model_type": "novel", "hidden_size": 8, "vocab_size": 9})
    with pytest.raises(UnsupportedModelError, match="model_type"):
        Spec.from_config({"hidden_size": 8})


def test_reading_a_configuration_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from kvprobe.shape.spec import Spec; Spec.from_config({'model_type': 'gpt2'}); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_hidden_layers": 0}, "says 0 for n_layers"),
        ({"num_hidden_layers": -1}, "says -1 for n_layers"),
        ({"head_dim": 2.5}, "says 2.5 for head_dim"),
        ({"head_dim": -4}, "says -4 for head_dim"),
        ({"hidden_size": True}, "says True for hidden_size"),
        ({"num_key_value_heads": 3}, "has 3 key/value heads for 4 query heads, which they do not divide"),
        ({"num_key_value_heads": 8}, "has 8 key/value heads for 4"),
        ({"max_position_embeddings": 128.5}, "says 128.5 for max_positions"),
        ({"sliding_window": -1, "layer_types": ["sliding_attention"] * 2}, "says -1 for sliding_window"),
    ],
)
def test_a_configuration_that_counts_what_cannot_be_is_refused(changed, says):
    whole = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    whole |= {"vocab_size": 99, "intermediate_size": 64}
    assert Spec.from_config(whole).n_kv_heads == 4
    # as Gemma 3n has it, a width a layer
    assert Spec.from_config(whole | {"model_type": "unheard_of", "intermediate_size": [64, 64]}).n_layers == 2
    with pytest.raises(UnsupportedModelError, match=says):
        Spec.from_config(whole | changed)
