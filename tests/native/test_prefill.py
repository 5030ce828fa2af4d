import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe.decoder import widening
from kvprobe.decoder.model import DecoderConfig, from_hf
from kvprobe.decoder.torch_engine import TorchEngine
from kvprobe.generation import generate
from kvprobe.generation.choose_engine import choose_engine
from kvprobe.native import eligible
from support.decoders import (
    FAMILIES,
    VARIANTS,
    close,
    drawn_config,
    held,
    in_bfloat16,
    random_decoder,
    rope_decoder,
    rounding,
    same_memory,
    stepper,
)
from support.tiny import tiny_ids, tiny_model

pytest.importorskip("numba")

from kvprobe.native import decode_kernels, intrinsics, prefill_kernels, prefill_program, products, tiles
from kvprobe.native.decode_program import NumbaStep
from kvprobe.native.workers import Arena

# one layer of two with a window of its own
CONFIG = DecoderConfig(
    n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden=32, mlp_width=40, vocab=97, max_positions=300,
    windows=(30, None),
)  # fmt: skip
# around a block, the eight tokens that are multiplied apart, and more than one of either
LENGTHS = (1, 2, 7, 8, 9, 23, 24, 25, 32, 33, 55)


def compiled(decoder, cache, **options):
    assert eligible.obstacle(decoder, cache) is None
    return prefill_program.NumbaReader(decoder, cache, **options)


def both_read(decoder, parts, *, atol=2e-5, reference=None, **options):
    """One prompt in parts, by the compiled reader and by torch, each into its own cache of the same size."""
    batch, capacity = parts[0].shape[0], sum(part.shape[1] for part in parts)
    ours, theirs = (decoder.full_cache(capacity, batch=batch) for _ in range(2))
    reader, expected = compiled(decoder, ours, **options), TorchEngine(reference or decoder, theirs)
    for part in parts:
        close(reader.read(part), expected._read(part), atol)
        same_memory(ours, theirs, atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_reference_at_every_length(family):
    decoder = from_hf(tiny_model(family))
    for length in LENGTHS:
        both_read(decoder, [tiny_ids(length)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_parts_goes_on_where_it_stood(family):
    both_read(from_hf(tiny_model(family)), tiny_ids(97, batch=2).split([30, 1, 24, 42], dim=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_is_read_in_goes(family, monkeypatch):
    monkeypatch.setattr(prefill_program, "TOKENS_AT_ONCE", 2 * tiles.BLOCK)
    both_read(from_hf(tiny_model(family)), [tiny_ids(150, batch=3)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_that_changes_the_model_is_followed(variant):
    family, overrides = VARIANTS[variant]
    both_read(from_hf(tiny_model(family, **overrides)), tiny_ids(60).split([50, 10], dim=1))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_decoders_agree(data):
    decoder, draw = random_decoder(drawn_config(data.draw)), data.draw
    parts = draw(st.lists(st.integers(1, 31), min_size=1, max_size=2))
    ids = tiny_ids(sum(parts), batch=draw(st.sampled_from([1, 1, 3])), seed=draw(st.integers(0, 99)))
    both_read(decoder, ids.split(parts, dim=1), atol=rounding(decoder, ids), n_threads=draw(st.integers(1, 3)))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_farther_from_the_numbers_it_stands_for_than_torchs(family):
    low, high = in_bfloat16(from_hf(tiny_model(family)))
    ids = tiny_ids(60)
    exact = TorchEngine(high, high.full_cache(60))._read(ids)
    theirs = TorchEngine(low, low.full_cache(60))._read(ids)
    ours = compiled(low, low.full_cache(60)).read(ids)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


@pytest.fixture
def guarded(monkeypatch):
    """Every vector between numbers that nobody may write: those that the kernels work in, and a cache's buffers."""
    kept, mark = [], 12345.0

    def floats(self, count, dtype=torch.float32):
        whole = torch.full((count + 128,), mark, dtype=dtype)
        whole[64 : 64 + count] = 0
        kept.append(whole)
        return whole[64 : 64 + count]

    def check():
        assert kept
        for whole in kept:
            edges = torch.cat([whole[:64], whole[-64:]])
            assert torch.equal(edges, torch.full_like(edges, mark))

    monkeypatch.setattr(Arena, "floats", floats)
    monkeypatch.setattr(Arena, "room", floats)
    return floats, check


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_nothing_is_written_beside_a_buffer(data, guarded):
    draw, (floats, check) = data.draw, guarded
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    decoder = random_decoder(drawn_config(draw), dtype)
    length, batch = draw(st.integers(1, 60)), draw(st.sampled_from([1, 2]))
    cache = decoder.full_cache(length + 1, batch=batch)
    for layer in cache.layers:
        layer.keys, layer.values = (
            floats(None, buffer.numel(), buffer.dtype).view_as(buffer) for buffer in (layer.keys, layer.values)
        )
    compiled(decoder, cache, n_threads=draw(st.integers(1, 3))).read(tiny_ids(length, batch=batch))
    stepper(decoder, cache, choice="numba").step(torch.zeros(batch, dtype=torch.long))
    check()


def test_a_bfloat16_cache_is_widened_and_nothing_else():
    low, _ = in_bfloat16(rope_decoder(n_kv_heads=2))
    ours, theirs = low.full_cache(60), low.full_cache(60)
    compiled(low, ours).read(tiny_ids(60))
    TorchEngine(low, theirs)._read(tiny_ids(60))
    # both rounded once from nearly the same
    torch.testing.assert_close(ours.buffers()[0].keys, theirs.buffers()[0].keys, atol=1e-2, rtol=2**-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_piece_begins_before_what_it_reads_is_written_and_what_it_overwrites_is_read(family):
    k, decoder = prefill_kernels, from_hf(tiny_model(family))
    program = compiled(decoder, decoder.full_cache(60))._program
    program.enter(0, tiny_ids(60)[0], torch.arange(60), past=0)
    rows = program.rows
    qkv = program.qkv.data_ptr()

    def reads(row):
        # attention reads the cache too, which is written with the queries
        return {row[k.SOURCE]} | ({row[k.TARGET]} if row[k.MODE] == k.ADD or row[k.OP] == k.ADD_NORMED else set())

    def writes(row):
        target = {row[k.TARGET]} if row[k.TARGET] else {qkv}
        return target | ({row[k.SOURCE]} if row[k.OP] == k.ADD_NORMED else set())

    for i, row in enumerate(rows[:-1]):
        for j, before in enumerate(rows[:i]):
            if (reads(row) & writes(before)) or (writes(row) & reads(before)):
                assert row[k.NEED] >= rows[j + 1][k.START]
        assert row[k.NEED] <= row[k.START]


def test_no_row_beyond_a_matrix_is_read():
    """A matrix up to the last byte of a page, and the next page locked: in a process of its own, which would die."""
    code = """
import ctypes, mmap, numpy as np
from kvprobe.native.intrinsics import compiled
from kvprobe.native.tiles import BLOCK, NARROW_ROWS, narrow_tile, tile

@compiled
def multiply(narrow, matrix, line, n_rows, width, block, out):
    if narrow:
        narrow_tile(matrix, line, n_rows, 4, block, width, out)
    else:
        tile(matrix, line, n_rows, 4, block, width, out)

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
width, block = 7, np.random.default_rng(0).standard_normal((7, BLOCK)).astype(np.float32)
for narrow in (False, True):
    for n_rows in range(1, NARROW_ROWS + 1 if narrow else 5):
        n_bytes = 4 * n_rows * width
        matrix = np.frombuffer(memory, np.float32, n_rows * width, offset=page - n_bytes).reshape(n_rows, width)
        matrix[:] = np.arange(n_rows * width).reshape(n_rows, width)
        out = np.zeros((NARROW_ROWS, BLOCK), np.float32)
        multiply(narrow, start + page - n_bytes, 4 * width, n_rows, width, block.ctypes.data, out.ctypes.data)
        seen = 8 if narrow else BLOCK
        assert np.allclose(out[:n_rows, :seen], (matrix @ block)[:, :seen], atol=1e-4), (narrow, n_rows)
print("whole")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "whole\n", (done.returncode, done.stderr)


@pytest.mark.parametrize("n_threads", [2, 5])
def test_threads_change_no_bit(n_threads):
    decoder, ids = from_hf(tiny_model("gemma3_text")), tiny_ids(70, batch=2)
    alone, together = (compiled(decoder, decoder.full_cache(70, batch=2), n_threads=n) for n in (1, n_threads))
    assert torch.equal(alone.read(ids), together.read(ids))


def test_steps_go_on_from_what_was_read_and_reading_from_steps():
    decoder, ids = rope_decoder(), tiny_ids(80)
    cache = decoder.full_cache(80)
    reader, step, expected = compiled(decoder, cache), stepper(decoder, cache, choice="numba"), decoder(ids)
    close(decoder.logits(reader.read(ids[:, :40])), expected[:, 39])
    close(step.step(ids[:, 40]), expected[:, 40])
    close(decoder.logits(reader.read(ids[:, 41:79])), expected[:, 78])
    close(step.step(ids[:, 79]), expected[:, 79])


def test_a_cache_that_is_emptied_starts_again():
    decoder, ids = rope_decoder(), tiny_ids(50)
    cache = decoder.full_cache(50)
    reader = compiled(decoder, cache)
    first = reader.read(ids)
    cache.reset()
    assert torch.equal(reader.read(ids), first)


def test_who_reads_is_a_rule_of_the_prompt_and_the_cache():
    decoder = from_hf(tiny_model("gemma3_text"))

    def reads(cache, n_tokens=64, kind="auto"):
        return choose_engine(decoder, cache, kind).reads(n_tokens)

    assert reads(decoder.full_cache(80)) == reads(decoder.full_cache(80), kind="numba") == "numba"
    assert reads(decoder.full_cache(80), kind="torch") == "torch"
    assert reads(decoder.full_cache(80), n_tokens=widening.FEWEST_TOKENS - 1) == "torch"
    # rings that would roll, and caches whose rows or positions differ
    assert reads(decoder.full_cache(80, bound_local=True)) == "torch"
    assert reads(decoder.rolling_cache(80)) == "torch"
    padded = decoder.full_cache(80)
    padded.left_pad = torch.tensor([3])
    assert reads(padded) == "torch"
    used = decoder.full_cache(100)
    decoder(tiny_ids(30), cache=used)
    assert reads(used, n_tokens=70) == "numba"
    assert reads(used, n_tokens=71) == "torch"


def test_what_it_says_would_read_reads(monkeypatch):
    decoder, ids = from_hf(tiny_model("llama")), tiny_ids(80)
    read, expected = [], decoder(ids)
    theirs = prefill_program.NumbaReader.read
    monkeypatch.setattr(
        prefill_program.NumbaReader, "read", lambda self, part: read.append(part.shape[1]) or theirs(self, part)
    )
    for chunk, parts in ((None, [80]), (70, [70]), (40, [])):
        engine = choose_engine(decoder, decoder.full_cache(80))
        close(engine.prefill(ids, chunk=chunk), expected[:, -1])
        assert read == parts
        read.clear()


def test_several_tokens_at_once_are_as_many_steps():
    decoder, ids = from_hf(tiny_model("gemma3_text")), tiny_ids(30, batch=2)
    expected = decoder(ids)
    for kind in ("torch", "numba"):
        engine = choose_engine(decoder, decoder.full_cache(30, batch=2), kind)
        close(engine.prefill(ids[:, :20]), expected[:, 19])
        close(engine.decode(ids[:, 20:25]), expected[:, 20:25])
        close(engine.decode(ids[:, 25:26]), expected[:, 25:26])


def test_the_same_prompt_gives_the_same_bits_again():
    decoder, ids = from_hf(tiny_model("llama")), tiny_ids(80)
    first, again = (choose_engine(decoder, decoder.full_cache(80)).prefill(ids) for _ in range(2))
    assert torch.equal(first, again)


def test_compiled_code_refuses_a_setting_that_it_does_not_know(monkeypatch):
    assert {field.name for field in fields(DecoderConfig)} == eligible.HONOURED
    decoder = rope_decoder()
    cache = decoder.full_cache(9)
    monkeypatch.setattr(eligible, "HONOURED", eligible.HONOURED - {"qkv_bias"})
    assert eligible.obstacle(decoder, cache) is None  # as it is by default
    decoder = rope_decoder(qkv_bias=True)
    assert eligible.obstacle(decoder, cache) == "it does not know the setting qkv_bias"


def test_what_compiled_code_would_pass_by_is_an_obstacle():
    decoder = rope_decoder()
    cache = decoder.full_cache(80)
    assert eligible.obstacle(decoder, cache) is None
    handle = decoder.blocks[0].mlp.register_forward_hook(lambda *_: None)
    assert eligible.obstacle(decoder, cache) == "blocks.0.mlp has hooks"
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert eligible.obstacle(decoder, cache) == "autocast is on"
    decoder.blocks[1].mlp.up = torch.nn.Sequential(decoder.blocks[1].mlp.up)
    assert eligible.obstacle(decoder, cache) == "blocks.1.mlp.up is a Sequential"
    assert stepper(decoder, cache).name == "torch"


@pytest.mark.parametrize("step", ["numba", "torch"])
def test_prefill_and_generation_use_it_and_give_the_same(step, monkeypatch):
    read, used = prefill_program.NumbaReader.read, []
    monkeypatch.setattr(
        prefill_program.NumbaReader, "read", lambda self, ids: used.append(ids.shape) or read(self, ids)
    )
    decoder, ids = rope_decoder(), tiny_ids(90)
    made = generate.generate(decoder, ids.tolist(), max_new_tokens=6, engine=step)
    naive = generate.generate(decoder, ids.tolist(), max_new_tokens=6, naive=True)
    assert made.token_ids == naive.token_ids
    assert used == ([(1, 90)] if step == "numba" else [])


def test_what_does_not_fit_is_refused_before_anything_is_written():
    decoder = rope_decoder(max_positions=40)
    small, long = decoder.full_cache(30), decoder.full_cache(50)
    for cache, ids, message in (
        (small, tiny_ids(31), "31 more do not fit"),
        (small, tiny_ids(20, batch=2), "made for a batch of 1"),
        (long, tiny_ids(41), "more than the model's 40 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled(decoder, cache).read(ids)
    for none in ([[1, -1, 2]], [[0, 97]], [[]], [[0.5]]):
        with pytest.raises(ValueError, match="token ids below 97 expected"):
            compiled(decoder, small).read(torch.tensor(none))
    for cache in (small, long):
        assert cache.length == 0
        assert not any(buffer.any() for buffer in held(cache))
    close(compiled(decoder, small).read(tiny_ids(30)), decoder.body(tiny_ids(30))[:, -1])
    with pytest.raises(ValueError, match="belongs to another model"):
        choose_engine(rope_decoder(n_kv_heads=1), small, "numba")


def test_what_it_cannot_do_later_is_refused_and_not_done_wrong():
    decoder = random_decoder(CONFIG)
    ring = decoder.full_cache(60, bound_local=True)
    reader = compiled(decoder, ring)
    reader.read(tiny_ids(20))
    with pytest.raises(ValueError, match="a ring of the cache would roll"):
        reader.read(tiny_ids(20))
    # the step goes on where the reader cannot
    TorchEngine(decoder, ring)._read(tiny_ids(20))
    cache = decoder.full_cache(60)
    reader = compiled(decoder, cache)
    cache.left_pad = torch.tensor([2])
    with pytest.raises(ValueError, match="takes no padding"):
        reader.read(tiny_ids(20))
    with pytest.raises(ValueError, match="does not know the cache RollingCache"):
        prefill_program.NumbaReader(decoder, decoder.rolling_cache(30))
    cache.reset()
    decoder.norm.weight.data = decoder.norm.weight.data.clone()
    with pytest.raises(ValueError, match="make a new reader"):
        reader.read(tiny_ids(20))
    assert cache.length == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_and_device_are_nobodys_business(dtype):
    decoder, ids = random_decoder(CONFIG), tiny_ids(40)
    caches = [decoder.full_cache(40) for _ in range(4)]
    expected = compiled(decoder, caches[0]).read(ids[:, :39])
    logits = stepper(decoder, caches[0], choice="numba").step(ids[:, 39])
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(compiled(decoder, caches[1]).read(ids[:, :39]), expected)
        assert torch.equal(stepper(decoder, caches[1], choice="numba").step(ids[:, 39]), logits)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        reader = compiled(decoder, caches[2])
    assert torch.equal(reader.read(ids[:, :39]), expected)


def test_a_second_thread_is_refused_and_changes_nothing():
    decoder, ids = random_decoder(CONFIG), tiny_ids(250)
    cache = decoder.full_cache(251)
    reader = compiled(decoder, cache, n_threads=2)
    expected = reader.read(ids)
    cache.reset()
    refused, work = [], reader._pool._work

    def another():
        with pytest.raises(ValueError, match="another thread is in the middle of one"):
            reader.read(ids[:, :1])
        refused.append(True)

    def meanwhile(table, thread, *kinds):
        if thread == 0:
            reader._pool._work = work
            other = threading.Thread(target=another)
            other.start()
            other.join()
        work(table, thread, *kinds)

    reader._pool._work = meanwhile
    assert torch.equal(reader.read(ids), expected)
    assert (refused, cache.length) == ([True], 250)


def test_what_an_interrupt_left_is_not_written_into_what_comes_after():
    decoder, ids = rope_decoder(), tiny_ids(120)
    cache = decoder.full_cache(70)
    reader, other, step = (
        compiled(decoder, cache),
        compiled(decoder, cache),
        NumbaStep(decoder, cache),
    )

    for one, run in ((reader, lambda: reader.read(ids[:, :50])), (step, lambda: step.step(ids[:, 0]))):
        work = one._pool._work
        interrupts = iter([True])

        def interrupted(table, thread, *kinds, work=work, interrupts=interrupts):
            if thread == 0 and next(interrupts, False):
                raise KeyboardInterrupt
            work(table, thread, *kinds)

        one._pool._work = interrupted
        with pytest.raises(KeyboardInterrupt):
            run()
        cache.reset()
        other.read(ids[:, 50:100])
        if one is reader:
            close(reader.read(ids[:, 100:]), decoder.body(ids[:, 50:])[:, -1])
        else:
            close(step.step(ids[:, 100]), decoder(ids[:, 50:101])[:, -1])
        cache.reset()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_an_interrupt_costs_that_prompt_alone(n_threads):
    decoder, ids = rope_decoder(), tiny_ids(60)
    expected = decoder.body(ids)[:, -1]
    cache = decoder.full_cache(60)
    reader = compiled(decoder, cache, n_threads=n_threads)
    work = reader._pool._work

    def interrupted(table, thread, *kinds):
        if thread == 0:
            raise KeyboardInterrupt
        work(table, thread, *kinds)

    for _ in range(2):
        reader._pool._work = interrupted
        with pytest.raises(KeyboardInterrupt):
            reader.read(ids)
        reader._pool._work = work
        with pytest.raises(ValueError, match="half written"):
            reader.read(ids)
        cache.reset()
        close(reader.read(ids), expected)
        cache.reset()


@pytest.mark.parametrize("where", ["blocks.0.attention.query.weight", "blocks.1.mlp.down.weight", "norm.weight"])
def test_a_weight_that_is_not_a_number_shows(where):
    decoder = rope_decoder()
    decoder.get_parameter(where).data.flatten()[0] = float("nan")
    assert not compiled(decoder, decoder.full_cache(30)).read(tiny_ids(30)).isfinite().all()


def test_matrices_are_the_models_own_memory():
    for family in ("gpt2", "llama"):
        decoder, ids = from_hf(tiny_model(family)), tiny_ids(40)
        cache = decoder.full_cache(40)
        reader = compiled(decoder, cache)
        reader.read(ids)
        for block in decoder.blocks:
            for module in (block.attention.query, block.attention.value, block.mlp.up, block.mlp.down):
                module.weight.mul_(1.5)
        cache.reset()
        close(reader.read(ids), decoder.body(ids)[:, -1])


def test_the_ceilings_product_is_the_product():
    matrix, blocks, out = torch.randn(132, 33), torch.randn(3, 33, tiles.BLOCK), torch.zeros(3, 132, tiles.BLOCK)
    products.multiply(matrix.data_ptr(), 132, 33, blocks.data_ptr(), 3, out.data_ptr())
    torch.testing.assert_close(out, matrix @ blocks, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("part", "anew"), [("tiles", True), ("intrinsics", True), ("eligible", False)])
def test_machine_code_is_made_anew_when_what_it_is_made_of_changes(part, anew, tmp_path):
    # numba by itself looks at the one file alone in which a function stands that it keeps
    folder = Path(decode_kernels.__file__).parent
    made_of = intrinsics.sources_of_kernels(folder)
    for kernels in (decode_kernels, prefill_kernels):
        assert kernels.work._cache._cache_file._source_stamp[1] == made_of
    for path in folder.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert intrinsics.sources_of_kernels(tmp_path) == made_of
    with (tmp_path / f"{part}.py").open("a") as file:
        file.write("#")
    assert (intrinsics.sources_of_kernels(tmp_path) != made_of) is anew
