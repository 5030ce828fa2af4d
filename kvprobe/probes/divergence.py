"""How far is a changed model's next-token distribution from the unchanged one's? KL divergence and top-1 agreement."""

from typing import NamedTuple

import torch
from torch import Tensor

from kvprobe.attention.language_model import LanguageModel

# positions whose logits are held at a time: in float64, twice, and their exponentials
CHUNK = 64


class Divergence(NamedTuple):
    """By target: ``kld`` float64 ``[n_targets]`` in nat, and whether both put the same token first, bool."""

    kld: Tensor
    agrees: Tensor


@torch.no_grad()
def divergence(model: LanguageModel, full: Tensor, changed: Tensor, *, chunk: int = CHUNK) -> Divergence:
    """KL(full ‖ changed) of the distributions after hidden states ``full`` and ``changed``, ``[1, n_targets, hidden]``.

    Both are as :func:`kvprobe.probes.losses.scored_pass` gives them; ``chunk`` positions are compared at a time. A
    vocabulary's 100,000 terms are small and of both signs: they are computed and summed in float64.
    """
    klds, agreed = [], []
    for one, other in zip(full.split(chunk, dim=1), changed.split(chunk, dim=1), strict=True):
        p, q = (model.logits(hidden)[0] for hidden in (one, other))
        agreed.append((p.argmax(-1) == q.argmax(-1)).cpu())
        p, q = (logits.double().log_softmax(-1) for logits in (p, q))
        # a token that neither can give (a logit of minus infinity) has 0 · (−∞ − −∞)
        terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
        # rounding can put a sum of 0 below it
        klds.append(terms.sum(-1).clamp_min(0).cpu())
    return Divergence(torch.cat(klds), torch.cat(agreed))
