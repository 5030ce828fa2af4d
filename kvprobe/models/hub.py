"""How is a repository fetched from the Hugging Face hub: only what is needed, only safetensors, no code?

The hub client's own settings apply (``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``), and its cache is
used, so that a model fetched by another tool is found.
"""

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.files.jsonfile import read_object
from kvprobe.files.store import disk_error, sha256
from kvprobe.models.headers import weight_files
from kvprobe.progress import Progress, silent

WANTED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
_CONNECT_S = 4.0  # report an unreachable hub quickly; the download itself waits as long as the hub's client does


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the client's notices: what matters is in the errors that `fetch` raises."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(50)  # CRITICAL: it warns of every broken connection
    try:
        yield
    finally:
        logging.set_verbosity(before)


def cached(repo: str) -> Path | None:
    """The newest complete snapshot of a repository in the hub's cache, or None."""
    snapshot = _snapshot(repo)
    return None if snapshot is None or _lacks(snapshot) else snapshot


def _snapshot(repo: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, local_files_only=True, allow_patterns=list(WANTED)))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _lacks(directory: Path) -> str | None:
    """Why a snapshot is incomplete; None if it is complete."""
    try:
        if (directory / "config.json").is_file() and weight_files(directory):
            return None
    except (KvprobeError, OSError) as error:
        return str(error)
    return "it has no configuration or no weights"


def cached_models() -> list[dict[str, Any]]:
    """The repositories in the hub's cache that can be loaded without a network: name and bytes on disk."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return []
    return [
        {"name": repository.repo_id, "bytes": repository.size_on_disk}
        for repository in sorted(repositories, key=lambda repository: repository.repo_id)
        if repository.repo_type == "model" and cached(repository.repo_id)
    ]


def fetch(repo: str, *, only_config: bool = False, progress: Progress = silent) -> Path:
    """The snapshot directory of a repository: from the cache if it is complete there, else downloaded.

    A cached snapshot is used without asking the hub for a newer one (the commit is in every result). The directory is
    named by its commit hash. A broken connection is retried a few times; after that the complete files stay, and the
    next run fetches the rest. Raises LookupError with the reason if the hub cannot be reached or lacks the repository,
    KvprobeError if a download breaks off or a checksum is wrong, UnsupportedModelError for a repository without
    safetensors.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if only_config and isinstance(path := try_to_load_from_cache(repo, "config.json"), str):
            return Path(path).parent
        if (directory := cached(repo)) is not None:
            return directory
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        progress(f"asking {constants.ENDPOINT} for {repo}", 0, None)
        info = HfApi().model_info(repo, timeout=_CONNECT_S)
    except HFValidationError as error:
        raise LookupError(f"it cannot be the name of a hub repository ({error})") from error
    except GatedRepoError as error:
        raise KvprobeError(
            f"{repo} is gated on {constants.ENDPOINT}: accept its terms there, then `hf auth login`, or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise LookupError(f"{constants.ENDPOINT} has no such repository, or you have no access") from error
    except OfflineModeIsEnabled as error:
        raise LookupError(f"{_why_not_cached(repo)}, and HF_HUB_OFFLINE forbids asking the hub") from error
    except Exception as error:
        if not _of_the_network(error):
            raise
        part = "" if _snapshot(repo) is None else f" and {_why_not_cached(repo)}"
        raise LookupError(f"{constants.ENDPOINT} could not be reached ({type(error).__name__}){part}") from error

    names = {sibling.rfilename for sibling in info.siblings or ()}
    try:
        if "adapter_config.json" in names:
            refuse_adapter(repo, Path(hf_hub_download(repo, "adapter_config.json", etag_timeout=_CONNECT_S)).parent)
        if not names & {"model.safetensors", "model.safetensors.index.json"}:
            raise weightless(repo, names)
        if only_config:
            return Path(hf_hub_download(repo, "config.json", etag_timeout=_CONNECT_S)).parent
        bars = _bars(f"downloading {repo}", progress)
        with quiet():
            directory = Path(snapshot_download(repo, allow_patterns=list(WANTED), tqdm_class=bars))
    except KvprobeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise disk_error(error, Path(constants.HF_HUB_CACHE) / repo) from error
        if not _of_the_network(error):
            raise
        raise KvprobeError(
            f"the download of {repo} from {constants.ENDPOINT} broke off ({type(error).__name__}); "
            "the complete files are kept: run the same command again for the rest"
        ) from error
    _check(repo, directory, progress)
    return directory


def _why_not_cached(repo: str) -> str:
    if (snapshot := _snapshot(repo)) is None:
        return "it is not in the hub's cache"
    return f"its copy in the hub's cache is damaged ({_lacks(snapshot)})"


def refuse_adapter(name: str, directory: Path) -> None:
    """Raise UnsupportedModelError for an adapter (LoRA and the like), naming its base and how to merge the two."""
    if not (directory / "adapter_config.json").is_file():
        return
    settings = read_object(directory / "adapter_config.json", f"the adapter_config.json of {name}")
    base = str(settings.get("base_model_name_or_path") or "a model that it does not name")
    # a path belongs to the machine that trained it; only its last part is the model's name
    base = base if base.count("/") == 1 else base.rstrip("/").rpartition("/")[2]
    raise UnsupportedModelError(
        f"{name} is an adapter of {base}, not a model by itself: merge the two with peft "
        "(`model.merge_and_unload().save_pretrained(DIRECTORY)`) and give that directory"
    )


def weightless(name: str, files: Collection[str]) -> UnsupportedModelError:
    """The error for a model whose ``files`` have no weights that kvprobe reads."""
    if pickled := sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt"))):
        return UnsupportedModelError(
            f"{name} has only pickled weights ({pickled[0]}), and reading a pickle runs what is in it; kvprobe reads "
            "model.safetensors only: convert it where you trust it, and give the directory"
        )
    if shards := sorted(file for file in files if file.endswith(".safetensors")):
        return UnsupportedModelError(
            f"{name} has {shards[0]}, but neither model.safetensors nor the model.safetensors.index.json that says "
            "which files belong together: fetch it again"
        )
    return UnsupportedModelError(f"{name} has no weights that kvprobe reads: model.safetensors is missing")


def _of_the_network(error: Exception) -> bool:
    # OSError: the client's HTTP errors and wrong sizes; its HTTP library is httpx or httpx2, by the client's version
    return isinstance(error, OSError) or type(error).__module__.startswith("httpx")


def _check(repo: str, directory: Path, progress: Progress) -> None:
    """Check large files against the hub's SHA-256, which is the name of their blob in the cache."""
    for file in weight_files(directory):
        blob = file.resolve()
        if re.fullmatch(r"[0-9a-f]{64}", blob.name) and (got := sha256(blob, progress=progress)) != blob.name:
            blob.unlink()
            file.unlink(missing_ok=True)
            raise KvprobeError(
                f"{file.name} of {repo} arrived damaged: expected SHA-256 {blob.name}, got {got}; "
                "it was removed, run the command again"
            )


def _bars(what: str, progress: Progress) -> Any:
    """A class for the hub's client to use as its progress bar, which reports the bytes to `progress`."""
    from tqdm.auto import tqdm

    class Bars(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.in_bytes = settings.get("unit") == "B"
            super().__init__(*args, **(settings | {"disable": True}))
            self.total = settings.get("total")
            self.n = settings.get("initial") or 0

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.in_bytes:
                # two bars count the same bytes; only one includes what the cache held already
                progress(what, min(int(self.n), int(self.total or self.n)), int(self.total or 0) or None, "bytes")

    return Bars
