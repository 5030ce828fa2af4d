"""How does a report become one self-contained file? HTML with its style, tables and pictures inside, all escaped.

Nothing here knows a model: sections are words, rows and figures. A page runs no script and fetches nothing, and its
content policy forbids both.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvprobe.results.columns import Column, plain, table, template
from kvprobe.results.result import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the ink of a picture on a dark page
DARK_INK = "#d4d7db"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section: what was found, or in ``refused`` the reason why nothing was.

    ``pictures`` are the same figure for a wide and a narrow page. ``foot`` is a row that sums up the others, and
    ``warnings`` are sentences below the table. ``record`` is the run's; it goes to the end of the page.
    """

    anchor: str
    heading: str
    sentences: Sequence[str] = ()
    pictures: tuple["Figure", "Figure"] | None = None
    caption: str = ""
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    foot: Row | None = None
    warnings: Sequence[str] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None


def document(title: str, lead: str, sections: Sequence[Section]) -> bytes:
    """The whole page, in UTF-8."""
    records = [section.record for section in sections if section.record]
    shared = {
        key: value
        for key, value in (records[0] if records else {}).items()
        if all(key in record and record[key] == value for record in records)
    }
    own = [
        (section.anchor, section.heading, {key: section.record[key] for key in section.record if key not in shared})
        for section in sections
        if section.record
    ]
    page = template("page.html").render(
        title=plain(title),
        lead=lead,
        sections=sections,
        shared=shared,
        own=own,
        images=_images,
        table=table,
    )
    return page.encode()


def svg(figure: "Figure") -> str:
    """A figure as an SVG document without fonts or background; the same figure always gives the same text."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "kvprobe"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


def darkened(picture: str) -> str:
    """The same SVG with ink light enough for a dark page."""
    from kvprobe.plots.style import INK

    return picture.replace(INK, DARK_INK)


def _images(section: Section) -> dict[str, str]:
    """The pictures of a section as data URIs, by the class of page that shows each."""
    wide, narrow = map(svg, section.pictures or ())
    shown = {"wide": wide, "wide dark": darkened(wide), "narrow": narrow, "narrow dark": darkened(narrow)}
    return {
        kind: "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()
        for kind, picture in shown.items()
    }
