"""Published figures beside ours: tolerances by hand, and only GPT-2's weights are compared with GPT-2's figures."""

import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from analyses import identity, reproduce
from analyses.identity import WEIGHTS_SHA1, identify
from analyses.reproduce import Claim
from kvprobe.bench import cache_memory
from kvprobe.errors import KvprobeError
from kvprobe.progress import silent
from kvprobe.results.phrases import PUBLISHED
from kvprobe.results.result import Result
from support.models import write_gpt2_random

PLAIN = {"block": "b", "what": "w", "unit": "u", "source": "s", "run": "r", "field": "x"}


@pytest.fixture(scope="module")
def shaped(gpt2_tokenizer_files, tmp_path_factory):
    """As many layers, heads and positions as GPT-2 has, narrow, with random weights and its own tokenizer."""
    directory = tmp_path_factory.mktemp("reproduce") / "shaped"
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 144, "n_positions": 1024}
    return write_gpt2_random(directory, gpt2_tokenizer_files, **shape)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"word{i * i % 977} and" for i in range(2000)))
    return str(path)


@pytest.fixture
def weights_alone(monkeypatch):
    """Only what reads the model runs: the rest is another test's."""
    every = reproduce.Bench.blocks

    def blocks(bench):
        return {
            name: run if name in ("sinks", "window", "lowrank") else lambda: [] for name, run in every(bench).items()
        }

    monkeypatch.setattr(reproduce.Bench, "blocks", blocks)
    monkeypatch.setattr(reproduce, "_find", _find_in_some)


def _find_in_some(claim, rows, quick):
    return (claim.find(rows), None) if rows else (None, "it is left out")


@pytest.mark.parametrize(
    ("tolerance", "agreeing", "differing"),
    [
        ({"abs": 0.5}, (9.5, 10.5), (9.49, 10.51)),
        ({"abs": 0}, (10,), (9.999, 10.001)),
        ({"rel": 0.02}, (9.8, 10.2), (9.79, 10.21)),
        ({"factor": 4}, (2.5, 40), (2.49, 40.1, 0)),
    ],
)
def test_what_agrees(tolerance, agreeing, differing):
    claim = Claim(**PLAIN, value=10, **tolerance)
    assert [claim.agrees(ours) for ours in (*agreeing, *differing)] == [True] * len(agreeing) + [False] * len(differing)


def test_ours_is_one_row_in_the_published_unit():
    rows = [{"rank": None, "x": 2048}, {"rank": 8, "x": 4096}]
    claim = {**PLAIN, "value": 2, "times": 1 / 1024}
    assert Claim(**claim, where={"rank": "null"}).find(rows) == 2
    assert Claim(**claim, where={"rank": 8}).find(rows) == 4
    for where in ({"rank": 9}, {}):
        with pytest.raises(ValueError, match="rows are"):
            Claim(**claim, where=where).find(rows)


def test_every_published_row_is_complete():
    found = reproduce.claims()
    assert {claim.block for claim in found} == {
        "same_logits", "latency", "end_to_end", "memory", "roofline", "gqa_module", "gqa", "lowrank", "sinks", "window",
        "exercises", "bills",
    }  # fmt: skip
    names = [(claim.block, claim.what) for claim in found]
    assert len(set(names)) == len(names)
    for claim in found:
        tolerances = [claim.abs, claim.rel, claim.factor]
        comparable = claim.needs in (None, "weights")
        assert claim.needs in {None, "weights", *reproduce.REASONS}, claim
        # a row that can be compared says where ours stands and how near it must be, in one way
        assert (sum(each is not None for each in tolerances) == 1) is comparable, claim
        assert bool(claim.field and claim.unit) or not comparable, claim


def test_no_time_is_compared_so_that_no_busy_machine_can_agree_or_differ():
    times = {"ms", "ms a token", "tokens/s", "s"}
    timed = [claim for claim in reproduce.claims() if claim.unit in times or claim.block in ("latency", "end_to_end")]
    assert timed
    assert {claim.needs for claim in timed} <= {"gpu", "jax"}


def test_random_weights_are_never_compared(shaped, text, weights_alone):
    result = reproduce.run(str(shaped), text=text, quick=True)
    on_weights = [row for row in result.rows if row["block"] in ("sinks", "window", "lowrank")]
    assert len(on_weights) == 13 + 8 + 6
    for row in on_weights:
        assert (row["ours"], row["verdict"]) == (None, "not run here")
        assert row["because"].startswith("shaped is not taken for GPT-2: the SHA-1 of its weights is not the published")
    assert str(shaped) not in result.to_json()


def test_the_published_checksum_is_what_has_them_compared(shaped, text, weights_alone, monkeypatch):
    real = identity.sha1_of
    monkeypatch.setattr(identity, "sha1_of", lambda path: WEIGHTS_SHA1 if path.suffix == ".safetensors" else real(path))
    result = reproduce.run(str(shaped), text=text)
    on_weights = [row for row in result.rows if row["block"] in ("sinks", "window", "lowrank")]
    assert {row["verdict"] for row in on_weights} == {"agrees", "differs"}
    assert all(row["ours"] is not None for row in on_weights)
    # random weights know nothing: their loss is no less than a guess among 50,257
    losses = [row for row in on_weights if row["what"].startswith("loss")]
    assert {row["verdict"] for row in losses} == {"differs"}
    assert all(row["ours"] > 10 for row in losses)
    uniform = next(row for row in on_weights if row["what"].startswith("attention spread evenly"))
    # the mean of 1/(q + 1) over the queries 64 to 1023
    assert uniform["ours"] == pytest.approx(sum(1 / (q + 1) for q in range(64, 1024)) / 960)
    assert uniform["verdict"] == "agrees"
    bench = reproduce.Bench(model=str(shaped), text=text, quick=True, progress=silent)
    with pytest.raises(KvprobeError, match="--quick leaves it out"):
        bench.lowrank()


def test_another_file_is_compared_tensor_by_tensor(shaped, tmp_path, monkeypatch):
    copy = tmp_path / "reference.safetensors"
    tensors = load_file(shaped / "model.safetensors")
    # as others keep them: without the prefix, and with the masks
    renamed = {name.removeprefix("transformer."): tensor.clone() for name, tensor in tensors.items()}
    save_file(renamed | {"h.0.attn.bias": torch.ones(2, 2)}, copy)
    with pytest.raises(KvprobeError, match=r"the reference reference.safetensors has the SHA-1 [0-9a-f]{40}"):
        reproduce.run(str(shaped), reference=str(copy))
    real = identity.sha1_of
    monkeypatch.setattr(identity, "sha1_of", lambda path: WEIGHTS_SHA1 if path == copy else real(path))
    found = identify(str(shaped), reference=str(copy))
    assert found.is_gpt2
    assert f"{len(tensors)} of {len(tensors)} tensors agree with the reference" in found.because
    renamed["h.3.ln_1.weight"][5] += 1e-6
    save_file(renamed, copy)
    found = identify(str(shaped), reference=str(copy))
    assert not found.is_gpt2
    assert found.because.endswith("the first that does not is h.3.ln_1.weight")
    del renamed["wpe.weight"], renamed["h.3.ln_1.weight"]
    save_file(renamed, copy)
    found = identify(str(shaped), reference=str(copy))
    assert not found.is_gpt2
    assert f"{len(tensors) - 2} of {len(tensors) - 2} tensors agree" in found.because


def test_trust_is_for_weights_that_were_trained_and_the_right_tokenizer(shaped, tmp_path, monkeypatch):
    narrow = identify(str(shaped), trust=True)
    assert not narrow.is_gpt2
    assert narrow.because.endswith("and its shape is not GPT-2's")
    monkeypatch.setitem(identity.SHAPE, "hidden_size", 144)
    assert identify(str(shaped), trust=True).because.endswith("but --trust says that they are GPT-2's")
    drawn = tmp_path / "drawn"
    shutil.copytree(shaped, drawn)
    tensors = load_file(drawn / "model.safetensors")
    tensors["transformer.ln_f.weight"] = torch.ones(144)
    save_file(tensors, drawn / "model.safetensors", metadata={"format": "pt"})
    found = identify(str(drawn), trust=True)
    assert (found.is_gpt2, found.because) == (False, "its norms are as they are initialised: random weights")
    (drawn / "merges.txt").write_text("#version: 0.2\n")
    found = identify(str(drawn), trust=True)
    assert not found.is_gpt2
    assert found.because.startswith("its merges.txt has the SHA-1")


def test_training_is_compared_where_it_was_run_whole(tmp_path):
    bench = reproduce.Bench(model="gpt2", text="", quick=True, progress=silent, results=tmp_path)
    with pytest.raises(KvprobeError, match=r"hours of training: python -m analyses\.gqa"):
        bench.gqa()
    means = {8: 1.6, 4: 1.511, 2: 1.4, 1: 1.66}
    summary = [{"n_kv_heads": n, "mean": mean} for n, mean in means.items()]
    run = {"protocol": PUBLISHED, "corpus": "time-machine", "uptrain": None, "pool": False}
    run |= {"missing": [], "summary": summary}
    Result("gqa", summary, run).save(tmp_path / "gqa")
    rows = bench.gqa()
    claims = {claim.what: claim for claim in reproduce.claims() if (claim.block, claim.field) == ("gqa", "mean")}
    verdicts = {what: claim.agrees(claim.find(rows)) for what, claim in claims.items()}
    assert len(verdicts) == 8
    # 1.4 is 0.11 below one run and just 0.1 below the other
    differing = {what for what, agrees in verdicts.items() if not agrees}
    assert differing == {
        "best loss, 2 KV heads",
        "best loss, 1 KV heads",
        "best loss, 1 KV heads, another run",
    }
    for change, words in (
        ({"missing": ["8 KV heads, seed 2"]}, "not finished: 8 KV heads, seed 2"),
        ({"summary": summary[:3]}, "not finished: 1 KV heads"),
        ({"protocol": "a smaller one"}, "not of the published protocol"),
        ({"corpus": "mine.txt"}, "not of the published protocol"),
        ({"uptrain": 0.1}, "not of the published protocol"),
        ({"summary": [{}]}, "cannot be read"),
        ({"summary": 7}, "cannot be read"),
    ):
        Result("gqa", summary, run | change).save(tmp_path / "gqa")
        with pytest.raises(KvprobeError, match=words):
            bench.gqa()
    (tmp_path / "gqa.json").write_text('{"analysis": "gqa", "rows"')
    with pytest.raises(KvprobeError, match="cannot be read"):
        bench.gqa()


def test_what_needs_no_weights_agrees_and_the_rest_says_why_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # what Hugging Face's caches hold is not published, and takes forwards of 124 million weights
    monkeypatch.setattr(cache_memory, "_foreign", lambda *_: iter(()))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "gpt2"}')
    done = CliRunner().invoke(reproduce.main, [str(tmp_path / "empty"), "--quick", "--save"])
    assert done.exit_code == 0, done.output
    result = Result.from_json((tmp_path / "results" / "reproduce.json").read_text())
    verdicts = {(row["block"], row["what"]): row["verdict"] for row in result.rows}
    assert "differs" not in verdicts.values()
    agreeing = {block for (block, _), verdict in verdicts.items() if verdict == "agrees"}
    assert agreeing == {"same_logits", "memory", "roofline", "gqa_module", "gqa", "exercises", "bills"}
    for row in result.rows:
        assert (
            (row["ours"] is None) == (row["verdict"] == "not run here") == bool(row["ours"] is None and row["because"])
        )
    # each of the rows that were not run says its own reason: that of what it needs, or that of its block
    needs = {(claim.block, claim.what): claim.needs or claim.block for claim in reproduce.claims()}
    because = {
        "memory": "--quick leaves it out",
        "gqa": "it takes hours of training: python -m analyses.gqa --cells DIRECTORY",
        "weights": "empty is not taken for GPT-2: it has no weights in safetensors",
        "gpu": "it is a time of a GPU that the text does not name, and times of two machines say nothing of each other",
        "jax": "kvprobe computes with torch and has no JAX",
    }
    left_out = [row for row in result.rows if row["verdict"] == "not run here"]
    for row in left_out:
        assert row["because"] == because[needs[row["block"], row["what"]]], row["what"]
    assert {needs[row["block"], row["what"]] for row in left_out} == because.keys()
    assert str(tmp_path) not in result.to_json()
    assert f"{len(result.rows)} published figures" in done.output


def test_what_is_mistyped_is_the_users_to_mend_and_no_reason_to_leave_rows_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce.Bench, "blocks", None)
    with pytest.raises(KvprobeError, match="there is no reference nosuch"):
        reproduce.run("gpt2", reference=str(tmp_path / "nosuch"))
    with pytest.raises(KvprobeError, match=r"there is no directory .*nosuch: name the one with GPT-2's weights"):
        reproduce.run(str(tmp_path / "nosuch"))


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", b"junk"), ("model.safetensors", b""), ("model.safetensors.index.json", b"{")],
)
def test_damaged_weights_are_nobodys(shaped, tmp_path, monkeypatch, name, content):
    monkeypatch.setitem(identity.SHAPE, "hidden_size", 144)
    directory = tmp_path / "damaged"
    shutil.copytree(shaped, directory)
    if name.endswith("json"):
        (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(content)
    with pytest.raises(KvprobeError, match=r"damaged|not a safetensors file"):
        identify(str(directory), trust=True)
