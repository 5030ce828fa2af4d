"""Which model does a name mean, and how is it loaded: pulled, a directory, a GGUF file, or a hub repository?"""

import contextlib
import difflib
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import hub, pull
from kvprobe.bill import DTYPE_BYTES
from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.progress import Progress, silent
from kvprobe.spec import Spec
from kvprobe.store import home, read_manifest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a name means: the directory it is in, and what a result may say of it."""

    directory: Path
    name: str
    """As shown: a catalogue name, a hub id, or a file's or directory's base name; never a path."""
    source: str
    """``directory``, ``gguf`` or ``hub``, or of a pulled model the file that it was made from."""
    revision: str
    """Of the hub: the commit. Otherwise ``manifest:`` or ``sample:`` and 16 hexadecimal digits, see `revision_of`."""


@dataclass(frozen=True, kw_only=True)
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

    def record(self) -> dict[str, Any]:
        """What a run record says of the model and where it runs: names and fingerprints, never a path."""
        import torch

        return {
            "model": self.name,
            "revision": self.revision,
            "source": self.source,
            "dtype": self.dtype,
            "device": self.device,
            "gpu": torch.cuda.get_device_name() if self.device.startswith("cuda") else None,
            "threads": torch.get_num_threads(),
            "family": self.spec.family,
        }


def load(name: str, *, dtype: str = "float32", device: str | None = None, progress: Progress = silent) -> Loaded:
    """Loads a model by name: a pulled one, a local directory, a ``.gguf`` file, or a hub repository, in this order.

    `dtype` is float32, bfloat16 or float16; `device` a torch device, None or ``auto`` for a GPU if there is one.
    Weights are read from safetensors only and no code of a repository is run. Raises KvprobeError (its subclass
    UnsupportedModelError for a model of a kind that is refused) when the name means nothing, the checkpoint is not
    whole, or the weights do not fit the free memory.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    found = find(name, progress=progress)
    config = _config(found)
    spec = _spec(found, config)
    files = hub.weight_files(found.directory)
    if not files:
        _refuse_pickles(found)
    import torch

    place = device_for(device)
    _refuse_if_too_big(found.name, files, spec, dtype=dtype, device=place)
    progress(f"loading {found.name}", 0, None)
    with quiet():
        _refuse_foreign_code(found.name, config)
        model = _model(found, getattr(torch, dtype))
        tokenizer = _tokenizer(found)
    model = model.to(place).eval().requires_grad_(False)
    _refuse_broken(found.name, model)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        name=found.name,
        source=found.source,
        revision=found.revision,
        dtype=dtype,
        device=str(place),
    )


def load_spec(name: str, *, progress: Progress = silent) -> Spec:
    """The shape of a model by name, from its configuration alone: no weights are read or fetched, torch is not needed.

    Of a GGUF file the conversion of `load` is made, which reads everything.
    """
    found = find(name, only_config=True, progress=progress)
    return _spec(found, _config(found))


def find(name: str, *, only_config: bool = False, progress: Progress = silent) -> Found:
    """What a name means, fetched from the hub where it must be; see `load`."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise KvprobeError(f"{name!r} is of a user who has no home; {_here()}") from None
    if name in pull.CATALOGUE:
        if pull.CATALOGUE[name].kind != "model":
            raise KvprobeError(f"{name} is a tokenizer without weights; {_here()}")
        if not pull.is_pulled(name):
            raise KvprobeError(f"{name} is not on this machine yet: fetch it with `kvprobe pull {name}`")
        made_from = ", ".join(source.name for source in pull.CATALOGUE[name].sources)
        return _found(pull.place(name), name, f"pulled: {made_from}")
    if path.is_dir():
        return _found(path, path.resolve().name, "directory")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise KvprobeError(f"there is no file {name}; {_here()}")
        return _found(pull.convert_once(path, progress=progress), path.stem, "gguf")
    if name.startswith((".", "/", "~")) or (os.sep == "\\" and "\\" in name) or name.count("/") > 1:
        raise KvprobeError(f"there is no directory {name}; {_here()}")
    try:
        directory = hub.fetch(name, only_config=only_config, progress=progress)
    except LookupError as error:
        raise KvprobeError(
            f"no model {name!r}: it is no pulled model, no directory and no GGUF file here, and {error}; {_here(name)}"
        ) from error
    return Found(directory=directory, name=name, source="hub", revision=directory.name)


def available() -> list[dict[str, Any]]:
    """What can be loaded here and what can be pulled, one dict each.

    name; kind: ``model`` or ``tokenizer``; bytes on the disk, None for what is not here; licence; what; and state:
    ``pulled``, ``not pulled``, ``hub cache`` or ``gguf`` (converted before; named by the file itself).
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
        if manifest := read_manifest(directory):
            name = f"{manifest.get('name', directory.name)}.gguf"
            rows.append({**other, "name": name, "state": "gguf", "bytes": _size(directory), "what": "a GGUF file"})
    return rows


def revision_of(directory: Path) -> str:
    """Which weights these are, without reading them all.

    With a manifest of ours: ``manifest:`` and the start of the SHA-256 over the SHA-256 of every file. Otherwise
    ``sample:`` and that over the configuration and, of each safetensors file, its size, header, first and last MiB:
    it tells checkpoints apart, it does not prove them equal.
    """
    manifest = read_manifest(directory)
    digest = hashlib.sha256()
    if manifest is not None:
        digest.update(json.dumps({file: of["sha256"] for file, of in sorted(manifest["files"].items())}).encode())
        return f"manifest:{digest.hexdigest()[:16]}"
    digest.update((directory / "config.json").read_bytes())
    for path in hub.weight_files(directory):
        size = path.stat().st_size
        with path.open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            digest.update(f"{path.name} {size}".encode())
            digest.update(file.read(min(header, size) + 2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read())
    return f"sample:{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' and the hub client's notices and bars away; what they were set to comes back after."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with hub.quiet():
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _found(directory: Path, name: str, source: str) -> Found:
    if not (directory / "config.json").is_file():
        raise KvprobeError(f"{name} is no model: the directory has no config.json")
    return Found(directory=directory, name=name, source=source, revision=revision_of(directory))


def _config(found: Found) -> dict[str, Any]:
    try:
        config = json.loads((found.directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise KvprobeError(f"the config.json of {found.name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise KvprobeError(f"the config.json of {found.name} holds no JSON object")
    return config


def _here(name: str = "") -> str:
    """What can be loaded instead of ``name``, as the end of a sentence."""
    rows = [row for row in available() if row["kind"] == "model"]
    ready = [row["name"] for row in rows if row["state"] in ("pulled", "hub cache")]
    offered = [row["name"] for row in rows if row["state"] == "not pulled"]
    near = difflib.get_close_matches(name, ready + offered, n=1)
    meant = f"did you mean {near[0]}? " if near else "gpt2 is what MODEL defaults to; " if name == "gpt2" else ""
    can = f"{meant}here can be loaded: {', '.join(ready)}" if ready else f"{meant}no model is on this machine yet"
    return can + (f"; `kvprobe pull NAME` fetches {' or '.join(offered)}" if offered else "")


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def _refuse_pickles(found: Found) -> None:
    pickled = sorted(path.name for path in found.directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise UnsupportedModelError(
            f"{found.name} has only pickled weights ({pickled[0]}), and reading a pickle runs what is in it; "
            "kvprobe reads model.safetensors only: convert it where you trust it"
        )
    raise UnsupportedModelError(f"{found.name} has no weights that kvprobe reads: model.safetensors is missing or cut")


def _refuse_foreign_code(name: str, config: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise UnsupportedModelError(
                f"{name} wants Python code of its own repository run ({config.get('model_type')}, "
                f"{config['auto_map'].get('AutoModelForCausalLM', 'its own classes')}), which kvprobe never does"
            )
        raise UnsupportedModelError(
            f"{name} is of the family {config.get('model_type')!r}, unknown to transformers here"
        )


def _spec(found: Found, config: dict[str, Any]) -> Spec:
    try:
        return Spec.from_config(config)
    except KvprobeError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise UnsupportedModelError(
            f"config.json of {found.name} does not make sense ({type(error).__name__}: {_first_line(error)})"
        ) from error


def _refuse_broken(name: str, model: Any) -> None:
    import torch

    for path, parameter in model.named_parameters():
        # one sum a tensor: a value that is not finite survives it
        if not torch.isfinite(parameter.sum(dtype=torch.float32)):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise KvprobeError(f"{name} has weights that are not finite at {dtype}, first {path}: check the checkpoint")


def device_for(device: str | None) -> "torch.device":
    """The torch device of that name, for None or ``auto`` the best here; KvprobeError where it cannot be used."""
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
            f"the device {device!r} cannot be used here ({reason}); leave --device out, or say cpu"
        ) from error
    return place


def weights_bytes(files: list[Path], *, dtype: str) -> int:
    """Bytes of all tensors of safetensors files once loaded at `dtype`, from the files' headers alone."""
    elements = 0
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size - 8:
                raise ValueError(f"it claims {length:,} bytes, more than the file has")
            header = json.loads(file.read(length))
        for key, tensor in header.items():
            if key != "__metadata__":
                count = 1
                for size in tensor["shape"]:
                    count *= size
                elements += count
    return elements * DTYPE_BYTES[dtype]


def _refuse_if_too_big(name: str, files: list[Path], spec: Spec, *, dtype: str, device: "torch.device") -> None:
    try:
        need = weights_bytes(files, dtype=dtype)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise KvprobeError(f"the safetensors of {name} are damaged: the header cannot be read ({error})") from error
    # transformers would build what the configuration says before it looks at the files
    held = need // DTYPE_BYTES[dtype]
    if spec.n_parameters is not None and spec.n_parameters > 4 * held:
        raise KvprobeError(
            f"config.json of {name} describes {spec.n_parameters:,} parameters and its weights hold {held:,}: "
            "they do not belong together"
        )
    if device.type == "cuda":
        import torch

        free, where = torch.cuda.mem_get_info(device)[0], "on the GPU"
    else:
        import psutil

        free, where = psutil.virtual_memory().available, "in memory"
    if need > free:
        raise KvprobeError(
            f"{name} at {dtype} needs {need / 2**30:,.2f} GiB for its weights alone, and {free / 2**30:,.2f} GiB "
            f"are free {where}; free some, take a smaller model"
            + (", or --dtype bfloat16" if dtype == "float32" else "")
        )


def _model(found: Found, dtype: "torch.dtype") -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    settings = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(found.directory, output_loading_info=True, **settings)
    except SafetensorError as error:
        raise KvprobeError(f"the safetensors of {found.name} are damaged: {error}") from error
    except ImportError as error:
        raise UnsupportedModelError(f"{found.name} needs a package that is not here: {_first_line(error)}") from error
    except Exception as error:
        # a configuration with impossible values fails anywhere inside, with any error
        raise UnsupportedModelError(
            f"transformers cannot load {found.name} ({type(error).__name__}: {_first_line(error)}); check its config"
        ) from error
    # transformers fills what a checkpoint lacks with random numbers: no result may come of that
    lacking = sorted(report["missing_keys"]) + [key for key, *_ in report.get("mismatched_keys", ())]
    if lacking:
        raise KvprobeError(
            f"the checkpoint of {found.name} lacks {len(lacking)} of the model's weights, first {lacking[0]}"
        )
    return model


def _tokenizer(found: Found) -> Any:
    from transformers import AutoTokenizer

    # without any of these, transformers makes up an empty tokenizer and says nothing
    if not any((found.directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UnsupportedModelError(f"{found.name} has no tokenizer: tokenizer.json is missing")
    try:
        return AutoTokenizer.from_pretrained(found.directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UnsupportedModelError(
            f"{found.name} has no tokenizer that can be loaded: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
