"""A configuration that transformers 5.24 wrote is the same model under an older release, or it is refused.

`configs_of_5_24.json` has what `MADE` gives there; in tests on 5.24 itself it is compared with what is made now.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers

from kvprobe.errors import UnsupportedModelError
from kvprobe.models import older_releases
from support.tiny import FAMILIES, SPECIAL, tiny_config, tiny_ids, tiny_model

pytestmark = pytest.mark.contract

CONFIGS = Path(__file__).with_name("configs_of_5_24.json")
WRITTEN = json.loads(CONFIGS.read_text(encoding="utf-8"))
# no default of any release, under the names of before release 5, which all releases read
BASES = {key: {"rope_theta": 500.0} for key in older_releases._SAME}
BASES |= {key: {} for key in ("gpt2", "opt", "gptj", "codegen")}
BASES |= {"gpt_neox": {"rotary_emb_base": 500.0}, "gpt_oss": {}}
BASES |= {"gemma3_text": {"rope_theta": 700.0, "rope_local_base_freq": 300.0}}


@pytest.mark.parametrize("family", sorted(older_releases._SAME))
def test_what_the_tested_release_wrote_is_the_same_model(family):
    wanted = tiny_model(family, **BASES[family])
    config = transformers.CONFIG_MAPPING[WRITTEN[family]["model_type"]].from_dict(
        older_releases.for_installed(family, WRITTEN[family])
    )
    made = getattr(transformers, (FAMILIES | SPECIAL)[family][1])(config).eval()
    made.load_state_dict(wanted.state_dict())
    made.set_attn_implementation(wanted.config._attn_implementation)
    with torch.no_grad():
        same, theirs = (model(tiny_ids(), use_cache=False).logits for model in (made, wanted))
    torch.testing.assert_close(same, theirs, atol=1e-6, rtol=0)


def test_the_kept_configurations_are_those_of_the_tested_release():
    if older_releases.installed()[:2] != older_releases.TESTED:
        pytest.skip("an older release writes other names")
    for family, kept in WRITTEN.items():
        assert json.loads(tiny_config(family, **BASES[family]).to_json_string(use_diff=True)) == kept


@pytest.mark.parametrize("installed", ["4.57.0", "5.12.1"])
def test_a_family_that_was_not_compared_is_refused_by_name(monkeypatch, installed):
    config = {"model_type": "afmoe", "transformers_version": "5.24.0", "rope_parameters": {"rope_theta": 1.0}}
    monkeypatch.setattr(older_releases.metadata, "version", lambda _package: "5.24.0")
    newer = config | {"transformers_version": "5.30.1"}
    assert older_releases.for_installed("mine", newer) == newer
    monkeypatch.setattr(older_releases.metadata, "version", lambda _package: installed)
    with pytest.raises(UnsupportedModelError, match=r"of mine was written by transformers 5\.24\.0, and .*'afmoe'"):
        older_releases.for_installed("mine", config)
    # what an older one wrote is read as it is
    assert older_releases.for_installed("mine", {"model_type": "afmoe", "transformers_version": "4.50.0"})


def test_a_rope_by_kinds_of_layers_has_no_older_names(monkeypatch):
    monkeypatch.setattr(older_releases.metadata, "version", lambda _package: "4.57.0")
    rope = {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}
    with pytest.raises(UnsupportedModelError, match=r"of mine has a RoPE for each kind of layer, .* 4\.57 cannot read"):
        older_releases.for_installed("mine", {"model_type": "modernbert", "rope_parameters": rope})
    found = older_releases.for_installed("mine", {"model_type": "gemma3_text", "rope_parameters": rope})
    assert (found["rope_theta"], found["rope_local_base_freq"], found["rope_scaling"]) == (1.0, 2.0, None)
