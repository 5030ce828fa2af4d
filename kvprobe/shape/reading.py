"""What does a configuration say, by whatever name, and is each of its numbers possible?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from kvprobe.errors import UnsupportedModelError, short

MAX_LAYERS = 10_000
# far above any model, and small enough that JSON readers take a product of three
MAX_COUNT = 2**40

# our word for a number, and what configurations call it
NAMES: dict[str, tuple[str, ...]] = {
    word: tuple(names.split())
    for word, names in {
        "n_layers": "num_hidden_layers n_layer n_layers num_layers num_transformer_layers",
        "n_heads": "num_attention_heads n_head n_heads num_heads attention_heads",
        "n_kv_heads": "num_key_value_heads num_kv_heads n_head_kv n_kv_heads num_attention_groups num_query_groups",
        "head_dim": "head_dim attention_head_dim kv_channels dim_head",
        "hidden_size": "hidden_size n_embd d_model n_embed model_dim",
        "intermediate_size": "intermediate_size n_inner ffn_dim ffn_hidden_size",
        "vocab_size": "vocab_size padded_vocab_size n_vocab",
        "max_positions": "max_position_embeddings n_positions max_seq_len n_ctx seq_length max_sequence_length "
        "max_context_length model_max_length",
        "sliding_window": "sliding_window window_size",
        "kv_lora_rank": "kv_lora_rank",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "v_head_dim": "v_head_dim",
        "tied": "tie_word_embeddings",
    }.items()
}
# these must be at least 1 if given; for the other NAMES a 0 is the same as absent
_POSITIVE = ("n_layers", "n_heads", "hidden_size", "vocab_size", "max_positions")


@dataclass(frozen=True)
class Reading:
    """One configuration with its family's defaults: ``config`` by its own keys, ``words`` by those of `NAMES`."""

    family: str
    config: Mapping[str, Any]
    words: Mapping[str, Any]

    @classmethod
    def of(cls, family: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> "Reading":
        """``config`` laid over the family's ``defaults``, its words checked.

        Raises UnsupportedModelError for an impossible number.
        """
        words = {word: value for word, value in defaults.items() if word in NAMES}
        filled = {key: value for key, value in defaults.items() if key not in NAMES or key in NAMES[key]} | dict(config)
        for word, names in NAMES.items():
            for name in names:
                if name in config:  # null counts: a null window is no window, a null n_inner the usual width
                    words[word] = config[name]
                    break
        reading = cls(family, filled, words)
        for word in NAMES:
            if word not in ("tied", "intermediate_size") and not _is_list(words.get(word)):
                reading._check(word, words.get(word), least=1 if word in _POSITIVE else 0)
        return reading

    def number(self, *keys: str, least: int = 1) -> int:
        """The integer under the first of ``keys``, of the configuration or of `NAMES`, that is set.

        Raises UnsupportedModelError if none is set, or if the value is not an integer of at least ``least``.
        """
        value = self.optional(*keys, least=least)
        if value is None:
            also = _also(keys[0])
            raise self.refusal(f"does not say {keys[0]}{also}, and kvprobe knows no default for the family")
        return value

    def optional(self, *keys: str, least: int = 1) -> int | None:
        """As `number`, but None if none of ``keys`` is set."""
        for key in keys:
            value = self.words.get(key) if key in NAMES else None
            value = self.config.get(key) if value is None else value
            if value is not None:
                self._check(key, value, least)
                return int(value)
        return None

    def factor(self, *keys: str) -> float:
        """The number above 0 under the first of ``keys`` that is set; refused if none is."""
        for key in keys:
            if (value := self.real(key)) is not None:
                return value
        raise self.refusal(f"does not say {keys[0]}, and kvprobe knows no default for the family")

    def real(self, key: str) -> float | None:
        """The finite number above 0 under ``key``; None if absent."""
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.refusal(f"says {value!r} for {key}: it must be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Whether ``key`` is on."""
        value = self.config.get(key)
        if value is None:
            return default
        if value not in (False, True, 0, 1):
            raise self.refusal(f"says {value!r} for {key}: it must be true or false")
        return bool(value)

    def sequence(self, key: str) -> Sequence[Any] | None:
        """The list (or string of letters) under ``key``; None if absent."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple, str)) or not value:
            raise self.refusal(f"says {short(value)} for {key}: it must be a non-empty list")
        return value

    def numbers(self, key: str, least: int = 0) -> list[int] | None:
        """The integers under ``key``; None if absent."""
        value = self.sequence(key)
        if value is not None and (isinstance(value, str) or None in value):
            raise self.refusal(f"says {short(value)} for {key}: it must be a list of whole numbers")
        for item in value or ():
            self._check(key, item, least)
        return None if value is None else [int(item) for item in value]

    def part(self, key: str) -> "Reading":
        """The object under ``key`` as a configuration of its own; empty if absent."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refusal(f"says {short(value)} for {key}: it must be an object")
        return Reading(self.family, value or {}, {})

    @property
    def n_layers(self) -> int:
        """The number of layers, at most `MAX_LAYERS`."""
        n_layers = self.number("n_layers")
        if n_layers > MAX_LAYERS:
            raise self.refusal(f"says {n_layers:,} for n_layers: kvprobe reads at most {MAX_LAYERS:,} layers")
        return n_layers

    def refusal(self, what: str) -> UnsupportedModelError:
        """The error that says ``what`` about this configuration."""
        return UnsupportedModelError(f"the configuration of this {self.family} model {what}")

    def _check(self, key: str, value: Any, least: int) -> None:
        # None: the key is absent
        is_int = not isinstance(value, bool) and isinstance(value, int)
        if value is not None and not (is_int and least <= value <= MAX_COUNT):
            also = _also(key)
            limit = f", at least {least}" if not is_int or value < least else f", at most {MAX_COUNT:,}"
            raise self.refusal(f"says {short(value)} for {key}{also}: it must be a whole number{limit}")


# integers that `kvprobe.shape.parameters` reads; 0 means none
_COUNTS = """
num_local_experts num_experts n_routed_experts n_shared_experts moe_intermediate_size first_k_dense_replace
shared_expert_intermediate_size q_lora_rank word_embed_proj_dim linear_num_key_heads linear_num_value_heads
linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim decoder_sparse_step num_ln_in_parallel_attn
expansion_ratio
"""


def check_mlp(reading: Reading) -> None:
    """Refuse an impossible width of the MLP, or such a one in a list of them."""
    widths = reading.words.get("intermediate_size")
    for width in widths if _is_list(widths) else (widths,):
        reading._check("intermediate_size", width, least=0)


def check_counted(reading: Reading) -> None:
    """Refuse bad values of the keys that only the count of parameters reads."""
    for key in _COUNTS.split():
        reading.optional(key, least=0)
    if reading.config.get("decoder_sparse_step") == 0:
        raise reading.refusal("says 0 for decoder_sparse_step: it must be a whole number, at least 1")
    if reading.config.get("mlp_only_layers"):
        reading.numbers("mlp_only_layers")


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def _also(word: str) -> str:
    names = [name for name in NAMES.get(word, ()) if name != word]
    return f" (also called {', '.join(names)})" if names else ""
