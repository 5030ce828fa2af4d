import pytest
import torch
import torch.nn.functional as F

from kvprobe.decoder import widening
from kvprobe.decoder.model import from_hf
from support.decoders import FAMILIES, rope_decoder
from support.tiny import tiny_ids, tiny_model


@pytest.fixture
def slow_16_bits(monkeypatch):
    monkeypatch.setattr(widening, "multiplies_16_bits", lambda: False)


@pytest.mark.parametrize("bias", [False, True])
def test_widening_rounds_once_and_only_at_the_end(bias):
    x, weight = torch.randn(70, 33).bfloat16(), torch.randn(18, 33).bfloat16()
    offset = torch.randn(18).bfloat16() if bias else None
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    got = widening._linear(x, weight, offset)
    assert got.dtype == torch.bfloat16
    # half a unit in the last of eight bits
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.usefixtures("slow_16_bits")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_widened_forward_is_no_farther_from_float32_than_torchs_own_in_bfloat16(family):
    decoder, ids = from_hf(tiny_model(family)), tiny_ids(150)
    expected = decoder(ids)
    decoder = decoder.bfloat16()
    plain = decoder(ids)
    with widening.widening(decoder, 150) as widened:
        got = decoder(ids)
    assert widened
    assert (got - expected).norm() < 1.2 * (plain - expected).norm()


def test_only_long_prompts_in_bfloat16_on_a_slow_processor_are_widened(monkeypatch):
    def widened(decoder, n_tokens):
        with widening.widening(decoder, n_tokens) as is_widened:
            return is_widened

    for fast in (False, True):
        monkeypatch.setattr(widening, "multiplies_16_bits", lambda fast=fast: fast)
        assert widened(rope_decoder().bfloat16(), 64) is not fast
        assert not widened(rope_decoder().bfloat16(), 63)
        assert not widened(rope_decoder(), 500)
        assert not widened(rope_decoder().half(), 500)


@pytest.mark.usefixtures("slow_16_bits")
def test_outside_the_block_torch_is_as_it_was_even_after_an_error(monkeypatch):
    calls = []
    monkeypatch.setattr(widening, "_linear", lambda *given: calls.append(1) or F.linear(*given))
    decoder, ids = rope_decoder().bfloat16(), tiny_ids(70)

    def broken(call):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), widening.widening(decoder, 70):
        decoder(ids, attend=broken)
    # query, key and value of the first layer
    assert len(calls) == 3
    decoder(ids)
    assert len(calls) == 3
