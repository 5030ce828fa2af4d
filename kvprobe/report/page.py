"""How does a report become one file that needs no other? HTML with its style, tables and pictures inside, all escaped.

Nothing here knows a model: sections come in as words, rows and figures. A page runs no script and fetches nothing, and
its own policy forbids both as well.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvprobe.results.html import Column, escape, plain, table
from kvprobe.results.result import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# what the ink of a picture becomes on a dark page
DARK_INK = "#d4d7db"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section: what was found, or ``refused``, why nothing was.

    ``pictures`` are the same figure as a wide and a narrow page have room for. ``foot`` is a row over all others, and
    ``warnings`` are sentences below the table.
    ``record`` is the run's; it stands at the end of the page.
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
    contents = [(section.anchor, section.heading) for section in sections] + [("records", "Run records")]
    links = "".join(f'<li><a href="#{anchor}">{escape(heading)}</a></li>' for anchor, heading in contents)
    body = "\n".join(_section(section) for section in sections)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(plain(title))}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>{escape(plain(title))}</h1><p>{escape(lead)}</p></header>
<nav aria-label="Contents"><ol>{links}</ol></nav>
<main>
{body}
{_records(sections)}
</main>
</body>
</html>
"""
    return page.encode()


def svg(figure: "Figure") -> str:
    """A figure as an SVG document that needs no font and no background; the same figure always gives the same text."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "kvprobe"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


def darkened(picture: str) -> str:
    """The same SVG with its ink as light as a dark page needs."""
    from kvprobe.plots.style import INK

    return picture.replace(INK, DARK_INK)


def _section(section: Section) -> str:
    parts = [f'<section id="{section.anchor}">', f"<h2>{escape(section.heading)}</h2>"]
    if section.refused is not None:
        parts.append(f'<p class="refused">Not measured: {escape(section.refused)}</p>')
    parts += [f"<p>{escape(sentence)}</p>" for sentence in section.sentences]
    if section.pictures is not None:
        parts.append(_figure(section.pictures, section.caption))
    if section.rows:
        label = escape(f"Table: {section.heading}", quote=True)
        parts.append(
            f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
            f"{table(section.columns, section.rows, section.foot)}</div>"
        )
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in section.warnings]
    if section.record:
        parts.append(f'<p class="more"><a href="#record-{section.anchor}">How this was run</a></p>')
    return "\n".join([*parts, "</section>"])


def _figure(pictures: tuple["Figure", "Figure"], caption: str) -> str:
    wide, narrow = map(svg, pictures)
    # not <picture>: a browser chooses its source once, so that a page read in the dark would be printed so
    shown = {"wide": wide, "wide dark": darkened(wide), "narrow": narrow, "narrow dark": darkened(narrow)}
    common = f'alt="{escape(caption, quote=True)}" style="max-width:{round(96 * pictures[0].get_figwidth())}px"'
    images = "".join(f'<img class="{kind}" src="{_uri(picture)}" {common}>' for kind, picture in shown.items())
    return f"<figure>{images}<figcaption>{escape(caption)}</figcaption></figure>"


def _uri(picture: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def _records(sections: Sequence[Section]) -> str:
    """What all runs share, once, and then what each has of its own."""
    recorded = [section for section in sections if section.record]
    shared = {
        key: value
        for key, value in (recorded[0].record if recorded else {}).items()
        if all(key in section.record and section.record[key] == value for section in recorded)
    }
    parts = ['<section id="records">', "<h2>Run records</h2>", "<h3>All sections</h3>", _list(shared)]
    for section in recorded:
        own = {key: value for key, value in section.record.items() if key not in shared}
        parts += [f'<h3 id="record-{section.anchor}">{escape(section.heading)}</h3>', _list(own)]
    return "\n".join([*parts, "</section>"])


def _list(record: Mapping[str, Any]) -> str:
    entries = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(plain(value))}</dd></div>" for key, value in record.items()
    )
    return f"<dl>{entries}</dl>"


STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #22262b; --soft: #5b636d; --line: #d9dde2; --link: #005a9c;
  --warn: #7a4a00; --warn-page: #fdf3e1 }
@media screen and (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #dfe3e8; --soft: #9aa3ad;
  --line: #343b43; --link: #7dbbec; --warn: #f0c987; --warn-page: #33280f } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 50rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem } h2 { font-size: 1.25rem; margin: 0 0 .5rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem } p { margin: .5rem 0 } header p, .more, figcaption { color: var(--soft) }
a { color: var(--link) } nav { border-block: 1px solid var(--line); margin: 1rem 0 } nav ol { columns: 15rem;
  margin: .7rem 0; padding-left: 1.5rem }
section { margin: 2.5rem 0; scroll-margin-top: 1rem }
figure { margin: 1rem 0 } figure img { display: none; width: 100%; height: auto; margin: 0 auto }
figure img.wide:not(.dark) { display: block }
@media screen and (prefers-color-scheme: dark) { figure img.wide:not(.dark) { display: none }
  figure img.wide.dark { display: block } }
@media screen and (max-width: 34rem) { figure img.wide.dark, figure img.wide:not(.dark) { display: none }
  figure img.narrow:not(.dark) { display: block } }
@media screen and (max-width: 34rem) and (prefers-color-scheme: dark) { figure img.narrow:not(.dark) { display: none }
  figure img.narrow.dark { display: block } }
figcaption, .more { font-size: .875rem }
.scroll { overflow-x: auto; max-width: 100%; overflow-wrap: normal }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { vertical-align: bottom } thead th { border-bottom: 2px solid var(--line); white-space: normal; min-width: 4.2rem;
  line-height: 1.25 } th.n, td.n { text-align: right }
tfoot td { font-weight: 600; border-top: 2px solid var(--line) }
.refused, .warning { background: var(--warn-page); color: var(--warn); padding: .6rem .8rem; border-radius: .3rem }
dl { margin: 0; font-size: .8125rem; columns: 18rem } dl div { break-inside: avoid; margin-bottom: .25rem }
dt { display: inline; color: var(--soft) } dt::after { content: ": " } dd { display: inline; margin: 0 }
@media print { body { max-width: none; padding: 0; font-size: 10pt } a { color: inherit; text-decoration: none }
  section { margin: 1.2rem 0 } h2, h3, .more { break-after: avoid } figure, tr { break-inside: avoid }
  .scroll { overflow: visible } table { font-size: 8pt } th, td { padding: .1rem .4rem } th { white-space: normal }
  dl { font-size: 7.5pt } thead { display: table-header-group } }
"""
