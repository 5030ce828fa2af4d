from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kvprobe.decoder import linear
from kvprobe.decoder.linear import LINEARS, fastest
from kvprobe.decoder.model import from_hf
from support.decoders import FAMILIES, rope_decoder
from support.tiny import tiny_ids, tiny_model


@pytest.mark.parametrize("name", ["torch", "onednn"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_every_product_is_the_linear_map(name, bias, turned):
    x, weight = torch.randn(2, 70, 33), torch.randn(33, 18).T if turned else torch.randn(18, 33)
    offset = torch.randn(18) if bias else None
    got = LINEARS[name](x, weight, offset)
    torch.testing.assert_close(got, F.linear(x, weight, offset), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_widening_rounds_once_and_only_at_the_end(bias):
    x, weight = torch.randn(70, 33).bfloat16(), torch.randn(18, 33).bfloat16()
    offset = torch.randn(18).bfloat16() if bias else None
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    got = LINEARS["widened"](x, weight, offset)
    assert got.dtype == torch.bfloat16
    # half a unit in the last of eight bits
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("name", ["torch", "onednn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_with_any_product_is_the_same(family, name, monkeypatch):
    monkeypatch.setattr(linear, "float32_linear", lambda n_threads: name)
    decoder, ids = from_hf(tiny_model(family)), tiny_ids(150)
    expected = decoder(ids)
    with fastest(decoder, 150) as used:
        torch.testing.assert_close(decoder(ids), expected, atol=2e-5, rtol=0)
    assert used == name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_widened_forward_is_no_farther_from_float32_than_torchs_own_in_bfloat16(family, monkeypatch):
    monkeypatch.setattr(linear, "float32_linear", lambda n_threads: "torch")
    monkeypatch.setattr(linear, "bfloat16_linear", lambda n_threads: "widened")
    decoder, ids = from_hf(tiny_model(family)), tiny_ids(150)
    expected = decoder(ids)
    decoder = decoder.bfloat16()
    plain = decoder(ids)
    with fastest(decoder, 150) as used:
        got = decoder(ids)
    assert used == "widened"
    assert (got - expected).norm() < 1.2 * (plain - expected).norm()


def test_short_prompts_and_other_dtypes_stay_with_torch_and_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(linear, "_quickest", lambda *_: pytest.fail("measured"))
    with fastest(rope_decoder(), 63) as name:
        assert name == "torch"
    with fastest(rope_decoder().half(), 500) as name:
        assert name == "torch"


def test_outside_the_block_torch_is_as_it_was_even_after_an_error(monkeypatch):
    monkeypatch.setattr(linear, "float32_linear", lambda n_threads: "onednn")
    calls = []
    monkeypatch.setitem(LINEARS, "onednn", lambda *given: calls.append(1) or F.linear(*given))
    decoder, ids = rope_decoder(), tiny_ids(70)

    def broken(call):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), fastest(decoder, 70):
        decoder(ids, attend=broken)
    # query, key and value of the first layer
    assert len(calls) == 3
    decoder(ids)
    assert len(calls) == 3


def test_the_faster_one_is_taken_and_a_missing_one_is_not(monkeypatch):
    now = 0.0
    monkeypatch.setattr(linear, "time", SimpleNamespace(perf_counter=lambda: now))

    def taking(*seconds):
        turns = iter(seconds)

        def product(*given):
            nonlocal now
            now += next(turns)
            return F.linear(*given)

        return product

    def missing(*given):
        raise RuntimeError("not built in")

    def quickest(torchs, onednns):
        monkeypatch.setitem(LINEARS, "torch", torchs)
        monkeypatch.setitem(LINEARS, "onednn", onednns)
        return linear._quickest(("torch", "onednn"), torch.randn(2, 3), torch.randn(4, 3))

    # the best of each after its first; torch's own unless the other gains a twentieth
    assert quickest(taking(9, 104, 300, 300), taking(1, 900, 900, 100)) == "torch"
    assert quickest(taking(9, 300, 106, 300), taking(900, 900, 100, 900)) == "onednn"
    assert quickest(taking(1, 1, 1, 1), taking(9, 9, 9, 9)) == "torch"
    assert quickest(taking(9, 9, 9, 9), missing) == "torch"
