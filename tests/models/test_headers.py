"""Which files and tensors a checkpoint has, checked without torch: each damage is made by hand, byte by byte."""

import json
import os
import re
import struct
from pathlib import Path

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.models import headers

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "c": {"dtype": "F4", "shape": [4], "data_offsets": [26, 28]},
    "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [28, 28]},
}


def write(path, header, *, n_data=28, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(n_data))
    return path


def changed(key, **fields):
    return {**GOOD, key: GOOD[key] | fields}


def test_a_header_gives_the_type_shape_and_file_of_every_tensor(tmp_path):
    path = write(tmp_path / "model.safetensors", GOOD | {"__metadata__": {"format": "pt"}})
    found = headers.read_header(path, "m")
    assert {key: (tensor.dtype, tensor.shape, tensor.n_elements, tensor.file) for key, tensor in found.items()} == {
        "a": ("F32", (2, 3), 6, "model.safetensors"),
        "b": ("BF16", (), 1, "model.safetensors"),
        "c": ("F4", (4,), 4, "model.safetensors"),
        "empty": ("I64", (0, 7), 0, "model.safetensors"),
    }


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (changed("a", dtype="Q4"), "m has a of the unknown type 'Q4'"),
        (changed("a", dtype=["F32"]), "m has a of the unknown type ['F32']"),
        (changed("a", shape=[2, -3]), "m has a of the shape [2, -3], which is not a list of whole numbers"),
        (changed("a", shape=[2, 3.0]), "m has a of the shape [2, 3.0]"),
        (changed("a", shape=[True, 6]), "m has a of the shape [True, 6]"),
        (changed("a", shape=6), "m has a of the shape 6"),
        (changed("a", shape=[2**63]), "not a list of whole numbers"),
        (changed("a", shape=[1] * 65), "not a list of whole numbers"),
        (changed("a", shape=[2, 4]), "m gives 24 bytes to a, F32 of the shape [2, 4]"),
        (changed("a", data_offsets=[0]), "m has a at [0], which is not a place in the file"),
        (changed("a", data_offsets=None), "m has a at None"),
        (changed("b", data_offsets=[22, 24]), "m has b at byte 22 of the data, where 24 is expected"),
        (changed("b", data_offsets=[26, 28]), "of the data, where 24 is expected"),
        ({**GOOD, "d": 5}, "m does not describe d as a tensor"),
        ([1], "m has a header that is not a JSON object"),
        (b"{]", "m has a header that is not JSON"),
        (b'{"a": {}, "a": {}}', "m has a header that is not JSON: the key 'a' appears twice"),
        (b"\xff\xfe{}", "m has a header that"),
        (b"[" * 50_000, "m has a header that is nested too deeply"),
        (b'{"a":' * 50_000, "m has a header that is nested too deeply"),
    ],
)
def test_a_header_that_cannot_be_is_refused_by_what_is_wrong(tmp_path, header, told):
    with pytest.raises(KvprobeError, match=re.escape(told)) as refused:
        headers.read_header(write(tmp_path / "model.safetensors", header), "m")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_file_that_is_cut_says_how_many_bytes_there_are_of_how_many(tmp_path):
    path = write(tmp_path / "model.safetensors", GOOD)
    whole = path.stat().st_size
    os.truncate(path, whole - 1)
    with pytest.raises(KvprobeError, match=rf"m has {whole - 1:,} bytes of {whole:,}: it is truncated: fetch it again"):
        headers.read_header(path, "m")
    os.truncate(path, 20)
    with pytest.raises(KvprobeError, match=r"m claims a header of .* bytes and has 20: fetch it again"):
        headers.read_header(path, "m")
    with pytest.raises(KvprobeError, match="the rest is not a tensor"):
        headers.read_header(write(path, GOOD, n_data=29), "m")
    path.write_bytes(b"")
    with pytest.raises(KvprobeError, match="m has a header that is not JSON"):
        headers.read_header(path, "m")


def test_a_header_as_long_as_a_model_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate((1 << 40) + 8)  # a sparse file: a terabyte that takes no room
    with pytest.raises(KvprobeError, match=r"m has a header of 1,099,511,627,776 bytes, more than 33,554,432"):
        headers.read_header(path, "m")


# --- which files


@pytest.fixture
def sharded(tmp_path):
    """A model directory of two files and their index."""
    directory = tmp_path / "model"
    directory.mkdir()
    write(directory / "model-00001-of-00002.safetensors", {"a": GOOD["a"]}, n_data=24)
    write(
        directory / "model-00002-of-00002.safetensors",
        {"b": GOOD["b"] | {"data_offsets": [0, 2]}},
        n_data=2,
    )
    index(directory, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return directory


def index(directory, weight_map):
    (directory / headers.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read(directory):
    return headers.read_tensors("mine", directory, headers.weight_files(directory))


def test_the_index_says_which_files_there_are(sharded):
    assert [path.name for path in headers.weight_files(sharded)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert {key: tensor.file[:11] for key, tensor in read(sharded).items()} == {"a": "model-00001", "b": "model-00002"}
    assert headers.weight_files(sharded.parent) == []


def test_a_shard_that_is_missing_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(KvprobeError, match=r"model is incomplete: model-00002-of-00002\.safetensors is missing"):
        headers.weight_files(sharded)


def test_weights_outside_the_directory_are_not_read(sharded, tmp_path):
    outside = write(tmp_path / "outside.safetensors", GOOD)
    (sharded / "sub").mkdir()
    for name in ("../outside.safetensors", str(outside), "sub/../../outside.safetensors", "..\\outside.safetensors"):
        index(sharded, {"a": name})
        with pytest.raises(KvprobeError, match="model names weights outside its directory"):
            headers.weight_files(sharded)
    (sharded / "linked.safetensors").symlink_to(outside)
    index(sharded, {"a": "linked.safetensors"})
    with pytest.raises(KvprobeError, match=r"outside its directory \(linked\.safetensors\)"):
        headers.weight_files(sharded)
    (sharded / headers.INDEX).unlink()
    (sharded / "model.safetensors").symlink_to(outside)
    with pytest.raises(KvprobeError, match=r"outside its directory \(model\.safetensors\)"):
        headers.weight_files(sharded)
    (sharded / "model.safetensors").unlink()
    (sharded / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(KvprobeError, match=r"model\.safetensors"):
        headers.weight_files(sharded)


def test_links_within_and_those_of_the_hubs_cache_go_on_working(sharded, snapshot, tmp_path):
    linked = tmp_path / "linked"
    linked.symlink_to(sharded)
    assert len(headers.weight_files(linked)) == 2
    assert headers.weight_files(snapshot) == [snapshot / "model.safetensors"]
    assert set(read(snapshot)) == set(GOOD)


@pytest.fixture
def snapshot(tmp_path):
    """A snapshot of the hub's cache, whose one file is a link to a blob."""
    repository = tmp_path / "models--some--one"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / "c0ffee").mkdir(parents=True)
    write(repository / "blobs" / "01ab", GOOD)
    (repository / "snapshots" / "c0ffee" / "model.safetensors").symlink_to("../../blobs/01ab")
    return repository / "snapshots" / "c0ffee"


def test_a_snapshot_is_read_by_whatever_path_it_is_reached(snapshot, tmp_path, monkeypatch):
    (tmp_path / "alias").symlink_to(snapshot)
    assert set(read(tmp_path / "alias")) == set(GOOD)
    monkeypatch.chdir(snapshot)
    assert set(read(Path())) == set(GOOD)
    (tmp_path / "outside").write_bytes(b"")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(KvprobeError, match=r"^c0ffee names weights outside its directory"):
        headers.weight_files(Path())


def test_a_directory_of_links_into_the_hubs_blobs_is_read(snapshot, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    (local / "model.safetensors").symlink_to(snapshot.parents[1] / "blobs" / "01ab")
    assert set(read(local)) == set(GOOD)
    (snapshot.parents[1] / "blobs").rename(snapshot.parents[1] / "other")
    (local / "model.safetensors").unlink()
    (local / "model.safetensors").symlink_to(snapshot.parents[1] / "other" / "01ab")
    with pytest.raises(KvprobeError, match=r"^local names weights outside its directory"):
        headers.weight_files(local)


def test_one_file_of_weights_is_read_before_an_index_as_transformers_does(sharded):
    write(sharded / "model.safetensors", GOOD)
    assert headers.weight_files(sharded) == [sharded / "model.safetensors"]
    assert {tensor.file for tensor in read(sharded).values()} == {"model.safetensors"}
    assert set(read(sharded)) == set(GOOD)  # the shards hold two of the four
    (sharded / headers.INDEX).write_text("[]")
    assert set(read(sharded)) == set(GOOD)


@pytest.mark.parametrize("name", [5, None, ["model.safetensors"], "", "a\0b", {}])
def test_an_index_that_names_no_file_is_damaged(sharded, name):
    index(sharded, {"a": name})
    with pytest.raises(KvprobeError, match=r"index\.json in model is damaged \(a is in .*not a file name\)"):
        headers.weight_files(sharded)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": 5}', '{"weight_map": {}}', "{}", "", "[" * 50_000])
def test_an_index_that_is_none_is_refused_in_one_line(sharded, text):
    (sharded / headers.INDEX).write_text(text)
    with pytest.raises(KvprobeError, match=r"model\.safetensors\.index\.json in model") as refused:
        headers.weight_files(sharded)
    assert "\n" not in str(refused.value)


def test_index_and_files_must_agree(sharded):
    two = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index(sharded, two | {"c": "model-00002-of-00002.safetensors"})
    with pytest.raises(KvprobeError, match=r"the index of mine has c in model-00002.*, which does not hold it"):
        read(sharded)
    index(sharded, two | {"b": "model-00001-of-00002.safetensors", "a": "model-00002-of-00002.safetensors"})
    with pytest.raises(KvprobeError, match=r"the index of mine has . in .*, which does not hold it"):
        read(sharded)
    index(sharded, two)
    spare = "model-00003-of-00003.safetensors"
    write(sharded / spare, GOOD)
    with pytest.raises(KvprobeError, match=rf"mine has weights in {spare} that its index does not name"):
        read(sharded)
    (sharded / spare).unlink()
    write(sharded / "consolidated.safetensors", GOOD)  # the same weights as another library wants them
    assert set(read(sharded)) == {"a", "b"}
    write(sharded / "model-00002-of-00002.safetensors", GOOD)
    with pytest.raises(KvprobeError, match=r"mine holds a twice, in model-00001.* and in model-00002"):
        read(sharded)
