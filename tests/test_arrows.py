"""Arrows run one way: arithmetic knows tensors, not transformers."""

import subprocess
import sys

import pytest

ARITHMETIC = ["masks", "attention", "rope", "mass", "lowrank", "scoring", "windows", "truncation", "caches"]
ARITHMETIC += ["decoder", "generate", "results"]


@pytest.mark.parametrize("module", ARITHMETIC)
def test_arithmetic_imports_no_transformers(module):
    code = f"import sys, kvprobe.{module}; print('transformers' in sys.modules, 'kvprobe.cli.main' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_importing_kvprobe_imports_nothing_heavy():
    code = "import sys, kvprobe; print(sorted({'torch', 'numpy', 'transformers', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
