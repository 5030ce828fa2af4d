"""What does a model write after these prompts? Strings in, strings out, with the model's own end tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe.caches.layer import KVCache
from kvprobe.caches.rolling import Positions
from kvprobe.decoder.model import Decoder, from_hf
from kvprobe.errors import did_you_mean
from kvprobe.generation.choose_engine import EngineChoice, choose_engine
from kvprobe.generation.detokenise import RowText
from kvprobe.generation.generate import Generation, Sampling, Step, stream, tokens_fed
from kvprobe.generation.prompts import encoded, end_ids
from kvprobe.models import loading
from kvprobe.models.in_memory import from_memory
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.text.passages import Bos

N_SINK = 4
"""Sinks beside a window, unless told: what StreamingLLM found to be enough."""

SETTINGS = ("window", "n_sink", "positions", "cache", "naive", "engine")
"""The settings of :class:`TextStream` that `generate` hands on."""


@dataclass(frozen=True)
class TextGeneration(Generation):
    """A generation with the text of each row, without special tokens.

    ``stopped_by`` may also be "stop": the text then ends before the stop text, whose tokens are still in ``token_ids``.
    """

    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The text of the only row. Raises ValueError if there are several."""
        if len(self.texts) != 1:
            raise ValueError(f"there are {len(self.texts)} texts: see .texts")
        return self.texts[0]


class TextStream:
    """The continuations of ``ids`` (one list a row, of any lengths), as text: iterating gives the new text of each row.

    ``window`` keeps the last tokens and ``n_sink`` first ones alone; ``positions`` are then by default "cache" under
    RoPE and "absolute" otherwise. ``cache`` is a kind (:mod:`kvprobe.caches.registry`), by default "rolling" with a
    window and "full" without; ``naive`` uses none. A row ends with a token of ``eos``, or where one of the
    texts ``stop`` is complete; a stop text that names a special token means that token. The other settings, and what is
    raised at once, are those of :func:`kvprobe.generation.generate.stream`. When all is read, ``generation`` has it.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any,
        ids: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos: Sequence[int] = (),
        stop: Sequence[str] = (),
        window: int | None = None,
        n_sink: int = N_SINK,
        positions: Positions | None = None,
        cache: str | None = None,
        naive: bool = False,
        engine: EngineChoice = "auto",
        **settings: Any,
    ) -> None:
        if isinstance(stop, str):
            raise ValueError(f"stop must be a list of texts, got {stop!r}")
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._stop_ids = {special[text] for text in stop if text in special}

        def spell(token_ids: list[int]) -> str:
            return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

        self._rows = [RowText(spell, stop) for _ in ids]
        needed = tokens_fed(ids, max_new_tokens)
        self.cache: KVCache | None = None
        if not naive and window is None:
            decoder.check_length(needed)
            self.cache = decoder.cache(cache or "full", needed, batch=len(ids))
        elif not naive:
            if cache not in (None, "rolling"):
                raise ValueError(f"a window needs a rolling cache, not {cache!r}")
            # no more slots than tokens: a window of all of them cuts nothing
            window, n_sink = min(window or 0, needed), min(n_sink, needed)
            where = positions or default_positions(decoder)
            self.cache = decoder.rolling_cache(window, n_sink=n_sink, positions=where, batch=len(ids))
        self.engine = None if self.cache is None else choose_engine(decoder, self.cache, engine)
        self._eos = frozenset(eos) | self._stop_ids
        self._steps = stream(
            decoder,
            ids,
            max_new_tokens=max_new_tokens,
            cache=self.cache,
            naive=naive,
            eos=sorted(self._eos),
            engine=self.engine or "torch",
            **settings,
        )
        self._read: list[Step] = []
        self._texts = [""] * len(ids)

    def __iter__(self) -> Iterator[list[str]]:
        """The text that each row gained, step by step; "" where it gained none."""
        ended = [False] * len(self._rows)
        for step in self._steps:
            tokens = tuple(None if done else token for done, token in zip(ended, step.tokens, strict=True))
            pieces = ["" if token is None else row.add(token) for row, token in zip(self._rows, tokens, strict=True)]
            for i, token in enumerate(tokens):
                if not ended[i] and (step.ended[i] or self._rows[i].stopped):
                    ended[i] = True
                    pieces[i] += self._rows[i].end()
                    self._rows[i].stopped |= token in self._stop_ids
            self._read.append(Step(tokens, step.ms, tuple(ended)))
            yield self._kept(pieces)
            if all(ended):
                return
        yield self._kept([row.end() for row in self._rows])

    def _kept(self, pieces: list[str]) -> list[str]:
        self._texts = [text + piece for text, piece in zip(self._texts, pieces, strict=True)]
        return pieces

    @property
    def ended(self) -> tuple[bool, ...]:
        """Which rows have ended so far."""
        return self._read[-1].ended if self._read else (False,) * len(self._rows)

    @property
    def generation(self) -> TextGeneration:
        """What has been generated so far."""
        read = vars(Generation.of(self._read, self.cache))
        by = zip(self._rows, read["stopped_by"], strict=True)
        stopped_by = tuple("stop" if row.stopped else reason for row, reason in by)
        return TextGeneration(**(read | {"stopped_by": stopped_by}), texts=tuple(self._texts))


def default_positions(decoder: Decoder) -> Positions:
    """How a window counts positions unless told: by slot in the cache, or absolute if they are learned."""
    return "absolute" if decoder.config.rotary is None else "cache"


def generate(
    model: Any,
    prompts: str | Sequence[str],
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 128,
    chat: bool = False,
    system: str | None = None,
    stop: Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    bos: Bos = "auto",
    progress: Progress = silent,
    **settings: Any,
) -> TextGeneration:
    """What the model writes after each of ``prompts``, read as one batch: ``.texts``, ``.stopped_by``, ``.token_ids``.

    ``model`` is a name, a loaded model, or a Hugging Face model in memory with its ``tokenizer``. With ``chat`` each
    prompt is a user's message in the model's own template, after the message ``system`` if there is one. A row ends
    with one of the model's end tokens, before one of the texts ``stop``, or after ``max_new_tokens``. Temperature 0 is
    greedy (:class:`kvprobe.generation.generate.Sampling`). ``settings`` are ``window``, ``n_sink``, ``positions``,
    ``cache``, ``naive`` and ``engine`` of :class:`TextStream`; TypeError for any other. Raises KvprobeError for a model
    without a chat template, and ValueError for an empty prompt, for none, and for more tokens than the model has
    positions.

    >>> import kvprobe
    >>> questions = ["What is the capital of France?", "What is the capital of Japan?"]
    >>> answers = kvprobe.generate("smollm2-135m", questions, chat=True, max_new_tokens=16)
    >>> answers.texts[0]
    'The capital of France is Paris.'
    >>> answers.stopped_by
    ('eos', 'eos')
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if unknown := sorted(settings.keys() - SETTINGS):
        meant = "n_sink" if unknown[0] == "sinks" else None
        hint = f"did you mean {meant}? " if meant else did_you_mean(unknown[0], SETTINGS)
        raise TypeError(f"generate has no {unknown[0]}: {hint}its settings are {', '.join(SETTINGS)}")
    prompts = [prompts] if isinstance(prompts, str) else [*prompts]
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    if isinstance(model, str):
        loaded = loading.load(model, progress=progress)
    else:
        loaded = model if isinstance(model, Loaded) else from_memory(model, tokenizer)
    ids = [encoded(loaded, prompt, chat=chat, system=system, bos=bos).ids.tolist() for prompt in prompts]
    rows = TextStream(
        from_hf(loaded.model),
        loaded.tokenizer,
        ids,
        max_new_tokens=max_new_tokens,
        eos=end_ids(loaded),
        stop=stop,
        sampling=sampling,
        seed=seed,
        **settings,
    )
    for n_tokens, _ in enumerate(rows, 1):
        progress("generating", min(n_tokens, max_new_tokens), max_new_tokens, "tokens")
    return rows.generation
