"""``kvprobe evaluate``: what does an attention function of your own cost?"""

import sys
from contextlib import redirect_stdout
from typing import Any

from kvprobe.cli.experiment import ask, asked, command_of
from kvprobe.experiments.evaluate import Evaluate
from kvprobe.results.result import Result


def _body(model: str, options: dict[str, Any]) -> Result:
    # what the user's code prints must not get into the result
    with redirect_stdout(sys.stderr):
        return ask(asked(Evaluate, options), model, options)


command = command_of(Evaluate, body=_body)
for option in command.params:
    option.required = option.required or option.name == "attend"
