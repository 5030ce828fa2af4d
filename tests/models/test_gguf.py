"""GGUF files that are damaged, cut, split, too large or not understood: what their header shows is refused by it."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import kvprobe
from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.files import store
from kvprobe.models import gguf_convert, loading, older_releases, pull
from kvprobe.models.gguf_header import TYPES, read_header
from kvprobe.models.gguf_join import join
from kvprobe.models.gguf_model import describe
from support.gguf_files import TOKENS, draw, keys_of, shapes_of, vocabulary, write
from support.gguf_models import logits, their_model

# the command line in a process of its own: its exit code, what it said, and what that took of processor and memory
RUN = """
import json, sys, time
start = time.process_time()
from kvprobe.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
seconds = time.process_time() - start
# of this program alone: what resource gives begins with the memory of the process that started it
(peak,) = [int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps({"code": code, "seconds": seconds, "mb": peak, "torch": "torch" in sys.modules}))
"""
SINKS = ("--tokens", "40", "--queries-from", "4", "--quiet", "--format", "json")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def small(tmp_path):
    """A Llama of two layers."""
    path = tmp_path / "small.gguf"
    write(path, "llama", keys_of("llama"), draw(shapes_of("llama")))
    return path


def run(*arguments, home):
    environment = os.environ | {"KVPROBE_HOME": str(home), "PYTHONPATH": str(Path(kvprobe.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=300
    )
    *said, took = done.stdout.splitlines()
    return json.loads(took), "\n".join(said), done.stderr


def assert_refused(path, home, *, match):
    took, said, error = run("sinks", path, *SINKS, home=home)
    assert (took["code"], said) == (1, "")
    assert error.startswith("kvprobe: ")
    assert error.count("\n") == 1
    assert match in error
    assert not took["torch"]
    assert took["mb"] < 300
    return took


def header_end(path):
    """Where the first tensor begins."""
    return min(tensor.start for tensor in read_header(path).tensors.values())


def offset_field(path, name):
    """Where in the file the offset of a tensor stands: the last 8 bytes of its entry."""
    content, wanted = path.read_bytes(), name.encode()
    at = content.index(struct.pack("<Q", len(wanted)) + wanted) + 8 + len(wanted)
    (n_dims,) = struct.unpack_from("<I", content, at)
    return at + 4 + 8 * n_dims + 4


def put(path, at, form, *values):
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, at, *values)
    path.write_bytes(content)


# --- the header


def test_what_is_read_is_what_the_gguf_package_reads(small):
    header, theirs = read_header(small), gguf.GGUFReader(small)
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.start, ours.n_bytes, ours.n_elements) == (tensor.data_offset, tensor.n_bytes, tensor.n_elements)
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert header.keys[key] == field.contents(), key


def test_the_types_and_their_blocks_are_those_of_the_gguf_package():
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, (name, block, n_bytes) in TYPES.items():
        assert GGMLQuantizationType(number).name == name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (block, n_bytes)
    for number in (number for number, (_, block, _) in TYPES.items() if block > 1):
        _, block, n_bytes = TYPES[number]
        row = gguf.dequantize(np.zeros((1, n_bytes), np.uint8), GGMLQuantizationType(number))
        assert row.shape == (1, block)


@pytest.mark.parametrize(
    ("at", "form", "value", "said"),
    [
        (0, "<I", 0x46554747 + 1, r"is not a GGUF file: it does not begin with the letters GGUF"),
        (4, "<I", 1, r"is of GGUF version 1; versions 2 and 3 are read"),
        (4, "<I", 4, r"is of GGUF version 4"),
        (4, ">I", 3, r"is big-endian"),
        (8, "<Q", 2**62, r"claims 4,611,686,018,427,387,904 tensors, which its [\d,]+ bytes cannot hold"),
        (8, "<Q", 10_000, r"claims 10,000 tensors"),
        (16, "<Q", 2**63, r"claims 9,223,372,036,854,775,808 keys"),
        (24, "<Q", 2**40, r"is cut or damaged inside its header: byte 32 asks for 1,099,511,627,776 bytes"),
        (24, "<Q", 100_000, r"has a key of 100,000 bytes; 65,535 are allowed"),
    ],
)
def test_a_count_or_version_that_cannot_be_is_refused(small, at, form, value, said):
    with small.open("ab") as file:
        file.truncate(small.stat().st_size + 200_000)
    put(small, at, form, value)
    with pytest.raises(KvprobeError, match=rf"^small\.gguf {said}"):
        describe(small)


def test_a_tensor_over_another_outside_unaligned_or_apart_is_refused(small):
    whole, field = small.read_bytes(), offset_field(small, "blk.0.attn_q.weight")
    (offset,) = struct.unpack_from("<Q", whole, field)
    for wrong, said in {
        0: r"is damaged: '.*' lies over '.*'",
        offset + 4: r"has '.*' at the offset [\d,]+, not aligned to 32 bytes",
        2**40: r"is (cut: [\d,]+ bytes of 1,099|damaged: [\d,]+ bytes before '.*' belong to no tensor)",
        2**64 - 32: r"is (cut|damaged): [\d,]+ bytes",
    }.items():
        small.write_bytes(whole)
        put(small, field, "<Q", wrong)
        with pytest.raises(KvprobeError, match=rf"^small\.gguf {said}"):
            describe(small)


def test_a_type_that_leaves_half_of_a_tensor_unread_is_refused(small):
    put(small, offset_field(small, "blk.0.attn_q.weight") - 4, "<I", 1)  # float16 where float32 stands
    with pytest.raises(KvprobeError, match=r"^small\.gguf is damaged: 2,048 bytes before '.*' belong to no tensor"):
        describe(small)
    put(small, offset_field(small, "blk.0.attn_q.weight") - 4, "<I", 26)
    with pytest.raises(
        KvprobeError, match=r"'blk\.0\.attn_q\.weight' in the ggml type 26, which cannot be converted to float32"
    ):
        describe(small)


def test_arrays_that_are_deep_or_long_are_refused_or_passed_over(tmp_path):
    def file(value):
        key = b"general.x"
        body = struct.pack("<Q", len(key)) + key + value + bytes(64)
        (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body)
        return tmp_path / "x.gguf"

    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(10_000))
    with pytest.raises(KvprobeError, match=r"^x\.gguf has arrays nested 4 deep in 'general\.x'"):
        read_header(file(struct.pack("<I", 9) + nested))
    with pytest.raises(KvprobeError, match=r"claims 20,000 arrays in 'general\.x'"):
        read_header(file(struct.pack("<IIQ", 9, 9, 20_000) + bytes(12 * 20_000)))
    with pytest.raises(KvprobeError, match=r"claims 3,000,000 texts in 'general\.x'"):
        read_header(file(struct.pack("<IIQ", 9, 8, 3_000_000) + bytes(8 * 3_000_000)))
    long = read_header(file(struct.pack("<IIQ", 9, 4, 100_000) + bytes(4 * 100_000)))
    assert long.keys["general.x"].count == 100_000
    with pytest.raises(KvprobeError, match=r"gives 'general\.x' the type 13, which GGUF does not have"):
        read_header(file(struct.pack("<IQ", 13, 0)))


def test_a_million_layers_and_a_vocabulary_alone_are_refused_at_once(small, tmp_path, home):
    keys, tensors = keys_of("llama"), draw(shapes_of("llama"))
    for count in (10_001, 1_000_000, 2**31):
        write(tmp_path / "deep.gguf", "llama", keys | {"block_count": count}, tensors)
        with pytest.raises(KvprobeError, match=rf"^deep\.gguf: block_count is {count}, not a number of layers"):
            describe(tmp_path / "deep.gguf")
    write(tmp_path / "deep.gguf", "llama", keys | {"block_count": 3}, tensors)
    with pytest.raises(KvprobeError, match=r"^deep\.gguf: 9 of its 29 tensors are missing, first blk\.2\."):
        describe(tmp_path / "deep.gguf")
    write(tmp_path / "deep.gguf", "llama", keys | {"block_count": 1}, tensors)
    with pytest.raises(KvprobeError, match=r"^deep\.gguf: 9 of its tensors are not part"):
        describe(tmp_path / "deep.gguf")
    write(tmp_path / "vocabulary.gguf", "llama", keys, {})
    with pytest.raises(KvprobeError, match=r"^vocabulary\.gguf: it has no tensors, only a vocabulary"):
        pull.convert_once(tmp_path / "vocabulary.gguf")
    assert not [path for path in home.rglob("*") if path.is_file()]


# --- keys


@pytest.mark.parametrize("installed", ["4.57.0", "5.12.1", "5.23.9"])
def test_an_older_transformers_converts_nothing(home, small, monkeypatch, installed):
    """4.57 makes a tokenizer with another BOS and EOS of the same file."""
    monkeypatch.setattr(older_releases.metadata, "version", lambda _package: installed)
    said = rf"converted by transformers 5\.24 or newer, and {installed.rpartition('.')[0]} is installed"
    with pytest.raises(UnsupportedModelError, match=said):
        pull.pull("smollm2-135m")
    with pytest.raises(UnsupportedModelError, match=said):
        pull.convert_once(small)
    assert not [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attention.clamp_kqv": 8.0}, r"'llama\.attention\.clamp_kqv' \(8\.0\)"),
        ({"attn_logit_softcapping": 50.0}, r"'llama\.attn_logit_softcapping' \(50\.0\)"),
        ({"attention.sliding_window": 16}, r"'llama\.attention\.sliding_window' \(16\)"),
        ({"attention.scale": 0.5}, r"attention\.scale is 0\.5"),
        ({"logit_scale": 0.5}, r"'llama\.logit_scale' \(0\.5\)"),
        ({"expert_count": 8}, r"'llama\.expert_count' \(8\)"),
        ({"attention.causal": False}, r"'llama\.attention\.causal' \(False\)"),
        ({"something.new": "yes"}, r"'llama\.something\.new'"),
        ({"rope.dimension_count": 4, "attention.key_length": 8}, r"rope\.dimension_count is 4, but a head has 8"),
        ({"attention.value_length": 16}, r"attention\.value_length is 16"),
        ({"rope.freq_base_swa": 100.0}, r"rope\.freq_base_swa gives local layers their own RoPE"),
        ({"attention.head_count_kv": [2, 1]}, r"attention\.head_count_kv differs from layer to layer"),
    ],
)
def test_a_key_that_changes_the_computation_and_is_not_carried_over_is_named(tmp_path, more, said):
    write(tmp_path / "x.gguf", "llama", keys_of("llama") | more, draw(shapes_of("llama")))
    with pytest.raises(UnsupportedModelError, match=rf"^x\.gguf: .*{said}"):
        describe(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "more",
    [
        {"attention.sliding_window": 64, "expert_count": 0, "logit_scale": 1.0, "attention.causal": True},
        {"attention.scale": 8**-0.5, "attention.key_length": 8, "attention.value_length": 8},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "rope.scaling.finetuned": True},
    ],
)
def test_keys_that_change_nothing_are_let_be(tmp_path, more):
    write(tmp_path / "plain.gguf", "llama", keys_of("llama"), draw(shapes_of("llama")))
    foreign = {"general.name": "mistral", "quantize.imatrix.file": "x", "publisher.note": 3, "general.tags": ["a"]}
    write(tmp_path / "x.gguf", "llama", keys_of("llama") | more, draw(shapes_of("llama")), more=foreign)
    plain, other = describe(tmp_path / "plain.gguf"), describe(tmp_path / "x.gguf")
    assert (other.settings, other.rope) == (plain.settings, plain.rope)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("context_length", None, r"the key context_length is missing"),
        ("attention.layer_norm_rms_epsilon", None, r"attention\.layer_norm_rms_epsilon is None"),
        ("attention.head_count", 0, r"attention\.head_count is 0, not a positive number"),
        ("attention.head_count", 3.0, r"attention\.head_count is 3\.0"),
        ("attention.head_count_kv", 3, r"4 query heads cannot share 3 KV heads"),
        ("embedding_length", 64, r"has the shape .* where the keys say"),
        ("vocab_size", 10, r"80 tokens but a vocab_size of 10"),
        ("vocab_size", 90, r"token_embd\.weight has the shape 80 × 32 where the keys say 90 × 32"),
        ("rope.freq_base", -1.0, r"rope\.freq_base is -1\.0, not a positive number"),
    ],
)
def test_a_key_that_cannot_be_is_named(tmp_path, key, value, said):
    assert len(TOKENS) == 80
    keys = {name: was for name, was in (keys_of("llama") | {key: value}).items() if was is not None}
    write(tmp_path / "x.gguf", "llama", keys, draw(shapes_of("llama")))
    with pytest.raises(KvprobeError, match=rf"^x\.gguf: .*{said}"):
        describe(tmp_path / "x.gguf")


FOR_EACH_LAYER = ("attention.head_count_kv", "feed_forward_length", "attention.head_count")


def test_a_number_said_for_every_layer_is_one_number(tmp_path):
    write(tmp_path / "plain.gguf", "llama", keys_of("llama"), draw(shapes_of("llama")))
    assert (keys_of("llama")["block_count"], keys_of("llama")["attention.head_count_kv"]) == (2, 2)
    for key in FOR_EACH_LAYER:
        each = keys_of("llama") | {key: [keys_of("llama")[key]] * 2}
        write(tmp_path / "each.gguf", "llama", each, draw(shapes_of("llama")))
        assert describe(tmp_path / "each.gguf").settings == describe(tmp_path / "plain.gguf").settings
        write(tmp_path / "each.gguf", "llama", each | {key: each[key] * 2}, draw(shapes_of("llama")))
        with pytest.raises(UnsupportedModelError, match=rf"{key} differs from layer to layer"):
            describe(tmp_path / "each.gguf")


def test_a_vocabulary_that_cuts_text_as_nobody_knows_has_a_cache_and_reads_nothing(tmp_path, home):
    write(tmp_path / "plain.gguf", "llama", keys_of("llama"), draw(shapes_of("llama")))
    cut = {"tokenizer.ggml.pre": "strange"}
    each = {key: [keys_of("llama")[key]] * 2 for key in FOR_EACH_LAYER}
    write(tmp_path / "x.gguf", "llama", keys_of("llama") | each, draw(shapes_of("llama")), more=cut)
    assert loading.load_spec(str(tmp_path / "x.gguf")) == loading.load_spec(str(tmp_path / "plain.gguf"))
    with pytest.raises(UnsupportedModelError, match=r"^x\.gguf: how tokenizer\.ggml\.pre 'strange' splits a text"):
        loading.load(str(tmp_path / "x.gguf"), device="cpu")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tokenizer.ggml.pre": "strange"}, r"how tokenizer\.ggml\.pre 'strange' splits a text"),
        ({"tokenizer.ggml.new_thing": 1}, r"the effect of 'tokenizer\.ggml\.new_thing' on the tokens"),
        ({"tokenizer.ggml.bos_token_id": 80}, r"tokenizer\.ggml\.bos_token_id is 80, but there are 80 tokens"),
        ({"tokenizer.ggml.merges": ["t h", "t q"]}, r"the merge 't q' is not of two tokens into a third"),
        ({"tokenizer.ggml.merges": ["th"]}, r"the merge 'th' is not"),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"tokenizer\.ggml\.token_type has 2 entries for 80 tokens"),
        ({"tokenizer.ggml.add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token is 1, neither true nor false"),
        ({"tokenizer.ggml.model": "gqt2"}, r"tokenizer\.ggml\.model is 'gqt2'; gpt2, llama and gemma4 are read"),
        ({"general.type": "adapter"}, r"general\.type is 'adapter': the file does not hold a complete model"),
        ({"llamb.rope.freq_base": 1.0}, r"is of the architecture llama, but the key 'llamb\.rope\.freq_base' is not"),
    ],
)
def test_a_vocabulary_that_is_damaged_or_not_understood_is_refused(tmp_path, more, said):
    write(tmp_path / "x.gguf", "llama", keys_of("llama"), draw(shapes_of("llama")), more=more)
    with pytest.raises(KvprobeError, match=rf"^x\.gguf: .*{said}"):
        describe(tmp_path / "x.gguf")


@pytest.mark.parametrize("architecture", ["t5", "bert", "strange", "gemma4"])
def test_an_architecture_that_is_not_read_is_refused_by_name(tmp_path, architecture):
    write(tmp_path / "x.gguf", architecture, keys_of("llama"), draw(shapes_of("llama")))
    with pytest.raises(UnsupportedModelError, match=rf"^x\.gguf: the architecture '?{architecture}'? is not"):
        describe(tmp_path / "x.gguf")


def test_biases_are_in_every_layer_or_none(tmp_path):
    for group in ("attention_bias", "mlp_bias"):
        tensors = draw(shapes_of("llama", biases=(group,)))
        write(tmp_path / "x.gguf", "llama", keys_of("llama"), tensors)
        assert describe(tmp_path / "x.gguf").settings[group] is True
        first = next(name for name in tensors if name.endswith(".bias"))
        del tensors[first]
        write(tmp_path / "x.gguf", "llama", keys_of("llama"), tensors)
        with pytest.raises(KvprobeError, match=f"a tensor is missing, first {first}:"):
            describe(tmp_path / "x.gguf")


# --- parts


@pytest.fixture
def parts(tmp_path):
    """The same model in three files, as llama.cpp names them."""
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=8)
    from support.gguf_files import _add

    for key, value in ({f"llama.{key}": value for key, value in keys_of("llama").items()} | vocabulary()).items():
        _add(writer, key, value)
    for name, values in draw(shapes_of("llama")).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("big-0000?-of-00003.gguf"))


def test_the_parts_of_a_split_file_are_the_file_that_was_split(parts, small, tmp_path):
    assert len(parts) == 3
    for part in parts:
        described = describe(part)
        assert described.header.files == tuple(parts)
        assert described.settings == describe(small).settings
        join(described.header, tmp_path / "joined.gguf")
        joined, whole = gguf.GGUFReader(tmp_path / "joined.gguf"), gguf.GGUFReader(small)
        assert sorted(joined.fields) == sorted(whole.fields)
        for ours, theirs in zip(joined.tensors, whole.tensors, strict=True):
            assert ours.name == theirs.name
            assert np.array_equal(ours.data, theirs.data)


def test_a_missing_part_is_named_and_so_is_one_of_another_model(parts, tmp_path):
    second = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(KvprobeError, match=r"is one of 3 parts, and 1 of them is not beside it, first big-00002-of"):
        describe(parts[2])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(KvprobeError, match=r"^big-00002-of-00003\.gguf says that it is part 2 \(from 0\) of 3"):
        describe(parts[0])
    parts[1].write_bytes(second)
    parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(KvprobeError, match=r"^model\.gguf is one of 3 parts, but its name does not say which"):
        describe(tmp_path / "model.gguf")


@pytest.fixture
def conversions(monkeypatch):
    """What was converted, by a stand-in that writes the settings alone."""
    made = []

    def write_settings(path, directory, *, log, name, progress):
        made.append(name)
        (directory / "config.json").write_text(json.dumps(describe(path).settings))

    monkeypatch.setattr(pull, "convert", write_settings)
    return made


def test_a_split_file_is_converted_once_whichever_part_is_named(parts, conversions):
    made = pull.convert_once(parts[1])
    manifest = json.loads((made / "kvprobe.json").read_text())
    assert manifest["source_sha256"] == {part.name: store.sha256(part) for part in parts}
    assert pull.convert_once(parts[0]) == made
    assert conversions == [parts[1].name]
    # another last part is another model
    put(parts[2], parts[2].stat().st_size - 32, "<f", 1.0)
    assert pull.convert_once(parts[0]) != made
    assert conversions == [parts[1].name, parts[0].name]


def test_what_was_converted_when_less_was_carried_over_is_made_anew(small, conversions):
    made = pull.convert_once(small)
    manifest = json.loads((made / "kvprobe.json").read_text())
    (made / "kvprobe.json").write_text(json.dumps({key: manifest[key] for key in manifest if key != "conversion"}))
    assert pull.convert_once(small) == made
    assert conversions == ["small.gguf"] * 2
    assert pull.convert_once(small) == made
    assert conversions == ["small.gguf"] * 2


def test_a_kept_conversion_with_one_flipped_bit_is_made_anew(small, conversions):
    made = pull.convert_once(small)
    (file,) = (path for path in made.iterdir() if path.name != "kvprobe.json")
    before = file.read_bytes()
    file.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    assert pull.convert_once(small, text=False) == made  # where only the configuration is read, as it is
    assert conversions == ["small.gguf"]
    assert pull.convert_once(small) == made
    assert conversions == ["small.gguf"] * 2
    assert file.read_bytes() == before


@pytest.mark.slow
def test_a_split_file_gives_the_bytes_of_the_whole_one(parts, small):
    made, whole = pull.convert_once(parts[1]), pull.convert_once(small)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (made / file).read_bytes() == (whole / file).read_bytes()


# --- room


@pytest.mark.parametrize("scarce", ["memory", "disk"])
def test_what_does_not_fit_memory_or_disk_is_refused_with_both_figures(small, monkeypatch, home, scarce):
    import psutil

    free = {"memory": 10 * 2**20, "disk": 10 * 2**20} | {scarce: 2**10}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": free["memory"]}))
    usage = shutil.disk_usage(small)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free["disk"]))
    with pytest.raises(
        KvprobeError, match=r"^small\.gguf converted to float32 needs .* of memory \(.*\) and .* of disk"
    ):
        pull.convert_once(small)
    assert not [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]


# --- the second net: what transformers itself could not place or made up


@pytest.mark.parametrize(
    ("report", "unread", "said"),
    [
        ({"missing_keys": ["b", "a"]}, set(), r"a is missing from the file \(one of 2\)"),
        ({"mismatched_keys": [("c", (1,), (2,))]}, set(), r"c has another shape in the file"),
        ({"unexpected_keys": ["d"]}, set(), r"d of the file is not read"),
        ({}, {"e"}, r"e of the file is not read"),
    ],
)
def test_what_transformers_could_not_place_is_refused(report, unread, said, capsys):
    whole = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}
    gguf_convert._refuse_unloaded(whole, set())
    with pytest.raises(SystemExit):
        gguf_convert._refuse_unloaded(whole | report, unread)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(capsys.readouterr().err)


# --- all at random


def damaged(content, end, *, seed):
    """100 cuts anywhere, and 100 bytes of the header changed."""
    draws = random.Random(seed)
    for _ in range(100):
        yield content[: draws.randrange(len(content))]
    for _ in range(100):
        at = draws.randrange(end)
        yield content[:at] + bytes([content[at] ^ draws.randrange(1, 256)]) + content[at + 1 :]


def outcome(path):
    """The model that the file describes, or why it is refused."""
    try:
        return describe(path), ""
    except KvprobeError as error:
        return None, str(error)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_a_damaged_file_is_refused_in_one_line_or_is_another_well_formed_file(architecture, tmp_path):
    path = tmp_path / "x.gguf"
    write(path, architecture, keys_of(architecture), draw(shapes_of(architecture)))
    content, end, refused = path.read_bytes(), header_end(path), 0
    for broken in damaged(content, end, seed=0):
        path.write_bytes(broken)
        described, said = outcome(path)
        if described is None:
            refused += 1
            assert said.isprintable()
            assert said.startswith("x.gguf")
            continue
        # by another reader it is the same model, of the very numbers
        theirs = gguf.GGUFReader(path)
        assert (
            {tensor.name for tensor in theirs.tensors} == set(described.header.tensors) == set(shapes_of(architecture))
        )
        for tensor in theirs.tensors:
            ours = described.header.tensors[tensor.name]
            assert broken[ours.start : ours.start + ours.n_bytes] == tensor.data.tobytes()
    assert refused >= 100


def test_the_command_line_refuses_by_the_header_before_torch_is_there(small, parts, tmp_path, home):
    whole = small.read_bytes()
    small.write_bytes(whole[: len(whole) // 2])
    assert_refused(small, home, match=f"is cut: {len(whole) // 2:,} bytes of {len(whole):,}; fetch it again")
    parts[2].unlink()
    for command in (("cache",), ("report", "--quiet")):
        took, said, error = run(command[0], parts[0], *command[1:], home=home)
        assert (took["code"], said, took["torch"]) == (1, "", False)
        assert "big-00003-of-00003.gguf too" in error


@pytest.mark.slow
def test_every_damaged_file_is_refused_in_one_line_or_measured_as_the_file_that_it_is(tmp_path, home, monkeypatch):
    path, whole = tmp_path / "x.gguf", draw(shapes_of("llama"))
    took, measured, late = [], [], []

    def attempt():
        described, said = outcome(path)
        if described is None:
            took.append(assert_refused(path, home, match=said))
        elif (got := converted(path, tmp_path / "made", monkeypatch)) is None:
            late.append(path.read_bytes())
        else:
            torch.testing.assert_close(logits(got), logits(read_by_another(path)), rtol=1e-5, atol=1e-4)
            measured.append(path.read_bytes())

    for name in whole:
        write(path, "llama", keys_of("llama"), {other: whole[other] for other in whole if other != name})
        if name != "output.weight":
            attempt()
    assert (len(took), len(measured)) == (len(whole) - 1, 0)
    write(path, "llama", keys_of("llama"), whole)
    for broken in damaged(path.read_bytes(), header_end(path), seed=1):
        path.write_bytes(broken)
        attempt()
    # the first that are well-formed, and all that their conversion refuses, from end to end
    for content in [*measured[:2], *late]:
        path.write_bytes(content)
        result, said, error = run("sinks", path, *SINKS, home=home)
        assert result["code"] == (content in late)
        assert bool(said) is (result["code"] == 0)
        assert error.count("\n") == result["code"]
        assert result["mb"] < 1500
    worst = {name: max(one[name] for one in took) for name in ("seconds", "mb")}
    print(f"{len(took)} refused by their header, {len(late)} by their conversion, {len(measured)} measured; {worst}")
    assert worst["mb"] < 300
    # of the processor, whoever works beside; what reads on where it should refuse takes minutes
    assert worst["seconds"] < 5


def converted(path, directory, monkeypatch):
    """The model of a file that is converted in this process; None where it is refused."""
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    with monkeypatch.context() as patch:
        # what the conversion changes in its own process
        patch.setattr(gguf, "GGUFReader", gguf.GGUFReader)
        name = "get_gguf_hf_weights_map"
        patch.setattr(modeling_gguf_pytorch_utils, name, getattr(modeling_gguf_pytorch_utils, name))
        shutil.rmtree(directory, ignore_errors=True)
        try:
            gguf_convert._convert_here(path, directory)
        except (Exception, SystemExit):
            return None
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def read_by_another(path):
    """The Llama of a file as the gguf package reads it, in transformers' own class."""
    reader = gguf.GGUFReader(path)
    keys = {key.removeprefix("llama."): field.contents() for key, field in reader.fields.items()}
    return their_model(
        "llama",
        {tensor.name: np.array(tensor.data) for tensor in reader.tensors},
        max_position_embeddings=keys["context_length"],
        rms_norm_eps=keys["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10000.0)},
    )
