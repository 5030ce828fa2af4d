"""Does every tensor of a checkpoint arrive in the model as the number that it stands for?

Asked twice: of the files before anything is loaded (codes without their loader), and of what transformers reports after
it (weights made up, tensors left over).
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.models.headers import Tensor

# what transformers itself turns back into floating numbers while it loads, and needs no other package for
DEQUANTISED = ("fp8", "mxfp8", "mxfp4")
_MAKERS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
}
# of quantised weights: codes, scales, zero points, and what else their libraries keep beside them
_OF_CODES = re.compile(
    r"(^|\.)((weight|input|output|activation|act|pre_quant|q|k|v|kv|key|value)_scales?(_inv|_\d)?|scales|_scale|_data)$"
    r"|(^|[._])(qweight|qzeros|qscales|g_idx|scale_inv|zero_points?|weight_packed|weight_shape|(nested_)?absmax"
    r"|(nested_)?quant_map|quant_state\..*|SCB|amax|codebooks)$"
)
_CODE_TYPES = ("F8_", "F6_", "F4", "I8", "U8", "I16", "U16", "I32", "U32", "U64")
# made anew from the configuration whenever a model is built: what a file holds of them is not needed
_RECOMPUTED = re.compile(
    r"(^|\.)((original_)?inv_freq|(cos|sin)_cached|freqs_cis|masked_bias|causal_mask|position_ids|token_type_ids"
    r"|embed_positions(\.weights)?|_float_tensor)$"
)
_MASK = re.compile(r"(^|\.)(attn|attention|crossattention)\.bias$")
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.(\d+)\.")
# of a layer that predicts the token after the next, and takes no part in predicting the next
_FORESIGHT = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head)(\.|$)")
_FORESIGHT_PART = re.compile(r"^(model\.)?(mtp|nextn)[a-z_]*\.")
_OTHER_TOWERS = re.compile(
    r"^([^.]+\.){0,2}(vision_(tower|model|encoder|embed_tokens|projector|adapter)|visual|vit|(multi_?modal|mm)_projector"
    r"|image_(newline|encoder)|img_processor|aligner|audio_(tower|model|encoder|projection)|embed_(vision|audio)"
    r"|speech_encoder|talker|token2wav|code2wav)(\.|$)"
)


def refuse_codes(name: str, directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
    """Raise UnsupportedModelError for quantised weights that nobody here would turn back into numbers.

    The quantisation method, where transformers does so itself; None for weights that are numbers as they stand.
    """
    method = _method(config)
    if method is not None and method not in DEQUANTISED:
        raise _refused(name, f"by {_MAKERS.get(method, method)} (its config.json says so)")
    codes = [key for key, tensor in tensors.items() if _is_code(key, tensor)]
    if method is not None:
        for key in codes:
            if not _scales_of(key, tensors) and not _is_scale(key):
                raise _refused(name, f"by {method}, and nothing says how {key} ({tensors[key].dtype}) is scaled")
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
    """Raise KvprobeError where transformers made a weight up, or left a tensor out that could change a number.

    ``report`` is the loading information of ``from_pretrained``; ``towers`` whether the model has parts besides the one
    for text. What may be left out: buffers that are made anew, parts for images and sound, and layers behind the last
    one that predict a later token.
    """
    # transformers fills what a checkpoint lacks with random numbers: no result may come of that
    if missing := sorted(report["missing_keys"]):
        raise KvprobeError(f"the checkpoint of {name} lacks {len(missing)} of the model's weights, first {missing[0]}")
    for key, held, wanted in sorted(report.get("mismatched_keys") or (), key=str):
        raise KvprobeError(
            f"{name} has {key} of the shape {_shape(held)} where its config.json wants {_shape(wanted)}: "
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
            "what would come out is not this model"
        )


def refuse_undequantised(name: str, model: Any) -> None:
    """Raise UnsupportedModelError for a loaded model of which a parameter is no ordinary floating number."""
    for path, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise _refused(name, f"and stayed so while it was loaded ({path}, {str(parameter.dtype)[6:]})")


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
        f"{name} is quantised {how}, and kvprobe measures floating weights alone: take the checkpoint that it was made "
        "from, or write it out again in bfloat16 with the library that quantised it"
    )


def _is_code(key: str, tensor: Tensor) -> bool:
    if _is_recomputed(key, tensor) or key.endswith("tid2eid"):  # DeepSeek-V4's table from tokens to experts
        return False
    # of these two types transformers makes floating numbers without a word, and other tables may have them
    whole = tensor.dtype in ("I64", "BOOL") and key.endswith((".weight", ".bias", "_proj"))
    return whole or tensor.dtype.startswith(_CODE_TYPES)


def _is_scale(key: str) -> bool:
    # of microscaling formats the scales are bytes too: exponents of two
    return key.endswith(("_scales", "_scale_inv", "_scale", ".scale", ".scales"))


def _scales_of(key: str, tensors: Mapping[str, Tensor]) -> bool:
    stem = key.removesuffix("_blocks")
    beside = {f"{stem}_scales", f"{key}_scale_inv", f"{key}_scale", f"{key.removesuffix('.weight')}.scale"}
    return not beside.isdisjoint(tensors)


def _is_recomputed(key: str, tensor: Tensor | None) -> bool:
    if _RECOMPUTED.search(key):
        return True
    # a causal mask [1, 1, positions, positions] under the name that elsewhere is a vector's
    return bool(_MASK.search(key)) and tensor is not None and len(tensor.shape) == 4 and tensor.shape[:2] == (1, 1)


def _may_be_left(key: str, tensors: Mapping[str, Tensor], n_layers: int, towers: bool) -> bool:
    # transformers may have put the base model's name before it, or have taken it away
    names = (key, f"model.{key}", f"transformer.{key}", key.partition(".")[2])
    source = next((tensors[name] for name in names if name in tensors), None)
    if _is_recomputed(key, source) or _FORESIGHT_PART.search(key):
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
