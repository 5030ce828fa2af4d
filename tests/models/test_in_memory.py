"""A model that is in memory is read as one from the disk is, and left as it is."""

import json

import pytest
import torch
from torch import nn

import kvprobe
from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.experiments.sinks import Sinks
from kvprobe.models import loading
from kvprobe.models.in_memory import from_memory
from kvprobe.results.result import Result
from kvprobe.text.texts import Text
from support.tiny import tiny_ids, tiny_model


@pytest.fixture
def loaded(tiny_llama):
    return loading.load(str(tiny_llama), device="cpu")


def test_a_model_in_memory_gives_the_rows_of_its_directory(loaded, tiny_llama):
    from_disk = kvprobe.prepare(str(tiny_llama), tokens=96, device="cpu")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    subject = kvprobe.prepare(loaded.model, tokenizer=loaded.tokenizer, tokens=96)
    assert Sinks().run(subject).rows == Sinks().run(from_disk).rows
    assert subject.loaded.spec == from_disk.loaded.spec
    run = Sinks().run(subject).run
    assert (run["model"], run["source"], run["dtype"]) == ("tiny-llama", "memory", "float32")
    assert run["revision"].startswith("memory:")
    after = loaded.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    # a loaded one is taken as it is
    assert Sinks().run(kvprobe.prepare(loaded, tokens=96)).rows == Sinks().run(from_disk).rows


def test_the_revision_tells_a_fine_tuned_model_from_the_one_before(loaded):
    first = from_memory(loaded.model, loaded.tokenizer)
    assert from_memory(loaded.model, loaded.tokenizer).revision == first.revision
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight.add_(1e-4)
    assert from_memory(loaded.model, loaded.tokenizer).revision != first.revision


@pytest.mark.parametrize("from_disk", [True, False])
def test_weights_changed_after_prepare_are_another_revision_in_the_record(loaded, tiny_llama, from_disk):
    # without a tokenizer a token has no text
    given = {"model": str(tiny_llama), "device": "cpu"} if from_disk else {"model": loaded.model}
    subject = kvprobe.prepare(**given, ids=tiny_ids(96)[0])
    before = Sinks().run(subject).run
    assert before["revision"] == subject.loaded.revision
    with torch.no_grad():
        subject.model.get_output_embeddings().weight.add_(1e-4)
    after = Sinks().run(subject).run
    assert (after["revision"], after["source"]) == (from_memory(subject.model).revision, "memory")
    assert after["revision"] != before["revision"]


def test_a_string_and_ids_are_read_whole(loaded):
    said = "Thetidecameupbynight."  # its vocabulary has no space
    subject = kvprobe.prepare(loaded, string=said)
    assert loaded.tokenizer.decode(subject.passage.ids) == said
    assert kvprobe.prepare(loaded, text=Text("mine", "", said), tokens=None).passage.ids.tolist() == (
        subject.passage.ids.tolist()
    )
    ids = tiny_ids(48)[0]
    for given in (ids, ids.tolist(), ids.numpy()):
        assert torch.equal(kvprobe.prepare(loaded, ids=given).input_ids[0], ids)
    # without a tokenizer ids are enough for what decodes nothing
    bare = kvprobe.prepare(loaded.model, ids=ids)
    assert torch.equal(
        kvprobe.token0_mass(bare.model, bare.input_ids, 8), kvprobe.token0_mass(loaded.model, ids[None], 8)
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"text": ["a", "b"]}, "text must be a name or a file, got list: prepare one text at a time"),
        ({"string": "a", "ids": [1, 2]}, "text, string and ids exclude each other"),
        ({"text": "manual", "string": "a"}, "text, string and ids exclude each other"),
        ({"dtype": "bfloat16"}, "a model in memory has its own dtype and device"),
        ({"ids": [1]}, "at least 2 whole numbers"),
        ({"ids": [1.0, 2.0]}, "at least 2 whole numbers"),
        ({"ids": [[1, 2]]}, "at least 2 whole numbers"),
        ({"ids": [1, -2]}, "at least 2 whole numbers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(loaded, settings, said):
    with pytest.raises(ValueError, match=said):
        kvprobe.prepare(loaded, **settings)


def test_what_is_not_a_model_to_read_is_refused_by_name(loaded):
    with pytest.raises(UnsupportedModelError, match="Linear has no config"):
        kvprobe.prepare(nn.Linear(2, 2), ids=[1, 2])
    with pytest.raises(ValueError, match="tiny-llama has no tokenizer to read a text with"):
        kvprobe.prepare(loaded.model)
    with pytest.raises(KvprobeError, match="97 is not an id of tiny-llama, which has 97 tokens"):
        kvprobe.prepare(loaded, ids=[1, 97])
    with pytest.raises(KvprobeError, match="is in training mode"):
        kvprobe.prepare(tiny_model("llama").train(), ids=[1, 2])
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight[0, 0] = float("nan")
    with pytest.raises(KvprobeError, match="weights that are not finite"):
        kvprobe.prepare(loaded.model, ids=[1, 2])


def test_a_repr_fits_a_line(loaded):
    subject = kvprobe.prepare(loaded, tokens=96)
    result = Sinks().run(subject)
    assert repr(loaded) == "Loaded(tiny-llama, float32 on cpu)"
    assert repr(subject) == "Subject(tiny-llama: 96 tokens of bundled)"
    assert repr(subject.passage) == "Passage(bundled, 96 tokens)"
    assert repr(subject.text).startswith("Text(bundled, ")
    assert repr(result) == "Result(sinks of tiny-llama, 3 rows)"


def test_a_saved_result_is_loaded_by_either_name_and_anything_else_refused(tmp_path):
    result = Result("sinks", [{"layer": 0, "mass": 0.25}], {"model": "tiny"})
    result.save(tmp_path / "a.b")
    assert Result.load(tmp_path / "a.b") == Result.load(tmp_path / "a.b.json") == result
    for text, said in (("{", "is not a result"), (json.dumps({"rows": []}), "no 'analysis' in it")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(KvprobeError, match=said):
            Result.load(tmp_path / "bad")
    with pytest.raises(KvprobeError, match="No such file"):
        Result.load(tmp_path / "gone")
