"""``kvprobe models``: what can be loaded on this machine."""

from typing import Any

import click

from kvprobe.cli.main import output_options


@click.command("models", short_help="List what can be loaded here.")
def command(**options: Any) -> None:
    """List what can be loaded here without a network, and what can be pulled.

    Besides these, MODEL may be any local directory of a Hugging Face causal model with safetensors, a GGUF file, or
    a hub id such as gpt2.
    """
    from kvprobe.cli.console import emit
    from kvprobe.models import loading
    from kvprobe.results.record import run_record
    from kvprobe.results.result import Result

    result = Result("models", loading.available(), run_record())
    emit(
        result,
        format_=options["format_"],
        out=options["out"],
        columns=("name", "state", "bytes", "licence", "what"),
    )


for option in reversed(output_options()):
    command = option(command)
