"""What is analysed? A model and a passage, loaded and checked against each other."""

import hashlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvprobe.errors import KvprobeError, Wording
from kvprobe.models import loading
from kvprobe.models.in_memory import from_memory
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.text import passages
from kvprobe.text.passages import Bos, Passage
from kvprobe.text.texts import Text, read_text


@dataclass(frozen=True, repr=False)
class Subject:
    """A loaded model with the passage that it will read, and the passage's text."""

    loaded: Loaded
    text: Text
    passage: Passage

    def __repr__(self) -> str:
        """As in ``Subject(smollm2-135m: 1,024 tokens of bundled)``."""
        return f"Subject({self.loaded.name}: {self.passage.n_tokens:,} tokens of {self.passage.name})"

    @property
    def model(self) -> Any:
        """The model itself, in eval mode."""
        return self.loaded.model

    @property
    def input_ids(self) -> Tensor:
        """The passage as a batch of one on the model's device: int64 ``[1, n_tokens]``."""
        return self.passage.ids[None].to(self.loaded.device)

    def record(self) -> dict[str, Any]:
        """Model and passage in a run record: names and fingerprints, never a path."""
        return self.loaded.record() | self.passage.record()


def prepare(
    model: Any,
    *,
    tokenizer: Any = None,
    text: str | Text = "bundled",
    string: str | None = None,
    ids: Any = None,
    tokens: int | None = 1024,
    bos: Bos = "auto",
    dtype: str = "float32",
    device: str = "auto",
    unlimited: bool = False,
    progress: Progress = silent,
) -> Subject:
    """A model and the passage that it will read: ``tokens`` ids, including BOS, of ``text``; None takes all of it.

    ``model`` is a name (:func:`kvprobe.models.loading.load`), a loaded model, or a Hugging Face model in memory with
    its ``tokenizer``; ``dtype`` and ``device`` are only for a name. ``text`` is a name or a file
    (:func:`kvprobe.text.texts.read_text`). Instead of it, a ``string`` or ``ids`` (int, ``[n_tokens]``) are read
    completely, whatever ``tokens`` is; for ids the tokenizer only says which are BOS.

    Raises KvprobeError for a text or model that cannot be loaded, a text that is too short, and a passage longer than
    the model's positions. ``unlimited`` allows the last, for passes that never use a position beyond the model's.
    Raises ValueError for settings that exclude each other.

    >>> import kvprobe
    >>> from kvprobe.experiments.sinks import Sinks
    >>> subject = kvprobe.prepare("smollm2-135m", tokens=128)
    >>> result = Sinks().run(subject)
    >>> len(result.rows), result.rows[23]["mass"] > 0.3
    (30, True)
    """
    if tokens is not None and tokens < 2:
        raise ValueError(Wording("{tokens} must be at least 2, got {0}", tokens))
    if (string is not None) + (ids is not None) + (text != "bundled") > 1:
        raise ValueError("text, string and ids exclude each other: give one of them")
    if not isinstance(text, str | Text):
        raise ValueError(f"text must be a name or a file, got {type(text).__name__}: prepare one text at a time")
    if not isinstance(model, str) and (dtype, device) != ("float32", "auto"):
        raise ValueError("a model in memory has its own dtype and device: leave them out")
    # the text first: a wrong file name should not wait for a model to load
    if string is not None:
        read, tokens = Text("string", hashlib.sha256(string.encode()).hexdigest(), string), None
    elif ids is not None:
        read = Text("ids", "", "")
    elif isinstance(text, Text):
        read = text
    else:
        read = read_text(text, n_bytes=None if tokens is None else passages.enough(tokens))
    if isinstance(model, str):
        loaded = loading.load(model, dtype=dtype, device=device, progress=progress)
    else:
        loaded = model if isinstance(model, Loaded) else from_memory(model, tokenizer)
    passage: Passage | None = None
    if ids is not None:
        passage = passages.of_ids(loaded.tokenizer, ids)
        tokens = passage.n_tokens
    elif loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer to read a text with: give tokenizer=… or ids=…")
    elif tokens is None:
        progress(f"tokenising {read.name}", 0, None)
        passage = passages.whole(loaded.tokenizer, read, bos=bos)
        tokens = passage.n_tokens
    limit = loaded.spec.max_positions
    if limit is not None and tokens > limit and not unlimited:
        said = "{0} has {1:,} positions, fewer than {2:,} tokens: use {tokens} {1}"
        raise KvprobeError(Wording(said, loaded.name, limit, tokens))
    passage = passage or passages.encode(loaded.tokenizer, read, n_tokens=tokens, bos=bos)
    if (highest := int(passage.ids.max())) >= loaded.spec.vocab_size:
        if ids is not None:
            raise KvprobeError(
                f"{highest:,} is not an id of {loaded.name}, which has {loaded.spec.vocab_size:,} tokens"
            )
        raise KvprobeError(
            f"the tokenizer of {loaded.name} gives the id {highest:,}, but the model has {loaded.spec.vocab_size:,} "
            "tokens: they do not belong together"
        )
    return Subject(loaded, read, passage)
