"""``kvprobe cache``: what does the KV cache cost, and which lever would make it how much smaller?"""

import math
from typing import Any

import click

from kvprobe.cli.main import common

# more than any machine holds, and far from where sums of bytes would end
COUNT = click.IntRange(max=2**40)
SUPPORT = {
    "known": "known, its configuration is read as its authors mean it",
    "plain": "plain, read by keys that every family has; no key says otherwise",
}
COLUMNS = ("lever", "context", "bytes", "bytes_per_token", "relief", "outweighs_at", "stops_at")


@click.command("cache", short_help="The memory bill of the KV cache, from the config alone.")
@click.argument("model", default="gpt2")
@click.option(
    "--context",
    "contexts",
    type=COUNT,
    multiple=True,
    help="Tokens in the cache. Repeat for several.  [default: 1024, 8192 and all positions of the model]",
)
@click.option("--batch", type=COUNT, default=1, show_default=True, help="Sequences held at once.")
@click.option("--window", type=COUNT, default=1024, show_default=True, help="Of the window lever: last tokens kept.")
@click.option(
    "--sinks", type=COUNT, default=4, show_default=True, help="Of the window lever: first tokens kept beside."
)
@click.option("--rank", type=COUNT, help="Of the latent lever.  [default: a quarter of the width of K and V]")
@click.option(
    "--weights-bytes",
    type=click.FloatRange(min=1, max=1e18),
    help="Weights to compare with, such as 140e9.  [default: all parameters at --dtype]",
)
@common
def command(model: str, **options: Any) -> None:
    """What does the KV cache cost, by the configuration alone, and which lever would make it how much smaller?

    Needs no weights, and no network for the published models that kvprobe knows by name (gpt2, llama-2-70b,
    deepseek-v3, …: an unknown name lists them); any other MODEL by its config.json. A family is known (its config is
    read as its authors mean it) or plain (it says nothing but what every family says); a plain one with a key that
    could change what its layers keep is refused, as are encoders.

    \b
    Columns: support          known or plain: how the family's config was read (json and csv)
             bytes            of the cache after so many tokens of each sequence, for the whole batch
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
    from kvprobe.cli.console import emit, progress_bar, save_plot
    from kvprobe.experiments import cache
    from kvprobe.results.result import Result

    if options["weights_bytes"] is not None and math.isnan(options["weights_bytes"]):
        raise click.BadParameter("nan is no number of bytes", param_hint="--weights-bytes")
    with progress_bar(options["quiet"]) as progress:
        spec, about = cache.find_shape(model, progress=progress)
    result = cache.run(
        spec,
        about=about,
        n_sink=options["sinks"],
        weights_bytes=None if options["weights_bytes"] is None else int(options["weights_bytes"]),
        **{name: options[name] for name in ("contexts", "batch", "dtype", "window", "rank")},
    )
    as_table = options["format_"] == "table"
    shown = Result("cache", _readable(result.rows), result.run) if as_table else result
    emit(shown, format_=options["format_"], out=options["out"], columns=COLUMNS, summary=_summary(result.run))
    if options["plot"]:
        save_plot(result.plot(), options["plot"])


def _readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from kvprobe.shape.cache_bytes import Amount

    return [row | {field: Amount(row[field]) for field in ("bytes", "bytes_per_token")} for row in rows]


def _summary(run: dict[str, Any]) -> list[str]:
    from kvprobe.shape.cache_bytes import Amount

    lines = ["", f"{run['model']} ({run['source']}), batch {run['batch']}, {run['dtype']}: {run['shape']}"]
    lines.append(f"family {run['family']}: {SUPPORT[run['support']]}")
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
