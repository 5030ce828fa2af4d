"""``kvprobe cache``: what does the KV cache cost, and which lever would make it how much smaller?"""

from typing import TYPE_CHECKING, Any

import click

from kvprobe.cli import common

if TYPE_CHECKING:
    from kvprobe.spec import Spec

COLUMNS = ("lever", "context", "bytes", "bytes_per_token", "relief", "outweighs_at", "stops_at")


@click.command("cache", short_help="The memory bill of the KV cache, from the config alone.")
@click.argument("model", default="gpt2")
@click.option(
    "--context",
    "contexts",
    type=int,
    multiple=True,
    help="Tokens in the cache. Repeat for several.  [default: 1024, 8192 and all positions of the model]",
)
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences held at once.")
@click.option("--window", type=int, default=1024, show_default=True, help="Of the window lever: last tokens kept.")
@click.option("--sinks", type=int, default=4, show_default=True, help="Of the window lever: first tokens kept beside.")
@click.option("--rank", type=int, help="Of the latent lever.  [default: a quarter of the width of K and V]")
@click.option(
    "--weights-bytes",
    type=click.FloatRange(min=1),
    help="Weights to compare with, such as 140e9.  [default: all parameters at --dtype]",
)
@common
def command(model: str, **options: Any) -> None:
    """What does the KV cache cost, by the configuration alone, and which lever would make it how much smaller?

    Needs no weights, and no network for the published models that kvprobe knows by name (gpt2, llama-2-70b,
    deepseek-v3, …: an unknown name lists them); any other MODEL by its config.json.

    \b
    Columns: bytes            of the cache after so many tokens of each sequence, for the whole batch
             bytes_per_token  of one more token of one sequence at this context
             relief           bytes of the model as it is over those of the row
             outweighs_at     first context at which the cache is larger than the weights (-: never)
             stops_at         context from which on nothing grows any more (-: never)

    \b
    Examples:
      kvprobe cache llama-2-70b --dtype bfloat16
      kvprobe cache gpt2 --context 1024 --context 2048 --context 4096
      kvprobe cache deepseek-v3 --dtype bfloat16 --batch 64 --plot cache.png
      kvprobe cache gemma-3-27b --context 131072 --dtype bfloat16   where sliding layers stop
    """
    import time

    from kvprobe.bill import DTYPE_BYTES, describe
    from kvprobe.console import emit, save_plot
    from kvprobe.relief import rows
    from kvprobe.results import Result, run_record

    started = time.perf_counter()
    spec, record = _shape(model, quiet=options["quiet"])
    dtype, batch = options["dtype"], options["batch"]
    weights_bytes, source = None, "not known: the family has no closed form here"
    if spec.n_parameters is not None:
        weights_bytes, source = spec.n_parameters * DTYPE_BYTES[dtype], "closed form of the configuration"
    if options["weights_bytes"] is not None:
        weights_bytes, source = int(options["weights_bytes"]), "given"
    settings = {
        "batch": batch,
        "dtype": dtype,
        "weights_bytes": weights_bytes,
        "window": options["window"],
        "n_sink": options["sinks"],
        "rank": options["rank"],
    }
    contexts = list(options["contexts"]) or _default_contexts(spec.max_positions)
    found = rows(spec, contexts=contexts, **settings)
    run = run_record(
        record,
        settings,
        family=spec.family,
        shape=describe(spec),
        n_parameters=spec.n_parameters,
        weights_source=source,
        max_positions=spec.max_positions,
        contexts=contexts,
        wall_s=round(time.perf_counter() - started, 3),
    )
    result = Result("cache", found, run)
    shown = Result("cache", _readable(found), run) if options["format_"] == "table" else result
    emit(shown, format_=options["format_"], out=options["out"], columns=COLUMNS, summary=_summary(run))
    if options["plot"]:
        from kvprobe.plots.cache import figure

        # as far as the cache outweighs the weights, where it does within reach: that is what the picture is about
        reach = max(*contexts, min(2 * (found[0]["outweighs_at"] or 0), 2**24), 2048)
        growth = rows(spec, contexts=[2**power for power in range(7, reach.bit_length() + 1)], **settings)
        save_plot(figure(growth, [row for row in found if row["context"] == contexts[-1]], run), options["plot"])


def _shape(model: str, *, quiet: bool) -> tuple["Spec", dict[str, Any]]:
    """The model's shape, and what a run record says of it; a directory or file goes before a published name."""
    from pathlib import Path

    from kvprobe import catalogue

    item = catalogue.look_up(model)
    if item is not None and not Path(model).is_dir():
        return item.spec, {"model": item.name, "revision": item.source, "source": "catalogue"}
    from kvprobe import models
    from kvprobe.console import progress_bar
    from kvprobe.errors import KvprobeError, UnsupportedModelError

    try:
        with progress_bar(quiet) as progress:
            spec = models.load_spec(model, progress=progress)
            found = models.find(model, only_config=True, progress=progress)
    except UnsupportedModelError:
        raise
    except KvprobeError as error:
        known = ", ".join(catalogue.published())
        raise KvprobeError(f"{error}; without a network, `kvprobe cache` knows {known}") from error
    return spec, {"model": found.name, "revision": found.revision, "source": found.source}


def _default_contexts(max_positions: int | None) -> list[int]:
    usual = [1024, 8192]
    if max_positions is None:
        return usual
    return sorted({*(context for context in usual if context < max_positions), max_positions})


def _readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from kvprobe.bill import Amount

    return [row | {field: Amount(row[field]) for field in ("bytes", "bytes_per_token")} for row in rows]


def _summary(run: dict[str, Any]) -> list[str]:
    from kvprobe.bill import Amount

    lines = ["", f"{run['model']} ({run['source']}), batch {run['batch']}, {run['dtype']}: {run['shape']}"]
    if run["weights_bytes"] is None:
        lines.append(f"weights {run['weights_source']}; give --weights-bytes")
    else:
        count = f"{run['n_parameters']:,} parameters, " if run["weights_source"] != "given" else ""
        lines.append(f"weights {Amount(run['weights_bytes'])} ({count}{run['weights_source']})")
    if run["max_positions"] is not None and max(run["contexts"]) > run["max_positions"]:
        lines.append(f"the model has {run['max_positions']:,} positions: contexts beyond them are arithmetic only")
    lines.append("memory only: what a lever costs in loss, kvprobe lowrank and kvprobe window measure")
    return lines


# a bill is arithmetic: nothing runs on a device and nothing is drawn by chance
command.params = [option for option in command.params if option.name not in ("device", "seed")]
for option in command.params:
    if isinstance(option, click.Option) and option.name == "dtype":
        option.help = "Of the cache and of the weights."
