"""Which keys of a configuration could change what layers keep, in a family not known to read them?"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvprobe.shape.reading import NAMES

# read in every family, or without effect on the cache although they sound like it
_UNDERSTOOD_KEYS = """
model_type use_cache layer_types use_sliding_window max_window_layers q_lora_rank n_group topk_group
decoder_sparse_step num_expert_group num_expert_groups no_rope_layers no_rope_layer_interval embd_index
ignore_index scale_attn_by_inverse_layer_idx use_cache_quantization use_cache_kernel use_kv_cache use_kvcache
pre_allocate_kv_cache use_mla head_bias lm_head_bias group_norm low_cpu_mem_usage pretraining_tp interleaved_qkv
sep_index pad_index pad_idx compression_config sparsity_config skip_special_tokens skip_prompt skip_bias_add
conv_template conversation_template state_dict chunkwise_kernel cache_dir global_view_pos hidden_states
"""
# in every configuration of transformers 4 and 5: how it was saved, and how to generate with it
_SAVED_KEYS = """
_commit_hash architectures assistant_early_exit bad_words_ids begin_suppress_tokens
cache_config cache_implementation chunk_size_feed_forward continuous_batching_config do_sample dola_layers
early_stopping epsilon_cutoff eta_cutoff finetuning_task force_words_ids global_batch_size global_rank global_step
is_decoder is_encoder_decoder local_files_only local_rank max_cache_len max_length min_length output_hidden_states
prefill_chunk_size prefix problem_type pruned_heads remove_invalid_values sequence_bias state_dict stop_strings
suppress_tokens target_lookbehind temperature tie_encoder_decoder top_k top_p torchscript typical_p use_bfloat16
xla_device
"""
_UNDERSTOOD = frozenset((*_UNDERSTOOD_KEYS.split(), *_SAVED_KEYS.split()))
_WORDS = frozenset(name for names in NAMES.values() for name in names)
# those of `NAMES` that do not concern the cache: only these are harmless inside another object
_NOT_KEPT = frozenset(
    name for word in ("intermediate_size", "vocab_size", "max_positions", "tied") for name in NAMES[word]
)

# sounds harmless, but is not
_ALWAYS = re.compile(r"^tie_(kv|key)|softmax_(attn_|attention_)?layers|k_eq_v")
_SUSPECT = re.compile(
    r"window|sliding|swa|local|global|chunk|layer_type|layers_|block_type|pattern|hybrid|period|offset|interval|every"
    r"|linear|mamba|ssm|state|conv|recurr|lru|rwkv|wkv|kda|delta|retention|shar(e|ing)|(^|_)cla(_|$)|kv|key_value|latent"
    r"|^index_|indexer|_indices|_idxs?$|compress|spars|nsa|moba|attn_type|attention_type|attn_layers|attention_layers"
    r"|cross_att|block_config|no_op|skip|loop|recycle|memor|mem_|cache|evict|head|group|multi_query|mqa|gqa|per_layer"
    r"|full_att|mixer|reuse|sink|^attn$|^attention$"
    r"|(attn|attention)_(layer_id|ratio|freq|stride|span|band|kind|dim$|hidden_size)|full_layers|cross_layer"
    r"|^d_[kv]$|^(qk|key|value|inner)_dim$|q_per_k|^n_rep$|^num_(en|de)coder_layers$"
    r"|(^|_)ut_|unroll|repeats?$|recur|feature_map|expand_(k|v|ratio)$|pre_seq_len"
)
_HARMLESS = re.compile(
    r"alibi|token_id|token_index|token_idx|_token$|rope|rotary|norm|bias|drop|init|expert|moe|router|routing|mlp|ffn"
    r"|aux|loss|quant|impl|scal|(^|_)eps$|dtype|vocab|embed|softmax|logit|softcap|classif|label|summary|generation|mtp"
    r"|nextn|flash|fuse|tie_|output_|return_|hidden_act|activation|intermediate|vision|visual|image|video|audio|speech"
    r"|^mm_|projector|transformers|unsloth|lm_head|medusa|auto_map|task_specific|id2label|architectures|_name|_class$"
    r"|tokenizer|beam|penalty|ngram|clip|memory_efficient|low_memory|use_\w*kernel|checkpoint|groupsize"
    r"|context_(window|size)|(bos|eos|pad|mask|sep|cls|unk)_idx|(log|save|eval)_interval|conv_version|chunksize"
    r"|shared?_\w*(input|output)|layers_to_transform|unfrozen|freeze|_local_path"
)
# at 1 these change nothing: one step, one in one
_IN_ONE = re.compile(r"(?<!expand_)(ratio|factor|steps|repeats|freq|stride|loops|interval|period)$")
# objects that say how layers are made; others (a resampler, an adapter) are not looked into
_OF_LAYERS = re.compile(r"att|layer|block|ssm|mixer|decoder|transformer|backbone|^model_config$|^config$")


def suspects(config: Mapping[str, Any]) -> Iterator[str]:
    """The keys that could change what layers keep; one inside an object as ``attn_config.kv_n_heads``."""
    return _suspects(config, config, "")


def _suspects(config: Mapping[str, Any], outer: Mapping[str, Any], within: str) -> Iterator[str]:
    listed = is_said(outer.get("layer_types"))
    for key, value in config.items():
        name = str(key).lower()
        if not is_said(value) or (value == 1 and value is not True and _IN_ONE.search(name)):
            continue
        if listed and name.endswith("sliding_window_pattern"):
            continue
        if _is_suspect(name, value, outer, inside=bool(within)):
            yield f"{within}{key}"
        elif isinstance(value, Mapping) and _OF_LAYERS.search(name) and not _is_harmless(name):
            yield from _suspects(value, outer, f"{within}{key}.")


def _is_suspect(name: str, value: Any, outer: Mapping[str, Any], *, inside: bool) -> bool:
    if name in _WORDS:
        # heads and widths in an inner object are no news only if the outer configuration says the same
        return inside and name not in _NOT_KEPT and outer.get(name) != value
    if name == "qk_head_dim" and is_said(outer.get("kv_lora_rank")):
        # MLA's, the sum of two other keys
        return bool(value != sum(outer.get(part) or 0 for part in ("qk_nope_head_dim", "qk_rope_head_dim")))
    if _ALWAYS.search(name):
        return True
    if _is_harmless(name):
        return False
    return _SUSPECT.search(name) is not None or _is_one_a_layer(name, value, outer)


def _is_harmless(name: str) -> bool:
    return name in _UNDERSTOOD or _HARMLESS.search(name) is not None


def _is_one_a_layer(name: str, value: Any, outer: Mapping[str, Any]) -> bool:
    """Whether it lists words or objects, one a layer, or objects called layers or blocks."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    if all(isinstance(item, Mapping) for item in value) and re.search(r"layer|block", name):
        return True
    n_layers = next((outer[key] for key in NAMES["n_layers"] if outer.get(key) is not None), None)
    return len(value) == n_layers and all(isinstance(item, (str, Mapping)) for item in value)


def is_said(value: Any) -> bool:
    """Whether a key has an effect: its value is not null, false, 0, or made of those alone."""
    if isinstance(value, Mapping):
        return any(is_said(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(is_said(item) for item in value)
    return value not in (None, False, 0, "")
