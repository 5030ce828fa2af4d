"""Experiments give what the arithmetic gives, with a record that can remake it, and sentences that say no more."""

import math
from dataclasses import replace

import pytest
import torch

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.experiments import gqa
from kvprobe.experiments.cache import Cache, KnownShape
from kvprobe.experiments.latency import Latency
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.experiments.memory import Memory, exact_caches
from kvprobe.experiments.relief import Relief, _finished
from kvprobe.experiments.sinks import Sinks
from kvprobe.experiments.window import Window
from kvprobe.models.subject import prepare
from kvprobe.probes import mass
from kvprobe.probes.losses import token_losses
from kvprobe.probes.quantised import quantising, stored
from kvprobe.results import phrases
from kvprobe.results.result import Result
from kvprobe.shape import levers
from support.models import write_random


@pytest.fixture(scope="module")
def directory(gpt2_tokenizer_files, tmp_path_factory):
    return str(write_random(tmp_path_factory.mktemp("experiments") / "llama", "llama", gpt2_tokenizer_files))


@pytest.fixture(scope="module")
def subject(directory):
    return prepare(directory, tokens=96, device="cpu")


def test_one_record_for_the_model_and_for_model_and_passage(subject):
    loaded = subject.loaded.record()
    assert loaded["model"] == "llama"
    assert loaded.items() < subject.record().items()
    assert set(subject.record()) - set(loaded) >= {"passage", "passage_sha256", "ids_sha256", "n_tokens", "bos"}


def test_without_a_number_of_tokens_a_subject_is_the_whole_text(directory, tmp_path):
    (tmp_path / "text").write_text("ab,cd." * 70)
    whole = {"text": str(tmp_path / "text"), "tokens": None, "device": "cpu"}
    assert prepare(directory, unlimited=True, **whole).passage.n_tokens == 420
    with pytest.raises(KvprobeError, match="256 positions, fewer than 420 tokens"):
        prepare(directory, **whole)


def test_sinks_are_the_mass_that_was_measured(subject):
    result = Sinks(queries_from=10, epsilon=0.1).run(subject)
    measured = mass.measure(subject.model, subject.input_ids, queries_from=10, positions=True)
    assert [row["mass"] for row in result.rows] == pytest.approx(measured.token0.mean(-1).tolist())
    assert result.run["mass"] == pytest.approx(float(measured.token0.mean()))
    assert [row["head_mass"] for row in result.rows] == measured.token0.tolist()
    assert f"{result.run['mass']:.3f} of all attention is on token 0" in Sinks.sentence(result)
    with pytest.raises(ValueError, match="epsilon must be a number between 0 and 1, got nan"):
        Sinks(epsilon=math.nan).run(subject)


def test_rows_by_head_are_those_by_layer_and_a_sink_has_more_than_epsilon():
    layers = [{"layer": 0, "uniform": 0.1, "head_mass": [0.5, 0.75]}, {"layer": 4, "uniform": 0.2, "head_mass": [0.25]}]
    found = Sinks.by_head(Result("sinks", layers, {"epsilon": 0.5}))
    fields = ("layer", "head", "mass", "uniform", "is_sink")
    rows = [(0, 0, 0.5, 0.1, False), (0, 1, 0.75, 0.1, True), (4, 0, 0.25, 0.2, False)]
    assert found == Result("sinks", [dict(zip(fields, row, strict=True)) for row in rows], {"epsilon": 0.5})


def test_a_control_is_what_the_record_says_was_read(subject):
    repeated = Sinks(control="repeat").run(subject)
    assert repeated.run["passage"] == "one id repeated"
    assert repeated.run["control_id"] == subject.passage.first_content_id
    assert repeated.run["ids_sha256"] != subject.record()["ids_sha256"]


def test_a_window_record_remakes_its_table(subject):
    result = Window(windows=(8, 16), sinks=(0, 2), score_from=40, seed=3).run(subject)
    run = result.run
    assert (run["windows"], run["sinks"], run["score_from"], run["n_targets"]) == ([8, 16], [0, 2], 40, 55)
    assert "blocks of 8 tokens" in run["interval"]
    names = ("windows", "sinks", "positions", "score_from", "sink_choice", "drop_sink_logits", "seed")
    again = Window(**{name: run[name] for name in names}).run(subject)
    assert again.rows == result.rows


@pytest.mark.parametrize(("settings", "expected"), [({}, [0, 1, 4]), ({"positions": "recompute"}, [0])])
def test_sinks_left_open_are_those_that_apply(subject, settings, expected):
    assert Window(windows=(8,), **settings).run(subject).run["sinks"] == expected


def test_a_lowrank_record_remakes_its_table(subject):
    result = Lowrank(ranks=(8, 4), basis="heldout", seed=2).run(subject)
    run = result.run
    assert (run["fit_text"]["offset"], run["n_fitted"], run["ranks"]) == (96, 96, [8, 4])
    names = ("ranks", "of", "stage", "basis", "score_from", "allocate", "seed")
    again = Lowrank(**{name: run[name] for name in names}, center=run["centered"]).run(subject)
    assert again.rows == result.rows
    assert "a basis of later tokens of the same text" in Lowrank.sentence(result)
    with pytest.raises(ValueError, match="fit_text needs basis heldout, not basis oracle"):
        Lowrank(fit_text=subject.text).run(subject)


def test_a_spectrum_says_the_ranks_of_its_rows(subject):
    result = Lowrank(of="k").spectrum(subject)
    ranks = sorted({row["layer"]: row["rank_99"] for row in result.rows if row["stage"] == "post_rope"}.values())
    said = Lowrank.sentence(result)
    assert f"energy of the keys (post_rope) lie in {ranks[0]} to {ranks[2]} of 16 directions" in said
    assert said.endswith(f"the median is {ranks[1]}")


@pytest.mark.parametrize(
    ("low", "delta", "high", "said"),
    [
        (0.1, 0.25, 0.4, "rises by 0.250 nat a token (95 % interval +0.100 to +0.400)"),
        (-0.4, -0.25, -0.1, "falls by 0.250 nat a token (95 % interval −0.400 to −0.100)"),
        (-0.1, 0.25, 0.4, "does not differ measurably from the full pass (+0.250 nat a token, "),
        (-0.4, -0.25, 0.1, "does not differ measurably from the full pass (−0.250 nat a token, "),
    ],
)
def test_a_sentence_claims_no_more_than_the_interval(low, delta, high, said):
    assert phrases.change_of({"delta": delta, "delta_low": low, "delta_high": high}).startswith(said)


RUN = {
    "model": "m",
    "passage": "p",
    "n_tokens": 1024,
    "has_bos": False,
    "positions": "absolute",
    "gpu": None,
    "cpu": "c",
}


def test_the_window_sentence_is_of_the_smallest_window():
    def row(window, n_sink, delta):
        return {"window": window, "n_sink": n_sink, "delta": delta, "delta_low": delta - 0.1, "delta_high": delta + 0.1}

    rows = [row(None, 0, 0.0), row(8, 0, 3.0), row(8, 1, 1.0), row(8, 4, 0.5), row(16, 0, 2.0)]
    said = Window.sentence(Result("window", rows, RUN))
    assert said.startswith("m, p, 1,024 tokens (no BOS): with the last 8 tokens (absolute positions) and no sinks the ")
    assert "rises by 3.000" in said
    assert "; with 4 sinks it rises by 0.500" in said


@pytest.mark.parametrize(("window", "cuts"), [(1023, True), (1024, False), (4096, False)])
def test_a_window_that_cuts_nothing_is_not_said_to_differ_in_nothing(window, cuts):
    same = {"n_sink": 0, "delta": 0.0, "delta_low": 0.0, "delta_high": 0.0}
    said = Window.sentence(Result("window", [{"window": None, **same}, {"window": window, **same}], RUN))
    assert ("identical" in said) is cuts
    assert (f"a window of {window:,} tokens cuts nothing: the passage has 1,024" in said) is not cuts


def test_the_latency_sentence_is_of_the_longest_context():
    def row(phase, context, ms):
        more = {"bound": "bandwidth", "fraction_of_ceiling": 0.5, "batch": 1}
        return {"phase": phase, "context": context, "ms_median": ms} | more

    rows = [row("naive", 128, 40), row("cached", 128, 9), row("naive", 512, 100), row("cached", 512, 10)]
    said = Latency.sentence(Result("latency", rows, RUN))
    assert said == (
        "m on c: at 512 tokens one more takes 10.0 ms with a cache and 100.0 ms without (10.0 times as long); with it, "
        "50% of what its memory allows is reached"
    )
    assert Latency.sentence(Result("latency", rows[:1], RUN)) == "m: naive at 128 tokens takes 40.0 ms"
    above = [row("cached", 128, 9) | {"fraction_of_ceiling": 1.09}]
    assert "; with it, more than was measured of its memory: " in Latency.sentence(Result("latency", above, RUN))
    loaded = Latency.sentence(Result("latency", rows, RUN | {"busy": ["other work"]}))
    assert loaded == f"{said}; busy machine, not to be quoted"


@pytest.mark.parametrize(
    ("kv_heads", "missing", "said"), [([8], [], False), ([4, 1], [], True), ([8, 1], ["8"], False)]
)
def test_the_words_of_a_training_miss_multi_head_where_nobody_asked_for_it(kv_heads, missing, said):
    nothing = dict.fromkeys(("low", "high", "difference", "difference_low", "difference_high", "p_value", "verdict"))
    row = {"n_kv_heads": kv_heads[-1], "n_seeds": 1, "mean": 1.5, "best_steps": [1, 1], "last": 2.0, **nothing}
    run = {"corpus": "c", "steps": 600, "protocol": "p", "pool": False, "uptrain": None, "margin": 0.05, "n_heads": 8}
    sentences = gqa.sentences(Result("gqa", [row], run | {"kv_heads": kv_heads, "missing": missing, "summary": [row]}))
    assert any("add --kv-heads 8" in sentence for sentence in sentences) is said


def test_the_words_of_an_uptraining_name_the_control_where_there_was_one():
    run = {"corpus": "c", "steps": 600, "protocol": "p", "uptrain": 0.004, "n_heads": 8, "kv_heads": [8, 2]}
    run |= {"uptrain_steps": 2}
    assert phrases.training_of(run) == "c, 600 steps, p; then heads pooled and uptrained for 2 steps, multi-head too"
    assert phrases.training_of(run | {"kv_heads": [2]}).endswith("uptrained for 2 steps")
    assert phrases.training_of(run | {"kv_heads": [2], "uptrain_steps": 1}).endswith("uptrained for 1 step")
    assert phrases.training_of(run | {"uptrain": None}) == "c, 600 steps, p"


def test_a_bill_by_hand(subject):
    result = Cache(contexts=(128,), window=16, n_sink=4).run(KnownShape(subject.loaded.spec, {"model": "tiny"}))
    # 3 layers, K and V of 2 heads of 8, float32
    assert result.rows[0]["bytes"] == 128 * 384
    assert Cache.sentence(result).startswith(
        "tiny: the cache of 128 tokens takes 48 KiB at float32, and one more token"
    )
    drawn = levers.growth(result.rows, result.run)
    assert [row["bytes"] for row in drawn if row["lever"] == "as it is"][:2] == [128 * 384, 256 * 384]


def test_the_memory_sentence_names_who_holds_more(subject):
    result = Memory(contexts=(8, 40)).run(subject.loaded)
    assert exact_caches(result) == ["full", "rolling", "hf dynamic", "hf static"]
    assert Memory.sentence(result) == (
        "llama: full, rolling, hf dynamic, hf static hold what the formula says, to the byte; fused views keep 15 KiB "
        "alive at 40 tokens that nothing reads, 2.00 times the formula in all"
    )


def test_what_has_few_enough_values_is_stored_exactly():
    # four even steps are 2 bits, whatever the group's least value and step
    x = torch.tensor([[-1.0, 0.5, 2.0, 3.5, 10.0, 10.25, 10.5, 10.75], [7.0] * 8])
    assert stored(x, 2, group=4).equal(x)
    assert not stored(x, 2, group=8).equal(x)
    # a group that is not whole has its own step
    some = x[:, [0, 1, 2, 3, 4, 7]]
    assert stored(some, 2, group=4).equal(some)


def test_what_comes_back_is_the_nearest_step():
    x = torch.tensor([[0.0, 1.0, 1.4, 1.6, 3.0]])
    assert stored(x, 2).tolist() == [[0, 1, 1, 2, 3]]
    for spread in (1.0, 1e-3):
        x = spread * torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        for bits in (8, 4, 2):
            step = (high - low) / (2**bits - 1)
            # half a step, and what float16 rounds of the least value and, over all steps, of the step: 2^-11 of each,
            # or half of its smallest number
            rounding = (low.abs() + (high - low)) / 2**11 + 2**bits * 2.0**-25
            assert bool(((stored(x, bits) - x).abs() <= step / 2 + rounding).all())


def test_many_bits_change_no_loss_and_few_do(subject):
    plain = token_losses(subject.model, subject.input_ids, score_from=48)
    fine, coarse = (
        token_losses(subject.model, subject.input_ids, score_from=48, attend=quantising(bits)) for bits in (14, 2)
    )
    assert fine == pytest.approx(plain, abs=0.02)
    assert float((coarse - plain).abs().max()) > 0.1
    with pytest.raises(ValueError, match="bits must be between 1 and 16, got 0"):
        quantising(0)


def test_relief_by_hand(subject):
    result = Relief(windows=(12,), ranks=(8,), bases=("oracle", "heldout")).run(subject)
    rows = {row["lever"]: row for row in result.rows}
    # 96 tokens of 3 layers of K and V of 2 heads of 8, float32
    full = 96 * 384
    expected = {
        "as it is": full,
        "window 12 + 4 sinks": 16 * 384,
        # 8 numbers a token, and 8 vectors 32 wide
        "rank 8, oracle basis": 3 * 4 * 8 * (96 + 32),
        "rank 8, heldout basis": 3 * 4 * 8 * (96 + 32),
        # K and V of 16: their codes, and 4 bytes of scale and zero point each
        "8-bit storage": 96 * 3 * 2 * (16 + 4),
        "4-bit storage": 96 * 3 * 2 * (8 + 4),
    }
    assert {name: row["bytes"] for name, row in rows.items()} == expected
    assert rows["rank 8, heldout basis"]["basis_bytes"] == 3 * 4 * 8 * 32
    assert {name: row["bytes_per_token"] for name, row in rows.items()} == {n: b / 96 for n, b in expected.items()}
    assert rows["4-bit storage"]["relief"] == full / expected["4-bit storage"]
    cell = Window(windows=(12,), sinks=(4,)).run(subject).rows[1]
    assert {name: rows["window 12 + 4 sinks"][name] for name in ("loss", "delta_low")} == {
        name: cell[name] for name in ("loss", "delta_low")
    }
    assert rows["as it is"]["delta"] == 0


def test_the_front_is_what_nothing_beats():
    def row(n_bytes, loss, basis=None):
        return {"bytes": n_bytes, "loss": loss, "basis": basis}

    rows = [row(100, 3.0), row(50, 3.1), row(60, 3.1), row(20, 4.0), row(20, 4.5), row(100, 3.0), row(10, 4.0)]
    found = _finished(rows, 10)
    # two that are the same do not beat each other
    assert [each["on_front"] for each in found] == [True, True, False, False, False, True, True]
    assert [each["relief"] for each in found][:2] == [1, 2]
    # what saw the scored tokens is on no front and keeps nothing off it
    found = _finished([*rows, row(5, 2.0, "oracle"), row(5, 2.0, "heldout")], 10)
    assert [each["on_front"] for each in found] == [False] * 8 + [True]
    found = _finished([*rows, row(5, 2.0, "oracle")], 10)
    assert [each["on_front"] for each in found] == [True, True, False, False, False, True, True, False]


def test_local_layers_hold_latents_of_their_window_alone(gpt2_tokenizer_files, tmp_path):
    directory = write_random(tmp_path / "gemma", "gemma3_text", gpt2_tokenizer_files)
    local = prepare(str(directory), tokens=64, device="cpu")
    result = Relief(windows=(16,), ranks=(6,), bases=("oracle",), bits=(8,)).run(local)
    # two layers of three keep 8 tokens; width 2 · 2 · 12
    by_kind = {row["kind"]: row["bytes"] for row in result.rows}
    assert by_kind["model"] == 4 * 48 * (8 + 64 + 8)
    assert by_kind["window"] == 4 * 48 * (8 + 20 + 8)
    assert by_kind["latent"] == 4 * 6 * (8 + 64 + 8) + 3 * 4 * 6 * 48


def test_relief_is_refused_where_its_bytes_are_not_known(gpt2_tokenizer_files, tmp_path):
    directory = write_random(tmp_path / "latent", "deepseek_v3", gpt2_tokenizer_files)
    with pytest.raises(UnsupportedModelError, match="the deepseek_v3 family does not keep one K"):
        Relief().run(prepare(str(directory), tokens=32, device="cpu"))


def test_the_relief_sentence_leaves_out_what_saw_the_scored_tokens():
    def row(lever, basis, n_bytes, low):
        changes = {"delta": low + 0.1, "delta_low": low, "delta_high": low + 0.2, "loss": low, "on_front": True}
        return {"lever": lever, "basis": basis, "bytes": n_bytes, "relief": 100 / n_bytes} | changes

    rows = [row("as it is", None, 100, 0.0), row("o", "oracle", 10, -0.5), row("w", None, 25, 0.1)]
    rows.append(row("b", None, 50, -0.05))
    said = Relief.sentence(Result("relief_map", rows, RUN))
    assert "of 2 levers that never saw the scored tokens the smallest cache" in said
    assert "is b, 2.0 times smaller: there the loss does not differ" in said
    assert "none takes less memory" in Relief.sentence(Result("relief_map", rows[:3], RUN))
    rows.append(row("rank 8, heldout basis", "heldout", 20, -0.05))
    assert "is rank 8, heldout basis (of later tokens of the same text), 5.0 times" in Relief.sentence(
        Result("relief_map", rows, RUN)
    )


def test_a_subject_of_other_ids_is_another_record(subject):
    other = replace(subject, passage=replace(subject.passage, ids=subject.passage.ids.flip(0)))
    assert other.record()["ids_sha256"] != subject.record()["ids_sha256"]
