"""What the shell offers for what has been typed, as click's own completion finds it."""

import os
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete

from kvprobe.cli import main
from kvprobe.models import loading, pull
from kvprobe.text.texts import TEXTS


def offered(*typed):
    """Completions of the last word of a command line, without the mark that files complete too."""
    *before, incomplete = typed
    completions = ShellComplete(main.cli, {}, "kvprobe", "_KVPROBE_COMPLETE").get_completions(before, incomplete)
    return [item.value for item in completions if item.type == "plain"], [
        item.value for item in completions if item.type == "file"
    ]


@pytest.fixture
def models(monkeypatch):
    """Two models that can be loaded, one that is not pulled, one of a GGUF file elsewhere, and a tokenizer."""
    found = [
        ("smollm2-135m", "model", "pulled"),
        ("someone/small", "model", "hub cache"),
        ("gemma3-270m", "model", "not pulled"),
        ("smart.gguf", "model", "gguf"),
        ("small-tokenizer", "tokenizer", "pulled"),
    ]
    rows = [dict(zip(("name", "kind", "state"), row, strict=True)) for row in found]
    monkeypatch.setattr(loading, "available", lambda: rows)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("command", [name for name in main.COMMANDS if name not in ("pull", "models")])
def test_a_command_completes_the_models_that_can_be_loaded_and_files(command):
    assert offered(command, "") == (["smollm2-135m", "someone/small"], [""])
    assert offered(command, "sm") == (["smollm2-135m"], ["sm"])


@pytest.mark.usefixtures("models")
def test_a_prompt_is_not_completed_to_a_model():
    assert offered("generate", "smollm2-135m", "sm") == ([], [])


def test_texts_and_what_can_be_pulled():
    assert offered("sinks", "x", "--text", "") == ([*TEXTS], [""])
    assert offered("lowrank", "x", "--fit-text", "man") == (["manual"], ["man"])
    assert offered("pull", "gpt") == (["gpt2-tokenizer"], ["gpt"])
    assert offered("pull", "")[0] == [*pull.CATALOGUE]


def test_the_script_of_the_readme_is_printed_and_completing_imports_nothing_heavy():
    code = (
        "import sys\nfrom kvprobe.cli.main import main\n"
        "try: main([])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'jinja2') if m in sys.modules])"
    )

    def printed(**variables):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=True
        )
        *lines, heavy = done.stdout.splitlines()
        assert (heavy, done.stderr) == ("[]", "")
        return lines

    for shell in ("bash", "zsh", "fish"):
        assert any("_KVPROBE_COMPLETE" in line for line in printed(_KVPROBE_COMPLETE=f"{shell}_source"))
    lines = printed(_KVPROBE_COMPLETE="bash_complete", COMP_WORDS="kvprobe sinks x --text man", COMP_CWORD="4")
    assert "plain,manual" in lines
    assert printed(_KVPROBE_COMPLETE="bash_complete", COMP_WORDS="kvprobe sinks ", COMP_CWORD="2")
