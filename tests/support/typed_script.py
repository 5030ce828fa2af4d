"""A user's script, type-checked and never run: each public name has a type, and a name that is none has not."""

from typing import Any, assert_type

from torch import Tensor

import kvprobe
from kvprobe import Result
from kvprobe.attention.call import AttentionCall
from kvprobe.experiments.sinks import Sinks
from kvprobe.models.subject import Subject


def last_four(call: AttentionCall) -> Tensor:
    return assert_type(call.attend(keep=call.last(4)), Tensor)


subject = assert_type(kvprobe.prepare("smollm2-135m", tokens=256), Subject)
with kvprobe.attending(subject.model, last_four):
    subject.model(assert_type(subject.input_ids, Tensor), use_cache=False)
result = assert_type(Sinks(epsilon=0.2).run(subject), Result)
assert_type(result.rows, list[dict[str, Any]])
assert_type(kvprobe.evaluate(subject, last_four), Result)
assert_type(kvprobe.load("smollm2-135m").spec.n_kv_heads, int)
assert_type(kvprobe.capture(subject.model, subject.input_ids).keys, dict[int, Tensor])
assert_type(kvprobe.token0_mass(subject.model, subject.input_ids), Tensor)
assert_type(kvprobe.generate("smollm2-135m", ["…"], chat=True).texts, tuple[str, ...])
kvprobe.nosuch  # type: ignore[attr-defined]  # noqa: B018
