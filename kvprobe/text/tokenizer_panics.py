"""What if a tokenizer's own code crashes? The error names the model in one line."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from kvprobe.errors import KvprobeError


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Turn a panic of a tokenizer's code inside the block into a KvprobeError that names the model ``name``.

    A panic of the tokenizers library is not an Exception (a pattern whose search never ends causes one), and the
    library first writes a page to standard error, which is held back here and dropped if there is a panic.
    """
    with _held_back() as dropped:
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            dropped.append(True)
            why = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
            raise KvprobeError(
                f"the tokenizer of {name} crashed ({why[:200]}): check its tokenizer.json, or fetch it again"
            ) from None


def name_of(tokenizer: Any) -> str:
    """What errors call a tokenizer: its model's name, which `kvprobe.models.checkpoint_checks.tokenizer` sets."""
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


@contextlib.contextmanager
def _held_back() -> Iterator[list[bool]]:
    """Hold back the process's standard error until the block is left; then drop it if the list has an entry."""
    sys.stderr.flush()
    dropped: list[bool] = []
    try:
        before = os.dup(2)
    except OSError:  # it is closed
        yield dropped
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield dropped
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            if not dropped:
                kept.seek(0)
                if held := kept.read():
                    os.write(2, held)
