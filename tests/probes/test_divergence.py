"""Divergence against torch's own, and the laws of it."""

import math

import pytest
import torch

from kvprobe.probes.divergence import divergence


class Head:
    """A model whose logits are its hidden states, as they come."""

    def logits(self, hidden):
        return hidden


def drawn(seed, n=9, vocab=13):
    return 3 * torch.randn(1, n, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_it_is_torchs_divergence_of_the_second_from_the_first(chunk):
    full, changed = drawn(0), drawn(1)
    found = divergence(Head(), full, changed, chunk=chunk)
    p, q = full[0].double().log_softmax(-1), changed[0].double().log_softmax(-1)
    wanted = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found.kld, wanted, rtol=1e-12, atol=0)
    assert found.agrees.tolist() == (full[0].argmax(-1) == changed[0].argmax(-1)).tolist()


def test_one_by_hand():
    # 1/2, 1/2 beside 3/4, 1/4: log 2 − log 3 / 2
    full, changed = torch.zeros(1, 1, 2), torch.tensor([[[math.log(3), 0.0]]])
    assert divergence(Head(), full, changed).kld.tolist() == pytest.approx([math.log(2) - math.log(3) / 2], rel=1e-6)
    # the other way round it is another number
    there = divergence(Head(), changed, full).kld.tolist()
    assert there == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)], rel=1e-6)


def test_nothing_is_nowhere_from_itself_and_a_token_that_neither_gives_counts_nothing():
    full, changed = drawn(2), drawn(3)
    assert divergence(Head(), full, full).kld.tolist() == [0.0] * 9
    without = divergence(Head(), full[..., 1:], changed[..., 1:])
    full[..., 0] = changed[..., 0] = -math.inf
    torch.testing.assert_close(divergence(Head(), full, changed).kld, without.kld)
