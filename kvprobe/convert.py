"""How does a GGUF file become an ordinary model directory, once?

``python -m kvprobe.convert GGUF DIRECTORY`` does the work in a process of its own: reading a GGUF file leaves several
times its size in memory, and its progress is not ours.
"""

import errno
import functools
import json
import os
import re
import sys
import time
from pathlib import Path

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.progress import Progress, silent
from kvprobe.store import disk_full, run_watched

_UNSUPPORTED = "kvprobe: unsupported: "


def convert(gguf: Path, directory: Path, *, log: Path, name: str, progress: Progress = silent) -> None:
    """Writes the model of a GGUF file into `directory`: float32 safetensors, configuration and tokenizer.

    The weights are the file's own, dequantised to float32: nothing is rounded again. Raises UnsupportedModelError for
    an architecture that transformers cannot read from GGUF, KvprobeError for a file that is broken. `log` is a
    scratch file for what the conversion says.
    """
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise KvprobeError(f"{gguf.name} is not a GGUF file: it does not begin with the letters GGUF")
    start = time.monotonic()

    def watch() -> None:
        # the only running count there is: the bar of transformers' own loop over the tensors
        counts = re.findall(r"(\d+)/(\d+) \[", log.read_text(encoding="utf-8", errors="replace"))
        done, total = max(((int(n), int(of)) for n, of in counts), default=(0, 0))
        if 0 < done < total:
            progress(f"converting {name}", done, total, "tensors")
        else:
            progress(f"converting {name}: {'writing' if done else 'reading'}", int(time.monotonic() - start), None, "s")

    command = [sys.executable, "-m", "kvprobe.convert", str(gguf), str(directory)]
    # found by the child however it was found by us
    search = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    status, said = run_watched(command, log=log, watch=watch, environment=environment)
    if status:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), f"exit status {status}")
        if last.startswith(_UNSUPPORTED):
            raise UnsupportedModelError(f"{name}: {last.removeprefix(_UNSUPPORTED)}")
        if disk_full(said, log.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise KvprobeError(f"{name} could not be converted from GGUF: {last.strip()}")


def _convert_here(gguf: Path, directory: Path) -> None:
    import gguf as reading
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # transformers reads the file anew for the configuration, the weights and the tokenizer, 4 to 20 s each time
    reading.GGUFReader = functools.cache(reading.GGUFReader)
    from_gguf = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(**from_gguf)
    except (ValueError, KeyError) as error:
        print(_UNSUPPORTED + " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(1) from None
    model = AutoModelForCausalLM.from_pretrained(**from_gguf, config=config, dtype=torch.float32)
    # the file is plain float32 from here on: left in, these would send the next load back to the GGUF
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(**from_gguf)
    _mend_pre_tokenizer(tokenizer, gguf)
    if model.config.max_position_embeddings:
        tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)


def _mend_pre_tokenizer(tokenizer: object, gguf: Path) -> None:
    """Splits digits one by one where the file says so: transformers 5.24 ignores ``tokenizer.ggml.pre``.

    Without it, the two spaces of ``"a  1"`` fall into two tokens where SmolLM2's own tokenizer has one.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(str(gguf)).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _tidy(directory: Path) -> None:
    """Drops from what was written what describes this conversion rather than the model."""
    for name, keys in {
        "config.json": ("_name_or_path", "_model_name_or_path", "quantization_config"),
        "tokenizer_config.json": ("name_or_path", "is_local", "local_files_only"),
    }.items():
        path = directory / name
        settings = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: value for key, value in settings.items() if key not in keys}
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in directory.iterdir():  # safetensors come out readable by their owner alone
        path.chmod((directory / "config.json").stat().st_mode)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
    _tidy(Path(sys.argv[2]))
