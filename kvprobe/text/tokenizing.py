"""What if a tokenizer's own code breaks down? It is said in one line, by the model's name."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from kvprobe.errors import KvprobeError


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Whatever a tokenizer does inside the block; KvprobeError, with ``name`` in it, where its code panics.

    A panic of the tokenizers library is no Exception (a pattern on which the search for a match never ends will do),
    and the library writes a page on standard error first, which is held back until it is known to be something else.
    """
    with _held_back() as drop:
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            drop()
            why = next((line.strip() for line in str(error).splitlines() if line.strip()), "it said nothing")
            raise KvprobeError(
                f"the tokenizer of {name} broke down ({why[:200]}): check its tokenizer.json, or fetch it again"
            ) from None


def name_of(tokenizer: Any) -> str:
    """What errors call a tokenizer: the name of its model, as `kvprobe.models.checkpoint_checks.tokenizer` gives it."""
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


@contextlib.contextmanager
def _held_back() -> Iterator["_Drop"]:
    """Keeps what is written on the process's standard error, and writes it when the block is left."""
    sys.stderr.flush()
    try:
        before = os.dup(2)
    except OSError:  # there is none
        yield _Drop()
        return
    drop = _Drop()
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield drop
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            if not drop.asked:
                kept.seek(0)
                if held := kept.read():
                    os.write(2, held)


class _Drop:
    """Called, it says that what was held back is not wanted."""

    asked = False

    def __call__(self) -> None:
        self.asked = True
