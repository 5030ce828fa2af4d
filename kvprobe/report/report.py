"""What is there to say about one model? One self-contained page, with the sections of `SECTIONS`, each an experiment.

In order: what the model is; what each lever on its cache costs and leaves, measured (``relief``); the memory bill, by
arithmetic (``cache``); its sinks; its loss by window and by rank; its speed; then every other experiment that has a
heading. The model is loaded once. A section that its family does not allow says why, and the others follow.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import __version__
from kvprobe.errors import KvprobeError
from kvprobe.experiments import registry, window
from kvprobe.experiments.cache import Cache, KnownShape
from kvprobe.experiments.experiment import Experiment, settings_of
from kvprobe.experiments.latency import ABOVE, ON_THE_PAGE, Latency
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.experiments.relief import Relief
from kvprobe.experiments.sinks import Sinks
from kvprobe.experiments.window import Window
from kvprobe.files.store import check_writable, disk_error
from kvprobe.files.whole import write_whole
from kvprobe.progress import Progress, silent
from kvprobe.report.page import Section, document
from kvprobe.results import phrases
from kvprobe.results.columns import Column, plain
from kvprobe.results.result import Result
from kvprobe.shape.cache_bytes import DTYPE_BYTES, Amount, describe
from kvprobe.text.passages import Bos, notices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvprobe.models.loading import Loaded
    from kvprobe.models.subject import Subject

DEFAULT_TOKENS = 1024
HINT = "write the page to another place"
# windows and timed contexts, as parts of the passage
WINDOW_PARTS = (16, 8, 4, 2)
CONTEXT_PARTS = (8, 2, 1)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What a page measures: a passage, and how many seconds each row of the speed section may take."""

    text: str = "bundled"
    tokens: int | None = None
    bos: Bos = "auto"
    dtype: str = "float32"
    device: str = "auto"
    seed: int = 0
    seconds: float = 1.0


def write(model: str, out: str | Path, config: ReportConfig | None = None, *, progress: Progress = silent) -> list[str]:
    """Write the page about ``model`` to ``out``, whole or not at all; returns the headings of refused sections.

    ``tokens`` None means 1,024, or all positions of a model that has fewer. Raises KvprobeError, before anything is
    measured, for a model or text that cannot be loaded and if ``out`` cannot be written. Then, as after a kill or on a
    full disk, ``out`` is as it was.
    """
    out = Path(out)
    if not out.exists() or out.is_file():
        # a device is written into
        check_writable(out.resolve(), hint=HINT)
    sections = measure(model, config or ReportConfig(), progress=progress)
    # a refused section has no record
    shape = next((section for section in sections if section.record), None)
    if shape is None:
        raise KvprobeError(f"nothing could be measured: {sections[0].refused}")
    title = f"kvprobe report: {shape.record['model']}"
    lead = (
        f"Where its attention goes, how small its KV cache could be, and what that would cost in loss. Made by kvprobe "
        f"{__version__} on {shape.record['cpu']}, {shape.record['date'].replace('T', ' ').replace('+00:00', ' UTC')}."
    )
    progress("writing the page", 0, None)
    try:
        write_whole(out, document(title, lead, sections))
    except OSError as error:
        raise disk_error(error, out, hint=HINT) from error
    return [section.heading for section in sections if section.refused is not None]


def measure(model: str, config: ReportConfig, *, progress: Progress = silent) -> list[Section]:
    """All sections of the page, in order. Raises as :func:`write`."""
    from kvprobe.models import loading
    from kvprobe.models.subject import prepare

    tokens = config.tokens
    if tokens is None:
        limit = loading.load_spec(model, progress=progress).max_positions
        tokens = DEFAULT_TOKENS if limit is None else min(DEFAULT_TOKENS, limit)
    given: dict[str, Any] = {name: getattr(config, name) for name in ("text", "bos", "dtype", "device")}
    subject = prepare(model, tokens=tokens, **given, progress=progress)
    sections = []
    wanted = [*SECTIONS, *_others()]
    for done, (anchor, heading, section) in enumerate(wanted):
        progress("report", done, len(wanted), "sections")
        content = _or_why(section, subject, config, progress)
        sections.append(Section(anchor=anchor, heading=heading, **content))
    progress("report", len(wanted), len(wanted), "sections")
    return sections


def _or_why(section: "Measured", subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    """What the section found, or why it was refused."""
    try:
        return section(subject, config, progress)
    except (KvprobeError, ValueError, MemoryError) as error:
        return {"refused": str(error) or type(error).__name__}
    except RuntimeError as error:
        # torch has no error type for a CPU out of memory
        if "allocate memory" not in str(error) and "out of memory" not in str(error).lower():
            raise
        return {"refused": f"out of memory: {str(error).splitlines()[0]}"}


def _shape(subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    from kvprobe.results.record import run_record

    spec, loaded = subject.loaded.spec, subject.loaded
    count = None if spec.n_parameters is None else f"{spec.n_parameters:,}"
    weights = None if spec.n_parameters is None else str(Amount(spec.n_parameters * DTYPE_BYTES[config.dtype]))
    entries = {
        "family": spec.family,
        "parameters": count,
        f"weights in {config.dtype}": weights,
        "layers": spec.n_layers,
        "query heads": spec.n_heads,
        "KV heads": spec.n_kv_heads,
        "width of a head (query or key, value)": f"{spec.head_dim}, {spec.v_head_dim}",
        "hidden width": spec.hidden_size,
        "vocabulary": spec.vocab_size,
        "positions": spec.max_positions,
        "position encoding": spec.position + (f", θ = {spec.rope_theta:,g}" if spec.rope_theta else ""),
    }
    passage = subject.passage
    record = run_record(subject.record(), seed=config.seed)
    return {
        "sentences": [
            f"{loaded.name} keeps {describe(spec)}.",
            f"Sections that read text read {passage.n_tokens:,} tokens of {passage.name} ({phrases.bos_of(record)}).",
            *(f"{said}." for said in notices(passage)),
        ],
        "columns": [Column("property", "property"), Column("value", "value")],
        # as texts, since this column mixes words and numbers
        "rows": [{"property": name, "value": plain(value)} for name, value in entries.items()],
        "record": record,
    }


def _bill(subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    section = _section_of(Cache(dtype=subject.loaded.dtype), _shape_of(subject.loaded), progress)
    longest = max(section["record"]["contexts"])
    columns = [column for column in Cache.columns if column.field != "context"]
    columns[1] = replace(columns[1], heading=f"cache of {longest:,} tokens")
    arithmetic = "A bill is arithmetic on the model's shape; other sections measure what some of the levers cost."
    return section | {
        "sentences": [*section["sentences"], arithmetic],
        "caption": f"The cache by context, and what each lever leaves of it at {longest:,} tokens.",
        "columns": columns,
        "rows": [row for row in section["rows"] if row["context"] == longest],
    }


def _shape_of(loaded: "Loaded") -> KnownShape:
    return KnownShape(loaded.spec, {"model": loaded.name, "revision": loaded.revision, "source": loaded.source})


def _section_of(
    experiment: Experiment, subject: Any, progress: Progress, *, wide: float | None = None
) -> dict[str, Any]:
    """An experiment as a section: its sentence, picture and table."""
    result = experiment.run(subject, progress=progress)
    # a column of dashes tells nothing
    columns = [column for column in experiment.columns if any(row.get(column.field) is not None for row in result.rows)]
    return {
        "sentences": [f"{experiment.sentence(result)}."],
        "pictures": _both(lambda width: experiment.figure(result, width=width, title=False), wide),
        "caption": experiment.caption,
        "columns": columns,
        "rows": result.rows,
        "record": result.run,
    }


def _relief(subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    section = _section_of(Relief(seed=config.seed), subject, progress)
    # the picture shows the two that are left out, and the table fits its page
    columns = [column for column in section["columns"] if column.field not in ("kind", "bytes_per_token")]
    return section | {"columns": columns}


def _sinks(subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    sinks = Sinks(queries_from=min(64, subject.passage.n_tokens // 2), seed=config.seed)
    section = _section_of(sinks, subject, progress)
    foot = dict.fromkeys(section["rows"][0]) | {"layer": "all"}
    return section | {"foot": foot | {name: section["record"][name] for name in ("mass", "sink_rate")}}


def _window(subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    windows = tuple(dict.fromkeys(max(1, subject.passage.n_tokens // part) for part in WINDOW_PARTS))
    section = _section_of(Window(windows=windows, seed=config.seed), subject, progress, wide=5.5)
    return section | {"columns": [column for column in section["columns"] if column.field in window.ON_THE_PAGE]}


def _rank(subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    results = [Lowrank(seed=config.seed).run(subject, progress=progress)]
    notes = []
    settings: dict[str, Any] = {"ranks": results[0].run["ranks"], "basis": "heldout", "seed": config.seed}
    other = "manual" if subject.text.name != "manual" else "bundled"
    for fit_text, what in ((None, "later tokens of the same text"), (other, f"another text ({other})")):
        try:
            results.append(Lowrank(fit_text=fit_text, **settings).run(subject, progress=progress))
        except KvprobeError as error:
            notes.append(f"Not measured with a basis of {what}: {error}.")
    said = {"oracle": "oracle", "heldout": "heldout: {}"}
    rows = [
        row | {"basis": said[row["basis"]].format(phrases.fitted_to(result.run))}
        for result in results
        for row in result.rows
    ]
    drawn = Result("lowrank", rows, results[0].run)
    of_basis = {name: [result.run[name] for result in results] for name in ("basis", "fit_text", "n_fitted")}
    return {
        "sentences": [*(f"{Lowrank.sentence(result)}." for result in results), *notes],
        "pictures": _both(lambda width: Lowrank.figure(drawn, width=width, title=False), wide=5.5),
        "caption": Lowrank.caption,
        "columns": [Column("basis", "basis"), *Lowrank.columns[:9]],
        # the untruncated pass is the same for every basis
        "rows": [rows[0], *(row for row in rows if row["rank"] is not None)],
        "record": results[0].run | of_basis | {"wall_s": round(sum(result.run["wall_s"] for result in results), 3)},
    }


def _speed(subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    contexts = tuple(dict.fromkeys(max(2, subject.passage.n_tokens // part) for part in CONTEXT_PARTS))
    speed = Latency(contexts=contexts, seconds=config.seconds, seed=config.seed)
    section = _section_of(speed, subject.loaded, progress)
    run, rows = section["record"], section["rows"]
    unsaid = ABOVE not in section["sentences"][0] and any(row["fraction_of_ceiling"] > 1 for row in rows)
    return section | {
        "sentences": [
            *section["sentences"],
            f"Measured just before and after: the machine reads {run['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s and "
            f"multiplies {run['matrix_flops_per_s'] / 1e9:,.0f} GFLOP/s.",
            *([f"A row above 100 %: {ABOVE}."] if unsaid else []),
        ],
        "caption": f"{phrases.with_busy(Latency.caption, run)}.",
        "columns": [column for column in section["columns"] if column.field in ON_THE_PAGE],
        "warnings": [f"{line[0].upper()}{line[1:]}." for line in phrases.busy_lines(run)],
    }


Measured = Callable[["Subject", ReportConfig, Progress], dict[str, Any]]
SECTIONS: Sequence[tuple[str, str, Measured]] = (
    ("model", "What the model is", _shape),
    ("relief", Relief.heading, _relief),
    ("bill", Cache.heading, _bill),
    ("sinks", Sinks.heading, _sinks),
    ("window", Window.heading, _window),
    ("rank", Lowrank.heading, _rank),
    ("speed", "Its speed on this machine", _speed),
)
ARRANGED = {heading for _, heading, _ in SECTIONS}


def _others() -> Iterator[tuple[str, str, Measured]]:
    """A section for every other experiment with a heading, with its default settings."""
    for name in registry.names():
        other = registry.experiment(name)
        if other.heading and other.heading not in ARRANGED and other.needs != "corpus":
            yield name, other.heading, partial(_other, other)


def _other(kind: type[Experiment], subject: "Subject", config: ReportConfig, progress: Progress) -> dict[str, Any]:
    asked = {"passage": subject, "model": subject.loaded, "config": _shape_of(subject.loaded)}[kind.needs]
    common = {"seed": config.seed, "dtype": subject.loaded.dtype}
    settings = {name: value for name, value in common.items() if name in settings_of(kind)}
    return _section_of(kind(**settings), asked, progress)


def _both(draw: Callable[[float], "Figure"], wide: float | None = None) -> tuple["Figure", "Figure"]:
    """The same figure for a wide and a narrow page."""
    from kvprobe.plots.style import ONE_COLUMN, TWO_COLUMNS

    return draw(wide or TWO_COLUMNS), draw(ONE_COLUMN)
