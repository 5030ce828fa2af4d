"""`kvprobe relief` as its users meet it."""

import re

import pytest

from kvprobe.experiments.relief import Relief
from kvprobe.results.result import Result
from support.models import only_document, write_random

BOTH = ("--basis", "oracle", "--basis", "heldout")
SHORT = ("--tokens", 64, "--window", 16, "--rank", 8, "--bits", 4)


def test_a_row_a_lever_and_the_model_first(main, tiny_llama, tmp_path):
    picture = tmp_path / "relief.svg"
    done = main("relief", tiny_llama, *SHORT, *BOTH, "--plot", picture, "--format", "json", "--quiet")
    result = only_document(done)
    assert result["analysis"] == "relief_map"
    assert [row["lever"] for row in result["rows"]] == [
        "as it is", "window 16 + 4 sinks", "rank 8, oracle basis", "rank 8, heldout basis", "4-bit storage",
    ]  # fmt: skip
    assert result["rows"][0]["relief"] == 1
    run = result["run"]
    assert (run["windows"], run["ranks"], run["bits"], run["bases"]) == ([16], [8], [4], ["oracle", "heldout"])
    assert (run["score_from"], run["n_targets"]) == (32, 31)
    assert "as it is" in picture.read_text(encoding="utf-8")


def test_the_table_ends_in_the_finding(main, tiny_llama):
    done = main("relief", tiny_llama, *SHORT)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "lever", "kind", "loss", "delta", "delta_low", "delta_high", "bytes", "bytes_per_token", "relief", "on_front",
    ]  # fmt: skip
    assert lines[-1].startswith("tiny-llama, bundled, 64 tokens")
    assert "of 3 levers that never saw the scored tokens" in lines[-1]


def test_the_table_has_bytes_a_token_in_units(main, tiny_llama):
    first = main("relief", tiny_llama, *SHORT).stdout.splitlines()[1]
    assert re.fullmatch(r"as it is +model( +\S+){4} +(\S+ (B|KiB|MiB)) +(\S+ (B|KiB)) +1\.0000 +\S+", first), first


def test_the_finding_names_a_lever_on_the_front_and_of_equal_bytes_the_lower_loss():
    def row(lever, n_bytes, loss, *, on_front, low=-0.1):
        delta = {"delta": loss - 3, "delta_low": low, "delta_high": 0.2}
        return (
            {"lever": lever, "basis": None, "bytes": n_bytes, "loss": loss, "relief": 100 / n_bytes}
            | delta
            | {"on_front": on_front}
        )

    run = {"model": "m", "passage": "p", "n_tokens": 64, "has_bos": False}
    full = row("as it is", 100, 3.0, on_front=True)
    window, bits = row("window", 14, 3.09, on_front=False), row("4-bit", 14, 3.01, on_front=True)
    large = row("8-bit", 27, 3.0, on_front=True)
    for rows in ([full, window, bits, large], [full, large, bits, window]):
        assert "loss is 4-bit, 7.1 times smaller" in Relief.sentence(Result("relief_map", rows, run))


def test_a_model_of_other_caches_is_refused_by_its_family(main, gpt2_tokenizer_files, tmp_path):
    directory = write_random(tmp_path / "latent", "deepseek_v3", gpt2_tokenizer_files)
    done = main("relief", directory, *SHORT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the deepseek_v3 family does not keep one K and one V for each KV head" in done.stderr


@pytest.mark.parametrize(("arguments", "says"), [(["--basis", "prefix"], "--basis"), (["--rank", "x"], "--rank")])
def test_a_wrong_option_is_a_usage_error(main, arguments, says):
    done = main("relief", "nowhere", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
