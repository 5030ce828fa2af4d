"""Whose attention function is it, and where did it go wrong? A function in Python, or a file's as FILE.py:NAME."""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import KvprobeError, NotIntercepted, Wording

if TYPE_CHECKING:
    from torch import Tensor

    from kvprobe.attention.call import AttentionCall


@dataclass(frozen=True)
class NamedAttend:
    """An attention function, what a record says of it, and errors that say whose they are.

    ``file`` and ``sha256`` are of the file that defines it, None where there is none, as in a notebook. Values that a
    function closes over are not in its file, and so not in the record.
    """

    function: Any
    name: str
    source: str
    file: str | None
    sha256: str | None

    def record(self) -> dict[str, Any]:
        """Name, file and SHA-256, never a path."""
        return {"name": self.name, "file": self.file, "sha256": self.sha256}

    def __call__(self, call: "AttentionCall") -> "Tensor":
        """The function's output. Raises KvprobeError, naming function and layer, where it raises or has no output."""
        from torch import Tensor

        try:
            output = self.function(call)
        except NotIntercepted:
            raise
        except Exception as error:
            raise KvprobeError(f"{self.name} failed in layer {call.layer}: {_said(error, self.source)}") from error
        wanted = (*call.query.shape[:3], call.value.shape[-1])
        if not isinstance(output, Tensor) or output.shape != wanted:
            got = [*output.shape] if isinstance(output, Tensor) else type(output).__name__
            raise KvprobeError(
                f"{self.name} returned {got} in layer {call.layer}, needs [batch, n_heads, q_len, v_head_dim] = "
                f"{[*wanted]}: return what call.attend(…) gives"
            )
        return output


def named(attend: Any) -> NamedAttend:
    """``attend``, or the function that a text ``FILE.py:NAME`` names; its file is run once, as Python runs a script.

    Raises KvprobeError for a file that is missing or cannot be run and for a name that is not in it, ValueError for a
    text of another form and for what cannot be called.
    """
    if isinstance(attend, NamedAttend):
        return attend
    if isinstance(attend, str):
        function, name = _of_file(attend)
    else:
        function, name = attend, _name_of(attend)
    if not callable(function):
        raise ValueError(f"{name} must be a function of one call, not {type(function).__name__}")
    source = _code_of(function).co_filename
    path = Path(source)
    there = path.is_file()
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if there else None
    return NamedAttend(function, name, source, path.name if there else None, digest)


def _of_file(text: str) -> tuple[Any, str]:
    where, colon, name = text.rpartition(":")
    if not (where and colon and name):
        raise ValueError(Wording("{attend} must be FILE.py:NAME, as in mine.py:last_64, got {0!r}", text))
    path = Path(where).expanduser().absolute()
    if not path.is_file():
        raise KvprobeError(f"there is no file {where!r} with a function {name}: give FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise KvprobeError(f"{where!r} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # as for a script: its neighbours can be imported
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise KvprobeError(f"{path.name} cannot be run: {_said(error, str(path))}") from error
    finally:
        sys.path.remove(str(path.parent))
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise KvprobeError(f"{path.name} has no {name!r}; its functions: {', '.join(functions) or 'none'}")
    return getattr(module, name), f"{path.name}:{name}"


def _name_of(attend: Any) -> str:
    if isinstance(attend, partial):
        given = [*map(repr, attend.args), *(f"{name}={value!r}" for name, value in attend.keywords.items())]
        return f"{_name_of(attend.func)}({', '.join(given)})"
    return str(getattr(attend, "__name__", type(attend).__name__))


def _code_of(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    method = function if hasattr(function, "__code__") else type(function).__call__
    return getattr(method, "__code__", _code_of.__code__)


def _said(error: BaseException, source: str) -> str:
    """What was raised, and the last line of ``source`` on the way there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    if isinstance(error, SyntaxError) and error.filename == source:
        lines, error = [error.lineno], SyntaxError(error.msg)
    where = f" ({Path(source).name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
