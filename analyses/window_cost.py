"""What does a row of the window grid cost beside a plain forward?

\b
    python -m analyses.window_cost smollm2-135m

Targets at 1,024 tokens: a row of the grid within 1.3× a plain forward scored alike, for ``absolute`` and ``cache``
positions; ``recompute`` at window 128 over 511 targets, which is 511 passes, within 60×.
"""

from functools import partial

import click

from analyses.common import script, show
from analyses.timing import compare
from kvprobe.bench.busy import Watch
from kvprobe.models.subject import Subject, prepare
from kvprobe.probes.losses import token_losses
from kvprobe.probes.window_attention import windowed
from kvprobe.probes.windows import check, recompute_losses
from kvprobe.results.record import run_record
from kvprobe.results.result import Result

WINDOWS = (64, 256, 512)
RECOMPUTE_WINDOW = 128


def run(
    model: str,
    *,
    text: str = "time-machine",
    tokens: int = 1024,
    n_sink: int = 4,
    repeats: int = 7,
    recompute_repeats: int = 2,
) -> Result:
    """Rows ``way, ms_median, ms_low, ms_high, ratio``, one for each kind of row of the grid."""
    subject = prepare(model, text=text, tokens=tokens, device="cpu")
    score_from = tokens // 2
    # finds the rotation of every layer, once a model, so that it is not timed
    check(subject.model, tokens, windows=WINDOWS, sinks=[n_sink], positions="cache", score_from=score_from)
    ways = {"plain": partial(_losses, subject, score_from)}
    for window in WINDOWS:
        for n, by_slot in ((0, False), (n_sink, False), (n_sink, True)):
            name = f"window {window}, {n} sinks, {'cache' if by_slot else 'absolute'}"
            ways[name] = partial(_losses, subject, score_from, window, n, by_slot)
    watch = Watch()
    rows = compare(ways, repeats=repeats, watch=watch)
    fresh = {
        "plain": ways["plain"],
        f"window {RECOMPUTE_WINDOW}, recompute": partial(_recompute, subject, score_from),
    }
    rows += compare(fresh, repeats=recompute_repeats, warm_up=0, watch=watch)[1:]
    settings = {"repeats": repeats, "recompute_repeats": recompute_repeats, "n_sink": n_sink, "score_from": score_from}
    return Result("window_cost", rows, run_record(subject.record(), settings, watch.record()))


def _losses(subject: Subject, score_from: int, window: int = 0, n_sink: int = 0, by_slot: bool = False) -> None:
    attend = windowed(window=window, sinks=range(n_sink), by_slot=by_slot) if window else None
    token_losses(subject.model, subject.input_ids, score_from=score_from, attend=attend)


def _recompute(subject: Subject, score_from: int) -> None:
    recompute_losses(
        subject.model,
        subject.input_ids[0],
        window=RECOMPUTE_WINDOW,
        score_from=score_from,
        n_front=subject.passage.n_front,
    )


@click.command(help=__doc__)
@click.argument("model", default="smollm2-135m")
@click.option("--text", default="time-machine", show_default=True)
@click.option("--repeats", type=int, default=7, show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/window_cost.{csv,json}.")
def main(model: str, text: str, repeats: int, save: bool) -> None:
    """Print the table and keep it."""
    result = run(model, text=text, repeats=repeats)
    show(result, save=save)


if __name__ == "__main__":
    script(main)
