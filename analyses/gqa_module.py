"""What does sharing key/value heads change in the attention module itself? Parameters, cache bytes, and exactness.

\b
    python -m analyses.gqa_module
    python -m analyses.gqa_module smollm2-135m       the width and heads of another model

Protocol of Dive into Deep Learning, "Generation and the KV cache": width 256, 8 query heads, no bias, n_kv_heads 8,
4, 2 and 1. Published: attention parameters 262,144, 196,608, 163,840, 147,456; float32 cache 2,048, 1,024, 512, 256
bytes per token and layer; n_kv_heads = n_heads is multi-head attention exactly. Every other row is multi-head
attention as well, with each key/value head repeated for its group: both are run here, the latter through torch's own
attention. ``cache_bytes_per_token`` is that of the six layers in which the text goes on to train them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from analyses.common import keep, script, show
from kvprobe.attention.call import AttentionCall
from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.model import Decoder
from kvprobe.experiments.cache import find_shape
from kvprobe.progress import Progress, silent
from kvprobe.results.record import run_record
from kvprobe.results.result import Result, Row
from kvprobe.shape.parameters import attention_parameters
from kvprobe.training.loop import seeded

KV_HEADS = (8, 4, 2, 1)
TOKENS = 32


def run(
    model: str | None = None,
    *,
    hidden: int = 256,
    n_heads: int = 8,
    kv_heads: Sequence[int] = KV_HEADS,
    n_layers: int = 6,
    seed: int = 0,
    progress: Progress = silent,
) -> Result:
    """Rows ``n_kv_heads, attention_params, cache_bytes_per_token_layer, cache_bytes_per_token, max_abs_difference``.

    Counted in the modules and buffers themselves; the parameters also by the closed form. The difference is that of
    the logits to multi-head attention with the same, repeated, heads. Of a ``model`` its width, heads, head_dim and
    layers are taken, by its configuration alone, and every number of key/value heads that divides them.
    """
    head_dim = hidden // n_heads
    about: dict[str, Any] = {"model": None}
    if model is not None:
        shape = find_shape(model, progress=progress)
        spec, about = shape.spec, shape.record()
        hidden, n_heads, head_dim, n_layers = spec.hidden_size, spec.n_heads, spec.head_dim, spec.n_layers
        kv_heads = [n for n in range(n_heads, 0, -1) if n_heads % n == 0]
    rows: list[Row] = []
    for n_kv_heads in kv_heads:
        progress("numbers of key/value heads", len(rows), len(kv_heads))
        shape = {"hidden": hidden, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
        rows.append(_row(shape, n_layers, seed))
    settings = {"hidden": hidden, "n_heads": n_heads, "head_dim": head_dim, "n_layers": n_layers}
    return Result("gqa_module", rows, run_record(about, settings, dtype="float32", device="cpu", seed=seed))


@torch.no_grad()
def _row(shape: dict[str, Any], n_layers: int, seed: int) -> Row:
    # one layer is enough: of `n_layers` there are as many of each
    config = DecoderConfig(n_layers=1, **shape, mlp_width=shape["hidden"], vocab=97, max_positions=TOKENS)
    shared = seeded(config, seed=seed).eval().requires_grad_(False)
    cache = shared.full_cache(TOKENS)
    per_token = cache.nbytes // TOKENS
    ids = torch.randint(config.vocab, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    difference = shared(ids) - multi_head(shared)(ids, attend=_plain)
    n_heads, n_kv_heads, head_dim = shape["n_heads"], shape["n_kv_heads"], shape["head_dim"]
    return {
        "n_kv_heads": n_kv_heads,
        "attention_params": sum(part.numel() for name, part in shared.named_parameters() if ".attention." in name),
        "closed_form_params": attention_parameters(
            hidden_size=shape["hidden"], n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim
        ),
        "cache_bytes_per_token_layer": per_token,
        "cache_bytes_per_token": n_layers * per_token,
        "max_abs_difference": float(difference.abs().max()),
    }


def _plain(call: AttentionCall) -> Tensor:
    """Multi-head attention as torch has it, which knows nothing of groups."""
    assert call.query.shape == call.key.shape
    return F.scaled_dot_product_attention(call.query, call.key, call.value, is_causal=True)


def multi_head(decoder: Decoder) -> Decoder:
    """The same decoder as multi-head attention: each key/value head repeated for every query head of its group."""
    config = decoder.config
    group_size = config.n_heads // config.n_kv_heads
    weights = decoder.state_dict()
    for name, weight in weights.items():
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            heads = weight.unflatten(0, (config.n_kv_heads, config.head_dim))
            weights[name] = heads.repeat_interleave(group_size, dim=0).flatten(0, 1)
    plain = Decoder(replace(config, n_kv_heads=config.n_heads)).eval().requires_grad_(False)
    plain.load_state_dict(weights)
    return plain


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--save/--no-save", default=True, help="Keep results/gqa_module.{csv,json}.")
def main(model: str | None, save: bool) -> None:
    """Print the table and keep it."""
    result = run(model)
    # four decimals would show zeros
    shown = [row | {"max_abs_difference": f"{row['max_abs_difference']:.1e}"} for row in result.rows]
    show(Result(result.analysis, shown, result.run), save=False)
    if save:
        keep(result)


if __name__ == "__main__":
    script(main)
