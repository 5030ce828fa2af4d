"""How well does a model predict these tokens?

Losses are negative log-likelihoods in nat per predicted token. Target ``i`` is token ``i`` of the passage, predicted
from the tokens before it; ``score_from = s`` makes ``s + 1`` the first target, so 1,024 tokens and 512 give the 511
targets 513 to 1023.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvprobe.attention.call import Attend
from kvprobe.errors import KvprobeError, UnsupportedModelError, Wording
from kvprobe.probes.intervals import paired_interval


def check_score_from(n_tokens: int, score_from: int) -> None:
    """Raise ValueError unless ``score_from`` leaves two targets or more (one has no interval) in ``n_tokens``."""
    if n_tokens < 3:
        raise ValueError(
            Wording("a passage needs at least 3 tokens to be scored (two targets), got {tokens} {0}", n_tokens)
        )
    if not 0 <= score_from <= n_tokens - 3:
        raise ValueError(
            Wording(
                "{score_from} must be between 0 and {0} for {tokens} {1} (the first target is the token after it, and "
                "there must be two), got {2}",
                n_tokens - 3,
                n_tokens,
                score_from,
            )
        )


@torch.no_grad()
def token_losses(
    model: Any,
    input_ids: Tensor,
    *,
    score_from: int,
    attend: Attend | None = None,
    chunk: int = 256,
) -> Tensor:
    """Loss of every target after ``score_from``, in nat, from one forward; ``attend`` goes through the seam.

    ``model`` is a Hugging Face causal model or our decoder. ``input_ids`` ``[length]`` or ``[1, length]`` gives float64
    ``[n_targets]`` on the CPU, several rows ``[batch, length]`` give ``[batch, n_targets]``, with
    ``n_targets = length - 1 - score_from``. Logits are held for ``chunk`` positions at a time and are the model's own,
    scaling and soft-capping after the head included. Raises ValueError for a ``score_from`` outside the passage and
    KvprobeError for a loss that is not finite, naming the layer that first was not.
    """
    ids = input_ids if input_ids.ndim == 2 else input_ids[None]
    losses = scored_pass(model, ids, score_from=score_from, attend=attend, chunk=chunk)[1]
    return losses[0] if len(ids) == 1 else losses


@torch.no_grad()
def scored_pass(
    model: Any, ids: Tensor, *, score_from: int, attend: Attend | None = None, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """The hidden states ``[batch, n_targets, hidden]`` that predict the targets, and :func:`token_losses`, by row.

    Takes ids ``[batch, length]`` and raises as `token_losses` does.
    """
    from kvprobe.attention.language_model import language_model

    check_score_from(ids.shape[1], score_from)
    subject = language_model(model)

    def run() -> tuple[Tensor, Tensor]:
        hidden = subject.body(ids, attend=attend)
        if not hidden.numel():
            raise UnsupportedModelError(f"family {subject.family}: its body gives no hidden states to score")
        hidden = hidden[:, score_from:-1]
        return hidden, hidden_losses(subject.logits, hidden, ids[:, score_from + 1 :], chunk=chunk)

    hidden, losses = run()
    check_finite(losses, subject.module, run)
    return hidden, losses


def hidden_losses(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, chunk: int = 256
) -> Tensor:
    """Losses of ``targets`` ``[batch, n]`` after ``hidden`` ``[batch, n, hidden]``: float64 ``[batch, n]``, on the CPU.

    The logits of ``chunk`` positions are held at a time.
    """
    parts = [torch.empty(len(targets), 0, dtype=torch.float64)]
    for some, wanted in zip(hidden.split(chunk, dim=1), targets.split(chunk, dim=1), strict=True):
        if wanted.shape[1]:
            logits = logits_of(some)
            parts.append(nll(logits, wanted.to(logits.device)).cpu())
    return torch.cat(parts, dim=1)


def check_finite(losses: Tensor, module: nn.Module, run: Callable[[], object]) -> None:
    """Raise KvprobeError for a loss that is not finite, naming the first part of ``module`` whose output is not.

    ``run`` repeats the pass, or as much of it as shows the same, while that is looked for.
    """
    if bool(losses.isfinite().all()):
        return
    seen: list[tuple[str, torch.dtype]] = []

    def watch(path: str) -> Any:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not seen and isinstance(first, Tensor) and not bool(first.isfinite().all()):
                seen.append((path, first.dtype))

        return look

    handles = [part.register_forward_hook(watch(path)) for path, part in module.named_modules() if path]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    where, dtype = seen[0] if seen else ("the loss itself", next(module.parameters()).dtype)
    name = str(dtype).removeprefix("torch.")
    mend = "check the checkpoint's weights" if dtype == torch.float32 else "try {dtype} float32"
    said = "the loss is not finite: {0} is the first with a value that is not, at {1}; "
    raise KvprobeError(Wording(said + mend, where, name))


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nat of ``targets`` ``[...]`` under ``logits`` ``[..., vocab]``: float64 ``[...]``.

    Exponentials are float32 and summed in float64: summed in float32 over a vocabulary of 49,152 they came out too
    large every time, a bias of 1.7e-5 nat and not noise.
    """
    logits = logits.float()
    peak = logits.amax(-1, keepdim=True)
    total = (logits - peak).exp_().sum(-1, dtype=torch.float64)
    chosen = logits.gather(-1, targets[..., None])
    return total.log() + (peak.double() - chosen.double())[..., 0]


def perplexity(losses: Tensor) -> float:
    """Perplexity per predicted token: exp of the mean loss, the mean taken in float64 and exponentiated once."""
    return float(losses.double().mean().exp())


def loss_fields(losses: Tensor, reference: Tensor, *, seed: int) -> dict[str, float]:
    """A row's ``loss`` and ``perplexity``, and its ``delta`` to the ``reference`` with ``delta_low``, ``delta_high``.

    Both ``[n_targets]``; the interval is that of :func:`paired_interval`.
    """
    interval = paired_interval(losses, reference, seed=seed)
    return {
        "loss": float(losses.mean()),
        "perplexity": perplexity(losses),
        "delta": interval.delta,
        "delta_low": interval.low,
        "delta_high": interval.high,
    }
