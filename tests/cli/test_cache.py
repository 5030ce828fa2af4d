"""``kvprobe cache`` as its users meet it: names, files, numbers, refusals, and a start that waits for nothing."""

import json
import subprocess
import sys
from functools import partial

import pytest
from matplotlib.figure import Figure

from kvprobe.experiments.cache import Cache, KnownShape
from kvprobe.models import hub
from kvprobe.plots import cache as plot
from kvprobe.results.result import Result
from kvprobe.shape import levers, published
from kvprobe.shape.spec import Spec
from support.models import only_document


@pytest.fixture
def run(main):
    return partial(main, "cache")


@pytest.fixture
def document(run):
    return lambda *arguments: only_document(run(*arguments, "--format", "json"))


@pytest.fixture
def no_network(monkeypatch):
    def fetch(repo, **_):
        raise LookupError("the hub could not be reached")

    monkeypatch.setattr(hub, "fetch", fetch)


@pytest.fixture
def config_only(tmp_path):
    """A directory that holds a config.json and nothing else: one layer, one head of 8."""
    directory = tmp_path / "shape"
    directory.mkdir()
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 64, "vocab_size": 10}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_published_name_needs_neither_weights_nor_heavy_imports():
    code = (
        "import sys\nfrom kvprobe.cli.main import main\n"
        "try: main(['cache', 'llama-2-70b'])\nexcept SystemExit as done: print(done.code)\n"
        "heavy = ('torch', 'transformers', 'numpy', 'matplotlib', 'huggingface_hub', 'kvprobe.models.loading')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["0", "[]"]


def test_rows_and_record(document):
    found = document("llama-2-70b", "--dtype", "bfloat16", "--context", 4096, "--batch", 2)
    assert found["analysis"] == "cache"
    first = found["rows"][0]
    assert {
        "lever",
        "support",
        "context",
        "batch",
        "dtype",
        "bytes",
        "bytes_per_token",
        "weights_bytes",
    } <= first.keys()
    assert (first["lever"], first["context"], first["batch"], first["dtype"]) == ("as it is", 4096, 2, "bfloat16")
    assert first["bytes"] == 2 * 4096 * 320 * 1024
    assert first["bytes_per_token"] == 320 * 1024
    assert first["weights_bytes"] == 2 * 68_976_648_192
    # 137,953,296,384 / (2 × 327,680) = 210,500.02
    assert first["outweighs_at"] == 210_501
    assert (first["support"], found["run"]["support"]) == ("known", "known")
    named = "model revision source family dtype batch weights_source n_parameters contexts window n_sink versions date"
    assert set(named.split()) <= found["run"].keys()
    assert (found["run"]["model"], found["run"]["source"]) == ("llama-2-70b", "catalogue")
    assert found["run"]["weights_source"] == "closed form of the configuration"


@pytest.mark.parametrize(
    ("config", "asked", "dtype", "said"),
    [
        ({"torch_dtype": "bfloat16"}, [], "bfloat16", "bfloat16 (the checkpoint's own)"),
        ({"dtype": "float16"}, [], "float16", "float16 (the checkpoint's own)"),
        ({"torch_dtype": "bfloat16"}, ["--dtype", "float32"], "float32", "float32: "),
        ({"torch_dtype": "float8_e4m3fn"}, [], "float32", "float32 (by default)"),
        ({}, [], "float32", "float32 (by default)"),
    ],
)
def test_it_counts_in_the_checkpoints_own_dtype_unless_told(document, run, config_only, config, asked, dtype, said):
    own = json.loads((config_only / "config.json").read_text())
    (config_only / "config.json").write_text(json.dumps(own | config))
    found = document(config_only, "--context", 10, *asked)
    assert found["run"]["dtype"] == found["rows"][0]["dtype"] == dtype
    assert found["rows"][0]["bytes"] == 10 * 2 * 8 * (4 if dtype == "float32" else 2)
    assert said in run(config_only, "--context", 10, *asked).stdout


def test_a_published_model_has_the_dtype_of_its_weights(document):
    dtypes = {name: document(name)["run"]["dtype"] for name in ("gpt2", "llama-2-70b", "deepseek-v3")}
    assert dtypes == {"gpt2": "float32", "llama-2-70b": "float16", "deepseek-v3": "bfloat16"}


def test_weights_can_be_given(document):
    found = document("llama-2-70b", "--weights-bytes", "140e9")
    assert found["run"]["weights_source"] == "given"
    at = {row["lever"]: row["outweighs_at"] for row in found["rows"]}
    assert (at["as it is"], at["as MHA, 64 KV heads"]) == (427_247, 53_406)
    assert at["window 1,024 + 4 sinks"] is None


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-70b-hf", "LLAMA-2-70B", "meta-llama/llama-2-70b-chat-hf"])
def test_hub_ids_and_any_case_mean_the_published_model(document, no_network, name):
    assert document(name)["run"]["model"] == "llama-2-70b"


def test_every_published_model_has_a_bill_and_a_source(document):
    for name, item in published.published().items():
        assert item.source
        assert document(name)["rows"][0]["bytes_per_token"] >= 0


def test_names_mean_one_model_each():
    names = [name.lower() for item in published.published().values() for name in (item.name, *item.also)]
    assert len(set(names)) == len(names)


def test_a_directory_needs_its_configuration_alone(document, config_only):
    found = document(config_only, "--context", 10)
    assert (found["run"]["model"], found["run"]["source"]) == ("shape", "directory")
    assert found["rows"][0]["bytes"] == 10 * 2 * 8 * 4
    assert str(config_only) not in json.dumps(found)


def test_a_directory_of_a_published_name_is_the_directory(document, config_only, monkeypatch):
    config_only.rename(config_only.parent / "gpt2")
    monkeypatch.chdir(config_only.parent)
    assert document("gpt2")["run"]["source"] == "directory"


def test_unknown_families_have_a_bill_and_no_weights(run, document, config_only):
    config = {"model_type": "nosuch", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    (config_only / "config.json").write_text(json.dumps(config | {"vocab_size": 10}))
    found = document(config_only)
    first = found["rows"][0]
    assert {row["support"] for row in found["rows"]} == {found["run"]["support"]} == {"plain"}
    assert (first["bytes_per_token"], first["weights_bytes"], first["outweighs_at"]) == (2 * 2 * 8 * 4, None, None)
    table = run(config_only).stdout
    assert "give --weights-bytes" in table
    assert "family nosuch: plain" in table
    assert "family gpt2: known" in run("gpt2").stdout


def test_a_key_that_could_change_the_cache_is_named_in_one_line(run, config_only):
    config = {"model_type": "nosuch", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    (config_only / "config.json").write_text(json.dumps(config | {"vocab_size": 10, "ssm_state_size": 4}))
    done = run(config_only)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "kvprobe: the configuration of this nosuch model says ssm_state_size, which could change what its layers keep, "
        "and the family is not known to kvprobe\n"
    )


def test_layers_that_differ_are_drawn_from_the_document_alone():
    config = {"model_type": "jamba", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    config |= {"vocab_size": 97, "num_key_value_heads": 2, "attn_layer_period": 8, "attn_layer_offset": 4}
    spec = Spec.from_config(config)
    result = Cache(contexts=(256,)).run(KnownShape(spec, {"model": "x", "revision": "", "source": ""}))
    kept = Result.from_json(result.to_json())
    grown = [row for row in levers.growth(kept.rows, kept.run) if row["lever"] == "as it is"]
    # one layer of K and V, two heads of 16; seven of Mamba, 128 channels of 16 and a convolution four deep
    assert grown[0]["bytes"] == 4 * (128 * 2 * 2 * 16 + 7 * 128 * (16 + 4))


def test_default_contexts_end_at_the_model(document):
    def contexts(name):
        return list(dict.fromkeys(row["context"] for row in document(name)["rows"]))

    assert contexts("gpt2") == [1024]
    assert contexts("llama-2-70b") == [1024, 4096]
    assert contexts("gemma-3-27b") == [1024, 8192, 131_072]


def test_an_unknown_name_says_what_can_be_named(run, no_network):
    done = run("nosuch-model", "--quiet")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvprobe: no model 'nosuch-model'")
    assert all(name in line for name in published.published())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--context", 0], "--context must be at least 1, got 0"),
        (["--batch", -1], "--batch must be at least 1, got -1"),
        (["--rank", 5000], "--rank must be between 1 and 1536, got 5000"),
    ],
)
def test_bad_numbers_are_one_line(run, arguments, says):
    done = run("gpt2", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"kvprobe: {says}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--weights-bytes", "nan"], "nan is not a finite number"),
        (["--weights-bytes", "1e30"], "1e+30 is not in the range 1<=x<=1e+18"),
        (["--window", 10**30], "is beyond 2^40, more than any machine holds"),
    ],
)
def test_numbers_beyond_any_machine_name_their_option(run, arguments, says):
    done = run("gpt2", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert arguments[0] in done.stderr


def test_the_picture_is_of_the_longest_context_and_can_be_made_from_the_document_alone(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "figure", lambda growth, relief, run: drawn.append((growth, relief)) or Figure())
    for contexts in ((4096, 1024), (1024, 4096)):
        contexts = [word for context in contexts for word in ("--context", context)]
        done = run("gpt2", *contexts, "--plot", tmp_path / "bill.svg", "--format", "json")
        Result.from_json(done.stdout).plot()
    assert all({row["context"] for row in relief} == {4096} for _, relief in drawn)
    assert all(growth == drawn[0][0] for growth, _ in drawn)
    assert [row["context"] for row in drawn[0][0] if row["lever"] == "as it is"][:3] == [128, 256, 512]


def test_the_table_reads_in_binary_units(run):
    done = run("gpt2", "--context", 4096)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["lever", "context", "bytes", "bytes_per_token", "relief", "outweighs_at", "stops_at"]
    # 4,096 × 72 KiB; 124,439,808 × 4 B / 72 KiB = 6,751.3
    assert lines[1].split() == ["as", "it", "is", "4,096", "288", "MiB", "72", "KiB", "1.0000", "6,752", "-"]
    assert "the model has 1,024 positions: contexts beyond them are arithmetic only" in done.stdout


def test_the_picture_is_written_whole(run, tmp_path):
    done = run("deepseek-v2", "--plot", tmp_path / "bill.svg", "--out", tmp_path / "bill.csv", "--format", "csv")
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "bill.csv").read_text().startswith("lever,kind,context,support,")
    svg = (tmp_path / "bill.svg").read_text()
    assert svg.rstrip().endswith("</svg>")
    assert "without its latent" in svg


ROWS = [
    {"lever": lever, "kind": kind, "context": context, "bytes": size * context, "weights_bytes": 4096}
    for context in (128, 256)
    for lever, kind, size in (("as it is", "model", 8), ("as MHA", "undone", 16), ("MQA", "heads", 2))
]


def test_growth_lines_are_the_rows():
    ax = plot.draw_growth(ROWS, Figure().subplots())
    assert {line.get_label(): line.get_xydata().tolist() for line in ax.lines[:3]} == {
        "as it is": [[128, 1024], [256, 2048]],
        "as MHA": [[128, 2048], [256, 4096]],
        "MQA": [[128, 256], [256, 512]],
    }
    assert list(ax.lines[3].get_ydata()) == [4096, 4096]


def test_relief_reaches_from_the_model_as_it_is_to_each_lever():
    ax = plot.draw_relief(ROWS[3:], Figure().subplots())
    assert list(ax.lines[0].get_xdata()) == [2048, 2048]
    assert [line.get_xydata().tolist() for line in ax.lines[1::2]] == [
        [[2048, place], [size, place]] for place, size in enumerate((2048, 4096, 512))
    ]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["as it is", "as MHA", "MQA"]
    assert [text.get_text() for text in ax.texts] == ["2 KiB", "4 KiB", "512 B"]
