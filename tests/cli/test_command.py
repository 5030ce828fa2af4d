"""What a user types wrong is named as it was typed: every setting of every command, by its option."""

import click
import pytest
from click.testing import CliRunner

from kvprobe.cli.command import Command, flags_of
from kvprobe.cli.main import cli, run
from kvprobe.errors import KvprobeError, SettingError, Wording
from kvprobe.experiments import registry

# settings of training mean nothing beside a model, and are refused there
BASE = {
    "gqa": ("--pool",),
    "sinks": ("--queries-from", 0),
    "latency": ("--phase", "cached", "--seconds", 0),
    "generate": ("--max-new-tokens", 2),
}
END_TO_END = ("--end-to-end", "--prompt-tokens", 4, "--new-tokens", 2)


@pytest.mark.parametrize("name", [*registry.names(), "generate", "report"])
def test_every_number_that_is_refused_is_named_by_its_option(main, tiny_llama, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def last_four(call):\n    return call.attend(keep=call.last(4))\n")
    command = cli.get_command(click.Context(cli), name)
    refused = set()
    for option in command.params:
        numeric = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
        # to click, what follows an option whose value may be left out is another option if it begins with a dash
        if not numeric or option.name == "uptrain":
            continue
        # what has bounds of its own is refused by click, without work; of naive samples more than all are all
        ranged = isinstance(option.type, click.IntRange | click.FloatRange) or option.name == "naive_samples"
        for value in (-1,) if ranged else (-1, 2**40):
            asked = [name, tiny_llama, *BASE.get(name, ())]
            asked += ["--attend", "mine.py:last_four"] if name == "evaluate" else []
            asked += ["Once"] if name == "generate" else ["--quiet"]
            asked += ["--tokens", 32] if "--tokens" in flags_of(command).values() else []
            asked += ["--window", 8] if (name, option.name) == ("generate", "sinks") else []
            asked += ["--stream"] if option.name == "every" else []
            asked += END_TO_END if option.opts[0] in (*END_TO_END, "--naive-samples") else []
            done = main(*asked, f"{option.opts[0]}={value}")
            if done.returncode:
                assert done.returncode in (1, 2)
                assert option.opts[0] in done.stderr.splitlines()[-1]
                refused.add(option.name)
    # most settings have bounds; a command without any would have made no test
    assert len(refused) > 1


@pytest.mark.parametrize("command", ["generate", "latency"])
def test_an_engine_that_cannot_run_is_named_with_what_can(main, tiny_llama, command):
    how = ("Once", "--max-new-tokens", 2) if command == "generate" else ("--phase", "cached", "--context", 8)
    done = main(command, tiny_llama, *how, "--engine", "numba", "--dtype", "float16", "--quiet")
    assert done.returncode == 1
    assert done.stderr == (
        "kvprobe: --engine numba cannot be used: it reads float32 or bfloat16, not float16; "
        "use --engine auto or torch\n"
    )


@click.command(cls=Command)
@click.option("--window", "windows", type=int, multiple=True)
@click.option("--fit-text")
def made(windows, fit_text):
    """Refuses what it is given."""
    if fit_text == "clash":
        raise SettingError("{fit_text} {0} needs {windows}", fit_text)
    if fit_text is not None:
        raise KvprobeError(Wording("{fit_text} is {0}; use {windows} or {other}", fit_text))
    raise ValueError(Wording("{window} must be {0}", "{windows}"))


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        # by the names of the values, and by the option's own word; a value is never a name
        (["--fit-text", "a{b}"], KvprobeError, "--fit-text is a{b}; use --window or other"),
        (["--window", "1"], ValueError, "--window must be {windows}"),
    ],
)
def test_an_error_of_any_kind_names_options(arguments, kind, says):
    done = CliRunner().invoke(made, arguments)
    assert (type(done.exception), str(done.exception)) == (kind, says)


def test_a_program_of_its_own_names_its_options_too(capfd):
    plain = click.Command("plain", callback=made.callback, params=made.params)
    with pytest.raises(SystemExit) as stopped:
        run(plain, ["--fit-text", "x"], name="plain")
    assert stopped.value.code == 1
    assert capfd.readouterr().err == "kvprobe: --fit-text is x; use --window or other\n"


def test_settings_that_contradict_each_other_are_a_usage_error():
    done = CliRunner().invoke(made, ["--fit-text", "clash"])
    assert done.exit_code == 2
    assert done.stderr.endswith("Error: --fit-text clash needs --window\n")
