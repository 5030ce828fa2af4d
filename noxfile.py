"""The contract suite on every supported release of transformers: `nox` for all, `nox -s oldest` for one.

What runs is `pytest -m contract`: the seam on all tiny families that a release has, decoder parity, and the numbers of
both pulled models. `oldest` has every dependency at the lower bound of pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = [line for line in Path("constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
TORCH = next(pin for pin in PINS if pin.startswith("torch=="))
# what an older transformers wants in other versions than constraints.txt names
LOOSE = ("transformers", "huggingface_hub", "tokenizers")
BETWEEN = ("5.0.0", "5.12.1")
SUITE = ("tests/attention", "tests/decoder", "tests/models/test_older_releases.py", "tests/analyses/test_releases.py")
TESTS = ("pytest==9.2.0", "pytest-xdist==3.8.0", "hypothesis==6.170.17")


def lower_bounds() -> list[str]:
    """Every dependency, compiled kernels' too, at the lowest version that pyproject.toml allows."""
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["fast"]]
    bounds = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in wanted]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound and bound[1] != "torch"]


def contract(session: nox.Session, *pins: str, constraints: list[str] | None = None) -> None:
    """Install torch first, then kvprobe among these pins; the suite, and the numbers that are kept."""
    # torch by its exact version: anything that lets pip choose may fetch a GPU build of gigabytes
    session.install(TORCH)
    given = Path(session.create_tmp(), "constraints.txt")
    given.write_text("\n".join([TORCH, *(constraints or [])]), encoding="utf-8")
    session.install("-c", str(given), "-e", ".[fast]", *pins, *TESTS)
    report = Path(session.create_tmp(), "contract.xml").resolve()
    environment = {"OMP_NUM_THREADS": "1"}
    # an older release has warnings of its own, which no test is about
    command = (
        "python",
        "-m",
        "pytest",
        "-m",
        "contract",
        *SUITE,
        "-n",
        "2",
        "-q",
        "-W",
        "default",
        f"--junitxml={report}",
    )
    session.run(*command, env=environment)
    session.run("python", "-m", "analyses.releases", "--junit", str(report), env=environment)


@nox.session
def oldest(session: nox.Session) -> None:
    """Every dependency at its lower bound."""
    contract(session, *lower_bounds())


@nox.session
@nox.parametrize("transformers", BETWEEN, ids=BETWEEN)
def between(session: nox.Session, transformers: str) -> None:
    """A release between the two ends."""
    kept = [pin for pin in PINS if not pin.lower().replace("-", "_").startswith(LOOSE)]
    contract(session, f"transformers=={transformers}", constraints=kept)


@nox.session
def newest(session: nox.Session) -> None:
    """What constraints.txt names."""
    contract(session, constraints=PINS)
