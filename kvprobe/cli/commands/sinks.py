"""``kvprobe sinks``: how much of the attention goes to token 0?"""

from typing import Any

import click

from kvprobe.cli.main import COUNT, Finite, common, load_subject, passage_options

COLUMNS = ("layer", "mass", "uniform", "sink_rate", "top_position", "top_token", "top_mass", "window")
HEAD_COLUMNS = ("layer", "head", "mass", "is_sink")


@click.command("sinks", short_help="How much of the attention is on token 0, the sink?")
@click.argument("model", default="gpt2")
@passage_options
@click.option(
    "--queries-from",
    type=COUNT,
    default=64,
    show_default=True,
    help="First query counted: earlier ones see little else.",
)
@click.option(
    "--epsilon",
    type=Finite(0, 1),
    default=0.3,
    show_default=True,
    help="A head is a sink head if it puts more than this on token 0.",
)
@click.option("--per-head", is_flag=True, help="One row a head instead of one a layer.")
@click.option(
    "--control",
    type=click.Choice(["none", "random", "repeat"]),
    default="none",
    show_default=True,
    help="Instead of the text: ids drawn uniformly, or one id repeated (never with BOS).",
)
@common
def command(model: str, **options: Any) -> None:
    """How much of each layer's attention goes to token 0, the attention sink?

    \b
    Columns: mass         mean attention weight on token 0, over heads and queries
             uniform      the same if attention were spread evenly over what is visible
             sink_rate    share of heads with more than EPSILON on token 0
             top_*        the position that gets most of the layer's mass, whichever it is
             window       the layer's own sliding window, where it has one

    \b
    Examples:
      kvprobe sinks smollm2-135m --plot sinks.png
      kvprobe sinks smollm2-135m --control repeat     the sink needs tokens that differ
      kvprobe sinks gemma3-270m --bos drop            a model whose sink is its BOS
      kvprobe sinks MODEL --tokens 64 --queries-from 0  the published ε-sink protocol
    """
    from kvprobe.cli.console import emit, progress_bar, save_plot
    from kvprobe.experiments import sinks

    settings = {name: options[name] for name in ("queries_from", "epsilon", "control", "seed")}
    with progress_bar(options["quiet"]) as progress:
        result = sinks.run(load_subject(model, options, progress), **settings, progress=progress)
    emit(
        sinks.by_head(result) if options["per_head"] else result,
        format_=options["format_"],
        out=options["out"],
        columns=HEAD_COLUMNS if options["per_head"] else COLUMNS,
        summary=["", sinks.sentence(result)],
    )
    if options["plot"]:
        from kvprobe.plots.sinks import figure

        save_plot(figure(result.rows, result.run), options["plot"])
