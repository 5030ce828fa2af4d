"""``kvprobe memory``: does a KV cache hold what its formula says?"""

from typing import Any

import click

from kvprobe.cli import common

DEFAULT_CONTEXTS = (128, 512, 1024)
COLUMNS = ("context", "cache", "formula_bytes", "measured_bytes", "pinned_bytes", "excess_bytes", "ratio")


@click.command("memory")
@click.argument("model", default="gpt2")
@click.option(
    "--context",
    "contexts",
    type=int,
    multiple=True,
    help="Tokens read into the cache. Repeat for several.  [default: 128, 512 and 1024]",
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences held at once.")
@click.option("--window", type=int, default=256, show_default=True, help="Of the rolling cache: last tokens kept.")
@click.option("--sinks", type=int, default=4, show_default=True, help="Of the rolling cache: first tokens kept beside.")
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
    import time

    from kvprobe.commands.latency import load, record
    from kvprobe.console import emit, notice, progress_bar, save_plot
    from kvprobe.holders import own_shape, rows
    from kvprobe.results import Result, run_record

    started = time.perf_counter()
    with progress_bar(options["quiet"]) as progress:
        loaded = load(model, options, progress)
        limit = loaded.spec.max_positions
        contexts = options["contexts"] or tuple(n for n in DEFAULT_CONTEXTS if limit is None or n <= limit) or (limit,)
        found = rows(
            loaded,
            contexts,
            batch=options["batch"],
            window=options["window"],
            n_sink=options["sinks"],
            seed=options["seed"],
            progress=progress,
        )
    if own_shape(loaded.spec) is None:
        what = f"the {loaded.spec.family} family keeps other things than one K and V a KV head"
        notice(f"kvprobe's own caches are left out: {what}", quiet=options["quiet"])
    run = run_record(
        record(loaded),
        contexts=[*contexts],
        batch=options["batch"],
        window=options["window"],
        n_sink=options["sinks"],
        counted_by="allocator" if loaded.device.startswith("cuda") else "unique storages",
        seed=options["seed"],
        wall_s=round(time.perf_counter() - started, 3),
    )
    result = Result("memory", found, run)
    emit(result, format_=options["format_"], out=options["out"], columns=COLUMNS, summary=_summary(found, run))
    if options["plot"]:
        from kvprobe.plots.memory import figure

        save_plot(figure(found, run), options["plot"])


def _summary(rows: list[dict[str, Any]], run: dict[str, Any]) -> list[str]:
    from kvprobe.bill import Amount

    lines = [
        "",
        f"{run['model']} ({run['source']}), {run['dtype']}, batch {run['batch']:,}, counted by {run['counted_by']}",
    ]
    exact = list(dict.fromkeys(row["cache"] for row in rows))
    exact = [name for name in exact if all(row["excess_bytes"] == 0 for row in rows if row["cache"] == name)]
    if exact:
        lines.append(f"to the byte what the formula says: {', '.join(exact)}")
    for name in dict.fromkeys(row["cache"] for row in rows if row["pinned_bytes"]):
        worst = max((row for row in rows if row["cache"] == name), key=lambda row: row["pinned_bytes"])
        lines.append(
            f"{name}: at {worst['context']:,} tokens views keep {Amount(worst['pinned_bytes'])} alive that nothing "
            f"reads, {worst['ratio']:.2f} times the formula in all"
        )
    return lines
