"""Which function acts when a model attends? The blocks that are open, whose they are, and the way back from them.

While any block is open, one name stands in both of transformers' registries, and in the configs of the models that
have one; the function behind it finds the block that the calling module belongs to.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from threading import RLock, current_thread
from types import FrameType
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvprobe.attention.arguments import read_call
from kvprobe.attention.call import Attend, AttentionCall, Turn
from kvprobe.attention.layers import attention_modules, configs_of, decoder_of, entrances, family_of
from kvprobe.errors import KvprobeError, NotIntercepted, UnsupportedModelError

NAME = "kvprobe"
# families without an sdpa of their own that read a boolean mask rightly; others get the additive one that they know
READ_BOOLEAN = ("gemma2", "gpt_oss")

# reentrant: a block that was left behind may be closed by the collector while another one opens
_lock = RLock()
_open: "tuple[Block, ...]" = ()


class Implementation(str):
    """Our name in a config. A copy of the config, made while it stands there, has the model's own implementation."""

    plain: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.plain

    def __reduce__(self) -> tuple[Any, ...]:
        # pickled by whoever saves a whole model: what is loaded again knows nothing of the block
        return type(self.plain), (() if self.plain is None else (self.plain,))


class Block:
    """One ``attending`` block: the model, the function that acts in it, and the proof that it was reached."""

    def __init__(self, model: nn.Module, attend: Attend, turn_of: Callable[[int], Turn]) -> None:
        self.model = model
        self.family = family_of(model)
        self.attend = attend
        self.turn_of = turn_of
        self.thread = current_thread()
        self.opener = _suspendable_opener()
        self.closed = False
        decoder = decoder_of(model)
        self.parts = {id(part) for part in model.modules()}
        self.text = {id(part) for part in decoder.modules()}
        self.configs = configs_of(model)
        self.plain: list[Any] = []
        self.layers = {id(part): layer for layer, part in attention_modules(model)}
        # by layer: modules that ran and should have called, and calls that came
        self.ran: Counter[int] = Counter()
        self.names: dict[int, str] = {}
        self.calls: Counter[int] = Counter()
        self.began: dict[int, tuple[Counter[int], Counter[int]]] = {}
        config: Any = getattr(decoder, "config", None)
        boolean = getattr(decoder, "_supports_sdpa", True) or getattr(config, "model_type", None) in READ_BOOLEAN
        self.mask_function: Callable[..., Any] = sdpa_mask if boolean else eager_mask
        self.handles: list[Any] = []

    def open(self) -> None:
        """Let the block act; KvprobeError if another thread has one open on the same model."""
        global _open
        with _lock:
            for other in _open:
                if other.shares(self) and other.thread is not self.thread:
                    raise KvprobeError(
                        f"the {self.family} model is in use: thread {other.thread.name!r} has an attending block open "
                        f"on it, so {self.thread.name!r} cannot; wait until it is left, or load the model twice"
                    )
            if not _open:
                ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
                ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
            self._hook()
            for config in self.configs:
                self.plain.append(_plain_of(config))
                name = Implementation(NAME)
                name.plain = self.plain[-1]
                config._attn_implementation_internal = name
            _open = tuple(block for block in (*_open, self) if not block.closed)

    def close(self) -> None:
        """Leave the model as it was before the block, or to the blocks that are still open on it."""
        global _open
        with _lock:
            self.closed = True
            self.opener = None
            _open = tuple(block for block in _open if not block.closed)
            for config, plain in zip(self.configs, self.plain, strict=False):
                if not any(config is other for block in _open for other in block.configs):
                    config._attn_implementation_internal = plain
            for handle in self.handles:
                handle.remove()
            if not _open:
                for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                    registry._global_mapping.pop(NAME, None)

    def shares(self, other: "Block") -> bool:
        """True if both act on one model, or on models that read one config."""
        mine = {id(config) for config in self.configs}
        return any(id(config) in mine for config in other.configs)

    def answer(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        given: dict[str, Any],
    ) -> Tensor:
        """What ``module`` gets in place of its own attention: ``[batch, n_heads, q_len, v_head_dim]``."""
        if self.model.training or module.training:
            raise ValueError(
                "the model is in training mode, where dropout changes attention: call model.eval() first, and not "
                "model.train() inside the block"
            )
        ours = id(module) in self.text
        layer = getattr(module, "layer_idx", None)
        if ours and not (isinstance(layer, int) and layer >= 0):
            # Zamba 2 shares its attention among layers
            raise NotIntercepted(
                f"family {self.family}: a {type(module).__name__} does not know the number of its layer, so kvprobe "
                "cannot tell what it sees"
            )
        number = int(layer) if ours else -1  # type: ignore[arg-type]
        flash = any("flash" in str(plain) for plain in self.plain)
        turn = self.turn_of(number)
        call = read_call(self.family, module, number, query, key, value, mask, given, turn=turn, flash=flash)
        if not ours:
            # another tower, or an encoder: attention as it is
            return call.attend()
        self.calls[number] += 1
        output = self.attend(call)
        wanted = (*query.shape[:3], value.shape[-1])
        if not isinstance(output, Tensor) or output.shape != wanted:
            got = [*output.shape] if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"attend must return [batch, n_heads, q_len, v_head_dim] = {[*wanted]}, got {got}")
        return output

    def _hook(self) -> None:
        # plain functions: a deep copy of the model takes hooks along, and must not take the block
        def starts(part: nn.Module, _: Any) -> None:
            if _acting(part) is self:
                self.began[id(part)] = (self.ran.copy(), self.calls.copy())

        def runs(part: nn.Module, _: Any) -> None:
            if id(part) in self.layers and _acting(part) is self:
                layer = self.layers[id(part)]
                self.ran[layer] += 1
                self.names[layer] = type(part).__name__

        def ends(part: nn.Module, _: Any, __: Any) -> None:
            if id(part) in self.began and _acting(part) is self:
                self._prove(*self.began.pop(id(part)))

        doors = entrances(self.model)
        self.handles += [door.register_forward_pre_hook(starts) for door in doors]
        self.handles += [door.register_forward_hook(ends) for door in doors]
        self.handles += [
            part.register_forward_pre_hook(runs) for part in self.model.modules() if id(part) in self.layers
        ]

    def _prove(self, ran: Counter[int], calls: Counter[int]) -> None:
        """Raise NotIntercepted if, since these counts, a layer ran and did not call, or nothing called at all."""
        missed = sorted(layer for layer in self.ran - ran if self.calls[layer] == calls[layer])
        if missed:
            raise NotIntercepted(bypassed(self.family, f"layer {missed[0]} ({self.names[missed[0]]})"))
        if self.calls == calls:
            raise NotIntercepted(bypassed(self.family, "every layer"))


@contextmanager
def intercepting(model: nn.Module, attend: Attend, turn_of: Callable[[int], Turn]) -> Iterator[None]:
    """What the seam does, with ``turn_of(layer)`` for the rotation of a call (:mod:`kvprobe.attention.seam`).

    Raises as the seam's `attending` says.
    """
    if not hasattr(model, "_can_set_attn_implementation"):
        raise UnsupportedModelError(f"{type(model).__name__} is neither a Hugging Face model nor a kvprobe Decoder")
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes attention: call model.eval() first")
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        raise NotIntercepted(bypassed(family_of(model), "attention"))

    block = Block(model, attend, turn_of)
    try:
        block.open()
        yield
    finally:
        block.close()


def once(family: str, attend: Attend) -> Attend:
    """``attend`` for one forward whose layers are told apart by their numbers.

    The result raises NotIntercepted where a layer attends twice (looped models, differential attention), since the
    second time would overwrite what the first gave.
    """
    seen: set[int] = set()

    def first(call: AttentionCall) -> Tensor:
        if call.layer in seen:
            raise NotIntercepted(
                f"family {family}: layer {call.layer} attends more than once in a forward, and kvprobe tells what it "
                "sees by the number of the layer"
            )
        seen.add(call.layer)
        return attend(call)

    return first


def bypassed(family: str, where: str) -> str:
    """The refusal of a family, or of one layer, that transformers' attention interface does not reach."""
    return (
        f"family {family}: {where} does not go through transformers' attention interface, so kvprobe "
        "cannot see or change it; nothing measured would be of the changed model"
    )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """What stands in transformers' attention registry while a block is open."""
    block = _acting(module)
    if block is None:
        raise NotIntercepted(
            f"a {type(module).__name__} that belongs to no open attending block was sent through kvprobe: its model "
            "shares a config with one that has a block; give each model a config of its own"
        )
    _own(block)
    output = block.answer(module, query, key, value, attention_mask, given)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def _mask(*sizes: Any, **given: Any) -> Any:
    """What stands in transformers' mask registry while a block is open: without it causality would be lost."""
    config = given.get("config")
    block = next((block for block in reversed(_open) if any(config is one for one in block.configs)), None)
    if block is None:
        return sdpa_mask(*sizes, **given)
    # a mask of ours must not reach a forward that goes on after the block, as another thread's would
    _own(block)
    return block.mask_function(*sizes, **given)


def _own(block: Block) -> None:
    if block.thread is not current_thread():
        raise KvprobeError(
            f"the {block.family} model was called by thread {current_thread().name!r} while thread "
            f"{block.thread.name!r} has an attending block open on it: one thread at a time"
        )


def _acting(part: nn.Module) -> Block | None:
    """The innermost open block of the part's model, less those that wait in another generator or task."""
    mine = [block for block in reversed(_open) if id(part) in block.parts]
    if len(mine) < 2:
        return mine[0] if mine else None
    frames = _stack()
    return next((block for block in mine if block.opener is None or block.opener in frames), mine[0])


def _stack() -> set[FrameType]:
    frames, frame = set(), sys._getframe(1)
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def _suspendable_opener() -> FrameType | None:
    """The generator or coroutine that opens a block, in which it waits while others run; None for a plain function."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        inside = frame.f_globals.get("__name__") in (__name__, "kvprobe.attention.seam", "contextlib")
        # a generator that contextlib runs is a part of somebody's with statement
        if not inside and caller.f_globals.get("__name__") != "contextlib":
            break
        frame = caller
    suspendable = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
    return frame if frame.f_code.co_flags & suspendable else None


def _plain_of(config: Any) -> Any:
    value = config._attn_implementation_internal
    return value.plain if isinstance(value, Implementation) else value
