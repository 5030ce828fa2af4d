"""The text that was read, and the ids that an analysis reads of it."""

import hashlib
import io
import logging
from array import array
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvprobe.errors import KvprobeError
from kvprobe.text import passages, texts
from kvprobe.text.passages import control, encode, heldout, random_ids, repeat_ids
from kvprobe.text.texts import Text, read_text

BUNDLED = (Path(texts.__file__).parents[1] / "data" / "passage.txt").read_text(encoding="utf-8")
LATER_PATTERN = (  # as in the families after GPT-2: a mark joins a word, and punctuation takes the newlines behind it
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*, later: bool = False, bos: bool = True, puts_bos: bool = False, eos: bool = False) -> Any:
    """A byte-level BPE trained on the bundled passage, with ``<s>`` as id 0 and ``</s>`` as id 1."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if later:
        split = pre_tokenizers.Split(tokenizers.Regex(LATER_PATTERN), "isolated")
        tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tok.train_from_iterator(
        [BUNDLED + "x\n  x\t  x\n\n    x" * 50],  # merges of mixed whitespace, as vocabularies trained on code have
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if puts_bos or eos:
        single = ("<s> " if puts_bos else "") + "$A" + (" </s>" if eos else "")
        tok.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>" if bos else None, eos_token="</s>", model_max_length=64
    )


def without_pieces() -> Any:
    """A BPE over the whole text at once, spaces written ▁: no pre-tokenizer when it encodes."""
    tok = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tok.train_from_iterator([BUNDLED], trainers.BpeTrainer(vocab_size=700, special_tokens=bytes_, show_progress=False))
    tok.pre_tokenizer = None
    tok.normalizer = normalizers.Replace(" ", "▁")
    return PreTrainedTokenizerFast(tokenizer_object=tok)


@pytest.fixture(scope="module")
def plain() -> Any:
    return byte_level()


@cache
def tokenizer_of(kind: str) -> Any:
    return {"gpt2": byte_level, "later": partial(byte_level, later=True), "whole": without_pieces}[kind]()


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def a_text(text: str) -> Text:
    return Text("a", hashlib.sha256(text.encode()).hexdigest(), text)


mixed = st.text(st.sampled_from(" \n\t\r.,'\"sae1 \u00a0é中\u0301\x1c "), min_size=1, max_size=60) | st.lists(
    st.sampled_from(["water", " the", "\n\n", "  ", " 1868", "'s", ".", ".\n", "\n ", "▁", "…", " "]), min_size=1
).map("".join)


@pytest.mark.parametrize("kind", ["gpt2", "later", "whole"])
@given(text=mixed, limit=st.integers(0, 60))
@example(text="a  b", limit=2)  # a run of spaces lends its last one to the word
@example(text="a.\n b", limit=3)
@example(text="x\n  x", limit=2)
@settings(max_examples=150, deadline=None)
def test_a_prefix_cut_where_cut_before_says_has_the_first_ids_of_the_whole(kind: str, text: str, limit: int) -> None:
    cut = passages.cut_before(text, limit)
    assert cut == len(text) or cut <= limit
    ids = ids_of(tokenizer_of(kind), text[:cut])
    assert ids_of(tokenizer_of(kind), text)[: len(ids)] == ids


@given(text=mixed, n_tokens=st.integers(1, 40), offset=st.integers(0, 20), copies=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_a_passage_is_the_slice_of_the_whole_text_or_an_error_with_both_counts(
    text: str, n_tokens: int, offset: int, copies: int
) -> None:
    whole = ids_of(tokenizer_of("gpt2"), text * copies)
    if len(whole) >= offset + n_tokens:
        passage = encode(tokenizer_of("gpt2"), a_text(text * copies), n_tokens=n_tokens, offset=offset)
        assert passage.ids.tolist() == whole[offset : offset + n_tokens]
    else:
        with pytest.raises(KvprobeError, match=rf"need {offset + n_tokens} .* has {len(whole)};"):
            encode(tokenizer_of("gpt2"), a_text(text * copies), n_tokens=n_tokens, offset=offset)


def test_a_long_text_is_tokenised_only_as_far_as_needed(plain: Any) -> None:
    longest = 0

    class Watched(SimpleNamespace):
        def __call__(self, text: str, **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return plain(text, **options)

    passage = encode(Watched(bos_token_id=0), a_text(BUNDLED * 10), n_tokens=100)
    assert passage.ids.tolist() == ids_of(plain, BUNDLED)[:100]
    assert longest < 2_000


def test_a_passage_longer_than_the_models_positions_is_encoded_without_a_word() -> None:
    fresh = byte_level()  # transformers warns once for each tokenizer
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        assert encode(fresh, a_text(BUNDLED), n_tokens=fresh.model_max_length + 1).n_tokens == 65
    finally:
        logger.removeHandler(handler)
    assert not said


def test_a_vocabulary_that_joins_words_still_gives_the_slice_of_the_whole() -> None:
    words = "a bank of cinders held in by sleepers and " * 300
    tok = tokenizers.Tokenizer(models.BPE())
    tok.train_from_iterator([words], trainers.BpeTrainer(vocab_size=200, max_token_length=32, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tok)
    whole = ids_of(tokenizer, words)
    assert any(" " in token.strip() for token in tokenizer.convert_ids_to_tokens(whole))
    for n_tokens in range(1, 40):
        assert encode(tokenizer, a_text(words), n_tokens=n_tokens).ids.tolist() == whole[:n_tokens]


def test_the_last_token_of_a_text_can_be_had_and_no_more(plain: Any) -> None:
    found = len(ids_of(plain, BUNDLED))
    assert encode(plain, a_text(BUNDLED), n_tokens=found, bos="drop").n_tokens == found
    with pytest.raises(KvprobeError, match=f"a is too short: {found + 1} tokens need {found + 1} .* it has {found};"):
        encode(plain, a_text(BUNDLED), n_tokens=found + 1)
    with pytest.raises(KvprobeError, match=f"need {found + 2} .* it has {found + 1};"):
        encode(plain, a_text(BUNDLED), n_tokens=found + 2, bos="add")


@pytest.mark.parametrize(
    ("puts_bos", "bos", "front"),
    [
        (False, "auto", []),
        (False, "add", [0]),
        (False, "drop", []),
        (True, "auto", [0]),
        (True, "add", [0]),
        (True, "drop", []),
    ],
)
@pytest.mark.parametrize("eos", [False, True])
def test_bos_counts_and_stands_in_front_once_and_nothing_is_appended(
    puts_bos: bool, bos: Any, front: list[int], eos: bool
) -> None:
    tokenizer = byte_level(puts_bos=puts_bos, eos=eos)
    text = a_text("the water came up by that road")
    content = ids_of(tokenizer, text.text)
    passage = encode(tokenizer, text, n_tokens=len(front) + len(content), bos=bos)
    assert passage.ids.tolist() == front + content
    assert passage.ids.dtype == torch.long
    assert passage.has_bos == bool(front)
    assert passage.first_content_id == content[0]
    assert passage.record() == {
        "passage": "a",
        "passage_sha256": text.sha256,
        "passage_offset": 0,
        "ids_sha256": hashlib.sha256(array("q", front + content).tobytes()).hexdigest(),
        "n_tokens": len(front) + len(content),
        "bos": bos,
        "has_bos": bool(front),
    }


def test_a_tokenizer_without_bos_cannot_add_one() -> None:
    tokenizer = byte_level(bos=False)
    with pytest.raises(KvprobeError, match=r"^bos add: \w+ has no BOS token; use bos auto or bos drop$"):
        encode(tokenizer, a_text(BUNDLED), n_tokens=8, bos="add")
    assert not encode(tokenizer, a_text(BUNDLED), n_tokens=8).has_bos


def test_arguments_out_of_range_are_named(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"at least 1 tokens .* got 0"):
        encode(plain, a_text(BUNDLED), n_tokens=0)
    with pytest.raises(ValueError, match=r"at least 2 tokens .* got 1"):
        encode(plain, a_text(BUNDLED), n_tokens=1, bos="add")
    with pytest.raises(ValueError, match="offset must be at least 0, got -1"):
        encode(plain, a_text(BUNDLED), n_tokens=4, offset=-1)
    with pytest.raises(ValueError, match="got 'keep'"):
        encode(plain, a_text(BUNDLED), n_tokens=4, bos="keep")  # type: ignore[arg-type]


@pytest.mark.parametrize(("bos", "n_front"), [("drop", 0), ("add", 1)])
def test_heldout_goes_on_where_the_passage_ended_with_a_bos_of_its_own(plain: Any, bos: Any, n_front: int) -> None:
    first = encode(plain, a_text(BUNDLED), n_tokens=50, bos=bos)
    second = heldout(plain, a_text(BUNDLED), n_tokens=50, bos=bos)
    assert first.n_front == second.n_front == n_front
    assert first.n_tokens == second.n_tokens == 50
    both = torch.cat([first.ids[n_front:], second.ids[n_front:]]).tolist()
    assert both == ids_of(plain, BUNDLED)[: 100 - 2 * n_front]
    assert second.record()["passage_offset"] == 50 - n_front


def test_a_text_too_short_for_the_held_out_half_says_what_both_need(plain: Any) -> None:
    found = len(ids_of(plain, BUNDLED))
    with pytest.raises(KvprobeError, match=f"{found} tokens from token {found} on need {2 * found} .* has {found};"):
        heldout(plain, a_text(BUNDLED), n_tokens=found)


def test_random_ids_are_uniform_over_ordinary_tokens_and_reproducible(plain: Any) -> None:
    drawn = random_ids(720, 40_000, 3, tokenizer=plain)
    # 700 entries, two of them special, padded to 720 rows
    assert set(drawn.tolist()) == set(range(2, 700))
    counts = torch.bincount(drawn, minlength=700)[2:].double()
    expected = 40_000 / 698
    # chi-square with 697 degrees of freedom: mean 697, standard deviation sqrt(2 · 697)
    assert ((counts - expected) ** 2 / expected).sum().item() == pytest.approx(697, abs=5 * (2 * 697) ** 0.5)
    assert torch.equal(drawn, random_ids(720, 40_000, 3, tokenizer=plain))
    assert not torch.equal(drawn, random_ids(720, 40_000, 4, tokenizer=plain))
    assert set(random_ids(4, 400, 0).tolist()) == {0, 1, 2, 3}


def test_random_ids_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    assert random_ids(700, 12, 3).shape == (12,)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        random_ids(700, 0, 3)


def test_repeat_ids_hold_one_id_from_the_first_place_on() -> None:
    assert repeat_ids(17, 3).tolist() == [17, 17, 17]
    assert repeat_ids(17, 3).dtype == torch.long
    with pytest.raises(ValueError, match="got 0"):
        repeat_ids(17, 0)


@pytest.mark.parametrize("bos", ["drop", "add"])
def test_a_control_has_the_passages_length_and_only_random_keeps_its_bos(plain: Any, bos: Any) -> None:
    passage = encode(plain, a_text(BUNDLED), n_tokens=20, bos=bos)
    assert control(passage, "none", plain, seed=1) is passage
    drawn, repeated = control(passage, "random", plain, seed=1), control(passage, "repeat", plain, seed=1)
    n_front = passage.n_front
    assert torch.equal(drawn.ids[n_front:], random_ids(700, 20 - n_front, 1, tokenizer=plain))
    assert drawn.ids[:n_front].tolist() == passage.ids[:n_front].tolist()
    assert drawn.has_bos == passage.has_bos
    assert repeated.ids.tolist() == [ids_of(plain, BUNDLED)[0]] * 20
    assert not repeated.has_bos
    changed = {"passage": "random ids", "passage_sha256": "", "ids_sha256": drawn.record()["ids_sha256"]}
    assert drawn.record() == passage.record() | changed
    # other ids are another fingerprint, the only one that random ids have
    again = control(passage, "random", plain, seed=2)
    assert len({one.record()["ids_sha256"] for one in (passage, drawn, again, repeated)}) == 4
    assert repeated.record()["passage"] == "one id repeated"
    with pytest.raises(ValueError, match="none, random or repeat, got 'shuffle'"):
        control(passage, "shuffle", plain, seed=1)


def test_the_bundled_passage_is_the_pinned_one_and_long_prose() -> None:
    text = read_text()
    assert text == read_text("bundled")
    assert (text.name, text.text) == ("bundled", BUNDLED)
    assert text.sha256 == hashlib.sha256(BUNDLED.encode()).hexdigest() == texts.TEXTS["bundled"][1]
    assert len(text.text.split()) > 5_000
    paragraphs = text.text.strip().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_a_changed_bundled_passage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(texts.TEXTS, "bundled", ("passage.txt", "00"))
    with pytest.raises(KvprobeError, match=rf"was changed: SHA-256 {hashlib.sha256(BUNDLED.encode()).hexdigest()}"):
        read_text()


def test_a_file_is_named_without_its_path_and_only_its_line_ends_change(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf  caf\xc3\xa9\r\none\rtwo \xe2\x80\x9c\n\n"
    (tmp_path / "river.txt").write_bytes(data)
    text = read_text(str(tmp_path / "river.txt"))
    assert text == Text("river.txt", hashlib.sha256(data).hexdigest(), "  café\none\ntwo “\n\n")


def test_a_catalogue_name_wins_over_a_file_and_a_dot_reaches_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bundled").write_text("another text")
    assert read_text("bundled").text == BUNDLED
    assert read_text("./bundled").text == "another text"


def test_standard_input_is_read_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"caf\xc3\xa9")))
    assert read_text("-") == Text("stdin", hashlib.sha256(b"caf\xc3\xa9").hexdigest(), "café")
    with pytest.raises(KvprobeError, match=r"standard input holds no text \(0 bytes\)"):
        read_text("-")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", r"holds no text \(0 bytes\)"),
        (b"\xef\xbb\xbf \n\t ", r"holds no text \(7 bytes\)"),
        (b"ab\x00c", "is binary: a NUL byte at offset 2"),
        (b"ab\xe9c", "is not UTF-8: byte 0xe9 at offset 2"),
        (b"\xef\xbb\xbfab\xe9c", "is not UTF-8: byte 0xe9 at offset 5"),
        (b"abc\xe2\x80", "is not UTF-8: byte 0xe2 at offset 3"),
        ("wide".encode("utf-16"), "is binary: a NUL byte at offset 3"),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(KvprobeError, match=says) as refused:
        read_text(str(tmp_path / "t"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [("nowhere.txt", "no such file"), (".", "is a directory"), ("x" * 5000, "cannot read")],
)
def test_a_file_that_cannot_be_read_is_refused_with_what_can(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(KvprobeError, match=says) as refused:
        read_text(str(tmp_path / name))
    assert "bundled, time-machine" in str(refused.value)
    assert "\n" not in str(refused.value)
