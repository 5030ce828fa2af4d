"""Does a configuration use two names that disagree, or a name that its family does not read?"""

from collections.abc import Mapping
from typing import Any

from kvprobe.shape.families import Family
from kvprobe.shape.reading import NAMES, Reading

# names that transformers reads in single families only (`Family.reads`)
_FOREIGN = {
    "n_kv_heads": "num_kv_heads n_head_kv n_kv_heads num_attention_groups num_query_groups multi_query_group_num",
    "head_dim": "kv_channels dim_head attention_head_dim",
    "v_head_dim": "v_head_dim",
    "kv_lora_rank": "kv_lora_rank",
}


def check_names(name: str, config: Mapping[str, Any], family: Family) -> None:
    """Raise UnsupportedModelError if names disagree on what is kept; one that changes nothing may pass."""
    words = ["n_layers", "hidden_size"]
    if family.state is None and family.heads is None and name not in ("falcon", "gpt_bigcode"):
        words += ["n_heads", "n_kv_heads", "head_dim"]
    for word in words:
        also = {"n_layers": ("num_blocks",), "hidden_size": ("embedding_dim",)}.get(word, ()) if name == "xlstm" else ()
        said = {key: config[key] for key in (*NAMES[word], *also) if _is_count(config.get(key))}
        if len(set(said.values())) > 1:
            (first, least), (second, most) = sorted(said.items(), key=lambda item: item[1])[:: len(said) - 1]
            raise Reading(name, config, {}).refusal(f"says {least:,} for {first} and {most:,} for {second}")
    if name == "xlstm":
        _check_foreign(name, config, family, {"n_layers": ["num_blocks"], "hidden_size": ["embedding_dim"]})
    elif family.defaults and family.heads != "zamba" and not (family.own_code or family.repository):
        _check_foreign(name, config, family, _foreign_to(config, family))


def _foreign_to(config: Mapping[str, Any], family: Family) -> dict[str, list[str]]:
    latent = {"v_head_dim", "kv_lora_rank"} if "kv_lora_rank" in family.defaults else set()
    read = {*family.reads, *latent, *(family.defaults.keys() & {"v_head_dim"})}
    foreign = {word: [key for key in keys.split() if key not in read] for word, keys in _FOREIGN.items()}
    if config.get("use_mla") is False:  # then nothing reads them
        del foreign["v_head_dim"], foreign["kv_lora_rank"]
    for word, key in (("n_kv_heads", "num_key_value_heads"), ("head_dim", "head_dim")):
        foreign[word] += [key] if key in family.ignores else []
    return foreign


def _check_foreign(name: str, config: Mapping[str, Any], family: Family, foreign: Mapping[str, list[str]]) -> None:
    said = [(word, key) for word, keys in foreign.items() for key in keys if _is_count(config.get(key))]
    if not said:
        return
    without = config.keys() - {key for _, key in said}
    own = Reading.of(name, {key: config[key] for key in without}, family.defaults)
    for word, key in said:
        if config[key] != _usual(own, word):
            raise own.refusal(f"says {config[key]:,} for {key}, a name that the family does not read")


def _usual(of: Reading, word: str) -> int | None:
    """What the family would use without the foreign name; None if that is not certain."""
    if word == "kv_lora_rank":
        return None
    own = None if word == "v_head_dim" else of.optional(word, least=0)
    if own or word in ("n_layers", "hidden_size"):
        return own
    n_heads = of.optional("n_heads")
    if word == "n_kv_heads" or not n_heads:
        return n_heads
    return of.optional("head_dim", least=0) or of.number("hidden_size") // n_heads


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
