"""What do the kernels ask of the machine that numba has no word for? Pointers, bfloat16, counters shared by threads."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from llvmlite import ir  # type: ignore[import-untyped, import-not-found, unused-ignore]
from numba import njit, types
from numba.extending import intrinsic as numba_intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


def intrinsic(function: Function) -> Callable[..., Any]:
    """Numba's ``intrinsic``; callers do not pass ``context``."""
    return numba_intrinsic(function)


def compiled(function: Function) -> Function:
    """A kernel. Sums in any order and fused multiply-add; NaN keeps its meaning, so that broken weights show."""
    return _cached(function, {"reassoc", "contract", "nsz"})


def compiled_in_order(function: Function) -> Function:
    """A kernel that rounds as it is written."""
    return _cached(function, {"contract"})


def compiled_for_numbers(function: Function) -> Function:
    """A kernel whose result is of no use if there is a NaN: told so, the compiler can compare eight at a time."""
    return _cached(function, {"reassoc", "nsz", "nnan"})


def _cached(function: Function, flags: set[str]) -> Function:
    # Numba keeps the machine code beside this file or, where that cannot be written, in the user's cache directory,
    # apart for each processor type. Where neither can be written the step is compiled anew in every process.
    options = {"fastmath": flags, "nogil": True, "error_model": "numpy"}
    try:
        made: Any = njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)
    # It is kept until the one file changes in which the function stands: let the files count that it may be made of.
    kept = made._cache._cache_file
    kept._source_stamp = kept._source_stamp, _MADE_OF
    return made


def sources_of_kernels(folder: Path) -> str:
    """A checksum of the files in ``folder`` that machine code is made of: this one, and those that import from it."""
    texts = {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}
    parts = [text for name, text in texts.items() if name == "intrinsics.py" or b"native.intrinsics import" in text]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


_MADE_OF = sources_of_kernels(Path(__file__).parent)


@intrinsic
def at(context: Any, address: Any, like: Any) -> Any:
    """``address`` as a pointer to numbers of the type of ``like``."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), code


@intrinsic
def wide(context: Any, number: Any) -> Any:
    """A stored number as float32: bfloat16 is the upper half of it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if number == types.float32:
            return arguments[0]
        word = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(number), code


@intrinsic
def narrow(context: Any, number: Any, like: Any) -> Any:
    """A float32 as it is stored: bfloat16 is rounded to the nearest, ties to even, NaN stays NaN."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if like == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        high = builder.lshr(bits, word(16))
        odd = builder.and_(high, word(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, word(0x7FFF))), word(16))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(builder.select(is_nan, word(0x7FC0), rounded), ir.IntType(16))

    return like(types.float32, like), code


@intrinsic
def power_of_two(context: Any, exponent: Any) -> Any:
    """2 to a whole float32 between -126 and 127."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(builder.fptosi(arguments[0], word), word(127))
        return builder.bitcast(builder.shl(biased, word(23)), ir.FloatType())

    return types.float32(types.float32), code


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the cache line at ``address``, which need not exist, into the second cache: it will be read soon."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # to be read, into the second cache, data
        builder.call(call, [builder.inttoptr(arguments[0], byte), word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def read(context: Any, address: Any) -> Any:
    """The counter at ``address``, and with it all that was written before it was counted up."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), code


@intrinsic
def add(context: Any, address: Any, number: Any) -> Any:
    """Add to the counter at ``address``."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), code


@intrinsic
def swap(context: Any, address: Any, expected: Any, new: Any) -> Any:
    """Set the counter at ``address`` to ``new`` if it is ``expected``; whether it was."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        outcome = builder.cmpxchg(pointer, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(outcome, 1)

    return types.boolean(types.int64, types.int64, types.int64), code


# gives the core to another thread that waits for one
yield_core: Callable[..., Any] = types.ExternalFunction("sched_yield", types.int32())
