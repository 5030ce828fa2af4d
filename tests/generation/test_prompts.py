from types import SimpleNamespace

import pytest

import kvprobe
from kvprobe.errors import KvprobeError
from kvprobe.generation.prompts import encoded, end_ids, has_template, in_template
from support.chat import with_template


@pytest.fixture(scope="module")
def plain(gpt2_random):
    return kvprobe.load(str(gpt2_random))


@pytest.fixture(scope="module")
def chatty(gpt2_random, tmp_path_factory):
    return kvprobe.load(str(with_template(gpt2_random, tmp_path_factory.mktemp("models") / "chatty")))


def test_a_chat_is_the_system_message_the_prompt_and_the_beginning_of_an_answer(chatty):
    assert in_template(chatty, " Hi\n") == "<user> Hi\n</user><assistant>"
    assert in_template(chatty, "Hi", system="Be brief.") == "<system>Be brief.</system><user>Hi</user><assistant>"


def test_a_chat_has_the_templates_bos_and_no_other(chatty, gpt2_random, tmp_path):
    written = chatty.tokenizer("<user>Hi</user><assistant>")["input_ids"]
    assert encoded(chatty, "Hi", chat=True, bos="add").ids.tolist() == written
    loaded = kvprobe.load(str(with_template(gpt2_random, tmp_path / "bos", "{{ bos_token }}{{ messages[0].content }}")))
    ids = encoded(loaded, "The time", chat=True).ids.tolist()
    assert ids == [50256, *loaded.tokenizer("The time")["input_ids"]]


def test_a_raw_prompt_is_the_text_as_it_stands(plain, chatty):
    for loaded in (plain, chatty):
        assert encoded(loaded, "\r\nThe <b>time\n").ids.tolist() == loaded.tokenizer("\r\nThe <b>time\n")["input_ids"]
    assert encoded(plain, "The time", bos="add").ids.tolist()[0] == 50256


def test_who_has_a_template(plain, chatty):
    assert (has_template(plain.tokenizer), has_template(chatty.tokenizer), has_template(None)) == (False, True, False)
    with pytest.raises(KvprobeError, match="gpt2-random has no chat template"):
        encoded(plain, "Hi", chat=True)
    with pytest.raises(ValueError, match="give chat=True too"):
        encoded(chatty, "Hi", system="Be brief.")


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [([1, 106], 1, [1, 106]), (2, 7, [2]), (None, 7, [7]), (None, None, []), (0, 7, [0])],
)
def test_the_models_own_end_tokens(generation, own, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation))
    assert end_ids(SimpleNamespace(model=model, tokenizer=SimpleNamespace(eos_token_id=own))) == expected
