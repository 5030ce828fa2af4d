"""``kvprobe latency``: how long does a token take, with a cache and without, and what would the machine allow?"""

from typing import Any

import click

from kvprobe.cli.main import COUNT, CountFrom, Finite, common, engine_option, load_model

COLUMNS = (
    "phase",
    "context",
    "batch",
    "step",
    "ms_median",
    "ms_low",
    "ms_high",
    "tokens_per_s",
    "MB_moved",
    "GFLOP",
    "intensity",
    "attention_intensity",
    "bound",
    "ceiling_tokens_per_s",
    "fraction_of_ceiling",
)


@click.command("latency")
@click.argument("model", default="gpt2")
@click.option(
    "--context",
    "contexts",
    type=COUNT,
    multiple=True,
    help="Tokens attended to, the newest included. Repeat for several.  [default: 128, 512 and 1024]",
)
@click.option("--batch", "batches", type=COUNT, multiple=True, help="Rows decoded at once. Repeatable.  [default: 1]")
@click.option(
    "--phase",
    "phases",
    type=click.Choice(["naive", "cached", "prefill"]),
    multiple=True,
    help="Time only these.  [default: all]",
)
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=True,
    show_default=True,
    help="Read and decode the fastest way there is (a CPU: compiled by numba), or with the readable decoder in torch.",
)
@engine_option
@click.option("--random-weights", is_flag=True, help="Take MODEL's shape alone and draw the weights.")
@click.option("--repeats", type=CountFrom(1), default=20, show_default=True, help="Runs a row, at most.")
@click.option(
    "--seconds",
    type=Finite(min=0),
    default=3.0,
    show_default=True,
    help="After so long a row stops repeating, though not before three runs.",
)
@click.option("--end-to-end", is_flag=True, help="Also a whole answer: a prompt, then many tokens, both ways.")
@click.option("--prompt-tokens", type=COUNT, default=3584, show_default=True, help="Of --end-to-end: the prompt.")
@click.option("--new-tokens", type=COUNT, default=256, show_default=True, help="Of --end-to-end: tokens generated.")
@click.option(
    "--naive-samples",
    type=COUNT,
    help="Of --end-to-end without a cache: time only so many tokens, spread evenly.  [default: all]",
)
@common
def command(model: str, **options: Any) -> None:
    """How long does a token take, with a KV cache and without, and how near is that to what the machine allows?

    The machine's own ceilings are measured beside: the best rate at which real kernels read memory, and multiply
    matrices in this dtype. So is what else the machine did meanwhile: figures of a busy one are marked, not to be
    quoted. Token ids are random; time does not depend on them. prefill and naive are timed with the first --batch; for
    the others the decode step alone.

    \b
    Columns: phase        naive: everything read again for one token; cached: one decode step; prefill: a whole prompt
             step         what read or decoded: numba (compiled) or torch (the readable decoder)
             ms_*         median and quartiles of one run; tokens_per_s counts all rows of the batch
             MB_moved     weights once, keys and values of the context: what no step can do without, in 10^6 bytes
             intensity    FLOPs a byte; attention's own beside it, in decode the same at every length
             bound        what sets the ceiling: bandwidth, or arithmetic beyond the ridge point
             ceiling_*    tokens/s if the machine's measured best were reached, and the share that was

    \b
    Examples:
      kvprobe latency smollm2-135m --plot latency.png
      kvprobe latency smollm2-135m --phase cached --batch 1 --batch 4 --batch 16 --batch 64
      kvprobe latency gpt-124m --random-weights --context 512 --context 1024 --context 2048 --context 4096
      kvprobe latency gpt-124m --random-weights --end-to-end --naive-samples 8
      kvprobe latency smollm2-135m --no-compile       what compiling brings
    """
    from kvprobe.cli.console import emit, notice, progress_bar, save_plot
    from kvprobe.experiments import latency
    from kvprobe.results import phrases
    from kvprobe.results.result import Result

    settings = {name: options[name] for name in ("contexts", "repeats", "seconds", "naive_samples", "seed")}
    settings["engine"] = _engine(options)
    # what is left out takes the experiment's own default
    settings |= {name: options[name] for name in ("batches", "phases") if options[name]}
    if options["end_to_end"]:
        settings["end_to_end"] = options["prompt_tokens"], options["new_tokens"]
    with progress_bar(options["quiet"]) as progress:
        result = latency.run(load_model(model, options, progress), **settings, progress=progress)
    rows, run = result.rows, result.run
    for note in run["notes"]:
        notice(note, quiet=options["quiet"])
    if options["format_"] != "table":
        # of a table it is a part
        for line in phrases.lines(run):
            notice(line, quiet=options["quiet"])
    shown = Result("latency", _readable(rows), run) if options["format_"] == "table" else result
    emit(shown, format_=options["format_"], out=options["out"], columns=COLUMNS, summary=_summary(rows, run))
    if options["plot"]:
        from kvprobe.plots.latency import figure

        save_plot(figure(rows, run), options["plot"])


def _readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"MB_moved": row["bytes_moved"] / 1e6, "GFLOP": row["flops"] / 1e9} for row in rows]


def _summary(rows: list[dict[str, Any]], run: dict[str, Any]) -> list[str]:
    from kvprobe.experiments.latency import ABOVE
    from kvprobe.results import phrases

    lines = [
        "",
        *phrases.lines(run),
        f"{run['model']} ({run['source']}), {run['dtype']}, {run['device']}: the machine reads "
        f"{run['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s and multiplies {run['matrix_flops_per_s'] / 1e9:,.0f} GFLOP/s, "
        f"ridge point {run['ridge_point']:.1f} FLOP/B",
        "start-up, once a process: " + ", ".join(f"{name} {s:.2f} s" for name, s in run["start_up_s"].items())
        if run["start_up_s"]
        else "",
    ]
    cached = [row for row in rows if row["phase"] == "cached"]
    if cached:
        best = max(cached, key=lambda row: row["fraction_of_ceiling"])
        lines.append(
            f"decode reaches {best['fraction_of_ceiling']:.0%} of its ceiling at {best['context']:,} tokens, batch "
            f"{best['batch']:,}; attention's own intensity is {best['attention_intensity']:g} FLOP/B at every length"
        )
    if any(row["fraction_of_ceiling"] > 1 for row in rows):
        lines.append(f"a row above 100%: {ABOVE}")
    binds = ", ".join(
        f"{int(context):,} tokens: "
        + ("never, the cache keeps bandwidth the limit" if batch is None else f"batch {batch:,}")
        for context, batch in run["arithmetic_binds_at_batch"].items()
    )
    lines.append(f"arithmetic binds decode from: {binds}")
    return [line for i, line in enumerate(lines) if line or i == 0]


def _engine(options: dict[str, Any]) -> str:
    if options["compiled"]:
        return str(options["engine"])
    if options["engine"] == "numba":
        raise click.UsageError("--no-compile and --engine numba contradict each other: leave one out")
    return "torch"
