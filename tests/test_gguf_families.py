"""Each family from GGUF, beside transformers' own class with the settings written by hand and the weights put back."""

import gguf
import numpy as np
import pytest
import torch

from gguf_files import CONTEXT, EXPERTS, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, TOKENS, draw, keys_of, shapes_of, write
from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.models import gguf_convert
from kvprobe.models.gguf_families import FAMILIES
from kvprobe.models.gguf_model import describe

EPS = 1e-3
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
SIZES = {"vocab_size": len(TOKENS), "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": MLP}
SIZES |= {"num_attention_heads": HEADS, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
GROUPED = SIZES | {"num_key_value_heads": KV_HEADS}
RMS = GROUPED | {"rms_norm_eps": EPS, "rope_parameters": ROPE}
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}

# the class of transformers and the settings that the keys of gguf_files mean
BY_HAND = {
    "llama": ("Llama", RMS | {"head_dim": 8}),
    "qwen2": ("Qwen2", RMS),
    "qwen3": ("Qwen3", RMS | {"head_dim": 8}),
    "qwen2moe": ("Qwen2Moe", RMS | MOE | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False}),
    "qwen3moe": ("Qwen3Moe", RMS | MOE | {"head_dim": 8, "norm_topk_prob": True}),
    "gemma2": (
        "Gemma2",
        RMS | GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3",
        RMS
        | GEMMA
        | {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 10000.0}}},
    ),
    "phi3": (
        "Phi3",
        RMS | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.75}, "sliding_window": 5, "pad_token_id": 0},
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": len(TOKENS), "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT}
        | {"n_inner": MLP, "layer_norm_epsilon": EPS, "tie_word_embeddings": False},
    ),
    "bloom": (
        "Bloom",
        {"vocab_size": len(TOKENS), "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
        | {"layer_norm_epsilon": EPS, "tie_word_embeddings": False},
    ),
    "starcoder2": ("Starcoder2", GROUPED | {"norm_epsilon": EPS, "rope_parameters": ROPE}),
    "stablelm": (
        "StableLm",
        GROUPED | {"layer_norm_eps": EPS, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "nemotron": (
        "Nemotron",
        GROUPED | {"norm_eps": EPS, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "falcon": (
        "Falcon",
        {"vocab_size": len(TOKENS), "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
        | {"num_attention_heads": HEADS, "ffn_hidden_size": MLP, "layer_norm_epsilon": EPS}
        | {"rope_parameters": ROPE | {"rope_theta": 10000.0}},
    ),
}


def halves(rows, n_heads):
    """llama.cpp keeps the rotary pairs of a head side by side, transformers in two halves: row 2i goes to i."""
    by_head = rows.reshape(n_heads, -1, *rows.shape[1:])
    return np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(rows.shape)


def by_heads(rows):
    """Bloom's fused rows: all queries, keys, values in a file; head by head in transformers."""
    return np.stack([part.reshape(HEADS, 8, *rows.shape[1:]) for part in np.split(rows, 3)], axis=1).reshape(rows.shape)


def put_back(architecture, name, values):
    """What llama.cpp's own converter did to a tensor, undone."""
    if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
        return halves(values, HEADS if "attn_q." in name else KV_HEADS)
    if architecture in ("gemma2", "gemma3", "nemotron") and "norm.weight" in name:
        return values - 1
    if architecture == "gpt2" and ".ffn_" + "norm" not in name and values.ndim == 2 and name.startswith("blk."):
        return values.T
    if architecture == "bloom" and "attn_qkv" in name:
        return by_heads(values)
    return values


def their_model(architecture, tensors, **changed):
    """transformers' own model of the family, holding the tensors."""
    import transformers

    kind, settings = BY_HAND[architecture]
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(**(settings | changed))
    model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config).eval()
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    filled = {}
    for name in model.state_dict():
        stem, _, ending = name.rpartition(".")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            block = f"blk.{name.split('.')[2]}.ffn_"
            parts = ("gate", "up") if "gate_up" in name else ("down",)
            values = np.concatenate([tensors[f"{block}{part}_exps.weight"] for part in parts], axis=1)
        else:
            found = (
                "token_embd"
                if stem == "lm_head" and "output.weight" not in tensors
                else names.get_name(stem) or names.get_name(stem.removeprefix("transformer."))
            )
            values = put_back(architecture, f"{found}.{ending}", tensors[f"{found}.{ending}"])
        filled[name] = torch.from_numpy(np.ascontiguousarray(values)).reshape(model.state_dict()[name].shape)
    model.load_state_dict(filled, strict=True)
    return model


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Writes a file and converts it in this process; the model that comes of it."""
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    def make(architecture, tensors, keys=None, **more):
        # what the conversion changes in its own process
        monkeypatch.setattr(gguf, "GGUFReader", gguf.GGUFReader)
        name = "get_gguf_hf_weights_map"
        monkeypatch.setattr(modeling_gguf_pytorch_utils, name, getattr(modeling_gguf_pytorch_utils, name))
        path, directory = tmp_path / "model.gguf", tmp_path / "made"
        write(path, architecture, keys_of(architecture) if keys is None else keys, tensors, **more)
        gguf_convert._convert_here(path, directory)
        monkeypatch.undo()
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    return make


def logits(model):
    ids = torch.arange(3, 3 + 40)[None] % len(TOKENS)
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_computes_what_transformers_own_class_does(architecture, converted):
    tensors = draw(shapes_of(architecture))
    expected = logits(their_model(architecture, tensors))
    torch.testing.assert_close(logits(converted(architecture, tensors)), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "factors", "stretch"),
    [
        ({}, [1.0, 1.0, 8.0, 8.0], [1.0, 1.0, 8.0, 8.0]),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, None, [4.0] * 4),
        ({"rope.scale_linear": 4.0}, None, [4.0] * 4),
    ],
)
def test_a_converted_model_turns_by_the_frequencies_of_its_file(converted, more, factors, stretch):
    tensors = draw(shapes_of("llama"))
    expected = their_model("llama", tensors)
    plain = logits(expected)
    expected.model.rotary_emb.inv_freq /= torch.tensor(stretch)
    freqs = {} if factors is None else {"rope_freqs.weight": np.array(factors, np.float32)}
    got = logits(converted("llama", tensors | freqs, keys_of("llama") | more))
    torch.testing.assert_close(got, logits(expected), rtol=1e-5, atol=1e-4)
    assert (got - plain).abs().max() > 0.1


def test_a_gemma_3_scales_its_full_layers_only(converted):
    keys = keys_of("gemma3") | {"block_count": 2, "attention.sliding_window_pattern": [True, False]}
    keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 2000.0}
    tensors = draw(shapes_of("gemma3"))
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}}
    rope |= {"sliding_attention": {"rope_type": "default", "rope_theta": 2000.0}}
    kinds = ["sliding_attention", "full_attention"]
    expected = their_model("gemma3", tensors, rope_parameters=rope, layer_types=kinds)
    torch.testing.assert_close(logits(converted("gemma3", tensors, keys)), logits(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_file_without_any_one_of_its_tensors_is_refused_and_one_too_many_is_named(architecture, tmp_path):
    keys, tensors = keys_of(architecture), draw(shapes_of(architecture))
    path = tmp_path / "model.gguf"
    for name in tensors:
        write(path, architecture, keys, {other: tensors[other] for other in tensors if other != name})
        if name == "output.weight":
            assert describe(path).settings["tie_word_embeddings"]
            continue
        with pytest.raises(KvprobeError, match=f"^model.gguf: a tensor is missing, first {name}: "):
            describe(path)
    write(path, architecture, keys, tensors | {"blk.1.strange.weight": np.ones(32, np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"1 of its tensors are no part .* 'blk.1.strange.weight'"):
        describe(path)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_tensor_of_another_shape_than_the_keys_say_is_refused(architecture, tmp_path):
    keys, shapes = keys_of(architecture), shapes_of(architecture)
    path = tmp_path / "model.gguf"
    for name, shape in shapes.items():
        if not name.startswith("blk.1."):
            write(path, architecture, keys, draw(shapes | {name: (shape[0] + 32, *shape[1:])}))
            with pytest.raises(KvprobeError, match=r"^model.gguf: .*(shape|vocab_size)"):
                describe(path)


@pytest.mark.parametrize(
    ("cut", "add_bos", "ids"),
    [
        # llama.cpp puts BOS before a Llama 3's text unless a key says otherwise, and takes `tab` whole
        ("llama-bpe", None, ["<s>", "tab"]),
        ("llama-bpe", False, ["tab"]),
        ("smollm", None, ["t", "a", "b"]),
        ("smollm", True, ["<s>", "t", "a", "b"]),
    ],
)
def test_the_way_a_vocabulary_cuts_text_is_that_of_its_file(converted, tmp_path, cut, add_bos, ids):
    from transformers import AutoTokenizer

    tokens = [*TOKENS[:-1], "tab"]
    more = {"tokenizer.ggml.pre": cut, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["t h"]}
    more |= {} if add_bos is None else {"tokenizer.ggml.add_bos_token": add_bos}
    converted("llama", draw(shapes_of("llama")), more=more)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer("tab").input_ids == [tokens.index(token) for token in ids]
