"""How is a GGUF file converted, once, into an ordinary model directory?

``python -m kvprobe.models.gguf_convert GGUF DIRECTORY`` does the work in a separate process: reading a GGUF file leaves
several times its size in memory, and its progress bars are not ours.
"""

import errno
import functools
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.files.store import disk_full, run_watched
from kvprobe.models import older_releases
from kvprobe.models.gguf_join import join
from kvprobe.models.gguf_model import Described, describe, one_for_all
from kvprobe.models.gguf_vocabulary import AS_LLAMA3, DIGITS_ALONE, cuts_as_known
from kvprobe.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_UNSUPPORTED = "kvprobe: unsupported: "


def convert(gguf: Path, directory: Path, *, log: Path, name: str, progress: Progress = silent) -> None:
    """Write the model of a GGUF file into `directory`: float32 safetensors, configuration and tokenizer.

    A vocabulary that splits text in an unknown way gives no tokenizer. The weights are the file's own, dequantised to
    float32: nothing is rounded again. Raises UnsupportedModelError for an architecture, tensor or key that is not
    understood, KvprobeError for a file that is damaged or incomplete, or a model that does not fit memory or disk.
    `log` is a scratch file for the conversion's output.
    """
    refuse_older_transformers()
    described = describe(gguf, name=name, text=False)
    _refuse_if_too_big(described, directory, name=name)
    source = gguf
    if described.header.parts:
        progress(f"joining the {len(described.header.parts)} parts of {name}", 0, None)
        # transformers reads only a single file
        source = log.with_name("joined.gguf")
        join(described.header, source)
    start = time.monotonic()

    def watch() -> None:
        # the only count available: the bar of transformers' loop over the tensors
        counts = re.findall(r"(\d+)/(\d+) \[", log.read_text(encoding="utf-8", errors="replace"))
        done, total = max(((int(n), int(of)) for n, of in counts), default=(0, 0))
        if 0 < done < total:
            progress(f"converting {name}", done, total, "tensors")
        else:
            progress(f"converting {name}: {'writing' if done else 'reading'}", int(time.monotonic() - start), None, "s")

    command = [sys.executable, "-m", "kvprobe.models.gguf_convert", str(source), str(directory)]
    # so that the child finds this package as this process did
    search = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    status, said = run_watched(command, log=log, watch=watch, environment=environment)
    if status:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), f"exit status {status}")
        if last.startswith(_UNSUPPORTED):
            raise UnsupportedModelError(f"{name}: {last.removeprefix(_UNSUPPORTED)}")
        if disk_full(said, log.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise KvprobeError(f"{name} could not be converted from GGUF: {last.strip()}")


def _refuse_if_too_big(described: Described, directory: Path, *, name: str) -> None:
    import psutil

    need, memory = described.n_bytes, psutil.virtual_memory().available
    files = sum(path.stat().st_size for path in described.header.files) if described.header.parts else 0
    disk = shutil.disk_usage(directory).free
    if need > memory or need + files > disk:
        raise KvprobeError(
            f"{name} converted to float32 needs {need / 2**30:,.2f} GiB of memory ({memory / 2**30:,.2f} GiB are free) "
            f"and {(need + files) / 2**30:,.2f} GiB of disk ({disk / 2**30:,.2f} GiB are free): free some, take a "
            "smaller model, or set KVPROBE_HOME to a directory on a larger disk"
        )


def _convert_here(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    described = describe(gguf, text=False)
    _read_once(described)
    unread = _watch_names(described)
    from_gguf = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(**from_gguf)
    except (ValueError, KeyError) as error:
        raise _unsupported(" ".join(str(error).split())) from None
    _carry(described, config)
    model, report = AutoModelForCausalLM.from_pretrained(
        **from_gguf, config=config, dtype=torch.float32, output_loading_info=True
    )
    _refuse_unloaded(report, unread)
    # the weights are plain float32 now: left in, these would send the next load back to the GGUF
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(directory)
    if not cuts_as_known(described.header.keys):
        return
    tokenizer = AutoTokenizer.from_pretrained(**from_gguf)
    _mend_tokenizer(tokenizer, described.header.keys)
    if positions := getattr(model.config, "max_position_embeddings", None):
        tokenizer.model_max_length = positions
    tokenizer.save_pretrained(directory)


def _read_once(described: Described) -> None:
    """Cache what transformers reads of the file, and reduce a number repeated for each layer to one.

    Otherwise it would read the file three times, for configuration, weights and tokenizer, at 4 to 20 s each.
    """
    import gguf as reading

    keys, prefix = described.header.keys, f"{described.architecture}."
    n_layers = keys[f"{prefix}block_count"]
    own = [key for key in keys if key.startswith(prefix)]
    repeated = [key for key in own if one_for_all(keys[key], n_layers) is not keys[key]]
    their_reader = reading.GGUFReader

    @functools.cache
    def read(path: str) -> Any:
        reader = their_reader(path)
        for key in repeated:
            field = reader.fields[key]
            reader.fields[key] = field._replace(data=field.data[:1])
        return reader

    reading.GGUFReader = read


def refuse_older_transformers() -> None:
    """Raise UnsupportedModelError below the first release of transformers whose conversions are tested.

    4.57 makes a tokenizer with another BOS and EOS of the same file.
    """
    if (here := older_releases.installed()) < older_releases.TESTED:
        installed, wanted = map(older_releases.text, (here, older_releases.TESTED))
        raise UnsupportedModelError(
            f"GGUF files are converted by transformers {wanted} or newer, and {installed} is installed, which may read "
            f"their tokenizers otherwise: convert once where {wanted} is installed, with the same KVPROBE_HOME; what "
            "it has converted loads here too"
        )


def _unsupported(what: str) -> SystemExit:
    print(_UNSUPPORTED + what, file=sys.stderr)
    return SystemExit(1)


def _carry(described: Described, config: "PreTrainedConfig") -> None:
    """Set what the file says but transformers 5.24 leaves at another model's default."""
    # transformers reads a Llama file with the general.name "mistral" as a Mistral, with a window that the file lacks
    if described.architecture == "llama" and config.model_type != "llama":
        raise _unsupported(f"a file of the architecture llama was read as {config.model_type}: change its general.name")
    settings = dict(described.settings)
    if described.rope is not None:
        settings["rope_parameters"] = described.rope
    for key, value in settings.items():
        if getattr(config, key, None) != value:
            setattr(config, key, value)


def _watch_names(described: Described) -> set[str]:
    """The names of the file's tensors, from which those that transformers' own map contains will be removed."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    unread = set() if described.architecture in ("lfm2", "qwen35", "qwen35moe") else set(described.header.tensors)
    unread -= {"rope_freqs.weight"}
    their_map = theirs.get_gguf_hf_weights_map

    @functools.wraps(their_map)
    def watched(*args: Any, **kwargs: Any) -> dict[str, str]:
        names: dict[str, str] = their_map(*args, **kwargs)
        # stacked experts are looked up without the suffix
        unread.difference_update(names, [f"{name}.weight" for name in names])
        return names

    theirs.get_gguf_hf_weights_map = watched
    return unread


def _refuse_unloaded(report: dict[str, Any], unread: set[str]) -> None:
    """Refuse a model with tensors that transformers could not place, or weights that it made up."""
    for what, names in {
        "is missing from the file": report["missing_keys"],
        "has another shape in the file": [key for key, *_ in report.get("mismatched_keys", ())],
        "of the file is not read": [*report["unexpected_keys"], *unread],
    }.items():
        if names:
            raise _unsupported(f"{sorted(names)[0]} {what} (one of {len(names)}): it cannot be converted completely")


def _mend_tokenizer(tokenizer: Any, keys: dict[str, Any]) -> None:
    """Apply what ``tokenizer.ggml.pre`` means to llama.cpp but not to transformers 5.24.

    Digits one by one: otherwise the two spaces of ``"a  1"`` become two tokens where SmolLM2's own tokenizer has one.
    For Llama 3 and its kin, BOS in front unless a key says otherwise, and no merging inside a word that is a token.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    byte_level, cut = keys.get("tokenizer.ggml.model") == "gpt2", keys.get("tokenizer.ggml.pre")
    if byte_level and cut in DIGITS_ALONE:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if byte_level and cut in AS_LLAMA3:
        backend.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in keys and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True
    prefix = keys.get("tokenizer.ggml.add_space_prefix")
    if keys.get("tokenizer.ggml.model") == "llama" and prefix is not None:
        made = bool(tokenizer.tokenize("a")[0].startswith("▁"))
        if made is not prefix:
            raise _unsupported(
                f"tokenizer.ggml.add_space_prefix is {prefix}, but the resulting tokenizer does otherwise"
            )


def _tidy(directory: Path) -> None:
    """Remove from the written files what describes this conversion rather than the model."""
    for name, keys in {
        "config.json": ("_name_or_path", "_model_name_or_path", "quantization_config"),
        "tokenizer_config.json": ("name_or_path", "is_local", "local_files_only"),
    }.items():
        path = directory / name
        if not path.is_file():
            continue
        settings = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: value for key, value in settings.items() if key not in keys}
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in directory.iterdir():  # safetensors are written readable by their owner only
        path.chmod((directory / "config.json").stat().st_mode)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
    _tidy(Path(sys.argv[2]))
