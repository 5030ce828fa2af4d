"""Are these weights GPT-2's, so that its published figures may be compared? By checksum, or tensor by tensor.

Published: the SHA-1 of one file of the weights and of the two files of the tokenizer. A copy from elsewhere can hold
the same numbers in another file: with the published file as ``reference``, every tensor is compared with it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from kvprobe.errors import KvprobeError
from kvprobe.models import headers, loading

WEIGHTS_SHA1 = "89a76996d7c6ee89b86618a265483aab73e61d50"
TOKENIZER_SHA1 = {
    "merges.txt": "396d4d8ec90cb02f4d56e049e0e4add868bcd943",
    "vocab.json": "f0223209235343bc067d7da838328bced8085ae1",
}


SHAPE = {
    "family": "gpt2",
    "n_layers": 12,
    "n_heads": 12,
    "hidden_size": 768,
    "vocab_size": 50257,
    "max_positions": 1024,
}


@dataclass(frozen=True)
class Identity:
    """Whether a model may be compared with GPT-2's figures, and ``because`` of what, as the end of a sentence."""

    is_gpt2: bool
    because: str


def identify(model: str, *, reference: str | None = None, trust: bool = False) -> Identity:
    """Whether ``model`` is GPT-2 as published, by its files alone.

    The SHA-1 of its weights is the published one; or all of its tensors are those of ``reference``, a safetensors file
    that has it; or, with ``trust``, somebody says so, which is never believed of another shape nor of norms as they are
    initialised. A tokenizer file that is another's settles it at once. Raises KvprobeError for a model that is not here
    or damaged, and for a reference that is not the published file.
    """
    directory = loading.find(model).directory
    for name, expected in TOKENIZER_SHA1.items():
        path = directory / name
        if path.is_file() and (digest := sha1_of(path)) != expected:
            return Identity(False, f"its {name} has the SHA-1 {digest[:12]}…, GPT-2's {expected[:12]}…")
    files = headers.weight_files(directory)
    if not files:
        return Identity(False, "it has no weights in safetensors")
    digest = f"{len(files)} files" if len(files) > 1 else sha1_of(files[0])
    if digest == WEIGHTS_SHA1:
        return Identity(True, f"the SHA-1 of its weights is the published {WEIGHTS_SHA1[:12]}…")
    shown = digest if len(files) > 1 else f"{digest[:12]}…"
    is_not = f"the SHA-1 of its weights is not the published {WEIGHTS_SHA1[:12]}… ({shown})"
    if reference is not None:
        same, told = _compared(files, Path(reference))
        return Identity(same, f"{is_not}, and {told}")
    spec = loading.load_spec(model)
    if any(getattr(spec, name) != expected for name, expected in SHAPE.items()):
        return Identity(False, f"{is_not}, and its shape is not GPT-2's")
    if _untrained(files):
        return Identity(False, "its norms are as they are initialised: random weights")
    if trust:
        return Identity(True, f"{is_not}, but --trust says that they are GPT-2's")
    return Identity(False, f"{is_not}; --reference FILE compares every tensor with a copy that has it")


def sha1_of(path: Path) -> str:
    """The SHA-1 of a file, used to compare with a published fingerprint, not for security."""
    digest = hashlib.sha1(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def check_reference(path: Path) -> None:
    """Raise KvprobeError unless the file at ``path`` has the published SHA-1."""
    if not path.is_file():
        raise KvprobeError(f"there is no reference {path.name}: give the published file of GPT-2's weights")
    if (digest := sha1_of(path)) != WEIGHTS_SHA1:
        raise KvprobeError(f"the reference {path.name} has the SHA-1 {digest}, the published file has {WEIGHTS_SHA1}")


def _compared(files: list[Path], reference: Path) -> tuple[bool, str]:
    check_reference(reference)
    ours, theirs = _tensors(files), _tensors([reference])
    agree = [name for name in theirs if name in ours and torch.equal(ours[name], theirs[name])]
    differ = sorted((ours.keys() | theirs.keys()) - set(agree))
    told = f"{len(agree)} of {len(theirs)} tensors agree with the reference"
    return not differ, told + (f"; the first that does not is {differ[0]}" if differ else "")


def _tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    """Every parameter by its name inside the body; GPT-2's files differ in a prefix and in masks kept as buffers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    merged: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise KvprobeError(f"{path.name} is not a safetensors file, and no other kind is read: {error}") from error
        merged |= {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in merged.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias")) and name != "lm_head.weight"
    }


def _untrained(files: list[Path]) -> bool:
    """Whether the last norm is all ones, as it is before the first step of training, or missing."""
    last = _tensors(files).get("ln_f.weight")
    return last is None or bool((last == 1).all())
