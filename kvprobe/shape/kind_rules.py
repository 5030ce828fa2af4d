"""Which kind is each layer, if the configuration does not list them? One rule for each spelling that families use."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvprobe.shape.reading import Reading

if TYPE_CHECKING:
    from kvprobe.shape.families import Family

Kinds = tuple[str, ...]

_LETTERS = {"f": "full", "s": "sliding", "c": "chunked", "l": "linear", "r": "recurrent", "b": "both", "n": "none"}
# the letters of a pattern such as LLLG
_WORDS = {"l": "s", "g": "f"}


def window_of(of: Reading) -> int | None:
    """The tokens that a sliding layer keeps; None if nothing slides, as when use_sliding_window is false."""
    if not of.flag("use_sliding_window", True):
        return None
    if (both_sides := of.optional("local_attention", least=0)) is not None:  # ModernBERT
        return both_sides // 2 or None
    # the first is RecurrentGemma's
    return of.optional("attention_window_size") or of.optional("sliding_window", least=0) or None


def check_length(of: Reading, key: str, length: int) -> None:
    """Raise UnsupportedModelError unless the list under ``key`` has one entry a layer."""
    n_layers = of.optional("n_layers")
    if n_layers is not None and length != of.n_layers:
        raise of.refusal(f"has {n_layers} layers and the types of {length} in {key}")


def _cycle(pattern: Iterable[str], n_layers: int) -> Kinds:
    letters = tuple(pattern)
    return tuple(_LETTERS[letters[layer % len(letters)]] for layer in range(n_layers))


def _window(of: Reading, _: "Family") -> Kinds:
    return ("full" if window_of(of) is None else "sliding",) * of.n_layers


def _plain(of: Reading, family: "Family") -> Kinds:
    """A family not known to slide: a window needs use_sliding_window or max_window_layers beside it."""
    window, positions = window_of(of), of.optional("max_positions")
    if window is None or (positions is not None and window >= positions and not of.flag("use_sliding_window")):
        return ("full",) * of.n_layers
    if of.optional("max_window_layers", least=0) is not None:
        return _qwen(of, family)
    if of.flag("use_sliding_window"):
        return ("sliding",) * of.n_layers
    raise of.refusal(
        f"says {window:,} for sliding_window, but not layer_types, use_sliding_window or max_window_layers, "
        "so which of its layers slide is not known"
    )


def _qwen(of: Reading, _: "Family") -> Kinds:
    """The first max_window_layers are full."""
    first = of.optional("max_window_layers", least=0)
    if window_of(of) is None:
        return ("full",) * of.n_layers
    first = 28 if first is None else first
    return tuple("sliding" if layer >= first else "full" for layer in range(of.n_layers))


def _pattern(of: Reading, family: "Family") -> Kinds:
    pattern: str = family.pattern
    for key in family.pattern_keys:
        if of.config.get(key) is not None:
            pattern = _stated(of, key, pattern)
            break
    # a null window is no window
    if "s" in pattern and window_of(of) is None:
        pattern = pattern.replace("s", "f")
    return _cycle(pattern, of.n_layers)


def _stated(of: Reading, key: str, usual: str) -> str:
    """The pattern under ``key``: letters, or the number of layers for each full one."""
    value: Any = of.config[key]
    if isinstance(value, str):
        letters = "".join(_WORDS.get(letter, "?") for letter in value.lower())
        if not letters or "?" in letters:
            raise of.refusal(f"says {value!r} for {key}: known are a number and a pattern of L and G")
        return letters
    if value == 0:
        return "f"
    period = of.number(key)
    if period > 10_000:
        raise of.refusal(f"says {period:,} for {key}: it must be at most 10,000")
    # the other kind of the family: a sliding or a linear one
    other = next(letter for letter in usual if letter != "f")
    return "f" + other * (period - 1) if usual[0] == "f" else other * (period - 1) + "f"


def _gpt_neo(of: Reading, _: "Family") -> Kinds:
    layers = of.sequence("attention_layers")
    if layers is None:
        types = of.sequence("attention_types") or [[["global", "local"], of.n_layers // 2]]
        try:
            pairs = [(list(pattern), times) for pattern, times in types]
        except (TypeError, ValueError):
            raise of.refusal(f"says {types!r} for attention_types: it must be a list of [types, times]") from None
        if any(isinstance(times, bool) or not isinstance(times, int) or not 0 <= times <= 10_000 for _, times in pairs):
            raise of.refusal(f"says {types!r} for attention_types: it must be a list of [types, times]")
        layers = [name for pattern, times in pairs for name in pattern * times]
    if unknown := sorted({str(name) for name in layers} - {"global", "local"}):
        raise of.refusal(f"has layers of the type {', '.join(unknown)} in attention_types; known are global, local")
    check_length(of, "attention_types", len(layers))
    return tuple("sliding" if name == "local" else "full" for name in layers)


def _smollm3(of: Reading, _: "Family") -> Kinds:
    """If windows are on, the layers without rotation slide."""
    slides = of.flag("use_sliding_window") and window_of(of) is not None
    return tuple("sliding" if slides and not rotary else "full" for rotary in _rotary_layers(of))


def _llama4(of: Reading, _: "Family") -> Kinds:
    """Layers with rotation attend within chunks, the others to every token."""
    chunks = of.optional("attention_chunk_size", least=0)
    return tuple("chunked" if chunks and rotary else "full" for rotary in _rotary_layers(of))


def _rotary_layers(of: Reading) -> list[int]:
    """Despite its name, no_rope_layers has a 1 for each layer with rotation."""
    if of.config.get("no_rope_layers"):
        layers = of.numbers("no_rope_layers") or []
        check_length(of, "no_rope_layers", len(layers))
        return layers
    interval = of.optional("no_rope_layer_interval") or 4
    return [int((layer + 1) % interval != 0) for layer in range(of.n_layers)]


def _cohere2_moe(of: Reading, _: "Family") -> Kinds:
    """The first dense layers have a pattern of their own."""
    first = of.optional("first_k_dense_replace", least=0) or 0
    periods = (of.number("prefix_dense_sliding_window_pattern"), of.number("sliding_window_pattern"))
    places = [(layer, periods[0]) if layer < first else (layer - first, periods[1]) for layer in range(of.n_layers)]
    return tuple("sliding" if (place + 1) % period else "full" for place, period in places)


def _flint(of: Reading, _: "Family") -> Kinds:
    """The first two layers, every fourth and the last are full."""
    last = of.n_layers - 1
    return tuple("full" if layer < 2 or layer % 4 == 1 or layer == last else "sliding" for layer in range(of.n_layers))


def _mimo_v2(of: Reading, _: "Family") -> Kinds:
    """hybrid_layer_pattern has a 1 for each sliding layer; by default the first and every sixth are full."""
    pattern = of.numbers("hybrid_layer_pattern")
    if pattern is None:
        return tuple("full" if layer == 0 or (layer + 1) % 6 == 0 else "sliding" for layer in range(of.n_layers))
    check_length(of, "hybrid_layer_pattern", len(pattern))
    return tuple("sliding" if slides else "full" for slides in pattern)


def _attn_type_list(of: Reading, family: "Family") -> Kinds:
    """MiniMax: 1 for softmax attention, 0 for lightning attention."""
    types = of.numbers("attn_type_list")
    if types is None:
        return _cycle(family.pattern or "f", of.n_layers)
    check_length(of, "attn_type_list", len(types))
    return tuple("full" if softmax else "linear" for softmax in types)


def _places(of: Reading, key: str, *, first: int = 0) -> set[int]:
    """The layers named under ``key``, counted from 0; the configuration counts from ``first``."""
    places = {place - first for place in (of.config.get(key) and of.numbers(key, least=first)) or ()}
    if outside := sorted(place + first for place in places if place >= of.n_layers):
        raise of.refusal(f"names layer {outside[0]} in {key} and has {of.n_layers} layers")
    return places


def _attn_layer_indices(of: Reading, _: "Family") -> Kinds:
    full = _places(of, "attn_layer_indices")
    return tuple("full" if layer in full else "linear" for layer in range(of.n_layers))


def _full_attn_idxs(of: Reading, _: "Family") -> Kinds:
    if of.config.get("full_attn_idxs") is None:
        return ("full",) * of.n_layers
    full = _places(of, "full_attn_idxs")
    return tuple("full" if layer in full else "recurrent" for layer in range(of.n_layers))


def _lfm3(of: Reading, _: "Family") -> Kinds:
    return tuple(
        "full" if layer % 4 == 2 else "sliding" if layer and layer % 4 == 0 else "recurrent"
        for layer in range(of.n_layers)
    )


def _period(of: Reading, _: "Family") -> Kinds:
    """Jamba: attention in the layers whose number modulo the period is the offset."""
    period, offset = of.number("attn_layer_period"), of.number("attn_layer_offset", least=0)
    if offset >= period:
        raise of.refusal(f"says {offset} for attn_layer_offset, which must be below attn_layer_period, {period}")
    return tuple("full" if layer % period == offset else "linear" for layer in range(of.n_layers))


def _zamba(of: Reading, _: "Family") -> Kinds:
    """The third layer, then as Jamba from the fourth on; each attention has a Mamba layer beside it."""
    period, offset = of.number("attn_layer_period"), of.number("attn_layer_offset", least=0)
    rest = ("both" if layer % period == offset else "linear" for layer in range(max(0, of.n_layers - 3)))
    return ("linear", "linear", "both", *rest)[: of.n_layers]


def _zamba2(of: Reading, _: "Family") -> Kinds:
    if (named := of.config.get("hybrid_layer_ids")) is not None:
        both = _places(of, "hybrid_layer_ids") if named else set()
        return tuple("both" if layer in both else "linear" for layer in range(of.n_layers))
    kinds = _cycle("l" + "lllllb" * 7 + "llllb" + "lllb" + "ll", 54)
    check_length(of, "layers_block_type (its default)", len(kinds))
    return kinds


def _nemotron_h(of: Reading, _: "Family") -> Kinds:
    """hybrid_override_pattern: M for Mamba-2, * for attention, - for an MLP, E for experts."""
    pattern = of.sequence("hybrid_override_pattern")
    if pattern is None:
        return ("linear", "none", "full", "none")
    letters = {"M": "linear", "*": "full", "-": "none", "E": "none"}
    if unknown := sorted({str(letter) for letter in pattern} - set(letters)):
        raise of.refusal(f"has {', '.join(unknown)} in hybrid_override_pattern; known are {', '.join(letters)}")
    check_length(of, "hybrid_override_pattern", len(pattern))
    return tuple(letters[letter] for letter in pattern)


def _kimi_linear(of: Reading, _: "Family") -> Kinds:
    """linear_attn_config counts its layers from 1."""
    own = of.part("linear_attn_config")
    named = Reading(of.family, {**of.config, **own.config}, of.words)
    if own.config.get("full_attn_layers") is None:
        return tuple("full" if layer and layer % 4 == 0 else "linear" for layer in range(of.n_layers))
    full, linear = (_places(named, key, first=1) for key in ("full_attn_layers", "kda_layers"))
    if full & linear or len(full | linear) != of.n_layers:
        raise of.refusal(
            f"names {len(full)} layers in full_attn_layers and {len(linear)} in kda_layers, which do not name each of "
            f"its {of.n_layers} layers once"
        )
    return tuple("full" if layer in full else "linear" for layer in range(of.n_layers))


def _bailing_linear(of: Reading, _: "Family") -> Kinds:
    """The last of every layer_group_size layers, and those after the last whole group, are full."""
    size, n_layers = of.number("layer_group_size"), of.n_layers
    rest = n_layers // size * size
    return tuple("full" if (layer + 1) % size == 0 or layer >= rest else "linear" for layer in range(n_layers))


def _block_types(of: Reading, _: "Family") -> Kinds:
    """RecurrentGemma: the list repeats; its attention is always local."""
    key = "_block_types" if of.config.get("_block_types") is not None else "block_types"
    types = of.sequence(key)
    if types is None:
        raise of.refusal(f"does not say {key}")
    if unknown := sorted({str(name) for name in types} - {"recurrent", "attention"}):
        raise of.refusal(f"has layers of the type {', '.join(unknown)} in {key}; known are recurrent, attention")
    return _cycle(["s" if name == "attention" else "r" for name in types], of.n_layers)


def _mllama(of: Reading, _: "Family") -> Kinds:
    """Cross-attention layers keep the image's keys and none of the text's."""
    cross = _places(of, "cross_attention_layers")
    return tuple("none" if layer in cross else "full" for layer in range(of.n_layers))


def _hrm(of: Reading, _: "Family") -> Kinds:
    """Two stacks run in turn, and each run of a layer has its own K and V.

    num_hidden_layers counts the runs if num_layers_per_stack is given, and is the layers of a stack otherwise.
    """
    runs = 1 if of.optional("num_layers_per_stack") else of.number("H_cycles") * (of.number("L_cycles") + 1)
    return ("full",) * (of.n_layers * runs)


def _fla(of: Reading, _: "Family") -> Kinds:
    """flash-linear-attention: ``attn`` names the layers of softmax attention."""
    own = of.part("attn")
    named = Reading(of.family, {**of.config, **own.config}, of.words)
    full = _places(named, "layers")
    kind = "full" if own.config.get("window_size") is None else "sliding"
    return tuple(kind if layer in full else "linear" for layer in range(of.n_layers))


RULES: dict[str, Callable[[Reading, "Family"], Kinds]] = {
    "attn_layer_indices": _attn_layer_indices,
    "attn_type_list": _attn_type_list,
    "bailing_linear": _bailing_linear,
    "block_types": _block_types,
    "cohere2_moe": _cohere2_moe,
    "fla": _fla,
    "flint": _flint,
    "full_attn_idxs": _full_attn_idxs,
    "gpt_neo": _gpt_neo,
    "hrm": _hrm,
    "kimi_linear": _kimi_linear,
    "lfm3": _lfm3,
    "llama4": _llama4,
    "mimo_v2": _mimo_v2,
    "mllama": _mllama,
    "nemotron_h": _nemotron_h,
    "pattern": _pattern,
    "period": _period,
    "plain": _plain,
    "qwen": _qwen,
    "smollm3": _smollm3,
    "window": _window,
    "zamba": _zamba,
    "zamba2": _zamba2,
}
