"""``kvprobe generate``: what does the model write, and how fast?"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from kvprobe.caches.registry import KINDS
from kvprobe.cli.options import COUNT, common, engine_option, load_model

if TYPE_CHECKING:
    from kvprobe.caches.layer import KVCache
    from kvprobe.decoder.model import Decoder
    from kvprobe.generation.generate import Generation

DEFAULT_SINKS = 4
MOST_PROMPT = 1 << 24


@click.command("generate", short_help="Continue a prompt with our own decoder and KV cache.")
@click.argument("arguments", nargs=-1, required=True, metavar="[MODEL] PROMPT")
@click.option("--max-new-tokens", type=COUNT, default=128, show_default=True, help="Stop after this many new tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: always the likeliest token.")
@click.option("--top-k", type=COUNT, help="Draw from the K likeliest tokens.")
@click.option("--top-p", type=float, help="Draw from the fewest likeliest tokens that hold this much probability.")
@click.option("--window", type=COUNT, help="Keep only the last W tokens and the sinks, in constant memory.")
@click.option("--sinks", type=COUNT, help=f"Keep the first N tokens besides the window.  [default: {DEFAULT_SINKS}]")
@click.option(
    "--positions",
    type=click.Choice(["absolute", "cache"]),
    help="Positions of kept keys: as computed, or by slot in the cache.  [default: cache under RoPE, else absolute]",
)
@click.option(
    "--cache",
    "cache_kind",
    type=click.Choice(KINDS),
    help="The kind of cache.  [default: rolling with --window, else full]",
)
@engine_option
@click.option("--no-cache", is_flag=True, help="The baseline: read everything again for every token.")
@click.option(
    "--bos",
    type=click.Choice(["auto", "add", "drop"]),
    default="auto",
    show_default=True,
    help="Begin-of-sequence token: as the tokenizer does by itself, always, or only if the prompt has one.",
)
@common
def command(arguments: tuple[str, ...], **options: Any) -> None:
    """Continue PROMPT (- for standard input) with kvprobe's own decoder, printing as it goes.

    Time to first token and tokens/s follow on standard error.

    \b
    Examples:
      kvprobe generate smollm2-135m "Once upon a time"
      kvprobe generate smollm2-135m "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
      kvprobe generate smollm2-135m "Once upon a time" --max-new-tokens 20000 --window 256 --sinks 4
      kvprobe generate smollm2-135m "Once upon a time" --no-cache    what the cache saves
    """
    if len(arguments) > 2:
        raise click.UsageError(f"expected [MODEL] PROMPT, got {len(arguments)} arguments: put the prompt in quotes")
    if len(arguments) == 1 and _names_a_model(arguments[0]):
        raise click.UsageError(f"PROMPT is missing: kvprobe generate {arguments[0]} 'Once upon a time'")
    name, prompt = arguments if len(arguments) == 2 else ("gpt2", arguments[0])
    if options["window"] is None and (options["sinks"] is not None or options["positions"] is not None):
        raise click.UsageError("--sinks and --positions need --window: give it too")
    if options["window"] is not None and options["cache_kind"] not in (None, "rolling"):
        raise click.UsageError(f"--window needs --cache rolling, not {options['cache_kind']}")
    if options["cache_kind"] is not None and options["no_cache"]:
        raise click.UsageError("--cache names a cache and --no-cache removes it: give only one of them")
    if options["window"] is not None and options["no_cache"]:
        raise click.UsageError("--window needs a cache and --no-cache removes it: give only one of them")
    if options["engine"] == "numba" and options["no_cache"]:
        raise click.UsageError("--engine numba decodes from a cache: leave out --no-cache")

    import time

    from kvprobe.bench import busy
    from kvprobe.cli.console import emit, notice, progress_bar
    from kvprobe.decoder.model import from_hf
    from kvprobe.files.whole import write_whole
    from kvprobe.generation import engines
    from kvprobe.generation.generate import Generation, Sampling, pieces, stream
    from kvprobe.results import phrases
    from kvprobe.results.record import run_record
    from kvprobe.results.result import Result
    from kvprobe.results.visible import harmless
    from kvprobe.text import passages
    from kvprobe.text.texts import Text, check_utf8

    started = time.perf_counter()
    sampling = Sampling(temperature=options["temperature"], top_k=options["top_k"], top_p=options["top_p"])
    if prompt == "-":
        prompt = _from_standard_input()
    check_utf8("the prompt", prompt)
    with progress_bar(options["quiet"]) as progress:
        loaded = load_model(name, options, progress)
    decoder = from_hf(loaded.model)
    # one BOS policy for passages and prompts
    passage = passages.whole(loaded.tokenizer, Text("the prompt", "", prompt), bos=options["bos"])
    for said in passages.notices(passage):
        notice(said, quiet=options["quiet"])
    ids = passage.ids.tolist()
    cache = _cache(decoder, ids, options)
    start_up = time.perf_counter()
    engine = None if cache is None else engines.engine(decoder, cache, options["engine"])
    if engine is not None:
        engine.ready(len(ids))
        if engine.note is not None:
            notice(engine.note, quiet=options["quiet"])
    start_up_s = 0.0 if cache is None else time.perf_counter() - start_up
    reader = "torch" if engine is None else engine.reads(len(ids))
    coming = stream(
        decoder,
        [ids],
        max_new_tokens=options["max_new_tokens"],
        cache=cache,
        naive=options["no_cache"],
        sampling=sampling,
        seed=options["seed"],
        eos=_eos(loaded),
        engine=engine or "torch",
    )
    steps = []

    def tokens() -> Iterator[int]:
        for step in coming:
            steps.append(step)
            yield from (token for token in step.tokens if token is not None)

    def spell(token_ids: Sequence[int]) -> str:
        return str(loaded.tokenizer.decode([*token_ids], skip_special_tokens=True, clean_up_tokenization_spaces=False))

    shown = options["format_"] == "table" and options["out"] is None
    watch = busy.Watch()
    with watch.span():
        for piece in chain([prompt], pieces(tokens(), spell), ["\n"]):
            if shown:
                click.echo(harmless(piece), nl=False)
    load = watch.record(device=loaded.device)
    generation = Generation.of(steps, cache)
    row = {
        "prompt": prompt,
        "text": spell(generation.token_ids[0]),
        "token_ids": [*generation.token_ids[0]],
        "n_prompt": len(ids),
        "n_new": len(generation.token_ids[0]),
        "prefill_ms": generation.prefill_ms,
        "decode_ms_median": generation.decode_ms_median,
        "tokens_per_s": generation.tokens_per_s,
        "cache_bytes": generation.cache_bytes,
        "stopped_by": generation.stopped_by[0],
    }
    if options["format_"] != "table":
        run = run_record(
            loaded.record(),
            load,
            **{
                key: options[key]
                for key in ("bos", "max_new_tokens", "temperature", "top_k", "top_p", "window", "seed")
            },
            has_bos=passage.has_bos,
            **({"bos_in_text": True} if passage.bos_in_text else {}),
            n_sink=None if options["window"] is None else _sinks(options),
            positions=None if options["window"] is None else _positions(decoder, options),
            cache=not options["no_cache"],
            cache_kind=None if options["no_cache"] else options["cache_kind"] or _default_kind(options),
            engine=options["engine"],
            step="torch" if engine is None else engine.name,
            reader=reader,
            start_up_s=round(start_up_s, 3),
            wall_s=round(time.perf_counter() - started, 3),
        )
        emit(Result("generate", [row], run), format_=options["format_"], out=options["out"], columns=())
    elif options["out"] is not None:
        write_whole(options["out"], f"{prompt}{row['text']}\n")
    notice(phrases.said(_summary(generation, len(ids)), load), quiet=options["quiet"])


def _names_a_model(word: str) -> bool:
    from pathlib import Path

    from kvprobe.models.pull import CATALOGUE

    return word in CATALOGUE or word.endswith(".gguf") or (Path(word) / "config.json").is_file()


# one row has nothing to draw
command.params = [option for option in command.params if option.name != "plot"]


def _positions(decoder: "Decoder", options: dict[str, Any]) -> str:
    return options["positions"] or ("absolute" if decoder.config.rotary is None else "cache")


def _default_kind(options: dict[str, Any]) -> str:
    return "full" if options["window"] is None else "rolling"


def _sinks(options: dict[str, Any]) -> int:
    return DEFAULT_SINKS if options["sinks"] is None else int(options["sinks"])


def _cache(decoder: "Decoder", ids: list[int], options: dict[str, Any]) -> "KVCache | None":
    if options["no_cache"]:
        return None
    from kvprobe.generation.generate import tokens_fed

    needed = tokens_fed([ids], options["max_new_tokens"])
    if options["window"] is None:
        decoder.check_length(needed)
        return decoder.cache(options["cache_kind"] or "full", needed)
    positions: Any = _positions(decoder, options)
    # no more slots than tokens: a window of all of them cuts nothing
    window, n_sink = (min(options["window"], needed), min(_sinks(options), needed))
    return decoder.rolling_cache(window, n_sink=n_sink, positions=positions)


def _from_standard_input() -> str:
    from kvprobe.errors import KvprobeError
    from kvprobe.text.texts import read_text

    read = read_text("-", n_bytes=MOST_PROMPT)
    if read.cut is not None:
        raise KvprobeError(f"the prompt on standard input is {read.cut}; give at most {MOST_PROMPT:,} bytes")
    return read.text.removesuffix("\n")


def _eos(loaded: Any) -> list[int]:
    """The ids that end a text: the generation config's, or the tokenizer's if absent."""
    given = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    given = loaded.tokenizer.eos_token_id if given is None else given
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def _summary(generation: "Generation", n_prompt: int) -> str:
    rate = generation.tokens_per_s
    speed = "" if rate is None else f", then {rate:.1f} tokens/s"
    cache = f"cache {generation.cache_bytes / 2**20:.2f} MiB" if generation.cache_bytes else "no cache"
    return (
        f"{n_prompt:,} prompt tokens, {len(generation.token_ids[0]):,} new ({generation.stopped_by[0]}): "
        f"time to first token {generation.prefill_ms:.0f} ms{speed}; {cache}"
    )
