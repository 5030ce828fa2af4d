"""What `import kvprobe` offers: few names, each with an example that runs, none of them heavy before it is used."""

import doctest
import subprocess
import sys

import pytest

import kvprobe
from kvprobe.attention import capture, seam
from kvprobe.experiments import evaluate
from kvprobe.generation import texts
from kvprobe.models import loading, subject
from kvprobe.probes import mass
from kvprobe.results import result

ORIGINALS = {
    "Result": result.Result,
    "attending": seam.attending,
    "capture": capture.capture,
    "evaluate": evaluate.evaluate,
    "generate": texts.generate,
    "load": loading.load,
    "prepare": subject.prepare,
    "token0_mass": mass.token0_mass,
}


def test_every_name_offered_is_the_one_of_its_module_and_is_listed():
    assert sorted(ORIGINALS) == sorted(kvprobe.__all__)
    assert {name: getattr(kvprobe, name) for name in ORIGINALS} == ORIGINALS
    assert set(ORIGINALS) <= set(dir(kvprobe))


def test_help_shows_every_name_before_any_was_used():
    code = "import kvprobe, pydoc; print(pydoc.plain(pydoc.render_doc(kvprobe)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"    {name}(" in done.stdout for name in ORIGINALS if name != "Result")
    assert "class Result" in done.stdout


def test_a_name_that_is_not_offered_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = kvprobe.nosuch


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("name", sorted(ORIGINALS))
def test_the_example_in_its_docstring_runs(name):
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(kvprobe, name), name, globs={})
    example.globs["Result"] = result.Result
    assert example.examples, f"{name} has no example"
    ran = doctest.DocTestRunner(verbose=False).run(example, out=(said := []).append)
    assert ran.failed == 0, "".join(said)
