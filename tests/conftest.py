import itertools
import math
from types import SimpleNamespace

import pytest

from support.models import write_gpt2_random, write_random


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

    readings = (busy.CpuTimes(wall=i, used=2.0 * i, own=i) for i in itertools.count())
    monkeypatch.setattr(busy, "read", lambda: next(readings))
    monkeypatch.setattr(busy, "cores", lambda: 2)
    # what the rows themselves took says nothing here: it depends on the machine
    monkeypatch.setattr(busy, "LEAST_MS", math.inf)


def _pulled(name):
    from kvprobe.models import loading, pull

    if not pull.is_pulled(name):
        pull.pull(name)
    loaded = loading.load(name, device="cpu")
    return SimpleNamespace(**{field: getattr(loaded, field) for field in ("model", "tokenizer", "spec", "name")})
