"""How are fetched and converted models removed, and how much room does that free?"""

import shutil
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.files import store
from kvprobe.models import hub, pull
from kvprobe.progress import Progress, silent


def remove(name: str, *, progress: Progress = silent) -> int:
    """Remove a pulled model or tokenizer, or the conversion of a GGUF file (``NAME.gguf``); returns the bytes freed.

    The GGUF file itself stays. Raises KvprobeError for any other name, also for one in the hub's cache, which other
    programs share.
    """
    targets = [pull.place(name)] if name in pull.CATALOGUE else _conversions(name)
    targets = [target for target in targets if target.is_dir()]
    if not targets:
        if any(row["name"] == name for row in hub.cached_models()):
            raise KvprobeError(
                f"{name} is in the hub's cache, which other programs share: remove it with `hf cache rm`"
            )
        raise KvprobeError(f"{name!r} was not fetched or converted here: `kvprobe models` lists what was")
    freed = 0
    for target in targets:
        with store.locked(target, progress=progress):
            freed += sum(path.stat().st_size for path in target.iterdir() if path.is_file())
            # renamed first, so that a kill leaves no half of a model under its name
            doomed = target.with_name(f".{target.name}.partial-removed")
            target.rename(doomed)
            shutil.rmtree(doomed)
    return freed


def _conversions(name: str) -> list[Path]:
    directories = (store.home() / "gguf").glob("[0-9a-f]*")
    of = {directory: store.read_manifest(directory) for directory in directories}
    return [path for path, manifest in of.items() if manifest is not None and f"{manifest.get('name')}.gguf" == name]
