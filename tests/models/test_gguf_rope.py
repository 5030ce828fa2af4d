"""RoPE of GGUF files, beside the formulas of llama.cpp worked out here in float64."""

import math

import numpy as np
import pytest
import torch

from kvprobe.errors import UnsupportedModelError
from kvprobe.models.gguf_model import describe
from kvprobe.models.gguf_rope import parameters
from support.gguf_files import HEAD_DIM, draw, keys_of, shapes_of, write

THETA, DIM = 500000.0, 128
PLAIN = np.array([THETA ** (-2 * i / DIM) for i in range(DIM // 2)])


def llama3_factors(factor, low, high, original):
    """As llama.cpp's converter writes them into ``rope_freqs.weight``."""
    factors = []
    for frequency in PLAIN:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            factors.append(1)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def frequencies(rope, *, positions=131072):
    """What transformers makes of the parameters: frequencies, and the scale of cosine and sine."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=DIM, max_position_embeddings=positions, rope_parameters=dict(rope))
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=torch.device("cpu"))
    return inv_freq.numpy(), scale


def of(keys=None, freqs=None):
    given = {"rope.freq_base": THETA} | {f"rope.scaling.{key}": value for key, value in (keys or {}).items()}
    return parameters(given, freqs, context_length=131072, rotary_dim=DIM)


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [
        pytest.param(8.0, 1.0, 4.0, 8192, id="Llama 3.1"),
        pytest.param(32.0, 1.0, 4.0, 8192, id="Llama 3.2"),
        pytest.param(8.0, 1.0, 4.0, 4096, id="another original context"),
        pytest.param(16.0, 1.5, 6.0, 8192, id="other bounds"),
        pytest.param(8.0, 1.0, 1.2, 8192, id="one frequency between"),
        pytest.param(8.0, 1.0, 1.01, 8192, id="none between"),
    ],
)
def test_llama3_factors_give_the_frequencies_that_they_state(factor, low, high, original):
    freqs = llama3_factors(factor, low, high, original)
    rope = of(freqs=freqs.tolist())
    assert (rope["rope_type"], rope["factor"]) == ("llama3", factor)
    inv_freq, scale = frequencies(rope)
    np.testing.assert_allclose(inv_freq, PLAIN / freqs, rtol=3e-6)
    assert scale == 1


def test_the_published_llama3_parameters_come_back():
    rope = of(freqs=llama3_factors(32.0, 1.0, 4.0, 8192).tolist())
    assert rope == {
        "rope_theta": THETA,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("wrong", [0, 20, 30, 32, 63])
def test_factors_that_no_rope_type_gives_are_refused(wrong):
    freqs = llama3_factors(8.0, 1.0, 4.0, 8192)
    freqs[wrong] *= 1.001
    with pytest.raises(UnsupportedModelError, match=r"^rope_freqs\.weight stretches RoPE unlike any rope_type"):
        of(freqs=freqs.tolist())
    with pytest.raises(UnsupportedModelError, match=r"^rope_freqs\.weight does not hold 64 positive factors"):
        of(freqs=freqs[:-1].tolist())


def test_factors_of_one_are_none_and_equal_ones_are_linear():
    plain = {"rope_theta": THETA, "rope_type": "default"}
    assert of(freqs=[1.0] * 64) == plain == of() == of({"type": "none", "factor": 4.0}) == of({"factor": 0.0})
    assert of(freqs=[2.5] * 64) == {**plain, "rope_type": "linear", "factor": 2.5}


@pytest.mark.parametrize("keys", [{"type": "linear", "factor": 4.0}, {"factor": 4.0}])
def test_linear_scaling_divides_every_frequency(keys):
    # llama.cpp takes a factor without a type for a linear one
    inv_freq, scale = frequencies(of(keys))
    np.testing.assert_allclose(inv_freq, PLAIN / 4, rtol=1e-6)
    assert scale == 1
    old = parameters({"rope.freq_base": THETA, "rope.scale_linear": 4.0}, None, context_length=64, rotary_dim=DIM)
    assert old == of(keys)


def yarn(factor, original, *, fast=32.0, slow=1.0):
    """ggml's rope_yarn: a ramp from the frequencies themselves to those divided by the factor."""

    def turned(n_rot):
        return DIM * math.log(original / (n_rot * 2 * math.pi)) / (2 * math.log(THETA))

    start, end = max(0, math.floor(turned(fast))), min(DIM - 1, math.ceil(turned(slow)))
    keep = 1 - np.clip((np.arange(DIM // 2) - start) / max(0.001, end - start), 0, 1)
    return PLAIN / factor * (1 - keep) + PLAIN * keep


@pytest.mark.parametrize("betas", [{}, {"fast": 24.0, "slow": 2.0}])
def test_yarn_is_that_of_ggml(betas):
    keys = {f"yarn_beta_{name}": value for name, value in betas.items()}
    rope = of({"type": "yarn", "factor": 4.0, "original_context_length": 32768, **keys})
    inv_freq, scale = frequencies(rope)
    np.testing.assert_allclose(inv_freq, yarn(4.0, 32768, **betas), rtol=1e-6)
    assert scale == pytest.approx(0.1 * math.log(4) + 1)
    half = of({"type": "yarn", "factor": 4.0, "original_context_length": 32768, "attn_factor": 0.5})
    assert frequencies(half)[1] == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    # without the key, the original context is the file's own
    assert of({"type": "yarn", "factor": 4.0})["original_max_position_embeddings"] == 131072


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"type": "longrope", "factor": 4.0}, r"rope\.scaling\.type is 'longrope'"),
        ({"type": "su"}, r"rope\.scaling\.type is 'su'"),
        ({"type": "linear", "factor": 4.0, "attn_factor": 1.2}, r"rope\.scaling\.attn_factor is 1\.2"),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, r"rope\.scaling\.yarn_ext_factor is 0\.5"),
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1}, r"rope\.scaling\.yarn_log_multiplier is 0\.1"),
        ({"alpha": 1000.0}, r"rope\.scaling\.alpha is 1000\.0"),
        ({"type": "linear", "factor": -4.0}, r"rope\.scaling\.factor is -4\.0, not a positive number"),
        ({"type": "linear", "factor": math.nan}, r"rope\.scaling\.factor is nan"),
        ({"type": 3}, r"rope\.scaling\.type is 3"),
    ],
)
def test_a_scaling_that_is_not_understood_is_refused_by_name(keys, said):
    with pytest.raises(UnsupportedModelError, match=said):
        of(keys)


def test_two_scalings_at_once_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"scaled by both rope_freqs\.weight and .* 'linear'"):
        of({"type": "linear", "factor": 4.0}, freqs=llama3_factors(8.0, 1.0, 4.0, 8192).tolist())


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "phi3", "starcoder2"])
def test_rope_freqs_of_another_architecture_are_refused_by_name(architecture, tmp_path):
    tensors = draw(shapes_of(architecture)) | {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    write(tmp_path / "model.gguf", architecture, keys_of(architecture), tensors)
    with pytest.raises(UnsupportedModelError, match=r"first 'rope_freqs\.weight'"):
        describe(tmp_path / "model.gguf")
