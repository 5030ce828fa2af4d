"""Every causal class of transformers: its own defaults made small, run, and what its own cache then holds."""

import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TOKENS = (3, 40)

LAYERS = -1  # stands for a number of layers, which the patterns decide

# Sizes by the names of keys; the first pattern that matches the whole name counts. Widths that a bill could mix up
# (hidden, head, value, latent, rotary, indexer, state) differ; a head is hidden_size / heads only where it must be.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_(encoder_|decoder_|hidden_)?layers|n_layers?|(encoder|decoder)_layers|num_blocks|depth", LAYERS),
    (r"(decoder_)?vocab_size|vocab_size_per_layer_input|unpadded_vocab_size", 64),
    (r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim", 64),
    (r"hidden_size_per_layer_input", 8),
    (
        r"(decoder_|encoder_)?(ffn_dim|intermediate_size)|ffn_hidden_size|n_inner|dff|dim_ff|d_inner|feed_forward_size",
        48,
    ),
    (r".*intermediate_size.*|expert_ffn_hidden_size", 24),
    (r"num_attention_heads|n_heads?|num_heads|(num_)?(encoder_|decoder_)?attention_heads|swa_num_attention_heads", 4),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"swa_num_key_value_heads", 1),
    (r"head_dim|kv_channels|attention_head_dim|dim_head|attention_head_size", 24),
    (r"swa_head_dim", 20),
    (r"kv_lora_rank", 20),
    (r"q_lora_rank", 12),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_nope_head_dim", 16),
    (r"v_head_dim", 12),
    (r"index_n_heads", 2),
    (r"index_head_dim", 28),
    (r"index_topk(_blocks)?|index_block_size", 4),
    (r"(sliding_window|attention_window|window|keep_window|attention_chunk)_size|sliding_window|local_attention", 8),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group|n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|context_length", 128),
    (r"chunk_size|mamba_chunk_size|local_attn_chunk_length|lsh_attn_chunk_length", 8),
    (r"linear_num_key_heads|linear_num_heads|n_groups|mamba_n_groups|mamba_ngroups", 2),
    (r"linear_num_value_heads|mamba_num_heads|mamba_n_heads|n_mamba_heads", 4),
    (r"linear_key_head_dim|linear_head_dim|mamba_head_dim", 16),
    (r"linear_value_head_dim", 20),
    (r"mamba_d_state|ssm_state_size|state_size", 10),
    (r"router_hidden_size|laurel_rank|hc_lowrank", 8),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What no rule on names can know: defaults that do not run by themselves, sizes that must fit each other, and hybrids
# whose defaults leave out one of their kinds of layers.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [4, 2, 2]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {"num_hidden_layers": 8, "n_input_layers": 2, "n_output_layers": 2},
    "dots3_note_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 36,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
        "head_dim": 24,
    },
    "dots3_note_vision_encoder": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "falcon_h1": {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_d_head": 32,
    },
    "helium": {"head_dim": 16},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 24},
    "hunyuan_v1_moe": {"head_dim": 24},
    "inkling2_loop_text": {
        "num_hidden_layers": 6,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mllama_text_model": {"cross_attention_layers": [1, 3]},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2},
    "ministral": {"head_dim": 24},
    "nemotron": {"head_dim": 24, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 28,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Held:
    """One tensor of a cache: where it hangs, its shape and its type."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def shrunk(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The family's default configuration with every size made small; patterns over layers keep a whole period."""
    return _shrink(CONFIG_MAPPING[model_type], changes)


def _shrink(kind: type[PreTrainedConfig], changes: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedConfig:
    default, overrides = kind(), {**_OVERRIDES.get(kind.model_type, {}), **changes}
    plain, fields = default.to_dict(), kind.__dataclass_fields__
    n_default, n_layers = _n_layers(default, plain)
    given: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(part := vars(default).get(key), PreTrainedConfig):
            given[key] = _shrink(type(part))
        elif key not in fields or fields[key].default is None or value is None or isinstance(value, bool | float | str):
            continue  # what has no default of its own follows from the rest
        elif isinstance(fields[key].default, list | tuple) and len(value) == n_default:
            given[key] = [*value][:n_layers]
        elif isinstance(fields[key].default, int) and (size := _size(key)) is not None:
            given[key] = n_layers if size == LAYERS else size
    if given.get("kv_lora_rank") and "num_key_value_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]  # every head's K and V are made of one latent
    return kind(**(given | overrides))


def _size(key: str) -> int | None:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), None)


def _n_layers(default: PreTrainedConfig, plain: dict[str, Any]) -> tuple[int, int]:
    """How many layers the default has, and how many hold a whole period of every pattern and the next one's first."""
    n_default = max((n for key, n in plain.items() if _size(key) == LAYERS and isinstance(n, int)), default=0)
    derived = (getattr(default, name, None) for name in ("layer_types", "layers_block_type"))
    patterns = [[*v] for v in (*plain.values(), *derived) if isinstance(v, list | tuple) and len(v) == n_default]
    # a list of numbers that all differ names layers, and is no pattern
    periods = [_period(pattern) for pattern in patterns if len({str(item) for item in pattern}) < n_default]
    return n_default, min(n_default, max([4, *(period + 1 for period in periods)]))


def _period(pattern: list[Any]) -> int:
    """The shortest period, or, without one below 13, the shortest beginning in which everything occurs."""
    for period in range(1, min(13, len(pattern))):
        if all(pattern[i] == pattern[i - period] for i in range(period, len(pattern))):
            return period
    kinds = {str(item) for item in pattern}
    return next(n for n in range(1, len(pattern) + 1) if {str(item) for item in pattern[:n]} == kinds)


def caches(config: PreTrainedConfig) -> list[Any]:
    """What the family's own model caches of each of TOKENS, in its outputs' own form.

    On the meta device, where shapes cost nothing; on the CPU where the model asks for values (routers of experts).
    Raises what the model raises there, and ValueError for one that makes no cache.
    """
    try:
        return _caches(config, "meta")
    except Exception:
        return _caches(config, "cpu")


def is_encoder_kind(model_type: str) -> bool:
    """Whether the class is an encoder or the decoder half of an encoder–decoder, by its own code or configuration."""
    kind = CONFIG_MAPPING[model_type]
    takes = inspect.signature(MODEL_FOR_CAUSAL_LM_MAPPING[kind].forward).parameters
    said = kind().to_dict()
    if said.get("is_encoder", False) or said.get("attn_type") == "bi":
        return True
    return "encoder_hidden_states" in takes or "encoder_outputs" in takes


def told(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _caches(config: PreTrainedConfig, device: str) -> list[Any]:
    with warnings.catch_warnings(), torch.device(device), torch.no_grad():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        own = {name for name, _ in _states(model)}
        found = [_cache(model, n, own) for n in TOKENS]
    if not any(held(cache) for cache in found):
        raise ValueError("its forward makes no cache")
    return found


def _cache(model: torch.nn.Module, n_tokens: int, own: set[str]) -> Any:
    ids = torch.arange(n_tokens)[None] % 32 + 8
    out = model(input_ids=ids, use_cache=True)
    cache = next((out[name] for name in _CACHES if out.get(name) is not None), None)
    if cache is None and "cache" in inspect.signature(model.forward).parameters:  # makes one, and does not give it back
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, use_cache=True, cache=cache)
    _drop_hidden(model, cache, n_tokens)
    return {"cache": cache} | {name: state for name, state in _states(model) if name not in own}


def _drop_hidden(model: torch.nn.Module, cache: Any, n_tokens: int) -> None:
    """Drop the keys that a layer's own mask hides from the newest query, and so from all after it (GPT-Neo)."""
    for module in model.modules():
        mask, layer = getattr(module, "bias", None), getattr(module, "layer_id", None)
        if layer is not None and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
            hidden = n_tokens - int(mask[0, 0, n_tokens - 1].sum())
            kept = cache.layers[layer]
            kept.keys, kept.values = kept.keys[:, :, hidden:], kept.values[:, :, hidden:]


def _states(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that modules carry from step to step, neither weights nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


# what families call the cache in their outputs
_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
# The compressor's notes on the window under way, at most one window long: they are no keys yet, and are thrown away.
_SCRATCH = re.compile(r"\.(buffer|overlap)_(kv|gate)\.")


def held(cache: Any) -> list[Held]:
    """Every tensor of floating point that the cache holds, each once."""
    found = ((name, thing) for name, thing in _walk(cache, "", set()) if isinstance(thing, torch.Tensor))
    return [
        Held(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in found if t.is_floating_point()
    ]


def counted(cache: Any) -> int:
    """The elements that the cache holds, in the bill's way of counting.

    Integers are book-keeping. A sliding layer of transformers drops the oldest key of its window when a step is over,
    so that window - 1 are left; the bill counts the window as the step needs it, the newest token included.
    """
    total = sum(torch.Size(tensor.shape).numel() for tensor in held(cache) if not _SCRATCH.search(tensor.name))
    for _, layer in _walk(cache, "", set()):
        window = getattr(layer, "sliding_window", None)
        if window and layer.is_initialized and layer.get_seq_length() >= window:
            kept = {id(t): t for t in (layer.keys, layer.values) if t is not None}
            total += sum(tensor.numel() // tensor.shape[-2] for tensor in kept.values())
    return total


def _walk(thing: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Everything that hangs on ``thing``, each object once, by its path."""
    if id(thing) in seen or thing is None or isinstance(thing, str | int | float | bool | type | PreTrainedConfig):
        return
    seen.add(id(thing))
    yield name, thing
    if isinstance(thing, torch.Tensor):
        return
    if isinstance(thing, dict):
        parts: Iterable[tuple[Any, Any]] = thing.items()
    else:
        parts = enumerate(thing) if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {}).items()
    for key, value in parts:
        yield from _walk(value, f"{name}.{key}", seen)
