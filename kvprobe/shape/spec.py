"""What shape does a model have, by its configuration alone: layers, heads, widths, positions, windows?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvprobe.errors import UnsupportedModelError
from kvprobe.shape import families, parameters
from kvprobe.shape.families import Family
from kvprobe.shape.keeps import latent_of, layers_of
from kvprobe.shape.layers import Layer, as_runs, from_runs
from kvprobe.shape.name_conflicts import check_names
from kvprobe.shape.reading import NAMES, Reading, check_counted, check_mlp

# the keys of a multimodal configuration's text part, and that part's family if it does not name one
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "text_model_config")
_TEXT_FAMILIES = {
    "aria": "aria_text",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl_chat": "llama",
    "kimi_k3": "kimi_linear",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "paligemma": "gemma",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_vl": "qwen3_vl_text",
    "video_llava": "llama",
    "vipllava": "llama",
}
# families whose configurations are written like another's
_SAME = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The shape of a decoder-only language model; what each layer keeps is in `layers`."""

    family: str
    """The configuration's ``model_type``; for a multimodal model, that of its text part."""
    support: str
    """``known``: read as the family's authors mean it; ``plain``: only by keys that every family has."""
    layers: tuple[Layer, ...]
    """What each layer keeps, in order; a layer with two attentions (LongCat-Flash) has two entries."""
    n_heads: int
    """Query heads; like the next three fields, of the first layer with attention, and 0 without any."""
    n_kv_heads: int
    head_dim: int
    """Of a realized query or key: not hidden_size / n_heads in general; under MLA it includes the rotary part."""
    v_head_dim: int
    hidden_size: int
    intermediate_size: int | tuple[int, ...]
    """Of the MLP; a tuple of one a layer for Gemma 3n."""
    vocab_size: int
    max_positions: int | None
    """The positions the model has, or was trained on; None if distances have no limit (ALiBi)."""
    position: str
    """``learned``, ``rope``, ``alibi`` or ``none``."""
    rope_theta: float | None
    rope_theta_local: float | None
    """Of the sliding layers, if it differs (Gemma 3)."""
    kv_lora_rank: int | None
    """MLA: the width of the latent that K and V are made from; otherwise None."""
    qk_rope_head_dim: int | None
    tied: bool
    """Whether the output head is the embedding matrix."""
    n_parameters: int | None = None
    """By the family's closed form (`kvprobe.shape.parameters`); None if that is not known."""

    @property
    def n_layers(self) -> int:
        """The number of `layers`."""
        return len(self.layers)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer (`kvprobe.shape.layers.Layer`)."""
        return tuple(layer.kind for layer in self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The keys that a query of each layer sees, its own counted; None: all of them, or a layer without keys."""
        return tuple(layer.limit for layer in self.layers)

    @cached_property
    def keeps_plain_kv(self) -> bool:
        """Whether every layer keeps its own K and V, of the same heads and width, and nothing else."""
        return all(
            layer.kind in ("full", "sliding", "chunked")
            and (layer.n_kv_heads, layer.head_dim) == (self.n_kv_heads, self.head_dim)
            and layer.vectors == (self.kv_width, self.kv_width)
            and not layer.state + layer.conv
            for layer in dict.fromkeys(self.layers)
        )

    @property
    def kv_width(self) -> int:
        """Elements of one realized K, per token and layer: n_kv_heads · head_dim."""
        return self.n_kv_heads * self.head_dim

    @property
    def joint_width(self) -> int:
        """Elements of one token's realized K and V together, in one layer."""
        return self.n_kv_heads * (self.head_dim + self.v_head_dim)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Spec":
        """The shape in a ``config.json``, with the family's defaults for absent keys.

        Raises UnsupportedModelError for a configuration without ``model_type``, an absent key without a known default,
        impossible numbers, models without a decoder-only KV cache, and keys that could change what layers keep in a
        family that is not known to read them (`kvprobe.shape.families`).
        """
        name, config = _text_part(config)
        families.refuse_others(name, config)
        support = families.support(name, config)
        family = families.known().get(name, families.PLAIN)
        check_names(name, config, family)
        of = Reading.of(name, config, family.defaults)
        check_mlp(of)
        if parameters.knows(name):
            check_counted(of)
        layers = layers_of(of, family)
        first = next((layer for layer in layers if layer.n_heads), Layer(kind="none"))
        position = _position(of, family, first)
        theta, theta_local = _thetas(of) if position == "rope" else (None, None)
        hidden_size, latent = of.number("hidden_size"), latent_of(of)
        spec = cls(
            family=name,
            support=support,
            layers=layers,
            n_heads=first.n_heads,
            n_kv_heads=first.n_kv_heads,
            head_dim=first.head_dim,
            v_head_dim=first.v_head_dim,
            hidden_size=hidden_size,
            intermediate_size=_mlp_width(of, hidden_size),
            vocab_size=of.number("vocab_size"),
            max_positions=None if position == "alibi" else of.optional("max_positions"),
            position=position,
            rope_theta=theta,
            rope_theta_local=theta_local,
            kv_lora_rank=latent,
            qk_rope_head_dim=of.optional("qk_rope_head_dim", least=0) if latent else None,
            tied=bool(of.words.get("tied") or False),
        )
        return replace(spec, n_parameters=parameters.count(spec, config))


def _text_part(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The language model's family and configuration, inside any wrappers."""
    for _ in range(4):
        family = config.get("model_type")
        for key in _TEXT_PARTS:
            part = config.get(key)
            if isinstance(part, Mapping) and part:
                if "model_type" not in part and any(name in config for name in NAMES["n_layers"]):
                    continue  # the outer configuration is complete
                inner = {"model_type": _TEXT_FAMILIES.get(str(family), family), **part}
                config = {"tie_word_embeddings": config.get("tie_word_embeddings", True)} | inner
                break
        else:
            break
    if not isinstance(family := config.get("model_type"), str):
        raise UnsupportedModelError("the configuration has no model_type, so its family is unknown")
    return _SAME.get(family, family), config


def _mlp_width(of: Reading, hidden_size: int) -> int | tuple[int, ...]:
    widths = of.words.get("intermediate_size")
    if isinstance(widths, (list, tuple)):
        if len(set(widths)) > 1:
            return tuple(widths)
        widths = widths[0] if widths else None
    return widths or (of.optional("expansion_ratio") or 4) * hidden_size


def _position(of: Reading, family: Family, first: Layer) -> str:
    if not first.n_heads:
        return "none"
    if of.family == "falcon":
        return "alibi" if of.flag("alibi") else "rope"
    if of.family == "mpt":
        return "alibi" if of.part("attn_config").flag("alibi", True) else "learned"
    if family.position is not None:
        return family.position
    rotary = any(str(key).startswith(("rope_", "rotary_")) for key in of.config)
    return "rope" if of.family in families.known() or rotary else "none"


def _thetas(of: Reading) -> tuple[float, float | None]:
    """The base of the rotary angles: of the full layers, and of the sliding layers if it differs."""
    rope = of.part("rope_parameters")
    full, sliding = (rope.part(kind) for kind in ("full_attention", "sliding_attention"))
    if full.config:  # one set of parameters a kind of layer, since transformers 5
        theta, local = full.real("rope_theta"), sliding.real("rope_theta")
    else:
        theta = rope.real("rope_theta") or of.real("rope_theta") or of.real("rotary_emb_base")
        local = of.real("rope_local_base_freq")
    local = local or of.real("rope_theta_local")
    theta = theta or 10000.0
    return theta, None if local == theta else local


def to_json(spec: Spec) -> dict[str, Any]:
    """The shape as a run record keeps it, with its layers as runs of equal ones."""
    fields = {name: value for name, value in vars(spec).items() if name in Spec.__dataclass_fields__}
    widths = spec.intermediate_size
    return fields | {
        "layers": as_runs(spec.layers),
        "intermediate_size": [*widths] if isinstance(widths, tuple) else widths,
    }


def from_json(kept: Mapping[str, Any]) -> Spec:
    """The shape that `to_json` wrote."""
    widths = kept["intermediate_size"]
    own = {
        "layers": from_runs(kept["layers"]),
        "intermediate_size": tuple(widths) if isinstance(widths, list) else widths,
    }
    return Spec(**{**kept, **own})
