"""Where does attention go? Mass on token 0 or on any position, per layer and head, without ever holding a map.

The weight of one key needs no map: ``weight(q, k) = exp(score(q, k) - lse(q))``, and the kernel that computes
attention gives the log-sum-exp ``lse`` for nothing. The share of every position needs every weight, a block of queries
at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.language_model import Attended, language_model, observe
from kvprobe.errors import KvprobeError, UnsupportedModelError, Wording
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Row

# queries at once: few enough that their scores stay in the processor's caches, and that causal blocks are half empty
BLOCK = 64


@dataclass(frozen=True)
class Mass:
    """Attention mass of one forward, a mean over the queries from ``queries_from`` on (and over the batch).

    ``layers`` are the model's indices of the layers that hold keys; row j of every tensor belongs to ``layers[j]``.
    ``token0`` float32 ``[n_layers, n_heads]`` in [0, 1]. ``uniform`` ``[n_layers]`` is what token 0 would get if every
    query spread itself evenly over the keys it may see: 1 over their number, or 0 where token 0 is not among them
    (local layers). ``share`` ``[n_layers, length]`` is each position's part of the layer's mass, a mean over heads,
    or None if it was not asked for; a row sums to 1, or to less under learned sink logits.
    """

    layers: tuple[int, ...]
    queries_from: int
    token0: Tensor
    uniform: Tensor
    share: Tensor | None = None

    def sink_rate(self, epsilon: float) -> Tensor:
        """Share of each layer's heads with more than ``epsilon`` on token 0: ``[n_layers]`` (Gu et al., 2024)."""
        return (self.token0 > epsilon).double().mean(-1)

    def layer_rows(self, epsilon: float, windows: Sequence[int | None], input_ids: Tensor, tokenizer: Any) -> list[Row]:
        """One row a layer: ``layer, mass, uniform, sink_rate, top_position, top_token, top_mass, window, head_mass``.

        ``top_position`` is the position with the largest share of the layer's mass, whichever it is, ``top_token`` its
        text and ``top_mass`` that share; they need ``share``. ``head_mass`` lists the mass of every head. ``windows``
        are the model's own, by layer index (None = full attention). ``input_ids`` ``[length]`` is the passage.
        """
        if self.share is None:
            raise ValueError("layer_rows needs the share of every position: measure(..., positions=True)")
        rows = []
        for j, layer in enumerate(self.layers):
            top = int(self.share[j].argmax())
            rows.append(
                {
                    "layer": layer,
                    "mass": float(self.token0[j].mean()),
                    "uniform": float(self.uniform[j]),
                    "sink_rate": float(self.sink_rate(epsilon)[j]),
                    "top_position": top,
                    "top_token": None if tokenizer is None else tokenizer.decode([int(input_ids[top])]),
                    "top_mass": float(self.share[j, top]),
                    "window": windows[layer],
                    "head_mass": self.token0[j].tolist(),
                }
            )
        return rows


@torch.no_grad()
def measure(
    model: Any,
    input_ids: Tensor,
    *,
    queries_from: int = 64,
    positions: bool = False,
    progress: Progress = silent,
) -> Mass:
    """Mass of one forward over ``input_ids`` ``[batch, length]``; with ``positions``, the share of every position too.

    Query 0 sees only itself, and the first queries see little else: ``queries_from`` leaves them out. Raises
    ValueError if it is not in 0 to length − 1, KvprobeError naming the layer where attention is not finite, and
    UnsupportedModelError where keys are not one a token.
    """
    length = input_ids.shape[-1]
    if not 0 <= queries_from < length:
        said = "{queries_from} must be between 0 and {0} for {tokens} {1}, got {2}: give {queries_from} {3}"
        raise ValueError(Wording(said, length - 1, length, queries_from, length // 2))
    subject = language_model(model)
    n_layers = 1 + max(subject.layers(), default=0)

    def look(call: AttentionCall) -> Attended:
        if call.key.shape[2] != length:
            raise UnsupportedModelError(
                f"family {subject.family}: layer {call.layer} reads {call.key.shape[2]} keys for {length} tokens, so "
                "attention is not shared out among tokens there"
            )
        share = None
        if positions:
            output, token0, share = _attend_with_shares(call, queries_from)
        else:
            output, lse = call.attend_with_lse()
            token0 = torch.exp(call.scores_of(0) - lse)[..., queries_from:].mean((0, 2)).cpu()
        if not token0.isfinite().all():
            raise KvprobeError(
                Wording(
                    "attention is not finite in layer {0} at {1}: try {dtype} float32, and check the checkpoint",
                    call.layer,
                    str(call.query.dtype).removeprefix("torch."),
                )
            )
        progress("attention", call.layer + 1, n_layers, "layers")
        return Attended(output, (token0, _even_share_of_token0(call, queries_from), share))

    # the body alone: the vocabulary's logits would cost more than the masses do
    seen = observe(subject, input_ids, look)
    layers = tuple(sorted(seen))
    token0, uniform, share = zip(*(seen[layer] for layer in layers), strict=True)
    return Mass(
        layers=layers,
        queries_from=queries_from,
        token0=torch.stack(token0),
        uniform=torch.stack(uniform),
        share=torch.stack(share) if positions else None,
    )


def token0_mass(model: Any, input_ids: Tensor, queries_from: int = 64) -> Tensor:
    """Mean attention weight on token 0 over the queries from ``queries_from`` on: float32 ``[n_layers, n_heads]``.

    ``n_layers`` counts the layers that hold keys and values. Raises as :func:`measure` does.

    >>> import kvprobe
    >>> subject = kvprobe.prepare("smollm2-135m", tokens=128)
    >>> mass = kvprobe.token0_mass(subject.model, subject.input_ids)
    >>> tuple(mass.shape)
    (30, 9)
    """
    return measure(model, input_ids, queries_from=queries_from).token0


def _even_share_of_token0(call: AttentionCall, queries_from: int) -> Tensor:
    length = call.query.shape[2]
    if call.is_causal:
        return (1.0 / torch.arange(queries_from + 1, length + 1)).mean()
    keep = call.keep[..., queries_from:, :]
    # at least one: a padding query that sees nothing has no token 0 to share with either
    return (keep[..., 0] / keep.sum(-1).clamp(min=1)).float().mean().cpu()


def _attend_with_shares(call: AttentionCall, queries_from: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attention, the mass on token 0 ``[n_heads]`` and that on every position ``[kv_len]``, both on the CPU."""
    batch, n_heads, length, _ = call.query.shape
    token0 = torch.zeros(n_heads, device=call.query.device)
    total = torch.zeros(call.key.shape[2], device=call.query.device)

    def see(first: int, weights: Tensor) -> None:
        counted = weights[:, :, max(0, queries_from - first) :]
        token0.add_(counted[..., 0].sum((0, 2)))
        total[: counted.shape[-1]] += counted.sum((0, 1, 2))

    output = call.attend_watched(see, block=BLOCK)
    n_queries = batch * (length - queries_from)
    return output, (token0 / n_queries).cpu(), (total / (n_queries * n_heads)).cpu()
