"""What does lm-evaluation-harness score where attention reads something else? Its model ``kvprobe``.

The harness finds a model by its name in a registry, which importing this module writes it into:

    import lm_eval
    import kvprobe.clients.lm_eval

    lm_eval.simple_evaluate("kvprobe", "pretrained=smollm2-135m,attend=mine.py:last_64", tasks=["arc_easy"])

In a shell, ``python -m kvprobe.clients.lm_eval`` is the harness's own ``lm_eval`` that knows this model. The harness
comes with ``pip install 'kvprobe[lm-eval]'``.
"""

import dataclasses
import inspect
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"lm-evaluation-harness cannot be imported ({error}): pip install 'kvprobe[lm-eval]'") from error

from kvprobe.attention.language_model import language_model
from kvprobe.attention.named import named
from kvprobe.attention.seam import attending
from kvprobe.caches import registry
from kvprobe.caches.layer import KVCache, Place
from kvprobe.decoder.model import from_hf
from kvprobe.decoder.torch_engine import TorchEngine
from kvprobe.errors import KvprobeError
from kvprobe.generation.choose_engine import choose_engine
from kvprobe.generation.detokenise import RowText
from kvprobe.generation.generate import stream
from kvprobe.generation.prompts import end_ids
from kvprobe.models import loading
from kvprobe.models.in_memory import from_memory
from kvprobe.models.loading import Loaded
from kvprobe.probes.losses import nll

LOG = logging.getLogger(__name__)
# what the harness's command asks for where nobody chose
COMMAND_DEVICE = "cuda:0"
# positions whose logits are held at a time
CHUNK = 256
# the harness's defaults, for models without a limit and for tasks that name none
MAX_LENGTH, MAX_NEW_TOKENS = 2048, 256
# what tasks call the most new tokens; of several the first counts
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("kvprobe")
class KvprobeLM(TemplateLM):  # type: ignore[misc]
    """A model for lm-evaluation-harness, with an attention function of yours or on one of kvprobe's caches.

    ``pretrained`` is a name (:func:`kvprobe.load`), a loaded model, or a Hugging Face model in memory with its
    ``tokenizer``. ``attend`` is a function as for :func:`kvprobe.attending`, or ``FILE.py:NAME``, whose file is run.
    With ``cache``, a kind of :mod:`kvprobe.caches.registry`, kvprobe's decoder answers: it reads the context into such
    a cache and the continuation after it; ``settings`` are the kind's, as ``window`` and ``n_sink``. Otherwise the
    model itself does, through the seam.

    Conventions are those of the harness's ``HFLM``: an empty context is BOS, EOS or ``prefix_token_id``; what is longer
    than ``max_length`` tokens (the model's positions) loses its first ones, and a notice says how many requests did; a
    rolling log-likelihood reads longer texts window by window; generation is greedy, up to 256 tokens unless the task
    says; ``cuda:0``, which the harness's command asks for by itself, gives way to the best device where there is none.
    Log-likelihoods are sums in nat. Requests are read one at a time, since an attention function would see padding.
    Raises KvprobeError for settings that are unknown or contradict each other, and for requests that cannot be
    answered, such as one for tokens drawn at random.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        attend: Any = None,
        cache: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("None", "1", "auto"):
            raise KvprobeError(f"batch_size is {batch_size}, but kvprobe reads one request at a time: leave it out")
        known = [] if cache is None else _settings_of(cache)
        if unknown := sorted(set(settings) - set(known)):
            has = f"the cache {cache} has: {', '.join(known)}" if cache else "those of a cache need cache=NAME"
            raise KvprobeError(f"unknown setting {unknown[0]!r}; {has}")
        if device == COMMAND_DEVICE and not torch.cuda.is_available():
            LOG.warning(f"{device} is not available: the best device here is used")
            device = None
        if isinstance(pretrained, str):
            loaded = loading.load(pretrained, dtype=dtype or "float32", device=device)
        elif dtype or device:
            raise KvprobeError("a model in memory has its own dtype and device: leave them out")
        else:
            loaded = pretrained if isinstance(pretrained, Loaded) else from_memory(pretrained, tokenizer)
        if loaded.tokenizer is None:
            raise KvprobeError(f"{loaded.name} has no tokenizer to read requests with: give tokenizer=…")
        self._loaded, self.tokenizer, self._device = loaded, loaded.tokenizer, torch.device(loaded.device)
        self._attend = None if attend is None else named(attend)
        self._kind, self._settings = cache, settings
        self._decoder: Any = None if cache is None else from_hf(loaded.model)
        given = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        self._prefix = next((token for token in given if token is not None), None)
        if self._prefix is None:
            raise KvprobeError(
                f"the tokenizer of {loaded.name} has neither BOS nor EOS for an empty context: give prefix_token_id=…"
            )
        positions = loaded.spec.max_positions
        self.max_length = (positions or MAX_LENGTH) if max_length is None else max_length
        unbounded = cache is not None and self._cache(1).unbounded
        most = math.inf if positions is None or unbounded else positions
        if not 1 <= self.max_length <= most:
            raise KvprobeError(f"max_length must be 1 to {most}, the positions of {loaded.name}, got {max_length}")

    @property
    def eot_token_id(self) -> Any:
        """The tokenizer's EOS."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> Any:
        """What stands for an empty context."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """For the ``config`` of the harness's results: model, attention function and cache, never a path."""
        attend = None if self._attend is None else self._attend.record()
        own = {"attend": attend, "cache": self._kind, "max_length": self.max_length, **self._settings}
        return {"kvprobe": self._loaded.record() | own}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat as the model's own template writes it."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **how))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, with the marks that the tokenizer adds, unless the text begins with one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self._prefix]))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, all its tokens predicted; by windows if it is longer than ``max_length``."""
        how = {"prefix_token": self._prefix, "max_seq_len": self.max_length, "context_len": 1}
        texts = [
            [
                (None, *make_disjoint_window(pair))
                for pair in get_rolling_token_windows(token_list=self.tok_encode(request.args[0]), **how)
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([window for windows in texts for window in windows], disable_tqdm))
        return [sum(next(scores)[0] for _ in windows) for windows in texts]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        for _text, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise KvprobeError(
                    f"a request has {len(context):,} tokens of context and {len(continuation):,} to be scored; needed "
                    f"are at least 1 of each, and at most {self.max_length:,} to be scored"
                )
        # the last token is predicted and not read
        rows = self._cut([(context + continuation, self.max_length + 1) for _text, context, continuation in requests])
        cache = self._cache(max(map(len, rows), default=1))
        answers = list[tuple[float, bool]]()
        read: list[int] = []
        parts: Iterable[Tensor] = ()
        for row, (_text, _context, continuation) in zip(tqdm(rows, disable=disable_tqdm), requests, strict=True):
            targets = torch.tensor(continuation, device=self._device)
            # answers of one token to one question differ in their targets alone
            if len(targets) > 1 or row[:-1] != read:
                parts = self._logits(row[:-1], len(targets), cache)
                read, parts = (row[:-1], [*parts]) if len(targets) == 1 else ([], parts)
            answers.append(self._score(parts, targets))
        return answers

    def _score(self, parts: Iterable[Tensor], targets: Tensor) -> tuple[float, bool]:
        """The log-likelihood of ``targets`` ``[n]``, and whether each is the likeliest; ``parts`` ``[some, vocab]``."""
        total, greedy, done = 0.0, True, 0
        for logits in parts:
            wanted = targets[done : done + len(logits)]
            total -= float(nll(logits, wanted).sum())
            greedy &= bool((logits.argmax(-1) == wanted).all())
            done += len(logits)
        if not math.isfinite(total):
            raise KvprobeError(f"a log-likelihood is not finite at {self._loaded.dtype}: try float32")
        return total, greedy

    def _logits(self, ids: list[int], n: int, cache: KVCache | None) -> Iterator[Tensor]:
        """The logits after each of the last ``n`` of ``ids``, ``[some, vocab]`` at a time."""
        read = torch.tensor([ids], device=self._device)
        if cache is None:
            model = language_model(self._loaded.model)
            for hidden in model.body(read, attend=self._attend)[:, -n:].split(CHUNK, dim=1):
                yield model.logits(hidden)[0]
            return
        # compiled code decodes token by token: of many tokens that are known, torch is faster
        engine, first = TorchEngine(self._decoder, cache, **self._attends), len(ids) - n + 1
        cache.reset()
        yield engine.prefill(read[:, :first])
        for part in read[:, first:].split(CHUNK, dim=1):
            if part.shape[1]:
                yield engine.decode(part)[0]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, greedily, up to the first of its stop texts."""
        asked = [_asked(request.args[1]) for request in requests]
        if too_many := [n_tokens for n_tokens, _stops in asked if n_tokens >= self.max_length]:
            raise KvprobeError(f"{too_many[0]:,} new tokens leave no room for a context in {self.max_length:,}")
        contexts = [self.tok_encode(request.args[0]) for request in requests]
        rows = self._cut([(ids, self.max_length - n) for ids, (n, _stops) in zip(contexts, asked, strict=True)])
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        texts = []
        for ids, (n_tokens, stops) in zip(tqdm(rows, disable=disable_tqdm), asked, strict=True):
            ends = {*end_ids(self._loaded), *(special[text] for text in stops if text in special)}
            texts.append(self._continued(ids, n_tokens, ends, stops))
        return texts

    def _continued(self, ids: list[int], n_tokens: int, ends: set[int], stops: list[str]) -> str:
        row, pieces = RowText(self._spell, stops), list[str]()

        def done(token: int) -> bool:
            if token not in ends:
                pieces.append(row.add(token))
            return token in ends or row.stopped

        if cache := self._cache(len(ids) + n_tokens):
            engine = choose_engine(self._decoder, cache, **self._attends)
            for step in stream(self._decoder, [ids], max_new_tokens=n_tokens, cache=cache, engine=engine):
                if any(done(token) for token in step.tokens if token is not None):
                    break
        else:
            read = torch.tensor([ids], device=self._device)
            with nullcontext() if self._attend is None else attending(self._loaded.model, self._attend):
                self._loaded.model.generate(
                    read,
                    attention_mask=torch.ones_like(read),
                    max_new_tokens=n_tokens,
                    stopping_criteria=[lambda read, _scores, **_: torch.tensor([done(int(read[0, -1]))])],
                    eos_token_id=sorted(ends) or None,
                    pad_token_id=self._prefix,
                    do_sample=False,
                    # for sampling alone, and a warning otherwise
                    **dict.fromkeys(("temperature", "top_k", "top_p")),
                )
        return "".join([*pieces, row.end()])

    @property
    def _attends(self) -> dict[str, Any]:
        return {} if self._attend is None else {"attend": self._attend}

    def _spell(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _cache(self, capacity: int) -> Any:
        """An empty cache for one row of ``capacity`` tokens; None without a kind."""
        return None if self._kind is None else self._decoder.cache(self._kind, capacity, **self._settings)

    def _cut(self, rows: list[tuple[list[int], int]]) -> list[list[int]]:
        """The last tokens of each row, as many as its limit."""
        lost = [len(ids) - limit for ids, limit in rows if len(ids) > limit]
        if lost:
            LOG.warning(
                f"max_length {self.max_length:,}: {len(lost)} of {len(rows)} requests lose their first tokens, up to "
                f"{max(lost):,} of them"
            )
        return [ids[-limit:] for ids, limit in rows]


def _settings_of(kind: str) -> list[str]:
    """The names of a kind's own settings."""
    found = registry.kind(kind)
    given = {**inspect.signature(found.fit).parameters, **inspect.signature(found).parameters}
    own = {name for name, parameter in given.items() if parameter.kind is parameter.KEYWORD_ONLY}
    return sorted(own - {field.name for field in dataclasses.fields(Place)})


def _asked(kwargs: dict[str, Any]) -> tuple[int, list[str]]:
    """The most new tokens and the stop texts that a task's ``generation_kwargs`` ask for."""
    asked = {name: value for name, value in kwargs.items() if value is not None}
    until = asked.pop("until", [])
    limits = [int(asked.pop(name)) for name in LIMITS if name in asked]
    drawn = asked.pop("do_sample", float(asked.get("temperature", 0)) > 0)
    # without drawing these mean nothing
    other = sorted(set(asked) - {"temperature", "top_k", "top_p"})
    if drawn or other:
        raise KvprobeError(f"kvprobe generates greedily: a task cannot ask for {'do_sample' if drawn else other[0]}")
    return (limits or [MAX_NEW_TOKENS])[0], [until] if isinstance(until, str) else [*until]


def main() -> None:
    """The harness's own command; what a user can fix is one line and exit status 1."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except (KvprobeError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
