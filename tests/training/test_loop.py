import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kvprobe.attention.call import AttentionCall
from kvprobe.cells.run_store import gpt_config
from kvprobe.errors import KvprobeError
from kvprobe.text.corpus import Corpus
from kvprobe.training import loop
from kvprobe.training.checkpoint import Snapshot
from kvprobe.training.loop import TrainConfig, gradients, seeded, train, validate
from support.training import CONFIG, PLAN, corpus

TESTS = Path(__file__).parents[1]


def periodic():
    return Corpus("periodic", "", "ids", 11, torch.arange(300) % 3, length=8, n_train=200, n_valid=10)


class Killed(Exception):
    """Stands for a kill: nothing in training catches it."""


@pytest.mark.parametrize(
    ("steps", "at"), [(7, [3, 6, 7]), (6, [3, 6]), (1, [1]), (4, [3, 4])], ids=lambda value: str(value)
)
def test_validation_also_happens_at_the_last_step(steps, at):
    history = train(seeded(CONFIG, seed=1), corpus(), replace(PLAN, steps=steps))
    assert [validation.step for validation in history.validations] == at
    assert len(history.train_losses) == steps
    assert history.last.step == steps


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("killed_at", range(1, 8))
def test_killed_at_any_step_and_resumed_ends_with_the_same_bits(tmp_path, killed_at, every):
    whole = seeded(CONFIG, seed=1)
    expected = train(whole, corpus(), PLAN)

    def kill(_what, done, *_):
        if done == killed_at:
            raise Killed

    snapshot = Snapshot(tmp_path / "run.safetensors", {"of": "test"})
    with pytest.raises(Killed):
        train(seeded(CONFIG, seed=1), corpus(), PLAN, snapshot=snapshot, snapshot_every=every, progress=kill)
    kept = snapshot.read() is not None
    assert kept == (killed_at > every)
    # other weights than the run began with, where a snapshot has them
    resumed = seeded(CONFIG, seed=99 if kept else 1)
    found = train(resumed, corpus(), PLAN, snapshot=snapshot, snapshot_every=every)
    assert (found.validations, found.train_losses) == (expected.validations, expected.train_losses)
    assert found.resumed == int(kept)
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_minute_without_a_snapshot_is_long_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SNAPSHOT_SECONDS", -1.0)

    def kill(_what, done, *_):
        if done == 3:
            raise Killed

    snapshot = Snapshot(tmp_path / "run.safetensors", {"of": "test"})
    with pytest.raises(Killed):
        train(seeded(CONFIG, seed=1), corpus(), PLAN, snapshot=snapshot, snapshot_every=50, progress=kill)
    found = train(seeded(CONFIG, seed=99), corpus(), PLAN, snapshot=snapshot, snapshot_every=50)
    assert found.train_losses == train(seeded(CONFIG, seed=1), corpus(), PLAN).train_losses
    assert found.resumed == 1


def test_a_process_that_is_killed_leaves_a_snapshot_that_goes_on(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support.training import CONFIG, PLAN, corpus
from kvprobe.training.checkpoint import Snapshot
from kvprobe.training.loop import seeded, train
def kill(what, done, *_):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
state = Snapshot(Path(sys.argv[1]), {})
train(seeded(CONFIG, seed=1), corpus(), PLAN, snapshot=state, snapshot_every=2, progress=kill)
"""
    place = tmp_path / "run.safetensors"
    done = subprocess.run([sys.executable, "-c", code, str(place), str(TESTS)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    found = train(seeded(CONFIG, seed=7), corpus(), PLAN, snapshot=Snapshot(place))
    assert found.validations == train(seeded(CONFIG, seed=1), corpus(), PLAN).validations


def test_a_snapshot_of_a_finished_run_is_the_result(tmp_path):
    snapshot = Snapshot(tmp_path / "run.safetensors")
    first = train(seeded(CONFIG, seed=1), corpus(), PLAN, snapshot=snapshot)
    again = seeded(CONFIG, seed=2)
    assert train(again, corpus(), PLAN, snapshot=snapshot).validations == first.validations
    assert validate(again, corpus(), PLAN) == first.last.loss


def test_another_runs_snapshot_is_refused_with_what_differs(tmp_path):
    place = tmp_path / "run.safetensors"
    Snapshot(place, {"seed": 1, "heads": 8}).write({}, {})
    with pytest.raises(KvprobeError, match="belongs to another training run: seed is 1 there and 2 here; remove it"):
        Snapshot(place, {"seed": 2, "heads": 8}).read()
    place.write_bytes(b"something else")
    with pytest.raises(KvprobeError, match=r"run\.safetensors is not a snapshot"):
        Snapshot(place).read()
    with pytest.raises(KvprobeError, match="is not a snapshot"):
        Snapshot(place).remove()
    assert place.read_bytes() == b"something else"


def test_gradients_are_those_of_the_mean_loss_whatever_the_parts():
    decoder, windows = seeded(CONFIG, seed=0), corpus().train_batch(0, batch=6, seed=0)
    log_p = decoder(windows[:, :-1]).log_softmax(-1)
    expected = -log_p.gather(-1, windows[:, 1:, None]).mean()
    by_hand = torch.autograd.grad(expected, [*decoder.parameters()])
    for part in (1, 4, 6):
        decoder.zero_grad()
        loss = gradients(decoder, windows, replace(PLAN, micro_batch=part))
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        for parameter, wanted in zip(decoder.parameters(), by_hand, strict=True):
            torch.testing.assert_close(parameter.grad, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_steps_are_adamw_as_published(clip):
    # a large eps, so that the size of a gradient matters, and with it clipping
    plan = TrainConfig(
        steps=3, batch=6, micro_batch=6, learning_rate=0.1, weight_decay=0.1, eps=0.1, clip=clip, warm_up=2
    )
    trained, ours = seeded(CONFIG, seed=0), seeded(CONFIG, seed=0)
    train(trained, corpus(), plan)
    parameters = [*ours.parameters()]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for step, rate in enumerate([0.05, 0.1, 0.1], start=1):
        ours.zero_grad()
        gradients(ours, corpus().train_batch(step - 1, batch=6, seed=0), plan)
        grads = [parameter.grad.clone() for parameter in parameters]
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        if clip is not None:
            assert norm > clip
            grads = [grad * clip / norm for grad in grads]
        with torch.no_grad():
            for parameter, grad, (first, second) in zip(parameters, grads, moments, strict=True):
                first.mul_(0.9).add_(0.1 * grad)
                second.mul_(0.999).add_(0.001 * grad.square())
                parameter *= 1 - rate * 0.1
                unbiased = (second / (1 - 0.999**step)).sqrt()
                parameter -= rate * first / (1 - 0.9**step) / (unbiased + 0.1)
    for found, expected in zip(trained.parameters(), parameters, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


def test_the_rate_rises_and_stays_or_falls_on_a_cosine():
    constant = TrainConfig(steps=6, learning_rate=2.0, warm_up=2)
    assert [constant.rate(step) for step in range(6)] == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    cosine = TrainConfig(steps=5, learning_rate=2.0, schedule="cosine", floor=0.1)
    # half way between 2.0 and 0.2 in the middle, on the floor at the last step
    assert [cosine.rate(step) for step in (0, 2, 4)] == pytest.approx([2.0, 1.1, 0.2])
    assert TrainConfig(steps=1, schedule="cosine").rate(0) == 1e-3
    # both: the cosine begins where the warm-up ends
    both = TrainConfig(steps=7, learning_rate=2.0, schedule="cosine", warm_up=2, floor=0.1)
    assert [both.rate(step) for step in (0, 1, 2, 4, 6)] == pytest.approx([1.0, 2.0, 2.0, 1.1, 0.2])


def test_as_many_kv_heads_as_heads_is_multi_head_attention_to_the_bit():
    config = gpt_config(4, vocab=11, length=8, n_layers=2, n_heads=4, width=16)
    decoder, windows = seeded(config, seed=0), corpus().train_batch(0, batch=4, seed=0)

    def multi_head(call):
        assert call.key.shape == call.query.shape
        return F.scaled_dot_product_attention(call.query, call.key, call.value, is_causal=True)

    found = {}
    for name, attend in (("gqa", AttentionCall.attend), ("multi-head", multi_head)):
        logits = decoder(windows[:, :-1], attend=attend)
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        found[name] = [logits, *torch.autograd.grad(loss, [*decoder.parameters()])]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found.values(), strict=True))


def test_a_model_learns_what_repeats():
    decoder = seeded(CONFIG, seed=0)
    history = train(decoder, periodic(), TrainConfig(steps=60, batch=8, learning_rate=1e-2, validate_every=30))
    assert history.train_losses[0] == pytest.approx(math.log(11), abs=0.3)
    # only the first target of a window could be in doubt, and its token says all
    assert history.best.loss < 0.05


def test_validation_is_the_mean_over_all_windows_and_targets():
    decoder, windows = seeded(CONFIG, seed=0).eval(), corpus().valid_windows()
    with torch.no_grad():
        log_p = decoder(windows[:, :-1]).double().log_softmax(-1)
    expected = -log_p.gather(-1, windows[:, 1:, None]).mean().item()
    assert validate(decoder, corpus(), PLAN) == pytest.approx(expected, abs=1e-6)


def test_bfloat16_is_autocast_and_near_float32():
    one, other = seeded(CONFIG, seed=0), seeded(CONFIG, seed=0)
    wide, narrow = train(one, periodic(), PLAN), train(other, periodic(), replace(PLAN, dtype="bfloat16"))
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    assert wide.last.loss == pytest.approx(narrow.last.loss, abs=0.02)
    assert wide.last.loss != narrow.last.loss


def test_torchs_own_generator_is_left_alone():
    before = torch.get_rng_state()
    train(seeded(CONFIG, seed=3), corpus(), replace(PLAN, steps=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_bits_and_another_gives_others():
    losses = {seed: train(seeded(CONFIG, seed=seed), corpus(), replace(PLAN, seed=seed)) for seed in (1, 2)}
    assert train(seeded(CONFIG, seed=1), corpus(), PLAN).train_losses == losses[1].train_losses
    assert losses[1].train_losses != losses[2].train_losses


def test_skipped_batches_are_those_that_an_earlier_run_has_read():
    whole = train(seeded(CONFIG, seed=1), corpus(), replace(PLAN, steps=5))
    one = seeded(CONFIG, seed=1)
    train(one, corpus(), replace(PLAN, steps=4))
    after = train(one, corpus(), replace(PLAN, steps=1, skip=4))
    assert after.train_losses[0] == whole.train_losses[4]


def test_a_loss_that_is_not_finite_is_named_with_its_step_and_the_decoder_left_in_order():
    decoder = seeded(CONFIG, seed=0)
    with pytest.raises(KvprobeError, match=r"not finite at step \d \(rate 1e\+30, float32\): use a lower"):
        train(decoder, corpus(), replace(PLAN, learning_rate=1e30))
    assert not decoder.training
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_a_validation_that_is_not_finite_is_named_too(monkeypatch):
    monkeypatch.setattr(loop, "validate", lambda *_: float("nan"))
    with pytest.raises(KvprobeError, match=r"the validation loss is not finite at step 2 \(rate 0"):
        train(seeded(CONFIG, seed=0), corpus(), replace(PLAN, validate_every=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"warm_up": 601}, "warm_up must be between 0 and 600 steps, got 601"),
        ({"schedule": "linear"}, "schedule must be one of constant, cosine, got 'linear'"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, got 'float16'"),
        ({"skip": -1}, "skip must be at least 0 batches, got -1"),
        ({"floor": 1.5}, "floor must be between 0 and 1 times the rate, got 1.5"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**settings)


def test_what_does_not_fit_together_is_refused_before_the_first_step():
    steps = []
    decoder = seeded(CONFIG, seed=0)

    def watch(*told):
        steps.append(told)

    with pytest.raises(KvprobeError, match="random has a vocabulary of 12, the model one of 11"):
        train(decoder, replace(corpus(), vocab=12), PLAN, progress=watch)
    with pytest.raises(ValueError, match="windows of 9 tokens are longer than the model's 8"):
        train(decoder, corpus(length=9), PLAN, progress=watch)
    with pytest.raises(ValueError, match="a batch of 201 is larger than the 200 training windows"):
        train(decoder, corpus(), replace(PLAN, batch=201), progress=watch)
    assert steps == []
