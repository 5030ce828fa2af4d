"""How does a trained decoder get fewer key/value heads? Groups of neighbours are pooled by their mean."""

from dataclasses import replace

import torch
from torch import Tensor

from kvprobe.decoder.model import Attention, Decoder


@torch.no_grad()
def pool_kv_heads(decoder: Decoder, n_kv_heads: int) -> Decoder:
    """The decoder with ``n_kv_heads`` key/value heads, each the mean of a group of neighbours (Ainslie et al., 2023).

    The projections of K and V, and their biases, are averaged; all else is copied, and the decoder given is unchanged.
    A query head then reads the mean of its group's keys and values; if a family normalises keys after their projection
    (qwen3, gemma3) its keys are the normalised mean, not the mean of normalised keys. Raises ValueError unless
    ``n_kv_heads`` divides the decoder's: heads can only be merged, and only into groups of one size.
    """
    has = decoder.config.n_kv_heads
    if not 1 <= n_kv_heads <= has or has % n_kv_heads:
        allowed = ", ".join(str(n) for n in range(1, has + 1) if has % n == 0)
        raise ValueError(f"{has} key/value heads cannot be pooled to {n_kv_heads} evenly: it can be {allowed}")
    with torch.device("meta"):
        shared = Decoder(replace(decoder.config, n_kv_heads=n_kv_heads))
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    for path, module in decoder.named_modules():
        if isinstance(module, Attention):
            for name in ("key", "value"):
                for leaf in dict(module.get_submodule(name).named_parameters()):
                    full = f"{path}.{name}.{leaf}"
                    state[full] = _pooled(state[full], n_kv_heads, decoder.config.head_dim)
    shared.load_state_dict(state, assign=True)
    for ours, theirs in zip(shared.parameters(), decoder.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return shared.train(decoder.training)


def _pooled(rows: Tensor, n_kv_heads: int, head_dim: int) -> Tensor:
    # [n_kv_heads * group * head_dim, ...] -> [n_kv_heads * head_dim, ...]; in float64, where the mean of three equal
    # numbers is that number
    heads = rows.unflatten(0, (n_kv_heads, -1, head_dim))
    return heads.double().mean(dim=1).flatten(0, 1).to(rows.dtype)
