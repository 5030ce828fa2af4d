"""The experiment that CONTRIBUTING adds is a command, a picture and a section of the page, by its three files alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvprobe.models.subject import prepare
from kvprobe.results.result import Result

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`([\w/]+\.py)`[^`]*\n\n```python\n(.*?)```\n", GUIDE, re.S))
# of the arranged sections the first: the last would compile the decoder's machine code for this copy of it
PAGE = """
import sys
from kvprobe.report import report

report.SECTIONS = report.SECTIONS[:1]
assert report.write(sys.argv[1], sys.argv[2], report.ReportConfig(tokens=48)) == []
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the library and of what its tests share, with the three files of the guide in it."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("kvprobe", "tests/support"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    for name, code in FILES.items():
        path = root / name
        assert not path.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
    return root


def python(tree, *arguments):
    """Runs Python on the copy: `.returncode`, `.stdout`, `.stderr`."""
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def test_the_guide_has_three_files_of_eighty_lines_in_all():
    assert [str(Path(name).parent) for name in FILES] == ["kvprobe/experiments", "kvprobe/plots", "tests/experiments"]
    assert sum(len(code.splitlines()) for code in FILES.values()) <= 80


def test_what_the_guide_names_is_there():
    words = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", GUIDE, flags=re.S)))
    paths = {word for word in words if re.fullmatch(r"[\w./]+\.py|\w+/[\w/]*", word) and "NAME" not in word}
    paths -= set(FILES)
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not any((ROOT / base / path).exists() for base in ("", "kvprobe"))] == []
    code = [path for base in ("kvprobe", "tests") for path in (ROOT / base).rglob("*.py")]
    there = {name for path in code for name in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    names = {name for word in words if re.fullmatch(r"[\w.]+", word) for name in re.findall(r"\w+", word)}
    assert names - there == set()


def test_it_is_a_command(tree, tiny_llama):
    files = ["--format", "json", "--out", "recent.json", "--plot", "recent.svg"]
    done = python(tree, "-m", "kvprobe", "recent", tiny_llama, "--tokens", 48, *files)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    found = Result.load(tree / "recent")
    assert (found.analysis, found.run["last"]) == ("recent", 16)
    subject = prepare(str(tiny_llama), tokens=48, device="cpu")
    subject.model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = subject.model(subject.input_ids, output_attentions=True).attentions
    for row, weights in zip(found.rows, maps, strict=True):
        # what 16 tokens hold is what the tokens before them leave
        before = [1 - weights[0, :, query, : query - 15].sum(-1) for query in range(16, 48)]
        assert row["share"] == pytest.approx(float(torch.stack(before).mean()), abs=1e-6)
    assert "share on the last 16 tokens" in (tree / "recent.svg").read_text(encoding="utf-8")
    code = "from kvprobe import Result; print(Result.load('recent').plot().axes[0].get_ylabel())"
    assert python(tree, "-c", code).stdout == "share on the last 16 tokens\n"


def test_its_help_imports_nothing_heavy(tree):
    code = (
        "import sys\nfrom kvprobe.cli.main import main\n"
        "try: main([*sys.argv[1:], '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib', 'rich', 'jinja2') if m in sys.modules])"
    )
    *said, heavy = python(tree, "-c", code, "recent").stdout.splitlines()
    assert heavy == "[]"
    assert "kvprobe recent smollm2-135m --last 16" in "\n".join(said)
    for option in ("--last", "--text", "--tokens", "--device", "--plot", "--format", "--out"):
        assert f"  {option} " in "\n".join(said)
    *said, heavy = python(tree, "-c", code).stdout.splitlines()
    assert heavy == "[]"
    assert any(re.match(r" +recent +How much of the attention is on the last tokens\?", line) for line in said)


def test_it_is_a_section_of_the_page(tree, tiny_llama):
    done = python(tree, "-c", PAGE, tiny_llama, "page.html")
    assert done.returncode == 0, done.stderr
    page = (tree / "page.html").read_text(encoding="utf-8")
    assert re.findall("<h2>(.*?)</h2>", page) == ["What the model is", "Attention on the last tokens", "Run records"]
    assert re.search(r"48 tokens \(no BOS\): \d+\.\d% is on the last 16 tokens", page)
    assert 'alt="Share of each layer&#39;s attention on the last tokens before a query."' in page


def test_its_own_test_passes(tree):
    done = python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/experiments/test_recent.py")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
