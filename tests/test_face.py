"""What `import kvprobe` offers: few names, each with an example that runs, none of them heavy before it is used."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

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


def test_every_name_offered_is_there_and_none_imports_torch():
    code = (
        "import sys, kvprobe\nfor name in kvprobe.__all__: getattr(kvprobe, name)\n"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert sorted(ORIGINALS) == sorted(kvprobe.__all__)


def test_a_name_that_is_not_offered_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = kvprobe.nosuch


@pytest.mark.parametrize("name", sorted(ORIGINALS))
def test_the_face_takes_what_the_function_behind_it_takes(name):
    face, behind = (inspect.signature(thing).parameters for thing in (getattr(kvprobe, name), ORIGINALS[name]))
    assert [(p.name, p.kind, p.default) for p in face.values()] == [
        (p.name, p.kind, p.default) for p in behind.values()
    ]


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("name", sorted(ORIGINALS))
def test_the_example_in_its_docstring_runs(name):
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(kvprobe, name), name, globs={})
    example.globs["Result"] = result.Result
    assert example.examples, f"{name} has no example"
    ran = doctest.DocTestRunner(verbose=False).run(example, out=(said := []).append)
    assert ran.failed == 0, "".join(said)


def test_types_are_shipped():
    assert Path(kvprobe.__file__).with_name("py.typed").is_file()
