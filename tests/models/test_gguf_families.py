"""Each family from GGUF, beside transformers' own class with the settings written by hand and the weights put back."""

import gguf
import numpy as np
import pytest
import torch

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.models import gguf_convert
from kvprobe.models.gguf_families import FAMILIES
from kvprobe.models.gguf_model import describe
from support.gguf_files import (
    TOKENS,
    draw,
    keys_of,
    shapes_of,
    write,
)
from support.gguf_models import logits, their_model


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
    with pytest.raises(UnsupportedModelError, match=r"1 of its tensors are not part .* 'blk.1.strange.weight'"):
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
