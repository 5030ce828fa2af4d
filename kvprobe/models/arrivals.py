"""Does every tensor of a checkpoint arrive in the model with the numbers that it stands for?

Checked twice: in the files before loading (codes that nothing would decode), and in what transformers reports after
loading (weights made up, tensors left over).
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.models.headers import Tensor, weight_files

# what transformers decodes into floating-point numbers while loading, without another package
DEQUANTISED = ("fp8", "mxfp8", "mxfp4")
_MAKERS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
}
# tensors of quantised weights: codes, scales, zero points, and what else their libraries store beside them
_OF_CODES = re.compile(
    r"(^|\.)((weight|input|output|activation|act|pre_quant|q|k|v|kv|key|value)_scales?(_inv|_\d)?|scales|_scale|_data)$"
    r"|(^|[._])(qweight|qzeros|qscales|g_idx|scale_inv|zero_points?|weight_packed|weight_shape|(nested_)?absmax"
    r"|(nested_)?quant_map|quant_state\..*|SCB|amax|codebooks)$"
)
_CODE_TYPES = ("F8_", "F6_", "F4", "I8", "U8", "I16", "U16", "I32", "U32", "U64")
# computed from the configuration whenever a model is built, so not needed from a file
_RECOMPUTED = re.compile(
    r"(^|\.)((original_)?inv_freq|(cos|sin)_cached|freqs_cis|masked_bias|causal_mask|position_ids|token_type_ids"
    r"|embed_positions(\.weights)?|_float_tensor)$"
)
_MASK = re.compile(r"(^|\.)(attn|attention|crossattention)\.bias$")
# heads of other tasks, beside the one that predicts the next token: nothing reads their output
_OTHER_HEADS = re.compile(r"^(score|classifier|v_head)\.")
_UNSAID = "unsaid"
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.(\d+)\.")
# tensors of a layer that predicts the token after the next and does not affect the next
_FORESIGHT = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head)(\.|$)")
_FORESIGHT_PART = re.compile(r"^(model\.)?(mtp|nextn)[a-z_]*\.")
_OTHER_TOWERS = re.compile(
    r"^([^.]+\.){0,2}(vision_(tower|model|encoder|embed_tokens|projector|adapter)|visual|vit|(multi_?modal|mm)_projector"
    r"|image_(newline|encoder)|img_processor|aligner|audio_(tower|model|encoder|projection)|embed_(vision|audio)"
    r"|speech_encoder|talker|token2wav|code2wav)(\.|$)"
)


def refuse_codes(name: str, directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
    """Raise UnsupportedModelError for quantised weights that nothing here would decode.

    Returns the quantisation method if transformers decodes it; None for plain weights.
    """
    method = _method(config)
    if method is not None and method not in DEQUANTISED:
        raise _refused(name, f"by {_MAKERS.get(method, method)} (its config.json says so)")
    codes = [key for key, tensor in tensors.items() if _is_code(key, tensor)]
    if method is not None:
        for key in codes:
            scales = _scales_of(key, tensors)
            if not scales and not _is_scale(key):
                raise _refused(name, f"by {method}, but nothing says how {key} ({tensors[key].dtype}) is scaled")
            for scale in scales if method != "mxfp4" else ():
                _refuse_misfit(name, key, scale, tensors, _block(config))
        return method
    if marks := codes or [key for key in tensors if _OF_CODES.search(key)]:
        made = "as ModelOpt does it (hf_quant_config.json), " if (directory / "hf_quant_config.json").is_file() else ""
        raise _refused(
            name, f"{made}without a quantization_config in config.json ({marks[0]}, {tensors[marks[0]].dtype})"
        )
    return None


def refuse_losses(
    name: str, report: Mapping[str, Collection[Any]], tensors: Mapping[str, Tensor], *, n_layers: int, towers: bool
) -> None:
    """Raise KvprobeError if transformers made up a weight, or left out a tensor that could change a number.

    ``report`` is the loading information of ``from_pretrained``; ``towers`` says whether the model has parts other than
    text. These may be left out: recomputed buffers, parts for images and sound, heads of other tasks, and layers after
    the last one that predict a later token.
    """
    # transformers fills in missing weights with random numbers: no result may come from those
    if missing := sorted(report["missing_keys"]):
        raise KvprobeError(f"the checkpoint of {name} lacks {len(missing)} of the model's weights, first {missing[0]}")
    for key, actual, wanted in sorted(report.get("mismatched_keys") or (), key=str):
        raise KvprobeError(
            f"{name} has {key} of the shape {_shape(actual)} where its config.json says {_shape(wanted)}: "
            "they do not belong together"
        )
    if told := list(report.get("error_msgs") or ()):
        raise KvprobeError(f"transformers could not read all weights of {name}: {str(told[0]).splitlines()[0]}")
    left = sorted(
        key for key in report.get("unexpected_keys") or () if not _may_be_left(key, tensors, n_layers, towers)
    )
    if left:
        raise KvprobeError(
            f"{name} holds {len(left)} tensors that transformers' model does not take, first {left[0]}: "
            "the result would not be this model"
        )


def refuse_undequantised(name: str, model: Any) -> None:
    """Raise UnsupportedModelError for a loaded model with a parameter that is not ordinary floating point."""
    for path, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise _refused(name, f"and stayed so while it was loaded ({path}, {str(parameter.dtype)[6:]})")


def other_heads(model: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """The tensors of heads for other tasks (a class, a reward), which a causal model does not load."""
    return sorted(key for key in tensors if _OTHER_HEADS.search(key) and not hasattr(model, key.partition(".")[0]))


def refuse_other_rotation(name: str, directory: Path, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise KvprobeError if RoPE frequencies in the files differ from all those that the model computes.

    Equal means up to rounding of the stored type. With scaled positions a file still has the plain frequencies, so
    those of the configuration's base are accepted too. Families that store no frequencies are not checked.
    """
    import torch
    from safetensors import safe_open

    made = [buffer.float().flatten() for key, buffer in model.named_buffers() if _is_rotation(key)]
    keys = [key for key in tensors if _is_rotation(key)]
    if not keys or not made:
        return
    for base in _bases(model.config.get_text_config()):
        made += [base ** -(torch.arange(size) / size) for size in {len(values) for values in made}]
    paths = {path.name: path for path in weight_files(directory)}
    for key in keys:
        with safe_open(paths[tensors[key].file], framework="pt") as file:
            stored = file.get_tensor(key).flatten()
        kind = torch.finfo(stored.dtype if stored.is_floating_point() else torch.float32)
        near, least = max(1e-5, 4 * kind.eps), kind.smallest_normal * kind.eps
        same = (torch.allclose(stored.float(), of, rtol=near, atol=least) for of in made if len(of) == len(stored))
        if not any(same):
            raise KvprobeError(
                f"{name} has a RoPE in {key} ({_frequencies(stored)}) that its config.json does not describe "
                f"({_frequencies(made[0])}): correct its rope_theta and rope_scaling"
            )


def _is_rotation(key: str) -> bool:
    return key.endswith("inv_freq") and not _OTHER_TOWERS.search(key)


def _frequencies(values: Any) -> str:
    return f"{len(values)} frequencies" + (f" down to {values.min().item():.3g}" if len(values) else "")


def _bases(config: Any) -> set[float]:
    """The bases of a configuration's RoPE: one, or one for each kind of layer."""
    said = getattr(config, "rope_parameters", None)
    if said is None:  # transformers before 5
        said = {"rope_theta": getattr(config, "rope_theta", None)}
    parts = [said, *(part for part in said.values() if isinstance(part, Mapping))]
    return {float(part["rope_theta"]) for part in parts if part.get("rope_theta")}


def _method(config: Mapping[str, Any]) -> str | None:
    """How the configuration says that the weights were quantised; None if it does not."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        ours = part.get("quantization")
        if isinstance(ours, Mapping) and "bits" in ours:
            return "MLX"
        theirs = part.get("quantization_config")
        if isinstance(theirs, Mapping) and theirs:
            if theirs.get("load_in_8bit") or theirs.get("load_in_4bit"):
                return "bitsandbytes"
            unnamed = "MLX" if {"bits", "group_size"} <= set(theirs) else "a method that it does not name"
            return str(theirs.get("quant_method") or unnamed)
        if theirs:
            return str(theirs)[:60]
    return None


def _refused(name: str, how: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} is quantised {how}, and kvprobe measures only float weights: take the checkpoint that it was made "
        "from, or save it in bfloat16 with the library that quantised it"
    )


def _is_code(key: str, tensor: Tensor) -> bool:
    if _is_recomputed(key, tensor) or key.endswith("tid2eid"):  # DeepSeek-V4's table from tokens to experts
        return False
    # transformers silently makes floating-point numbers of these two types, which other tables may have
    is_weight = tensor.dtype in ("I64", "BOOL") and key.endswith((".weight", ".bias", "_proj"))
    return is_weight or tensor.dtype.startswith(_CODE_TYPES)


def _is_scale(key: str) -> bool:
    # the scales of microscaling formats are bytes too: exponents of two
    return key.endswith(("_scales", "_scale_inv", "_scale", ".scale", ".scales"))


def _scales_of(key: str, tensors: Mapping[str, Tensor]) -> list[str]:
    stem = key.removesuffix("_blocks")
    beside = {f"{stem}_scales", f"{key}_scale_inv", f"{key}_scale", f"{key.removesuffix('.weight')}.scale"}
    return sorted(beside & tensors.keys())


def _block(config: Mapping[str, Any]) -> Any:
    """Rows and columns that share a scale, by the configuration; `_UNSAID` if it does not say."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        said = part.get("quantization_config")
        if isinstance(said, Mapping) and said:
            return said.get("weight_block_size", _UNSAID)
    return _UNSAID


def _refuse_misfit(name: str, key: str, scale: str, tensors: Mapping[str, Tensor], block: Any) -> None:
    """Raise UnsupportedModelError for scales [.., blocks down, blocks across] that do not fit [.., rows, columns].

    transformers (`Fp8Dequantize`) derives the block size from the number of scales, whatever the configuration says.
    """
    codes, shape = tensors[key], tensors[scale].shape
    *before, rows, columns = (1,) * (2 - len(codes.shape)) + codes.shape
    blocks = [block] if _is_block(block) else [[128, 128], [1, 32]] if block == _UNSAID else []
    if codes.dtype in ("I8", "F4"):  # FP4, two numbers a byte, and a scale for each 32 of a row
        columns, blocks = columns * (2 if codes.dtype == "I8" else 1), [*blocks, [1, 32]]
    if block in (None, _UNSAID) and shape in ((), (1,), (1, 1), (*before, 1, 1), (*before, rows, 1)):
        return
    for down, across in blocks:
        if shape == (*before, -(-rows // down), -(-columns // across)):
            if all(size <= extent or size % extent == 0 for size, extent in ((rows, down), (columns, across))):
                return
            raise UnsupportedModelError(
                f"{name} has {key} of the shape {_shape(codes.shape)}, not a multiple of blocks of {down} × {across}, "
                "so transformers would scale by other blocks: take the checkpoint that it was made from"
            )
    said = " × ".join(map(str, block)) if _is_block(block) else repr(block)[:60]
    raise UnsupportedModelError(
        f"{name} has {scale} of the shape {_shape(shape)}, which does not fit {key} of the shape "
        f"{_shape(codes.shape)} by a weight_block_size of {said}: they do not belong together"
    )


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def _is_recomputed(key: str, tensor: Tensor | None) -> bool:
    if _RECOMPUTED.search(key):
        return True
    # a causal mask [1, 1, positions, positions] under a name that elsewhere is a vector's
    return bool(_MASK.search(key)) and tensor is not None and len(tensor.shape) == 4 and tensor.shape[:2] == (1, 1)


def _may_be_left(key: str, tensors: Mapping[str, Tensor], n_layers: int, towers: bool) -> bool:
    # transformers may have added or removed the base model's prefix
    names = (key, f"model.{key}", f"transformer.{key}", key.partition(".")[2])
    source = next((tensors[name] for name in names if name in tensors), None)
    if _is_recomputed(key, source) or _FORESIGHT_PART.search(key) or _OTHER_HEADS.search(key):
        return True
    if towers and _OTHER_TOWERS.search(key):
        return True
    layer = _LAYER.search(key)
    if layer is None or int(layer[3]) < n_layers:
        return False
    prefix = f"{layer[2]}.{layer[3]}."
    return any(prefix in name and _FORESIGHT.search(name) for name in tensors)


def _shape(shape: Any) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"
