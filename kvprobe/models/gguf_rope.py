"""Which RoPE does a GGUF file describe, in terms of a transformers configuration?

The keys mean what llama.cpp computes from them; `rope_freqs.weight` holds the factor that stretches each wavelength. A
RoPE that no ``rope_type`` of transformers gives exactly is refused by name.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.errors import UnsupportedModelError
from kvprobe.models.gguf_header import Tensor

# values of a key that change nothing
_WITHOUT_EFFECT: dict[str, tuple[float, ...]] = {
    "attn_factor": (1.0,),
    "yarn_ext_factor": (1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_log_multiplier": (0.0,),
    "alpha": (0.0,),
}
KEYS = frozenset(
    {"rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"}
    | {"rope.scaling.original_context_length", "rope.scaling.finetuned"}
    | {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}
    | {f"rope.scaling.{name}" for name in _WITHOUT_EFFECT}
)


def of_file(
    architecture: str, keys: Mapping[str, Any], freqs: Tensor | None, *, context_length: int, rotary_dim: int
) -> dict[str, Any]:
    """The ``rope_parameters`` of a file: as `parameters`, and for a Gemma 3 one set for each kind of layer."""
    factors = None if freqs is None else _floats(freqs)
    rope = parameters(keys, factors, context_length=context_length, rotary_dim=rotary_dim)
    if architecture == "gemma3":
        # its local layers are never scaled
        local = _positive(keys, "rope.freq_base_swa", 10000.0)
        return {"full_attention": rope, "sliding_attention": {"rope_theta": local, "rope_type": "default"}}
    for key, same in (("rope.freq_base_swa", rope["rope_theta"]), ("rope.dimension_count_swa", rotary_dim)):
        if keys.get(key, same) != same:
            raise UnsupportedModelError(
                f"{key} gives local layers their own RoPE, which is not understood for {architecture}: "
                "take the model's own safetensors"
            )
    return rope


def _floats(tensor: Tensor) -> tuple[float, ...]:
    if tensor.type != 0 or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise UnsupportedModelError(f"{tensor.name} is not a short row of float32: the file is damaged, fetch it again")
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        return struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.n_bytes))


def parameters(
    keys: Mapping[str, Any], freqs: Sequence[float] | None, *, context_length: int, rotary_dim: int
) -> dict[str, Any]:
    """The ``rope_parameters`` of keys without their architecture (``rope.freq_base``) and of ``rope_freqs.weight``.

    ``freqs`` is ``[rotary_dim / 2]``. Raises UnsupportedModelError, naming the key, for a scaling that transformers
    cannot compute.
    """
    theta = _positive(keys, "rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    # llama.cpp takes a factor without a type as linear
    kind = keys.get("rope.scaling.type", "linear")
    factor = _positive(keys, "rope.scaling.factor", _positive(keys, "rope.scale_linear", 1.0, zero=1.0), zero=1.0)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"rope.scaling.type is {kind!r}, but in GGUF files only none, linear and yarn are understood: "
            "take the model's own safetensors"
        )
    for name, neutral in _WITHOUT_EFFECT.items():
        value = keys.get(f"rope.scaling.{name}", neutral[0])
        if value not in neutral and not (name == "attn_factor" and kind == "yarn"):
            raise UnsupportedModelError(
                f"rope.scaling.{name} is {value!r}, and its effect is not understood: take the model's own safetensors"
            )
    if kind == "yarn":
        rope |= _yarn(keys, factor, context_length)
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    if freqs is None or all(freq == 1 for freq in freqs):
        return rope
    if rope["rope_type"] != "default":
        raise UnsupportedModelError(
            f"RoPE is scaled by both rope_freqs.weight and rope.scaling.type {kind!r}, which transformers cannot do: "
            "take the model's own safetensors"
        )
    original = keys.get("rope.scaling.original_context_length")
    return rope | _stretched(freqs, theta, rotary_dim, original if type(original) is int and original > 0 else 8192)


def _positive(keys: Mapping[str, Any], key: str, default: float, *, zero: float | None = None) -> float:
    """The number of a key; ``zero`` is what a 0 means."""
    value = keys.get(key, default)
    if value == 0 and zero is not None:
        return zero
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModelError(f"{key} is {value!r}, not a positive number: the file is damaged, fetch it again")
    return float(value)


def _yarn(keys: Mapping[str, Any], factor: float, context_length: int) -> dict[str, Any]:
    original = keys.get("rope.scaling.original_context_length", 0) or context_length
    if type(original) is not int or original < 0:
        raise UnsupportedModelError(f"rope.scaling.original_context_length is {original!r}, not a number of positions")
    # both scale cosine and sine by 1 + 0.1 ln(factor); llama.cpp also by attn_factor
    scale = (0.1 * math.log(factor) + 1 if factor > 1 else 1.0) * _positive(keys, "rope.scaling.attn_factor", 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": scale,
        "beta_fast": _positive(keys, "rope.scaling.yarn_beta_fast", 32.0, zero=32.0),
        "beta_slow": _positive(keys, "rope.scaling.yarn_beta_slow", 1.0, zero=1.0),
    }


def _stretched(freqs: Sequence[float], theta: float, rotary_dim: int, original: int) -> dict[str, Any]:
    """The linear or llama3 parameters that give these factors of the wavelengths, to float32 precision."""
    factor = max(freqs)
    if len(freqs) != rotary_dim // 2 or not all(0 < freq < math.inf for freq in freqs):
        raise UnsupportedModelError(
            f"rope_freqs.weight does not hold {rotary_dim // 2} positive factors: the file is damaged, fetch it again"
        )
    if min(freqs) == factor:
        return {"rope_type": "linear", "factor": factor}
    # in turns over the original context, llama3 keeps frequencies above `high` and stretches those below `low`
    turns = [original * theta ** (-2 * i / rotary_dim) / (2 * math.pi) for i in range(len(freqs))]
    for low, high in [(1.0, 4.0), *_bounds(freqs, turns, factor)]:
        if 0 < low < high and all(
            math.isclose(freq, _llama3(turn, factor, low, high), rel_tol=1e-6)
            for freq, turn in zip(freqs, turns, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(
        "rope_freqs.weight stretches RoPE unlike any rope_type of transformers: take the model's own safetensors"
    )


def _llama3(turn: float, factor: float, low: float, high: float) -> float:
    if turn > high:
        return 1.0
    if turn < low:
        return factor
    smooth = (turn - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _bounds(freqs: Sequence[float], turns: Sequence[float], factor: float) -> list[tuple[float, float]]:
    """The (low, high) that fit the factors, if any do; the original context length is only their unit."""
    kept = [turn for freq, turn in zip(freqs, turns, strict=True) if freq == 1]
    full = [turn for freq, turn in zip(freqs, turns, strict=True) if freq == factor]
    smooth = [
        (turn, (1 / freq - 1 / factor) / (1 - 1 / factor))
        for freq, turn in zip(freqs, turns, strict=True)
        if freq not in (1, factor)
    ]
    above, below = min(kept, default=2 * max(turns)), max(full, default=min(turns) / 2)
    if factor <= 1 or above <= below:
        return []
    if len(smooth) >= 2:
        (far, near), (first, last) = (smooth[0], smooth[-1]), (smooth[0][1], smooth[-1][1])
        if first <= last:
            return []
        unit = (far[0] - near[0]) / (first - last)
        return [(far[0] - first * unit, far[0] + (1 - first) * unit)]
    if smooth:
        turn, share = smooth[0]
        # one equation for two bounds: halfway between what the neighbours allow
        low = (max(below, (turn - share * above) / (1 - share)) + turn) / 2
        return [(low, low + (turn - low) / share)]
    # any two bounds between the neighbours work
    return [(below + (above - below) / 3, below + 2 * (above - below) / 3)]
