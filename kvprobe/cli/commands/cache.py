"""``kvprobe cache``: what does the KV cache cost, and how much smaller would each lever make it?"""

import inspect
from typing import Any

import click

from kvprobe.cli.experiment import draw, options_of, settings_from, show
from kvprobe.cli.options import common
from kvprobe.experiments.cache import Cache, find_shape


@click.command("cache", short_help=Cache.short, help=inspect.getdoc(Cache))
@click.argument("model", default="gpt2")
@options_of(Cache)
@common
def command(model: str, **options: Any) -> None:  # noqa: D103
    from kvprobe.cli.console import progress_bar

    bill = Cache(**settings_from(Cache, options))
    with progress_bar(options["quiet"]) as progress:
        shape = find_shape(model, progress=progress)
    result = bill.run(shape)
    show(result, Cache, options)
    draw(result, Cache, options)


# a bill is arithmetic: nothing runs on a device and nothing is random
command.params = [option for option in command.params if option.name not in ("device", "seed")]
for option in command.params:
    if isinstance(option, click.Option) and option.name == "dtype":
        option.help = "Dtype of the cache and of the weights."
