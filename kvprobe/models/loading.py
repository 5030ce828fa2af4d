"""Which model does a name mean, and how is it loaded: pulled, a directory, a GGUF file, or a hub repository?"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import KvprobeError, Wording, did_you_mean
from kvprobe.files.jsonfile import read_object
from kvprobe.files.store import MANIFEST, home, read_manifest, verify
from kvprobe.models import arrivals, checkpoint_checks, headers, hub, pull
from kvprobe.models.checkpoint_checks import quiet
from kvprobe.models.revisions import revision_of, weights_digest
from kvprobe.progress import Progress, silent
from kvprobe.shape.cache_bytes import DTYPE_BYTES
from kvprobe.shape.spec import Spec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a model's name means: its directory, and what a result may say about it."""

    directory: Path
    name: str
    """For display: a catalogue name, a hub id, or a file's or directory's base name; never a path."""
    source: str
    """``directory``, ``gguf`` or ``hub``; for a pulled model, the file that it was made from."""
    revision: str
    """From the hub: the commit. Otherwise ``manifest:`` or ``sample:`` and 16 hexadecimal digits, see `revision_of`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Loaded:
    """A model ready for inference: in eval mode, without gradients, on its device."""

    model: Any
    tokenizer: Any
    spec: Spec
    name: str
    source: str
    revision: str
    dtype: str
    device: str
    code: str | None = None
    """Whose code is run, if the repository brings its own."""
    _digest: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_digest", weights_digest(self.model))

    def __repr__(self) -> str:
        """As in ``Loaded(smollm2-135m, float32 on cpu)``."""
        return f"Loaded({self.name}, {self.dtype} on {self.device})"

    def record(self) -> dict[str, Any]:
        """The model and its device in a run record: names and fingerprints, never a path.

        Weights that were changed since are no longer the revision's: their source is ``memory``.
        """
        import torch

        digest = weights_digest(self.model)
        changed = {} if digest == self._digest else {"revision": f"memory:{digest}", "source": "memory"}
        return {
            "model": self.name,
            "revision": self.revision,
            "source": self.source,
            **changed,
            "dtype": self.dtype,
            "device": self.device,
            "gpu": torch.cuda.get_device_name() if self.device.startswith("cuda") else None,
            "threads": torch.get_num_threads(),
            "autocast": _autocast(self.device),
            "family": self.spec.family,
            **({} if self.code is None else {"code": self.code}),
        }


def _autocast(device: str) -> str | None:
    """The dtype that torch.autocast currently computes in on this kind of device; None if it is off."""
    import torch

    kind = device.partition(":")[0]
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None


def load(name: str, *, dtype: str = "float32", device: str | None = None, progress: Progress = silent) -> Loaded:
    """Load a model by name: a pulled one, a local directory, a ``.gguf`` file, or a hub repository, in this order.

    `dtype` is float32, bfloat16 or float16; `device` a torch device, None or ``auto`` for a GPU if there is one.
    Weights are read only from safetensors, and no repository's code is run. Raises KvprobeError if the name is unknown,
    the checkpoint is incomplete, or the weights do not fit the free memory; UnsupportedModelError, its subclass, for a
    kind of model that is refused.

    >>> import kvprobe
    >>> loaded = kvprobe.load("smollm2-135m")
    >>> loaded.spec.n_layers, loaded.spec.n_heads, loaded.spec.n_kv_heads
    (30, 9, 3)
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    checkpoint = find(name, progress=progress)
    config, spec, tensors, method = _inspected(checkpoint)
    _refuse_damaged(checkpoint, progress)
    import torch

    place = device_for(device)
    checkpoint_checks.refuse_too_big(checkpoint.name, tensors, spec, dtype=dtype, device=place)
    progress(f"loading {checkpoint.name}", 0, None)
    with quiet():
        checkpoint_checks.refuse_foreign(checkpoint.name, config)
        code = checkpoint_checks.STOCK_CODE if config.get("auto_map") else None
        if code is not None:
            progress(f"{checkpoint.name}: {code}", 0, None)
        given = {"spec": spec, "dtype": getattr(torch, dtype), "method": method}
        model = checkpoint_checks.model(checkpoint.name, checkpoint.directory, config, tensors, **given)
        tokenizer = checkpoint_checks.tokenizer(checkpoint.name, checkpoint.directory)
    if heads := arrivals.other_heads(model, tensors):
        progress(f"{checkpoint.name}: {heads[0]} belongs to a head for another task and is not read", 0, None)
    model = model.to(place).eval().requires_grad_(False)
    checkpoint_checks.refuse_broken(checkpoint.name, model)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        name=checkpoint.name,
        source=checkpoint.source,
        revision=checkpoint.revision,
        dtype=dtype,
        device=str(place),
        code=code,
    )


def check(name: str, *, weights: bool = True) -> None:
    """Refuse a GGUF file by its header and a local directory by its files' headers, as `load` does, without torch.

    Without ``weights``, directories are not checked, and a GGUF file need not be able to read text. Any other name is
    left to `load`, which may have to fetch it.
    """
    if name in pull.CATALOGUE:
        return
    path = _path(name)
    if path.suffix == ".gguf" and path.is_file():
        from kvprobe.models.gguf_model import describe

        describe(path, text=weights)
    elif weights and path.is_dir():
        _inspected(find(name))


def _refuse_damaged(checkpoint: Checkpoint, progress: Progress) -> None:
    """Refuse files that do not match the manifest that gives the revision; a bad conversion is repeated instead."""
    if checkpoint.source == "gguf" or read_manifest(checkpoint.directory) is None:
        return
    if (wrong := verify(checkpoint.directory, progress=progress)) is not None:
        pulled = checkpoint.name in pull.CATALOGUE
        hint = f"`kvprobe pull {checkpoint.name}` fetches it again" if pulled else f"if intended, remove its {MANIFEST}"
        raise KvprobeError(f"{checkpoint.name} is damaged: {wrong}; {hint}")


def _inspected(checkpoint: Checkpoint) -> tuple[dict[str, Any], Spec, dict[str, headers.Tensor], str | None]:
    """The configuration, the shape, the tensors, and the method by which transformers decodes them, if any."""
    hub.refuse_adapter(checkpoint.name, checkpoint.directory)
    config = read_config(checkpoint)
    spec = checkpoint_checks.read_spec(checkpoint.name, config)
    files = headers.weight_files(checkpoint.directory)
    if not files:
        raise hub.weightless(checkpoint.name, [path.name for path in checkpoint.directory.iterdir()])
    tensors = headers.read_tensors(checkpoint.name, checkpoint.directory, files)
    method = arrivals.refuse_codes(checkpoint.name, checkpoint.directory, config, tensors)
    checkpoint_checks.refuse_unlike(checkpoint.name, spec, tensors)
    return config, spec, tensors, method


def load_spec(name: str, *, progress: Progress = silent) -> Spec:
    """The shape of a model by name, from its configuration alone: it reads and fetches no weights and needs no torch.

    A GGUF file is converted as by `load`, which reads all of it.
    """
    checkpoint = find(name, only_config=True, progress=progress)
    return checkpoint_checks.read_spec(checkpoint.name, read_config(checkpoint))


def find(name: str, *, only_config: bool = False, progress: Progress = silent) -> Checkpoint:
    """What a name means, fetched from the hub if necessary; see `load`."""
    path = _path(name)
    if not name:
        raise KvprobeError(f"the name of the model is empty; {_here()}")
    if name in pull.CATALOGUE:
        if pull.CATALOGUE[name].kind != "model":
            raise KvprobeError(f"{name} is a tokenizer without weights; {_here()}")
        if not pull.is_pulled(name):
            raise KvprobeError(f"{name} is not on this machine yet: fetch it with `kvprobe pull {name}`")
        made_from = ", ".join(source.name for source in pull.CATALOGUE[name].sources)
        return _checkpoint(pull.place(name), name, f"pulled: {made_from}")
    if path.is_dir():
        return _checkpoint(path, path.resolve().name, "directory")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise KvprobeError(f"there is no file {name}; {_here()}")
        return _checkpoint(pull.convert_once(path, text=not only_config, progress=progress), path.stem, "gguf")
    if name.startswith((".", "/", "~")) or (os.sep == "\\" and "\\" in name) or name.count("/") > 1:
        if path.is_file():
            raise KvprobeError(f"{name} is a file, and only files that end in .gguf are models; {_here()}")
        raise KvprobeError(f"there is no directory {name}; {_here()}")
    try:
        directory = hub.fetch(name, only_config=only_config, progress=progress)
    except LookupError as error:
        raise KvprobeError(
            f"no model {name!r}: it is not a pulled model, a directory or a GGUF file here, and {error}; {_here(name)}"
        ) from error
    return Checkpoint(directory=directory, name=name, source="hub", revision=directory.name)


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise KvprobeError(f"{name!r} names a user who has no home directory; {_here()}") from None


def available() -> list[dict[str, Any]]:
    """The models available here and those that can be pulled, one dict each.

    name; kind: ``model`` or ``tokenizer``; bytes on disk, None if it is not here; licence; what; and state: ``pulled``,
    ``not pulled``, ``hub cache`` or ``gguf`` (converted before, and named by its file).
    """
    rows = []
    for item in pull.CATALOGUE.values():
        here = pull.is_pulled(item.name)
        rows.append(
            {
                "name": item.name,
                "kind": item.kind,
                "state": "pulled" if here else "not pulled",
                "bytes": _size(pull.place(item.name)) if here else None,
                "licence": item.licence,
                "what": item.what,
            }
        )
    other = {"kind": "model", "licence": None}
    for model in hub.cached_models():
        rows.append({**other, **model, "state": "hub cache", "what": "a hub repository"})
    for directory in sorted((home() / "gguf").glob("[0-9a-f]*")):
        manifest = read_manifest(directory)
        if manifest is None or not isinstance(manifest.get("name"), str):
            continue  # damaged: converted again when its file is loaded
        name = f"{manifest['name']}.gguf"
        rows.append({**other, "name": name, "state": "gguf", "bytes": _size(directory), "what": "a GGUF file"})
    return rows


def _checkpoint(directory: Path, name: str, source: str) -> Checkpoint:
    try:
        str(directory.resolve()).encode()
    except UnicodeEncodeError:
        raise KvprobeError(
            f"the path of {name!r} is not UTF-8: rename it, since no library reads weights there"
        ) from None
    if not (directory / "config.json").is_file():
        hub.refuse_adapter(name, directory)
        raise KvprobeError(f"{name} is not a model: the directory has no config.json")
    return Checkpoint(directory=directory, name=name, source=source, revision=revision_of(directory))


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The configuration of a checkpoint. Raises KvprobeError if it cannot be read."""
    return read_object(checkpoint.directory / "config.json", f"the config.json of {checkpoint.name}")


def _here(name: str = "") -> str:
    """What is available instead of ``name``, as the end of a sentence."""
    rows = [row for row in available() if row["kind"] == "model"]
    ready = [row["name"] for row in rows if row["state"] in ("pulled", "hub cache")]
    offered = [row["name"] for row in rows if row["state"] == "not pulled"]
    can = f"available here: {', '.join(ready)}" if ready else "no model is on this machine yet"
    can += f"; `kvprobe pull NAME` fetches {' or '.join(offered)}" if offered else ""
    return did_you_mean(name, ready + offered, can)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


def device_for(device: str | None) -> "torch.device":
    """The torch device of that name, or the best here for None or ``auto``; KvprobeError if it cannot be used."""
    import torch

    if device in (None, "auto"):
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        place = torch.device(str(device))
        torch.empty(1, device=place).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise KvprobeError(
            Wording("{device} {0} cannot be used here ({1}): leave it out, or use cpu", device, reason)
        ) from error
    return place
