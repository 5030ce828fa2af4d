import pytest

import kvprobe
from kvprobe.errors import KvprobeError
from kvprobe.generation.texts import generate
from support.chat import with_template
from support.models import write_gpt2_random

PROMPTS = ["The time", "Once upon a time there was", "A"]


@pytest.fixture(scope="module")
def loaded(gpt2_random):
    return kvprobe.load(str(gpt2_random))


def test_strings_are_answered_by_strings_as_hugging_face_does_one_by_one(loaded):
    made = generate(loaded, PROMPTS, max_new_tokens=10)
    for prompt, text, ids in zip(PROMPTS, made.texts, made.token_ids, strict=True):
        read = loaded.tokenizer(prompt, return_tensors="pt")
        theirs = loaded.model.generate(**read, max_new_tokens=10, do_sample=False, pad_token_id=50256)
        assert list(ids) == theirs[0, read.input_ids.shape[1] :].tolist()
        assert text == loaded.tokenizer.decode(ids, skip_special_tokens=True)
    assert made.stopped_by == ("length",) * 3
    alone = generate(loaded, PROMPTS[1], max_new_tokens=10)
    assert alone.text == made.texts[1]
    with pytest.raises(ValueError, match=r"there are 3 texts: see \.texts"):
        _ = made.text


def test_a_model_in_memory_gives_the_same(loaded):
    made = generate(loaded.model, PROMPTS, tokenizer=loaded.tokenizer, max_new_tokens=6, naive=True)
    assert made.token_ids == generate(loaded, PROMPTS, max_new_tokens=6, engine="torch").token_ids
    with pytest.raises(ValueError, match="has no tokenizer to read a prompt with"):
        generate(loaded.model, PROMPTS)


def test_each_of_the_models_end_tokens_ends_a_row_and_is_no_text(gpt2_tokenizer_files, tmp_path):
    free = generate(str(write_gpt2_random(tmp_path / "free", gpt2_tokenizer_files)), PROMPTS[:2], max_new_tokens=8)
    ends = [free.token_ids[0][-1], free.token_ids[1][0]]
    first = [next(i for i, token in enumerate(row) if token in ends) for row in free.token_ids]
    assert [row[i] for row, i in zip(free.token_ids, first, strict=True)] == ends
    loaded = kvprobe.load(str(write_gpt2_random(tmp_path / "ends", gpt2_tokenizer_files, eos_token_id=ends)))
    made = generate(loaded, PROMPTS[:2], max_new_tokens=8)
    assert made.token_ids == tuple(row[: i + 1] for row, i in zip(free.token_ids, first, strict=True))
    assert made.stopped_by == ("eos", "eos")


def test_a_stop_text_ends_its_row_alone_and_the_others_go_on(loaded):
    drawn = {"max_new_tokens": 10, "temperature": 2.0, "seed": 1}
    free = generate(loaded, PROMPTS, **drawn)
    # a text of one row alone, that begins within its first token
    stop = free.texts[1][2:10]
    assert stop not in "".join(free.texts[::2])
    made = generate(loaded, PROMPTS, **drawn, stop=[stop])
    assert made.stopped_by == ("length", "stop", "length")
    assert made.texts == (free.texts[0], free.texts[1][:2], free.texts[2])
    assert made.token_ids[::2] == free.token_ids[::2]
    # with every row ended nothing more is computed
    text = generate(loaded, PROMPTS[1], **drawn).text
    alone = generate(loaded, PROMPTS[1], **drawn, stop=[text[2:10]])
    assert len(alone.decode_ms) + 1 == len(alone.token_ids[0]) < 10
    with pytest.raises(ValueError, match="stop must be a list of texts, got 'x'"):
        generate(loaded, PROMPTS, stop="x")


def test_a_stop_text_may_name_a_special_token_which_is_no_text(gpt2_random):
    loaded = kvprobe.load(str(gpt2_random))
    free = generate(loaded, "The time", max_new_tokens=8).token_ids[0]
    word = loaded.tokenizer.convert_ids_to_tokens(free[3])
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": [word]})
    assert loaded.tokenizer.convert_tokens_to_ids(word) == free[3]
    made = generate(loaded, "The time", max_new_tokens=8, stop=[word])
    assert (made.token_ids[0], made.stopped_by) == (free[:4], ("stop",))
    assert made.text == loaded.tokenizer.decode(free[:3])


def test_a_window_reads_on_beyond_the_models_positions(tiny_llama):
    with pytest.raises(ValueError, match="307 tokens are more than the model's 256 positions"):
        generate(str(tiny_llama), "a" * 300, max_new_tokens=8)
    made = generate(str(tiny_llama), "a" * 300, max_new_tokens=8, window=16)
    # 3 layers of 2 heads of 8: 16 + 4 keys and values, and the sinks' keys as they were made
    assert made.cache_bytes == 4 * 3 * 16 * (2 * 20 + 4)
    assert made.token_ids != generate(str(tiny_llama), "a" * 300, max_new_tokens=8, window=16, n_sink=0).token_ids


def test_a_batch_with_a_window_is_each_prompt_alone(tiny_llama):
    loaded = kvprobe.load(str(tiny_llama))
    settings = {"max_new_tokens": 20, "window": 6, "n_sink": 2}
    made = generate(loaded, PROMPTS, **settings)
    assert made.token_ids == tuple(generate(loaded, prompt, **settings).token_ids[0] for prompt in PROMPTS)
    assert made.token_ids != generate(loaded, PROMPTS, max_new_tokens=20).token_ids
    assert made.token_ids == generate(loaded, PROMPTS, **settings, cache="rolling").token_ids
    with pytest.raises(ValueError, match="a window needs a rolling cache, not 'full'"):
        generate(loaded, PROMPTS, **settings, cache="full")
    with pytest.raises(ValueError, match="unknown kind of cache 'nosuch'"):
        generate(loaded, PROMPTS, cache="nosuch")


def test_a_chat_is_the_templates_text_continued(gpt2_random, tmp_path):
    loaded = kvprobe.load(str(with_template(gpt2_random, tmp_path / "chatty")))
    written = "<system>Be brief.</system><user>Hi</user><assistant>"
    asked = generate(loaded, ["Hi"], chat=True, system="Be brief.", max_new_tokens=6, temperature=2.0, top_k=9, seed=5)
    raw = generate(loaded, [written], max_new_tokens=6, temperature=2.0, top_k=9, seed=5)
    assert asked.token_ids == raw.token_ids
    greedy = generate(loaded, [written], max_new_tokens=6)
    assert greedy.token_ids != raw.token_ids
    assert greedy.token_ids == generate(loaded, [written], max_new_tokens=6, temperature=2.0, top_k=1).token_ids


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_smollm2_answers_three_at_once():
    capitals = {"France": "Paris", "Germany": "Berlin", "Japan": "Tokyo"}
    questions = [f"What is the capital of {country}?" for country in capitals]
    answers = kvprobe.generate("smollm2-135m", questions, chat=True, max_new_tokens=24)
    assert all(capital in text for capital, text in zip(capitals.values(), answers.texts, strict=True))
    assert answers.stopped_by == ("eos",) * 3


@pytest.mark.parametrize(
    ("prompts", "settings", "kind", "says"),
    [
        ([], {}, ValueError, "prompts is empty: give at least one"),
        (["a"], {"sinks": 2}, TypeError, r"generate has no sinks: did you mean n_sink\?"),
        (["a"], {"windows": 2}, TypeError, r"generate has no windows: did you mean window\?"),
        ([{"role": "user", "content": "a"}], {"chat": True}, ValueError, "a prompt must be a string, got dict"),
        (["a"], {"chat": True}, KvprobeError, "leave out chat"),
    ],
)
def test_what_cannot_be_asked_is_said_in_words_of_python(loaded, prompts, settings, kind, says):
    with pytest.raises(kind, match=says):
        generate(loaded, prompts, **settings)
