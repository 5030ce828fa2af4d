"""Bases, energy, bytes and allocation of matrices: against numpy's SVD, by hand, and by brute force."""

import itertools

import numpy as np
import pytest
import torch

from kvprobe.attention.layers import body_of
from kvprobe.attention.seam import attending
from kvprobe.probes.lowrank import (
    View,
    allocate,
    effective_rank,
    energy_by_rank,
    energy_kept,
    fit,
    gram_vectors,
    limit_of,
    numerical_rank,
    rank_for,
    singular_squares,
    storage,
    truncate,
)
from support.tiny import tiny_ids, tiny_model

SHAPES = [(60, 24), (24, 60), (40, 40)]


def matrix_of(length, width, *, rank=None, seed=0):
    """Random, with a first row of 300 times the norm, as a sink token's keys have."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(length, width) if rank is None else rank
    left, right = torch.randn(length, rank, generator=generator), torch.randn(rank, width, generator=generator)
    left[0] *= 300
    return (left @ right / rank**0.5)[None]


def numpys(matrix, rank, *, center=False):
    rows = matrix.numpy().astype(np.float64)
    mean = rows.mean(axis=-2, keepdims=True) if center else 0.0
    left, values, right = np.linalg.svd(rows - mean, full_matrices=False)
    values[..., rank:] = 0
    return torch.from_numpy((left * values[..., None, :]) @ right + mean).float()


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(("length", "width"), SHAPES)
def test_the_reconstruction_is_numpys(length, width, center):
    matrix = matrix_of(length, width)
    # to float32's rounding of the largest values, which the sink row sets
    atol = 2e-6 * float(matrix.abs().max())
    for rank in (1, 7, limit_of(length, width, center=center)):
        wanted = numpys(matrix, rank, center=center)
        torch.testing.assert_close(truncate(matrix, rank, center=center), wanted, atol=atol, rtol=0)
        torch.testing.assert_close(fit(matrix, center=center).project(matrix, rank), wanted, atol=atol, rtol=0)


@pytest.mark.parametrize(("length", "width"), SHAPES)
def test_the_small_singular_values_behind_a_large_one_are_not_lost(length, width):
    # a Gram matrix rounds at its dtype's epsilon times the greatest square: 1e-16 of it in float64, 1e-7 in float32,
    # which would be above this whole tail
    matrix = matrix_of(length, width)
    matrix[:, 1:] *= 1e-2
    squares = singular_squares(matrix)[0].numpy()
    wanted = np.linalg.svd(matrix[0].numpy().astype(np.float64), compute_uv=False) ** 2
    assert wanted[1] < 1e-7 * wanted[0]
    np.testing.assert_allclose(squares, wanted, atol=1e-14 * wanted[0], rtol=0)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(("length", "width"), SHAPES)
def test_at_its_limit_an_oracle_is_the_identity(length, width, center):
    matrix = matrix_of(length, width)
    limit = limit_of(length, width, center=center)
    atol = 2e-6 * float(matrix.abs().max())
    torch.testing.assert_close(truncate(matrix, limit, center=center), matrix, atol=atol, rtol=0)
    projected = fit(matrix, center=center).project(matrix, limit)
    torch.testing.assert_close(projected, matrix, atol=atol, rtol=0)
    assert singular_squares(matrix, center=center).shape == (1, limit)


def test_the_limit_counts_tokens_fitted_width_and_the_mean():
    assert limit_of(1024, 1536) == 1024
    assert limit_of(512, 1536) == 512
    assert limit_of(1024, 384) == 384
    assert limit_of(1024, 1536, center=True) == 1023


@pytest.mark.parametrize(
    ("rank", "center", "limit"), [(0, False, 24), (25, False, 24), (-3, False, 24), (24, True, 23)]
)
def test_a_rank_outside_its_range_is_refused_with_both_ends(rank, center, limit):
    with pytest.raises(ValueError, match=rf"between 1 and {limit} \(24 tokens fitted.*width 60\), got {rank}"):
        truncate(matrix_of(24, 60), rank, center=center)


@pytest.mark.parametrize(("length", "width"), SHAPES)
def test_a_planted_rank_is_found(length, width):
    matrix = matrix_of(length, width, rank=5)
    squares = singular_squares(matrix)[0]
    assert numerical_rank(squares, max(length, width), torch.finfo(torch.float32).eps) == 5
    kept = [energy_kept(matrix, truncate(matrix, rank)) for rank in (4, 5)]
    assert kept[0] < 1 - 1e-7
    assert kept[1] == pytest.approx(1, abs=1e-11)
    # five other rows of the same subspace are basis enough
    basis = fit(matrix[:, 1:6])
    assert energy_kept(matrix, basis.project(matrix, 5)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("center", [False, True])
def test_energy_kept_is_the_spectrums_share(center):
    matrix = matrix_of(60, 24)
    shares = energy_by_rank(singular_squares(matrix, center=center)[0])
    for rank in (1, 3, 12):
        kept = energy_kept(matrix, truncate(matrix, rank, center=center), center=center)
        assert kept == pytest.approx(float(shares[rank - 1]), abs=1e-9)
    assert energy_kept(torch.zeros(1, 4, 3), torch.zeros(1, 4, 3)) == 1.0


def test_rows_of_a_batch_have_a_basis_each():
    first, second = matrix_of(30, 12), matrix_of(30, 12, seed=1)
    both = torch.cat([first, second])
    for center in (False, True):
        alone = truncate(second, 4, center=center)
        torch.testing.assert_close(truncate(both, 4, center=center)[1:], alone, atol=1e-3, rtol=0)
        torch.testing.assert_close(fit(both, center=center).project(both, 4)[1:], alone, atol=1e-3, rtol=0)


def test_known_vectors_are_used():
    matrix, other = matrix_of(30, 12), matrix_of(30, 12, seed=1)
    assert torch.equal(truncate(matrix, 4, vectors=gram_vectors(matrix)), truncate(matrix, 4))
    assert not torch.equal(truncate(matrix, 4, vectors=gram_vectors(other)), truncate(matrix, 4))


def test_the_bytes_of_gpt2_at_rank_256_by_hand():
    layers = range(12)
    held = storage(dict.fromkeys(layers, 256), dict.fromkeys(layers, 1536), 1024)
    assert held.bytes_full == 72 * 2**20  # 72 KiB a token
    assert held.latent_bytes == 12 * 256 * 1024 * 4
    assert held.basis_bytes == 12 * 256 * 1536 * 4
    assert held.break_even_tokens == 308  # 256 · 1536 / (1536 − 256) = 307.2
    assert held.ratio == pytest.approx(2.4)
    assert held.notional_ratio == 6.0


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("ranks", [{0: 3, 1: 3}, {0: 1, 1: 7}, {0: 8, 1: 12}])
def test_from_the_break_even_length_on_truncation_saves(ranks, center):
    widths = {0: 10, 1: 14}
    length = storage(ranks, widths, 5, center=center).break_even_tokens
    for n_tokens, saves in ((length - 1, False), (length, True)):
        held = storage(ranks, widths, n_tokens, center=center)
        assert (held.latent_bytes + held.basis_bytes < held.bytes_full) is saves
        assert (held.ratio > 1) is saves


def test_the_full_width_never_saves():
    held = storage({0: 10}, {0: 10}, 1000, element_bytes=2)
    assert held.break_even_tokens is None
    assert held.bytes_full == held.latent_bytes == 20_000
    assert held.ratio < held.notional_ratio == 1.0


def test_allocation_by_energy_is_the_best_there_is():
    generator = torch.Generator().manual_seed(0)
    squares = {layer: (torch.rand(4, generator=generator) * scale).sort(descending=True).values
               for layer, scale in ((0, 1.0), (3, 5.0), (5, 0.2))}  # fmt: skip

    def energy(ranks):
        return sum(float(squares[layer][:rank].sum()) for layer, rank in zip(squares, ranks, strict=True))

    for total in range(3, 13):
        best = max(energy(r) for r in itertools.product(range(1, 5), repeat=3) if sum(r) == total)
        ranks = allocate(squares, total)
        assert sum(ranks.values()) == total
        assert energy(ranks.values()) == pytest.approx(best)
    for total in (2, 13):
        with pytest.raises(ValueError, match=rf"between 3 and 12, got {total}"):
            allocate(squares, total)


def test_effective_rank_and_the_rank_of_a_share_by_hand():
    assert effective_rank(torch.full((8,), 3.0)) == pytest.approx(8)
    assert effective_rank(torch.tensor([4.0, 0.0, 0.0])) == pytest.approx(1)
    # singular values 3 and 1: shares ¾ and ¼
    assert effective_rank(torch.tensor([9.0, 1.0])) == pytest.approx(4 / 3**0.75)
    assert effective_rank(torch.zeros(3)) == 0.0
    # a half, three quarters, seven eighths, all: exact in binary, so that "keeps at least" is seen
    squares = torch.tensor([8.0, 4.0, 2.0, 2.0])
    assert [rank_for(squares, share) for share in (0.1, 0.5, 0.51, 0.75, 0.8, 0.9, 1.0)] == [1, 1, 2, 2, 3, 4, 4]


def calls_of(family, length=12, **overrides):
    model = tiny_model(family, **overrides)
    calls = {}

    def watch(call):
        calls[call.layer] = call
        return call.attend()

    with attending(model, watch):
        body_of(model)(input_ids=tiny_ids(length, batch=2), use_cache=False)
    return model, calls


@pytest.mark.parametrize("stage", ["post_rope", "pre_rope"])
@pytest.mark.parametrize("of", ["kv", "k", "v"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "gemma3_text", "deepseek_v2", "deepseek_v3"])
def test_what_is_taken_out_goes_back_to_where_it_was(family, of, stage):
    model, calls = calls_of(family)
    view = View.on(model, of, stage)
    for call in calls.values():
        matrix = view.matrix(call)
        key, value = view.keys_values(call, matrix)
        torch.testing.assert_close(key, call.key, atol=1e-5, rtol=0)
        assert torch.equal(value, call.value)
        changed_key, changed_value = view.keys_values(call, matrix + 1)
        assert torch.equal(changed_key, call.key) == (of == "v")
        assert torch.equal(changed_value, call.value) == (of == "k")


def test_the_joint_matrix_is_keys_then_values_head_by_head():
    model, calls = calls_of("llama")
    call = calls[1]
    matrix = View.on(model).matrix(call)
    assert matrix.shape == (2, 12, 2 * 2 * 8)
    assert torch.equal(matrix[1, 5, 8:16], call.key[1, 1, 5])
    assert torch.equal(matrix[1, 5, 16:24], call.value[1, 0, 5])


def test_before_rope_equal_tokens_have_equal_keys():
    model = tiny_model("llama")
    view, rows = View.on(model, "k", "pre_rope"), {}

    def watch(call):
        rows[call.layer] = view.matrix(call)
        return call.attend()

    with attending(model, watch):
        body_of(model)(input_ids=torch.full((1, 20), 7), use_cache=False)
    for matrix in rows.values():
        torch.testing.assert_close(matrix, matrix[:, :1].expand_as(matrix), atol=1e-5, rtol=0)


def test_the_rotary_part_of_a_latent_family_is_left_out_and_left_alone():
    model, calls = calls_of("deepseek_v3")
    view = View.on(model, "kv", "pre_rope")
    call = calls[0]
    assert view.matrix(call).shape[-1] == 4 * (8 + 6)
    assert View.on(model).matrix(call).shape[-1] == 4 * (8 + 4 + 6)
    key, _ = view.keys_values(call, view.matrix(call) * 0)
    assert torch.equal(key[..., 8:], call.key[..., 8:])
    assert not key[..., :8].any()


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="of must be one of kv, k, v, got 'q'"):
        View.on(tiny_model("gpt2"), "q")
    with pytest.raises(ValueError, match="stage must be one of post_rope, pre_rope, got 'rope'"):
        View.on(tiny_model("gpt2"), "k", "rope")


def test_a_basis_has_no_direction_that_rounding_made_up():
    few = matrix_of(6, 40)
    repeated = few[:, [0, 1, 2, 3, 4, 5] * 5]
    basis = fit(repeated)
    assert limit_of(*repeated.shape[1:]) == 30
    assert basis.vectors.shape == (1, 40, np.linalg.matrix_rank(repeated[0].numpy()))
    # so a rank beyond what was fitted is what was fitted, whatever the machine rounds
    other = matrix_of(9, 40)
    assert torch.equal(basis.project(other, 30), basis.project(other, 6))
