"""What does a KV cache cost by the model's shape alone, and what would each lever leave of it? No torch in here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import KvprobeError, UnsupportedModelError, did_you_mean
from kvprobe.experiments.experiment import Experiment, setting
from kvprobe.progress import Progress, silent
from kvprobe.results.columns import Column, amount
from kvprobe.results.result import Result, Row
from kvprobe.shape import published
from kvprobe.shape.cache_bytes import DTYPE_BYTES, Amount, describe
from kvprobe.shape.levers import growth, rows
from kvprobe.shape.spec import Spec, to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_CONTEXTS = (1024, 8192)
SUPPORT = {
    "known": "known, its configuration is read as its authors mean it",
    "plain": "plain, read by keys that every family has; no key says otherwise",
}


@dataclass(frozen=True)
class KnownShape:
    """A model's shape, and what a run record says of the model, at least its name as ``model``.

    ``dtype`` is that of its checkpoint, None if that is not known.
    """

    spec: Spec
    about: dict[str, Any]
    dtype: str | None = None

    def record(self) -> dict[str, Any]:
        """What a run record says of the model."""
        return dict(self.about)


@dataclass(frozen=True, kw_only=True)
class Cache(Experiment):
    """What does the KV cache cost, by the configuration alone, and how much smaller would each lever make it?

    Needs no weights, and no network for the published models that kvprobe knows by name (gpt2, llama-2-70b,
    deepseek-v3, …: an unknown name lists them); any other MODEL by its config.json. A family is known (its config is
    read as its authors mean it) or plain (it says nothing but what every family says); a plain one with a key that
    could change what its layers keep is refused, as are encoders.

    \b
    Columns: support          known or plain: how the family's config was read (json and csv)
             bytes            of the cache at this context, for the whole batch
             bytes_per_token  of one more token of one sequence at this context
             relief           bytes of the unchanged model over those of the row
             outweighs_at     first context at which the cache is larger than the weights (-: never)
             stops_at         context from which the cache no longer grows (-: never)

    \b
    Examples:
      kvprobe cache llama-2-70b
      kvprobe cache gpt2 --dtype bfloat16 --context 1024 --context 2048 --context 4096
      kvprobe cache deepseek-v3 --batch 64 --plot cache.png
      kvprobe cache gemma-3-27b --context 131072   where sliding layers stop
    """

    name = "cache"
    needs = "config"
    short = "The memory bill of the KV cache, from the config alone."
    heading = "What its cache costs"
    columns = (
        Column("lever", "lever"),
        Column("context", "context (tokens)"),
        Column("bytes", "cache", amount),
        Column("bytes_per_token", "one more token", amount),
        Column("relief", "times smaller", ",.2f"),
        Column("outweighs_at", "larger than the weights from"),
        Column("stops_at", "stops growing at"),
    )
    in_units = ("bytes", "bytes_per_token")

    contexts: tuple[int, ...] = setting(
        (),
        "Tokens in the cache. Repeat for several.",
        kind=int,
        flag="--context",
        shown="1024, 8192 and all positions of the model",
    )
    batch: int = setting(1, "Sequences held at once.")
    dtype: str | None = setting(
        None,
        "Dtype of the cache and of the weights.",
        kind=str,
        choices=tuple(DTYPE_BYTES),
        shown="the checkpoint's own, or float32",
        common=True,
    )
    window: int = setting(1024, "Last tokens that the window lever keeps.")
    n_sink: int = setting(4, "Sink tokens that the window lever keeps.", flag="--sinks")
    rank: int | None = setting(None, "Rank of the latent lever.", kind=int, shown="a quarter of the width of K and V")
    weights_bytes: float | None = setting(
        None,
        "Weights to compare with, such as 140e9.",
        kind=float,
        least=1,
        most=1e18,
        shown="all parameters at --dtype",
    )

    def measure(self, subject: KnownShape, progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """A row a context and lever, the model as it is first of each context (:func:`kvprobe.shape.levers.rows`).

        ``contexts`` default to 1,024, 8,192 and all positions of the model, ``weights_bytes`` to all parameters at
        ``dtype``, and that to the checkpoint's own; float32 if it has none. Raises ValueError for what is out of range.
        """
        spec, source, dtype = subject.spec, "given", self.dtype or subject.dtype or "float32"
        dtype_source = "given" if self.dtype else "the checkpoint's own" if subject.dtype else "by default"
        weights_bytes = None if self.weights_bytes is None else int(self.weights_bytes)
        if weights_bytes is None and spec.n_parameters is not None:
            weights_bytes, source = spec.n_parameters * DTYPE_BYTES[dtype], "closed form of the configuration"
        elif weights_bytes is None:
            source = "not known: the family has no closed form here"
        contexts = [*self.contexts] or _default_contexts(spec.max_positions)
        given = self.settings() | {"contexts": contexts, "weights_bytes": weights_bytes, "dtype": dtype}
        facts = {
            "dtype": dtype,
            "dtype_source": dtype_source,
            "family": spec.family,
            "support": spec.support,
            "shape": describe(spec),
            "n_parameters": spec.n_parameters,
            "weights_bytes": weights_bytes,
            "weights_source": source,
            "max_positions": spec.max_positions,
            "contexts": contexts,
            "spec": to_json(spec),
        }
        return rows(spec, **given), facts

    def given(self, subject: Any, progress: Progress) -> Any:
        """A name as the shape that it means."""
        return find_shape(subject, progress=progress) if isinstance(subject, str) else super().given(subject, progress)

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence: one more token, and the longest context asked for."""
        run = result.run
        longest = max(run["contexts"])
        row = next(row for row in result.rows if row["context"] == longest)
        said = f"{run['model']}: the cache of {longest:,} tokens takes {Amount(row['bytes'])} at {run['dtype']}"
        said += f", batch {run['batch']:,}" if run["batch"] > 1 else ""
        said += f", and one more token {Amount(row['bytes_per_token'])}" if row["bytes_per_token"] else ""
        if row["outweighs_at"] is not None:
            said += f"; from {row['outweighs_at']:,} tokens on it is larger than the weights"
            limit = run["max_positions"]
            said += f" (beyond its {limit:,} positions)" if limit is not None and row["outweighs_at"] > limit else ""
        return said

    @classmethod
    def summary(cls, result: Result) -> list[str]:
        """The lines under the table."""
        run = result.run
        own = f" ({run['dtype_source']})" if run["dtype_source"] != "given" else ""
        lines = ["", f"{run['model']} ({run['source']}), batch {run['batch']}, {run['dtype']}{own}: {run['shape']}"]
        lines.append(f"family {run['family']}: {SUPPORT[run['support']]}")
        if run["weights_bytes"] is None:
            lines.append(f"weights {run['weights_source']}; give --weights-bytes")
        else:
            count = f"{run['n_parameters']:,} parameters, " if run["weights_source"] != "given" else ""
            lines.append(f"weights {Amount(run['weights_bytes'])} ({count}{run['weights_source']})")
        if run["max_positions"] is not None and max(run["contexts"]) > run["max_positions"]:
            lines.append(f"the model has {run['max_positions']:,} positions: contexts beyond them are arithmetic only")
        lines.append("memory only: kvprobe relief measures what the levers cost in loss")
        return lines

    @classmethod
    def figure(cls, result: Result, **how: Any) -> "Figure":
        """The cache by context, and what each lever leaves of it at the longest."""
        from kvprobe.plots import cache

        longest = [row for row in result.rows if row["context"] == max(result.run["contexts"])]
        return cache.figure(growth(result.rows, result.run), longest, result.run, **how)


def find_shape(model: str, *, progress: Progress = silent) -> KnownShape:
    """The model's shape, and what a run record says of it; a directory or file goes before a published name.

    Raises KvprobeError for an unknown name, listing the published shapes that need no network.
    """
    item = published.look_up(model)
    if item is not None and not Path(model).is_dir():
        about = {"model": item.name, "revision": item.source, "source": "catalogue"}
        return KnownShape(item.spec, about, _dtype_of(item.config))
    from kvprobe.models import loading

    try:
        spec = loading.load_spec(model, progress=progress)
        files = loading.find(model, only_config=True, progress=progress)
        dtype = _dtype_of(loading.read_config(files))
    except UnsupportedModelError:
        raise
    except KvprobeError as error:
        known = published.published()
        named = did_you_mean(model, known, f"without a network, `kvprobe cache` knows {', '.join(known)}")
        raise KvprobeError(f"{error}; {named}") from error
    return KnownShape(spec, {"model": files.name, "revision": files.revision, "source": files.source}, dtype)


def _dtype_of(config: Mapping[str, Any]) -> str | None:
    # a model of text and images says it of its text part
    for part in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, Mapping) and (said := part.get(key)) in DTYPE_BYTES:
                return str(said)
    return None


def _default_contexts(max_positions: int | None) -> list[int]:
    if max_positions is None:
        return [*DEFAULT_CONTEXTS]
    return sorted({*(context for context in DEFAULT_CONTEXTS if context < max_positions), max_positions})
