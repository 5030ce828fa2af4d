"""``kvprobe models``: which models are on this machine?"""

from typing import Any

import click

from kvprobe.cli.command import Command
from kvprobe.cli.options import output_options


@click.command("models", cls=Command, short_help="List the models on this machine, or remove one.")
@click.option(
    "--remove", metavar="NAME", help="Remove a pulled model, or the conversion of a GGUF file: NAME as listed."
)
def command(remove: str | None, **options: Any) -> None:
    """List the models available here without a network, with the space they take.

    MODEL may also be any local directory of a Hugging Face causal model with safetensors, a GGUF file, or
    a hub id such as gpt2. A GGUF file is converted at its first use; the conversion is kept and listed by its name.

    \b
    Examples:
      kvprobe models
      kvprobe models --format json
      kvprobe models --remove smollm2-135m      kvprobe pull smollm2-135m fetches it again
    """
    from kvprobe.cli.console import emit, notice, progress_bar
    from kvprobe.models import loading
    from kvprobe.models.removal import remove as remove_model
    from kvprobe.results.record import run_record
    from kvprobe.results.result import Result
    from kvprobe.shape.cache_bytes import Amount

    if remove is not None:
        with progress_bar(options["quiet"]) as progress:
            freed = remove_model(remove, progress=progress)
        notice(f"removed {remove}: {Amount(freed)} freed", quiet=options["quiet"])
        return
    rows = loading.available()
    here = [row for row in rows if row["state"] != "not pulled"]
    offered = [row["name"] for row in rows if row["state"] == "not pulled"]
    if offered:
        notice(f"`kvprobe pull NAME` fetches {' or '.join(offered)}", quiet=options["quiet"])
    if not here:
        return
    emit(
        Result("models", here, run_record()),
        format_=options["format_"],
        out=options["out"],
        columns=("name", "state", "bytes", "licence", "what"),
    )


for option in reversed(output_options()):
    command = option(command)
