"""``kvprobe memory``: does a KV cache hold what its formula says?"""

from typing import TYPE_CHECKING, Any

import click

from kvprobe.cli.main import COUNT, CountFrom, common, load_model

if TYPE_CHECKING:
    from kvprobe.results.result import Result

COLUMNS = ("context", "cache", "formula_bytes", "measured_bytes", "pinned_bytes", "excess_bytes", "ratio")


@click.command("memory")
@click.argument("model", default="gpt2")
@click.option(
    "--context",
    "contexts",
    type=COUNT,
    multiple=True,
    help="Tokens read into the cache. Repeat for several.  [default: 128, 512 and 1024]",
)
@click.option("--batch", type=CountFrom(1), default=1, show_default=True, help="Sequences held at once.")
@click.option("--window", type=COUNT, default=256, show_default=True, help="Of the rolling cache: last tokens kept.")
@click.option(
    "--sinks", type=COUNT, default=4, show_default=True, help="Of the rolling cache: first tokens kept beside."
)
@click.option("--random-weights", is_flag=True, help="Take MODEL's shape alone and draw the weights.")
@common
def command(model: str, **options: Any) -> None:
    """Does a KV cache hold what its formula says? Bytes by formula beside bytes that are really held.

    Every cache takes the context in one go. On a CPU the bytes of all storages that it keeps alive are summed, each
    once; on a GPU the allocator's count is taken. What is pinned is storage that views keep alive and do not read.

    \b
    Caches: full         kvprobe's, preallocated; local layers keep their window
            rolling      kvprobe's sinks and window: constant, whatever the context
            fused views  K and V kept as slices of a fused QKV projection: a common mistake, on purpose
            hf dynamic   transformers' DynamicCache, after a forward of the model
            hf static    transformers' StaticCache, made for the context

    \b
    Columns: excess_bytes  measured beyond the formula
             ratio         measured over the formula

    \b
    Examples:
      kvprobe memory smollm2-135m
      kvprobe memory gemma3-270m --context 2048       sliding layers: what each cache keeps of them
      kvprobe memory gpt-124m --random-weights --context 1024 --context 2048 --context 4096
    """
    from kvprobe.bench.cache_memory import own_shape
    from kvprobe.cli.console import emit, notice, progress_bar, save_plot
    from kvprobe.experiments import memory

    settings = {name: options[name] for name in ("contexts", "batch", "window", "seed")}
    with progress_bar(options["quiet"]) as progress:
        loaded = load_model(model, options, progress)
        result = memory.run(loaded, n_sink=options["sinks"], **settings, progress=progress)
    if own_shape(loaded.spec) is None:
        what = f"the {loaded.spec.family} family keeps other things than one K and V a KV head"
        notice(f"kvprobe's own caches are left out: {what}", quiet=options["quiet"])
    emit(result, format_=options["format_"], out=options["out"], columns=COLUMNS, summary=_summary(result))
    if options["plot"]:
        from kvprobe.plots.memory import figure

        save_plot(figure(result.rows, result.run), options["plot"])


def _summary(result: "Result") -> list[str]:
    from kvprobe.experiments.memory import exact_caches
    from kvprobe.shape.cache_bytes import Amount

    rows, run = result.rows, result.run
    lines = [
        "",
        f"{run['model']} ({run['source']}), {run['dtype']}, batch {run['batch']:,}, counted by {run['counted_by']}",
    ]
    if exact := exact_caches(result):
        lines.append(f"to the byte what the formula says: {', '.join(exact)}")
    for name in dict.fromkeys(row["cache"] for row in rows if row["pinned_bytes"]):
        worst = max((row for row in rows if row["cache"] == name), key=lambda row: row["pinned_bytes"])
        lines.append(
            f"{name}: at {worst['context']:,} tokens views keep {Amount(worst['pinned_bytes'])} alive that nothing "
            f"reads, {worst['ratio']:.2f} times the formula in all"
        )
    return lines
