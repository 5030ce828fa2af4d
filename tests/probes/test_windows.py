"""Windows and sinks: masks and distances by hand, a rolling buffer by loops, fresh passes one by one."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.masks import window_keep
from kvprobe.attention.rope import Rope
from kvprobe.attention.seam import attending, rope_of
from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.probes import window_attention, windows
from kvprobe.probes.losses import token_losses
from kvprobe.probes.window_attention import attend_window, windowed
from kvprobe.shape.spec import Spec
from support.tiny import HOOKED, WINDOW, tiny_ids, tiny_model

ROTARY = tuple(family for family in HOOKED if family not in ("gpt2", "opt"))
# local layers, soft-cap, learned sink logits, MLA, learned positions and the plain case
KINDS = ("llama", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3")

_models = {}


def model_of(family):
    if family not in _models:
        _models[family] = tiny_model(family)
    return _models[family]


@torch.no_grad()
def logits_of(model, ids, attend):
    with attending(model, attend):
        return model(input_ids=ids, use_cache=False).logits


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-5)


def call_of(length, *, mask=None, turn=None, key=None, query=None, sink_logits=None):
    """One layer of one head whose values are the unit vectors, so that its output is its weights."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, length, 8, generator=generator) if query is None else query
    key = torch.randn(1, 1, length, 8, generator=generator) if key is None else key
    value = torch.eye(length)[None, None]
    return AttentionCall(
        layer=0, query=query, key=key, value=value, scale=0.5, mask=mask, turn=turn, sink_logits=sink_logits
    )


# rows are queries, columns keys; worked by hand
BY_HAND = {
    (1, 0): "100000 010000 001000 000100 000010 000001",
    (2, 0): "100000 110000 011000 001100 000110 000011",
    (2, 1): "100000 110000 111000 101100 100110 100011",
    (1, 2): "100000 110000 111000 110100 110010 110001",
    (3, 2): "100000 110000 111000 111100 111110 110111",
    (5, 0): "100000 110000 111000 111100 111110 011111",
    (6, 0): "100000 110000 111000 111100 111110 111111",
}


@pytest.mark.parametrize(("window", "n_sink"), BY_HAND)
def test_six_tokens_by_hand(window, n_sink):
    keep = torch.tensor([[int(cell) for cell in row] for row in BY_HAND[window, n_sink].split()]).bool()
    call = call_of(6)
    weights = attend_window(call, window=window, sinks=range(n_sink))[0, 0]
    assert torch.equal(weights > 0, keep)
    scores = (call.query @ call.key.transpose(-1, -2))[0, 0] * call.scale
    torch.testing.assert_close(weights, scores.masked_fill(~keep, -math.inf).softmax(-1))


def test_a_chosen_sink_is_seen_from_when_it_is_there():
    weights = attend_window(call_of(6), window=2, sinks=(2,))[0, 0]
    rows = ["100000", "110000", "011000", "001100", "001110", "001011"]
    assert torch.equal(weights > 0, torch.tensor([[int(cell) for cell in row] for row in rows]).bool())


def test_the_models_own_window_and_ours_are_both_applied():
    # its own window of 2 hides the sink that ours would keep, and what is third in ours
    own = window_keep(6, window=2)[None, None]
    weights = attend_window(call_of(6, mask=own), window=3, sinks=(0,))[0, 0]
    assert torch.equal(weights > 0, own[0, 0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(6))


@pytest.mark.parametrize("by_slot", [False, True])
def test_a_learned_sink_logit_counts_once(by_slot):
    turn = Rope(torch.tensor([0.0])).turn
    bare, sunk = (
        attend_window(call_of(6, turn=turn, sink_logits=logit), window=2, sinks=(0, 1), by_slot=by_slot)
        for logit in (None, torch.tensor([0.7]))
    )
    call = call_of(6)
    scores = (call.query @ call.key.transpose(-1, -2))[0, 0] * call.scale
    lse = scores.masked_fill(~window_keep(6, window=2, n_sink=2), -math.inf).logsumexp(-1)
    torch.testing.assert_close(sunk[0, 0], bare[0, 0] * (lse.exp() / (lse.exp() + math.exp(0.7)))[:, None])


# the distance from which a query sees each key, worked by hand on slots; absent: not seen
FIRST_OF_SIX = [  # window 2, sink 0: slots are [0 | i−1, i]
    {0: 0},
    {0: 1, 1: 0},
    {0: 2, 1: 1, 2: 0},
    {0: 2, 2: 1, 3: 0},
    {0: 2, 3: 1, 4: 0},
    {0: 2, 4: 1, 5: 0},
]
CHOSEN_OF_SEVEN = [  # window 2, sinks 1 and 3: a sink takes its slot when it leaves the window
    {0: 0},
    {0: 1, 1: 0},
    {1: 1, 2: 0},
    {1: 2, 2: 1, 3: 0},
    {1: 2, 3: 1, 4: 0},
    {1: 3, 3: 2, 4: 1, 5: 0},
    {1: 3, 3: 2, 5: 1, 6: 0},
]


@pytest.mark.parametrize(("sinks", "distances"), [((0,), FIRST_OF_SIX), ((1, 3), CHOSEN_OF_SEVEN)])
def test_distances_between_slots_by_hand(sinks, distances):
    # one key and one query everywhere, turned by their positions: a score then says the distance and nothing else
    rope, length = Rope(torch.tensor([0.3, 0.11])), len(distances)
    one = torch.tensor([1.0, 0.5, -0.3, 0.2, 0.1, 0.0, 0.4, -0.2]).expand(1, 1, length, 8)
    turned = rope.turn(one, torch.arange(length))
    call = call_of(length, turn=rope.turn, key=turned, query=turned)
    weights = attend_window(call, window=2, sinks=sinks, by_slot=True)[0, 0]
    score = [float(turned[0, 0, d] @ turned[0, 0, 0]) * call.scale for d in range(length)]
    for query, seen in enumerate(distances):
        assert weights[query].nonzero()[:, 0].tolist() == sorted(seen)
        for key, distance in seen.items():
            ratio = float(weights[query, key] / weights[query, query])
            assert math.log(ratio) == pytest.approx(score[distance] - score[0], abs=1e-5)


def rolling_buffer(model, *, window, sinks, by_slot):
    """The policies again, a query at a time over an explicit buffer, in float64."""
    ropes = rope_of(model) if by_slot else {}
    own = Spec.from_config(model.config.to_dict()).windows

    def attend(call):
        rows = []
        for i in range(call.query.shape[2]):
            recent = list(range(max(0, i - window + 1), i + 1))
            buffer = [sink for sink in sinks if sink < recent[0]] + recent
            query, key = call.query[:, :, [i]], call.key[:, :, buffer]
            if by_slot:
                turn = ropes[call.layer].turn
                key = turn(turn(key, -torch.tensor(buffer)), torch.arange(len(buffer)))
                query = turn(turn(query, torch.tensor([-i])), torch.tensor([len(buffer) - 1]))
            group_size = call.n_heads // call.n_kv_heads
            key = key.double().repeat_interleave(group_size, dim=1)
            value = call.value[:, :, buffer].double().repeat_interleave(group_size, dim=1)
            scores = query.double() @ key.transpose(-1, -2) * call.scale
            if call.softcap is not None:
                scores = torch.tanh(scores / call.softcap) * call.softcap
            near = own[call.layer] or len(buffer) + i + 1
            scores[..., [i - position >= near for position in buffer]] = -math.inf
            if call.sink_logits is not None:
                extra = call.sink_logits.double()[None, :, None, None].expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, extra], dim=-1)
            rows.append((scores.softmax(-1)[..., : len(buffer)] @ value).float())
        return torch.cat(rows, dim=2)

    return attend


@pytest.mark.parametrize("family", ROTARY)
def test_cache_positions_are_those_of_a_rolling_buffer(family):
    model, ids = model_of(family), tiny_ids(22, batch=2)
    # a window below the model's own of 8 and one above it; then sinks that are not the first
    for window, sinks in ((3, (0, 1)), (WINDOW + 2, (0,)), (3, (2, 5))):
        ours = logits_of(model, ids, windowed(window=window, sinks=sinks, by_slot=True))
        close(ours, logits_of(model, ids, rolling_buffer(model, window=window, sinks=sinks, by_slot=True)))


@pytest.mark.parametrize("family", HOOKED)
def test_absolute_positions_are_a_mask(family):
    model, ids = model_of(family), tiny_ids(22)
    for window, sinks in ((3, (0, 1)), (WINDOW + 2, (0,)), (1, (4,))):
        ours = logits_of(model, ids, windowed(window=window, sinks=sinks))
        close(ours, logits_of(model, ids, rolling_buffer(model, window=window, sinks=sinks, by_slot=False)))


def test_blocks_of_queries_change_nothing(monkeypatch):
    model, ids = model_of("gemma3_text"), tiny_ids(40)
    attend = windowed(window=6, sinks=(0, 1), by_slot=True)
    at_once = logits_of(model, ids, attend)
    monkeypatch.setattr(window_attention, "BLOCK", 5)
    close(logits_of(model, ids, attend), at_once)


@pytest.mark.parametrize("family", KINDS)
def test_a_window_over_everything_is_the_full_pass(family):
    model, ids = model_of(family), tiny_ids(20)
    full = logits_of(model, ids, lambda call: call.attend())
    for window, by_slot in ((20, False), (20, True), (50, True)):
        assert torch.equal(logits_of(model, ids, windowed(window=window, sinks=(0, 3), by_slot=by_slot)), full)
    assert not torch.equal(logits_of(model, ids, windowed(window=7)), full)


@pytest.mark.parametrize("family", ROTARY)
def test_without_sinks_absolute_and_cache_agree(family):
    model, ids = model_of(family), tiny_ids(24)[0]
    rows = {
        positions: windows.grid(model, ids, windows=[5], sinks=[0, 2], positions=positions, score_from=8)
        for positions in ("absolute", "cache")
    }
    assert rows["absolute"][1]["loss"] == pytest.approx(rows["cache"][1]["loss"], abs=1e-6)
    assert rows["absolute"][2]["loss"] != pytest.approx(rows["cache"][2]["loss"], abs=1e-3)


@torch.no_grad()
def fresh_passes(model, ids, window, score_from, n_front):
    losses = []
    for target in range(score_from + 1, len(ids)):
        start = max(n_front, target - window)
        context = torch.cat([ids[:n_front], ids[start:target]])
        logits = model(input_ids=context[None], use_cache=False).logits[0, -1]
        losses.append(F.cross_entropy(logits, ids[target]).item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("n_front", [0, 1])
def test_recompute_is_a_loop_of_fresh_passes(family, n_front):
    model, ids = model_of(family), tiny_ids(30)[0]
    # all cut, one whole, several whole, all but one whole, all whole
    for window, score_from in ((4, 10), (11 - n_front, 10), (15, 10), (28, 3), (29, 3), (1, 0)):
        ours = windows.recompute_losses(
            model, ids, window=window, score_from=score_from, n_front=n_front, batch_tokens=24
        )
        close(ours, fresh_passes(model, ids, window, score_from, n_front))


def test_recompute_in_the_grid_keeps_the_bos_and_says_so():
    model, ids = model_of("llama"), tiny_ids(30)[0]
    for n_front in (0, 1):
        row = windows.grid(model, ids, windows=[6], positions="recompute", score_from=10, n_front=n_front)[1]
        assert row["loss"] == pytest.approx(float(fresh_passes(model, ids, 6, 10, n_front).mean()), abs=1e-5)
        assert (row["bos_kept"], row["cache_tokens"], row["n_sink"]) == (n_front == 1, 6 + n_front, 0)


def test_the_rows_of_a_grid():
    model, ids = model_of("gemma3_text"), tiny_ids(24)[0]
    rows = windows.grid(model, ids, windows=[4, 30], sinks=[0, 3], score_from=8, n_front=1)
    plain = token_losses(model, ids, score_from=8)
    assert [(row["window"], row["n_sink"], row["cache_tokens"], row["bos_kept"]) for row in rows] == [
        (None, 0, 24, True),
        (4, 0, 4, False),
        (4, 3, 7, True),
        (30, 0, 24, False),
        (30, 3, 24, True),
    ]
    assert rows[0]["loss"] == float(plain.mean())
    assert rows[0]["perplexity"] == pytest.approx(math.exp(float(plain.mean())))
    assert (rows[0]["delta"], rows[0]["delta_low"], rows[0]["delta_high"]) == (0, 0, 0)
    masked = token_losses(
        model, ids, score_from=8, attend=lambda call: call.attend(keep=call.keep & window_keep(24, window=4, n_sink=3))
    )
    assert rows[2]["loss"] == pytest.approx(float(masked.mean()), abs=1e-6)
    assert rows[2]["delta"] == pytest.approx(float((masked - plain).mean()), abs=1e-6)
    assert rows[2]["delta_low"] < rows[2]["delta"] < rows[2]["delta_high"]
    assert rows[2]["sink_positions"] == "0,1,2"
    assert {row["local_layers"] for row in rows} == {f"0,2 ({WINDOW})"}
    assert not any(row["has_sink_logits"] or row["sink_logits_dropped"] for row in rows)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [((None, None), None), ((8, 8, 8), "0-2 (8)"), ((8, None, 8, 8, None, 4), "5 (4) 0,2-3 (8)")],
)
def test_local_layers_are_named(sizes, says):
    spec = Spec.from_config(model_of("llama").config.to_dict())
    layers = tuple(replace(spec.layers[0], kind="sliding" if size else "full", limit=size) for size in sizes)
    assert windows.describe_local_layers(replace(spec, layers=layers).windows) == says


@pytest.mark.parametrize("positions", ["absolute", "cache", "recompute"])
def test_dropped_sink_logits_are_those_of_a_model_without(positions):
    model, ids = model_of("gpt_oss"), tiny_ids(24)[0]
    without = copy.deepcopy(model)
    for name, parameter in without.named_parameters():
        if name.endswith("sinks"):
            parameter.fill_(-1e4)
    settings = {"windows": [5], "sinks": [0] if positions == "recompute" else [2], "positions": positions}
    rows = windows.grid(model, ids, score_from=8, drop_sink_logits=True, **settings)
    theirs = windows.grid(without, ids, score_from=8, **settings)
    assert rows[0]["loss"] == float(token_losses(model, ids, score_from=8).mean())
    assert [row["loss"] for row in rows[1:]] == pytest.approx([row["loss"] for row in theirs], abs=1e-6)
    assert [row["sink_logits_dropped"] for row in rows] == [False, True, True]
    assert all(row["has_sink_logits"] for row in rows)
    assert abs(rows[1]["delta"]) > 1e-3


def planted(position):
    """A GPT-2 whose first layer has one key of great norm, at ``position``, and queries that all look for it."""
    model, ids = tiny_model("gpt2"), tiny_ids(24)[0]
    ids[ids == 96] = 95
    ids[position] = 96
    width = model.config.n_embd
    model.transformer.wte.weight[96] = 0
    model.transformer.wte.weight[96, 7] = 100
    attention = model.transformer.h[0].attn.c_attn
    attention.weight[:, : 2 * width] = 0
    attention.weight[7, width : 2 * width] = 1
    attention.bias[: 2 * width] = 0
    attention.bias[:width] = 1
    return model, ids


def test_the_heaviest_key_is_found_where_it_was_planted():
    for position in (3, 9):
        model, ids = planted(position)
        chosen = windows.choose_sinks(model, ids, 1, choice="heaviest", score_from=16)
        assert chosen[0] == (position,)
        rows = windows.grid(model, ids, windows=[2], sinks=[1], sink_choice="heaviest", score_from=16)
        assert rows[1]["sink_positions"].startswith(f"0:{position} 1:")
        assert rows[1]["sink_choice"] == "heaviest"


def test_heaviest_keys_are_those_of_the_eager_maps():
    model, ids = tiny_model("qwen3", seed=3), tiny_ids(24)[0]
    chosen = windows.choose_sinks(model, ids, 3, choice="heaviest", score_from=14)
    model.set_attn_implementation("eager")
    maps = model(input_ids=ids[None], use_cache=False, output_attentions=True).attentions
    for layer, weights in enumerate(maps):
        # [batch, n_heads, q_len, kv_len]
        mass = weights[0, :, :14].sum((0, 1))
        assert set(chosen[layer]) == set(mass.topk(3).indices.tolist())
        assert list(chosen[layer]) == sorted(chosen[layer])


def test_a_heavy_key_among_what_is_scored_is_not_looked_at():
    model, ids = planted(10)
    assert windows.choose_sinks(model, ids, 1, choice="heaviest", score_from=20)[0] == (10,)
    (before,) = windows.choose_sinks(model, ids, 1, choice="heaviest", score_from=10)[0]
    assert before < 10


def test_random_sinks_are_nested_seeded_and_never_the_first_token():
    def draw(n, seed):
        return windows.choose_sinks(None, tiny_ids(40)[0], n, choice="random", score_from=20, seed=seed)

    assert set(draw(2, 0)) < set(draw(5, 0))
    assert draw(5, 0) == draw(5, 0) != draw(5, 1)
    assert draw(19, 0) == tuple(range(1, 20))


def test_the_bos_alone_can_be_the_sink():
    model, ids = model_of("llama"), tiny_ids(20)[0]
    settings = {"windows": [4], "sinks": [1], "score_from": 8, "n_front": 1}
    bos = windows.grid(model, ids, sink_choice="bos", **settings)[1]
    first = windows.grid(model, ids, sink_choice="first", **settings)[1]
    assert bos["loss"] == first["loss"]
    assert (bos["sink_choice"], bos["bos_kept"]) == ("bos", True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"windows": [0]}, "window must be at least 1 (the query itself), got 0"),
        ({"sinks": [-1]}, "sinks must be between 0 and 20 for 20 tokens, got -1"),
        ({"sinks": [21]}, "sinks must be between 0 and 20 for 20 tokens, got 21"),
        ({"score_from": 19}, "score_from must be between 0 and 17 for tokens 20"),
        ({"positions": "relative"}, "positions must be one of absolute, cache, recompute, got 'relative'"),
        ({"positions": "recompute", "sinks": [4]}, "sinks do not apply to positions recompute, got 4"),
        ({"sink_choice": "last"}, "sink_choice must be one of first, bos, random, heaviest, got 'last'"),
        ({"sink_choice": "bos", "sinks": [1]}, "the passage has no BOS"),
        (
            {"sink_choice": "bos", "sinks": [2], "n_front": 1},
            "sinks must be between 0 and 1 for sink_choice bos, got 2",
        ),
        ({"sink_choice": "random", "sinks": [8]}, "sinks must be between 0 and 7 for sink_choice random, got 8"),
        ({"sink_choice": "heaviest", "sinks": [9]}, "sinks must be between 0 and 8 for sink_choice heaviest, got 9"),
        ({"drop_sink_logits": True}, "no learned sink logits to drop"),
        ({"windows": []}, "at least one window"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_value(settings, says):
    usual = {"windows": [4], "sinks": [0], "score_from": 8}
    with pytest.raises((ValueError, KvprobeError)) as refused:
        windows.grid(model_of("llama"), tiny_ids(20)[0], **(usual | settings))
    assert says in str(refused.value)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_cannot_be_turned_and_the_reason_is_given(family):
    with pytest.raises(UnsupportedModelError) as refused:
        windows.grid(model_of(family), tiny_ids(20)[0], windows=[4], positions="cache", score_from=8)
    for word in (family, "no rotary position embedding", "absolute and recompute"):
        assert word in str(refused.value)


def test_only_cache_positions_go_beyond_the_models_positions():
    ids = tiny_ids(40)[0]
    for family, positions in (("gpt2", "absolute"), ("llama", "absolute"), ("gpt2", "recompute")):
        short = tiny_model(family, **{"n_positions" if family == "gpt2" else "max_position_embeddings": 32})
        with pytest.raises(KvprobeError, match="40 tokens are more than the 32 positions"):
            windows.grid(short, ids, windows=[8], positions=positions, score_from=8)
        assert len(windows.grid(short, ids[:32], windows=[8], positions=positions, score_from=8)) == 2
    rows = windows.grid(short_llama(), ids, windows=[8], sinks=[2], positions="cache", score_from=8)
    same = windows.grid(model_of("llama"), ids, windows=[8], sinks=[2], positions="cache", score_from=8)
    assert rows == same


def short_llama():
    return tiny_model("llama", max_position_embeddings=32)


@pytest.mark.parametrize("sinks", [(1, 0), (2, 2), (-1,), {0: (3, 1)}])
def test_sinks_out_of_order_are_refused(sinks):
    with pytest.raises(ValueError, match="different positions in order"):
        windowed(window=4, sinks=sinks)


def test_a_window_over_part_of_a_pass_is_refused():
    call = call_of(6)
    with pytest.raises(ValueError, match="a window needs a whole pass, got 2 queries on 6 keys"):
        attend_window(replace(call, query=call.query[:, :, 4:]), window=2, sinks=())


@pytest.mark.parametrize("by_slot", [False, True])
def test_rows_of_a_padded_batch_are_those_alone(by_slot):
    model, ids = model_of("llama"), tiny_ids(20)
    attend = windowed(window=4, by_slot=by_slot)
    alone = logits_of(model, ids, attend)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    seen = torch.ones_like(padded)
    seen[:, :5] = 0
    with torch.no_grad(), attending(model, attend):
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=padded, attention_mask=seen, position_ids=positions, use_cache=False).logits
    close(logits[:, 5:], alone)


@pytest.mark.smollm2
def test_smollm2_loses_much_without_a_sink_and_little_with_one(smollm2):
    from kvprobe.text import passages, texts

    ids = passages.encode(smollm2.tokenizer, texts.read_text("bundled"), n_tokens=1024).ids
    full, bare, one, four = windows.grid(smollm2.model, ids, windows=[256], sinks=[0, 1, 4], score_from=512)
    assert 1.6 < bare["perplexity"] / full["perplexity"] < 2.4
    assert one["delta"] < 0.2 * bare["delta"]
    assert abs(four["delta"] - one["delta"]) < 0.05
    # another road: the model's own eager attention under an additive mask made here
    distance = torch.arange(1024)[:, None] - torch.arange(1024)
    hidden = (distance < 0) | ((distance >= 256) & (torch.arange(1024) >= 4))
    mask = torch.zeros(1, 1, 1024, 1024).masked_fill(hidden, torch.finfo(torch.float32).min)
    usual = smollm2.model.config._attn_implementation
    smollm2.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = smollm2.model(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
    smollm2.model.set_attn_implementation(usual)
    assert four["loss"] == pytest.approx(F.cross_entropy(logits[512:-1], ids[513:]).item(), abs=1e-4)


@pytest.mark.smollm2
def test_smollm2_by_cache_slot_is_a_rolling_buffer_with_llamas_rotation(smollm2):
    from kvprobe.text import passages, texts

    length, window, n_sink = 320, 96, 4
    ids = passages.encode(smollm2.tokenizer, texts.read_text("bundled"), n_tokens=length).ids
    ours = windows.grid(smollm2.model, ids, windows=[window], sinks=[n_sink], positions="cache", score_from=160)[1]
    angle = torch.arange(length)[:, None] * 100_000.0 ** (-torch.arange(0, 64, 2) / 64)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)

    def turned(x, at, back=False):
        half = torch.cat([-x[..., 32:], x[..., :32]], dim=-1)
        return x * cos[at] + half * (-sin[at] if back else sin[at])

    def attend(call):
        key = turned(call.key, torch.arange(length), back=True)
        query = turned(call.query, torch.arange(length), back=True)
        rows = []
        for i in range(length):
            buffer = [p for p in range(i + 1) if p < n_sink or p > i - window]
            slots = torch.arange(len(buffer))
            keys = turned(key[:, :, buffer], slots).repeat_interleave(3, dim=1)
            last = turned(query[:, :, [i]], slots[-1:])
            weights = (last @ keys.transpose(-1, -2) / 8).softmax(-1)
            rows.append(weights @ call.value[:, :, buffer].repeat_interleave(3, dim=1))
        return torch.cat(rows, dim=2)

    logits = logits_of(smollm2.model, ids[None], attend)[0]
    assert ours["loss"] == pytest.approx(F.cross_entropy(logits[160:-1], ids[161:]).item(), abs=1e-4)
