"""What can a core do with the vectors of 24 tokens at once? Products, sums and maxima whose state stays in registers.

A *block* is float32 ``[width, BLOCK]``, number k of each token's vector side by side; all here are loops over k, given
by addresses. The compiler would keep the state of such loops in memory, since it cannot know that nothing else points
there; so they are written for it in its own language.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, import-not-found, unused-ignore]
from numba import types
from numba.core import cgutils

from kvprobe.native.intrinsics import intrinsic

# Four rows of a matrix by 24 tokens: of the sixteen registers of AVX2 twelve hold the sums, three the tokens' numbers
# and one a row's. (Measured on a Zen 3: 0.95 of what a core can multiply; MKL 0.8.) A last block of at most 8 tokens
# is multiplied with eight rows at a time.
TILE_ROWS, BLOCK = 4, 24
NARROW_ROWS, NARROW = 8, 8
_LANES = 8

_WORD, _NUMBER = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_NUMBER, _LANES)

# three vectors: one number of each token
Tokens = Sequence[Any]


def _constant(number: float, n_tokens: int = BLOCK) -> list[Any]:
    return [ir.Constant(_VECTOR, [number] * _LANES) for _ in range(0, n_tokens, _LANES)]


def _pointers(builder: Any, address: Any, n_tokens: int) -> list[Any]:
    places = range(0, n_tokens, _LANES)
    return [builder.inttoptr(builder.add(address, _WORD(4 * place)), _VECTOR.as_pointer()) for place in places]


def _load(builder: Any, address: Any, n_tokens: int = BLOCK) -> list[Any]:
    return [builder.load(pointer, align=4) for pointer in _pointers(builder, address, n_tokens)]


def _store(builder: Any, tokens: Tokens, address: Any) -> None:
    for vector, pointer in zip(tokens, _pointers(builder, address, _LANES * len(tokens)), strict=True):
        builder.store(vector, pointer, align=4)


def _for_all(builder: Any, address: Any) -> Any:
    """The one number at ``address`` in all lanes."""
    number = builder.load(builder.inttoptr(address, _NUMBER.as_pointer()))
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(builder.insert_element(nothing, number, ir.IntType(32)(0)), nothing, lanes)


def _along(
    builder: Any,
    block: Any,
    width: Any,
    starts: Sequence[Tokens],
    step: Callable[[Any, Any, Tokens, Any], Any],
    n_tokens: int = BLOCK,
) -> list[Tokens]:
    """A loop over k: ``step`` takes k, the address of a block's row, its numbers and the state, and gives the next."""
    before = builder.block
    loop, after = builder.append_basic_block("along"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    k, states = builder.phi(_WORD), [[builder.phi(_VECTOR) for _ in start] for start in starts]
    address = builder.add(block, builder.mul(k, _WORD(4 * BLOCK)))
    following = builder.add(k, _WORD(1))
    nexts: list[Tokens] = step(k, address, _load(builder, address, n_tokens), states)
    for state, start, new in zip(states, starts, nexts, strict=True):
        for phi, first, then in zip(state, start, new, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(then, loop)
    k.add_incoming(_WORD(0), before)
    k.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, width), loop, after)
    builder.position_at_end(after)
    return nexts


def _times(builder: Any, a: Any, b: Any, plus: Any) -> Any:
    # the two become one operation where the processor has it
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), plus, flags=("contract",))


@intrinsic
def tile(
    context: Any, matrix: Any, row_stride: Any, n_rows: Any, stride: Any, block: Any, width: Any, out: Any
) -> Any:  # fmt: skip
    """``out[r, token] = sum over k of matrix[r, k] * block[k, token]``: float32 ``[TILE_ROWS, BLOCK]`` at ``out``.

    Rows are ``row_stride`` bytes apart and their ``width`` numbers ``stride``. Of fewer rows, ``n_rows``, the last is
    taken again: ``out`` is always written whole.
    """
    return _tile(TILE_ROWS, BLOCK)


@intrinsic
def narrow_tile(
    context: Any, matrix: Any, row_stride: Any, n_rows: Any, stride: Any, block: Any, width: Any, out: Any
) -> Any:  # fmt: skip
    """As :func:`tile`, of `NARROW_ROWS` rows and the first `NARROW` tokens; the other tokens of ``out`` stay."""
    return _tile(NARROW_ROWS, NARROW)


def _tile(height: int, n_tokens: int) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # A function of its own: inlined, it would share the registers with its surroundings.
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * len(arguments))
        function = cgutils.get_or_insert_function(builder.module, kind, f"kvprobe.tile.{height}x{n_tokens}")
        if function.is_declaration:
            function.linkage = "internal"
            function.attributes.add("noinline")
            body = ir.IRBuilder(function.append_basic_block("entry"))
            _tile_body(body, height, n_tokens, *function.args)
            body.ret_void()
        builder.call(function, arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), code


def _tile_body(
    builder: Any, height: int, n_tokens: int, matrix: Any, row_stride: Any, n_rows: Any, stride: Any, block: Any,
    width: Any, out: Any,
) -> None:  # fmt: skip
    rows, last = [], builder.sub(n_rows, _WORD(1))
    for r in range(height):
        there = builder.icmp_signed("<", _WORD(r), last)
        rows.append(builder.add(matrix, builder.mul(builder.select(there, _WORD(r), last), row_stride)))

    def step(k: Any, address: Any, tokens: Tokens, sums: Any) -> list[Tokens]:
        # a row at a time: there is one register left for their numbers, and the compiler keeps this order
        offset = builder.mul(k, stride)
        nexts: list[Tokens] = []
        for row, row_sums in zip(rows, sums, strict=True):
            number = _for_all(builder, builder.add(row, offset))
            nexts.append([_times(builder, number, token, sum_) for token, sum_ in zip(tokens, row_sums, strict=True)])
        return nexts

    sums = _along(builder, block, width, [_constant(0.0, n_tokens)] * height, step, n_tokens)
    for r, row_sums in enumerate(sums):
        _store(builder, row_sums, builder.add(out, _WORD(4 * BLOCK * r)))


@intrinsic
def highest(context: Any, block: Any, width: Any, out: Any) -> Any:
    """``out[token] = max over k of block[k, token]``; of a NaN, anything."""

    def larger(builder: Any, new: Any, old: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", new, old), new, old)

    return types.void(*[types.int64] * 3), _fold(float("-inf"), larger)


@intrinsic
def total(context: Any, block: Any, width: Any, out: Any) -> Any:
    """``out[token] = sum over k of block[k, token]``."""

    def added(builder: Any, new: Any, old: Any) -> Any:
        return builder.fadd(new, old)

    return types.void(*[types.int64] * 3), _fold(0.0, added)


@intrinsic
def squares(context: Any, block: Any, width: Any, out: Any) -> Any:
    """``out[token] = sum over k of block[k, token]²``."""

    def added(builder: Any, new: Any, old: Any) -> Any:
        return _times(builder, new, new, old)

    return types.void(*[types.int64] * 3), _fold(0.0, added)


def _fold(start: float, combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Of each token one number, from all of a block: ``combine`` takes the next one and what has come so far."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block, width, out = arguments

        def step(k: Any, address: Any, tokens: Tokens, states: Any) -> list[Tokens]:
            return [[combine(builder, new, old) for new, old in zip(tokens, states[0], strict=True)]]

        _store(builder, _along(builder, block, width, [_constant(start)], step)[0], out)
        return context.get_dummy_value()

    return code


@intrinsic
def lower(context: Any, block: Any, width: Any, by: Any) -> Any:
    """``block[k, token] -= by[token]``, in place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block, width, by = arguments
        less = _load(builder, by)

        def step(k: Any, address: Any, tokens: Tokens, states: Any) -> list[Tokens]:
            _store(builder, [builder.fsub(token, number) for token, number in zip(tokens, less, strict=True)], address)
            return []

        _along(builder, block, width, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


@intrinsic
def rescale(context: Any, block: Any, width: Any, factors: Any, weight: Any, out: Any) -> Any:
    """``out[k, token] = block[k, token] * factors[token] * weight[k]``; ``out`` may be ``block``."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block, width, factors, weight, out = arguments
        scales = _load(builder, factors)

        def step(k: Any, address: Any, tokens: Tokens, states: Any) -> list[Tokens]:
            number = _for_all(builder, builder.add(weight, builder.mul(k, _WORD(4))))
            scaled = [builder.fmul(token, scale) for token, scale in zip(tokens, scales, strict=True)]
            target = builder.add(out, builder.sub(address, block))
            _store(builder, [builder.fmul(token, number) for token in scaled], target)
            return []

        _along(builder, block, width, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code
