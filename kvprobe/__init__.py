"""Where a language model's attention goes, how small its KV cache could be, and what that would cost.

The few names that most work begins with. ``import kvprobe`` loads nothing heavy: each name imports what it needs when
it is used. The measurements of the command line are in :mod:`kvprobe.experiments`, one a module.
"""

# first: if this is the command, Ctrl-C is handled before anything slow is imported
from kvprobe import interrupts as _interrupts  # noqa: F401, I001

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from kvprobe.progress import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kvprobe.attention.call import AttentionCall
    from kvprobe.attention.capture import Captured
    from kvprobe.generation.texts import TextGeneration
    from kvprobe.models.loading import Loaded
    from kvprobe.models.subject import Subject
    from kvprobe.results.result import Result
    from kvprobe.text.texts import Text

__version__ = "0.1.0"
__all__ = ["Result", "attending", "capture", "evaluate", "generate", "load", "prepare", "token0_mass"]


def load(name: str, *, dtype: str = "float32", device: str | None = None, progress: Progress = silent) -> "Loaded":
    """A model by name, directory, GGUF file or hub id: ``.model``, ``.tokenizer``, ``.spec``.

    See :func:`kvprobe.models.loading.load` for where it is found and what is refused.

    >>> import kvprobe
    >>> loaded = kvprobe.load("smollm2-135m")
    >>> loaded.spec.n_layers, loaded.spec.n_heads, loaded.spec.n_kv_heads
    (30, 9, 3)
    """
    from kvprobe.models import loading

    return loading.load(name, dtype=dtype, device=device, progress=progress)


def prepare(
    model: Any,
    *,
    tokenizer: Any = None,
    text: "str | Text" = "bundled",
    string: str | None = None,
    ids: Any = None,
    tokens: int | None = 1024,
    bos: Literal["auto", "add", "drop"] = "auto",
    dtype: str = "float32",
    device: str = "auto",
    unlimited: bool = False,
    progress: Progress = silent,
) -> "Subject":
    """A model with the passage that it will read: the input of every experiment.

    The model is a name, or one in memory with its tokenizer; it reads a text by name or file, a ``string``, or ``ids``.
    See :func:`kvprobe.models.subject.prepare` for what is checked.

    >>> import kvprobe
    >>> from kvprobe.experiments.sinks import Sinks
    >>> subject = kvprobe.prepare("smollm2-135m", tokens=128)
    >>> result = Sinks().run(subject)
    >>> len(result.rows), result.rows[23]["mass"] > 0.3
    (30, True)
    """
    from kvprobe.models import subject

    return subject.prepare(
        model,
        tokenizer=tokenizer,
        text=text,
        string=string,
        ids=ids,
        tokens=tokens,
        bos=bos,
        dtype=dtype,
        device=device,
        unlimited=unlimited,
        progress=progress,
    )


def attending(model: "nn.Module", attend: "Callable[[AttentionCall], Tensor]") -> AbstractContextManager[None]:
    """A block in which ``attend(call)`` replaces attention, once per layer and forward pass, also in ``generate``.

    A call has ``layer``, ``n_heads``, ``n_kv_heads``, ``scale``, ``softcap``, ``sink_logits`` and, after position
    encoding:

    - ``query`` ``[batch, n_heads, q_len, head_dim]``
    - ``key`` ``[batch, n_kv_heads, kv_len, head_dim]``, ``value`` ``[batch, n_kv_heads, kv_len, v_head_dim]``
    - ``keep``, bool ``[batch or 1, 1 or n_heads, q_len, kv_len]``: what the model lets each query see
    - ``last(n)`` and ``top(n, values)``: the last visible keys, and those of the greatest values, as a ``keep``
    - ``weights()``: attention weights by blocks of queries; ``rotate(key, by)``: its own RoPE by some positions
    - ``attend(query=…, key=…, value=…, keep=…)``: the model's own attention with what is replaced

    In Hugging Face's ``generate`` with a cache, ``q_len`` is 1 after the prompt and ``kv_len`` what the cache holds.
    See :func:`kvprobe.attention.seam.attending` for what is checked and raised.

    >>> import kvprobe
    >>> subject = kvprobe.prepare("smollm2-135m", tokens=32)
    >>> def last_four(call):
    ...     return call.attend(keep=call.keep.triu(-3))
    >>> with kvprobe.attending(subject.model, last_four):
    ...     logits = subject.model(subject.input_ids, use_cache=False).logits
    >>> tuple(logits.shape)
    (1, 32, 49152)
    """
    from kvprobe.attention import seam

    return seam.attending(model, attend)


def capture(
    model: "nn.Module",
    input_ids: "Tensor",
    *,
    layers: Iterable[int] | None = None,
    maps: Iterable[int] | bool = False,
    to_cpu: bool = False,
    **inputs: Any,
) -> "Captured":
    """Keys and values as attention reads them and, on request, attention maps, by layer.

    See :func:`kvprobe.attention.capture.capture` for their shapes.

    >>> import kvprobe
    >>> subject = kvprobe.prepare("smollm2-135m", tokens=32)
    >>> seen = kvprobe.capture(subject.model, subject.input_ids, layers=[0, 12], maps=[12])
    >>> tuple(seen.keys[0].shape), tuple(seen.maps[12].shape)
    ((1, 3, 32, 64), (1, 9, 32, 32))
    """
    from kvprobe.attention import capture as capturing

    return capturing.capture(model, input_ids, layers=layers, maps=maps, to_cpu=to_cpu, **inputs)


def evaluate(
    subject: "Subject", attend: Any, *, score_from: int | None = None, seed: int = 0, progress: Progress = silent
) -> "Result":
    """The loss with an attention function of your own beside the model's own, with KL divergence and top-1 agreement.

    See :func:`kvprobe.experiments.evaluate.evaluate` for the columns and what is raised.

    >>> import kvprobe
    >>> def small_norms(call):
    ...     last = call.last(64)
    ...     few = call.top(64, -call.key.norm(dim=-1), among=call.keep & ~last)
    ...     return call.attend(keep=last | few)
    >>> result = kvprobe.evaluate(kvprobe.prepare("smollm2-135m", tokens=256), small_norms)
    >>> [row["attend"] for row in result.rows], result.rows[1]["delta"] > 0
    ([None, 'small_norms'], True)
    """
    from kvprobe.experiments import evaluate as evaluating

    return evaluating.evaluate(subject, attend, score_from=score_from, seed=seed, progress=progress)


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
    bos: Literal["auto", "add", "drop"] = "auto",
    progress: Progress = silent,
    **settings: Any,
) -> "TextGeneration":
    """What a model writes after each of ``prompts``, by kvprobe's own decoder and KV cache, as one batch.

    With ``chat`` each prompt is a message to an instruct model. See :func:`kvprobe.generation.texts.generate`.

    >>> import kvprobe
    >>> questions = ["What is the capital of France?", "What is the capital of Japan?"]
    >>> answers = kvprobe.generate("smollm2-135m", questions, chat=True, max_new_tokens=16)
    >>> answers.texts[0]
    'The capital of France is Paris.'
    >>> answers.stopped_by
    ('eos', 'eos')
    """
    from kvprobe.generation import texts

    return texts.generate(
        model,
        prompts,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        chat=chat,
        system=system,
        stop=stop,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        bos=bos,
        progress=progress,
        **settings,
    )


def token0_mass(model: "nn.Module", input_ids: "Tensor", queries_from: int = 64) -> "Tensor":
    """Mean attention weight on token 0: float32 ``[n_layers, n_heads]``, without ever storing a map.

    See :func:`kvprobe.probes.mass.token0_mass`, and :func:`kvprobe.probes.mass.measure` for any position.

    >>> import kvprobe
    >>> subject = kvprobe.prepare("smollm2-135m", tokens=128)
    >>> mass = kvprobe.token0_mass(subject.model, subject.input_ids)
    >>> tuple(mass.shape)
    (30, 9)
    """
    from kvprobe.probes import mass

    return mass.token0_mass(model, input_ids, queries_from)


def __getattr__(name: str) -> Any:
    if name == "Result":
        from kvprobe.results.result import Result

        return Result
    raise AttributeError(f"module 'kvprobe' has no attribute {name!r}")
