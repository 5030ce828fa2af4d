"""What the README states of the cases is what the library computes."""

import json
import re
from pathlib import Path

import pytest

from kvprobe.bill import bill
from kvprobe.errors import UnsupportedModelError
from kvprobe.families import REFUSED, known
from kvprobe.spec import Spec

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BILLS = re.findall(r"^\| ([\w-]+) \| [^|]+ \| (known|plain|refused) \|([^|]*)\|([^|]*)\|([^|]*)\|$", README, re.M)


@pytest.mark.parametrize(("name", "support", "per_token", "state", "total"), BILLS, ids=[row[0] for row in BILLS])
def test_the_table_of_bills_is_what_the_command_counts(name, support, per_token, state, total):
    config = json.loads((ROOT / "tests" / "cases" / f"{name}.json").read_text())
    if support == "refused":
        with pytest.raises(UnsupportedModelError):
            Spec.from_config(config)
        return
    spec = Spec.from_config(config)
    counted = bill(spec)
    assert spec.support == support
    assert [counted.next_token(8192), counted.state, counted.total(8192)] == [
        int(cell.replace(",", "")) for cell in (per_token, state, total)
    ]


def test_the_table_has_every_case_and_the_number_of_families():
    odd = {"jamba-like", "layers-1e9", "mlp-width-float"}
    assert {row[0] for row in BILLS} == {path.stem for path in (ROOT / "tests" / "cases").glob("*.json")} - odd
    words = " ".join(README.split())
    assert f"as its authors mean it: {len(known())} families" in words
    assert f"({len(REFUSED)} families by name" in words
