"""Laws of every kind of cache, those of the library and two that only tests have: one class, one line of registry."""

from dataclasses import replace

import pytest
import torch

from kvprobe.attention.call import AttentionCall
from kvprobe.bench.latency import Bench
from kvprobe.caches import registry
from kvprobe.decoder.model import from_hf
from kvprobe.generation.choose_engine import choose_engine
from kvprobe.generation.generate import generate
from support import caches
from support.decoders import close, rope_decoder
from support.models import document
from support.tiny import tiny_ids, tiny_model

LENGTH = 90
KINDS = [*registry.KINDS, *caches.KINDS]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    caches.register(monkeypatch)


def fed(decoder, cache, ids, size):
    return torch.cat([decoder(part, cache=cache) for part in ids.split(size, dim=1)], dim=1)


def in_half(call):
    key, value = (held.half().to(call.query.dtype) for held in (call.key, call.value))
    return replace(call, key=key, value=value).attend()


def heaviest(call):
    """Each query sees the 64 keys that gathered most attention before it, in its row and KV head, and itself."""
    batch, n_heads, q_len, _ = call.query.shape
    group = n_heads // call.n_kv_heads
    keep = torch.zeros(batch, n_heads, q_len, q_len, dtype=torch.bool)
    for row in range(batch):
        for head in range(call.n_kv_heads):
            own = slice(head * group, (head + 1) * group)
            scores = call.query[row, own] @ call.key[row, head].T * call.scale
            held, mass = [], {}
            for i in range(q_len):
                if len(held) == 64:
                    held.remove(min(held, key=mass.__getitem__))
                held.append(i)
                mass[i] = 0.0
                keep[row, own, i, held] = True
                weights = scores[:, i, held].softmax(-1).sum(0)
                for token, weight in zip(held, weights.tolist(), strict=True):
                    mass[token] += weight
    return replace(call, mask=keep).attend()


# by kind, the same operation without a cache
OTHER_ROADS = {"full": AttentionCall.attend, "rolling": AttentionCall.attend, "half": in_half, "heavy64": heaviest}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, LENGTH])
def test_a_cache_gives_the_logits_of_the_same_operation_without_one(kind, size):
    # in float64, where a key lands on the other side of a float16 rounding almost never
    decoder, ids = rope_decoder(n_kv_heads=2).double(), tiny_ids(LENGTH, batch=2)
    with decoder.attending(OTHER_ROADS[kind]):
        expected = decoder(ids)
    close(fed(decoder, decoder.cache(kind, LENGTH, batch=2), ids, size), expected)
    if kind in caches.KINDS:
        # and it is another operation than plain attention
        assert (expected - decoder(ids)).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_under_left_padding_a_row_reads_what_it_reads_alone(kind):
    decoder, ids = rope_decoder(n_kv_heads=2).double(), tiny_ids(LENGTH, batch=2)
    cache = decoder.cache(kind, LENGTH, batch=2)
    cache.left_pad = torch.tensor([9, 0])
    got = fed(decoder, cache, ids, 11)
    for row, pad in enumerate([9, 0]):
        alone = decoder.cache(kind, LENGTH)
        close(got[row : row + 1, pad:], fed(decoder, alone, ids[row : row + 1, pad:], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_what_the_formula_says_and_its_state_goes_on_to_the_bit(kind):
    decoder, ids = rope_decoder(n_kv_heads=2), tiny_ids(LENGTH, batch=2)
    cache, other = (decoder.cache(kind, LENGTH, batch=2) for _ in range(2))
    place = replace(decoder.place(LENGTH, batch=2), device="meta")
    assert cache.formula_bytes == cache.nbytes == registry.build(kind, place).formula_bytes
    fed(decoder, cache, ids[:, :80], 40)
    state = {name: tensor.clone() for name, tensor in cache.state().items()}
    expected = fed(decoder, cache, ids[:, 80:], 1)
    other.restore(state)
    assert torch.equal(fed(decoder, other, ids[:, 80:], 1), expected)


@pytest.mark.parametrize("kind", caches.KINDS)
def test_generate_takes_it_and_compiled_code_refuses_it_by_name(kind):
    decoder = from_hf(tiny_model("llama"))
    prompts = [tiny_ids(70)[0].tolist(), tiny_ids(75, seed=1)[0].tolist()]
    cache = decoder.cache(kind, 90, batch=2)
    name = type(cache).__name__
    with pytest.raises(ValueError, match=f"engine numba cannot be used: it does not know the cache {name}"):
        choose_engine(decoder, cache, "numba")
    together = generate(decoder, prompts, max_new_tokens=8, cache=cache)
    for prompt, row in zip(prompts, together.token_ids, strict=True):
        alone = generate(decoder, [prompt], max_new_tokens=8, cache=decoder.cache(kind, 90))
        assert alone.token_ids == (row,)


@pytest.mark.parametrize("kind", caches.KINDS)
def test_the_command_line_takes_it_in_generate_memory_and_latency(kind, main, tiny_llama):
    def run(*arguments):
        done = main(*map(str, arguments), "--format", "json")
        return document(done), done.stderr

    name = {"half": "HalfCache", "heavy64": "HeavyCache"}[kind]
    said, notes = run("generate", tiny_llama, "a b c", "--max-new-tokens", 3, "--cache", kind)
    assert said["run"]["cache_kind"] == kind
    assert said["run"]["step"] == "torch"
    assert f"does not know the cache {name}" in notes
    said, _ = run("memory", tiny_llama, "--context", 100, "--cache", kind, "--cache", "full")
    rows = {row["cache"]: row for row in said["rows"]}
    assert list(rows)[:2] == [kind, "full"]
    assert rows[kind]["measured_bytes"] == rows[kind]["formula_bytes"] < rows["full"]["formula_bytes"]
    said, notes = run("latency", tiny_llama, "--context", 80, "--phase", "cached", "--repeats", 3, "--cache", kind)
    assert said["run"]["cache_kind"] == kind
    assert f"does not know the cache {name}" in notes
    assert [row["step"] for row in said["rows"]] == ["torch"]


@pytest.mark.parametrize("kind", caches.KINDS)
def test_a_timed_step_is_at_its_context_and_its_work_is_what_the_cache_holds(kind):
    decoder, seen = rope_decoder(n_kv_heads=2), []

    def watch(call):
        seen.append(call)
        return call.attend()

    bench = Bench(decoder=decoder, cache_kind=kind, repeats=3)
    with decoder.attending(watch):
        observed = [*bench.measure([70], batches=[1, 3], phases=["cached"])]
    # the last steps timed, of 3 rows: 2 layers each, one query at the 70th token
    for call in seen[-6:]:
        assert call.query.shape[:3] == (3, 4, 1)
        assert int(call.keep.sum(-1).max()) == (64 if kind == "heavy64" else 70)
    tokens = {"half": 70 * 2 * 2 * 8 * 2, "heavy64": 64 * 2 * (2 * 8 * 4 + 4 + 8)}[kind]
    assert [entry.works[0].cache_bytes for entry in observed] == [2 * tokens, 3 * 2 * tokens]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cache", "halves"), f"'halves' is not one of {', '.join(map(repr, registry.KINDS))}"),
        (("--cache", "full", "--window", 5), "--window needs --cache rolling, not full"),
        (("--cache", "full", "--no-cache"), "give only one of them"),
    ],
)
def test_a_cache_that_is_not_there_is_a_usage_error(arguments, said, main, tiny_llama):
    done = main("generate", str(tiny_llama), "a b", *map(str, arguments))
    assert done.returncode == 2
    assert said in done.stderr
