"""Does a KV cache change the logits? By no more than rounding: the published two small decoders, and any model.

\b
    python -m analyses.same_logits
    python -m analyses.same_logits smollm2-135m

Protocol of Dive into Deep Learning, "Generation and the KV cache": 3 blocks, 128 wide, 4 heads, a vocabulary of 97,
random weights, 48 random tokens at float32: one pass over all of them against a prefill of 16 and 32 decode steps.
Published, the greatest difference of any logit: RoPE 3.65e-7 (JAX 9.39e-7), learned positions 3.32e-7 (8.34e-7).
Rounding depends on kernels: only the order of magnitude can be compared.
"""

import click
import torch
from torch import Tensor

from analyses.common import keep, load, script, show
from kvprobe.cli.console import progress_bar
from kvprobe.decoder.config import DecoderConfig, Rotary
from kvprobe.decoder.model import Decoder, from_hf
from kvprobe.progress import Progress, silent
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row
from kvprobe.training.loop import seeded

VOCAB = 97


@torch.no_grad()
def run(
    model: str | None = None,
    *,
    tokens: int = 48,
    prefill: int = 16,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """Rows ``decoder, positions, max_abs_difference, max_abs_logit`` of the two published shapes and of ``model``.

    ``max_abs_logit`` says what the difference is small against; without a ``model`` there are the two shapes alone.
    """
    if not 1 <= prefill < tokens:
        raise ValueError(f"prefill must be between 1 and {tokens - 1} for {tokens} tokens, got {prefill}")
    record = {"model": model, "revision": None, "source": "random weights", "dtype": "float32", "device": "cpu"}
    rows = []
    for positions in ("rope", "learned"):
        decoder = published(positions, seed=seed)
        rows.append(_row("3 blocks, 128 wide, random weights", positions, decoder, tokens, prefill, seed))
    if model is not None:
        loaded = load(model, progress=progress)
        record = loaded.record()
        decoder = from_hf(loaded.model)
        rows.append(_row(loaded.name, loaded.spec.position, decoder, tokens, prefill, seed))
    return Result("same_logits", rows, run_record(record, n_tokens=tokens, n_prefill=prefill, seed=seed))


def published(positions: str, *, seed: int = 0) -> Decoder:
    """The published small decoder with ``rope`` or ``learned`` positions, its weights drawn with ``seed``."""
    config = DecoderConfig(
        n_layers=3,
        n_heads=4,
        n_kv_heads=4,
        head_dim=32,
        hidden=128,
        # 8/3 of the width, as the text builds its SwiGLU
        mlp_width=341,
        vocab=VOCAB,
        max_positions=1024,
        rotary=Rotary(interleaved=True) if positions == "rope" else None,
    )
    return seeded(config, seed=seed).eval().requires_grad_(False)


def _row(name: str, positions: str, decoder: Decoder, tokens: int, prefill: int, seed: int) -> Row:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(decoder.config.vocab, (1, tokens), generator=generator).to(decoder.embedding.weight.device)
    at_once = decoder(ids)
    cache = decoder.full_cache(tokens)
    parts: list[Tensor] = [decoder(ids[:, :prefill], cache=cache)]
    parts += [decoder(ids[:, i : i + 1], cache=cache) for i in range(prefill, tokens)]
    return {
        "decoder": name,
        "positions": positions,
        "n_tokens": tokens,
        "n_prefill": prefill,
        "max_abs_difference": float((torch.cat(parts, dim=1) - at_once).abs().max()),
        "max_abs_logit": float(at_once.abs().max()),
    }


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--tokens", type=int, default=48, show_default=True)
@click.option("--prefill", type=int, default=16, show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/same_logits.{csv,json}.")
def main(model: str | None, tokens: int, prefill: int, save: bool) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(model, tokens=tokens, prefill=prefill, progress=progress)
    # four decimals would show zeros
    shown = [row | {"max_abs_difference": f"{row['max_abs_difference']:.2e}"} for row in result.rows]
    show(Result(result.analysis, shown, result.run), save=False)
    if save:
        keep(result)


if __name__ == "__main__":
    script(main)
