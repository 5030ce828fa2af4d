"""May compiled code stand in for this decoder on this cache? If not, why not."""

import os
from dataclasses import MISSING, fields
from importlib.util import find_spec

import torch
from torch import nn

from kvprobe.attention.call import Attend
from kvprobe.caches.full import FullCache
from kvprobe.caches.layer import KVCache
from kvprobe.caches.rolling import RollingCache
from kvprobe.decoder.model import MLP, Attention, Block, Decoder, Norm

# the fields of a decoder's configuration that compiled code honours; any other field is refused by name
HONOURED = frozenset(
    {"n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden", "mlp_width", "vocab", "max_positions", "rotary"}
    | {"local_rotary", "windows", "norm", "norm_eps", "norm_offset", "post_norms", "qk_norm", "activation", "qkv_bias"}
    | {"out_bias", "mlp_bias", "scale", "scale_by_layer", "embedding_scale", "tied_head", "final_softcap"}
)

# the modules that compiled code computes itself, ignoring hooks and replacements
_KNOWN = {
    *(Decoder, Block, Attention, MLP, Norm),
    *(nn.Linear, nn.LayerNorm, nn.Embedding, nn.Identity, nn.ModuleList),
}


def unreadable(cache: KVCache, n_tokens: int) -> str | None:
    """Why the compiled reader cannot read ``n_tokens`` more tokens a row into ``cache``; None if it can."""
    if type(cache) is not FullCache:
        return f"it does not know the cache {type(cache).__name__}"
    if cache.left_pad is not None:
        return "it takes no padding"
    if any(cache.length + n_tokens > held.keys.shape[2] for held in cache.buffers()):
        return "a ring of the cache would roll"
    if not cache.alike:
        return "rows differ in length"
    return None


def obstacle(decoder: Decoder, cache: KVCache, attend: Attend | None = None) -> str | None:
    """Why compiled code cannot stand in for this decoder on this cache; None if it can."""
    weights = {parameter.dtype for parameter in decoder.parameters()}
    plain = (torch.float32, torch.bfloat16)
    if attend is not None:
        return "attention is replaced"
    if type(cache) not in (FullCache, RollingCache):
        return f"it does not know the cache {type(cache).__name__}"
    for field in fields(decoder.config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in HONOURED and getattr(decoder.config, field.name) != default:
            return f"it does not know the setting {field.name}"
    if any(parameter.device.type != "cpu" for parameter in decoder.parameters()):
        return "the model is not on the CPU"
    if (held := cache.buffers()[0].keys).device.type != "cpu":
        return "the cache is not on the CPU"
    if cache.headroom:
        return "it takes no headroom"
    for name, module in decoder.named_modules():
        if type(module) not in _KNOWN:
            return f"{name} is a {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the decoder'} has hooks"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if len(weights) != 1 or not weights <= {*plain} or held.dtype not in plain:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in weights | {held.dtype})
        return f"it reads float32 or bfloat16, not {' and '.join(names)}"
    if find_spec("numba") is None:
        return "numba is not installed (pip install 'kvprobe[fast]')"
    if os.name != "posix":
        return "it needs a POSIX system"
    return None
