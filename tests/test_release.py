"""A release that could be made: what it holds, and that the library installed from it is that of the clone."""

import ast
import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from markdown_it import MarkdownIt

import kvprobe

ROOT = Path(__file__).parents[1]
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
# a table of numbers, on few tokens
SINKS = ("sinks", "--tokens", 48, "--queries-from", 8)
# imported by us, and a requirement of what we require, whose interface it is part of
COMES_WITH = {"llvmlite": "numba", "markupsafe": "jinja2"}


def run(*command, cwd=ROOT):
    """What the command prints; without the path to this clone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(tree, folder, *targets):
    """The wheel and the sdist of a tree, or one of them, in a new folder."""
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, *targets, cwd=tree)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """`.wheel`, `.sdist`, and what the wheel says of itself, `.metadata`."""
    wheel, sdist = build(ROOT, tmp_path_factory.mktemp("dist"))
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    return SimpleNamespace(wheel=wheel, sdist=sdist, metadata=metadata)


def installed(folder, wheel, *requirements, empty):
    """The Python of a new environment with the wheel in it, and unless it is `empty` with what is installed here."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    if empty:
        # torch first and by its exact version: pip's choice may be a GPU build
        run(*pip, f"torch=={PINNED['torch']}")
        run(*pip, wheel, *requirements)
        return python
    run(*pip, "--no-deps", wheel)
    (packages,) = folder.glob("lib/*/site-packages")
    # paths alone: the .pth files in them, of this clone too, are not read
    (packages / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return python


def test_the_wheel_holds_the_library_with_its_data_and_types_and_nothing_else(release):
    held = {name for name in zipfile.ZipFile(release.wheel).namelist() if ".dist-info/" not in name}
    library = [path for path in (ROOT / "kvprobe").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert held == {str(path.relative_to(ROOT)) for path in library}
    assert "kvprobe/py.typed" in held


def test_the_sdist_builds_the_same_wheel(release, tmp_path):
    with tarfile.open(release.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (again,) = build(tmp_path / release.sdist.name.removesuffix(".tar.gz"), tmp_path / "dist", "-t", "wheel")
    assert (again.name, again.read_bytes()) == (release.wheel.name, release.wheel.read_bytes())


def test_the_version_and_the_licence_are_said_alike_everywhere(release, main):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert release.metadata["Version"] == citation["version"] == kvprobe.__version__
    assert release.metadata["License-Expression"] == citation["license"]
    assert main("--version").stdout == f"kvprobe, version {kvprobe.__version__}\n"


def targets(markdown):
    """Where its links lead, and its pictures lie."""
    inline = chain.from_iterable(token.children or () for token in MarkdownIt().parse(markdown))
    return {str(target) for token in inline if (target := token.attrGet("href") or token.attrGet("src"))}


def test_links_lead_to_files_in_the_clone_and_nowhere_outside_of_it(release):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    description = release.metadata.get_payload(decode=True).decode()
    relative = {target for target in targets(readme) if not target.startswith("https://")}
    assert "figures/drawn/sinks-wide.png" in relative
    assert all((ROOT / target).is_file() for target in relative)
    assert targets(description) == targets(readme) - relative
    assert len(description.splitlines()) == len(readme.splitlines())


def requirements(metadata: Message):
    """The packages that it asks for, without those for tests."""
    asked = [entry for entry in metadata.get_all("Requires-Dist") if "extra == 'test'" not in entry]
    return {re.match(r"[\w-]+", entry)[0].replace("-", "_"): entry for entry in asked}


def test_what_the_library_imports_is_required(release):
    imported = set()
    for path in (ROOT / "kvprobe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    foreign = {COMES_WITH.get(name, name) for name in imported - sys.stdlib_module_names - {"kvprobe"}}
    asked = requirements(release.metadata)
    assert foreign <= asked.keys()
    assert "extra == 'fast'" in asked["numba"]


def test_the_installed_library_gives_the_table_of_the_clone(release, main, tiny_llama, tmp_path):
    python = installed(tmp_path / "environment", release.wheel, empty=False)
    # outside the clone
    found = run(python, "-c", "import kvprobe; print(kvprobe.__file__)", cwd=tmp_path)
    assert Path(found).is_relative_to(tmp_path)
    assert run(python.with_name("kvprobe"), "--version", cwd=tmp_path).split()[-1] == kvprobe.__version__
    assert run(python, "-m", "kvprobe", *SINKS, tiny_llama, cwd=tmp_path) == main(*SINKS, tiny_llama).stdout != ""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["oldest", "pinned"])
def test_in_an_empty_environment_too_with_either_end_of_transformers(release, main, tiny_llama, tmp_path, end):
    asked = requirements(release.metadata)["transformers"]
    version = {"oldest": re.search(r">=([\d.]+)", asked)[1] + ".*", "pinned": PINNED["transformers"]}[end]
    python = installed(tmp_path / "environment", release.wheel, f"transformers=={version}", empty=True)
    assert run(python, "-m", "kvprobe", *SINKS, tiny_llama, cwd=tmp_path) == main(*SINKS, tiny_llama).stdout != ""
    # a user's type checker, without our settings
    script = ROOT / "tests" / "support" / "typed_script.py"
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", python]
    run(*mypy, "--cache-dir", tmp_path / "cache", script, cwd=tmp_path)
