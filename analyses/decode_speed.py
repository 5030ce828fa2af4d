"""How fast is our decoder beside Hugging Face's generate and llama.cpp: same weights, prompt, dtype and threads?

\b
    python -m analyses.decode_speed smollm2-135m
    python -m analyses.decode_speed smollm2-135m --dtype bfloat16
    python -m analyses.decode_speed gpt2 --random-weights        the 124M shape, drawn at random
    python -m analyses.decode_speed smollm2-135m --gguf smollm2-f32.gguf     llama.cpp too, where llama_cpp is installed

Every way reads the prompt and then decodes greedily, token by token; all ways take turns, in changing order, and a
speed-up is the median over the rounds of the first way's time to this way's in the same round. Kernels that do nothing
but read memory take turns with them: the bandwidth is the best kernel's median, as a step's time is a median. Targets
on two cores at context 512, float32: decode 4.0× and prefill 1.5× Hugging Face's with DynamicCache, 0.8 of the read
bandwidth.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from analyses.common import script, show
from analyses.timing import in_ms
from kvprobe.bench.busy import Watch, cores
from kvprobe.bench.machine import BUFFER_BYTES, readers
from kvprobe.bench.roofline import Shape
from kvprobe.decoder.model import Decoder, from_hf
from kvprobe.decoder.torch_engine import Engine
from kvprobe.errors import KvprobeError
from kvprobe.files.store import sha256
from kvprobe.generation.choose_engine import EngineChoice, choose_engine
from kvprobe.generation.generate import stream
from kvprobe.models import loading
from kvprobe.models.random_weights import load_random
from kvprobe.models.subject import prepare
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row

# seconds of the prefill and of each decode step of one run
Run = Callable[[], list[float]]
# how often each kernel reads its buffer in a round
READS = 12


def run(
    model: str,
    *,
    random_weights: bool = False,
    text: str = "bundled",
    n_prompt: int = 512,
    n_new: int = 65,
    dtype: str = "float32",
    threads: int | None = None,
    repeats: int = 5,
    compiled: bool = False,
    gguf: str | None = None,
) -> Result:
    """Rows ``phase, way, ms_median, ms_low, ms_high, tokens_per_s, speedup, gb_per_s, fraction``.

    Milliseconds of one decode step, of the whole prefill, or (phase ``read``) of reading `BUFFER_BYTES` once; quartiles
    over all of all rounds. The fraction is of the reading kernel with the best median, by the bytes that no step can do
    without; null for prefill.
    """
    if n_new < 2:
        raise ValueError(f"n_new must be at least 2 (one token is prefill's), got {n_new}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or cores())
    try:
        if random_weights:
            loaded = load_random(model, dtype=dtype, device="cpu")
            drawn = torch.Generator().manual_seed(0)
            ids = torch.randint(loaded.model.config.vocab_size, (1, n_prompt), generator=drawn)
            about = loaded.record() | {"passage": "random ids"}
        else:
            subject = prepare(model, text=text, tokens=n_prompt, dtype=dtype, device="cpu")
            loaded, ids, about = subject.loaded, subject.input_ids, subject.record()
        decoder = from_hf(loaded.model)
        decoder.check_length(n_prompt + n_new)
        ways, used = _ways(loaded, decoder, ids, n_new, compiled=compiled, gguf=gguf)
        watch = Watch()
        with readers("cpu") as kernels:
            reading = {name: partial(_read, kernel) for name, kernel in kernels.items()}
            taken = _in_turns(ways | reading, repeats, watch)
        settings: dict[str, Any] = {"n_prompt": n_prompt, "n_new": n_new, "repeats": repeats, "compiled": compiled}
        if gguf is not None:
            settings |= {"gguf": Path(gguf).name, "gguf_sha256": sha256(Path(gguf))}
            settings |= {"llama_cpp": version("llama-cpp-python")}
        record = run_record(about, settings, used, watch.record())
    finally:
        torch.set_num_threads(before)
    moved = Shape.of(decoder).decode(n_prompt + n_new // 2).bytes_moved
    reads = {name: [second for seconds in taken.pop(name) for second in seconds] for name in reading}
    return Result("decode_speed", _rows(taken, reads, n_prompt=n_prompt, bytes_moved=moved), record)


def _ways(
    loaded: loading.Loaded, decoder: Decoder, ids: Tensor, n_new: int, *, compiled: bool, gguf: str | None
) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
    """What is compared, and for the record how each of ours reads and decodes, and the seconds it took to start."""
    ways: dict[str, Run] = {
        "Hugging Face, DynamicCache": partial(_hugging_face, loaded.model, ids, n_new),
        "Hugging Face, StaticCache": partial(_hugging_face, loaded.model, ids, n_new, static=True),
    }
    if compiled:
        ways["Hugging Face, StaticCache compiled"] = partial(
            _hugging_face, loaded.model, ids, n_new, static=True, compiled=True
        )
    used: dict[str, dict[str, Any]] = {"readers": {}, "steps": {}, "start_up_s": {}}
    kinds: dict[str, EngineChoice] = {"ours, torch": "torch", "ours, fastest": "auto"}
    for way, kind in kinds.items():
        cache = decoder.full_cache(ids.shape[1] + n_new)
        started = time.perf_counter()
        engine = choose_engine(decoder, cache, kind)
        engine.ready(ids.shape[1])
        used["start_up_s"][way] = round(time.perf_counter() - started, 3)
        used["readers"][way], used["steps"][way] = engine.reads(ids.shape[1]), engine.name
        ways[way] = partial(_ours, decoder, ids, n_new, engine)
    if gguf is not None:
        ways["llama.cpp"] = _llama_cpp(gguf, ids, n_new)
    return ways, used


def _read(kernel: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(READS):
        started = time.perf_counter()
        kernel()
        taken.append(time.perf_counter() - started)
    return taken


def _hugging_face(model: Any, ids: Tensor, n_new: int, *, static: bool = False, compiled: bool = False) -> list[float]:
    from transformers import StoppingCriteriaList

    stamps = [time.perf_counter()]

    def watch(input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        # called after each token
        stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_new,
        min_new_tokens=n_new,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static" if static else None,
        disable_compile=not compiled,
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    return [after - before for before, after in pairwise(stamps)]


def _ours(decoder: Decoder, ids: Tensor, n_new: int, engine: Engine) -> list[float]:
    steps = stream(decoder, ids.tolist(), max_new_tokens=n_new, engine=engine)
    return [step.ms / 1000 for step in steps]


def _llama_cpp(gguf: str, ids: Tensor, n_new: int) -> Run:
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise KvprobeError("llama.cpp cannot be timed: the package llama_cpp is not installed here") from error
    n_threads, prompt = torch.get_num_threads(), ids[0].tolist()
    # its cache keeps its default, float16: half the bytes of ours in float32
    llama = Llama(
        gguf, n_ctx=len(prompt) + n_new, n_batch=len(prompt), n_threads=n_threads, n_threads_batch=n_threads,
        verbose=False,
    )  # fmt: skip

    def once() -> list[float]:
        llama.reset()
        taken, tokens = [], prompt
        for _ in range(n_new):
            started = time.perf_counter()
            llama.eval(tokens)
            tokens = [llama.sample(temp=0.0)]
            taken.append(time.perf_counter() - started)
        return taken

    return once


def _in_turns(ways: dict[str, Run], repeats: int, watch: Watch) -> dict[str, list[list[float]]]:
    for once in ways.values():
        once()
    taken: dict[str, list[list[float]]] = {way: [] for way in ways}
    for turn in range(repeats):
        for way in list(ways)[:: -1 if turn % 2 else 1]:
            with watch.span():
                taken[way].append(ways[way]())
    return taken


def _rows(
    taken: dict[str, list[list[float]]], reads: dict[str, list[float]], *, n_prompt: int, bytes_moved: int
) -> list[Row]:
    rows: list[Row] = []
    reference = next(iter(taken.values()))
    bandwidth = BUFFER_BYTES / min(map(statistics.median, reads.values()))
    for phase, start, stop, n_tokens in (("prefill", 0, 1, n_prompt), ("decode", 1, None, 1)):
        for way, rounds in taken.items():
            row = {
                "phase": phase,
                "way": way,
                **in_ms([second for seconds in rounds for second in seconds[start:stop]]),
            }
            pairs = zip(reference, rounds, strict=True)
            speedups = [statistics.median(its[start:stop]) / statistics.median(ours[start:stop]) for its, ours in pairs]
            median = row["ms_median"] / 1e3
            row |= {"tokens_per_s": n_tokens / median, "speedup": statistics.median(speedups)}
            fraction = bytes_moved / median / bandwidth if phase == "decode" else None
            rows.append(row | {"gb_per_s": bytes_moved / median / 1e9 if fraction else None, "fraction": fraction})
    for name, seconds in reads.items():
        rate = BUFFER_BYTES / statistics.median(seconds)
        row = {"phase": "read", "way": name, **in_ms(seconds), "tokens_per_s": None, "speedup": None}
        rows.append(row | {"gb_per_s": rate / 1e9, "fraction": rate / bandwidth})
    return rows


@click.command(help=__doc__)
@click.argument("model", default="smollm2-135m")
@click.option("--random-weights", is_flag=True, help="Use MODEL's shape with random weights.")
@click.option("--text", default="bundled", show_default=True)
@click.option("--prompt", "n_prompt", type=int, default=512, show_default=True, help="Length of the prompt.")
@click.option("--new", "n_new", type=int, default=65, show_default=True, help="Tokens generated.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--threads", type=int, help="Threads of torch and of everything else.  [default: all cores]")
@click.option("--repeats", type=int, default=5, show_default=True)
@click.option("--compiled", is_flag=True, help="Hugging Face's StaticCache compiled too: minutes of compilation.")
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False), help="The same weights for llama.cpp.")
@click.option("--save/--no-save", default=True, help="Keep results/decode_speed.{csv,json}.")
def main(save: bool, **options: Any) -> None:
    """Print the table and keep it."""
    result = run(options.pop("model"), **options)
    show(result, save=save)


if __name__ == "__main__":
    script(main)
