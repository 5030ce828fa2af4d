"""A command made from an experiment has its bounds, and its errors name the options that were typed."""

from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from kvprobe.cli.experiment import command_of
from kvprobe.experiments.experiment import Experiment, SettingError, setting
from kvprobe.results.columns import Column
from kvprobe.results.result import Result


@dataclass(frozen=True, kw_only=True)
class Made(Experiment):
    """What is made? Example: kvprobe made gpt2"""

    name = "made"
    short = "What is made?"
    needs = "config"
    columns = (Column("size", "size"),)

    n_sink: int = setting(4, "Sinks.", least=0, most=9)
    many: int = setting(1, "Many.", most=5)
    above: int = setting(1, "Above.", least=0, above=True)
    sizes: tuple[int, ...] = setting((3,), "Sizes.", flag="--size", kind=int)
    way: str = setting("near", "A way.", choices=("near", "far"))

    def __post_init__(self):
        super().__post_init__()
        if self.n_sink == 7:
            raise SettingError("{n_sink} cannot be {0}: use another", 7)
        if self.n_sink == 8:
            raise SettingError("{n_sink} {0} needs {way} far, not {way} {1}", self.n_sink, self.way)

    def measure(self, subject, progress):
        if max(self.sizes) > subject.spec.n_layers:
            raise SettingError("{sizes} must be at most {0}, got {1}", subject.spec.n_layers, max(self.sizes))
        return [{"size": size} for size in self.sizes], {}

    @classmethod
    def sentence(cls, result: Result) -> str:
        return f"{len(result.rows)} of {result.run['model']}"


def ran(*arguments):
    return CliRunner().invoke(command_of(Made), [*map(str, arguments)])


def test_settings_are_options_and_the_table_has_the_columns():
    done = ran("gpt2", "--size", 2, "--size", 12)
    assert (done.exit_code, done.stdout.splitlines()) == (0, ["size", "   2", "  12", "", "2 of gpt2"])
    said = ran("--help").output
    assert "--n-sink INTEGER RANGE" in said
    assert "0<=x<=9" in said
    # a bill runs on no device and draws nothing
    assert "--device" not in said
    assert "--plot" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--n-sink", 10], "'--n-sink': 10 is not in the range 0<=x<=9"),
        (["--n-sink", -1], "'--n-sink': -1 is not in the range 0<=x<=9"),
        (["--many", 6], "'--many': 6 is not in the range x<=5"),
        (["--above", 0], "'--above': 0 is not in the range x>0"),
        (["--size", "2.5"], "'--size': '2.5' is not a valid integer"),
        (["--n-sink", 8], "--n-sink 8 needs --way far, not --way near"),
    ],
)
def test_bounds_and_contradictions_are_usage_errors(arguments, says):
    done = ran(*arguments)
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--n-sink", 7], "--n-sink cannot be 7: use another"),
        (["--size", 13], "--size must be at most 12, got 13"),
    ],
)
def test_other_errors_name_the_option_too(arguments, says):
    done = ran(*arguments)
    assert str(done.exception) == says
    assert not isinstance(done.exception, click.ClickException)
