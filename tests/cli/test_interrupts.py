"""Ctrl-C is never lost and never a traceback, from the first line to the last; SIGTERM clears up and says so."""

import os
import subprocess
import sys

import pytest

# sends SIG to the process itself when MODULE is first looked for, before a line of it has run
AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
# as `python -m kvprobe` finds them
AS_PROGRAM = """
sys.argv = ["-m", *{arguments!r}]
sys.orig_argv = [sys.executable, "-m", "kvprobe", *{arguments!r}]
"""
PROGRAM = AS_PROGRAM + "import runpy; runpy.run_module('kvprobe', run_name='__main__')"
CALLED = "from kvprobe.cli.main import main; main({arguments!r})"
PREPARED = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def ran(code, *, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=os.environ | environment, check=False
    )


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,'
        ' "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}'
    )
    return tmp_path


@pytest.mark.parametrize(
    "module", ["kvprobe.progress", "kvprobe.cli.main", "click", "kvprobe.experiments.cache", "kvprobe.shape.spec"]
)
@pytest.mark.parametrize(("number", "said"), [(2, "interrupted"), (15, "terminated")])
def test_a_signal_at_any_import_ends_the_program_in_one_line(shape, module, number, said):
    done = ran(AT_IMPORT.format(module=module, number=number) + PROGRAM.format(arguments=["cache", str(shape)]))
    assert (done.returncode, done.stdout, done.stderr.strip()) == (128 + number, "", f"kvprobe: {said}")


def test_so_does_ctrl_c_before_there_is_a_handler(shape):
    # what sends the signal has imported `signal` itself
    forget = "sys.modules.pop('signal')\n"
    done = ran(AT_IMPORT.format(module="signal", number=2) + forget + PROGRAM.format(arguments=["cache", str(shape)]))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvprobe: interrupted\n")


@pytest.mark.parametrize("module", ["click", "kvprobe.cli.process", "kvprobe.experiments.cache"])
def test_so_does_one_while_the_command_line_is_imported_by_another_program(shape, module):
    arguments = ["cache", str(shape)]
    done = ran(AT_IMPORT.format(module=module, number=2) + CALLED.format(arguments=arguments))
    assert (done.returncode, done.stderr.strip()) == (130, "kvprobe: interrupted")


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "kvprobe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvprobe, version ")


def test_whoever_only_imports_keeps_their_own_handlers():
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import kvprobe, kvprobe.cli.main\n"
        "print(signal.getsignal(2) is signal.default_int_handler, signal.getsignal(15) is signal.SIG_DFL)"
    )
    assert ran(code).stdout == "True True\n"


LOST = {
    "finalizer": "class Lost:\n    def __del__(self): press()\ndef lose(): Lost()",
    "weakref": "import weakref\nclass Lost: pass\ndef lose():\n    it = Lost(); ref = weakref.ref(it, press); del it",
    "ctypes": "import ctypes\nlose = ctypes.CFUNCTYPE(None)(lambda: press())",
    "except": "def lose():\n    try: press()\n    except BaseException: pass",
}


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("number", [2, 15])
def test_one_that_python_or_a_library_drops_is_not_lost(shape, lost, number):
    code = f"""{PREPARED}
def press(*_):
    os.kill(os.getpid(), {number})
    sum(range(1000))
{LOST[lost]}
from kvprobe.cli import main as cli
from kvprobe.models import loading
before = loading.load_spec
def load_spec(*arguments, **named):
    lose()
    return before(*arguments, **named)
loading.load_spec = load_spec
cli.main(["cache", {str(shape)!r}, "--out", {str(shape / "bill")!r}])
"""
    done = ran(code)
    said = {2: "interrupted", 15: "terminated"}[number]
    assert (done.returncode, done.stdout, done.stderr.strip()) == (128 + number, "", f"kvprobe: {said}")
    assert not (shape / "bill").exists()


def test_a_second_one_ends_at_once(shape):
    code = f"""{PREPARED}
from kvprobe.cli import main as cli
from kvprobe.models import loading
def load_spec(*_, **__):
    try:
        os.kill(os.getpid(), 2)
    finally:
        os.kill(os.getpid(), 2)
        print("still here", flush=True)
loading.load_spec = load_spec
cli.main(["cache", {str(shape)!r}])
"""
    done = ran(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvprobe: interrupted\n")


@pytest.mark.parametrize("setting", [AS_PROGRAM, ""], ids=["program", "called"])
def test_one_while_the_interpreter_ends_is_no_traceback(shape, setting):
    arguments = ["cache", str(shape)]
    code = f"""{PREPARED}{setting.format(arguments=arguments)}
import atexit, kvprobe
atexit.register(print, "END", flush=True)
atexit.register(os.kill, os.getpid(), 2)
{CALLED.format(arguments=arguments)}
"""
    done = ran(code)
    assert (done.returncode, done.stderr) == (130, "kvprobe: interrupted\n")
    assert done.stdout
    assert "END" not in done.stdout


def test_in_the_background_of_a_shell_ctrl_c_stays_ignored(shape):
    code = "import os, signal, sys; signal.signal(2, signal.SIG_IGN)\n" + AT_IMPORT.format(
        module="kvprobe.shape.spec", number=2
    ).replace("signal.signal(signal.SIGINT, signal.default_int_handler)", "")
    done = ran(code + PROGRAM.format(arguments=["cache", str(shape)]))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("when", ["before", "after"])
def test_in_the_middle_of_a_write_the_file_is_whole_or_as_it_was(shape, when):
    out = shape / "bill.json"
    out.write_text("old")
    code = f"""{PREPARED}
from pathlib import Path
from kvprobe.cli import main as cli
before = Path.replace
def replace(self, target):
    {"before(self, target)" if when == "after" else ""}
    os.kill(os.getpid(), 2)
Path.replace = replace
cli.main(["cache", {str(shape)!r}, "--format", "json", "--out", {str(out)!r}])
"""
    done = ran(code)
    assert done.returncode == 130
    assert (out.read_text() == "old") if when == "before" else out.read_text().endswith("}\n")
    assert sorted(path.name for path in shape.iterdir()) == ["bill.json", "config.json"]


@pytest.mark.parametrize(("number", "said"), [(2, "interrupted"), (15, "terminated")])
def test_one_inside_code_that_is_made_of_a_string_is_the_commands_own_exit(shape, number, said):
    arguments = ["cache", str(shape)]
    code = f"""
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvprobe.shape import spec
spec.Spec.from_config = lambda *_: exec("os.kill(os.getpid(), {number})")
sys.argv = ["kvprobe", *{arguments!r}]
runpy.run_module("kvprobe", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (128 + number, f"kvprobe: {said}")
