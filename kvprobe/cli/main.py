"""The command line: which question does each command ask? Thin: options in, one result out, errors in one line."""

# first, so that Ctrl-C is handled while the rest is imported
from kvprobe import interrupts

interrupts.guard()

import errno
import io
import os
import pkgutil
import re
import sys
from contextlib import suppress
from importlib import import_module

import click

import kvprobe.cli.commands
from kvprobe import __version__
from kvprobe.cli.command import flags_of
from kvprobe.cli.completion import completing
from kvprobe.cli.options import refuse_repeated
from kvprobe.cli.process import tune_process
from kvprobe.errors import KvprobeError, did_you_mean, reword
from kvprobe.results.visible import visible

# in the order in which --help lists them; experiments that are not listed follow
COMMANDS = (
    "sinks",
    "lowrank",
    "window",
    "evaluate",
    "relief",
    "cache",
    "memory",
    "latency",
    "gqa",
    "generate",
    "report",
    "pull",
    "models",
)
# longer than a SHA-256
_LONG_NUMBER = re.compile(r"\d{80,}")


class LazyGroup(click.Group):
    """Imports a command only when it is asked for, so that ``--help`` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which to get to know them, not alphabetical."""
        from kvprobe.experiments import registry

        return list(dict.fromkeys([*COMMANDS, *registry.names()]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name: a file of ``kvprobe.cli.commands``, or else made from the experiment."""
        if cmd_name not in self.list_commands(ctx):
            return None
        if cmd_name in {module.name for module in pkgutil.iter_modules(kvprobe.cli.commands.__path__)}:
            return completing(import_module(f"kvprobe.cli.commands.{cmd_name}").command)
        from kvprobe.cli.experiment import command_of
        from kvprobe.experiments import registry

        return completing(command_of(registry.experiment(cmd_name)))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that was asked for; a usage error for an unknown one, naming the closest."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            ctx.fail(
                f"no such command {args[0]!r}: {did_you_mean(args[0], known, '`kvprobe --help` lists the commands')}"
            )
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            refuse_repeated(click.Context(command, info_name=name, parent=ctx), rest)
        return name, command, rest


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvprobe")
def cli() -> None:
    """Where a language model's attention goes, how small its KV cache could be, and what that would cost.

    \b
    A first look, on a real pretrained model that is fetched once (93 MB):
      kvprobe pull smollm2-135m
      kvprobe sinks smollm2-135m

    MODEL is a pulled name, a local directory, a GGUF file or a hub id such as gpt2 (the default).
    `kvprobe models` lists the models on this machine. `kvprobe COMMAND --help` explains each command.
    """
    from kvprobe.files.store import sweep_all

    sweep_all()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    run(cli, arguments, name="kvprobe")


def run(command: click.Command, arguments: list[str] | None = None, *, name: str) -> None:
    """Run ``command`` as a program and exit: 0, 1 for an error, 2 for usage, 130 for Ctrl-C.

    SIGTERM cleans up as Ctrl-C does and exits with 143.
    """
    done = interrupts.work()
    try:
        try:
            tune_process()
            value = command.main(args=arguments, prog_name=name, standalone_mode=False)
            if sys.stdout is not None:  # as after `>&-`
                sys.stdout.flush()
        finally:
            done()
        status = _interrupted() or (value if isinstance(value, int) else 0)
    except BaseException as error:
        # Ctrl-C while a library is imported can come out as any of its own errors, and a panic of one written in Rust
        # is not an Exception
        if interrupts.seen() is None and isinstance(error, click.Abort | KeyboardInterrupt):
            status = _told("kvprobe: interrupted", 130)
        else:
            # of a program of its own, such as an analysis; kvprobe's commands have done so
            reword(error, lambda wording: wording.said(flags_of(command)))
            status = _interrupted() or _status_of(error)
    finally:
        interrupts.release()
    sys.exit(status)


def _interrupted() -> int:
    """The exit code of a command that a signal ended, reported in one line; 0 without a signal."""
    number = interrupts.seen()
    return 0 if number is None else _told(interrupts.SAID[number], 128 + number)


def _status_of(error: BaseException) -> int:
    """The exit code of an error, reported in one line; errors for developers are raised again."""
    if isinstance(error, click.ClickException):
        said = io.StringIO()
        error.show(said)
        return _told(said.getvalue().rstrip("\n"), error.exit_code, keep="\n")
    if isinstance(error, BrokenPipeError):
        # the reader (head, less) has seen enough; keep the interpreter from flushing into the closed pipe again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if os.environ.get("KVPROBE_DEBUG") or isinstance(error, SystemExit):
        raise error
    return _told(f"kvprobe: {_one_line(error)}", 1)


def _told(line: str, status: int, *, keep: str = "") -> int:
    short = _LONG_NUMBER.sub(lambda match: f"{match[0][:20]}… ({len(match[0])} digits)", line)
    # if standard error is gone, the exit code still says it
    with suppress(OSError):
        click.echo(visible(short, keep=keep), err=True)
    return status


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KvprobeError | ValueError):
        return text
    if isinstance(error, RecursionError):
        return "a file is nested too deeply to be read; no file of a model or of kvprobe is"
    if isinstance(error, OverflowError):
        return f"a number is too large or not finite ({text}): check the options"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full: free some space, or write to another place"
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}" if error.strerror and error.filename else text
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text.lower():
        return f"out of memory ({text[:200]}): use fewer --tokens, a smaller model, or --dtype bfloat16"
    return f"{type(error).__name__}: {text[:300]} (unexpected: KVPROBE_DEBUG=1 shows where; please report it)"


interrupts.release()
