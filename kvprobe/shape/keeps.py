"""What does every layer of a model keep: which heads, widths, windows and states?"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvprobe.shape.families import Family
from kvprobe.shape.kind_rules import window_of
from kvprobe.shape.kinds import kinds_of
from kvprobe.shape.layers import Layer
from kvprobe.shape.reading import Reading
from kvprobe.shape.states import STATES

Layers = tuple[Layer, ...]


def layers_of(of: Reading, family: Family) -> Layers:
    """The shape of each layer, in order; a layer with two attentions (LongCat-Flash) gives two.

    Raises UnsupportedModelError for a shape that is impossible or not known.
    """
    if family.heads in WHOLE:
        layers = WHOLE[family.heads](of)
    else:
        kinds = kinds_of(of, family)
        shapes = {kind: _layer(kind, of, family) for kind in dict.fromkeys(kinds)}
        layers = tuple(shapes[kind] for kind in kinds)
        if family.heads == "gemma4":
            layers = _overridden(of, layers)
    for layer in dict.fromkeys(layers):
        if layer.n_kv_heads and layer.n_heads % layer.n_kv_heads:
            raise of.refusal(
                f"has {layer.n_kv_heads} key/value heads for {layer.n_heads} query heads, which they do not divide"
            )
    layers = _with_index(of, family, _shared(of, family, layers))
    return tuple(layer for layer in layers for _ in range(family.attentions))


def _layer(kind: str, of: Reading, family: Family) -> Layer:
    if kind == "none":
        return Layer(kind="none")
    if kind in ("linear", "recurrent"):
        state, conv = _state(kind, of, family)
        return Layer(kind=kind, state=state, conv=conv)
    if kind == "both":
        state, conv = _state(kind, of, family)
        return replace(_attention("full", of, family), state=state, conv=conv)
    limit = {"sliding": window_of(of), "chunked": of.optional("attention_chunk_size")}.get(kind)
    if family.kinds == "fla":
        limit = of.part("attn").optional("window_size")
    if kind != "full" and limit is None:
        key = "sliding_window" if kind == "sliding" else "attention_chunk_size"
        raise of.refusal(f"has {kind} layers and does not say {key}")
    return replace(_attention(kind, of, family), limit=limit)


def _state(kind: str, of: Reading, family: Family) -> tuple[int, int]:
    if family.state is None:
        what = {"linear": "linear-attention", "recurrent": "convolution or recurrent", "both": "hybrid"}[kind]
        raise of.refusal(f"has {what} layers (layer_types), and what those of the family {of.family} keep is not known")
    return STATES[family.state](of)


def _attention(kind: str, of: Reading, family: Family) -> Layer:
    """The heads of a layer of this kind; under MLA they share one latent."""
    # the attention of flash-linear-attention's hybrids has a configuration of its own
    if family.kinds == "fla":
        own = of.part("attn")
        n_heads = own.number("num_heads")
        width = of.number("hidden_size") // n_heads
        return _kv(kind, n_heads, own.optional("num_kv_heads") or n_heads, width)
    n_heads, hidden_size = of.number("n_heads"), of.number("hidden_size")
    if latent := latent_of(of):
        rotary = of.number("qk_rope_head_dim", least=0)
        return Layer(
            kind=kind,
            n_heads=n_heads,
            n_kv_heads=n_heads,  # attention reads a K and V made for every head
            head_dim=of.number("qk_nope_head_dim") + rotary,
            v_head_dim=of.optional("v_head_dim", least=0) or hidden_size // n_heads,  # MiniCPM3 may leave it out
            latent=latent,
            rotary=rotary,
        )
    usual = (2 if family.heads == "zamba" else 1) * hidden_size // n_heads
    head_dim = (family.heads != "zamba" and of.optional("head_dim", least=0)) or usual
    if family.heads == "zamba":
        head_dim = of.optional("attention_head_dim") or usual
    if not head_dim:
        raise of.refusal(f"has {n_heads} heads and a hidden_size of {hidden_size}: no width is left for a head")
    n_kv_heads = _kv_heads(of, n_heads)
    v_head_dim = of.flag("use_mla", True) and of.config.get("v_head_dim") and of.optional("v_head_dim", least=0)
    if family.heads == "swa" and kind == "sliding":
        # MiMo-V2 has twice as many there; its class in transformers assumes so
        n_kv_heads = of.optional("swa_num_key_value_heads") or 2 * n_kv_heads
        n_heads = of.optional("swa_num_attention_heads") or n_heads
        head_dim = of.optional("swa_head_dim") or head_dim
        v_head_dim = of.optional("swa_v_head_dim") or v_head_dim
    if family.heads == "gemma4" and kind == "full" and of.config.get("per_layer_config") is None:
        head_dim = of.optional("global_head_dim") or 512
        v_head_dim = None
        if of.flag("attention_k_eq_v"):
            n_kv_heads = of.optional("num_global_key_value_heads") or n_kv_heads
    return _kv(kind, n_heads, n_kv_heads, head_dim, v_head_dim or None)


def latent_of(of: Reading) -> int | None:
    """The width of MLA's latent; None without one, or if use_mla is false."""
    latent = of.optional("kv_lora_rank", least=0) or None
    if of.flag("use_mla") and latent is None:
        raise of.refusal("says use_mla but not kv_lora_rank")
    return latent if of.flag("use_mla", True) else None


def _kv(kind: str, n_heads: int, n_kv_heads: int, head_dim: int, v_head_dim: int | None = None) -> Layer:
    return Layer(
        kind=kind, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim or head_dim
    )


def _kv_heads(of: Reading, n_heads: int) -> int:
    """KV heads by the family's own keys, or else as configured, or else one for every query head."""
    said = of.optional("n_kv_heads", least=0)
    if of.family == "falcon" and of.flag("new_decoder_architecture"):
        return said or n_heads
    # old Falcon checkpoints also contain num_kv_heads, unused
    if of.family in ("falcon", "gpt_bigcode", "gpt_refact"):
        return 1 if of.flag("multi_query", True) else n_heads
    if of.family in ("RefinedWeb", "RefinedWebModel"):
        return said or (1 if of.flag("multi_query") else n_heads)
    if of.family in ("mpt", "dbrx"):
        own = of.part("attn_config")
        if own.config.get("attn_type") == "multiquery_attention":
            return 1
        return own.optional("kv_n_heads") or (1 if of.family == "dbrx" else n_heads)
    if of.family == "chatglm":
        return of.number("multi_query_group_num") if of.flag("multi_query_attention") else n_heads
    if of.family == "hf_olmo":
        return said or (1 if of.flag("multi_query_attention") else n_heads)
    return said or n_heads


def _overridden(of: Reading, layers: Layers) -> Layers:
    """Gemma 4 as transformers writes it: per_layer_config names the layers with other heads."""
    own: Mapping[str, Any] = of.part("per_layer_config").config
    changed = list(layers)
    for place, fields in own.items():
        if not str(place).isdecimal() or int(place) >= len(layers) or not isinstance(fields, Mapping):
            raise of.refusal(f"says {place!r} in per_layer_config, which is not one of its {len(layers)} layers")
        layer, changes = layers[int(place)], Reading(of.family, fields, {})
        if others := sorted(fields.keys() - {"head_dim", "num_key_value_heads", "num_attention_heads"}):
            raise of.refusal(f"says {others[0]} in per_layer_config, which is not known to kvprobe")
        head_dim = changes.optional("head_dim") or layer.head_dim
        changed[int(place)] = replace(
            layer,
            n_heads=changes.optional("num_attention_heads") or layer.n_heads,
            n_kv_heads=changes.optional("num_key_value_heads") or layer.n_kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
        )
    return tuple(changed)


def _shared(of: Reading, family: Family, layers: Layers) -> Layers:
    """Layers that read another layer's K and V keep none: the last ones (Gemma 3n), or all but one of every few."""
    if family.sharing == "last":
        n_shared = of.optional("num_kv_shared_layers", least=0) or 0
        if n_shared > len(layers):
            raise of.refusal(f"says {n_shared} for num_kv_shared_layers and has {len(layers)} layers")
        first = len(layers) - n_shared
        return tuple(_reader(layer) if place >= first else layer for place, layer in enumerate(layers))
    if family.cla and of.flag("use_cla"):
        factor = of.optional("cla_share_factor") or 1
        return tuple(_reader(layer) if place % factor else layer for place, layer in enumerate(layers))
    return layers


def _reader(layer: Layer) -> Layer:
    return replace(layer, kind="shared", limit=None)


def _with_index(of: Reading, family: Family, layers: Layers) -> Layers:
    if family.index is None:
        return layers
    # the first is in the configuration that MiniMax-M3 was published with
    width = of.part("sparse_attention_config").optional("sparse_index_dim") or of.number("index_head_dim")
    if family.index == "all":
        return tuple(replace(layer, index=width) for layer in layers)
    # GLM-5: layers that reuse an earlier layer's choice have no indexer
    named = (_is_sparse if family.index == "minimax_m3" else _has_index)(of, len(layers))
    return tuple(replace(layer, index=width if own else 0) for layer, own in zip(layers, named, strict=True))


def _is_sparse(of: Reading, n_layers: int) -> list[bool]:
    """MiniMax-M3: the layers of its own type, or those with a 1 in a list of numbers."""
    if (types := of.sequence("layer_types")) is not None:
        return [name == "minimax_m3_sparse" for name in types]
    chosen = of.part("sparse_attention_config").numbers("sparse_attention_freq") or [0] * n_layers
    if len(chosen) != n_layers:
        raise of.refusal(f"has {n_layers} layers and {len(chosen)} numbers in sparse_attention_freq")
    return [bool(sparse) for sparse in chosen]


def _has_index(of: Reading, n_layers: int) -> list[bool]:
    named = of.sequence("indexer_types") or of.sequence("index_topk_pattern")
    if named is None:
        period, first = of.optional("index_topk_freq") or 1, of.optional("index_skip_topk_offset", least=0)
        first = 2 if first is None else first
        return [max(layer - first + 1, 0) % period == 0 for layer in range(n_layers)]
    words = {"full": True, "F": True, "shared": False, "S": False}
    if len(named) != n_layers or any(str(name) not in words for name in named):
        raise of.refusal(f"does not say full or shared for each of its {n_layers} layers in indexer_types")
    return [words[str(name)] for name in named]


def _block_configs(of: Reading) -> Layers:
    """Nemotron-NAS: every block says its own attention, or that it has none."""
    blocks = of.sequence("block_configs")
    if blocks is None or len(blocks) != of.n_layers:
        raise of.refusal(f"does not have one entry for each of its {of.n_layers} layers in block_configs")
    n_heads = of.number("n_heads")
    head_dim = of.optional("head_dim") or of.number("hidden_size") // n_heads
    return tuple(_block(of, block, n_heads, head_dim) for block in blocks)


def _block(of: Reading, block: Any, n_heads: int, head_dim: int) -> Layer:
    own = Reading(of.family, block, {}).part("attention") if isinstance(block, Mapping) else None
    if own is None:
        raise of.refusal(f"says {block!r} in block_configs: it must be an object")
    # an attention replaced by a matrix keeps nothing of the past
    if own.flag("no_op") or own.flag("replace_with_linear"):
        return Layer(kind="none")
    for key in ("sparsify", "mamba", "llama4"):
        if own.config.get(key):
            raise of.refusal(f"says {key} in block_configs, which is not known to kvprobe")
    window = own.optional("window_length")
    n_kv_heads = own.optional("num_key_value_heads")
    if n_kv_heads is None:
        group = own.number("n_heads_in_group")
        n_kv_heads, rest = divmod(n_heads, group)
        if rest:
            raise of.refusal(f"has groups of {group} heads in block_configs, which do not divide its {n_heads} heads")
    layer = _kv("full" if window is None else "sliding", n_heads, n_kv_heads, head_dim)
    sinks = own.optional("num_sink_tokens", least=0) or 0
    return layer if window is None else replace(layer, limit=window + sinks)


def _per_layer(of: Reading) -> Layers:
    """A number of heads for each layer: DeciLM, OpenELM."""
    kv_heads = of.numbers("num_key_value_heads_per_layer", least=1)
    if kv_heads is None:
        kv_heads = of.numbers("num_kv_heads", least=1)
    heads = of.numbers("num_query_heads", least=1)
    if heads is None:
        heads = [of.number("n_heads")] * of.n_layers
    if kv_heads is None or not len(kv_heads) == len(heads) == of.n_layers:
        raise of.refusal(f"does not say the heads of each of its {of.n_layers} layers")
    widths = [of.optional("head_dim") or of.number("hidden_size") // n for n in heads]
    return tuple(_kv("full", *shape) for shape in zip(heads, kv_heads, widths, strict=True))


# DeepSeek-V4's kinds of layer in layer_types, and how many tokens make one vector in each by default
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _deepseek_v4(of: Reading) -> Layers:
    """Every layer keeps a window of one vector for K and V and, over all tokens, one for every few or every many.

    With one for every few, an indexer chooses among them and keeps a key for each.
    """
    n_heads, width, window = of.number("n_heads"), of.number("head_dim"), window_of(of)
    if window is None:
        raise of.refusal("does not say sliding_window")
    own = of.part("compress_rates")
    rates = {name: own.optional(name) or ratio for name, ratio in _RATIOS.items()}
    result = []
    for name in _names_v4(of):
        ratio = rates[name]
        widths = (width, of.number("index_head_dim")) if name == "compressed_sparse_attention" else (width,)
        result.append(
            Layer(
                kind="compressed" if ratio else "sliding",
                n_heads=n_heads,
                n_kv_heads=1,
                head_dim=width,
                v_head_dim=width,
                latent=width,
                limit=window,
                compressed=tuple((ratio, wide) for wide in widths) if ratio else (),
            )
        )
    return tuple(result)


def _names_v4(of: Reading) -> list[str]:
    if (types := of.sequence("layer_types")) is not None:
        if unknown := sorted({str(name) for name in types} - _RATIOS.keys()):
            raise of.refusal(
                f"has layers of the type {', '.join(unknown)} in layer_types; known are {', '.join(_RATIOS)}"
            )
        names = [str(name) for name in types]
    elif (ratios := of.numbers("compress_ratios")) is not None:
        by_ratio = {ratio: name for name, ratio in _RATIOS.items()}
        if unknown := sorted({str(ratio) for ratio in ratios if ratio not in by_ratio}):
            raise of.refusal(f"says {', '.join(unknown)} in compress_ratios; known are 0, 4 and 128")
        names = [by_ratio[ratio] for ratio in ratios]
    else:
        kinds = ("heavily_compressed_attention", "compressed_sparse_attention")
        names = [kinds[0]] * 2 + [kinds[layer % 2] for layer in range(of.n_layers)]
    # further entries describe the extra layers that predict several tokens
    if len(names) < of.n_layers:
        raise of.refusal(f"has {of.n_layers} layers and the types of {len(names)}")
    return names[: of.n_layers]


WHOLE: dict[str | None, Callable[[Reading], Layers]] = {
    "block_configs": _block_configs,
    "per_layer": _per_layer,
    "deepseek_v4": _deepseek_v4,
}
