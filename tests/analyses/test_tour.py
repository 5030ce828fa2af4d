"""The notebook runs from top to bottom, shows what it promises, and is kept without outputs."""

import json
from pathlib import Path

import pytest

from support.notebooks import executed, outputs

TOUR = Path(__file__).parents[2] / "analyses" / "tour.ipynb"


def test_the_notebook_is_kept_without_outputs():
    notebook = json.loads(TOUR.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_the_notebook_runs(tmp_path, monkeypatch):
    said_by = outputs(executed(TOUR, tmp_path, monkeypatch))
    shown = [kind for output in said_by for kind in output.get("data", {})]
    # the rank curve shows itself as a table
    assert shown.count("text/html") == 1
    said = "".join(output.get("text", "") for output in said_by)
    assert "of all attention is on token 0" in said
    assert "basis of later tokens of the same text" in said
    assert not [output for output in said_by if output.output_type == "error"]
    # three results draw themselves
    pictures = [output for output in said_by if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
