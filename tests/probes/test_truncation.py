"""Truncated passes: laws on tiny models, planted ranks, and an independent implementation on real models."""

import itertools
import math

import numpy as np
import pytest
import torch

from kvprobe.attention.layers import body_of
from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.probes.losses import token_losses
from kvprobe.probes.lowrank import View, storage
from kvprobe.probes.truncation import fit_layers, spectra, spectrum_rows, sweep, tokens_fitted, truncating
from support.tiny import HOOKED, tiny_ids, tiny_model

T = 80


def planted(family, rank, *, keys_only=False, seed=0, **overrides):
    """A tiny model whose joint K‖V (or K alone), before RoPE, has exactly this rank in every layer."""
    model = tiny_model(family, seed, **overrides)
    generator = torch.Generator().manual_seed(seed)

    def low(weight):
        """Of this rank and about the size it had: [outputs, inputs]."""
        left = torch.randn(weight.shape[0], rank, generator=generator)
        return left @ torch.randn(rank, weight.shape[1], generator=generator) * 0.3 / rank**0.5

    for block in body_of(model).h if family == "gpt2" else body_of(model).layers:
        if family == "gpt2":
            attention, width = block.attn.c_attn, block.attn.c_attn.weight.shape[0]
            attention.weight[:, width:] = low(attention.weight[:, width:].T).T
            attention.bias[width:] = 0
            continue
        attention = block.self_attn
        parts = [attention.k_proj] if keys_only else [attention.k_proj, attention.v_proj]
        joint = low(torch.cat([part.weight for part in parts]))
        for part, weight in zip(parts, joint.split([part.weight.shape[0] for part in parts]), strict=True):
            part.weight.copy_(weight)
    return model


def delta(swept, row=1):
    return swept.rows[row]["loss"] - swept.rows[0]["loss"]


@pytest.mark.parametrize("stage", ["post_rope", "pre_rope"])
@pytest.mark.parametrize("family", HOOKED)
def test_full_rank_is_the_identity_and_rank_one_is_not(family, stage):
    model, ids = tiny_model(family), tiny_ids(T)[0]
    with pytest.raises(ValueError, match="rank must be between 1 and") as refused:
        sweep(model, ids, ranks=[1000], stage=stage, score_from=20)
    limit = int(str(refused.value).split("between 1 and ")[1].split()[0])
    swept = sweep(model, ids, ranks=[limit, 1], stage=stage, score_from=20)
    full, lowest = swept.rows[1:]
    assert full["limit"] == full["rank"] == full["width"]
    assert abs(full["delta"]) < 1e-5
    assert full["energy"] == pytest.approx(1, abs=1e-10)
    plain = token_losses(model, ids, score_from=20)
    view = View.on(model, "kv", stage)
    cut = token_losses(model, ids, score_from=20, attend=truncating(view, dict.fromkeys(range(3), 1)))
    assert (cut - plain).abs().max() > 0.02
    assert lowest["energy"] < 0.9
    assert lowest["loss"] == pytest.approx(float(cut.mean()), abs=1e-9)


@pytest.mark.parametrize(("family", "stage"), [("gpt2", "post_rope"), ("llama", "pre_rope")])
def test_a_planted_rank_breaks_exactly_there(family, stage):
    model, ids = planted(family, 5), tiny_ids(T)[0]
    swept = sweep(model, ids, ranks=[6, 5, 4], stage=stage, score_from=20)
    assert [abs(delta(swept, row)) < 1e-5 for row in (1, 2)] == [True, True]
    assert abs(delta(swept, 3)) > 1e-3
    assert swept.rows[2]["energy"] == pytest.approx(1, abs=1e-10)
    assert swept.rows[3]["energy"] < 0.99


def test_rope_hides_a_low_rank_of_the_keys():
    model, ids = planted("llama", 2, keys_only=True), tiny_ids(T)[0]
    rows = spectrum_rows(model, ids, ranks=[2], of="k")
    before = [row for row in rows if row["stage"] == "pre_rope"]
    after = [row for row in rows if row["stage"] == "post_rope"]
    assert [row["numerical_rank"] for row in before] == [2, 2, 2]
    assert all(row["numerical_rank"] > 2 and row["energy"] < 0.999 for row in after)
    assert all(row["energy"] == pytest.approx(1, abs=1e-10) and row["rank_99_9"] <= 2 for row in before)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_without_rope_both_stages_are_the_same(family):
    model, ids = tiny_model(family), tiny_ids(T)[0]
    swept = [sweep(model, ids, ranks=[3], stage=stage, score_from=20).rows[1] for stage in ("post_rope", "pre_rope")]
    assert swept[0] | {"stage": None} == swept[1] | {"stage": None}
    rows = spectrum_rows(model, ids, ranks=[3])
    assert [row | {"stage": None} for row in rows[:3]] == [row | {"stage": None} for row in rows[3:]]


def test_the_latent_and_the_rotary_width_of_mla_are_found():
    # the tiny family has kv_lora_rank 16, rotary width 4 and 4 heads of 8 + 4 and 6
    model, ids = tiny_model("deepseek_v3"), tiny_ids(T)[0]
    found = {row["stage"]: row for row in spectrum_rows(model, ids, ranks=[1])}
    assert found["pre_rope"]["numerical_rank"] == 16 < found["pre_rope"]["width"] == 56
    assert found["post_rope"]["numerical_rank"] == 20 < found["post_rope"]["width"] == 72
    for stage, rank in (("pre_rope", 16), ("post_rope", 20)):
        swept = sweep(model, ids, ranks=[rank, rank - 3], stage=stage, score_from=20)
        assert abs(delta(swept, 1)) < 1e-5
        assert abs(delta(swept, 2)) > 1e-4


def test_prefix_and_heldout_never_see_a_scored_token():
    model, ids, other = tiny_model("llama"), tiny_ids(T), tiny_ids(T, seed=1)
    changed = ids.clone()
    changed[:, 41:] = tiny_ids(T, seed=2)[:, 41:]
    view = View.on(model)

    def basis(kind, ids):
        fit_ids = other if kind == "heldout" else None
        return fit_layers(model, tokens_fitted(ids, basis=kind, score_from=40, fit_ids=fit_ids), view)

    for kind, moves in (("prefix", False), ("heldout", False), ("oracle", True)):
        first, second = basis(kind, ids), basis(kind, changed)
        assert all(torch.equal(first[layer].vectors, second[layer].vectors) for layer in first) is not moves


def test_under_prefix_a_future_token_changes_no_past_loss_and_under_oracle_it_does():
    model, ids, ranks = tiny_model("llama"), tiny_ids(T), dict.fromkeys(range(3), 6)
    changed = ids.clone()
    changed[:, 60:] = tiny_ids(T, seed=2)[:, 60:]
    view = View.on(model)

    def before_60(ids, n_prefix):
        return token_losses(model, ids, score_from=40, attend=truncating(view, ranks, n_prefix=n_prefix))[:19]

    torch.testing.assert_close(before_60(ids, 40), before_60(changed, 40), atol=1e-5, rtol=0)
    assert (before_60(ids, None) - before_60(changed, None)).abs().max() > 1e-3


def test_prefix_is_fitted_on_line_to_the_rows_before_score_from():
    model, ids, seen = tiny_model("llama"), tiny_ids(T), {}
    view = View.on(model)

    def by_hand(call):
        matrix = view.matrix(call)[0].double().numpy()
        right = np.linalg.svd(matrix[:40], full_matrices=False)[2][:6]
        seen[call.layer] = torch.from_numpy(matrix @ right.T @ right)[None].float()
        key, value = view.keys_values(call, seen[call.layer])
        return call.attend(key=key, value=value)

    theirs = token_losses(model, ids, score_from=40, attend=by_hand)
    ours = sweep(model, ids[0], ranks=[6], basis="prefix", score_from=40).losses[1]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    # a clean fit is another basis from the second layer on
    clean = fit_layers(model, ids[:, :40], view)
    apart = token_losses(model, ids, score_from=40, attend=truncating(view, dict.fromkeys(range(3), 6), clean))
    assert (apart - ours).abs().max() > 1e-3


def test_the_sweep_takes_the_basis_it_says():
    model, ids, other = tiny_model("llama"), tiny_ids(T)[0], tiny_ids(T, seed=1)[0]
    view, ranks = View.on(model), dict.fromkeys(range(3), 6)
    for kind, n_fitted in (("oracle", T), ("prefix", 40), ("heldout", T)):
        swept = sweep(model, ids, ranks=[6], basis=kind, fit_ids=other if kind == "heldout" else None, score_from=40)
        bases = fit_layers(model, other[None], view) if kind == "heldout" else None
        attend = truncating(view, ranks, bases, n_prefix=40 if kind == "prefix" else None)
        losses = token_losses(model, ids, score_from=40, attend=attend)
        assert swept.rows[1]["loss"] == pytest.approx(float(losses.mean()), abs=1e-12)
        assert swept.n_fitted == n_fitted
        assert swept.rows[1]["basis"] == kind
    assert swept.rows[1]["limit"] == 32


def test_sharing_the_first_layer_changes_nothing():
    model, ids = tiny_model("llama"), tiny_ids(T)[0]
    together = sweep(model, ids, ranks=[9, 4], score_from=20)
    alone = [sweep(model, ids, ranks=[rank], score_from=20).rows[1] for rank in (9, 4)]
    assert together.rows[1:] == alone


def test_what_is_shared_is_made_anew_for_other_tokens():
    model, known = tiny_model("llama"), {}
    attend = truncating(View.on(model), dict.fromkeys(range(3), 4), known=known)
    fresh = truncating(View.on(model), dict.fromkeys(range(3), 4))
    for seed in (0, 1):
        ids = tiny_ids(T, seed=seed)
        assert torch.equal(
            token_losses(model, ids, score_from=20, attend=attend),
            token_losses(model, ids, score_from=20, attend=fresh),
        )
    assert set(known) == {0}


def test_truncation_is_on_line():
    # layer 1 of the truncated pass reads what layer 0 made under truncation, so its energy is not the clean pass's
    model, ids = tiny_model("llama"), tiny_ids(T)
    view, kept = View.on(model), {}
    token_losses(model, ids, score_from=20, attend=truncating(view, dict.fromkeys(range(3), 2), energy=kept))
    clean = spectra(model, ids, {"post_rope": view})["post_rope"]
    shares = {layer: float(squares[:2].sum() / squares.sum()) for layer, squares in clean.items()}
    assert kept[0] == pytest.approx(shares[0], abs=1e-9)
    assert abs(kept[1] - shares[1]) > 1e-4


def test_each_part_of_the_matrix_reaches_attention():
    model, ids = tiny_model("llama"), tiny_ids(T)
    plain = token_losses(model, ids, score_from=20)
    ranks, changed = dict.fromkeys(range(3), 1), {}
    for of in ("k", "v", "kv"):
        changed[of] = token_losses(model, ids, score_from=20, attend=truncating(View.on(model, of), ranks)) - plain
        assert changed[of].abs().max() > 0.02
    assert not torch.equal(changed["kv"], changed["k"])


def test_centring_takes_the_mean_out_and_puts_it_back():
    model, ids = tiny_model("llama"), tiny_ids(T)[0]
    plain, centred = (sweep(model, ids, ranks=[4], center=center, score_from=20).rows[1] for center in (False, True))
    assert plain["loss"] != centred["loss"]
    assert centred["centered"] is True
    # the mean of each of 3 layers of width 32 is stored too
    assert centred["basis_bytes"] - plain["basis_bytes"] == 3 * 32 * 4


def test_both_allocations_are_reported_at_equal_bytes():
    model, ids = tiny_model("llama"), tiny_ids(T)[0]
    swept = sweep(model, ids, ranks=[4, 8], allocation="energy", score_from=20)
    assert [(row["rank"], row["allocate"]) for row in swept.rows] == [
        (None, "uniform"), (4, "uniform"), (4, "energy"), (8, "uniform"), (8, "energy"),
    ]  # fmt: skip
    for uniform, energy in (swept.rows[1:3], swept.rows[3:5]):
        for field in ("latent_bytes", "basis_bytes", "bytes_full", "break_even_tokens", "ratio"):
            assert uniform[field] == energy[field]
        assert uniform["loss"] != energy["loss"]
    assert {rank: sum(ranks) for rank, ranks in swept.ranks_by_layer.items()} == {4: 12, 8: 24}
    by_layer = dict(enumerate(swept.ranks_by_layer[4]))
    assert len(set(by_layer.values())) > 1
    cut = token_losses(model, ids, score_from=20, attend=truncating(View.on(model), by_layer))
    assert swept.rows[2]["loss"] == pytest.approx(float(cut.mean()), abs=1e-12)


def test_the_rows_say_what_was_stored():
    model, ids = tiny_model("llama"), tiny_ids(T)[0]
    reference, row = sweep(model, ids, ranks=[4], of="k", score_from=20).rows
    held = storage(dict.fromkeys(range(3), 4), dict.fromkeys(range(3), 16), T)
    assert {key: row[key] for key in vars(held)} == vars(held)
    assert reference["rank"] is None
    assert reference["delta"] == reference["delta_low"] == reference["delta_high"] == 0.0
    assert reference["latent_bytes"] == reference["bytes_full"] == 3 * 16 * T * 4
    assert reference["basis_bytes"] == 0
    assert reference["perplexity"] == pytest.approx(math.exp(reference["loss"]))
    assert row["delta"] == pytest.approx(row["loss"] - reference["loss"], abs=1e-12)
    assert row["delta_low"] < row["delta"] < row["delta_high"]


def test_ranks_left_open_are_a_half_a_quarter_and_an_eighth_of_the_width():
    swept = sweep(tiny_model("llama"), tiny_ids(T)[0], score_from=20)
    assert [row["rank"] for row in swept.rows] == [None, 16, 8, 4]
    # nine tokens fitted allow no half of 32
    few = sweep(tiny_model("llama"), tiny_ids(T)[0], basis="prefix", score_from=9)
    assert [row["rank"] for row in few.rows] == [None, 9, 8, 4]


def test_the_spectrum_needs_one_clean_pass_and_doubles_its_ranks():
    model, ids = tiny_model("llama"), tiny_ids(T)[0]
    forwards = []
    handle = body_of(model).register_forward_hook(lambda _m, _a, k, _o: forwards.append(k["input_ids"].shape[1]),
                                                    with_kwargs=True)  # fmt: skip
    rows = spectrum_rows(model, ids)
    handle.remove()
    assert [length for length in forwards if length > 10] == [T]
    of_one = [row for row in rows if (row["stage"], row["layer"]) == ("post_rope", 1)]
    assert [row["rank"] for row in of_one] == [1, 2, 4, 8, 16, 32]
    assert of_one[-1]["energy"] == pytest.approx(1)
    assert all(later["energy"] > row["energy"] for row, later in itertools.pairwise(of_one))
    assert len(rows) == 2 * 3 * 6


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ranks": [0]}, r"rank must be between 1 and 32 \(80 tokens fitted, width 32\), got 0"),
        ({"ranks": [8, 33]}, r"between 1 and 32 .* got 33"),
        ({"ranks": [21], "basis": "prefix"}, r"between 1 and 20 \(20 tokens fitted, width 32\), got 21"),
        ({"ranks": [20], "basis": "prefix", "center": True}, r"between 1 and 19 \(20 tokens fitted, centred"),
        ({"ranks": [4], "basis": "prefix", "score_from": 0}, r"basis prefix needs score_from to be at least 2, got 0"),
        ({"ranks": [4], "score_from": 78}, r"score_from must be between 0 and 77 for tokens 80.*got 78"),
        (
            {"ranks": [4], "basis": "heldout"},
            "a text to fit on and the basis heldout belong together, got basis heldout",
        ),
        ({"ranks": [4], "basis": "other"}, "basis must be one of oracle, prefix, heldout, got 'other'"),
        ({"ranks": [4], "allocation": "even"}, "allocate must be one of uniform, energy, got 'even'"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_any_long_pass(settings, text):
    model = tiny_model("llama")
    lengths = []
    body_of(model).register_forward_hook(lambda _m, _a, k, _o: lengths.append(k["input_ids"].shape[1]),
                                           with_kwargs=True)  # fmt: skip
    with pytest.raises(ValueError, match=text):
        sweep(model, tiny_ids(T)[0], **({"score_from": 20} | settings))
    assert max(lengths, default=0) <= 2


def test_keys_that_cannot_be_turned_back_are_refused_by_name():
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="llama"):
        sweep(model, tiny_ids(T)[0], ranks=[4], stage="pre_rope", score_from=20)


def test_keys_that_are_not_finite_are_named():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("inf")
    with pytest.raises(KvprobeError, match="keys or values of layer 1 are not finite at float32"):
        spectrum_rows(model, tiny_ids(T)[0], stages=["post_rope"])


def test_the_model_leaves_a_sweep_as_it_entered():
    model, ids = tiny_model("gemma3_text"), tiny_ids(T)
    before = model(input_ids=ids).logits
    sweep(model, ids, ranks=[3], stage="pre_rope", score_from=20)
    assert torch.equal(model(input_ids=ids).logits, before)


# ---- real models, by another road: an attention of this file's own, numpy's SVD, all logits at once


def independent_loss(model, ids, score_from, cut):
    """Loss with `cut(keys, values) -> keys, values` ([heads, T, head_dim] each, numpy) in every layer."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module, query, key, value, attention_mask, scaling, **_):
        key, value = (
            torch.from_numpy(x).float()[None] for x in cut(module.layer_idx, key[0].numpy(), value[0].numpy())
        )
        group_size = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1)
        weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    name, before = "independent", model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, eager_mask)
    model.config._attn_implementation = name
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0, score_from:-1]
    finally:
        model.config._attn_implementation = before
    return float(torch.nn.functional.cross_entropy(logits, ids[0, score_from + 1 :]))


def by_numpy(of, rank, captured=None):
    """A `cut` for :func:`independent_loss`: oracle, or projected on the vectors of `captured[layer]` (K, V)."""

    def joint(key, value):
        parts = {"kv": [key, value], "k": [key], "v": [value]}[of]
        return np.concatenate([x.transpose(1, 0, 2).reshape(x.shape[1], -1) for x in parts], axis=1).astype(np.float64)

    def cut(layer, key, value):
        rows = joint(key, value)
        fitted = rows if captured is None else joint(*captured[layer])
        right = np.linalg.svd(fitted, full_matrices=False)[2][:rank]
        rows = rows @ right.T @ right
        split = [rows] if of != "kv" else np.split(rows, 2, axis=1)
        heads = [x.reshape(len(x), key.shape[0], -1).transpose(1, 0, 2) for x in split]
        return {"kv": lambda: heads, "k": lambda: (heads[0], value), "v": lambda: (key, heads[0])}[of]()

    return cut


def agrees_with_the_independent_loss(loaded, width):
    from kvprobe.text import passages, texts

    # fewer tokens than Gemma's width and more than SmolLM2's: both sides of the decomposition
    model, n_tokens, score_from = loaded.model, 400, 200
    text = texts.read_text("bundled")
    ids = passages.encode(loaded.tokenizer, text, n_tokens=n_tokens).ids
    other = passages.heldout(loaded.tokenizer, text, n_tokens=n_tokens).ids
    ranks = [width // 2, width // 4, width // 8]
    assert independent_loss(model, ids[None], score_from, lambda _, *kv: kv) == pytest.approx(
        float(token_losses(model, ids, score_from=score_from).mean()), abs=1e-3
    )
    swept = sweep(model, ids, ranks=ranks, score_from=score_from)
    assert swept.rows[0]["width"] == width
    for row in swept.rows[1:]:
        wanted = independent_loss(model, ids[None], score_from, by_numpy("kv", row["rank"]))
        assert row["loss"] == pytest.approx(wanted, abs=0.01)
    assert swept.rows[3]["delta"] > 0.05, "an eighth of the width must hurt"
    for of in ("k", "v"):
        row = sweep(model, ids, ranks=[width // 8], of=of, score_from=score_from).rows[1]
        wanted = independent_loss(model, ids[None], score_from, by_numpy(of, width // 8))
        assert row["loss"] == pytest.approx(wanted, abs=0.01)
    captured = {}

    def keep(layer, key, value):
        captured[layer] = key.copy(), value.copy()
        return key, value

    independent_loss(model, other[None], score_from, keep)
    row = sweep(model, ids, ranks=[width // 4], basis="heldout", fit_ids=other, score_from=score_from).rows[1]
    wanted = independent_loss(model, ids[None], score_from, by_numpy("kv", width // 4, captured))
    assert row["loss"] == pytest.approx(wanted, abs=0.01)


@pytest.mark.smollm2
@torch.no_grad()
def test_smollm2_agrees_with_an_independent_implementation(smollm2):
    agrees_with_the_independent_loss(smollm2, 384)


@pytest.mark.gemma3
@torch.no_grad()
def test_gemma3_agrees_with_an_independent_implementation(gemma3):
    agrees_with_the_independent_loss(gemma3, 512)
