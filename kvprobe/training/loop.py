"""How is a small decoder trained, so that one seed always gives the same bits, even after a kill? One plain loop.

    decoder = seeded(config, seed=0)
    history = train(decoder, corpus, TrainConfig(steps=600))

AdamW over cross-entropy in nat per token. A step reads its batch in parts whose activations stay in the processor's
cache, and accumulates their gradients. What a step reads depends only on the seed and its number
(:meth:`kvprobe.text.corpus.Corpus.train_batch`), and nothing is drawn while training, so a checkpoint needs only the
weights, the optimizer's moments and the number of steps done.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.model import Decoder
from kvprobe.errors import KvprobeError, Wording
from kvprobe.progress import Progress, silent
from kvprobe.text.corpus import Corpus
from kvprobe.training.checkpoint import Snapshot

SNAPSHOT_SECONDS = 60.0
"""After this long without a snapshot, one is written at the end of the step."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; the defaults are the published protocol (AdamW at a constant rate, no decay, no clipping).

    A step reads ``batch`` windows, ``micro_batch`` at a time. The rate rises over ``warm_up`` steps to
    ``learning_rate`` and stays there, or falls on a cosine to ``floor`` times it at the last step. ``clip`` bounds the
    norm of all gradients together. ``dtype`` bfloat16 is autocast: weights, moments and losses stay float32.
    Validation is every ``validate_every`` steps and at the last step. ``skip`` batches of the corpus are left out, as
    an earlier training read them. Raises ValueError for a value out of range.
    """

    steps: int = 600
    batch: int = 64
    micro_batch: int = 8
    learning_rate: float = 1e-3
    schedule: Literal["constant", "cosine"] = "constant"
    warm_up: int = 0
    floor: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None
    validate_every: int = 100
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    skip: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_batch", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, allowed in (("schedule", ("constant", "cosine")), ("dtype", ("float32", "bfloat16"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.skip < 0:
            raise ValueError(f"skip must be at least 0 batches, got {self.skip}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be between 0 and 1 times the rate, got {self.floor}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, got {self.clip}")
        if not 0 <= self.warm_up <= self.steps:
            raise ValueError(f"warm_up must be between 0 and {self.steps} steps, got {self.warm_up}")

    def rate(self, step: int) -> float:
        """The learning rate of step ``step``, from 0."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        if self.schedule == "constant":
            return self.learning_rate
        along = (step - self.warm_up) / max(1, self.steps - 1 - self.warm_up)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * along)))


class Validation(NamedTuple):
    """The mean ``loss`` in nat per token over all validation windows, after ``step`` steps."""

    step: int
    loss: float


@dataclass(frozen=True)
class History:
    """The outcome of a training run: every validation, the training loss of every step, and the seconds of work."""

    validations: tuple[Validation, ...] = ()
    train_losses: tuple[float, ...] = ()
    seconds: float = 0.0
    resumed: int = 0

    @property
    def best(self) -> Validation:
        """The validation with the lowest loss, the first if several are equal."""
        return min(self.validations, key=lambda validation: validation.loss)

    @property
    def last(self) -> Validation:
        """The validation after the last step."""
        return self.validations[-1]


def seeded(config: DecoderConfig, *, seed: int) -> Decoder:
    """A decoder whose random weights are a function of ``config`` and ``seed``; torch's generator is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        # only the CPU's generator: torch.manual_seed would seed every GPU's too
        torch.default_generator.manual_seed(seed)
        return Decoder(config)


def check(config: DecoderConfig, corpus: Corpus, plan: TrainConfig) -> None:
    """Raise ValueError or KvprobeError, with the value, for what cannot be trained: before the first step."""
    if corpus.vocab > config.vocab:
        raise KvprobeError(f"{corpus.name} has a vocabulary of {corpus.vocab:,}, the model one of {config.vocab:,}")
    if corpus.length > config.max_positions:
        raise ValueError(f"windows of {corpus.length} tokens are longer than the model's {config.max_positions}")
    if plan.batch > corpus.n_train:
        said = "a batch of {0} is larger than the {1:,} training windows: give {train_windows} at least {0}"
        raise ValueError(Wording(said, plan.batch, corpus.n_train))


def train(
    decoder: Decoder,
    corpus: Corpus,
    plan: TrainConfig,
    *,
    snapshot: Snapshot | None = None,
    snapshot_every: int = 50,
    progress: Progress = silent,
    what: str = "training",
) -> History:
    """Train ``decoder`` in place and leave it in eval mode; with a ``snapshot``, resume from it.

    The snapshot is written every ``snapshot_every`` steps, after a minute without one, and at the last step; its owner
    removes it. ``progress`` reports the step with its loss and tokens per second. Raises as :func:`check` does, and
    KvprobeError, naming the step, for a loss that is not finite.
    """
    check(decoder.config, corpus, plan)
    parameters = {name: parameter.requires_grad_() for name, parameter in decoder.named_parameters()}
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=plan.learning_rate,
        betas=plan.betas,
        eps=plan.eps,
        weight_decay=plan.weight_decay,
        fused=True,
    )
    history, done = History(), 0
    if snapshot is not None and (kept := snapshot.read()) is not None:
        saved, tensors = kept
        try:
            history, done = _history(saved), len(saved["train_losses"])
            restore_weights(decoder, tensors)
            if done < plan.steps:
                _restore_moments(decoder, optimizer, tensors)
        except (KeyError, TypeError, ValueError):
            raise snapshot.foreign() from None
    started = time.perf_counter() - history.seconds
    first = done
    began = kept_at = time.perf_counter()
    decoder.train()
    try:
        for step in range(done, plan.steps):
            for group in optimizer.param_groups:
                group["lr"] = plan.rate(step)
            windows = corpus.train_batch(plan.skip + step, batch=plan.batch, seed=plan.seed)
            loss = gradients(decoder, windows, plan)
            _check_finite("training", loss, step, plan)
            if plan.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters.values(), plan.clip)
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            history = replace(history, train_losses=(*history.train_losses, loss))
            speed = (done - first) * plan.batch * corpus.length / (time.perf_counter() - began)
            progress(what, done, plan.steps, f"steps, loss {loss:.3f}, {speed:,.0f} tokens/s")
            if done % plan.validate_every == 0 or done == plan.steps:
                now = Validation(done, validate(decoder, corpus, plan))
                _check_finite("validation", now.loss, step, plan)
                history = replace(history, validations=(*history.validations, now))
            history = replace(history, seconds=time.perf_counter() - started)
            late = time.perf_counter() - kept_at > SNAPSHOT_SECONDS
            if snapshot is not None and (done % snapshot_every == 0 or late or done == plan.steps):
                snapshot.write(asdict(history), _tensors(decoder, optimizer))
                kept_at = time.perf_counter()
    finally:
        decoder.zero_grad()
        decoder.eval()
    return history


def _check_finite(kind: str, loss: float, step: int, plan: TrainConfig) -> None:
    if not math.isfinite(loss):
        raise KvprobeError(
            f"the {kind} loss is not finite at step {step + 1} (rate {plan.rate(step):g}, {plan.dtype}): "
            "use a lower learning rate, a warm-up or clipping"
        )


def gradients(decoder: Decoder, windows: Tensor, plan: TrainConfig) -> float:
    """Add the gradients of the mean loss of ``windows`` ``[batch, length + 1]``; returns that loss."""
    total = 0.0
    for part in windows.split(plan.micro_batch):
        loss = summed_loss(decoder, part, plan.dtype) / windows[:, 1:].numel()
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def validate(decoder: Decoder, corpus: Corpus, plan: TrainConfig) -> float:
    """The mean loss in nat per token over all validation windows, summed in float64."""
    windows = corpus.valid_windows()
    # no_grad, not inference_mode: later steps could not differentiate its tensors, and the table of angles is kept
    total = sum(float(summed_loss(decoder, part, plan.dtype)) for part in windows.split(2 * plan.micro_batch))
    return total / windows[:, 1:].numel()


def summed_loss(decoder: Decoder, windows: Tensor, dtype: str) -> Tensor:
    """The losses of all targets in ``windows`` ``[batch, length + 1]``, in nat, as one float32 sum with a gradient.

    By torch's own kernel: :func:`kvprobe.probes.losses.nll` rounds otherwise, and would train other weights than those
    of ``results/gqa``.
    """
    device = decoder.embedding.weight.device
    windows = windows.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = decoder(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


def _tensors(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = weights_of(decoder)
    for name, parameter in decoder.named_parameters():
        tensors |= {f"{key}/{name}": value for key, value in optimizer.state[parameter].items()}
    return tensors


def weights_of(decoder: Decoder) -> dict[str, Tensor]:
    """The weights as a snapshot holds them."""
    return {f"weights/{name}": tensor.detach() for name, tensor in decoder.named_parameters()}


@torch.no_grad()
def restore_weights(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Load the weights in a snapshot of :func:`train` into ``decoder``; ValueError if they are another model's."""
    for name, parameter in decoder.named_parameters():
        kept = tensors.get(f"weights/{name}")
        if kept is None or kept.shape != parameter.shape:
            raise ValueError(f"the snapshot has no {name} of the shape {[*parameter.shape]}")
        parameter.copy_(kept)


def _restore_moments(decoder: Decoder, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in decoder.named_parameters():
        keys = ("step", "exp_avg", "exp_avg_sq")
        optimizer.state[parameter] = {key: tensors[f"{key}/{name}"].to(parameter.device) for key in keys}


def _history(saved: Mapping[str, Any]) -> History:
    return History(
        validations=tuple(Validation(*validation) for validation in saved["validations"]),
        train_losses=tuple(saved["train_losses"]),
        seconds=saved["seconds"],
        resumed=saved["resumed"] + 1,
    )
