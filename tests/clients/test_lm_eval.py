"""lm-evaluation-harness scores the same around its own model and by ours, and just what kvprobe measures."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from scipy.stats import binom

import kvprobe
from kvprobe.errors import KvprobeError
from support.harness import FILLER, around, harness, its_own_warnings, last_64, passwords, request, write_passwords

ROOT = Path(__file__).parents[2]
# the last is longer than the 256 positions
PAIRS = [("The harbour was", " quiet"), ("", "The boats came in"), (FILLER, " red"), (FILLER, " blue")]
PAIRS += [("The wind was", " blue"), (FILLER, " red and blue"), (FILLER + " ", "red"), (FILLER * 4, " red and blue")]
WAYS = {
    "seam": {},
    "full": {"cache": "full"},
    "rolling": {"cache": "rolling", "n_sink": 0},
}


@pytest.fixture(scope="module")
def lm_eval():
    return harness()


@pytest.fixture(scope="module")
def loaded(gpt2_random):
    return kvprobe.load(str(gpt2_random), device="cpu")


@pytest.fixture(scope="module")
def theirs(lm_eval, loaded):
    """The harness's own model around the same weights."""
    with its_own_warnings():
        return lm_eval.HFLM(loaded.model, tokenizer=loaded.tokenizer)


def ours(lm_eval, loaded, way, attend):
    """Our model; on a rolling cache the cache itself is the window."""
    if way == "rolling" and attend is not None:
        return lm_eval.KvprobeLM(loaded, **WAYS[way], window=64)
    return lm_eval.KvprobeLM(loaded, attend=attend, **WAYS[way])


@pytest.mark.parametrize("attend", [None, last_64])
@pytest.mark.parametrize("way", WAYS)
def test_each_request_gets_the_answer_of_the_harness_s_own_model(lm_eval, loaded, theirs, way, attend):
    mine = ours(lm_eval, loaded, way, attend)
    pairs = [request(*pair) for pair in PAIRS]
    texts = [request(text) for text in (FILLER[:80], FILLER * 4, "")]
    written = [request(FILLER * n, {"until": ["\n\n\n"], "max_gen_toks": 12}) for n in (1, 4)]
    with its_own_warnings(), around(loaded.model, attend):
        scores = theirs.loglikelihood(pairs, disable_tqdm=True)
        rolling = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
        continued = theirs.generate_until(written, disable_tqdm=True)
        # a text that begins within a token and ends within another
        stop = continued[0][3:8]
        stopped = theirs.generate_until([request(FILLER, {"until": stop, "max_gen_toks": 12})], disable_tqdm=True)
    # theirs sums the exponentials of a vocabulary in float32, which is off by up to 2e-5 nat a token
    for (total, greedy), wanted in zip(mine.loglikelihood(pairs, disable_tqdm=True), scores, strict=True):
        assert (total, greedy) == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    assert mine.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(rolling, rel=1e-5, abs=1e-12)
    assert mine.generate_until(written, disable_tqdm=True) == continued
    cut = mine.generate_until([request(FILLER, {"until": stop, "max_gen_toks": 12})], disable_tqdm=True)
    assert cut == stopped == [continued[0][:3]]


def test_an_attention_function_acts_on_a_cache_too(lm_eval, loaded):
    both = lm_eval.KvprobeLM(loaded, cache="full", attend=last_64), lm_eval.KvprobeLM(loaded, attend=last_64)
    plain = lm_eval.KvprobeLM(loaded).loglikelihood([request(FILLER, " red")], disable_tqdm=True)[0][0]
    one, other = (model.loglikelihood([request(FILLER, " red")], disable_tqdm=True)[0][0] for model in both)
    assert one == pytest.approx(other, abs=1e-4)
    assert abs(one - plain) > 1e-2


@pytest.mark.parametrize("cache", [None, "full"])
def test_logits_are_held_some_at_a_time_without_a_difference(lm_eval, loaded, monkeypatch, cache):
    model, texts = lm_eval.KvprobeLM(loaded, cache=cache), [request(FILLER)]
    whole = model.loglikelihood_rolling(texts, disable_tqdm=True)
    monkeypatch.setattr("kvprobe.clients.lm_eval.CHUNK", 7)
    assert model.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(whole, rel=1e-6)


def test_a_chat_is_written_as_by_the_harness_s_own_model(lm_eval, loaded, theirs, monkeypatch):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    chat = [{"role": "user", "content": "How are you?"}]
    assert lm_eval.KvprobeLM(loaded).apply_chat_template(chat) == "[user]How are you?[a]"
    chat.append({"role": "assistant", "content": "I am"})
    begun = lm_eval.KvprobeLM(loaded).apply_chat_template(chat, add_generation_prompt=False)
    assert begun == theirs.apply_chat_template(chat, add_generation_prompt=False) == "[user]How are you?[assistant]I am"


@pytest.mark.gemma3
def test_a_text_gets_one_bos_whoever_writes_it(lm_eval, gemma3):
    with its_own_warnings():
        theirs = lm_eval.HFLM(gemma3.model, tokenizer=gemma3.tokenizer)
    ours = lm_eval.KvprobeLM(kvprobe.load(gemma3.name, device="cpu"))
    for text in ("The boats", "<bos>The boats"):
        assert ours.tok_encode(text) == theirs.tok_encode(text) == [2, *gemma3.tokenizer("The boats").input_ids[1:]]
    assert ours.tok_encode("The boats", add_special_tokens=False) == theirs.tok_encode("The boats", False)


def test_a_long_context_loses_its_first_tokens_with_one_notice(lm_eval, loaded, caplog):
    model = lm_eval.KvprobeLM(loaded, max_length=32)
    n_tokens = len(loaded.tokenizer(FILLER).input_ids)
    model.loglikelihood([request(FILLER, " red"), request("The", " red"), request(FILLER, " blue")], disable_tqdm=True)
    model.generate_until([request(FILLER, {"max_gen_toks": 2})], disable_tqdm=True)
    assert [record.getMessage() for record in caplog.records] == [
        # of the continuation's one token nothing is read: 32 tokens of the context are
        f"max_length 32: 2 of 3 requests lose their first tokens, up to {n_tokens - 32} of them",
        f"max_length 32: 1 of 1 requests lose their first tokens, up to {n_tokens - 30} of them",
    ]


def test_the_results_say_what_answered(lm_eval, loaded, tmp_path):
    (tmp_path / "mine.py").write_text("def last(call):\n    return call.attend(keep=call.last(4))\n")
    info = lm_eval.KvprobeLM(loaded, attend=f"{tmp_path}/mine.py:last", cache="rolling", window=8).get_model_info()
    said = info["kvprobe"]
    assert [said[key] for key in ("model", "source", "cache", "window")] == ["gpt2-random", "directory", "rolling", 8]
    assert (said["attend"]["name"], said["attend"]["file"]) == ("mine.py:last", "mine.py")
    assert str(tmp_path) not in str(info)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": 64}, r"unknown setting 'window'; those of a cache need cache=NAME"),
        ({"cache": "rolling", "windw": 64}, r"unknown setting 'windw'; the cache rolling has: .*n_sink, .*window"),
        ({"cache": "rolling", "capacity": 64}, "unknown setting 'capacity'"),
        ({"trust_remote_code": True}, "unknown setting 'trust_remote_code'"),
        ({"batch_size": 8}, "batch_size is 8, but kvprobe reads one request at a time"),
        ({"dtype": "bfloat16"}, "a model in memory has its own dtype and device"),
        ({"max_length": 257}, "max_length must be 1 to 256, the positions of gpt2-random, got 257"),
        ({"max_length": 0}, "max_length must be 1 to 256, the positions of gpt2-random, got 0"),
        ({"attend": "nowhere.py:last"}, "there is no file 'nowhere.py'"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(lm_eval, loaded, settings, said):
    with pytest.raises(KvprobeError, match=said):
        lm_eval.KvprobeLM(loaded, **settings)


def test_models_and_tokenizers_that_cannot_answer_are_refused(lm_eval, loaded, tiny_llama):
    with pytest.raises(KvprobeError, match=r"gpt2-random has no tokenizer to read requests with: give tokenizer=…"):
        lm_eval.KvprobeLM(loaded.model)
    with pytest.raises(KvprobeError, match="tiny-llama has neither BOS nor EOS for an empty context"):
        lm_eval.KvprobeLM(str(tiny_llama), device="cpu")
    given = lm_eval.KvprobeLM(str(tiny_llama), device="cpu", prefix_token_id=7, cache="rolling", positions="cache")
    assert given.prefix_token_id == 7
    # such a cache has no last position
    longer = {"prefix_token_id": 7, "cache": "rolling", "positions": "cache", "max_length": 1000}
    assert lm_eval.KvprobeLM(str(tiny_llama), device="cpu", **longer).max_length == 1000


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"do_sample": True}, "a task cannot ask for do_sample"),
        ({"temperature": 0.7}, "a task cannot ask for do_sample"),
        ({"num_beams": 4, "do_sample": False}, "a task cannot ask for num_beams"),
        ({"max_gen_toks": 256}, "256 new tokens leave no room for a context in 256"),
    ],
)
def test_a_task_that_asks_for_more_than_greedy_text_is_refused(lm_eval, loaded, asked, said):
    with pytest.raises(KvprobeError, match=said):
        lm_eval.KvprobeLM(loaded).generate_until([request("The", asked)], disable_tqdm=True)


def test_a_request_without_anything_to_score_is_refused(lm_eval, loaded):
    with pytest.raises(KvprobeError, match="1 tokens of context and 0 to be scored"):
        lm_eval.KvprobeLM(loaded).loglikelihood([request("The", "")], disable_tqdm=True)


def test_the_harness_s_command_knows_the_model(gpt2_random, tmp_path):
    # without an index of the harness's own tasks, which takes seconds
    code = (
        "import runpy, sys, functools, lm_eval.tasks as tasks\n"
        "ours = functools.partialmethod(tasks.TaskManager.__init__, include_defaults=False)\n"
        "tasks.TaskManager.__init__ = ours\n"
        "runpy.run_module('kvprobe.clients.lm_eval', run_name='__main__', alter_sys=True)"
    )
    (tmp_path / "mine.py").write_text("def last(call):\n    return call.attend(keep=call.last(4))\n")
    write_passwords(tmp_path, n_items=2)
    words = ["run", "--model", "kvprobe", "--model_args", f"pretrained={gpt2_random},attend=mine.py:last"]
    words += ["--tasks", "passwords", "--include_path", str(tmp_path)]
    words = [sys.executable, "-c", code, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "passwords" in done.stdout


def test_the_command_refuses_in_one_line(lm_eval, loaded, monkeypatch):
    import kvprobe.clients.lm_eval as client

    # what the command does once it has read its words
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: lm_eval.KvprobeLM(loaded, windw=3))
    with pytest.raises(SystemExit) as stopped:
        client.main()
    assert stopped.value.code == "Error: unknown setting 'windw'; those of a cache need cache=NAME"


@pytest.mark.smollm2
def test_twenty_questions_are_answered_alike_and_not_beyond_a_window(lm_eval, smollm2, tmp_path):
    assert version("lm_eval") >= "0.4.13"
    folder = write_passwords(tmp_path)
    loaded = kvprobe.load(smollm2.name, device="cpu")
    for item in passwords(20):
        clue = item["choices"][item["answer"]]
        after = item["text"][item["text"].index(clue) + len(clue) :]
        # the query sees itself and 63 before it
        assert len(loaded.tokenizer(after).input_ids) > 64

    def asked(model, attend=None):
        with its_own_warnings(), around(loaded.model, attend):
            manager = lm_eval.TaskManager(include_path=str(folder), include_defaults=False)
            done = lm_eval.evaluate(model, tasks=["passwords"], task_manager=manager, bootstrap_iters=0)
        answers = [choice[0][0] for sample in done["samples"]["passwords"] for choice in sample["resps"]]
        return round(20 * done["results"]["passwords"]["acc,none"]), answers

    with its_own_warnings():
        theirs = lm_eval.HFLM(loaded.model, tokenizer=loaded.tokenizer)
    full, full_answers = asked(theirs)
    window, window_answers = asked(theirs, last_64)
    n_right, answers = asked(lm_eval.KvprobeLM(loaded))
    assert (n_right, answers) == (full, pytest.approx(full_answers, abs=1e-4))
    n_right, answers = asked(lm_eval.KvprobeLM(loaded, attend=last_64))
    assert (n_right, answers) == (window, pytest.approx(window_answers, abs=1e-4))
    assert full >= 16
    low, high = binom.interval(0.95, 20, 0.25)
    assert low <= window <= high


@pytest.mark.smollm2
def test_the_mean_loss_is_what_the_harness_scores(lm_eval, smollm2):
    loaded = kvprobe.load(smollm2.name, device="cpu")
    with its_own_warnings():
        theirs = lm_eval.HFLM(loaded.model, tokenizer=loaded.tokenizer)
    text = [request(FILLER)]
    subject = kvprobe.prepare(loaded, string=FILLER, bos="add")
    assert subject.input_ids[0, 0] == theirs.prefix_token_id
    rows = kvprobe.evaluate(subject, last_64, score_from=0).rows
    for row, attend in zip(rows, (None, last_64), strict=True):
        with its_own_warnings(), around(loaded.model, attend):
            (score,) = theirs.loglikelihood_rolling(text, disable_tqdm=True)
        ours = lm_eval.KvprobeLM(loaded, attend=attend).loglikelihood_rolling(text, disable_tqdm=True)
        n_tokens = subject.passage.n_tokens - 1
        assert row["loss"] == pytest.approx(-score / n_tokens, abs=1e-4)
        assert row["loss"] == pytest.approx(-ours[0] / n_tokens, abs=1e-6)
