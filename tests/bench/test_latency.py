"""Every phase is timed at its context, its row is arithmetic on that, and what cannot be is refused before."""

import pytest
import torch

from kvprobe.bench.latency import Bench
from kvprobe.bench.roofline import Ceilings, Shape, total
from kvprobe.errors import KvprobeError
from kvprobe.memory import check_memory
from support.clocks import Ticking
from support.decoders import rope_decoder


def test_what_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(KvprobeError, match=r"a cache would need 1,048,576.00 GiB and [\d.,]+ GiB are free in memory"):
        check_memory("a cache", 2**50, "cpu")


@pytest.fixture
def decoder():
    return rope_decoder(n_kv_heads=2, windows=(None, 5))


def test_every_phase_is_timed_at_every_context_and_decode_at_every_batch(decoder):
    timer = Bench(decoder=decoder, engine="torch", repeats=2, clock=Ticking())
    found = list(timer.measure([4, 9], batches=[1, 3]))
    assert [(one.phase, one.context, one.batch) for one in found] == [
        *((phase, context, 1) for context in (4, 9) for phase in ("naive", "prefill", "cached")),
        *(("cached", context, 3) for context in (4, 9)),
    ]
    shape = Shape.of(decoder)
    for one in found:
        way = shape.decode if one.phase == "cached" else shape.prefill
        assert one.works == (way(one.context, batch=one.batch),)
        assert one.n_tokens == one.batch * (one.context if one.phase == "prefill" else 1)
        assert len(one.timing.seconds) == 2


def test_a_prefill_gives_the_tokens_of_all_rows(decoder):
    (one,) = Bench(decoder=decoder, repeats=1, clock=Ticking()).measure([9], batches=[3], phases=["prefill"])
    assert (one.n_tokens, one.works) == (27, (Shape.of(decoder).prefill(9, batch=3),))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("context", [1, 4, 9])
def test_the_step_that_is_timed_sees_the_whole_context(decoder, batch, context):
    """Its logits are those of a full pass, on a cache filled by a prefill or by one row's keys, in every run."""
    timer, seen = Bench(decoder=decoder, engine="torch", repeats=3, clock=Ticking()), []
    make = timer._engine

    def watched(cache):
        engine = make(cache)
        decode = engine.decode
        engine.decode = lambda tokens: seen.append((decode(tokens)[:, 0], cache.length)) or seen[-1][0]
        return engine

    object.__setattr__(timer, "_engine", watched)
    list(timer.measure([context], batches=[2, batch], phases=["cached"]))
    ids = timer._ids(batch, context)
    whole = decoder(ids[:1])[:, -1]
    steps = [logits for logits, _ in seen if logits.shape[0] == batch][:1]
    assert {length for _, length in seen} == {context}
    assert len(seen) == 2 * (1 + 2 + 3)
    # the other rows hold row 0's keys too and differ in their last token alone
    torch.testing.assert_close(steps[0][:1], whole, atol=1e-5, rtol=0)


def test_a_row_is_arithmetic_on_what_was_timed(decoder):
    (one,) = Bench(decoder=decoder, engine="torch", repeats=1, clock=Ticking(9, 9, 9, 0.5)).measure(
        [9], phases=["cached"]
    )
    (work,), ceilings = one.works, Ceilings(bandwidth=1e6, matrix_rate=1e6)
    row = one.row(ceilings, "float32")
    assert (row["ms_median"], row["tokens_per_s"], row["step"], row["n_runs"]) == (500, 2, "torch", 1)
    assert row["bytes_per_s"] == work.bytes_moved / 0.5
    assert row["ceiling_tokens_per_s"] == 1 / ceilings.seconds(work)
    assert row["fraction_of_ceiling"] == 2 * ceilings.seconds(work)
    assert (row["bytes_moved"], row["flops"], row["intensity"]) == (work.bytes_moved, work.flops, work.intensity)
    assert row["flops"] == row["weight_flops"] + row["attention_flops"]
    assert row["attention_intensity"] == 2 * (4 / 2) / 4


def test_start_up_is_the_first_step_and_no_part_of_a_row(decoder):
    timer = Bench(decoder=decoder, engine="torch", repeats=2, clock=Ticking(60, 1, 1, 2, 2))
    (one,) = timer.measure([9], phases=["cached"])
    assert timer.start_ups == {"torch step": 60}
    assert one.timing.seconds == (2, 2)


def test_end_to_end_is_a_prefill_and_every_later_token(decoder):
    timer, shape = Bench(decoder=decoder, engine="torch", clock=Ticking(1, 12, 3, 5)), Shape.of(decoder)
    cached, naive = timer.end_to_end(10, 6, naive_samples=2)
    assert (cached.phase, cached.timing.seconds, cached.n_tokens) == ("end_to_end_cached", (12,), 6)
    assert total(cached.works) == total([shape.prefill(10), *(shape.decode(n) for n in range(11, 16))])
    # two of six were timed, 3 s and 5 s
    assert (naive.phase, naive.timing.seconds, naive.n_tokens) == ("end_to_end_naive", (24,), 6)
    assert total(naive.works) == total(shape.prefill(n) for n in range(10, 16))


def test_measuring_refuses_before_it_begins(decoder):
    timer = Bench(decoder=decoder)
    with pytest.raises(ValueError, match="context must be at most 256, the model's positions, got 257"):
        timer.measure([8, 257])
    with pytest.raises(ValueError, match="phase must be one of naive, cached, prefill, got 'warm'"):
        timer.measure([8], phases=["warm"])
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        timer.measure([8], batches=[0])
    with pytest.raises(KvprobeError, match="a batch of 1000000000 at 200 tokens would need"):
        timer.measure([200], batches=[1, 10**9])
    with pytest.raises(ValueError, match="new_tokens must be at least 1, got 0"):
        timer.end_to_end(8, 0)
    with pytest.raises(ValueError, match="prompt_tokens 250 and new_tokens 8 need more"):
        timer.end_to_end(250, 8)
