"""Which token is token 0? What stands first is read off the ids, whoever put it there."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvprobe.errors import KvprobeError
from kvprobe.results.phrases import passage_of
from kvprobe.text.passages import control, encode, front_of, heldout, notices, whole
from kvprobe.text.texts import Text
from support.models import document, write_random

WORDS = ["[GM]", "<s>", "<t>", "the", "tide", "came", "up", "by", "night"]
GM, S, T, THE, TIDE, CAME, UP, BY, NIGHT = range(len(WORDS))


def words(*front: str, bos: str | None = "<s>") -> Any:
    """A tokenizer of nine words, an id each, that puts ``front`` before a text by itself."""
    tok = tokenizers.Tokenizer(models.WordLevel(dict(zip(WORDS, range(9), strict=True)), unk_token="night"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = WORDS[:3]
    tok.add_special_tokens(marks)
    single = " ".join([*front, "$A"])
    tok.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(m, WORDS.index(m)) for m in marks]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=bos, additional_special_tokens=marks)


def a_text(text: str) -> Text:
    return Text("a.txt", "f00d", text)


@pytest.mark.parametrize(
    ("front", "content", "put"),
    [
        ([S], [THE, TIDE], [S]),
        ([S], [S, THE], []),
        ([S], [S, S, THE], []),
        ([], [S, THE], []),
        # of two marks, what is missing before the second
        ([GM, S], [GM, S, THE], []),
        ([GM, S], [S, THE], [GM]),
        ([GM, S], [THE], [GM, S]),
        # the first alone, and another mark, are a beginning already
        ([GM, S], [GM, THE], []),
        ([GM, S], [T, THE], []),
        ([S], [], [S]),
    ],
)
def test_what_is_put_before_a_text_is_what_it_does_not_begin_with(front, content, put):
    assert front_of(content, front, {GM, S, T}) == put


@pytest.mark.parametrize("bos", ["auto", "add", "drop"])
@pytest.mark.parametrize("front", [(), ("<s>",)])
def test_a_text_that_begins_with_the_bos_has_one_whatever_is_asked_for(front, bos):
    passage = encode(words(*front), a_text("<s>the tide came up"), n_tokens=4, bos=bos)
    assert passage.ids.tolist() == [S, THE, TIDE, CAME]
    assert (passage.has_bos, passage.bos_in_text, int(passage.ids[0]), passage.n_front) == (True, True, S, 1)
    assert passage.first_content_id == THE
    assert passage.record().items() >= {"bos": bos, "has_bos": True, "bos_in_text": True}.items()
    assert "(with BOS, the text's own)" in passage_of(passage.record() | {"model": "m"})
    assert notices(passage) == [
        "a.txt begins with a begin-of-sequence mark of its own: none is added, and --bos drop keeps it"
    ]


def test_a_text_without_a_mark_has_what_the_policy_puts_there():
    for bos, front in (("auto", [S]), ("add", [S]), ("drop", [])):
        passage = encode(words("<s>"), a_text("the <s> tide came up"), n_tokens=4, bos=bos)
        assert passage.ids.tolist() == [*front, THE, S, TIDE, CAME][:4]
        assert (passage.has_bos, passage.bos_in_text) == (bool(front), False)
        where = "2, after the one at token 0" if front else "1, and token 0 is not one"
        assert notices(passage) == [f"a.txt holds a begin-of-sequence mark at token {where}"]
        assert "bos_in_text" not in passage.record()


def test_two_of_the_texts_own_are_two_and_said():
    passage = encode(words("<s>"), a_text("<s><s>the tide"), n_tokens=4)
    assert passage.ids.tolist() == [S, S, THE, TIDE]
    assert (passage.n_front, passage.first_content_id) == (2, THE)
    assert "begins with 2 begin-of-sequence marks of its own: none is" in notices(passage)[0]


@pytest.mark.parametrize(
    ("text", "ids", "n_own"),
    [
        ("the tide came", [GM, T, THE, TIDE], 0),
        ("[GM]<t>the tide came", [GM, T, THE, TIDE], 2),
        ("<t>the tide came", [GM, T, THE, TIDE], 1),
    ],
)
def test_a_front_of_two_marks_stands_there_once(text, ids, n_own):
    # ChatGLM's tokenizer puts two, and names no BOS
    tokenizer = words("[GM]", "<t>", bos=None)
    passage = encode(tokenizer, a_text(text), n_tokens=4)
    assert passage.ids.tolist() == ids
    assert (passage.n_front, passage.n_front - passage.n_added, passage.bos_in_text) == (2, n_own, n_own > 0)
    drawn, repeated = (control(passage, kind, tokenizer, seed=0) for kind in ("random", "repeat"))
    assert drawn.ids[:2].tolist() == [GM, T]
    assert (drawn.n_front, drawn.bos_in_text, len(drawn.ids)) == (2, False, 4)
    assert (repeated.ids.tolist(), repeated.has_bos) == ([THE] * 4, False)


def test_drop_reads_the_first_id_of_a_passage_further_on():
    # two documents end to end: the second passage begins with a BOS of the text's own
    text = a_text("the tide came <s> up by night")
    first, second = (encode(words("<s>"), text, n_tokens=3, bos="drop", offset=offset) for offset in (0, 3))
    assert (first.has_bos, second.has_bos) == (False, True)


@pytest.mark.parametrize("bos", ["auto", "drop"])
def test_the_passage_after_one_with_a_bos_of_its_own_shares_no_token(bos):
    text = a_text("<s>the tide came up by night")
    first = encode(words("<s>"), text, n_tokens=3, bos=bos)
    second = heldout(words("<s>"), text, n_tokens=3, bos=bos)
    assert first.ids.tolist() == [S, THE, TIDE]
    assert first.next_offset == second.offset == 3
    assert second.ids.tolist() == ([S, CAME, UP] if bos == "auto" else [CAME, UP, BY])
    assert second.has_bos == (bos == "auto")


def test_marks_alone_have_no_token_to_repeat():
    passage = encode(words(), a_text("<s><s><s>the"), n_tokens=2)
    with pytest.raises(KvprobeError, match=r"a\.txt holds only begin-of-sequence marks: ask for more tokens"):
        control(passage, "repeat", words(), seed=0)


@pytest.mark.parametrize("bos", ["auto", "add", "drop"])
def test_all_of_a_text_follows_the_same_rule(bos):
    own, none = (whole(words("<s>"), a_text(text), bos=bos) for text in ("<s>the tide", "the tide"))
    assert own.ids.tolist() == [S, THE, TIDE]
    assert none.ids.tolist() == {"drop": [THE, TIDE]}.get(bos, [S, THE, TIDE])


@pytest.fixture(scope="module")
def tiny_with_bos(gpt2_tokenizer_files, tmp_path_factory):
    """A tiny llama whose tokenizer puts its BOS ``"`` (id 1) before a text, and reads ``"`` as that id."""
    directory = write_random(tmp_path_factory.mktemp("models") / "tiny-bos", "llama", gpt2_tokenizer_files)
    files = json.loads((directory / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": '"', "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    mark = {'"': {"id": '"', "ids": [1], "tokens": ['"']}}
    files["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": mark}
    (directory / "tokenizer.json").write_text(json.dumps(files))
    settings = json.loads((directory / "tokenizer_config.json").read_text()) | {"bos_token": '"'}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_every_command_says_whose_bos_it_is(main, tiny_with_bos, tmp_path):
    (tmp_path / "own.txt").write_text('"' + "abcdefgh" * 40)
    (tmp_path / "none.txt").write_text("abcdefgh" * 40)
    own, none = ("--text", tmp_path / "own.txt"), ("--text", tmp_path / "none.txt")
    common = ("--tokens", 48, "--bos")
    for command, more in (
        ("sinks", ("--queries-from", 8)),
        ("window", ("--window", 8, "--sinks", 1)),
        ("lowrank", ("--rank", 4)),
    ):
        done = main(command, tiny_with_bos, *more, *own, *common, "drop")
        assert "own.txt begins with a begin-of-sequence mark of its own" in done.stderr
        assert "48 tokens (with BOS, the text's own)" in done.stdout
        assert main(command, tiny_with_bos, *more, *own, *common, "drop", "--quiet").stderr == ""
    for policy in ("auto", "add"):
        arguments = ("--queries-from", 8, *common, policy, "--format", "json")
        records = [document(main("sinks", tiny_with_bos, *text, *arguments))["run"] for text in (own, none)]
        assert records[0]["ids_sha256"] == records[1]["ids_sha256"]
        assert [record.get("bos_in_text") for record in records] == [True, None]
        assert [record["has_bos"] for record in records] == [True, True]
    assert "(no BOS)" in main("sinks", tiny_with_bos, "--queries-from", 8, *none, *common, "drop").stdout


def test_a_prompt_follows_the_same_rule(main, tiny_with_bos):
    def generated(prompt, bos):
        done = main("generate", tiny_with_bos, prompt, "--max-new-tokens", 2, "--bos", bos, "--format", "json")
        found = document(done)
        return found["rows"][0]["n_prompt"], found["run"]["has_bos"], "of its own" in done.stderr

    assert [generated('"abc', bos) for bos in ("auto", "add", "drop")] == [(4, True, True)] * 3
    assert [generated("abc", bos) for bos in ("auto", "drop")] == [(4, True, False), (3, False, False)]


@pytest.mark.gemma3
@pytest.mark.usefixtures("gemma3")
@pytest.mark.parametrize(("mark", "bos"), [("", "auto"), ("<bos>", "auto"), ("<bos>", "drop")])
def test_gemma_reads_one_bos_whoever_put_it_there(main, tmp_path, mark, bos):
    # case double-bos: 0.408 and 62.5 % with one, which two made 0.249 and 33.3 %
    (tmp_path / "text.txt").write_text(mark + HARBOUR)
    arguments = ("--text", tmp_path / "text.txt", "--tokens", 80, "--queries-from", 16, "--bos", bos)
    done = main("sinks", "gemma3-270m", *arguments)
    assert "0.408 of all attention is on token 0; 62.5% of heads" in done.stdout
    assert ("begin-of-sequence mark of its own" in done.stderr) == bool(mark)


HARBOUR = (
    "The old harbour stood empty in the morning light, and the boats that had gone out before dawn were only dots "
    "on the line where the sea met the sky. A boy sat on the wall with a book on his knees and counted them, as "
    "he had done every morning since his father had left with the largest of them. When the last one came back in "
    "the evening he closed the book, took the lamp from its hook beside the door, and went down the stairs to "
    "help with the ropes, the nets and the heavy wet baskets full of fish.\n"
)
