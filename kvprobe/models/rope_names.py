"""Which names does the installed transformers read a RoPE under? Since release 5 ``rope_parameters``, before it others.

Releases before 5 skip ``rope_parameters`` without a word and take their defaults, which would be another model.
"""

from collections.abc import Mapping
from typing import Any

from kvprobe.errors import UnsupportedModelError

# settings that stand beside the scaling under the older names
_BESIDE = ("rope_theta", "partial_rotary_factor")
# families whose older names give local layers a base of their own; a scaling is that of the full layers alone
_WITH_LOCAL_BASE = ("gemma3_text", "gemma3n_text")


def reads_rope_parameters() -> bool:
    """True if the installed transformers is release 5 or newer."""
    from transformers import __version__

    return int(__version__.partition(".")[0]) >= 5


def for_installed(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration under names that the installed transformers reads; release 5 and newer read both kinds.

    Raises UnsupportedModelError for a RoPE by kinds of layers that releases before 5 have no names for.
    """
    config = dict(config)
    if reads_rope_parameters():
        return config
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config["text_config"] = for_installed(name, inner)
    rope = config.pop("rope_parameters", None)
    return config | _older(name, config, rope) if isinstance(rope, Mapping) else config


def _older(name: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    by_kind = {kind: part for kind, part in rope.items() if isinstance(part, Mapping)}
    if not by_kind:
        return _flat(rope)
    full, local = by_kind.get("full_attention", {}), by_kind.get("sliding_attention", {})
    plain = set(local) <= {"rope_type", "rope_theta"} and local.get("rope_type", "default") == "default"
    if config.get("model_type") not in _WITH_LOCAL_BASE or not (full and local and plain):
        from transformers import __version__

        raise UnsupportedModelError(
            f"config.json of {name} has a RoPE for each kind of layer, which transformers {__version__} does not read: "
            "install transformers 5 or newer"
        )
    return _flat(full) | {"rope_local_base_freq": local.get("rope_theta", 10000.0)}


def _flat(rope: Mapping[str, Any]) -> dict[str, Any]:
    beside = {key: rope[key] for key in _BESIDE if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in _BESIDE}
    if scaling.get("rope_type") == "longrope":
        scaling = {"type": "longrope"} | scaling
        if "original_max_position_embeddings" in scaling:
            beside["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return beside | {"rope_scaling": None if scaling in ({}, {"rope_type": "default"}) else scaling}
