"""How does an older transformers read a configuration that a newer one wrote?

It skips a name that it does not know without a word and takes its default, which would be another model. Before
release 5 that is ``rope_parameters``; GPT-NeoX kept names of its own until later.
"""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from kvprobe.errors import UnsupportedModelError

TESTED = (5, 24)
"""The release that constraints.txt names, whose configurations are read as they are."""
# families whose configurations, as TESTED writes them, were loaded by older releases with the same logits
_SAME = frozenset(
    {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "opt", "phi", "phi3", "gpt_oss"}
    | {"deepseek_v2", "deepseek_v3", "qwen3_next", "smollm3", "cohere2", "exaone4", "llama4_text", "gptj", "codegen"}
)
# settings that stand beside the scaling under the older names
_BESIDE = ("rope_theta", "partial_rotary_factor")
_GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
# its older names give local layers a base of their own; a scaling is that of the full layers alone
_WITH_LOCAL_BASE = "gemma3_text"


def installed() -> tuple[int, ...]:
    """The release of the installed transformers, as in (5, 24)."""
    return _release(metadata.version("transformers"))


def for_installed(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration under the names that the installed transformers reads.

    Raises UnsupportedModelError where an older release is installed than wrote it, for a family that was not compared
    between the two, and for a RoPE by kinds of layers that releases before 5 have no names for.
    """
    config, here = dict(config), installed()
    if here >= TESTED:
        return config
    written, family = str(config.get("transformers_version") or ""), config.get("model_type")
    if _release(written) > here and family not in _SAME:
        raise UnsupportedModelError(
            f"config.json of {name} was written by transformers {written}, and {text(here)}, which is installed, may "
            f"skip settings of the family {family!r}: install transformers {written}"
        )
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config["text_config"] = for_installed(name, inner)
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return config
    if family == "gpt_neox":
        config |= {older: rope[key] for key, older in _GPT_NEOX.items() if key in rope}
    if here >= (5,):
        return config
    del config["rope_parameters"]
    return config | _older(name, config, rope)


def _older(name: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    by_kind = {kind: part for kind, part in rope.items() if isinstance(part, Mapping)}
    if not by_kind:
        return _flat(rope)
    full, local = by_kind.get("full_attention", {}), by_kind.get("sliding_attention", {})
    plain = set(local) <= {"rope_type", "rope_theta"} and local.get("rope_type", "default") == "default"
    if config.get("model_type") != _WITH_LOCAL_BASE or not (full and local and plain):
        raise UnsupportedModelError(
            f"config.json of {name} has a RoPE for each kind of layer, which transformers {text(installed())} cannot "
            "read: install transformers 5 or newer"
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


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def text(release: tuple[int, ...]) -> str:
    """As in "5.24"."""
    return ".".join(map(str, release))
