import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvprobe.decoder.model import from_hf
from kvprobe.errors import KvprobeError
from kvprobe.generation.generate import Generation, Sampling, generate, left_padded, stream
from support.decoders import FAMILIES, decode, prefill, rope_decoder
from support.tiny import tiny_ids, tiny_model

PROMPT = tiny_ids(10)[0].tolist()


def distribution(sampling, logits):
    """The whole vocabulary's probabilities under `sampling`, from its candidates."""
    probabilities, ids = sampling.candidates(logits)
    return torch.zeros(logits.shape).scatter(1, ids, probabilities)


def log(*probabilities):
    return torch.tensor([probabilities]).log()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.1, 0.4, 0.2, 0.3]),
        # p ** (1 / T), normalised: 1, 16, 4, 9 over 30
        (Sampling(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (Sampling(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1.0, top_k=1), [0, 1, 0, 0]),
        (Sampling(temperature=1.0, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        # 0.4 is too little, 0.4 + 0.3 is enough
        (Sampling(temperature=1.0, top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1.0, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(temperature=1.0, top_p=1e-9), [0, 1, 0, 0]),
        (Sampling(temperature=1.0, top_p=1.0), [0.1, 0.4, 0.2, 0.3]),
        # of the three likeliest, renormalised to 4/9, 3/9, 2/9, two make three quarters; of all it would take three
        (Sampling(temperature=1.0, top_k=3, top_p=0.75), [0, 4 / 7, 0, 3 / 7]),
        # tempered first: 16/30 alone is half
        (Sampling(temperature=0.5, top_p=0.5), [0, 1, 0, 0]),
        (Sampling(), [0, 1, 0, 0]),
        (Sampling(top_k=3, top_p=0.9), [0, 1, 0, 0]),
    ],
)
def test_candidates_have_their_closed_distribution(sampling, expected):
    got = distribution(sampling, log(0.1, 0.4, 0.2, 0.3))
    torch.testing.assert_close(got, torch.tensor([expected], dtype=torch.float32), atol=1e-6, rtol=0)


def test_tokens_are_drawn_as_often_as_they_should_be():
    logits, sampling = log(0.1, 0.4, 0.2, 0.3).expand(20_000, 4), Sampling(temperature=1.0, top_k=3)
    drawn = sampling.pick(logits, torch.Generator().manual_seed(0))
    shares = drawn.bincount(minlength=4) / len(drawn)
    # five standard deviations of a share of 20,000 draws
    torch.testing.assert_close(shares, torch.tensor([0, 4 / 9, 2 / 9, 3 / 9]), atol=0.018, rtol=0)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"temperature": -0.1}, r"must be 0 \(greedy\) or at least 0.0001 and finite, got -0.1"),
        ({"temperature": 1e-9}, "and finite, got 1e-09"),
        ({"temperature": float("nan")}, "and finite, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    ],
)
def test_sampling_outside_its_range_is_refused(given_, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**given_)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 999),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 1)]),
    n_layers=st.integers(1, 3),
    n_prompt=st.integers(1, 12),
    temperature=st.floats(0.3, 2.0),
    top_k=st.none() | st.integers(1, 97),
    top_p=st.none() | st.floats(0.05, 1.0),
)
def test_hugging_faces_generate_gives_the_same(family, seed, heads, n_layers, n_prompt, temperature, top_k, top_p):
    if family == "gpt2":
        shape = {"n_head": heads[0], "n_layer": n_layers}
    else:
        shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "num_hidden_layers": n_layers}
    if family == "gemma3_text":
        shape["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"][:n_layers]
    model = tiny_model(family, seed, **shape)
    decoder, ids = from_hf(model), tiny_ids(n_prompt, seed=seed)
    eos = model.config.eos_token_id
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "pad_token_id": 0}
    theirs = model.generate(ids, do_sample=False, **options)[0, n_prompt:].tolist()
    ours = generate(decoder, ids.tolist(), max_new_tokens=12, eos=[eos])
    assert list(ours.token_ids[0]) == theirs
    # sampling: the same filtered distribution after the prompt
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        chain.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    expected = chain(ids, model(ids, use_cache=False).logits[:, -1]).softmax(-1)
    logits = prefill(decoder, ids, decoder.full_cache(n_prompt))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(distribution(sampling, logits), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, top_k=40, top_p=0.95)])
def test_every_way_of_caching_generates_the_same_tokens(sampling):
    decoder = rope_decoder(n_kv_heads=2)
    reference = generate(decoder, [PROMPT], max_new_tokens=30, naive=True, sampling=sampling, seed=3)
    assert len(set(reference.token_ids[0])) > 3
    for cache, chunk in (
        (None, None),
        (None, 3),
        (decoder.full_cache(100), 7),
        # a window that nothing leaves
        (decoder.rolling_cache(40, n_sink=2, positions="cache"), None),
        (decoder.rolling_cache(40, positions="absolute"), 4),
    ):
        got = generate(decoder, [PROMPT], max_new_tokens=30, cache=cache, chunk=chunk, sampling=sampling, seed=3)
        assert got.token_ids == reference.token_ids
    assert reference.cache_bytes == 0
    # 2 layers, 2 key/value heads of 8, keys and values, 10 + 30 - 1 tokens
    assert generate(decoder, [PROMPT], max_new_tokens=30).cache_bytes == 2 * 2 * 2 * 8 * 39 * 4


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("rotary", [{}, {"rotary": None}])
def test_a_batch_of_unequal_prompts_is_each_of_them_alone(naive, rotary):
    decoder = rope_decoder(n_kv_heads=2, **rotary)
    prompts = [PROMPT, PROMPT[:3], tiny_ids(7, seed=5)[0].tolist()]
    together = generate(decoder, prompts, max_new_tokens=12, naive=naive)
    for row, prompt in enumerate(prompts):
        assert generate(decoder, [prompt], max_new_tokens=12).token_ids[0] == together.token_ids[row]
    assert len(set(together.token_ids)) == 3


def test_the_same_seed_draws_the_same_tokens_and_another_one_others():
    decoder, sampling = rope_decoder(), Sampling(temperature=1.0)

    def drawn(seed):
        return generate(decoder, [PROMPT], max_new_tokens=20, sampling=sampling, seed=seed).token_ids

    state = torch.get_rng_state()
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_row_ends_with_its_end_of_text_and_the_others_go_on():
    decoder = rope_decoder(n_kv_heads=2)
    prompts = [PROMPT, PROMPT[:3]]
    free = generate(decoder, prompts, max_new_tokens=12)
    assert free.stopped_by == ("length", "length")
    # a token that the second row brings first, and the first row not at all
    eos = next(token for token in free.token_ids[1] if token not in free.token_ids[0])
    at = free.token_ids[1].index(eos)
    stopped = generate(decoder, prompts, max_new_tokens=12, eos=[eos])
    assert stopped.token_ids == (free.token_ids[0], free.token_ids[1][: at + 1])
    assert stopped.stopped_by == ("length", "eos")
    alone = generate(decoder, prompts[1:], max_new_tokens=12, eos=[eos])
    assert alone.token_ids[0] == stopped.token_ids[1]
    assert len(alone.decode_ms) == at


def test_tokens_come_one_at_a_time():
    decoder, fed = rope_decoder(), []
    whole = generate(decoder, [PROMPT], max_new_tokens=5)
    cache = decoder.full_cache(14)
    for step in stream(decoder, [PROMPT], max_new_tokens=5, cache=cache):
        assert step.tokens == (whole.token_ids[0][len(fed)],)
        fed.append(cache.length)
    # the last token is given and never fed
    assert fed == [10, 11, 12, 13, 14]


def test_a_used_cache_begins_again():
    decoder = rope_decoder()
    cache = decoder.rolling_cache(6, n_sink=1, positions="cache")
    first = generate(decoder, [PROMPT], max_new_tokens=40, cache=cache)
    assert generate(decoder, [PROMPT], max_new_tokens=40, cache=cache).token_ids == first.token_ids


def test_what_a_generation_says_of_its_time():
    steps = Generation((((1, 2, 3)), (4, 5)), ("length", "eos"), 50.0, (10.0, 30.0), 0)
    assert steps.decode_ms_median == 20.0
    # tokens 2, 3 and 5 in 40 ms
    assert steps.tokens_per_s == pytest.approx(75.0)
    single = generate(rope_decoder(), [PROMPT], max_new_tokens=1)
    assert (single.decode_ms_median, single.tokens_per_s, len(single.token_ids[0])) == (None, None, 1)


def test_prefill_and_decode_are_one_pass_in_two():
    decoder, ids = rope_decoder(), tiny_ids(12, batch=2)
    cache = decoder.full_cache(12, batch=2)
    expected = decoder(ids)
    torch.testing.assert_close(prefill(decoder, ids[:, :11], cache), expected[:, 10], atol=1e-5, rtol=0)
    torch.testing.assert_close(decode(decoder, ids[:, 11], cache), expected[:, 11], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="padding comes first, but the cache already holds 12 tokens"):
        prefill(decoder, ids, cache, left_pad=torch.tensor([0, 1]))


def test_short_rows_are_filled_on_the_left():
    ids, left_pad = left_padded([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert left_pad.tolist() == [0, 2]
    assert left_padded([[5], [8]])[1] is None


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[]], {"max_new_tokens": 1}, "the prompt has no tokens"),
        ([], {"max_new_tokens": 1}, "the prompt has no tokens"),
        ([PROMPT], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        # 10 + 248 - 1 tokens would be fed
        ([PROMPT], {"max_new_tokens": 248}, "257 tokens are more than the model's 256 positions"),
        ([PROMPT], {"max_new_tokens": 248, "naive": True}, "257 tokens are more than"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_any_work(prompts, options, words):
    decoder = rope_decoder()
    for function in (stream, generate):
        with pytest.raises(ValueError, match=words):
            function(decoder, prompts, **options)


def test_a_cache_that_does_not_fit_is_refused_before_any_work():
    decoder = rope_decoder()
    with pytest.raises(ValueError, match="holds 0 of 12 tokens: 13 more do not fit"):
        stream(decoder, [PROMPT], max_new_tokens=4, cache=decoder.full_cache(12))


@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_prompts_of_any_lengths_go_through_a_rolling_cache_as_each_alone(positions):
    decoder, prompts = rope_decoder(), [PROMPT, PROMPT[:2], PROMPT[:7]]

    def rolling(batch):
        return decoder.rolling_cache(5, n_sink=2, positions=positions, batch=batch)

    together = generate(decoder, prompts, max_new_tokens=12, cache=rolling(3))
    for prompt, row in zip(prompts, together.token_ids, strict=True):
        assert generate(decoder, [prompt], max_new_tokens=12, cache=rolling(1)).token_ids == (row,)


def test_logits_that_are_not_finite_are_an_error_and_no_token():
    decoder = rope_decoder()
    decoder.norm.weight[0] = torch.nan
    with pytest.raises(KvprobeError, match=r"not finite at dtype torch\.float32"):
        generate(decoder, [PROMPT], max_new_tokens=2)


@pytest.mark.smollm2
@pytest.mark.parametrize("prompt", ["The capital of France is", "Once upon a time", "def fibonacci(n):"])
def test_on_smollm2_64_greedy_tokens_are_hugging_faces(smollm2, prompt):
    ids = smollm2.tokenizer(prompt, return_tensors="pt")
    eos = smollm2.model.generation_config.eos_token_id
    theirs = smollm2.model.generate(
        **ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=eos, eos_token_id=-1
    )
    ours = generate(from_hf(smollm2.model), ids.input_ids.tolist(), max_new_tokens=64)
    assert list(ours.token_ids[0]) == theirs[0, ids.input_ids.shape[1] :].tolist()
