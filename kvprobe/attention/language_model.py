"""What does a probe ask of a model? One protocol, of Hugging Face's models and of our decoder alike.

    model = language_model(anything)
    x = model.body(ids, attend=watch)          # [batch, length, hidden]
    logits = model.logits(x)                   # [batch, length, vocab], by the model's own head, scales and caps

A probe that only watches is one function, called for each layer: :func:`observe`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kvprobe.attention.call import Attend, AttentionCall
from kvprobe.attention.layers import body_of
from kvprobe.attention.rope import Rope
from kvprobe.errors import NotIntercepted, UnsupportedModelError
from kvprobe.shape.spec import Spec


class LanguageModel(Protocol):
    """A model that reads ids: its body, its head, and its positions."""

    @property
    def family(self) -> str:
        """What an error calls it: the ``model_type``, or "decoder"."""

    @property
    def module(self) -> nn.Module:
        """The torch module, for hooks and parameters."""

    @property
    def windows(self) -> Sequence[int | None]:
        """The layers' own windows, the query included, by layer index; None where a layer sees everything."""

    @property
    def max_positions(self) -> int | None:
        """How many positions the model has; None where its configuration does not say."""

    def layers(self) -> Mapping[int, str]:
        """Layer index → class name of the modules that hold keys and values."""

    def body(self, ids: Tensor, *, attend: Attend | None = None, **inputs: Any) -> Tensor:
        """Hidden states after the last norm, ``[batch, length, hidden]``, of ``ids`` ``[batch, length]``.

        ``attend`` stands in for attention in every layer; ``inputs`` go to the model. No cache is read or filled.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[batch, length, vocab]`` of ``hidden``, all that the model does after its body included."""

    def rope(self, layer: int) -> Rope | None:
        """The rotation of a layer's positions; None without one."""

    def check_by_slot(self, n_tokens: int) -> int | None:
        """How many positions there are where only distances count; None for no limit.

        Raises UnsupportedModelError where keys cannot be moved to other positions, within ``n_tokens`` tokens.
        """


def language_model(model: Any) -> LanguageModel:
    """The protocol for a Hugging Face causal model, our decoder, or what has loaded either (``.model``).

    Raises UnsupportedModelError for anything else.
    """
    if isinstance(model, HFModel | OwnModel):
        return model
    if isinstance(model, nn.Module) and hasattr(model, "body") and hasattr(model, "full_cache"):
        return OwnModel(model)
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.Module) and hasattr(model, "base_model") and hasattr(model, "config"):
        return HFModel(model)
    if isinstance(inner := getattr(model, "model", None), nn.Module):
        return language_model(inner)
    raise UnsupportedModelError(
        f"{type(model).__name__} is not a language model here: give a Hugging Face causal model or a kvprobe Decoder"
    )


class HFModel:
    """A Hugging Face causal model, through the seam and its own forward."""

    def __init__(self, model: Any) -> None:
        self._model = self.module = model
        self.family = str(getattr(model.config, "model_type", type(model).__name__))

    @property
    def windows(self) -> Sequence[int | None]:
        """By the configuration (:class:`kvprobe.shape.spec.Spec`)."""
        return Spec.from_config(self._model.config.to_dict()).windows

    @property
    def max_positions(self) -> int | None:
        """The configuration's ``max_position_embeddings``."""
        return getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def layers(self) -> Mapping[int, str]:
        """As :class:`LanguageModel` says."""
        from kvprobe.attention.layers import attention_layers

        return attention_layers(self._model)

    def body(self, ids: Tensor, *, attend: Attend | None = None, **inputs: Any) -> Tensor:
        """As :class:`LanguageModel` says; raises as :func:`kvprobe.attention.seam.attending` does.

        Raises UnsupportedModelError for an input that only a decoder honours, such as a cache of kvprobe's own.
        """
        # families take any keyword, and most would ignore these without a word
        if ours := [name for name in ("cache", "left_pad", "positions") if name in inputs]:
            raise UnsupportedModelError(
                f"family {self.family}: {ours[0]} is an input of kvprobe's own decoder; convert the model first "
                "(kvprobe.decoder.model.from_hf)"
            )
        seam: Any = nullcontext()
        if attend is not None:
            from kvprobe.attention.seam import attending

            seam = attending(self._model, attend)
        with seam:
            output = body_of(self._model)(input_ids=ids, use_cache=False, **inputs)
        # a model that is its own body gives none, and whoever only watches needs none
        return getattr(output, "last_hidden_state", torch.empty(0))

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own forward, whose body answers with ``hidden``.

        The head alone would miss what families do around it (soft-capped or scaled logits).
        """
        # a token as good as any: the body that would read it is stood in for
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with _answering(self._model, _BodyOutput(self.family, hidden)):
            return self._model(input_ids=ids, use_cache=False).logits

    def rope(self, layer: int) -> Rope | None:
        """As :class:`LanguageModel` says; raises as :func:`kvprobe.attention.rope_finding.rope_of` does."""
        from kvprobe.attention.rope_finding import rope_of, rotates

        return rope_of(self._model)[layer] if rotates(self._model) else None

    def check_by_slot(self, n_tokens: int) -> int | None:
        """As :class:`LanguageModel` says."""
        from kvprobe.attention.rope_finding import check_scores_by_distance, position_limit, rope_of

        rope_of(self._model)
        check_scores_by_distance(self._model, n_tokens)
        return position_limit(self._model)


class OwnModel:
    """Our decoder (:class:`kvprobe.decoder.model.Decoder`)."""

    family = "decoder"

    def __init__(self, decoder: Any) -> None:
        self._decoder = self.module = decoder
        self.windows = decoder.config.windows or (None,) * decoder.config.n_layers
        self.max_positions = decoder.config.max_positions

    def layers(self) -> Mapping[int, str]:
        """As :class:`LanguageModel` says: all of them."""
        return dict.fromkeys(range(self._decoder.config.n_layers), "Attention")

    def body(self, ids: Tensor, *, attend: Attend | None = None, **inputs: Any) -> Tensor:
        """As :class:`LanguageModel` says; ``inputs`` as of :meth:`Decoder.body`."""
        return self._decoder.body(ids, attend=attend or AttentionCall.attend, **inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """As :class:`LanguageModel` says."""
        return self._decoder.logits(hidden)

    def rope(self, layer: int) -> Rope | None:
        """As :class:`LanguageModel` says."""
        return self._decoder.config.rope_of(layer, self._decoder.embedding.weight.device)

    def check_by_slot(self, n_tokens: int) -> int | None:
        """As :class:`LanguageModel` says: under RoPE there is no limit."""
        if self._decoder.config.rotary is None:
            raise UnsupportedModelError(
                "this decoder's positions are learned, added to the hidden state, and cannot be moved afterwards"
            )
        return None


class Attended(NamedTuple):
    """What a look may give where it has computed attention anyway: the output, and the value to keep."""

    output: Tensor
    value: Any


@torch.no_grad()
def observe(model: Any, ids: Tensor, look: Callable[[AttentionCall], Any], **inputs: Any) -> dict[int, Any]:
    """``look(call)`` of every layer in one pass over ``ids`` ``[batch, length]``, by layer; nothing else changes.

    ``look`` may give an :class:`Attended` to save computing attention twice. ``inputs`` go to the model. Raises
    NotIntercepted where a layer attends twice or cannot be seen, and where none attends.
    """
    from kvprobe.attention.blocks import once

    subject, seen = language_model(model), dict[int, Any]()

    def watch(call: AttentionCall) -> Tensor:
        looked = look(call)
        output, seen[call.layer] = looked if isinstance(looked, Attended) else (None, looked)
        return call.attend() if output is None else output

    subject.body(ids, attend=once(subject.family, watch), **inputs)
    if not seen:
        raise NotIntercepted(f"family {subject.family}: no layer attends, so there is nothing to look at")
    return seen


# what a body gives only if it is asked to, and what a head hands on without using it
_NOT_ASKED_FOR = {"past_key_values", "hidden_states", "attentions", "cross_attentions", "router_logits", "cache"}
_NOT_ASKED_FOR |= {"image_hidden_states", "audio_hidden_states", "rope_deltas", "cache_params", "rnn_state"}


class _BodyOutput:
    """What a body gives, hidden states and nothing else; a head that reads more is refused."""

    def __init__(self, family: str, hidden: Tensor) -> None:
        self._family, self.last_hidden_state = family, hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in _NOT_ASKED_FOR:
            raise UnsupportedModelError(f"family {self._family}: its head reads {name}, which is not known here")


@contextmanager
def _answering(model: Any, output: Any) -> Iterator[None]:
    """Let the body answer with ``output``, so that the model's own forward does what it does after the body."""
    # OPT's forward calls the decoder inside its body, every other family the body itself
    bodies = {id(body): body for body in (body_of(model), model.get_decoder()) if body is not model}.values()
    # accelerate, too, puts a forward on the instance: what stood there comes back
    before = [body.__dict__.get("forward") for body in bodies]
    try:
        for body in bodies:
            body.__dict__["forward"] = lambda *_, **__: output
        yield
    finally:
        for body, forward in zip(bodies, before, strict=True):
            if forward is None:
                body.__dict__.pop("forward", None)
            else:
                body.__dict__["forward"] = forward
