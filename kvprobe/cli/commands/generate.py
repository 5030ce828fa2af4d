"""``kvprobe generate``: what does the model write, and how fast?"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvprobe.caches.registry import KINDS
from kvprobe.cli.command import Command
from kvprobe.cli.options import Choice, CountFrom, Finite, common, load_model, naming_default
from kvprobe.errors import KvprobeError

if TYPE_CHECKING:
    from kvprobe.decoder.model import Decoder
    from kvprobe.generation.texts import TextGeneration
    from kvprobe.models.loading import Loaded

DEFAULT_SINKS = 4
MOST_PROMPT = 1 << 24
LEAST_TEMPERATURE = 1e-4
"""Of :class:`kvprobe.generation.generate.Sampling`, which needs torch."""


@click.command(
    "generate", cls=Command, short_help="Continue prompts, or answer them, with our own decoder and KV cache."
)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [PROMPT]")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="One more prompt; several are one batch.")
@click.option(
    "--prompt-file",
    "files",
    multiple=True,
    metavar="FILE",
    help="One more prompt: a UTF-8 file, taken as it is to the last byte; - for standard input.",
)
@click.option("--chat", is_flag=True, help="Give each prompt as a user's message in the model's own chat template.")
@click.option("--system", metavar="TEXT", help="The system message before it; needs --chat.")
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End before this text, if it is generated; may be repeated."
)
@click.option(
    "--max-new-tokens", type=CountFrom(1), default=128, show_default=True, help="Stop after this many new tokens."
)
@click.option("--temperature", type=Finite(0), default=0.0, show_default=True, help="0: always the likeliest token.")
@click.option("--top-k", type=CountFrom(1), help="Draw from the K likeliest tokens.")
@click.option(
    "--top-p",
    type=Finite(0, 1, min_open=True),
    help="Draw from the fewest likeliest tokens that hold this much probability.",
)
@click.option("--window", type=CountFrom(1), help="Keep only the last W tokens and the sinks, in constant memory.")
@click.option(
    "--sinks", type=CountFrom(0), help=f"Keep the first N tokens besides the window.  [default: {DEFAULT_SINKS}]"
)
@click.option(
    "--positions",
    type=Choice(["absolute", "cache"]),
    help="Positions of kept keys: as computed, or by slot in the cache.  [default: cache under RoPE, else absolute]",
)
@click.option(
    "--cache",
    "cache_kind",
    type=Choice(KINDS),
    help="The kind of cache.  [default: rolling with --window, else full]",
)
@click.option(
    "--engine",
    type=Choice(["auto", "numba", "torch"]),
    default="auto",
    show_default=True,
    help="What reads prompts and decodes: compiled code (numba), the readable decoder (torch), or auto: compiled code "
    "if it supports the CPU, the model and the cache.",
)
@click.option("--no-cache", is_flag=True, help="The baseline: read everything again for every token.")
@click.option(
    "--bos",
    type=Choice(["auto", "add", "drop"]),
    default="auto",
    show_default=True,
    help="Begin-of-sequence token: as the tokenizer does by itself, always, or only if the prompt has one.",
)
@common
def command(arguments: tuple[str, ...], **options: Any) -> None:
    """Continue PROMPT (- for standard input) with kvprobe's own decoder, printing as it goes.

    With --chat the prompt is a message to an instruct model, and its answer is printed. With --prompt or --prompt-file,
    the first argument is MODEL. Time to first token and tokens/s follow on standard error.

    \b
    Examples:
      kvprobe generate smollm2-135m --chat "What is the capital of France?"
      kvprobe generate smollm2-135m --chat --system "Answer in one word." "What is the capital of France?"
      kvprobe generate smollm2-135m --chat --prompt "Who was Ada Lovelace?" --prompt "What is a prime?"   a batch
      kvprobe generate smollm2-135m --prompt-file long.txt --window 512   longer than the model's positions
      kvprobe generate smollm2-135m "Once upon a time" --stop "The end" --temperature 0.8 --top-p 0.95 --seed 1
      kvprobe generate smollm2-135m "Once upon a time" --no-cache   what the cache saves
    """
    name, prompts = _asked(arguments, options)
    _check(options)

    import time

    from kvprobe.bench import busy
    from kvprobe.cli.console import emit, notice, progress_bar
    from kvprobe.decoder.model import from_hf
    from kvprobe.files.whole import write_whole
    from kvprobe.generation.generate import Sampling, tokens_fed
    from kvprobe.generation.prompts import encoded, end_ids, has_template
    from kvprobe.generation.texts import TextStream, default_positions
    from kvprobe.results import phrases
    from kvprobe.results.record import run_record
    from kvprobe.results.result import Result
    from kvprobe.text import passages

    started = time.perf_counter()
    chat, quiet = options["chat"], options["quiet"]
    # by position or by default, as `_asked` told them apart
    with naming_default(name not in arguments), progress_bar(quiet) as progress:
        loaded = load_model(name, options, progress)
    decoder = from_hf(loaded.model)
    read = [encoded(loaded, prompt, chat=chat, system=options["system"], bos=options["bos"]) for prompt in prompts]
    if not chat:
        # a template's own marks are as they should be
        for said in dict.fromkeys(said for passage in read for said in passages.notices(passage)):
            notice(said, quiet=quiet)
        if has_template(loaded.tokenizer):
            what = "the prompt is given to it raw, as text to be continued; --chat asks it as a user"
            notice(f"{loaded.name} has a chat template: {what}", quiet=quiet)
    ids = [passage.ids.tolist() for passage in read]
    windowed = options["window"] is not None
    positions = (options["positions"] or default_positions(decoder)) if windowed else None
    n_sink = (DEFAULT_SINKS if options["sinks"] is None else options["sinks"]) if windowed else None
    if positions != "cache":
        _check_length(loaded, decoder, tokens_fed(ids, options["max_new_tokens"]), options)
    if positions == "cache" and decoder.config.rotary is None:
        raise KvprobeError(
            f"--positions cache needs rotary positions: the learned ones of {loaded.name} are added to the hidden "
            "state and cannot be moved afterwards; use --positions absolute, which ends at the model's last position"
        )
    start_up = time.perf_counter()
    stream = TextStream(
        decoder,
        loaded.tokenizer,
        ids,
        max_new_tokens=options["max_new_tokens"],
        eos=end_ids(loaded),
        stop=options["stop"],
        window=options["window"],
        n_sink=n_sink or 0,
        positions=positions,
        cache=options["cache_kind"],
        naive=options["no_cache"],
        engine=options["engine"],
        sampling=Sampling(temperature=options["temperature"], top_k=options["top_k"], top_p=options["top_p"]),
        seed=options["seed"],
    )
    engine, longest = stream.engine, max(map(len, ids))
    if engine is not None:
        engine.ready(longest)
        if engine.note is not None:
            notice(engine.note, quiet=quiet)
    start_up_s = 0.0 if engine is None else time.perf_counter() - start_up
    reader = "torch" if engine is None else engine.reads(longest)
    shown = ["" if chat else prompt for prompt in prompts]
    out = _Output(shown, silent=options["format_"] != "table" or options["out"] is not None)
    watch = busy.Watch()
    with watch.span():
        out.begin()
        for pieces in stream:
            out.add(pieces, stream.ended)
        out.end()
    load = watch.record(device=loaded.device)
    generation = stream.generation
    rows = [
        {
            "prompt": prompt,
            "text": generation.texts[i],
            "token_ids": [*generation.token_ids[i]],
            "n_prompt": len(ids[i]),
            "n_new": len(generation.token_ids[i]),
            "prefill_ms": generation.prefill_ms,
            "decode_ms_median": generation.decode_ms_median,
            "tokens_per_s": generation.tokens_per_s,
            "cache_bytes": generation.cache_bytes,
            "stopped_by": generation.stopped_by[i],
        }
        for i, prompt in enumerate(prompts)
    ]
    if options["format_"] != "table":
        kept = ("bos", "max_new_tokens", "temperature", "top_k", "top_p", "window", "seed", "chat", "system")
        run = run_record(
            loaded.record(),
            load,
            **{key: options[key] for key in kept},
            stop=[*options["stop"]],
            batch=len(prompts),
            has_bos=all(passage.has_bos for passage in read),
            **({"bos_in_text": True} if any(passage.bos_in_text for passage in read) else {}),
            n_sink=n_sink,
            positions=positions,
            cache=not options["no_cache"],
            cache_kind=None if options["no_cache"] else options["cache_kind"] or ("rolling" if windowed else "full"),
            engine=options["engine"],
            step="torch" if engine is None else engine.name,
            reader=reader,
            start_up_s=round(start_up_s, 3),
            wall_s=round(time.perf_counter() - started, 3),
        )
        emit(Result("generate", rows, run), format_=options["format_"], out=options["out"], columns=())
    elif options["out"] is not None:
        write_whole(options["out"], "".join(out.written))
    notice(phrases.with_busy(_summary(generation, ids), load), quiet=quiet)


# one row has nothing to draw
command.params = [option for option in command.params if option.name != "plot"]


class _Output:
    """The rows' texts on standard output, in order: one row as it comes, the next ones when it has ended.

    Of several, each has its number before it. ``written`` has what was printed, unless made visible; if ``silent``,
    nothing is printed.
    """

    def __init__(self, beginnings: Sequence[str], *, silent: bool) -> None:
        several = len(beginnings) > 1
        self._waiting = [f"[{i}] {text}" if several else text for i, text in enumerate(beginnings, 1)]
        self._silent, self._row = silent, 0
        self.written: list[str] = []

    def begin(self) -> None:
        self.add([""] * len(self._waiting), (False,) * len(self._waiting))

    def add(self, pieces: Sequence[str], ended: Sequence[bool]) -> None:
        self._waiting = [text + piece for text, piece in zip(self._waiting, pieces, strict=True)]
        while self._row < len(ended):
            text, self._waiting[self._row] = self._waiting[self._row], ""
            self._print(text)
            if not ended[self._row]:
                return
            self._print("\n")
            self._row += 1

    def end(self) -> None:
        self.add([""] * len(self._waiting), (True,) * len(self._waiting))

    def _print(self, text: str) -> None:
        from kvprobe.results.visible import harmless

        self.written.append(text)
        if text and not self._silent:
            click.echo(harmless(text), nl=False)


def _asked(arguments: tuple[str, ...], options: dict[str, Any]) -> tuple[str, list[str]]:
    """The model and the prompts: the argument, those of --prompt, those of --prompt-file."""
    from kvprobe.text.texts import check_utf8, read_exact

    given = [*options["prompts"]]
    if len(arguments) > 2:
        raise click.UsageError(
            f"expected [MODEL] PROMPT, got {len(arguments)} arguments: several prompts: repeat --prompt; one prompt: "
            "put it in quotes"
        )
    named = len(arguments) == 2 or (arguments and (given or options["files"]))
    name, positional = (arguments[0], arguments[1:]) if named else ("gpt2", arguments)
    if not positional and not given and not options["files"]:
        raise click.UsageError("PROMPT is missing: kvprobe generate [MODEL] 'Once upon a time'")
    if not named and positional and _names_a_model(positional[0]):
        raise click.UsageError(f"PROMPT is missing: kvprobe generate {positional[0]} 'Once upon a time'")
    if [*positional, *options["files"]].count("-") > 1:
        raise click.UsageError("standard input (-) can be read only once: give it as one prompt")

    def read(file: str) -> str:
        return read_exact(file, most=MOST_PROMPT, shown="standard input" if file == "-" else f"--prompt-file {file}")

    prompts = [*(read(text) if text == "-" else text for text in positional), *given, *map(read, options["files"])]
    for shown, texts in (("the prompt", prompts), ("--system", [options["system"] or ""]), ("--stop", options["stop"])):
        for text in texts:
            check_utf8(shown, text)
    return name, prompts


def _check(options: dict[str, Any]) -> None:
    """Raise a usage error for options that exclude or need each other."""
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
    if options["system"] is not None and not options["chat"]:
        raise click.UsageError("--system is a message of a chat: give --chat too")
    if options["bos"] != "auto" and options["chat"]:
        raise click.UsageError("--bos has no effect on a chat, whose template has its own BOS: leave it out")
    if "" in options["stop"]:
        raise click.UsageError("--stop is empty: give the text to end before")
    if 0 < options["temperature"] < LEAST_TEMPERATURE:
        raise click.UsageError(
            f"--temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {options['temperature']}"
        )


def _check_length(loaded: "Loaded", decoder: "Decoder", needed: int, options: dict[str, Any]) -> None:
    """Refuse more tokens than the model has positions, before any work."""
    limit, new = decoder.config.max_positions, options["max_new_tokens"]
    if needed <= limit:
        return
    n_prompt = needed - new + 1
    hints = [f"--max-new-tokens {limit - n_prompt + 1}"] if n_prompt <= limit else ["a shorter prompt"]
    if decoder.config.rotary is not None and not options["no_cache"]:
        hints.append("--positions cache" if options["window"] else "--window 512 (only the last tokens are kept)")
    raise KvprobeError(
        f"{n_prompt:,} tokens of the prompt and --max-new-tokens {new} are more than the {limit:,} positions of "
        f"{loaded.name}: give {' or '.join(hints)}"
    )


def _names_a_model(word: str) -> bool:
    from pathlib import Path

    from kvprobe.models.pull import CATALOGUE

    return word in CATALOGUE or word.endswith(".gguf") or (Path(word) / "config.json").is_file()


def _summary(generation: "TextGeneration", ids: list[list[int]]) -> str:
    rate = generation.tokens_per_s
    speed = "" if rate is None else f", then {rate:.1f} tokens/s"
    cache = f"cache {generation.cache_bytes / 2**20:.2f} MiB" if generation.cache_bytes else "no cache"
    reasons = Counter(generation.stopped_by)
    why = ", ".join(f"{n} {by}" for by, n in reasons.items()) if len(ids) > 1 else generation.stopped_by[0]
    return (
        f"{f'{len(ids)} prompts, ' if len(ids) > 1 else ''}{sum(map(len, ids)):,} prompt tokens, "
        f"{sum(map(len, generation.token_ids)):,} new ({why}): "
        f"time to first token {generation.prefill_ms:.0f} ms{speed}; {cache}"
    )
