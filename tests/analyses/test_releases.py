"""Every supported release of transformers gives the numbers that are kept, and a changed one is noticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from analyses import releases
from kvprobe.errors import KvprobeError
from kvprobe.models.subject import prepare
from kvprobe.results.result import Result

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    kept = Result.load(releases.KEPT / releases.REFERENCE)
    return {(row["model"], row["quantity"]): row["value"] for row in kept.rows}


def assert_as_kept(loaded, reference):
    found = dict(releases.numbers(prepare(loaded.name, tokens=releases.N_TOKENS)))
    wanted = {quantity: value for (model, quantity), value in reference.items() if model == loaded.name}
    assert list(found) == list(wanted)
    assert len(found) == 11
    for quantity, value in found.items():
        within = 1e-5 if quantity.startswith(("loss", "attention")) else 0
        assert abs(value - wanted[quantity]) <= within, (quantity, value, wanted[quantity])


@pytest.mark.contract
@pytest.mark.smollm2
def test_smollm2_gives_the_kept_numbers(smollm2, reference):
    assert_as_kept(smollm2, reference)


@pytest.mark.contract
@pytest.mark.gemma3
def test_gemma_gives_the_kept_numbers(gemma3, reference):
    assert_as_kept(gemma3, reference)


def seam_tests(*plugins):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *plugins]
    command += ["tests/attention/test_seam.py", "-k", "test_hooked_logits_equal_the_plain_models and llama"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_release_that_renames_an_argument_of_attention_is_caught():
    whole, renamed = seam_tests(), seam_tests("-p", "support.renamed_argument")
    assert (whole.returncode, renamed.returncode) == (0, 1), whole.stdout + renamed.stdout
    assert "attention is given scale, which kvprobe does not honour in layer 0" in renamed.stdout


def test_the_readme_has_the_table_of_the_kept_releases():
    rows = releases.collect().rows
    assert rows == Result.load(releases.KEPT.with_suffix("")).rows
    assert releases.markdown(rows) in (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(row["same_ids"] and row["same_bytes"] and not row["failed"] for row in rows)
    assert max(row[f"max_{what}_difference"] for row in rows for what in ("loss", "mass")) < 1e-5


def rows_of(**values):
    return [{"model": "m", "quantity": quantity, "value": value} for quantity, value in values.items()]


def test_differences_are_those_of_each_kind():
    before = rows_of(**{"token ids (checksum)": 7, "loss, full": 3.0, "attention on token 0, layer 1": 0.5})
    before += rows_of(**{"loss, rank 64": 4.0, "cache bytes, 1,024 tokens": 10})
    after = [
        row | {"value": row["value"] + change} for row, change in zip(before, (0, 0.25, -0.125, -0.5, 1), strict=True)
    ]
    assert releases.differences(after, before) == {
        "max_loss_difference": 0.5,
        "max_mass_difference": 0.125,
        "same_ids": True,
        "same_bytes": False,
    }
    with pytest.raises(KvprobeError, match="loss, full of m stands where token ids"):
        releases.differences([before[1]], [before[0]])


def test_counts_are_read_from_the_report_of_the_suite(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="10" failures="1" errors="2" skipped="3"/></testsuites>')
    assert releases._counts(report) == {"passed": 4, "skipped": 3, "failed": 3}
