"""Does another release of transformers give the same numbers? Measured with the installed one, and collected.

\b
    python -m analyses.releases                  # the installed release, into results/releases/
    python -m analyses.releases --collect        # the table of all kept releases, results/releases.csv and .json

`nox` runs both on every supported release, after the contract suite (`pytest -m contract`), whose counts it keeps.
"""

import hashlib
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import click
import transformers

from analyses.common import script, show
from kvprobe.cli.console import notice, progress_bar
from kvprobe.errors import KvprobeError
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.experiments.sinks import Sinks
from kvprobe.experiments.window import Window
from kvprobe.models.loading import load
from kvprobe.models.subject import Subject, prepare
from kvprobe.probes.losses import token_losses
from kvprobe.probes.quantised import quantising
from kvprobe.progress import Progress, silent
from kvprobe.results.record import versions
from kvprobe.results.result import Result, Row
from kvprobe.shape.cache_bytes import bill

MODELS = ("smollm2-135m", "gemma3-270m")
N_TOKENS = 256
CONTEXTS = (1024, 8192)
KEPT = Path(__file__).parents[1] / "results" / "releases"
REFERENCE = "5.24.0"
"""The release that the others are compared with: that of constraints.txt."""
COUNTS = ("passed", "skipped", "failed")


def run(*, junit: Path | None = None, progress: Progress = silent) -> Result:
    """Rows ``model, quantity, value`` of both pulled models under the installed release.

    ``junit`` is the XML report of the contract suite, whose counts go into the record. Raises KvprobeError for a model
    that is not on this machine.
    """
    rows: list[Row] = []
    for name in MODELS:
        subject = prepare(load(name, progress=progress), tokens=N_TOKENS)
        rows += ({"model": name, "quantity": quantity, "value": value} for quantity, value in numbers(subject))
    packages = ("transformers", "torch", "numpy", "huggingface_hub", "tokenizers", "click")
    record = {"models": [*MODELS], "n_tokens": N_TOKENS, "versions": versions(*packages)}
    return Result("releases", rows, record | ({} if junit is None else {"contract": _counts(junit)}))


def numbers(subject: Subject) -> Iterator[tuple[str, float]]:
    """What must not depend on the release: ids (a checksum), losses in nat, masses, and bytes.

    The losses are over the second half of the passage. Raises as the experiments ``window``, ``lowrank``, ``sinks`` do.
    """
    ids = subject.input_ids
    yield "token ids (checksum)", int(hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:8], 16)
    full, windowed = Window(windows=(64,), sinks=(0,)).run(subject).rows
    yield "loss, full", full["loss"]
    yield "loss, window 64", windowed["loss"]
    yield "loss, rank 64", Lowrank(ranks=(64,)).run(subject).rows[1]["loss"]
    losses = token_losses(subject.model, ids, score_from=N_TOKENS // 2, attend=quantising(4))
    yield "loss, 4 bits", float(losses.mean())
    masses = Sinks().run(subject).rows
    for part in range(4):
        row = masses[part * (len(masses) - 1) // 3]
        yield f"attention on token 0, layer {row['layer']}", row["mass"]
    for context in CONTEXTS:
        yield f"cache bytes, {context:,} tokens", bill(subject.loaded.spec, subject.loaded.dtype).total(context)


def collect() -> Result:
    """A row for each kept release: what was installed, the contract suite's counts, and how far its numbers are off.

    Raises KvprobeError if no release, or not the one to compare with, is kept.
    """
    kept = {path.stem: Result.load(path.with_suffix("")) for path in KEPT.glob("*.json")}
    if REFERENCE not in kept:
        raise KvprobeError(f"results/releases has no {REFERENCE}: run `nox -s newest` first")
    reference = kept[REFERENCE].rows
    rows = []
    for release in sorted(kept, key=lambda name: [int(part) for part in name.split(".")]):
        found = kept[release]
        rows.append(found.run["versions"] | found.run["contract"] | differences(found.rows, reference))
    return Result("releases", rows, {"reference": REFERENCE, "models": [*MODELS], "n_tokens": N_TOKENS})


def markdown(rows: list[Row]) -> str:
    """The table of the README: a line for each release."""
    heads = ("transformers", "torch", "numpy", "hub client", "click", "tests passed, skipped", "largest difference")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        apart = f"{row['max_loss_difference']:.1e} nat, {row['max_mass_difference']:.1e} of mass"
        if row["transformers"] == REFERENCE:
            apart = "compared with"
        same = [row[name] for name in ("transformers", "torch", "numpy", "huggingface_hub", "click")]
        counts = f"{row['passed']}, {row['skipped']}"
        lines.append(f"| {' | '.join([*same, counts, apart])} |")
    return "\n".join(lines)


def differences(rows: list[Row], reference: list[Row]) -> Row:
    """The greatest differences of losses (nat) and masses, and whether ids and bytes are the same."""
    found: Row = {"max_loss_difference": 0.0, "max_mass_difference": 0.0, "same_ids": True, "same_bytes": True}
    for row, same in zip(rows, reference, strict=True):
        name, apart = row["quantity"], abs(row["value"] - same["value"])
        if (row["model"], name) != (same["model"], same["quantity"]):
            raise KvprobeError(f"{name} of {row['model']} stands where {same['quantity']} should: measure again")
        if name.startswith("token ids"):
            found["same_ids"] &= apart == 0
        elif name.startswith("cache bytes"):
            found["same_bytes"] &= apart == 0
        else:
            key = "max_loss_difference" if name.startswith("loss") else "max_mass_difference"
            found[key] = max(found[key], apart)
    return found


def _counts(junit: Path) -> dict[str, int]:
    suite = next(ET.parse(junit).getroot().iter("testsuite"))
    n = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = n["failures"] + n["errors"]
    return dict(zip(COUNTS, (n["tests"] - failed - n["skipped"], n["skipped"], failed), strict=True))


@click.command(help=__doc__)
@click.option("--junit", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Report of the suite.")
@click.option("--collect", "collects", is_flag=True, help="Make the table of all kept releases.")
def main(junit: Path | None, collects: bool) -> None:
    """Measure, or collect, and keep."""
    if collects:
        result = collect()
        show(result, save=True)
        click.echo(f"\nFor the README:\n\n{markdown(result.rows)}")
        return
    with progress_bar(quiet=False) as progress:
        result = run(junit=junit, progress=progress)
    KEPT.mkdir(parents=True, exist_ok=True)
    result.save(KEPT / transformers.__version__)
    show(result, save=False)
    notice(json.dumps(result.run["versions"]))


if __name__ == "__main__":
    script(main)
