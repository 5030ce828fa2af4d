import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent


@pytest.fixture(scope="session")
def smollm2():
    """The pulled SmolLM2-135M, fetched if it is not here: `.model`, `.tokenizer`, `.spec`, `.name`."""
    return _pulled("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3():
    """The pulled Gemma 3 270M, fetched if it is not here."""
    return _pulled("gemma3-270m")


@pytest.fixture(scope="session")
def gpt2_tokenizer_files():
    """The directory of GPT-2's own tokenizer files, fetched if they are not here."""
    from kvprobe.models import pull

    return pull.place("gpt2-tokenizer") if pull.is_pulled("gpt2-tokenizer") else pull.pull("gpt2-tokenizer")


@pytest.fixture(scope="session")
def gpt2_random(gpt2_tokenizer_files, tmp_path_factory):
    """A directory with GPT-2's real tokenizer and small random weights; 256 positions, 3 layers."""
    return write_gpt2_random(tmp_path_factory.mktemp("models") / "gpt2-random", gpt2_tokenizer_files)


@pytest.fixture(scope="session")
def tiny_llama(gpt2_tokenizer_files, tmp_path_factory):
    """A directory named tiny-llama: three layers, 2 of 4 heads of 8 for keys and values, random weights."""
    return write_random(tmp_path_factory.mktemp("models") / "tiny-llama", "llama", gpt2_tokenizer_files)


@pytest.fixture
def main(capfd):
    """Runs the command line in this process, which has paid for its imports: `.returncode`, `.stdout`, `.stderr`."""
    from kvprobe.cli import main

    def once(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main.main([*map(str, arguments)])
        captured = capfd.readouterr()
        return SimpleNamespace(returncode=stopped.value.code, stdout=captured.out, stderr=captured.err)

    return once


@pytest.fixture
def busy_machine(monkeypatch):
    """Every reading of the kernel's counters is a second later, in which we used one core and others one more."""
    from kvprobe.bench import busy

    readings = (busy.Reading(wall=i, used=2.0 * i, own=i) for i in itertools.count())
    monkeypatch.setattr(busy, "read", lambda: next(readings))
    monkeypatch.setattr(busy, "cores", lambda: 2)


def document(done):
    """The one JSON document that a command printed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def only_document(done):
    """The same of a command that had nothing else to say."""
    assert done.stderr == ""
    return document(done)


def write_gpt2_random(directory, tokenizer_files, *, seed=0, **overrides):
    """Writes a GPT-2 model directory: the real tokenizer, random weights, `overrides` of the tiny configuration."""
    from kvprobe.models.loading import quiet
    from tiny import tiny_model

    settings = {"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256}
    with quiet():
        tiny_model("gpt2", seed, **(settings | overrides)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        shutil.copy(tokenizer_files / name, directory / name)
    return directory


def write_random(directory, family, tokenizer_files, *, seed=0, **overrides):
    """Writes a tiny random model of any family of tests/tiny.py, with a tokenizer of its 97 tokens."""
    from kvprobe.models.loading import quiet
    from tiny import VOCAB, tiny_model

    with quiet():
        tiny_model(family, seed, **overrides).save_pretrained(directory)
    tokenizer = json.loads((tokenizer_files / "tokenizer.json").read_text())
    # the first 97 tokens of GPT-2 are single bytes: printable ASCII and a little more, and need no merges
    tokenizer["model"]["vocab"] = {word: i for word, i in tokenizer["model"]["vocab"].items() if i < VOCAB}
    tokenizer["model"]["merges"], tokenizer["added_tokens"] = [], []
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 256}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _pulled(name):
    from kvprobe.models import loading, pull

    if not pull.is_pulled(name):
        pull.pull(name)
    loaded = loading.load(name, device="cpu")
    return SimpleNamespace(**{field: getattr(loaded, field) for field in ("model", "tokenizer", "spec", "name")})
