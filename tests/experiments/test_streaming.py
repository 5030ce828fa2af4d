"""A stream through a rolling cache equals its mask, and a killed one ends in the same bits."""

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kvprobe.decoder.model import from_hf
from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.experiments import streaming
from kvprobe.experiments.stream_checkpoint import Segment, StreamCheckpoint, StreamProgress
from kvprobe.experiments.streaming import StreamConfig, rows, stream
from kvprobe.probes.window_attention import windowed
from support.decoders import rope_decoder
from support.streams import SOME, state_of
from support.tiny import tiny_ids, tiny_model

TESTS = Path(__file__).parents[1]

WINDOW = 9


def losses_of(decoder, ids, **options):
    return F.cross_entropy(decoder(ids[None], **options)[0, :-1], ids[1:], reduction="none").double()


def last(results):
    return [segments[-1].nll / segments[-1].n_scored for segments in results]


@pytest.mark.parametrize(
    ("family", "positions"),
    [("gpt2", "absolute")]
    + [(family, p) for family in ("llama", "mistral", "gemma3_text") for p in ("absolute", "cache")],
)
def test_a_stream_is_the_mask_of_window_at_every_result(family, positions):
    decoder, ids = from_hf(tiny_model(family)), tiny_ids(120)[0]
    sinks = (0, 1, 4)
    config = StreamConfig(windows=(WINDOW,), sinks=sinks, positions=positions, every=25)
    for n_sink, segments in zip(sinks, stream(decoder, ids, config), strict=True):
        mask = windowed(window=WINDOW, sinks=range(n_sink), by_slot=positions == "cache")
        expected = losses_of(decoder, ids, attend=mask)
        assert [(s.at_token, s.n_scored) for s in segments] == [(25, 24), (50, 49), (75, 74), (100, 99), (120, 119)]
        for s in segments:
            assert s.nll == pytest.approx(float(expected[: s.n_scored].sum()), abs=1e-4)


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("n_sink", [0, 1, 4])
def test_a_stream_is_the_decoder_fed_token_by_token_in_any_chunks(positions, n_sink):
    decoder, ids = rope_decoder(max_positions=300), tiny_ids(200)[0]
    cache = decoder.rolling_cache(WINDOW, n_sink=n_sink, positions=positions)
    logits = torch.cat([decoder(token[None, None], cache=cache)[0] for token in ids[:-1]])
    expected = F.cross_entropy(logits, ids[1:], reduction="none").double()
    for chunk in (None, 1, 7, 64, 300):
        config = StreamConfig(
            windows=(WINDOW,), sinks=(n_sink,), positions=positions, score_from=40, every=60, chunk=chunk
        )
        ((*segments,),) = stream(decoder, ids, config)
        # of targets 41 to N - 1; there is none before token 60
        assert [(s.at_token, s.n_scored) for s in segments] == [(60, 19), (120, 79), (180, 139), (200, 159)]
        for s in segments:
            assert s.nll == pytest.approx(float(expected[40 : s.at_token - 1].sum()), abs=1e-4)


def test_the_result_at_n_tokens_is_the_one_of_n_tokens():
    decoder, ids = rope_decoder(), tiny_ids(400)[0]
    for now in stream(decoder, ids, replace(SOME, windows=(8,), sinks=(2,)))[0]:
        ((alone,),) = stream(decoder, ids[: now.at_token], replace(SOME, windows=(8,), sinks=(2,), every=None))
        assert (alone.at_token, alone.n_scored) == (now.at_token, now.n_scored)
        assert alone.nll == pytest.approx(now.nll, abs=1e-5)


def test_results_far_beyond_the_models_positions_are_those_of_a_model_with_more():
    ids = tiny_ids(600)[0]
    config = StreamConfig(windows=(8,), sinks=(2,), positions="cache")
    whole = rope_decoder(max_positions=600)
    expected = losses_of(whole, ids, attend=windowed(window=8, sinks=range(2), by_slot=True))
    assert last(stream(rope_decoder(max_positions=32), ids, config)) == pytest.approx(
        [float(expected.mean())], abs=1e-5
    )


def test_sums_are_cut_where_a_result_is_due():
    now = StreamProgress()
    for first, losses in ((1, [1.0, 2.0, 4.0]), (4, [8.0] * 7), (11, [0.5])):
        now = now.add(first, torch.tensor(losses, dtype=torch.float64), every=3, n_tokens=12)
    # targets 1, 2 | 3, 4, 5 | 6, 7, 8 | 9, 10, 11
    assert now.segments == (Segment(3, 2, 3.0), Segment(6, 5, 23.0), Segment(9, 8, 47.0), Segment(12, 11, 63.5))


def test_rows_hold_the_mean_so_far_and_that_of_the_stretch():
    config = StreamConfig(windows=(4,), sinks=(2,), positions="cache")
    first, second = rows(config, [[Segment(5, 4, 8.0), Segment(9, 8, 12.0)]], n_front=1)
    assert (first["loss"], first["stretch_loss"], first["cache_tokens"], first["tokens_scored"]) == (2.0, 2.0, 5, 4)
    assert (second["loss"], second["stretch_loss"], second["cache_tokens"], second["at_token"]) == (1.5, 1.0, 6, 9)
    assert second["perplexity"] == pytest.approx(4.4816890703)
    assert [second[name] for name in ("delta", "delta_low", "delta_high")] == [None] * 3
    assert (second["sink_positions"], second["bos_kept"]) == ("0,1", True)


def test_memory_does_not_depend_on_how_much_was_read():
    decoder, ids, held = rope_decoder(), tiny_ids(16 * 190 + 1)[0], []

    def weigh(what, done, total, unit):
        if done % 500 < 16:
            tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
            held.append(sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()))

    gc.collect()  # tensors of other tests, which would go in the middle
    stream(decoder, ids, StreamConfig(windows=(16,), sinks=(4,), positions="cache"), progress=weigh)
    assert len(held) >= 6
    assert len(set(held)) == 1


# Forks after the imports, so that all these deaths cost one start. A child dies by SIGKILL at its step, counted in
# chunks told to `progress` or in state files about to be put in place.
KILLED = """
import json, os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from kvprobe.experiments import streaming
from support.decoders import rope_decoder
from support.streams import SOME, state_of
from support.tiny import tiny_ids

torch.set_num_threads(1)
decoder, ids = rope_decoder(), tiny_ids(190)[0]

def run(path, kind=None, step=None):
    streaming.SECONDS_BETWEEN_SAVES = 0.0  # at every chunk the cost of a save allows
    count = 0
    def die(*_):
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
    if kind == "save":
        replace = Path.replace
        Path.replace = lambda *given: (die(), replace(*given))[1]
    progress = die if kind == "chunk" else lambda *_: None
    done = streaming.stream(decoder, ids, SOME, state=state_of(path, SOME, ids), progress=progress)
    return [[[s.at_token, s.n_scored, s.nll.hex()] for s in segments] for segments in done]

def killed(*given):
    child = os.fork()
    if not child:
        run(*given)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

folder = Path(sys.argv[1])
whole = run(folder / "whole")
found = []
for kind, step in [("chunk", n) for n in (1, 28, 70, 108)] + [("save", n) for n in (1, 5)]:
    path = folder / f"{{kind}}-{{step}}"
    died = [killed(path, kind, step)]
    left = len(list(folder.glob(f".{{path.name}}.*")))
    died.append(killed(path, "chunk", 11))  # once more, on the way
    found.append([kind, step, died, left, run(path) == whole, len(list(folder.glob(f".{{path.name}}.*")))])
print(json.dumps({{"whole": whole, "found": found}}))
"""


def test_killed_anywhere_and_resumed_the_losses_are_the_same_bits(tmp_path):
    code = KILLED.format(tests=str(TESTS))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [len(segments) for segments in answer["whole"]] == [4] * 4
    for kind, step, died, left, same, left_after in answer["found"]:
        # the last chunk but few is too near the end to die once more
        assert died[0], (kind, step)
        assert same, (kind, step)
        assert (left, left_after) == (int(kind == "save"), 0)
    assert sum(died[1] for _, _, died, *_ in answer["found"]) >= 4


def test_a_resumed_stream_does_not_begin_again(tmp_path, monkeypatch):
    # where no time passes it saves at every result, and only there
    monkeypatch.setattr(streaming, "time", SimpleNamespace(monotonic=lambda: 0.0))
    decoder, ids = rope_decoder(), tiny_ids(400)[0]
    state = state_of(tmp_path / "s", SOME, ids)
    expected, told = stream(decoder, ids, SOME), []

    def stop(what, done, total, unit):
        if what == "window 8 + 3 sinks" and done > 250:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(decoder, ids, SOME, state=state, progress=stop)
    now = state.progress()
    assert now.done == (expected[0],)
    # of the results every 50 tokens the fourth, after 29 chunks of 7; the fifth was about to be saved
    assert (now.segments, now.length) == (expected[1][:4], 203)
    assert stream(decoder, ids, SOME, state=state, progress=lambda *given: told.append(given)) == expected
    assert told[0][:2] == ("window 8 + 3 sinks", 203 + 8)
    finished = state.progress()
    assert (finished.done, finished.resumed) == (tuple(expected), 1)
    # and a finished one is only read
    assert stream(decoder, ids, SOME, state=state, progress=lambda *_: pytest.fail("worked")) == expected
    (tmp_path / ".s.partial").write_bytes(b"half")  # as a kill in the middle of a write leaves it
    state.remove()
    assert state.progress() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("save_s", "every", "saved_at"),
    [
        (0, None, [3, 6, 9, 12, 15]),  # each 30 s
        (10, None, [3, 13]),  # a save of 10 s is worth 100 s of work
        (0, 36, [3, 5, 8, 11, 14, 15]),  # and at a result: tokens 36, 72 and 106 are read with chunks 5, 11 and 15
        (10, 36, [3, 13]),  # unless that, too, is within the 100 s
    ],
)
def test_a_state_is_saved_each_30_s_and_at_results_unless_that_took_a_tenth(
    save_s, every, saved_at, tmp_path, monkeypatch
):
    now, read, saves = 0.0, 0, []

    def work(*_):
        nonlocal now, read
        now, read = now + 10, read + 1

    def save(state, _progress, cache=None):
        nonlocal now
        now += save_s
        if cache is not None:
            saves.append(read)

    monkeypatch.setattr(streaming, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(StreamCheckpoint, "save", save)
    config, ids = StreamConfig(windows=(8,), positions="cache", chunk=7, every=every), tiny_ids(7 * 15 + 1)[0]
    stream(rope_decoder(), ids, config, state=state_of(tmp_path / "s", config, ids), progress=work)
    assert saves == saved_at


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"windows": (8,)}, "windows is [8, 5] there and [8] here"),
        ({"positions": "absolute"}, "positions is cache there and absolute here"),
        ({"every": 51}, "every is 50 there and 51 here"),
        ({"chunk": None}, "chunk is 7 there and None here"),
        ({"score_from": 1}, "score_from is 0 there and 1 here"),
    ],
)
def test_a_state_of_another_stream_is_refused_with_what_differs(tmp_path, change, says):
    decoder, ids = rope_decoder(), tiny_ids(60)[0]
    stream(decoder, ids, SOME, state=state_of(tmp_path / "s", SOME, ids))
    before = (tmp_path / "s").read_bytes()
    config = replace(SOME, **change)
    with pytest.raises(KvprobeError) as refused:
        stream(decoder, ids, config, state=state_of(tmp_path / "s", config, ids))
    assert f"belongs to another stream: {says}; give another state, or no_resume to start afresh" in str(refused.value)
    assert (tmp_path / "s").read_bytes() == before


def test_a_state_is_tied_to_model_text_and_precision(tmp_path):
    ids = tiny_ids(60)[0]
    state = state_of(tmp_path / "s", SOME, ids)
    state.save(StreamProgress())
    for other in ({"revision": "q"}, {"passage_sha256": "q"}, {"dtype": "bfloat16"}, {"device": "cuda"}):
        ((name, value),) = other.items()
        with pytest.raises(KvprobeError, match=f"{name} is .* there and {value} here"):
            state_of(tmp_path / "s", SOME, ids, **other).progress()
        assert StreamCheckpoint.within(tmp_path, state_of(tmp_path, SOME, ids, **other).identity).path.name != (
            StreamCheckpoint.within(tmp_path, state.identity).path.name
        )
    with pytest.raises(KvprobeError, match="ids_sha256"):
        state_of(tmp_path / "s", SOME, ids.flip(0)).progress()
    assert StreamCheckpoint.within(tmp_path, state.identity) == StreamCheckpoint.within(
        tmp_path, dict(reversed(state.identity.items()))
    )


@pytest.mark.parametrize("content", [b"", b"a text of somebody's", b"\x02" + bytes(7) + b"{}"])
def test_a_file_that_is_no_state_is_neither_read_nor_removed(tmp_path, content):
    (tmp_path / "s").write_bytes(content)
    state = state_of(tmp_path / "s", SOME, tiny_ids(9)[0])
    for refused in (state.progress, state.remove):
        with pytest.raises(KvprobeError, match="s is not a state of a stream"):
            refused()
    assert (tmp_path / "s").read_bytes() == content


def test_two_runs_do_not_share_a_state(tmp_path):
    state = state_of(tmp_path / "deep" / "s", SOME, tiny_ids(9)[0])
    with state.held(), pytest.raises(KvprobeError, match="another run of this stream is in progress"), state.held():
        pytest.fail("held twice")
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_place_that_cannot_be_written_is_found_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    state = state_of(tmp_path / "file" / "s", SOME, tiny_ids(60)[0])
    with pytest.raises(KvprobeError, match="s could not be written"), state.held():
        pytest.fail("held")
    with pytest.raises(KvprobeError, match="s could not be written"):
        stream(rope_decoder(), tiny_ids(60)[0], SOME, state=state, progress=lambda *_: pytest.fail("worked"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"windows": (8, 0)}, "window must be at least 1 .*got 0"),
        ({"windows": ()}, "at least one window"),
        ({"sinks": (0, -1)}, "sinks must be at least 0, got -1"),
        ({"every": 0}, "every must be at least 1 token, got 0"),
        ({"chunk": 0}, "chunk must be at least 1 token, got 0"),
        ({"score_from": 38}, "score_from must be between 0 and 37 for tokens 40"),
        ({"positions": "recompute"}, "positions of a stream must be absolute or cache, got recompute"),
    ],
)
def test_what_is_out_of_range_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        stream(rope_decoder(), tiny_ids(40)[0], replace(SOME, **change))


def test_positions_that_end_are_refused_with_what_can_be_done():
    config, ids = StreamConfig(windows=(8,)), tiny_ids(33)[0]
    with pytest.raises(KvprobeError, match=r"33 tokens are more than the model's 32 positions: use positions cache"):
        stream(rope_decoder(max_positions=32), ids, config)
    stream(rope_decoder(max_positions=32), ids[:32], config)
    learned = rope_decoder(max_positions=32, rotary=None)
    with pytest.raises(KvprobeError, match="32 positions: learned positions have no entry beyond them"):
        stream(learned, ids, config)
    with pytest.raises(UnsupportedModelError, match="cannot be moved by slot afterwards; use positions absolute"):
        stream(learned, ids, replace(config, positions="cache"))


def test_a_loss_that_is_not_finite_names_the_first_layer_and_is_not_kept(tmp_path):
    decoder, ids = rope_decoder(), tiny_ids(60)[0]
    with torch.no_grad():
        decoder.blocks[1].mlp.up.weight[0, 0] = torch.nan
    state = state_of(tmp_path / "s", SOME, ids)
    with pytest.raises(KvprobeError, match=r"not finite: blocks\.1\.mlp\.up is the first .* at float32; check the"):
        stream(decoder, ids, SOME, state=state)
    assert state.progress() == StreamProgress()


@pytest.mark.smollm2
def test_on_smollm2_a_stream_is_the_mask(smollm2):
    from kvprobe.probes.losses import token_losses
    from kvprobe.text import passages, texts

    ids = passages.encode(smollm2.tokenizer, texts.read_text("bundled"), n_tokens=128).ids
    config = StreamConfig(windows=(32,), sinks=(4,), positions="cache")
    mask = windowed(window=32, sinks=range(4), by_slot=True)
    expected = token_losses(smollm2.model, ids, score_from=0, attend=mask)
    assert last(stream(from_hf(smollm2.model), ids, config)) == pytest.approx([float(expected.mean())], abs=1e-4)
