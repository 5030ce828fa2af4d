"""Which kind is each layer: full, sliding, chunked, linear, recurrent or none? In every spelling that is in use."""

from typing import TYPE_CHECKING

from kvprobe.shape.kind_rules import RULES, Kinds, check_length
from kvprobe.shape.reading import Reading

if TYPE_CHECKING:
    from kvprobe.shape.families import Family

# what configurations call a layer in layer_types and lists like it; `both`: attention and a state side by side
TYPES = {
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "minimax_m3_sparse": "full",
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "linear",
    "mamba2": "linear",
    "conv": "recurrent",
    "recurrent": "recurrent",
    "hybrid": "both",
    "moe": "none",
    "mlp": "none",
}


def kinds_of(of: Reading, family: "Family") -> Kinds:
    """The kind of every layer: as the configuration lists it, or by its family's rule.

    Raises UnsupportedModelError for unknown types and for lists without exactly one entry a layer.
    """
    for key in ("layer_types", "layers_block_type"):
        if of.sequence(key) is not None:
            kinds = _listed(of, key)
            break
    else:
        kinds = RULES[family.kinds or "plain"](of, family)
    if not of.flag("use_sliding_window", True):
        kinds = tuple("full" if kind == "sliding" else kind for kind in kinds)
    return (*kinds[:-1], "full") if family.last_full else kinds


def _listed(of: Reading, key: str) -> Kinds:
    types = of.sequence(key) or ()
    if isinstance(types, str):
        raise of.refusal(f"says {types!r} for {key}: it must be a list of types, one a layer")
    unknown = sorted({str(name) for name in types if not isinstance(name, str) or name not in TYPES})
    if unknown:
        raise of.refusal(f"has layers of the type {', '.join(unknown)} in {key}; known are {', '.join(TYPES)}")
    check_length(of, key, len(types))
    return tuple(TYPES[name] for name in types)
