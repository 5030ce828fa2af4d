"""Arrows run one way: a room imports from the rooms above it in CONTRIBUTING's table, and from no other."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from kvprobe.caches.registry import KINDS

ROOT = Path(__file__).parents[1]
TABLE = re.findall(r"^\| ((?:`\w+` ?)+)\|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
ROOMS = [room for row in TABLE for room in re.findall(r"\w+", row)]
FILES = sorted((ROOT / "kvprobe").rglob("*.py"))
# what is imported by name: (file, module)
BY_NAME = {
    ("kvprobe/results/result.py", "kvprobe.experiments.registry"),
    ("kvprobe/experiments/registry.py", "kvprobe.experiments"),
    ("kvprobe/experiments/experiment.py", "kvprobe.plots"),
    ("kvprobe/experiments/registry.py", "kvprobe.plots"),
    ("kvprobe/cli/main.py", "kvprobe.cli.commands"),
    ("kvprobe/caches/registry.py", ""),
    ("kvprobe/__init__.py", "kvprobe"),
}
ARITHMETIC = ["attention.call", "attention.masks", "attention.rope", "caches.layer", "decoder.model"]
ARITHMETIC += ["generation.generate", "probes.intervals", "probes.lowrank", "probes.losses", "probes.mass"]
ARITHMETIC += ["probes.truncation", "probes.windows", "results.result"]
# what starts the command, and the face of the library
OUTSIDE = {"kvprobe/__init__.py", "kvprobe/__main__.py"}


def imported(tree):
    """Every module of the library that a file names in an import, wherever it stands, or gives to import_module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            # of the package itself, rooms and what it offers
            yield from (
                f"{node.module}.{alias.name}" if node.module == "kvprobe" else node.module for alias in node.names
            )
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            yield from (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))


def arrows():
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
            parts = str(module).strip(".").split(".")
            if name not in OUTSIDE and parts[0] == "kvprobe" and parts[-1] != "__version__":
                yield name, path.relative_to(ROOT / "kvprobe").with_suffix("").parts[0], ".".join(parts), parts[1]


def test_the_table_names_every_room_and_no_other():
    assert len(ROOMS) == len(set(ROOMS))
    there = {path.stem if path.is_file() else path.name for path in (ROOT / "kvprobe").iterdir()}
    assert set(ROOMS) == there - {"__init__", "__main__", "__pycache__", "data", "py"}


def test_no_room_imports_from_one_below_it():
    found = [(name, module) for name, room, module, other in arrows() if ROOMS.index(other) > ROOMS.index(room)]
    assert set(found) == {pair for pair in BY_NAME if "results" in pair[0]}


def test_no_import_runs_in_a_circle():
    module_of = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES}
    graph = {}
    for path, name in module_of.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # what only type checkers import never runs
        guarded = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        skipped = {inner for node in guarded for inner in ast.walk(node)}
        graph[name] = {
            target
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node not in skipped
            for alias in node.names
            for target in (f"{node.module}.{alias.name}", node.module)
            if target in module_of.values()
        }
    # raises CycleError, naming the circle
    assert len([*TopologicalSorter(graph).static_order()]) == len(FILES)


def test_what_is_imported_by_name_is_listed():
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
                constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                # "": what a table in the file says
                module = constants[0] if constants else ""
                found.add((path.relative_to(ROOT).as_posix(), module.strip(".")))
    assert found == BY_NAME
    assert all(where.startswith("kvprobe.caches.") for where in KINDS.values())


def test_no_test_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[-1].startswith(("test_", "conftest"))], path


@pytest.mark.parametrize("module", ARITHMETIC)
def test_arithmetic_imports_no_transformers(module):
    code = f"import sys, kvprobe.{module}; print('transformers' in sys.modules, 'kvprobe.cli' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_importing_kvprobe_imports_nothing_heavy():
    code = "import sys, kvprobe; print(sorted({'torch', 'numpy', 'transformers', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
