"""Which model does a GGUF file describe, is it complete, and is every key understood?

All of this comes from the header: a refusal needs neither torch nor transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.models import gguf_rope
from kvprobe.models.gguf_families import FAMILIES, NOT_CAUSAL, OTHERS, SOFTCAPS, Family
from kvprobe.models.gguf_header import Header, Skipped, Tensor, read_whole, shown
from kvprobe.models.gguf_vocabulary import check_vocabulary

MOST_LAYERS = 10_000
_HINT = "take the model's own safetensors"

_COUNTS = ("block_count", "context_length", "embedding_length", "attention.head_count")
_READ = {*_COUNTS, "feed_forward_length", "attention.head_count_kv", "vocab_size", *gguf_rope.KEYS}
_READ |= {"attention.key_length", "attention.value_length", "attention.sliding_window", "attention.scale"}
_READ |= {"attention.key_length_swa", "attention.value_length_swa", "rope.freq_base_swa", "rope.dimension_count_swa"}
# these change no logit
_HARMLESS = {"tensor_data_layout", "pooling_type"}
# values of a key that have no effect in a family that does not use it
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "ssm.dt_b_c_rms": (False,),
}
# does the router make the experts' weights sum to one; do attention and MLP run in parallel
_FIXED = {"expert_weights_norm": ("qwen3moe",), "use_parallel_residual": ("falcon",)}


@dataclass(frozen=True)
class Described:
    """A model as its file describes it; ``settings`` are those of a transformers configuration, if known."""

    header: Header
    architecture: str
    settings: dict[str, Any]
    rope: dict[str, Any] | None

    @property
    def n_bytes(self) -> int:
        """Bytes of all its tensors in float32."""
        return 4 * sum(tensor.n_elements for tensor in self.header.tensors.values())


def describe(path: Path, *, name: str | None = None, text: bool = True) -> Described:
    """The model of a GGUF file, or of all parts of a split one; without ``text``, it need not be able to read text.

    Raises KvprobeError for a damaged or incomplete file, UnsupportedModelError for what is not understood.
    """
    header = read_whole(path)
    name = name or path.name
    try:
        return _described(header, text=text)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from None
    except KvprobeError as error:
        raise KvprobeError(f"{name}: {error}") from None


def _described(header: Header, *, text: bool) -> Described:
    keys = header.keys
    architecture = keys.get("general.architecture")
    if not isinstance(architecture, str):
        raise KvprobeError("general.architecture is missing: the header is damaged; fetch the file again")
    if (kind := keys.get("general.type", "model")) != "model":
        raise UnsupportedModelError(f"general.type is {kind!r}: the file does not hold a complete model")
    if architecture in NOT_CAUSAL:
        raise UnsupportedModelError(f"the architecture {architecture} is not a causal language model")
    if architecture not in FAMILIES and architecture not in OTHERS:
        raise UnsupportedModelError(
            f"the architecture {shown(architecture)} is not read from GGUF files (known: "
            f"{', '.join(sorted((*FAMILIES, *OTHERS)))}): {_HINT}"
        )
    if not header.tensors:
        raise KvprobeError("it has no tensors, only a vocabulary: take the file with the model's weights")
    own = {
        key.removeprefix(f"{architecture}."): value for key, value in keys.items() if key.startswith(f"{architecture}.")
    }
    _refuse_foreign(keys, architecture)
    n_layers = own.get("block_count")
    if type(n_layers) is not int or not 0 < n_layers <= MOST_LAYERS:
        raise KvprobeError(f"block_count is {n_layers!r}, not a number of layers up to {MOST_LAYERS:,}: it is damaged")
    n_tokens = check_vocabulary(keys, text=text)
    own = {key: one_for_all(value, n_layers) for key, value in own.items()}
    family = FAMILIES.get(architecture)
    for key, value in own.items():
        if not _understood(key, value, architecture, family):
            raise _not_understood(architecture, key, value)
    if family is None:
        return Described(header, architecture, {}, None)
    return _known(header, architecture, family, own, n_tokens)


def _refuse_foreign(keys: Mapping[str, Any], architecture: str) -> None:
    """Refuse a computation's key under another prefix; a publisher's own notes under theirs are harmless."""
    for key in keys:
        prefix, _, rest = key.partition(".")
        if prefix not in (architecture, "general", "tokenizer", "split") and rest in _READ | _NEUTRAL.keys():
            raise UnsupportedModelError(f"it is of the architecture {architecture}, but the key {shown(key)} is not")


def _understood(key: str, value: Any, architecture: str, family: Family | None) -> bool:
    if key in _HARMLESS:
        return True
    if key in _FIXED:
        return value is (architecture in _FIXED[key])
    if family is None and key in OTHERS[architecture]:
        return True
    if family is not None and key in (*_READ, *family.keys, family.epsilon[0]):
        return family.rotary or not key.startswith("rope.")
    if key == "attention.sliding_window_pattern":
        return architecture in ("gemma2", "gemma3")
    return value in _NEUTRAL.get(key, ())


def _not_understood(architecture: str, key: str, value: Any) -> UnsupportedModelError:
    said = f" ({value!r})" if isinstance(value, int | float) else ""
    return UnsupportedModelError(
        f"the effect of {shown(f'{architecture}.{key}')}{said} on a model of this architecture is not understood: "
        + _HINT
    )


def _known(header: Header, architecture: str, family: Family, own: dict[str, Any], n_tokens: int) -> Described:
    counts = {key: _count(own, key) for key in _COUNTS}
    for key in family.needs:
        if key not in own:
            raise _missing(key)
    heads, hidden = counts["attention.head_count"], counts["embedding_length"]
    kv_heads = _count(own, "attention.head_count_kv", heads)
    if heads % kv_heads:
        raise KvprobeError(f"{heads} query heads cannot share {kv_heads} KV heads: the header is damaged")
    head_dim, rotary_dim = _head(own, architecture, family, hidden, heads)
    n_vocab = _count(own, "vocab_size", n_tokens)
    if n_tokens > n_vocab:
        raise KvprobeError(f"it has {n_tokens:,} tokens but a vocab_size of {n_vocab:,}: the header is damaged")
    sizes = {"C": counts["context_length"], "D": head_dim, "H": hidden, "K": kv_heads * head_dim, "N": n_vocab}
    sizes["Q"] = heads * head_dim
    for letter, key in (("F", "feed_forward_length"), ("E", "expert_count"), ("M", "expert_feed_forward_length")):
        if own.get(key):
            sizes[letter] = _count(own, key)
    settings: dict[str, Any] = {"vocab_size": n_vocab, "tie_word_embeddings": "output.weight" not in header.tensors}
    settings |= _held_to_tensors(header, family, counts["block_count"], sizes)
    key, setting = family.epsilon
    settings[setting] = _epsilon(own, key)
    if family.kv_heads:
        settings["num_key_value_heads"] = kv_heads
    elif architecture == "falcon" and kv_heads != 1:
        raise UnsupportedModelError(f"a Falcon with {kv_heads} KV heads orders its fused weights differently: {_HINT}")
    if family.rotary and (
        head_dim != hidden // heads or architecture in ("llama", "qwen3", "qwen3moe", "gemma2", "gemma3")
    ):
        settings["head_dim"] = head_dim
    settings |= _of_family(architecture, own, counts, head_dim, sizes)
    rope = None
    if family.rotary:
        freqs = header.tensors.get("rope_freqs.weight")
        rope = gguf_rope.of_file(architecture, own, freqs, context_length=sizes["C"], rotary_dim=rotary_dim)
        if family.partial_rotary:
            rope["partial_rotary_factor"] = rotary_dim / head_dim
    return Described(header, architecture, settings, rope)


def _count(own: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = own.get(key, default)
    if value is None:
        raise _missing(key)
    if isinstance(value, list | Skipped):
        raise UnsupportedModelError(f"{key} differs from layer to layer, which is not read from GGUF files: {_HINT}")
    if type(value) is not int or not 0 < value < 2**31:
        raise KvprobeError(f"{key} is {value!r}, not a positive number: the header is damaged; fetch the file again")
    return value


def one_for_all(value: Any, n_layers: int) -> Any:
    """A number repeated for each layer, as one number; anything else unchanged."""
    same = isinstance(value, list) and len(value) == n_layers and all(type(number) is int for number in value)
    return value[0] if same and len({*value}) == 1 else value


def _missing(key: str) -> KvprobeError:
    return KvprobeError(f"the key {key} is missing: the header is damaged; fetch the file again")


def _epsilon(own: Mapping[str, Any], key: str) -> float:
    value = own.get(key)
    if type(value) is not float or not 0 <= value < 1:
        raise KvprobeError(f"{key} is {value!r}, not a small number: the header is damaged; fetch the file again")
    return value


def _head(own: Mapping[str, Any], architecture: str, family: Family, hidden: int, heads: int) -> tuple[int, int]:
    """Components of a head, and how many of them RoPE rotates."""
    by_rope = _count(own, "rope.dimension_count", hidden // heads)
    head_dim = _count(own, "attention.key_length", by_rope if architecture == "llama" else hidden // heads)
    rotary_dim = _count(own, "rope.dimension_count", head_dim)
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        if own.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(f"{key} is {own[key]!r}, but a key's head has {head_dim} components: {_HINT}")
    partial = family.partial_rotary and rotary_dim < head_dim and int(head_dim * (rotary_dim / head_dim)) == rotary_dim
    if family.rotary and (rotary_dim % 2 or (rotary_dim != head_dim and not partial)):
        raise UnsupportedModelError(
            f"rope.dimension_count is {rotary_dim}, but a head has {head_dim} components, which is not understood for "
            f"{architecture}: {_HINT}"
        )
    return head_dim, rotary_dim


def _held_to_tensors(header: Header, family: Family, n_layers: int, sizes: dict[str, int]) -> dict[str, bool]:
    """Check that the tensors are exactly those that the keys say, in shape too; returns which biases there are."""
    # before a claimed million layers are listed
    names = set(header.tensors)
    present = {name.split(".")[1] for name in names if name.startswith("blk.")}
    if len(present) < n_layers and str(n_layers - 1) not in present and len(present) < n_layers - len(family.layer):
        raise KvprobeError(
            f"block_count is {n_layers:,} but there are tensors of {len(present):,} layers: it is damaged"
        )
    expected = dict(family.outside)
    for i in range(n_layers):
        expected |= {f"blk.{i}.{tensor}": shape for tensor, shape in family.layer.items()}
    settings = {}
    for setting, group in family.biases.items():
        optional = {f"blk.{i}.{tensor}": shape for i in range(n_layers) for tensor, shape in group.items()}
        settings[setting] = not names.isdisjoint(optional)
        if settings[setting]:
            expected |= optional
    if missing := sorted(expected.keys() - names):
        many = f"{len(missing):,} of its {len(expected):,} tensors are" if len(missing) > 1 else "a tensor is"
        raise KvprobeError(f"{many} missing, first {missing[0]}: the file is damaged or a part of one; fetch it again")
    if family.untied:
        expected["output.weight"] = "N H"
    if family is FAMILIES["llama"]:
        names.discard("rope_freqs.weight")
    if unknown := sorted(names - expected.keys()):
        raise UnsupportedModelError(
            f"{len(unknown):,} of its tensors are not part of the architecture as it is known here, first "
            f"{shown(unknown[0])}: {_HINT}"
        )
    for name, shape in expected.items():
        if name in names:
            _fit(header.tensors[name], shape, sizes)
    return settings


def _fit(tensor: Tensor, shape: str, sizes: dict[str, int]) -> None:
    """Check a shape against the keys; a size that no key gives is set by the first tensor that has it."""
    letters = shape.split()
    actual = tensor.shape
    while len(actual) > len(letters) and actual[0] == 1:
        actual = actual[1:]
    if len(actual) == len(letters):
        for letter, size in zip(letters, actual, strict=True):
            sizes.setdefault(letter, size)
        if actual == tuple(sum(sizes[part] for part in letter.split("+")) for letter in letters):
            return
    said = " × ".join("+".join(str(sizes.get(part, part)) for part in letter.split("+")) for letter in letters)
    raise KvprobeError(
        f"{tensor.name} has the shape {' × '.join(map(str, tensor.shape))} where the keys say {said}: "
        "the file is damaged; fetch it again"
    )


def _of_family(
    architecture: str, own: Mapping[str, Any], counts: Mapping[str, int], head_dim: int, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """The settings that only this family has; transformers 5.24 leaves them at those of one published model."""
    settings: dict[str, Any] = {}
    if "E" in sizes and _count(own, "expert_used_count") > sizes["E"]:
        raise KvprobeError(f"expert_used_count is {own['expert_used_count']} of {sizes['E']} experts: it is damaged")
    window = own.get("attention.sliding_window", 0)
    if architecture == "gpt2":
        settings |= {"n_positions": counts["context_length"], "n_inner": sizes["F"]}
    if architecture == "falcon":
        settings["ffn_hidden_size"] = sizes["F"]
    if architecture == "bloom" and sizes["F"] != 4 * sizes["H"]:
        raise UnsupportedModelError(f"feed_forward_length is {sizes['F']}, but a Bloom's is four times its width")
    if "M" in sizes and architecture.endswith("moe"):
        settings["moe_intermediate_size"] = sizes["M"]
    if "S" in sizes:
        settings["shared_expert_intermediate_size"] = sizes["S"]
    if type(window) is not int:
        raise UnsupportedModelError(f"attention.sliding_window differs from layer to layer: {_HINT}")
    if FAMILIES[architecture].local:
        settings["sliding_window"] = window or None
    elif 0 < window < counts["context_length"]:
        raise _not_understood(architecture, "attention.sliding_window", window)
    scale = own.get("attention.scale", 0)
    if architecture in ("gemma2", "gemma3"):
        for key in SOFTCAPS:
            if key in own:
                settings[key] = own[key] or None
                if type(own[key]) is not float or not 0 <= own[key] < math.inf:
                    raise KvprobeError(f"{key} is {own[key]!r}, not a positive number: the header is damaged")
        # as in llama.cpp: the largest model of either family is told by its layers
        largest = counts["block_count"] == {"gemma2": 46, "gemma3": 62}[architecture]
        settings["query_pre_attn_scalar"] = sizes["H"] // counts["attention.head_count"] if largest else head_dim
        settings |= _pattern(own, architecture, counts["block_count"])
    if scale and not math.isclose(scale, settings.get("query_pre_attn_scalar", head_dim) ** -0.5, rel_tol=1e-6):
        raise UnsupportedModelError(f"attention.scale is {scale!r}, not one over the square root of the head: {_HINT}")
    return settings


def _pattern(own: Mapping[str, Any], architecture: str, n_layers: int) -> dict[str, Any]:
    """Which layers are local: by a list, by a period, or by the family."""
    said = own.get("attention.sliding_window_pattern", {"gemma2": 2, "gemma3": 6}[architecture])
    if type(said) is int and said > 0:
        said = [(i + 1) % said != 0 for i in range(n_layers)]
    if not isinstance(said, list) or len(said) != n_layers or not {*said} <= {True, False}:
        raise UnsupportedModelError(f"attention.sliding_window_pattern is {said!r}, not one for {n_layers} layers")
    return {"layer_types": ["sliding_attention" if local else "full_attention" for local in said]}
