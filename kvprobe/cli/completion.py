"""Which names does the shell complete? Models where a command takes one, and texts; nothing heavy is imported."""

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem


def _models() -> Iterable[str]:
    from kvprobe.models import loading

    rows = loading.available()
    return [row["name"] for row in rows if row["kind"] == "model" and row["state"] in ("pulled", "hub cache")]


def _offered() -> Iterable[str]:
    from kvprobe.models.pull import CATALOGUE

    return CATALOGUE


def _texts() -> Iterable[str]:
    from kvprobe.text.texts import TEXTS

    return TEXTS


# parameters of the commands; `generate`'s first argument is its model
NAMES = {
    "model": _models,
    "arguments": _models,
    "name": _offered,
    "text": _texts,
    "fit_text": _texts,
}


class Named(click.types.StringParamType):
    """A string that the shell completes to one of ``names``, or to a file."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that begin with ``incomplete``; files too, since any of them may also be a path."""
        if param.name == "arguments" and ctx.params.get("arguments"):
            # the prompt
            return []
        fitting = [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *fitting]


def completing(command: click.Command) -> click.Command:
    """The same command, whose models and texts the shell completes."""
    for parameter in command.params:
        if parameter.name in NAMES and isinstance(parameter.type, click.types.StringParamType):
            parameter.type = Named(NAMES[parameter.name])
    return command
