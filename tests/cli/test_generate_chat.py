"""`kvprobe generate` as its first users call it: chats, batches, prompts from files, stop texts."""

import io
import sys

import pytest
import torch

from kvprobe.cli.commands import generate
from kvprobe.errors import KvprobeError
from support.chat import CHANGES_ITS_INPUT, DROPS_SYSTEM, NO_SYSTEM, with_template
from support.models import document

QUESTION = "What is the time?"


@pytest.fixture(scope="module")
def chatty(gpt2_random, tmp_path_factory):
    """GPT-2's tokenizer with a chat template, on small random weights."""
    return with_template(gpt2_random, tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
def rows(main):
    """The rows and the record of `kvprobe generate … --format json`."""

    def once(*arguments):
        done = main("generate", *arguments, "--format", "json", "--quiet", "--max-new-tokens", 8)
        found = document(done)
        return found["rows"], found["run"]

    return once


def by_hugging_face(directory, messages, n_new=8):
    """The greedy answer of transformers to a chat, and the ids that it read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = chat["input_ids"]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False)
    return ids[0].tolist(), made[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("system", [None, "Answer briefly."])
def test_a_chat_is_what_transformers_makes_of_it_and_only_the_answer_is_printed(main, rows, chatty, system):
    messages = [{"role": "user", "content": QUESTION}]
    options = []
    if system is not None:
        messages, options = [{"role": "system", "content": system}, *messages], ["--system", system]
    read, answer = by_hugging_face(chatty, messages)
    (row,), run = rows(chatty, "--chat", *options, QUESTION)
    assert (row["prompt"], row["n_prompt"], row["token_ids"]) == (QUESTION, len(read), answer)
    assert (run["chat"], run["system"]) == (True, system)
    done = main("generate", chatty, "--chat", *options, QUESTION, "--max-new-tokens", 8)
    assert done.stdout == row["text"] + "\n"
    assert "chat template" not in done.stderr


def test_a_raw_prompt_to_an_instruct_model_is_said_once(main, chatty, gpt2_random):
    few = ("--max-new-tokens", 2)
    done = main("generate", chatty, "--prompt", QUESTION, "--prompt", "Why?", *few)
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "chat template" in line]
    assert "chatty has a chat template" in line
    assert "raw" in line
    assert "--chat" in line
    assert "template" not in main("generate", chatty, QUESTION, *few, "--quiet").stderr
    assert "template" not in main("generate", gpt2_random, QUESTION, *few).stderr


def test_a_model_without_a_template_is_refused_by_name(main, gpt2_random):
    done = main("generate", gpt2_random, "--chat", QUESTION)
    assert (done.returncode, done.stdout) == (1, "")
    assert "gpt2-random has no chat template" in done.stderr
    assert "leave out --chat" in done.stderr


@pytest.mark.parametrize(
    ("template", "options", "says"),
    [
        (NO_SYSTEM, ["--system", "Be brief."], "(no system role): leave out --system"),
        (DROPS_SYSTEM, ["--system", "Be brief."], "drops the system message: leave out --system"),
        (CHANGES_ITS_INPUT, [], "'append' of 'list' object is unsafe"),
        ("{{ nosuch.content }}", [], "'nosuch' is undefined"),
        ("{% for", [], "leave out --chat"),
    ],
)
def test_a_template_that_fails_is_one_line_with_the_models_name(main, gpt2_random, tmp_path, template, options, says):
    directory = with_template(gpt2_random, tmp_path / "odd", template)
    done = main("generate", directory, "--chat", *options, QUESTION, "--quiet")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "the chat template of odd" in done.stderr
    assert says in done.stderr


def test_a_batch_is_each_prompt_alone_in_order(main, rows, gpt2_random, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("A prompt from a file,")
    together, run = rows(gpt2_random, "The time", "--prompt", "Once upon a time", "--prompt-file", file)
    assert [row["prompt"] for row in together] == ["The time", "Once upon a time", "A prompt from a file,"]
    assert run["batch"] == 3
    for row in together:
        (alone,), _ = rows(gpt2_random, row["prompt"])
        assert (row["token_ids"], row["n_prompt"]) == (alone["token_ids"], alone["n_prompt"])
    options = ("--prompt", "Once upon a time", "--prompt-file", file, "--max-new-tokens", 8)
    printed = main("generate", gpt2_random, "The time", *options)
    expected = "".join(f"[{i}] {row['prompt']}{row['text']}\n" for i, row in enumerate(together, 1))
    assert printed.stdout == expected
    n_prompt = sum(row["n_prompt"] for row in together)
    assert f"3 prompts, {n_prompt} prompt tokens, 24 new (3 length)" in printed.stderr
    main("generate", gpt2_random, "The time", *options, "--out", tmp_path / "texts.txt")
    assert (tmp_path / "texts.txt").read_text() == expected


def test_beside_prompt_the_only_argument_is_the_model(rows, gpt2_random):
    (row,), run = rows(gpt2_random, "--prompt", "The time")
    assert (row["prompt"], run["model"]) == ("The time", "gpt2-random")


@pytest.mark.parametrize("way", ["argument", "file", "file as standard input"])
@pytest.mark.parametrize("data", [b"\xef\xbb\xbf a\r\nb\rc \n\n", "né🙂\0".encode()])
def test_a_prompt_is_taken_to_the_byte(rows, gpt2_random, tmp_path, monkeypatch, way, data):
    (tmp_path / "prompt.txt").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    given = {
        "argument": ["-"],
        "file": ["--prompt-file", tmp_path / "prompt.txt"],
        "file as standard input": ["--prompt-file", "-"],
    }[way]
    (row,), _ = rows(gpt2_random, *given)
    assert row["prompt"].encode() == data


def test_the_name_of_a_special_token_is_that_token(rows, gpt2_random):
    (row,), _ = rows(gpt2_random, "The time<|endoftext|>")
    assert row["n_prompt"] == 3


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"caf\xe9 au lait", "is not UTF-8: byte 0xe9 at offset 3"),
        (b"caf\xc3", "is not UTF-8: byte 0xc3 at offset 3"),
        (b"", "the prompt has no tokens"),
    ],
)
def test_a_file_that_is_no_prompt_is_refused_by_name(main, gpt2_random, tmp_path, data, says):
    (tmp_path / "prompt.txt").write_bytes(data)
    done = main("generate", gpt2_random, "--prompt-file", tmp_path / "prompt.txt", "--quiet")
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    if data:
        assert "prompt.txt" in done.stderr


def test_bytes_that_are_not_utf_8_on_standard_input(main, gpt2_random, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    done = main("generate", gpt2_random, "-")
    assert done.returncode == 1
    assert "standard input is not UTF-8: byte 0xff at offset 0" in done.stderr


def test_a_row_ends_before_a_stop_text_wherever_tokens_are_cut(main, rows, gpt2_random):
    prompts = ("--prompt", "The time", "--prompt", "Once upon a time")
    (first, second), _ = rows(gpt2_random, *prompts)
    # from the middle of one token to the middle of a later one; the other row does not have it
    stop = first["text"][3:9]
    assert stop not in second["text"]
    (ended, going), run = rows(gpt2_random, *prompts, "--stop", stop, "--stop", "no such text")
    assert (ended["stopped_by"], going["stopped_by"]) == ("stop", "length")
    assert ended["text"] == first["text"][: first["text"].index(stop)]
    assert (going["text"], going["token_ids"]) == (second["text"], second["token_ids"])
    assert ended["token_ids"] == first["token_ids"][: ended["n_new"]]
    assert ended["n_new"] < first["n_new"]
    assert run["stop"] == [stop, "no such text"]
    done = main("generate", gpt2_random, "The time", "--stop", stop, "--max-new-tokens", 8)
    assert done.stdout == "The time" + ended["text"] + "\n"
    assert f"{ended['n_new']} new (stop)" in done.stderr


def test_a_prompt_beyond_the_positions_is_refused_in_the_command_lines_words(main, rows, tiny_llama, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("a" * 300)
    few = ("--prompt-file", file, "--max-new-tokens", 8, "--quiet")
    done = main("generate", tiny_llama, *few)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert (
        "300 tokens of the prompt and --max-new-tokens 8 are more than the 256 positions of tiny-llama" in done.stderr
    )
    assert "--window" in done.stderr
    absolute = main("generate", tiny_llama, *few, "--window", 32, "--positions", "absolute")
    assert "--positions cache" in absolute.stderr
    (row,), run = rows(tiny_llama, "--prompt-file", file, "--window", 32)
    assert (row["n_prompt"], run["positions"]) == (300, "cache")
    # what fits but for the new tokens: how many do
    file.write_text("a" * 252)
    done = main("generate", tiny_llama, *few)
    assert "give --max-new-tokens 5 or" in done.stderr
    assert main("generate", tiny_llama, "--prompt-file", file, "--max-new-tokens", 5).returncode == 0


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--system", "Be brief.", QUESTION], 2, "give --chat too"),
        (["--chat", "--bos", "add", QUESTION], 2, "--bos has no effect on a chat"),
        (["--stop", "", QUESTION], 2, "--stop is empty"),
        (["-", "--prompt-file", "-"], 2, "standard input (-) can be read only once"),
        ([], 2, "PROMPT is missing"),
        (["--prompt-file", "nosuch.txt"], 1, "cannot read --prompt-file nosuch.txt (No such file or directory)"),
        (["--prompt-file", "."], 1, "cannot read --prompt-file . (Is a directory)"),
        (["--prompt", "na\udcff"], 1, "the prompt is not UTF-8: byte 0xff at offset 2"),
        (["--stop", "\udcff", QUESTION], 1, "--stop is not UTF-8"),
    ],
)
def test_what_cannot_be_asked_is_one_line(main, chatty, options, code, says):
    done = main("generate", chatty, *options, "--quiet")
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_prompts_without_a_model_go_to_the_default_one(main, monkeypatch, tmp_path, chat):
    asked = []

    def load(name, options, progress):
        asked.append(name)
        raise KvprobeError("loaded enough")

    monkeypatch.setattr(generate, "load_model", load)
    file = tmp_path / "prompt.txt"
    file.write_text("hi")
    for prompt in (["--prompt", "hi"], ["--prompt-file", file]):
        done = main("generate", *prompt, *chat)
        assert (done.returncode, done.stderr) == (1, "kvprobe: loaded enough\n"), done.stderr
    assert asked == ["gpt2", "gpt2"]


def test_several_prompts_as_arguments_are_told_to_repeat_prompt(main):
    done = main("generate", "smollm2-135m", "--chat", "Q1", "Q2", "Q3")
    assert done.returncode == 2
    assert "got 4 arguments: several prompts: repeat --prompt" in done.stderr


def test_help_teaches_by_example(main):
    shown = main("generate", "--help").stdout
    for part in ("--chat", "--prompt ", "--prompt-file long.txt --window", "--stop"):
        assert part in shown.split("Options:")[0]


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_smollm2_answers_in_words(main):
    done = main("generate", "smollm2-135m", "--chat", "What is the capital of France?", "--max-new-tokens", 32)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "<|im" not in done.stdout
    assert "(eos)" in done.stderr
