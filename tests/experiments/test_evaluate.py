"""`kvprobe.evaluate` equals what is computed by hand, on a Hugging Face model and on our decoder."""

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

import kvprobe
from kvprobe.attention.capture import capture
from kvprobe.attention.masks import causal_keep
from kvprobe.decoder.model import from_hf
from kvprobe.errors import KvprobeError
from kvprobe.experiments.evaluate import Evaluate
from kvprobe.models.subject import prepare
from kvprobe.probes.intervals import paired_interval
from kvprobe.probes.losses import token_losses
from kvprobe.results.result import Result
from support.models import write_random


@pytest.fixture(scope="module")
def subject(gpt2_tokenizer_files, tmp_path_factory):
    directory = write_random(tmp_path_factory.mktemp("evaluate") / "llama", "llama", gpt2_tokenizer_files)
    # each token once: the first layer's keys of one token have one norm, and which of them is smaller is rounding
    ids = 3 + torch.randperm(94, generator=torch.Generator().manual_seed(0))[:64]
    return prepare(str(directory), ids=ids, device="cpu")


def small_norms(call):
    last = call.last(8)
    few = call.top(8, -call.key.norm(dim=-1), among=call.keep & ~last)
    return call.attend(keep=last | few)


def window(call, n):
    return call.attend(keep=call.last(n))


def untouched(call):
    return call.attend()


def by_loops(call):
    """The same keys as `small_norms`, chosen query by query and weighed with a softmax of our own."""
    group = call.n_heads // call.n_kv_heads
    output = torch.zeros(*call.query.shape[:3], call.value.shape[-1])
    for head in range(call.n_heads):
        key, value = call.key[0, head // group], call.value[0, head // group]
        norms = key.norm(dim=-1).tolist()
        for i in range(key.shape[0]):
            earlier = sorted(range(max(0, i - 7)), key=norms.__getitem__)[:8]
            kept = [*earlier, *range(max(0, i - 7), i + 1)]
            weights = (call.scale * key[kept] @ call.query[0, head, i]).softmax(-1)
            output[0, head, i] = weights @ value[kept]
    return output


def test_a_function_that_changes_nothing_is_said_to_be_identical(subject):
    result = kvprobe.evaluate(subject, untouched)
    assert "31 targets: with untouched the loss is identical to the full pass's; " in Evaluate.sentence(result)


def test_loss_interval_divergence_and_agreement_by_hand(subject):
    result = kvprobe.evaluate(subject, small_norms)
    full, own = result.rows
    model, ids = subject.model, subject.input_ids
    losses, plain = (token_losses(model, ids, score_from=32, attend=attend) for attend in (by_loops, None))
    assert own["loss"] == pytest.approx(float(losses.mean()), abs=1e-6)
    assert own["loss"] == float(token_losses(model, ids, score_from=32, attend=small_norms).mean())
    interval = paired_interval(losses, plain)
    assert [own[name] for name in ("delta", "delta_low", "delta_high")] == pytest.approx(
        [interval.delta, interval.low, interval.high], abs=1e-6
    )
    with torch.no_grad():
        p = model(ids, use_cache=False).logits[0, 32:-1].double().log_softmax(-1)
        with kvprobe.attending(model, by_loops):
            q = model(ids, use_cache=False).logits[0, 32:-1].double().log_softmax(-1)
    kld = (p.exp() * (p - q)).sum(-1)
    assert own["kld_mean"] == pytest.approx(float(kld.mean()), rel=1e-4)
    assert own["kld_p99"] == pytest.approx(float(kld.quantile(0.99)), rel=1e-4)
    assert own["top1_agreement"] == float((p.argmax(-1) == q.argmax(-1)).double().mean()) < 1
    assert full == {
        "attend": None, "loss": float(plain.mean()), "perplexity": pytest.approx(float(plain.mean().exp())),
        "delta": 0, "delta_low": 0, "delta_high": 0, "kld_mean": 0, "kld_p99": 0, "top1_agreement": 1,
    }  # fmt: skip


def test_our_decoder_gives_the_same(subject):
    ours = replace(subject, loaded=replace(subject.loaded, model=from_hf(subject.model)))
    for theirs, own in zip(*(kvprobe.evaluate(read, small_norms).rows for read in (subject, ours)), strict=True):
        assert own.pop("attend") == theirs.pop("attend")
        # float32 sums in another order
        assert own == pytest.approx(theirs, abs=1e-4)


def test_the_models_own_attention_changes_nothing(subject):
    first, own = kvprobe.evaluate(subject, untouched, score_from=10).rows
    assert own | {"attend": None} == first


def test_the_record_names_function_file_and_its_checksum_and_a_result_comes_back(subject, tmp_path):
    result = kvprobe.evaluate(subject, [small_norms, partial(window, n=4)], seed=3)
    file = Path(__file__)
    where = {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert result.run["attend"] == [{"name": name, **where} for name in ("small_norms", "window(n=4)")]
    assert [row["attend"] for row in result.rows] == [None, "small_norms", "window(n=4)"]
    assert (result.run["score_from"], result.run["n_targets"], result.run["seed"]) == (32, 31, 3)
    assert str(file.parent) not in result.to_json()
    result.save(tmp_path / "kept")
    again = Result.load(tmp_path / "kept")
    assert again == result
    assert [text.get_text() for text in again.plot().axes[0].get_yticklabels()] == ["small_norms", "window(n=4)"]


def test_a_function_without_a_file_is_named_alone(subject):
    names = {}
    exec("def mine(call):\n    return call.attend()", names)
    assert kvprobe.evaluate(subject, names["mine"]).run["attend"] == [{"name": "mine", "file": None, "sha256": None}]


def test_the_sentence_is_of_the_closest_function(subject):
    result = kvprobe.evaluate(subject, [partial(window, n=2), partial(window, n=48)])
    assert "with window(n=48), the closest of 2, the loss" in Evaluate.sentence(result)
    near = result.rows[2]
    assert f"distribution is {near['kld_mean']:.3f} nat from the full pass's" in Evaluate.sentence(result)


@pytest.mark.parametrize(
    ("attend", "error", "says"),
    [
        ([], ValueError, "at least one function"),
        ([untouched, untouched], ValueError, "two functions are called untouched"),
        (3, ValueError, "int must be a function of one call"),
        (lambda call: call.key[99], KvprobeError, r"in layer 0: IndexError: .* \(test_evaluate.py, line"),
        (lambda call: call.query[..., :2], KvprobeError, r"returned \[1, 4, 64, 2\] in layer 0, needs .*, 8\]"),
        (lambda _: None, KvprobeError, "<lambda> returned NoneType in layer 0"),
        (lambda call: call.attend() / 0, KvprobeError, "not finite"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused_and_the_model_left_as_it_was(subject, attend, error, says):
    with pytest.raises(error, match=says):
        kvprobe.evaluate(subject, attend)
    assert subject.model.config._attn_implementation == "sdpa"


def test_what_would_not_fit_is_refused_before_the_first_pass(subject, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    with pytest.raises(KvprobeError, match=r"evaluating 64 tokens would need .* use fewer tokens"):
        Evaluate(attend=(pytest.fail,)).run(subject)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_smollm2_with_the_last_64_keys_and_64_small_ones():
    # each token once, as above, and norms in float64: in float32 some of so many are equal
    ids = 100 + torch.randperm(40_000, generator=torch.Generator().manual_seed(0))[:1024]
    subject = prepare("smollm2-135m", ids=ids, device="cpu")

    def chosen(call):
        # by sorting instead of `top`, on all heads at once
        norms = call.key.double().norm(dim=-1).repeat_interleave(3, dim=1)[:, :, None].expand(1, 9, 1024, 1024)
        recent = causal_keep(1024).triu(-63)
        rank = norms.masked_fill(~causal_keep(1024) | recent, torch.inf).argsort(-1).argsort(-1)
        return call.attend(keep=causal_keep(1024) & (recent | (rank < 64)))

    def mine(call):
        last = call.last(64)
        return call.attend(keep=last | call.top(64, -call.key.double().norm(dim=-1), among=call.keep & ~last))

    by_hand = token_losses(subject.model, subject.input_ids, score_from=512, attend=chosen)
    assert kvprobe.evaluate(subject, mine).rows[1]["loss"] == pytest.approx(float(by_hand.mean()), abs=1e-9)


def test_capture_is_of_the_plain_model_afterwards(subject):
    before = capture(subject.model, subject.input_ids, layers=[2]).keys[2]
    kvprobe.evaluate(subject, small_norms)
    assert capture(subject.model, subject.input_ids, layers=[2]).keys[2].equal(before)
