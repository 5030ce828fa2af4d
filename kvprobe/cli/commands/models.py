"""``kvprobe models``: which models are on this machine?"""

from typing import Any

import click

from kvprobe.cli.command import Command
from kvprobe.cli.options import output_options


@click.command("models", cls=Command, short_help="List the models on this machine, or remove one.")
@click.option(
    "--remove", metavar="NAME", help="Remove a pulled model, or the conversion of a GGUF file: NAME as it is shown."
)
def command(remove: str | None, **options: Any) -> None:
    """List the models available here without a network, with the space they take.

    MODEL may also be any local directory of a Hugging Face causal model with safetensors, a GGUF file, or
    a hub id such as gpt2. A GGUF file is converted at its first use, and the conversion is kept for the
    next one. Its name cannot be given as MODEL; it is listed separately, with the name that --remove takes.

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
    offered = [row["name"] for row in rows if row["state"] == "not pulled"]
    if offered:
        notice(f"`kvprobe pull NAME` fetches {' or '.join(offered)}", quiet=options["quiet"])
    there = [row for row in rows if row["state"] != "not pulled"]
    # a tokenizer has no weights, and a GGUF file is a MODEL by its path, which is not kept
    models = [row for row in there if row["kind"] == "model" and row["state"] != "gguf"]
    if others := [f"{row['name']} ({Amount(row['bytes'])})" for row in there if row not in models]:
        notice(
            f"kept beside models: {', '.join(others)}; `kvprobe models --remove NAME` frees the space",
            quiet=options["quiet"],
        )
    if not models:
        return
    emit(
        Result("models", models, run_record()),
        format_=options["format_"],
        out=options["out"],
        columns=("name", "state", "bytes", "licence", "what"),
    )


for option in reversed(output_options()):
    command = option(command)
