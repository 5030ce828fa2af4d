"""Is a model's family known? If not, could a key of its configuration change what its layers keep?"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from kvprobe.errors import UnsupportedModelError
from kvprobe.shape.suspects import is_said, suspects


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the configurations of one family are read; ``data/families.toml`` explains the fields."""

    kinds: str | None = None
    pattern: str = ""
    pattern_keys: tuple[str, ...] = ()
    last_full: bool = False
    state: str | None = None
    heads: str | None = None
    sharing: str | None = None
    cla: bool = False
    index: str | None = None
    attentions: int = 1
    position: str | None = None
    reads: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    own_code: bool = False
    repository: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def how(self) -> str:
        """How its layers are read, in a few words."""
        parts = [f"kinds by {self.kinds.replace('_', ' ')}"] if self.kinds else ["every layer keeps every token"]
        parts += [f"{self.state.replace('_', ' ')} states"] if self.state else []
        parts += ["layers that share K and V"] if self.sharing or self.cla else []
        parts += [f"heads by {self.heads.replace('_', ' ')}"] if self.heads else []
        parts += ["an indexer's keys"] if self.index else []
        parts += [f"{self.attentions} attentions a layer"] if self.attentions > 1 else []
        return ", ".join(parts)


# a family that is not listed: only keys that every configuration may have
PLAIN = Family()

_ENCODERS = """
aimv2_text_model albert align_text_model altclip beit bert bert-generation big_bird blip_2_qformer
bridgetower_text_model bros camembert canine chinese_clip_text_model clap_text_model clip clip_text_model
clipseg_text_model clvp_encoder convbert data2vec-audio data2vec-text deberta deberta-v2 distilbert dpr electra
ernie esm esmc eurobert flaubert flava_text_model fnet funnel groupvit_text_model gte hubert ibert
instructblip_qformer jina_embeddings_v3 layoutlm layoutlmv2 layoutlmv3 layoutxlm lilt longformer luke lxmert
markuplm megatron-bert metaclip_2_text_model mobilebert modernbert mpnet mra nomic_bert nystromformer
owlv2_text_model owlvit_text_model qdqbert rembert roberta roberta-prelayernorm roc_bert roformer sew sew-d siglip
siglip2_text_model siglip_text_model splinter squeezebert tapas tipsv2_text_model tvp unispeech unispeech-sat
videoprism_text_model vilt visual_bert vit wav2vec2 wavlm xclip_text_model xlm xlm-roberta xlm-roberta-xl xlnet xmod
yoso
"""
_ENCODER_DECODERS = """
bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart moonshine
mt5 mvp nllb-moe pegasus pegasus_x plbart pop2piano prophetnet rag seamless_m4t seamless_m4t_v2 speech_to_text
speecht5 switch_transformers t5 t5gemma t5gemma2 trocr udop umt5 vision-encoder-decoder whisper
"""
_ENCODER = "it is an encoder and not a causal model: it generates nothing and has no KV cache"
_ENCODER_DECODER = "it is an encoder–decoder, and kvprobe reads causal models of a decoder alone"

# families without a decoder's KV cache, and those whose caches hold something that is not modelled here
REFUSED: dict[str, str] = {
    **dict.fromkeys(_ENCODERS.split(), _ENCODER),
    **dict.fromkeys(_ENCODER_DECODERS.split(), _ENCODER_DECODER),
    **dict.fromkeys(("musicgen", "musicgen_melody", "csm", "bark", "dia"), "it holds several models in one"),
    **dict.fromkeys(
        ("dory", "inkling2_loop_text"), "its layers run several times over, each time with its own K and V"
    ),
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "zaya", "qwen4_exp", "qwen4_exp_text"),
        "its attention layers keep convolution states too, which are not modelled here",
    ),
    **dict.fromkeys(
        ("dots3_note", "dots3_note_text", "glm5_next_text"),
        "its indexers and layers of different latents are not modelled here",
    ),
    "cpmant": "it caches a learned prompt of its own before every text, which is not modelled here",
    "blt": "its patches have no fixed length in tokens",
    "reformer": "its hashed attention keeps buckets, which are not modelled here",
    "hymba": "its memory tokens and shared layers are not modelled here",
}

# what an unknown family's name gives away
_BY_NAME = {
    r"rwkv|mamba|ssm|(^|[^a-z0-9])s4([^a-z0-9]|$)|(^|[^a-z])gla([^a-z]|$)|retnet|delta|hgrn|mega([^a-z]|$)|lolcats"
    r"|linear|hyena|xlstm|titans|^(gsa|abc|based|rebased|lightnet|samba|comba|rodimus|mom)$": (
        "its name is that of a recurrent or linear architecture, whose states are not modelled here"
    ),
    "bidirec|^dream|llada|diffusion|^sdar": "its attention is not causal, so nothing is cached token by token",
}
_BOTH_WAYS = ("use_bidirectional_attention", "bidirectional", "is_bidirectional")

# keys that say what layers keep in some family; other families are refused if they have one
_STRUCTURAL_KEYS = """
_block_types attention_chunk_size attention_head_type attn_layer_indices attn_layer_offset attn_layer_period
attn_type_list block_configs cla_share_factor compress_rates compress_ratios cross_attention_layers
full_attention_interval full_attn_idxs global_attn_every_n_layers global_attn_idx global_head_dim
hybrid_layer_ids hybrid_layer_pattern hybrid_override_pattern index_head_dim index_topk_pattern indexer_types
kv_reuse_group layer_group_size linear_attn_config num_global_key_value_heads num_key_value_heads_per_layer
num_kv_shared_layers num_memory_tokens per_layer_config sliding_window_pattern _sliding_window_pattern
swa_num_key_value_heads swa_head_dim use_cla attn attn_layer_idx block_position_encoding spell_func pre_seq_len
total_ut_steps qk_head_dim
"""
_STRUCTURAL = frozenset(_STRUCTURAL_KEYS.split())
_READ_BY_RULE: dict[str, tuple[str, ...]] = {
    "attn_layer_indices": ("attn_layer_indices",),
    "attn_type_list": ("attn_type_list",),
    "bailing_linear": ("layer_group_size",),
    "block_configs": ("block_configs",),
    "block_types": ("_block_types",),
    "cohere2_moe": ("sliding_window_pattern",),
    "deepseek_v4": ("compress_rates", "compress_ratios", "index_head_dim"),
    "fla": ("attn",),
    "full_attn_idxs": ("full_attn_idxs",),
    "gemma4": ("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
    "kimi_linear": ("linear_attn_config",),
    "llama4": ("attention_chunk_size",),
    "mimo_v2": ("hybrid_layer_pattern", "attention_chunk_size"),
    "mllama": ("cross_attention_layers",),
    "nemotron_h": ("hybrid_override_pattern",),
    "period": ("attn_layer_period", "attn_layer_offset"),
    "swa": ("swa_num_key_value_heads", "swa_head_dim"),
    "zamba": ("attn_layer_period", "attn_layer_offset"),
    "zamba2": ("hybrid_layer_ids",),
    "last": ("num_kv_shared_layers",),
    "cla": ("use_cla", "cla_share_factor"),
    "all": ("index_head_dim",),
    "glm": ("index_head_dim", "indexer_types", "index_topk_pattern"),
    "minimax_m3": ("index_head_dim",),
}


@cache
def known() -> dict[str, Family]:
    """Every family of ``data/families.toml`` by its ``model_type``."""
    table = tomllib.loads(files("kvprobe").joinpath("data/families.toml").read_text(encoding="utf-8"))
    result = {}
    for name, of in table.items():
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in of.items()}
        result[name] = Family(**fields)
    return result


def table() -> list[tuple[str, str, str]]:
    """Each family with its support (known, plain, refused) and how it is read or why it is refused."""
    rows = [(name, "known", family.how) for name, family in sorted(known().items())]
    rows += [("any other", "plain", "keys that every family has; refused with a key that could change what is kept")]
    return rows + [(name, "refused", why) for name, why in sorted(REFUSED.items())]


def refuse_others(family: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a model without a decoder-only KV cache, or with one not modelled here."""
    why = REFUSED.get(family)
    # every BERT and T5, in transformers or not
    if why is None and "bert" in family and family not in known():
        why = _ENCODER
    if why is None and re.search(r"t5($|[^a-z0-9])", family):
        why = _ENCODER_DECODER
    if why is None and family not in known():
        name = family.lower()
        why = next((reason for names, reason in _BY_NAME.items() if re.search(names, name)), None)
    if why is not None:
        raise UnsupportedModelError(f"kvprobe does not read the family {family}: {why}")
    if config.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            f"this {family} model is an encoder–decoder (is_encoder_decoder), and kvprobe reads causal models of a "
            "decoder alone"
        )
    if any(config.get(key) in (True, "all") for key in _BOTH_WAYS) or config.get("is_causal") is False:
        key = next((key for key in _BOTH_WAYS if config.get(key) in (True, "all")), "is_causal")
        raise UnsupportedModelError(
            f"this {family} model says {config[key]!r} for {key}: its attention is not causal, so it has no KV cache"
        )
    named = config.get("architectures")
    for name in named if isinstance(named, (list, tuple)) else ():
        if isinstance(name, str) and name.endswith("ForMaskedLM"):
            raise UnsupportedModelError(f"this {family} model is {name}: it is an encoder, and has no KV cache")


def support(family: str, config: Mapping[str, Any]) -> str:
    """``known`` or ``plain``.

    Raises UnsupportedModelError, naming the key, if a key that the family is not known to read could change what its
    layers keep.
    """
    listed = known().get(family)
    for key in _unread(config, listed):
        why = "the family is not known to kvprobe" if listed is None else "the family is not known to read that key"
        raise UnsupportedModelError(
            f"the configuration of this {family} model says {key}, which could change what its layers keep, and {why}"
        )
    return "known" if listed else "plain"


def _unread(config: Mapping[str, Any], family: Family | None) -> Iterator[str]:
    if family is None or family.own_code:
        yield from (key for key in suspects(config) if family is None or key not in family.reads)
        return
    rules = (family.kinds, family.heads, family.sharing, family.index, "cla" if family.cla else None)
    read = {key for rule in rules if rule for key in _READ_BY_RULE.get(rule, ())}
    read |= {*family.reads, *family.pattern_keys}
    read |= {"qk_head_dim"} if "kv_lora_rank" in family.defaults else set()
    listed = is_said(config.get("layer_types"))
    for key in sorted(_STRUCTURAL & config.keys() - read):
        # a pattern beside layer_types only repeats it
        if is_said(config[key]) and not (listed and "pattern" in key):
            yield key
