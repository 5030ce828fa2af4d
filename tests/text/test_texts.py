"""How far is a text read? No further than is needed, and the fingerprint says of what it is."""

import hashlib
import io
import json
import os
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvprobe.errors import KvprobeError
from kvprobe.text import passages, texts
from kvprobe.text.passages import encode, enough, heldout, notices
from kvprobe.text.texts import BLOCK, check_utf8, read_text


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Endless(io.RawIOBase):
    """A pipe that repeats one line for ever and counts what was taken."""

    def __init__(self, line):
        self.line, self.taken = line, 0

    def read(self, size=-1):
        assert size > 0, "all of an endless stream was asked for"
        start = self.taken % len(self.line)
        self.taken += size
        return (self.line * (size // len(self.line) + 2))[start : start + size]


@pytest.fixture
def endless(monkeypatch):
    stream = Endless(b"y\n")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream))
    return stream


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of bytes: an id each, and none merged."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tok = tokenizers.Tokenizer(models.BPE(alphabet, []))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tok)


@pytest.mark.parametrize("n_bytes", [None, 100])
def test_a_device_that_has_no_text_is_refused_at_its_first_block(n_bytes):
    with pytest.raises(KvprobeError, match="/dev/zero is binary: a NUL byte at offset 0"):
        read_text("/dev/zero", n_bytes=n_bytes)


def test_an_endless_stream_is_read_as_far_as_needed_and_says_so(endless, letters):
    n_read = 2 * BLOCK
    text = read_text("-", n_bytes=n_read)
    # a third block shows that it goes on
    assert endless.taken == 3 * BLOCK
    assert (text.text, text.sha256) == ("y\n" * BLOCK, sha256(b"y\n" * BLOCK))
    assert str(text.cut) == "cut: 131,072 bytes of a longer stream"
    passage = encode(letters, text, n_tokens=64)
    assert passage.record()["text_cut"] == {"n_read": n_read, "n_bytes": None}
    assert notices(passage) == [f"stdin is {text.cut}; the SHA-256 is of those that were read"]
    with pytest.raises(KvprobeError, match=r"stdin is too short: .*\(cut: 131,072 bytes of a longer stream\)"):
        encode(letters, text, n_tokens=2 * BLOCK)


def test_a_stream_that_ends_is_read_whole(monkeypatch):
    for data in (b"a line\n" * 9, b"y" * 2 * BLOCK):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        text = read_text("-", n_bytes=2 * BLOCK)
        assert (text.text, text.sha256, text.cut) == (data.decode(), sha256(data), None)


def test_a_pipe_is_read_by_its_name_too(tmp_path):
    read, write = os.pipe()
    os.write(write, b"through a pipe")
    os.close(write)
    try:
        assert read_text(f"/dev/fd/{read}", n_bytes=1).text == "through a pipe"
    finally:
        os.close(read)


def test_the_fingerprint_of_a_file_is_of_all_of_it_though_its_text_is_not_read(tmp_path):
    # what is not needed is not looked at either
    data = b"a word and " * 20_000 + b"\xff\0"
    (tmp_path / "long.txt").write_bytes(data)
    text = read_text(str(tmp_path / "long.txt"), n_bytes=1)
    assert (text.sha256, text.text) == (sha256(data), data[:BLOCK].decode())
    assert (str(text.cut), text.cut.record()) == (f"cut: {BLOCK:,} bytes of {len(data):,}", {})
    with pytest.raises(KvprobeError, match="binary: a NUL byte at offset 220001"):
        read_text(str(tmp_path / "long.txt"))


def test_a_file_too_large_to_be_hashed_says_what_was(tmp_path, monkeypatch):
    data = b"a word and " * 20_000
    (tmp_path / "huge.txt").write_bytes(data)
    monkeypatch.setattr(texts, "MOST_HASHED", len(data) - 1)
    text = read_text(str(tmp_path / "huge.txt"), n_bytes=1)
    assert text.sha256 == sha256(data[:BLOCK])
    assert text.cut.record() == {"text_cut": {"n_read": BLOCK, "n_bytes": len(data)}}
    monkeypatch.setattr(texts, "MOST_HASHED", len(data))
    assert read_text(str(tmp_path / "huge.txt"), n_bytes=1).sha256 == sha256(data)


def test_a_sparse_file_of_terabytes_costs_its_first_block(tmp_path):
    with (tmp_path / "sparse.txt").open("wb") as file:
        file.write(b"the tide came in " * 8_000)
        file.truncate(2**41)
    text = read_text(str(tmp_path / "sparse.txt"), n_bytes=1)
    assert str(text.cut) == "cut: 65,536 bytes of 2,199,023,255,552"
    with pytest.raises(KvprobeError, match="a NUL byte at offset 136000"):
        read_text(str(tmp_path / "sparse.txt"))


def test_a_character_across_two_blocks_is_whole_or_left_out(tmp_path):
    text = "a" + "é" * BLOCK
    (tmp_path / "t").write_text(text, encoding="utf-8")
    assert read_text(str(tmp_path / "t")).text == text
    # one byte of the last character of the first block lies in the second
    assert read_text(str(tmp_path / "t"), n_bytes=1).text == "a" + "é" * (BLOCK // 2 - 1)


@pytest.mark.parametrize(
    ("data", "byte", "at"),
    [
        (b"a" * BLOCK + b"b\xff", "ff", BLOCK + 1),
        # a character begun at the end of one block, and not gone on with in the next
        (b"a" * (BLOCK - 1) + b"\xe2(", "e2", BLOCK - 1),
        (b"a" * (BLOCK - 1) + b"\xe2\x80", "e2", BLOCK - 1),
    ],
)
def test_what_is_no_text_has_the_offset_in_the_file(tmp_path, data, byte, at):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(KvprobeError, match=f"is not UTF-8: byte 0x{byte} at offset {at};"):
        read_text(str(tmp_path / "t"))


def test_a_passage_of_a_cut_text_is_that_of_the_whole(tmp_path, letters):
    # no space to cut at: the last ids before the cut are not used
    (tmp_path / "t").write_text("".join(chr(97 + i * i % 26) for i in range(3 * BLOCK)))
    part, all_of_it = read_text(str(tmp_path / "t"), n_bytes=1), read_text(str(tmp_path / "t"))
    assert (part.cut is None, all_of_it.cut) == (False, None)
    for make in (encode, heldout):
        assert make(letters, part, n_tokens=900).ids.tolist() == make(letters, all_of_it, n_tokens=900).ids.tolist()
    most = BLOCK - passages.MARGIN
    assert encode(letters, part, n_tokens=most).ids.tolist() == encode(letters, all_of_it, n_tokens=most).ids.tolist()
    with pytest.raises(KvprobeError, match=rf"has {most} \(cut: 65,536 bytes of 196,608\)"):
        encode(letters, part, n_tokens=most + 1)


def test_enough_for_the_longest_tokens_and_as_many_more():
    # 128 spaces are one token in the vocabularies trained on code
    assert enough(1024) >= 2 * 1024 * 256


def test_a_file_whose_name_is_not_utf8_has_one_that_can_be_written(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(b"words")
    name = read_text(os.fsdecode(path)).name
    assert name.encode() == b"caf\\udce9.txt"
    with pytest.raises(KvprobeError, match="no text named") as refused:
        read_text(os.fsdecode(b"nowhere\xff"))
    str(refused.value).encode()


def test_a_word_of_the_command_line_that_is_not_utf8_is_named_with_its_byte():
    check_utf8("the prompt", "caf\u00e9 \U0001f30a")
    # é is two bytes, so the bad one is the fourth
    with pytest.raises(KvprobeError, match="the prompt is not UTF-8: byte 0xff at offset 3;"):
        check_utf8("the prompt", os.fsdecode("é ".encode() + b"\xff"))


def test_a_prompt_that_is_not_utf8_or_has_no_end_is_one_line(main, gpt2_random, endless):
    for prompt, says in (
        (os.fsdecode(b"\xff"), "the prompt is not UTF-8: byte 0xff at offset 0; convert it to UTF-8 first"),
        ("-", "standard input has more than 16,777,216 bytes: give a shorter text"),
    ):
        done = main("generate", gpt2_random, prompt)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"kvprobe: {says}")
        assert done.stderr.count("\n") == 1


def test_a_command_reads_an_endless_stream_and_says_that_it_is_cut(main, gpt2_random, endless):
    done = main("sinks", gpt2_random, "--text", "-", "--tokens", 80, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"]["text_cut"]["n_bytes"] is None
    assert "stdin is cut: " in done.stderr
    assert endless.taken <= enough(80) + 2 * BLOCK


def test_the_manual_is_pinned_another_genre_and_long_enough_for_two_passages(gpt2_tokenizer_files):
    text = read_text("manual")
    assert (text.name, text.sha256) == ("manual", texts.TEXTS["manual"][1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(gpt2_tokenizer_files / "tokenizer.json"))
    assert heldout(tokenizer, text, n_tokens=1050).n_tokens == 1050
    # no sentence of the one stands in the other
    story = read_text("bundled").text
    assert not [line for line in text.text.splitlines() if len(line) > 20 and line in story]
    assert text.text.isascii()


@pytest.mark.parametrize("model", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ("smollm2", "gemma3")])
def test_the_manual_has_two_passages_of_the_pulled_models(request, model):
    tokenizer = request.getfixturevalue(model).tokenizer
    assert heldout(tokenizer, read_text("manual"), n_tokens=1050).n_tokens == 1050


def test_a_changed_manual_is_refused(monkeypatch):
    monkeypatch.setitem(texts.TEXTS, "manual", ("manual.txt", "00"))
    with pytest.raises(KvprobeError, match=r"the bundled manual\.txt was changed: SHA-256"):
        read_text("manual")
