"""Draw every figure, or name the analyses that are still to be run for a model.

python -m figures --results results --out figures/drawn
python -m figures --missing smollm2-135m
"""

import sys
from importlib import import_module
from pathlib import Path

import click

from figures._paper import Picture
from kvprobe.errors import KvprobeError


def pictures() -> list[Picture]:
    """The pictures, one in each file of this folder."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    return [import_module(f"figures.{name}").PICTURE for name in names]


@click.command(help=__doc__)
@click.option("--results", type=click.Path(path_type=Path), default="results", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default="figures/drawn", show_default=True)
@click.option(
    "--missing",
    metavar="MODEL",
    help="Draw nothing: print, for `python -m`, the analyses that have no result of MODEL.",
)
def main(results: Path, out: Path, missing: str | None) -> None:
    """Draw all figures; name those without a result, with the command that makes it, and fail."""
    if missing is not None:
        for picture in pictures():
            if picture.missing(results, missing):
                click.echo(picture.analysis(missing))
        return
    failed = 0
    for picture in pictures():
        try:
            paths = picture.save(results, out)
        except KvprobeError as error:
            click.echo(f"{picture.name}: {error}", err=True)
            # a result that takes hours is not missing by oversight
            failed += not picture.hours
        else:
            click.echo(f"{picture.name}: {len(paths)} files in {out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
