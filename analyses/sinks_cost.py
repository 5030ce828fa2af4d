"""What does measuring attention mass cost beside a plain forward, in time and in memory?

\b
    python -m analyses.sinks_cost smollm2-135m --tokens 1024 --tokens 8192

Targets: token 0 within 1.1× a plain sdpa forward and 1 GiB beyond the weights at 1,024 and 8,192 tokens; every
position within 1.6× at 1,024. Memory is the growth of the process's peak resident size during the call, measured in a
process of its own, since a peak never falls.
"""

import json
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
import torch

from analyses.common import script, show
from analyses.timing import compare
from kvprobe.bench.busy import Watch
from kvprobe.models.subject import Subject, prepare
from kvprobe.probes import mass
from kvprobe.results.record import run_record
from kvprobe.results.result import Result

GIB = 1 << 30


def run(model: str, tokens: list[int], *, text: str = "time-machine", repeats: int = 7) -> Result:
    """Rows ``tokens, way, ms_median, ms_low, ms_high, ratio, peak_gib`` for each of ``tokens`` and way."""
    rows, records, watch = [], [], Watch()
    for n_tokens in tokens:
        subject = prepare(model, text=text, tokens=n_tokens, device="cpu")
        peaks = {way: _peak_in_a_fresh_process(model, text, n_tokens, way) for way in WAYS}
        ways = {way: partial(call, subject) for way, call in WAYS.items()}
        records.append(subject.record() | {"repeats": repeats if n_tokens <= 2048 else min(repeats, 3)})
        for row in compare(ways, repeats=records[-1]["repeats"], watch=watch):
            rows.append({"tokens": n_tokens, **row, "peak_gib": peaks[row["way"]]})
    # the first passage's record, and what differs by length
    by_length = {name: [record[name] for record in records] for name in ("n_tokens", "repeats")}
    return Result("sinks_cost", rows, run_record(records[0] | by_length, watch.record()))


@torch.no_grad()
def _plain(subject: Subject) -> None:
    subject.model.base_model(input_ids=subject.input_ids, use_cache=False)


WAYS = {
    "plain": _plain,
    "token 0": lambda subject: mass.measure(subject.model, subject.input_ids),
    "every position": lambda subject: mass.measure(subject.model, subject.input_ids, positions=True),
}


def _peak_in_a_fresh_process(model: str, text: str, n_tokens: int, way: str) -> float:
    arguments = json.dumps([model, text, n_tokens, way])
    code = f"from analyses.sinks_cost import _print_peak; _print_peak(*{arguments})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def _print_peak(model: str, text: str, n_tokens: int, way: str) -> None:
    subject = prepare(model, text=text, tokens=n_tokens, device="cpu")
    # touch every weight first: files are mapped lazily, and their pages would count as the call's
    sum(float(parameter.sum()) for parameter in subject.model.parameters())
    before = _peak_bytes()
    WAYS[way](subject)
    print((_peak_bytes() - before) / GIB)


def _peak_bytes() -> int:
    if sys.platform == "linux":
        # not getrusage: what it calls the peak of a new process is that of the one that started it, if that is larger
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@click.command(help=__doc__)
@click.argument("model", default="smollm2-135m")
@click.option("--tokens", type=int, multiple=True, default=(1024, 8192), show_default=True)
@click.option("--text", default="time-machine", show_default=True)
@click.option("--repeats", type=int, default=7, show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/sinks_cost.{csv,json}.")
def main(model: str, tokens: tuple[int, ...], text: str, repeats: int, save: bool) -> None:
    """Print the table and keep it."""
    result = run(model, list(tokens), text=text, repeats=repeats)
    show(result, save=save)


if __name__ == "__main__":
    script(main)
