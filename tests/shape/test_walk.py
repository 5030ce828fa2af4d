"""Second road: does the bill of every causal class of transformers agree with what the class's own cache holds?"""

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from kvprobe.errors import UnsupportedModelError
from kvprobe.shape.cache_bytes import bill
from kvprobe.shape.spec import Spec
from support import walk

FAST = ("gemma2", "qwen3_next", "deepseek_v3", "gpt_neo", "mistral")
# Decoders without a bill: what they keep is not modelled, and their refusal says so.
UNMODELLED = {
    "blt",
    "cpmant",
    "dory",
    "dots3_note",
    "dots3_note_text",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_text",
    "qwen4_exp",
    "qwen4_exp_text",
    "reformer",
    "zaya",
}
_MIXED = ["sliding_attention", "full_attention"] * 2
# keys that change what layers keep, which the defaults leave alone
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("afmoe", {"global_attn_every_n_layers": 2}),
    ("bailing_hybrid", {"layer_group_size": 3}),
    ("cohere2", {"sliding_window_pattern": 2}),
    ("exaone4", {"sliding_window_pattern": 2}),
    ("falcon", {"multi_query": False}),
    ("falcon_h1", {"mamba_d_ssm": None, "mamba_d_head": 32}),
    ("gemma2", {"layer_types": _MIXED}),
    ("gemma3_text", {"sliding_window_pattern": 3}),
    ("gemma3n_text", {"num_kv_shared_layers": 0}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}),
    ("gemma4_text", {"num_hidden_layers": 12, "num_kv_shared_layers": 4}),
    ("glm_moe_dsa", {"index_topk_freq": 2}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1], [["local"], 2]]}),
    ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 1}),
    ("laguna", {"layer_types": _MIXED, "num_attention_heads_per_layer": [4, 2, 4, 2]}),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [2, 5]}),
    ("llama4_text", {"no_rope_layer_interval": 2}),
    ("mamba", {"expand": 3}),
    ("mellum", {"layer_types": _MIXED}),
    ("minimax", {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"sliding_window": 8}),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]}),
    ("phi3", {"sliding_window": 8}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ("qwen3_next", {"full_attention_interval": 2}),
    ("recurrent_gemma", {"num_key_value_heads": 1}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
    ("xlstm", {"qk_dim_factor": 1.0}),
    ("zamba2", {"num_mem_blocks": 2}),
]
ELEMENT = 4  # bytes: the models run in float32, which is also what the bill keeps states in


@dataclass(frozen=True)
class Outcome:
    """What became of one class: ``agrees``, ``disagrees``, ``refused`` or ``unbuilt``, and why."""

    word: str
    why: str


def outcome(model_type: str, **changes: Any) -> Outcome:
    try:
        config = walk.shrunk(model_type, **changes)
    except Exception as error:
        return Outcome("unbuilt", walk.told(error))
    try:
        billed = bill(Spec.from_config(json.loads(json.dumps(config.to_dict(), default=str))))
    except UnsupportedModelError as error:
        return Outcome("refused", str(error))
    try:
        held = [walk.counted(cache) for cache in walk.caches(config)]
    except Exception as error:
        return Outcome("unbuilt", walk.told(error))
    totals = [billed.total(n) // ELEMENT for n in walk.TOKENS]
    return Outcome("agrees" if held == totals else "disagrees", f"its cache holds {held}, billed are {totals}")


@pytest.mark.parametrize("model_type", FAST)
def test_a_cache_of_transformers_holds_what_is_billed(model_type: str) -> None:
    found = outcome(model_type)
    assert found.word == "agrees", found.why


@pytest.mark.slow
def test_every_causal_class_agrees_or_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for model_type in walk.FAMILIES:
        result = outcome(model_type)
        found[result.word][model_type] = result.why
    with capsys.disabled():
        for word, classes in sorted(found.items()):
            print(f"\n{len(classes)} of {len(walk.FAMILIES)} {word}: {', '.join(classes)}")
            if word != "agrees":
                print("\n".join(f"    {model_type}: {why}" for model_type, why in classes.items()))
    assert not found["disagrees"]
    assert len(found["unbuilt"]) <= len(walk.FAMILIES) // 10
    assert {name for name in found["refused"] if not walk.is_encoder_kind(name)} == UNMODELLED


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_another_layout_agrees_too(model_type: str, changes: dict[str, Any]) -> None:
    found = outcome(model_type, **changes)
    assert found.word == "agrees", found.why
