"""What is looked at? A model and a passage, loaded, checked against each other and ready for an analysis."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvprobe.errors import KvprobeError
from kvprobe.models import loading
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.text import passages
from kvprobe.text.passages import Bos, Passage, Text


@dataclass(frozen=True)
class Subject:
    """A loaded model with the passage it will read, and the text the passage was cut from."""

    loaded: Loaded
    text: Text
    passage: Passage

    @property
    def model(self) -> Any:
        """The model itself, in eval mode."""
        return self.loaded.model

    @property
    def input_ids(self) -> Tensor:
        """The passage as a batch of one on the model's device: int64 ``[1, n_tokens]``."""
        return self.passage.ids[None].to(self.loaded.device)

    def record(self) -> dict[str, Any]:
        """What a run record says of both: names and fingerprints, never a path."""
        return self.loaded.record() | passages.run_record(self.passage)


def prepare(
    model: str,
    *,
    text: str = "bundled",
    tokens: int | None = 1024,
    bos: Bos = "auto",
    dtype: str = "float32",
    device: str = "auto",
    unlimited: bool = False,
    progress: Progress = silent,
) -> Subject:
    """Load ``model`` and cut a passage of ``tokens`` ids, BOS included, from ``text``; None takes all of the text.

    Raises KvprobeError for a text or model that cannot be had, a text too short, and a passage longer than the
    model's positions, unless ``unlimited``: for passes that never use a position beyond the model's.
    """
    if tokens is not None and tokens < 2:
        raise ValueError(f"tokens must be at least 2, got {tokens}")
    # the text first: a wrong file name should not wait for a model to load
    read = passages.read_text(text, n_bytes=None if tokens is None else passages.enough(tokens), progress=progress)
    loaded = loading.load(model, dtype=dtype, device=None if device == "auto" else device, progress=progress)
    whole = None
    if tokens is None:
        progress(f"tokenising {read.name}", 0, None)
        whole = passages.whole(loaded.tokenizer, read, bos=bos)
        tokens = whole.n_tokens
    limit = loaded.spec.max_positions
    if limit is not None and tokens > limit and not unlimited:
        raise KvprobeError(f"{loaded.name} has {limit:,} positions, fewer than {tokens:,} tokens: use --tokens {limit}")
    passage = whole or passages.encode(loaded.tokenizer, read, n_tokens=tokens, bos=bos)
    if (highest := int(passage.ids.max())) >= loaded.spec.vocab_size:
        raise KvprobeError(
            f"the tokenizer of {loaded.name} gives the id {highest:,}, and the model has {loaded.spec.vocab_size:,} "
            "tokens: they do not belong together"
        )
    return Subject(loaded, read, passage)
