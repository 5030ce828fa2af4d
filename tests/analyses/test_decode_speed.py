import sys
from contextlib import nullcontext

import pytest
import torch

from analyses import decode_speed
from kvprobe.bench.busy import Watch


def test_every_way_is_timed_on_a_tiny_model(gpt2_random, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(decode_speed, "readers", lambda device: nullcontext({"sum": lambda: sum(range(1000))}))
    before = torch.get_num_threads()
    result = decode_speed.run(str(gpt2_random), text="bundled", n_prompt=20, n_new=4, repeats=2, threads=1)
    ways = ["Hugging Face, DynamicCache", "Hugging Face, StaticCache", "ours, torch", "ours, fastest"]
    expected = [(phase, way) for phase in ("prefill", "decode") for way in ways] + [("read", "sum")]
    assert [(row["phase"], row["way"]) for row in result.rows] == expected
    assert result.run["steps"] == {"ours, torch": "torch", "ours, fastest": "numba"}
    assert torch.get_num_threads() == before
    assert [row["speedup"] for row in result.rows if row["way"] == ways[0]] == [1, 1]


def test_what_else_ran_while_the_ways_took_turns_is_in_the_record(busy_machine):
    watch, calls = Watch(), []
    ways = {name: lambda name=name: calls.append(name) or [1.0] for name in "ab"}
    decode_speed._in_turns(ways, 3, watch)
    # a second a turn, and none for the run that does not count
    assert (calls, watch.record()["load"]["seconds"]) == (list("ababbaab"), 6)


def test_rows_by_hand():
    # rounds of a prefill and two steps; the second way is 2, 4 and 3 times as fast in decode, prefill always twice
    theirs, ours = [[8.0, 2.0, 2.0], [8.0, 4.0, 4.0], [4.0, 3.0, 3.0]], [[4.0, 1.0, 1.0]] * 2 + [[2.0, 1.0, 1.0]]
    taken = {"theirs": theirs, "ours": ours}
    # the better kernel's median reads the buffer in two seconds
    half = decode_speed.BUFFER_BYTES // 2
    reads = {"slow": [4.0, 4.0], "fast": [1.0, 2.0, 9.0]}
    rows = decode_speed._rows(taken, reads, n_prompt=16, bytes_moved=half // 2)
    prefill, decode, slow, fast = rows[1], *rows[3:]
    assert (prefill["phase"], prefill["way"], prefill["speedup"]) == ("prefill", "ours", 2.0)
    assert (prefill["tokens_per_s"], prefill["fraction"]) == (4.0, None)
    assert decode == {
        **{"phase": "decode", "way": "ours", "ms_median": 1000.0, "ms_low": 1000.0, "ms_high": 1000.0},
        **{"tokens_per_s": 1.0, "speedup": 3.0, "gb_per_s": half / 2e9, "fraction": 0.5},
    }
    assert [(row["phase"], row["fraction"]) for row in (slow, fast)] == [("read", 0.5), ("read", 1.0)]


def test_llama_cpp_that_is_not_there_and_too_few_tokens_are_refused(gpt2_random, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(Exception, match="llama_cpp is not installed"):
        decode_speed._llama_cpp("file.gguf", torch.zeros(1, 3, dtype=torch.long), 4)
    with pytest.raises(ValueError, match="n_new must be at least 2"):
        decode_speed.run(str(gpt2_random), n_new=1)
