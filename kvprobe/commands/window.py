"""``kvprobe window``: what does it cost to see only the last tokens and a few sinks?"""

from typing import Any

import click

from kvprobe.cli import common, passage_options

COLUMNS = (
    "window", "n_sink", "positions", "sink_choice", "loss", "perplexity", "delta", "delta_low", "delta_high",
    "cache_tokens",
)  # fmt: skip


@click.command("window")
@click.argument("model", default="gpt2")
@click.option(
    "--window",
    "windows",
    type=int,
    multiple=True,
    default=(256,),
    show_default=True,
    help="Tokens seen, the query itself counted. Repeat for a grid.",
)
@click.option(
    "--sinks",
    type=int,
    multiple=True,
    help="Tokens kept beside the window, in addition to it. Repeat for a grid.  [default: 0, 1, 4]",
)
@click.option(
    "--positions",
    type=click.Choice(["absolute", "cache", "recompute"]),
    default="absolute",
    show_default=True,
    help="absolute: a mask. cache: by slot of the cache (RoPE only). recompute: a fresh pass a prediction.",
)
@click.option(
    "--sink-choice",
    type=click.Choice(["first", "bos", "random", "heaviest"]),
    default="first",
    show_default=True,
    help="Which tokens are the sinks; none looks at what is scored.",
)
@click.option("--drop-sink-logits", is_flag=True, help="Take out the learned sink logits that a model has (gpt-oss).")
@click.option("--score-from", type=int, help="The first target is the token after it.  [default: half of --tokens]")
@passage_options
@common
def command(model: str, **options: Any) -> None:
    """What does it cost to see only the last tokens and a few attention sinks?

    The first row is the untouched pass; delta is the difference to it in nat per token, with its 95 % interval from
    a paired bootstrap over blocks of tokens. cache_tokens is what a full layer holds at the end.

    \b
    Positions: absolute   keys stay where they were made; older context leaks through the layers
               cache      the sinks are as near as their slots in the cache (StreamingLLM)
               recompute  each prediction sees its last tokens only, from position 0 (and the BOS, if there is one)

    \b
    Examples:
      kvprobe window smollm2-135m --window 256 --sinks 0 --sinks 1 --sinks 4 --plot window.png
      kvprobe window smollm2-135m --window 256 --positions cache
      kvprobe window smollm2-135m --window 256 --sinks 4 --sink-choice random   are the first tokens special?
      kvprobe window smollm2-135m --window 128 --positions recompute
    """
    import time

    from kvprobe.console import emit, progress_bar, save_plot
    from kvprobe.results import Result, run_record
    from kvprobe.subject import prepare
    from kvprobe.windows import grid

    started = time.perf_counter()
    score_from = options["tokens"] // 2 if options["score_from"] is None else options["score_from"]
    positions = options["positions"]
    with progress_bar(options["quiet"]) as progress:
        subject = prepare(
            model,
            text=options["text"],
            tokens=options["tokens"],
            bos=options["bos"],
            dtype=options["dtype"],
            device=options["device"],
            unlimited=positions == "cache",
            progress=progress,
        )
        rows = grid(
            subject.model,
            subject.input_ids[0],
            windows=options["windows"],
            sinks=options["sinks"] or _default_sinks(positions, options["sink_choice"], subject.passage.n_front),
            positions=positions,
            score_from=score_from,
            sink_choice=options["sink_choice"],
            drop_sink_logits=options["drop_sink_logits"],
            n_front=subject.passage.n_front,
            seed=options["seed"],
            progress=progress,
        )
    run = run_record(
        subject.record(),
        positions=positions,
        sink_choice=options["sink_choice"],
        score_from=score_from,
        n_targets=subject.passage.n_tokens - 1 - score_from,
        seed=options["seed"],
        wall_s=round(time.perf_counter() - started, 3),
    )
    result = Result("window", rows, run)
    emit(result, format_=options["format_"], out=options["out"], columns=COLUMNS, summary=_summary(result))
    if options["plot"]:
        from kvprobe.plots.window import figure

        save_plot(figure(rows, run), options["plot"])


def _default_sinks(positions: str, choice: str, n_front: int) -> tuple[int, ...]:
    if positions == "recompute":
        return (0,)
    return (0, n_front) if choice == "bos" else (0, 1, 4)


def _summary(result: Any) -> list[str]:
    run, first = result.run, result.rows[0]
    bos = "with BOS" if run["has_bos"] else "no BOS"
    lines = [
        "",
        f"{run['model']}, {run['passage']}, {run['n_tokens']:,} tokens ({bos}), {run['n_targets']:,} targets from "
        f"{run['score_from'] + 1:,} on; a window counts the query, sinks are in addition",
    ]
    if first["local_layers"]:
        lines.append(f"layers with a window of their own: {first['local_layers']}")
    if first["has_sink_logits"]:
        dropped = any(row["sink_logits_dropped"] for row in result.rows)
        lines.append(f"the model has learned sink logits{', dropped in every row but the first' if dropped else ''}")
    return lines
