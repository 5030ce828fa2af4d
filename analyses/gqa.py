"""What does sharing keys and values cost in quality? The published small GPT at 8, 4, 2 and 1 KV heads, three seeds.

\b
    python -m analyses.gqa --cells DIRECTORY            # trains the missing cells; hours on two cores
    python -m analyses.gqa --cells DIRECTORY --collect  # writes results from the finished cells

Published, one seed: best validation loss 1.55, 1.51, 1.51, 1.54 (another run 1.53, 1.53, 1.50, 1.51) with a cache of
12, 6, 3 and 1.5 KiB a token. A cell is one model: a head count and a seed. Cells run seed by seed; several processes
may share one directory.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from analyses.common import script, show
from kvprobe.cells.run_store import RunStore
from kvprobe.cli.console import progress_bar
from kvprobe.experiments.gqa import KV_HEADS, Gqa
from kvprobe.experiments.gqa_training import Protocol, TrainingSubject
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Result
from kvprobe.text.corpus import characters
from kvprobe.text.texts import read_text

SEEDS = 3


def run(
    directory: str | Path,
    *,
    text: str = "time-machine",
    kv_heads: Sequence[int] = KV_HEADS,
    seeds: int = SEEDS,
    protocol: Protocol | None = None,
    collect: bool = False,
    progress: Progress = silent,
) -> Result:
    """The result of ``kvprobe gqa`` with its cells kept in ``directory``; trains the missing ones unless ``collect``.

    The run record names the cells that are ``missing``. Raises KvprobeError if none is there.
    """
    protocol = Protocol() if protocol is None else protocol
    split = {"length": protocol.length, "n_train": protocol.n_train, "n_valid": protocol.n_valid}
    corpus = characters(read_text(text), **split)
    subject = TrainingSubject(corpus, RunStore(Path(directory)), protocol=protocol, collect=collect)
    return Gqa(kv_heads=tuple(kv_heads), seeds=seeds).run(subject, progress=progress)


@click.command(help=__doc__)
@click.option("--cells", "directory", type=click.Path(file_okay=False), required=True, help="Where cells are kept.")
@click.option("--text", default="time-machine", show_default=True, help="A UTF-8 file; the default is the published.")
@click.option("--collect", is_flag=True, help="Train nothing: results of the cells that are there.")
@click.option("--save/--no-save", default=True, help="Keep results/gqa.{csv,json}.")
def main(directory: str, text: str, collect: bool, save: bool) -> None:
    """Print the table and keep it."""
    with progress_bar(quiet=False) as progress:
        result = run(directory, text=text, collect=collect, progress=progress)
    show(result, save=save, columns=Gqa.table_columns(result), summary=Gqa.summary(result))


if __name__ == "__main__":
    script(main)
