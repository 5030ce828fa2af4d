"""Second road: does the bill of every causal class of transformers agree with what the class's own cache holds?"""

import json
from collections import defaultdict
from dataclasses import dataclass

import pytest

import walk
from kvprobe.bill import bill
from kvprobe.errors import UnsupportedModelError
from kvprobe.spec import Spec

FAST = ("gemma2", "qwen3_next", "deepseek_v3", "gpt_neo", "mistral")
ELEMENT = 4  # bytes: the models run in float32, which is also what the bill keeps states in


@dataclass(frozen=True)
class Outcome:
    """What became of one class: ``agrees``, ``disagrees``, ``refused`` or ``unbuilt``, and why."""

    word: str
    why: str


def outcome(model_type: str) -> Outcome:
    try:
        config = walk.shrunk(model_type)
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
    assert sum(map(len, found.values())) == len(walk.FAMILIES)
