"""A notebook, run from top to bottom in a kernel of its own."""

import os
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]


def executed(path, folder, monkeypatch):
    """The notebook at ``path`` with its outputs, run in ``folder`` on this clone."""
    # what Jupyter itself warns of (its folders, its sockets) is not ours to mend
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nbclient
        import nbformat

        # a kernel of its own folder: nothing of the user's start-up files
        monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def outputs(notebook):
    """All outputs of its cells, in order."""
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]
