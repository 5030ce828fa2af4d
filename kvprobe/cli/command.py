"""How does a command say what is wrong? In terms of its own options."""

from typing import Any

import click

from kvprobe.errors import SettingError, reword


class Command(click.Command):
    """A command whose errors name its options where the library's name settings (`kvprobe.errors.Wording`)."""

    def invoke(self, ctx: click.Context) -> Any:
        """As click does. Settings that contradict each other are a usage error."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            clash = isinstance(error, SettingError) and len(error.args[0].names) > 1
            reword(error, lambda wording: wording.said(flags_of(self)))
            if clash:
                raise click.UsageError(str(error), ctx) from error
            raise


def flags_of(command: click.Command) -> dict[str, str]:
    """The options of a command by the names of their values, and by their own words: ``windows``, ``window``."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    words = {flag[2:].replace("-", "_"): flag for option in options for flag in option.opts if flag.startswith("--")}
    return words | {option.name: option.opts[0] for option in options if option.name}
