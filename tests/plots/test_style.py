"""What every picture shares: its texts are what was said, whatever a name holds."""

import io
import re
import xml.dom.minidom

import matplotlib as mpl
import pytest

from kvprobe.plots.style import panels, styled, titled

# mathematics that does not parse, and what no XML may hold
HOSTILE = "$\\nosuch{$ \x1b\x00\u202e\ud800"
SEEN = r"$\nosuch{$ \x1b\x00\u202e\ud800"


@pytest.fixture
def drawn():
    with styled():
        figure, (first, second) = panels(6.9, 3, 2)
        first.plot([1, 1000], [1, 2], label=HOSTILE)
        first.set(xscale="log", xlabel=HOSTILE, title=HOSTILE)
        first.annotate(HOSTILE, (1, 1))
        first.legend()
        second.set_yticks([0, 1], [HOSTILE, "two\nlines"])
        return titled(figure, HOSTILE)


def test_names_are_no_mathematics_and_what_cannot_be_seen_is(drawn):
    text = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        drawn.savefig(text, format="svg")
    page = text.getvalue().decode()
    said = [node.firstChild.data for node in xml.dom.minidom.parseString(page).getElementsByTagName("text")]
    # title, panel title, label, annotation, legend, tick
    assert said.count(SEEN) == 6
    assert {"two", "lines"} <= set(said)


def test_powers_of_ten_are_still_set_as_powers(drawn):
    drawn.savefig(io.BytesIO(), format="svg")
    ticks = [label.get_text() for label in drawn.axes[0].get_xticklabels()]
    assert [tick for tick in ticks if re.search(r"10\^\{2\}", tick)]
    assert all(label.get_parse_math() for label in drawn.axes[0].get_xticklabels())


@pytest.mark.parametrize("format_", ["png", "pdf"])
def test_other_formats_are_drawn_as_well(drawn, format_):
    drawn.savefig(io.BytesIO(), format=format_)
