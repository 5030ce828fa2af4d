"""How is a finding worded? The phrases that records, lines under a table and a report's sentences share."""

from collections.abc import Mapping
from typing import Any

from kvprobe.results.columns import Column, Row

PUBLISHED = "the published protocol"
"""The name of a training protocol with every published setting (:class:`kvprobe.experiments.gqa_training.Protocol`)."""


def passage_of(run: Mapping[str, Any]) -> str:
    """Which model read what, as ``smollm2-135m, bundled, 1,024 tokens (no BOS)``."""
    return f"{run['model']}, {run['passage']}, {run['n_tokens']:,} tokens ({bos_of(run)})"


def bos_of(run: Mapping[str, Any]) -> str:
    """Whether token 0 is a BOS, and whether it comes from the text."""
    if run.get("bos_in_text"):
        return "with BOS, the text's own"
    return "with BOS" if run["has_bos"] else "no BOS"


def fitted_to(run: Mapping[str, Any]) -> str:
    """What a held-out basis was fitted to: ``later tokens of the same text``, or ``another text (manual)``."""
    fit_text = run.get("fit_text")
    if fit_text is None or fit_text["sha256"] == run["passage_sha256"]:
        return "later tokens of the same text"
    return f"another text ({fit_text['name']})"


def training_of(run: Mapping[str, Any]) -> str:
    """What a model was trained on and how, as ``time-machine, 600 steps, the published protocol``."""
    said = f"{run['corpus']}, {counted(run['steps'], 'step')}, {run['protocol']}"
    if run.get("uptrain") is None:
        return said
    control = ", multi-head too" if run["n_heads"] in run["kv_heads"] else ""
    return f"{said}; then heads pooled and uptrained for {counted(run['uptrain_steps'], 'step')}{control}"


def interval_of(block_length: int) -> str:
    """How the intervals of a result were computed (:func:`kvprobe.probes.intervals.paired_interval`)."""
    return f"95 %, paired moving-block bootstrap, blocks of {block_length} tokens, 10,000 resamples"


def change_of(row: Row) -> str:
    """How a loss differs from the full pass's, as far as ``delta`` and its interval support it."""
    low, high = row["delta_low"], row["delta_high"]
    within = f"95 % interval {signed(low)} to {signed(high)}"
    if row["delta"] == low == high == 0:
        return "is identical to the full pass's"
    if low > 0:
        return f"rises by {row['delta']:.3f} nat a token ({within})"
    if high < 0:
        return f"falls by {-row['delta']:.3f} nat a token ({within})"
    return f"does not differ measurably from the full pass ({signed(row['delta'])} nat a token, {within})"


def counted(number: int, what: str) -> str:
    """As ``1 step`` or ``600 steps``."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def sinks_of(n_sink: int) -> str:
    """As ``no sinks`` or ``4 sinks``."""
    return counted(n_sink, "sink") if n_sink else "no sinks"


def signed(value: float) -> str:
    """A difference in nat with its sign, as ``−0.012``."""
    return f"{value:+.3f}".replace("-", "−")


LOSS_COLUMNS = (
    Column("loss", "loss (nat)", ".3f"),
    Column("perplexity", "perplexity", ",.1f"),
    Column("delta", "beyond full (nat)", signed),
    Column("delta_low", "95 % from", signed),
    Column("delta_high", "to", signed),
)
"""What a table shows of a loss and its difference to the full pass."""

BUSY = "busy machine, not to be quoted"


def with_busy(text: str, run: Mapping[str, Any]) -> str:
    """``text`` about what ``run`` timed and, if the machine was busy, that it is not to be quoted."""
    return "; ".join(part for part in (text, BUSY if run.get("busy") else "") if part)


def busy_lines(run: Mapping[str, Any]) -> list[str]:
    """The lines below a table of a run: none if the machine was quiet; else why not, or why that is not known."""
    if run.get("busy"):
        return [f"{BUSY}: {'; '.join(run['busy'])}"]
    unknown = run.get("load", {}).get("unknown")
    return [] if unknown is None else [f"whether the machine was busy is not known: {unknown}"]
