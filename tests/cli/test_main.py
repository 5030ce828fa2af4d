"""The command line as its users meet it: help that waits for nothing, exit codes, one document, errors in one line."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from kvprobe.cli import main
from kvprobe.models import hub
from support.hub import COMMIT, Hub


@pytest.fixture
def run(main):
    return main


@pytest.mark.parametrize("name", [None, *main.cli.list_commands(None)])
def test_help_imports_neither_torch_nor_transformers(name):
    arguments = ["--help"] if name is None else [name, "--help"]
    code = (
        "import sys\nfrom kvprobe.cli.main import main\n"
        f"try: main({arguments})\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib', 'rich', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert (name or "sinks") in done.stdout


@pytest.mark.parametrize("name", main.cli.list_commands(None))
def test_every_command_explains_itself_with_an_example(name):
    done = CliRunner().invoke(main.cli, [name, "--help"])
    assert done.exit_code == 0
    if name != "models":
        assert f"kvprobe {name}" in done.output.split("Options:")[0]


def test_unknown_commands_and_options_are_usage_errors(run):
    for arguments in (["nosuch"], ["sinks", "--nosuch"], ["sinks", "--tokens", "many"], ["sinks", "--format", "xml"]):
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["snks"], 2, "no such command 'snks': did you mean sinks? `kvprobe --help` lists the commands"),
        (["zzz"], 2, "no such command 'zzz': `kvprobe --help` lists the commands"),
        (["sinks", "--tokns", "8"], 2, "--tokens"),
        (["sinks", "--format", "jsn"], 2, "'jsn' is not one of 'table', 'json', 'csv': did you mean json?"),
        (["window", "--positions", "absolut"], 2, "did you mean absolute?"),
        (["sinks", "--text", "time-machin"], 1, "did you mean time-machine? Check the path"),
        (["sinks", "./smollm2-135m"], 1, "there is no directory ./smollm2-135m; "),
        (["cache", "llama2-70b"], 1, "did you mean llama-2-70b? Without a network"),
        (["sinks", "smolm2-135m"], 1, "did you mean smollm2-135m?"),
        (["pull", "smolm2-135m"], 1, "did you mean smollm2-135m?"),
    ],
)
def test_what_is_close_to_a_name_is_told_it(run, gpt2_random, monkeypatch, arguments, status, says):
    def fetch(repo, **_):
        raise LookupError("the hub could not be reached")

    monkeypatch.setattr(hub, "fetch", fetch)
    done = run(*arguments, *([gpt2_random] if "--text" in arguments else []))
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plot", "mass.jpg"], "must end in one of .svg, .png, .pdf"),
        (["--plot", "nosuch/mass.png"], "directory 'nosuch' does not exist: make it first"),
        (["--plot", "mass.png", "--plot", "nosuch/mass.svg"], "directory 'nosuch' does not exist: make it first"),
        (["--plot", "a.svg", "--plot", "mass.png", "--out", "mass.png"], "'mass.png' would hold no picture"),
        (["--out", "mass.png", "--plot", "a.svg", "--plot", "mass.png"], "'mass.png' would hold no picture"),
        (["--out", "nosuch/mass.json"], "directory 'nosuch' does not exist"),
        (["--epsilon", "1.5"], "0<=x<=1"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(run, arguments, says):
    done = run("sinks", "nosuch-model", *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def numbers():
    for name in main.cli.list_commands(None):
        for option in main.cli.get_command(None, name).params:
            if isinstance(option.type, click.types.FloatParamType | click.types.IntParamType):
                yield pytest.param(name, option, id=f"{name} {option.opts[0]}")


@pytest.mark.parametrize(("name", "option"), list(numbers()))
@pytest.mark.parametrize("value", ["9223372036854775808", "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "nan", "inf"])
def test_no_option_takes_a_number_beyond_all_machines(run, name, option, value):
    if isinstance(option.type, click.types.FloatParamType) and value == "9223372036854775808":
        value = "1e999"
    done = run(name, option.opts[0], value, "gpt2")
    assert (done.returncode, done.stdout) in ((1, ""), (2, ""))
    # the last line says it, after a hint to --help at most
    said = done.stderr.splitlines()[-1]
    assert said.startswith(("Error: ", "kvprobe: "))
    assert "unexpected" not in said
    assert len(said) < 300


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", "nosuch.txt"], "nosuch.txt"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--tokens", "257"], "has 256 positions, fewer than 257 tokens: use --tokens 256"),
        (["--tokens", "64", "--queries-from", "64"], "--queries-from must be between 0 and 63 for --tokens 64, got 64"),
        (["--tokens", "32", "--queries-from", "-1"], "--queries-from must be between 0 and 31 for --tokens 32, got -1"),
        (["--device", "nosuch"], "nosuch"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_1(run, gpt2_random, arguments, says):
    done = run("sinks", str(gpt2_random), *arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("kvprobe: ")] == [done.stderr.splitlines()[-1]]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "holds no text (0 bytes)"),
        (b"ok \xff no", "offset 3"),
        (b"a\x00b", "offset 1"),
        (b"three words only", "too short"),
    ],
)
def test_bad_text_on_standard_input(run, gpt2_random, monkeypatch, data, says):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    done = run("sinks", gpt2_random, "--text", "-", "--tokens", "64")
    assert done.returncode == 1
    assert says in done.stderr


def test_json_is_one_document_with_rows_and_record(run, gpt2_random):
    done = run("sinks", str(gpt2_random), "--tokens", "80", "--format", "json", "--seed", "3")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert list(document) == ["analysis", "rows", "run"]
    assert {"layer", "mass", "uniform", "sink_rate"} <= document["rows"][0].keys()
    assert [row["layer"] for row in document["rows"]] == list(range(len(document["rows"])))
    record = document["run"]
    named = (
        "model revision source dtype device family passage_sha256 n_tokens bos has_bos seed versions cpu wall_s date"
    )
    for field in [*named.split(), "queries_from", "epsilon", "control"]:
        assert field in record
    assert (record["family"], record["n_tokens"], record["seed"], record["source"]) == ("gpt2", 80, 3, "directory")
    # files by name, never by path
    assert str(gpt2_random.parent) not in done.stdout


def test_per_head_rows(run, gpt2_random):
    done = run("sinks", str(gpt2_random), "--tokens", "80", "--format", "json", "--per-head", "--quiet")
    rows = json.loads(done.stdout)["rows"]
    assert list(rows[0]) == ["layer", "head", "mass", "uniform", "is_sink"]
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in range(3) for head in range(4)]
    assert done.stderr == ""


def test_out_and_plot_write_whole_files(run, gpt2_random, tmp_path):
    out, plot = tmp_path / "sinks.csv", tmp_path / "sinks.svg"
    done = run("sinks", str(gpt2_random), "--tokens", "80", "--format", "csv", "--out", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert out.read_text().startswith("layer,mass,uniform,sink_rate")
    assert plot.read_text().rstrip().endswith("</svg>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sinks.csv", "sinks.svg"]
    assert done.stdout == ""


def test_several_pictures_at_once(run, gpt2_random, tmp_path):
    paths = [tmp_path / f"sinks.{ending}" for ending in ("svg", "png", "pdf")]
    plots = [word for path in paths for word in ("--plot", path)]
    done = run("sinks", gpt2_random, "--tokens", 80, "--quiet", *plots)
    assert done.returncode == 0
    assert [path.read_bytes()[:4] for path in paths] == [b"<?xm", b"\x89PNG", b"%PDF"]


def test_control_repeat_and_random_say_what_was_read(run, gpt2_random):
    for control, name in (("repeat", "one id repeated"), ("random", "random ids")):
        done = run("sinks", str(gpt2_random), "--tokens", "80", "--format", "json", "--control", control)
        record = json.loads(done.stdout)["run"]
        assert (record["control"], record["passage"], record["passage_sha256"]) == (control, name, "")
        assert (record["control_id"] is None) == (control == "random")


def test_interrupt_is_130_and_leaves_nothing(gpt2_random, tmp_path):
    # tests that were started in the background hand down an ignored SIGINT
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from kvprobe.cli.main import main; main()"
    command = [sys.executable, "-c", code, "sinks", str(gpt2_random)]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "a")], stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("loading")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", ["ImportError('a part is missing')", "BaseException('panic')", "SystemExit(1)"])
def test_an_interrupt_that_comes_out_as_another_error_is_130_too(tmp_path, error):
    # as an import that is interrupted may turn it into an ImportError, or panic
    code = f"""
import os, signal
from kvprobe.cli import main as cli
from kvprobe.models import loading
def load_spec(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**9):
            pass
    except KeyboardInterrupt:
        raise {error}
loading.load_spec = load_spec
signal.signal(signal.SIGINT, signal.default_int_handler)
cli.main(["cache", "./here"])
"""
    (tmp_path / "here").mkdir()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (130, "kvprobe: interrupted\n")


NAMED = "m\x1b[31m\u202e\udcff"


def test_names_that_hide_or_steer_are_shown_as_they_are(run, gpt2_random, tmp_path):
    # safetensors' own reader opens no path that is not UTF-8
    model, text = tmp_path / NAMED.removesuffix("\udcff"), tmp_path / f"{NAMED}.txt"
    shutil.copytree(gpt2_random, model)
    text.write_bytes((model / "merges.txt").read_bytes())
    there = ["sinks", model, "--tokens", "80", "--text", text]
    table = run(*there, "--plot", tmp_path / "a.svg")
    written = run(*there, "--format", "csv", "--out", tmp_path / "a.csv")
    document = json.loads(run(*there, "--format", "json").stdout)
    assert (table.returncode, written.returncode) == (0, 0)
    # half of a surrogate pair is no character of a JSON document
    passage = text.name.replace("\udcff", r"\udcff")
    assert (document["run"]["model"], document["run"]["passage"]) == (model.name, passage)
    for shown in (table.stdout, table.stderr, written.stderr, (tmp_path / "a.csv").read_text()):
        assert shown.replace("\n", "").isprintable()
    assert r"m\x1b[31m\u202e\udcff.txt" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize("arguments", [[NAMED], [f"--{NAMED}"], ["gpt2", "--tokens", NAMED], ["gpt2", "--text", NAMED]])
def test_errors_show_what_cannot_be_seen(run, arguments):
    done = run("sinks", *arguments)
    assert done.returncode in (1, 2)
    assert done.stderr.replace("\n", "").isprintable()
    assert r"\x1b[31m\u202e" in done.stderr


def test_a_prompt_that_is_not_utf_8_is_refused(run):
    done = run("generate", "nosuch", "naïve \udcff")
    assert done.returncode == 1
    assert done.stderr == "kvprobe: the prompt is not UTF-8: byte 0xff at offset 7; convert it to UTF-8 first\n"


def test_a_model_in_the_home_of_nobody_is_one_line(run):
    done = run("sinks", "~nosuchuser/model", "--quiet")
    assert done.returncode == 1
    assert done.stderr.startswith("kvprobe: '~nosuchuser/model' names a user who has no home directory; ")


def test_a_panic_of_a_library_is_one_line_too(run, gpt2_random, monkeypatch):
    # as pyo3's PanicException, which is no Exception
    def panic(*_, **__):
        raise type("PanicException", (BaseException,), {})("called `Result::unwrap()`\non an `Err` value")

    monkeypatch.setattr("kvprobe.models.loading.load", panic)
    done = run("sinks", gpt2_random)
    assert done.returncode == 1
    assert done.stderr.startswith("kvprobe: PanicException: called `Result::unwrap()` on an `Err` value (unexpected")


def test_a_closed_standard_output_is_told_and_a_file_is_written(tmp_path):
    shell = f"{sys.executable} -m kvprobe cache gpt2 >&-"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "kvprobe: standard output is closed: name a file with --out\n")
    shell = f"{sys.executable} -m kvprobe cache gpt2 --out {tmp_path / 'bill'} >&-"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "bill").is_file()


def test_a_closed_pipe_is_met_in_silence(gpt2_random):
    shell = f"{sys.executable} -m kvprobe sinks {gpt2_random} --tokens 80 --quiet | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_sinks_gpt2_comes_from_the_hub_once_and_then_needs_none(gpt2_random, tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "KVPROBE_"))}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "KVPROBE_HOME": str(tmp_path / "kvprobe")}

    def sinks(endpoint):
        return subprocess.run(
            [
                sys.executable,
                "-c",
                "from kvprobe.cli.main import main; main()",
                *["sinks", "--tokens", "80", "--format", "json"],
            ],
            env=environment | {"HF_ENDPOINT": endpoint},
            capture_output=True,
            text=True,
            check=False,
        )

    nowhere = sinks("http://127.0.0.1:1")
    assert nowhere.returncode == 1
    assert nowhere.stdout == ""
    assert "no model 'gpt2'" in nowhere.stderr.splitlines()[-1]
    assert "kvprobe pull" in nowhere.stderr.splitlines()[-1]
    with Hub({"openai-community/gpt2": gpt2_random}, aliases={"gpt2": "openai-community/gpt2"}) as hub:
        first = sinks(hub.url)
    assert first.returncode == 0, first.stderr
    assert "downloading gpt2" in first.stderr
    second = sinks(hub.url)
    assert "downloading" not in second.stderr
    one, two = json.loads(first.stdout), json.loads(second.stdout)
    assert one["rows"] == two["rows"]
    assert (one["run"]["model"], one["run"]["source"], one["run"]["revision"]) == ("gpt2", "hub", COMMIT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["window", "--text", "bundled", "--text", "manual"], "--text takes one value and is given 2 times"),
        (
            ["sinks", "nowhere", "--tokens=9", "--tokens", 9, "--tokens", 9],
            "--tokens takes one value and is given 3 times",
        ),
        (["report", "--out", "a.html", "--out", "b.html"], "--out takes one value and is given 2 times"),
        (["generate", "hi", "--seed", 1, "--seed", 1], "--seed takes one value and is given 2 times"),
        (["sinks", "nowhere", "--out", "x.png"], "'x.png' would hold no picture: --plot x.png draws a picture"),
        (["sinks", "nowhere", "--format", "json", "--out", "x.SVG"], "--plot x.SVG draws a picture"),
        (["report", "nowhere", "--out", "x.pdf"], "'x.pdf' would hold no picture: give another ending"),
    ],
)
def test_an_option_given_twice_and_a_picture_in_out_are_usage_errors(main, arguments, says):
    done = main(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_only_a_name_that_nobody_typed_is_said_to_be_the_default(main, monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for default, typed in ((["sinks"], ["sinks", "gpt2"]), (["generate", "hi"], ["generate", "gpt2", "hi"])):
        assert "; MODEL defaults to gpt2" in main(*default).stderr
        done = main(*typed)
        assert done.returncode == 1
        assert "MODEL defaults" not in done.stderr


def test_what_the_default_model_refuses_names_the_option_that_was_typed(main, gpt2_random, tmp_path, monkeypatch):
    shutil.copytree(gpt2_random, tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    done = main("sinks", "--tokens", 300, "--quiet")
    assert done.returncode == 1
    assert done.stderr == (
        "kvprobe: gpt2 has 256 positions, fewer than 300 tokens: use --tokens 256; MODEL defaults to gpt2\n"
    )
