"""What shape has a model, by its configuration alone: layers, heads, widths, positions, windows?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvprobe import parameters
from kvprobe.errors import UnsupportedModelError

# Configurations written by transformers may leave out what equals the family's default, so the defaults are needed.
# Keys are this module's own words; a family that is not listed must state everything itself.
_LLAMA = {"hidden_size": 4096, "n_layers": 32, "n_heads": 32, "intermediate_size": 11008}
_LLAMA |= {"vocab_size": 32000, "max_positions": 2048}
_QWEN = {"hidden_size": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "intermediate_size": 22016}
_QWEN |= {"vocab_size": 151936, "max_positions": 32768}
_GPT2: dict[str, Any] = {
    "hidden_size": 768,
    "n_layers": 12,
    "n_heads": 12,
    "vocab_size": 50257,
    "max_positions": 1024,
    "tied": True,
}
_GPT2 |= {"position": "learned"}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_GEMMA = {"hidden_size": 2304, "n_layers": 26, "n_heads": 8, "n_kv_heads": 4, "head_dim": 256, "tied": True}
_GEMMA |= {"intermediate_size": 9216, "sliding_window": 4096}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA | {"n_kv_heads": 8, "intermediate_size": 14336, "max_positions": 131072, "sliding_window": 4096},
    "mixtral": _LLAMA | {"n_kv_heads": 8, "intermediate_size": 14336, "max_positions": 131072, "rope_theta": 1000000.0},
    "qwen2": _QWEN | {"sliding_window": 4096},
    "qwen3": _QWEN | {"head_dim": 128, "sliding_window": 4096},
    "qwen3_next": _QWEN
    | {"hidden_size": 2048, "n_layers": 48, "n_heads": 16, "n_kv_heads": 2, "head_dim": 256, "intermediate_size": 5632},
    "gemma": {"hidden_size": 3072, "n_layers": 28, "n_heads": 16, "n_kv_heads": 16, "head_dim": 256, "tied": True}
    | {"intermediate_size": 24576, "vocab_size": 256000, "max_positions": 8192},
    "gemma2": _GEMMA | {"vocab_size": 256000, "max_positions": 8192},
    "gemma3_text": _GEMMA
    | {"vocab_size": 262208, "max_positions": 131072, "rope_theta": 1000000.0, "rope_theta_local": 10000.0},
    "gpt_neox": {"hidden_size": 6144, "n_layers": 44, "n_heads": 64, "intermediate_size": 24576, "vocab_size": 50432}
    | {"max_positions": 2048},
    "opt": {"hidden_size": 768, "n_layers": 12, "n_heads": 12, "intermediate_size": 3072, "vocab_size": 50272}
    | {"max_positions": 2048, "tied": True, "position": "learned"},
    "phi": {"hidden_size": 2048, "n_layers": 24, "n_heads": 32, "intermediate_size": 8192, "vocab_size": 51200}
    | {"max_positions": 2048},
    "phi3": {"hidden_size": 3072, "n_layers": 32, "n_heads": 32, "intermediate_size": 8192, "vocab_size": 32064}
    | {"max_positions": 4096},
    "gpt_oss": {"hidden_size": 2880, "n_layers": 36, "n_heads": 64, "n_kv_heads": 8, "head_dim": 64}
    | {"intermediate_size": 2880, "vocab_size": 201088, "max_positions": 131072, "sliding_window": 128}
    | {"rope_theta": 150000.0},
    "deepseek_v2": _LLAMA | _MLA | {"vocab_size": 102400},
    "deepseek_v3": {"hidden_size": 7168, "n_layers": 61, "n_heads": 128, "intermediate_size": 18432}
    | {"vocab_size": 129280, "max_positions": 4096}
    | _MLA,
    "falcon": {"hidden_size": 4544, "n_layers": 32, "n_heads": 71, "vocab_size": 65024, "max_positions": 2048}
    | {"tied": True},
    "bloom": {"hidden_size": 64, "n_layers": 2, "n_heads": 8, "vocab_size": 250880, "tied": True}
    | {"position": "alibi"},
    "mpt": {"hidden_size": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50368, "max_positions": 2048}
    | {"tied": True},
    "gpt_neo": {"hidden_size": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50257, "max_positions": 2048}
    | {"tied": True, "position": "learned", "sliding_window": 256},
    "gptj": {"hidden_size": 4096, "n_layers": 28, "n_heads": 16, "vocab_size": 50400, "max_positions": 2048}
    | {"position": "rope"},
}

# one word of ours, and what configurations call it
_NAMES: dict[str, tuple[str, ...]] = {
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    "sliding_window": ("sliding_window", "window_size"),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "tied": ("tie_word_embeddings",),
}
_KINDS = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "linear"}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The shape of a decoder-only transformer; one entry a layer in `kinds` and `windows`."""

    family: str
    """The configuration's ``model_type``; of a multimodal model, that of its text part."""
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    """Of a realized query or key: not hidden_size / n_heads in general; under MLA the rotary part is included."""
    v_head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    """The positions the model has, or was trained on; None where distances have no limit (ALiBi)."""
    position: str
    """``learned``, ``rope``, ``alibi`` or ``none``."""
    rope_theta: float | None
    rope_theta_local: float | None
    """Of the sliding layers where it differs (Gemma 3)."""
    kinds: tuple[str, ...]
    """``full``, ``sliding`` or ``linear`` (a state of fixed size; no keys are kept)."""
    windows: tuple[int | None, ...]
    """The keys a query sees, itself counted; None: all of them, or a linear layer."""
    kv_lora_rank: int | None
    """MLA: the width of the latent that K and V are made from; None elsewhere."""
    qk_rope_head_dim: int | None
    tied: bool
    """Whether the output head is the embedding matrix."""
    linear_state: int | None = None
    """Elements of the state that a linear layer carries from token to token; None without such layers, or unknown."""
    linear_conv: int = 0
    """Elements of a linear layer's last inputs that its short convolution still needs, the newest token's included."""
    n_parameters: int | None = None
    """By the family's closed form (`kvprobe.parameters`); None where it is not known."""

    @property
    def kv_width(self) -> int:
        """Elements of one realized K, per token and layer: n_kv_heads · head_dim."""
        return self.n_kv_heads * self.head_dim

    @property
    def joint_width(self) -> int:
        """Elements of one token's realized K and V together, in one layer."""
        return self.n_kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Spec":
        """The shape in a ``config.json``, with the family's defaults where a key is absent.

        Raises UnsupportedModelError for a configuration without ``model_type``, one that leaves out what is not known
        of its family, and layers that are none of full, sliding or linear attention.
        """
        if isinstance(config.get("text_config"), Mapping) and "model_type" in config["text_config"]:
            config = {"tie_word_embeddings": config.get("tie_word_embeddings", True)} | dict(config["text_config"])
        family = config.get("model_type")
        if not isinstance(family, str):
            raise UnsupportedModelError("the configuration names no model_type, so its family is not known")
        found = dict(FAMILIES.get(family, {}))
        for ours, names in _NAMES.items():
            for name in names:
                if name in config:  # null counts: a null window is no window, a null n_inner the usual width
                    found[ours] = config[name]
                    break
        missing = [word for word in ("n_layers", "n_heads", "hidden_size", "vocab_size") if found.get(word) is None]
        if missing:
            raise UnsupportedModelError(
                f"the configuration of this {family} model does not say {', '.join(missing)} "
                f"(also called {', '.join(_NAMES[missing[0]])}), and kvprobe knows no default for the family"
            )
        for word in ("n_layers", "n_heads", "hidden_size", "vocab_size", "head_dim"):
            _check_number(family, word, found.get(word))
        n_layers, n_heads, hidden_size = found["n_layers"], found["n_heads"], found["hidden_size"]
        head_dim = found.get("head_dim") or hidden_size // n_heads
        if found.get("kv_lora_rank"):
            head_dim = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
        position = _position(family, config, found)
        theta, theta_local = _thetas(config, found) if position == "rope" else (None, None)
        kinds = _kinds(family, config, found)
        linear_state, linear_conv = _linear(family, config) if "linear" in kinds else (None, 0)
        spec = cls(
            family=family,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=_kv_heads(family, config, found),
            head_dim=head_dim,
            v_head_dim=found.get("v_head_dim") or head_dim,
            hidden_size=hidden_size,
            intermediate_size=found.get("intermediate_size") or config.get("expansion_ratio", 4) * hidden_size,
            vocab_size=found["vocab_size"],
            max_positions=None if position == "alibi" else found.get("max_positions"),
            position=position,
            rope_theta=theta,
            rope_theta_local=theta_local,
            kinds=kinds,
            windows=tuple(found["sliding_window"] if kind == "sliding" else None for kind in kinds),
            kv_lora_rank=found.get("kv_lora_rank"),
            qk_rope_head_dim=found.get("qk_rope_head_dim") if found.get("kv_lora_rank") else None,
            tied=bool(found.get("tied", False)),
            linear_state=linear_state,
            linear_conv=linear_conv,
        )
        _check_whole(spec)
        return replace(spec, n_parameters=parameters.count(spec, config))


def _check_number(family: str, word: str, value: Any) -> None:
    """Refuse what is no number of things; None stands for a key that is not there."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UnsupportedModelError(
            f"the configuration of this {family} model says {value!r} for {word} (also called "
            f"{', '.join(_NAMES[word])}): it must be a whole number, at least 1"
        )


def _check_whole(spec: Spec) -> None:
    # not intermediate_size, of which some families have a list, one a layer
    for word in ("n_kv_heads", "max_positions", "kv_lora_rank", "v_head_dim"):
        _check_number(spec.family, word, getattr(spec, word))
    for window in set(spec.windows):
        _check_number(spec.family, "sliding_window", window)
    if spec.n_heads % spec.n_kv_heads:
        raise UnsupportedModelError(
            f"the configuration of this {spec.family} model has {spec.n_kv_heads} key/value heads for {spec.n_heads} "
            "query heads, which they do not divide"
        )


def _kv_heads(family: str, config: Mapping[str, Any], found: Mapping[str, Any]) -> int:
    n_heads: int = found["n_heads"]
    if found.get("kv_lora_rank"):
        return n_heads  # what attention reads is made up for every head
    if family == "falcon" and not config.get("new_decoder_architecture", False):
        # its num_kv_heads is written in old checkpoints too, and not used there
        return 1 if config.get("multi_query", True) else n_heads
    if family == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else n_heads
    if family == "mpt":
        attention = config.get("attn_config") or {}
        if attention.get("attn_type") == "multiquery_attention":
            return 1
        return attention.get("kv_n_heads") or n_heads
    return found.get("n_kv_heads") or n_heads


def _linear(family: str, config: Mapping[str, Any]) -> tuple[int | None, int]:
    """Of the gated delta rule: each value head's state is key width × value width, its inputs q, k, v are convolved."""
    if family != "qwen3_next" and "linear_num_value_heads" not in config:
        return None, 0
    keys, values, _, _, kernel = parameters.linear_widths(config)
    return config.get("linear_key_head_dim", 128) * values, (2 * keys + values) * kernel


def _position(family: str, config: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if family == "falcon":
        return "alibi" if config.get("alibi", False) else "rope"
    if family == "mpt":
        return "alibi" if (config.get("attn_config") or {}).get("alibi", True) else "learned"
    if "position" in found:
        return str(found["position"])
    rotary = any(key.startswith(("rope_", "rotary_")) for key in config)
    return "rope" if family in FAMILIES or rotary else "none"


def _thetas(config: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[float, float | None]:
    """The base of the rotary angles: of the full layers, and of the sliding ones where theirs is another."""
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:  # one set of parameters a kind of layer, since transformers 5
        theta, local = rope["full_attention"]["rope_theta"], rope.get("sliding_attention", {}).get("rope_theta")
    else:
        theta = rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base")
        local = config.get("rope_local_base_freq")
    theta, local = theta or found.get("rope_theta", 10000.0), local or found.get("rope_theta_local")
    return float(theta), None if local is None or local == theta else float(local)


def _kinds(family: str, config: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    n_layers, window = found["n_layers"], found.get("sliding_window")
    if types := config.get("layer_types"):
        unknown = sorted(set(types) - set(_KINDS))
        if unknown or len(types) != n_layers:
            raise UnsupportedModelError(
                f"this {family} model has layers of the type {', '.join(unknown)}; known are {', '.join(_KINDS)}"
                if unknown
                else f"this {family} model has {n_layers} layers and the types of {len(types)}"
            )
        kinds = tuple(_KINDS[name] for name in types)
        if "sliding" in kinds and not window:
            raise UnsupportedModelError(f"this {family} model has sliding layers and states no sliding_window")
        return kinds
    if family == "gpt_neo":
        pairs = config.get("attention_types", [[["global", "local"], n_layers // 2]])
        names = [name for pattern, times in pairs for name in pattern * times]
        return tuple("sliding" if name == "local" else "full" for name in names)
    every = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}.get(family)
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or every
    if family == "qwen3_next":
        interval = config.get("full_attention_interval", 4)
        return tuple("linear" if (layer + 1) % interval else "full" for layer in range(n_layers))
    if not window or ("qwen" in family and not config.get("use_sliding_window", False)):
        return ("full",) * n_layers
    if "qwen" in family:  # the first max_window_layers are full
        return tuple("sliding" if layer >= config.get("max_window_layers", 28) else "full" for layer in range(n_layers))
    # a pattern of n: the last of every n layers is full; without one, all layers slide (Mistral)
    return tuple("full" if every and (layer + 1) % every == 0 else "sliding" for layer in range(n_layers))
