"""What does one rank cost beside a plain forward, and what does a sweep share?

\b
    python -m analyses.lowrank_cost smollm2-135m

Targets at 1,024 tokens: a rank within 1.5× a plain forward on SmolLM2-135M (width 384, 30 layers) and within 2.5× on
a model of GPT-2's size (width 1,536, 12 layers, random weights: the model name ``gpt2-size``). A plain forward is the
model's own, with all its logits. The rejected decompositions are timed too, on this model's own matrices: LAPACK's
gesdd, behind torch.linalg.svd, is slower and has outliers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor

from analyses.common import script, show
from analyses.timing import compare
from kvprobe.attention.language_model import observe
from kvprobe.bench.busy import Watch
from kvprobe.models.subject import prepare
from kvprobe.probes.losses import token_losses
from kvprobe.probes.lowrank import View, fit, gram_vectors
from kvprobe.probes.truncation import fit_layers, sweep, truncating
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row

GPT2_SIZE = "gpt2-size"
SWEEP = 8


@torch.no_grad()
def run(model: str, *, text: str = "bundled", tokens: int = 1024, repeats: int = 7) -> Result:
    """Rows ``way, ms_median, ms_low, ms_high, ratio``: whole passes against the plain one, then single matrices."""
    network, ids, record = _subject(model, text, tokens)
    score_from = tokens // 2
    view = View.on(network)
    matrices = list(observe(network, ids, view.matrix).values())
    width = matrices[0].shape[-1]
    limit = min(width, tokens)
    bases = fit_layers(network, ids, view)

    def cut(rank: int, known: Any) -> Tensor:
        ranks = dict.fromkeys(range(len(matrices)), rank)
        attend = truncating(view, ranks, known)
        return token_losses(network, ids, score_from=score_from, attend=attend)

    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: network(input_ids=ids, use_cache=False),
        "untruncated losses": partial(token_losses, network, ids, score_from=score_from),
        f"oracle, rank {limit // 2}": partial(cut, limit // 2, None),
        f"oracle, rank {limit // 8}": partial(cut, limit // 8, None),
        f"fitted before, rank {limit // 2}": partial(cut, limit // 2, bases),
        f"oracle, sweep of {SWEEP}": lambda: sweep(
            network, ids, ranks=[limit * (i + 1) // (SWEEP + 1) for i in range(SWEEP)], score_from=score_from
        ),
    }
    watch = Watch()
    rows = compare(ways, repeats=repeats, watch=watch)
    middle = matrices[len(matrices) // 2]
    alone: dict[str, Callable[[], object]] = {
        "one matrix, eigh of its Gram matrix": partial(gram_vectors, middle),
        "one matrix, a basis for other rows": partial(fit, middle),
        "one matrix, svd (gesdd)": partial(torch.linalg.svd, middle, full_matrices=False),
    }
    rows += compare(alone, repeats=repeats, watch=watch)
    settings = {"width": width, "repeats": repeats, "score_from": score_from}
    return Result("lowrank_cost", [_with_share(row) for row in rows], run_record(record, settings, watch.record()))


def _with_share(row: Row) -> Row:
    """The ratio for one rank, where a row is a sweep of several (its full pass included)."""
    return {**row, "ratio_per_rank": row["ratio"] / SWEEP if "sweep" in row["way"] else None}


def _subject(model: str, text: str, tokens: int) -> tuple[Any, Tensor, dict[str, Any]]:
    threads = {"threads": torch.get_num_threads()}
    if model != GPT2_SIZE:
        subject = prepare(model, text=text, tokens=tokens, device="cpu")
        return subject.model, subject.input_ids, subject.record() | threads
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False)
    ids = torch.randint(50257, (1, tokens), generator=torch.Generator().manual_seed(0))
    return network, ids, {"model": GPT2_SIZE, "passage": "random ids", "n_tokens": tokens, **threads}


@click.command(help=__doc__)
@click.argument("model", default="smollm2-135m")
@click.option("--text", default="bundled", show_default=True)
@click.option("--tokens", type=int, default=1024, show_default=True)
@click.option("--repeats", type=int, default=7, show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/lowrank_cost.{csv,json}.")
def main(model: str, text: str, tokens: int, repeats: int, save: bool) -> None:
    """Print the table and keep it."""
    result = run(model, text=text, tokens=tokens, repeats=repeats)
    show(result, save=save)


if __name__ == "__main__":
    script(main)
