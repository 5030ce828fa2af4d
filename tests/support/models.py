"""What a command printed, and models on disk for it to read."""

import json
import shutil


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
    from support.tiny import tiny_model

    settings = {"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256}
    with quiet():
        tiny_model("gpt2", seed, **(settings | overrides)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        shutil.copy(tokenizer_files / name, directory / name)
    return directory


def write_random(directory, family, tokenizer_files, *, seed=0, **overrides):
    """Writes a tiny random model of any family of tests/support/tiny.py, with a tokenizer of its 97 tokens."""
    from kvprobe.models.loading import quiet
    from support.tiny import VOCAB, tiny_model

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
