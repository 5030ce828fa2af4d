"""The notebook runs from top to bottom, shows what it promises, and is kept without outputs."""

import json
import os
import warnings
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "analyses" / "tour.ipynb"


def test_the_notebook_is_kept_without_outputs():
    notebook = json.loads(TOUR.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_the_notebook_runs(tmp_path, monkeypatch):
    # what Jupyter itself warns of (its folders, its sockets) is not ours to mend
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nbclient
        import nbformat

        # a kernel of its own folder: nothing of the user's start-up files
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        monkeypatch.setenv("PYTHONPATH", f"{TOUR.parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        notebook = nbformat.read(TOUR, as_version=4)
        nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    # the rank curve shows itself as a table
    assert shown.count("text/html") == 1
    said = "".join(output.get("text", "") for output in outputs)
    assert "of all attention is on token 0" in said
    assert "basis of later tokens of the same text" in said
    assert not [output for output in outputs if output.output_type == "error"]
    # three results draw themselves
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
