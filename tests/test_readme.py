"""What the README states of the cases is what the library computes."""

import csv
import json
import re
from pathlib import Path

import pytest

from kvprobe.errors import UnsupportedModelError
from kvprobe.shape.cache_bytes import bill
from kvprobe.shape.families import REFUSED, known
from kvprobe.shape.spec import Spec

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


def test_the_speed_table_is_the_kept_result():
    with (ROOT / "results" / "decode_speed.csv").open(encoding="utf-8", newline="") as file:
        kept = {(row["phase"], row["way"]): row for row in csv.DictReader(file)}
    printed = {
        "transformers' `generate`, DynamicCache": "Hugging Face, DynamicCache",
        "transformers' `generate`, StaticCache": "Hugging Face, StaticCache",
        "kvprobe, torch": "ours, torch",
        "kvprobe, compiled": "ours, fastest",
    }
    section = README[README.index("Speed of the decoder") : README.index("## Models that were run")].replace("**", "")
    rows = re.findall(r"^\| ([^|]*\w[^|]*) \| (\S+) s \| (\S+) ms \| (\S+) \|$", section, re.M)
    assert rows == [
        (
            shown,
            f"{float(kept['prefill', way]['ms_median']) / 1000:.2f}",
            f"{float(kept['decode', way]['ms_median']):.1f}",
            f"{float(kept['decode', way]['fraction']):.2f}",
        )
        for shown, way in printed.items()
    ]
    token, prompt = (float(kept[phase, "ours, fastest"]["speedup"]) for phase in ("decode", "prefill"))
    assert f"is {token:.2f} for a token and {prompt:.2f} for the prompt" in " ".join(section.split())


def test_the_readme_gives_a_bill_in_the_units_of_the_command(main):
    command, token, total = re.search(
        r"`kvprobe (cache llama-2-70b [^`]*)` \| (\S+ \S+) a token: at this context the cache reaches (\S+ \S+) \|",
        README,
    ).groups()
    done = main(*command.split())
    row = next(line for line in done.stdout.splitlines() if line.startswith("as it is"))
    assert f"  {total}  " in row
    assert f"  {token}  " in row


def test_installing_says_first_what_is_fetched():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("$(INSTALLED): ")[-1].splitlines()[1:]
    assert re.match(r'\t@echo "Fetching torch .* GB on disk', recipe[0])
