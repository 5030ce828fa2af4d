"""One page on one model: everything escaped, whole or not at all, and the same number in text, table and picture."""

import base64
import errno
import html
import os
import re
import signal
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser

import pytest

from kvprobe.bench import machine
from kvprobe.cli.main import main
from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.experiments.sinks import Sinks
from kvprobe.experiments.window import Window
from kvprobe.files.whole import write_whole
from kvprobe.report import page, report
from kvprobe.report.page import Section, document
from kvprobe.results.columns import Column, plain, table
from kvprobe.results.result import Result
from support.models import write_random

HOSTILE = "<script>alert('x')</script> & \"quoted\" $\\alpha$"
FAST = report.ReportConfig(tokens=48, seconds=0.01)


@pytest.fixture(scope="module")
def llama(gpt2_tokenizer_files, tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("report") / HOSTILE.replace("/", "∕"), "llama", gpt2_tokenizer_files)


@pytest.fixture(autouse=True, scope="module")
def _a_quick_look_at_the_machine():
    # the real one takes seconds, and what it finds is tested elsewhere
    quick = partial(machine.measure_machine, buffer_bytes=2**20, gemm_widths=(32,), seconds=0.001)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measure_machine", quick)
        yield


@pytest.fixture(scope="module")
def measured(llama):
    """The sections of the same page, before they are written, by anchor."""
    return {section.anchor: section for section in report.measure(str(llama), FAST)}


@pytest.fixture(scope="module")
def written(llama, tmp_path_factory):
    """The page on a tiny model with a hostile name, and the sections that were refused."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    refused = report.write(str(llama), out, FAST)
    return out.read_text(), refused


class Reader(HTMLParser):
    """What a browser would see: tags with their attributes, and the text of every section."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.stack, self.text, self._section = [], [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"]
        if tag not in ("meta", "img", "source", "link", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self._section:
            self.text[self._section] = self.text.get(self._section, "") + " " + data


def section(**fields):
    return Section(**{"anchor": "one", "heading": "One", **fields})


def test_a_page_has_every_section_with_sentence_picture_table_and_record(written):
    text, refused = written
    reader = Reader(text)
    assert refused == []
    assert reader.stack == []
    for anchor, heading, _ in report.SECTIONS:
        assert f'<li><a href="#{anchor}">{html.escape(heading)}</a></li>' in text
        part = re.search(rf'<section id="{anchor}">.*?</section>', text, re.DOTALL)[0]
        assert "<table>" in part
        assert ("<figure>" in part) == (anchor != "model")
        assert f'href="#record-{anchor}"' in part
        assert f'id="record-{anchor}"' in text
    ids = [attrs["id"] for _, attrs in reader.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_nothing_of_a_hostile_name_is_markup(written):
    text, _ = written
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    tags = {tag for tag, _ in Reader(text).tags}
    assert not tags & {"script", "iframe", "object", "embed", "link", "base", "form"}
    assert not any(name.startswith("on") for _, attrs in Reader(text).tags for name in attrs)


def test_the_page_names_no_address_beyond_itself(written):
    text, _ = written
    for tag, attrs in Reader(text).tags:
        for name in ("href", "src", "srcset"):
            if name in attrs:
                assert attrs[name].startswith(("#", "data:image/svg+xml;base64,")), (tag, name)
    assert not re.search(r"url\(|@import|https?:", text)
    assert "default-src 'none'" in text
    # and the pictures inside name none that is fetched: a namespace is a name
    for picture in re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", text):
        svg = base64.b64decode(picture).decode()
        assert not re.search(r"""(href|src)=["'](?!#|data:)""", svg)
        assert "<script" not in svg


def test_every_picture_has_four_renderings_and_the_dark_ones_differ_in_ink_alone(written):
    figures = re.findall(r"<figure>.*?</figure>", written[0], re.DOTALL)
    assert len(figures) == len(report.SECTIONS) - 1
    for figure in figures:
        parts = re.findall(r'<img class="([^"]*)" src="data:[^,]*,([^"]*)"', figure)
        shown = {kind: base64.b64decode(data).decode() for kind, data in parts}
        assert list(shown) == ["wide", "wide dark", "narrow", "narrow dark"]
        assert shown["wide"] != shown["narrow"]
        for kind in ("wide", "narrow"):
            assert "#333333" in shown[kind]
            assert shown[f"{kind} dark"] == shown[kind].replace("#333333", page.DARK_INK)


@pytest.mark.parametrize("anchor", ["sinks", "window", "rank", "speed", "bill"])
def test_the_numbers_of_the_sentences_stand_in_the_table(written, anchor):
    text, _ = written
    part = re.search(rf'<section id="{anchor}">.*?</section>', text, re.DOTALL)[0]
    said = html.unescape(re.sub(r"<[^>]*>", "", re.search(r"<p>(.*?)</p>", part, re.DOTALL)[1]))
    cells = {html.unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", part)}
    # what is measured is said with a unit or a fraction: those numbers, and not the settings
    numbers = re.findall(r"[+−]?[\d,]+\.\d+(?=%| nat| to |\)| of all| ms)|[\d.]+ [KM]?iB", said)
    spoken = {cell.lstrip("+−").rstrip("%") for cell in cells}
    assert numbers
    for number in numbers:
        assert number.lstrip("+−") in spoken, (number, said)


def test_the_drawn_numbers_are_those_of_the_table(measured):
    found = measured
    for anchor in ("sinks", "window", "rank", "speed", "bill"):
        assert all(figure.axes for figure in found[anchor].pictures)
    bars = found["sinks"].pictures[0].axes[0].patches
    assert [bar.get_height() for bar in bars] == [row["mass"] for row in found["sinks"].rows]
    drawn = [y for c in found["window"].pictures[0].axes[0].containers for y in c.lines[0].get_ydata()]
    assert sorted(drawn) == sorted(row["delta"] for row in found["window"].rows if row["window"] is not None)
    drawn = [y for c in found["rank"].pictures[1].axes[0].containers for y in c.lines[0].get_ydata()]
    assert sorted(drawn) == sorted(row["loss"] for row in found["rank"].rows if row["rank"] is not None)


def test_a_section_that_is_refused_says_why_and_the_others_go_on(llama, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise UnsupportedModelError("the <family> goes another way")

    some = [part for part in report.SECTIONS if part[0] in ("model", "bill", "sinks", "rank")]
    monkeypatch.setattr(report, "SECTIONS", some)
    monkeypatch.setattr(Lowrank, "measure", refuse)
    refused = report.write(str(llama), tmp_path / "a.html", FAST)
    text = (tmp_path / "a.html").read_text()
    assert refused == ["Loss by rank"]
    assert "Not measured: the &lt;family&gt; goes another way" in text
    assert text.count("<figure>") == 2


@pytest.mark.parametrize("family", ["falcon", "deepseek_v2"])
def test_a_family_that_bypasses_the_seam_or_the_decoder_still_gets_a_page(family, gpt2_tokenizer_files, tmp_path):
    write_random(tmp_path / family, family, gpt2_tokenizer_files)
    refused = report.write(str(tmp_path / family), tmp_path / "a.html", FAST)
    text = (tmp_path / "a.html").read_text()
    assert refused
    assert "What the model is" not in refused
    assert text.count('class="refused"') == len(refused)
    assert family in re.search(r'class="refused">(.*?)</p>', text)[1]


def test_what_is_no_refusal_is_not_swallowed(llama, monkeypatch):
    monkeypatch.setattr(report, "SECTIONS", report.SECTIONS[:4])

    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Sinks, "measure", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        report.measure(str(llama), FAST)

    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")

    monkeypatch.setattr(Sinks, "measure", full)
    (found,) = [part for part in report.measure(str(llama), FAST) if part.anchor == "sinks"]
    assert found.refused == "out of memory: DefaultCPUAllocator: can't allocate memory"


def test_a_full_disk_leaves_the_old_page(llama, tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    out.write_text("old")
    monkeypatch.setattr(report, "SECTIONS", report.SECTIONS[:1])

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(KvprobeError, match=r"the disk is full: report\.html could not be written .*to another place"):
        report.write(str(llama), out, FAST)
    monkeypatch.undo()
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_place_where_nothing_can_be_made_is_refused_before_the_work(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "measure", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(KvprobeError, match=r"a\.html could not be written to .*file.*another place"):
        report.write(str(llama), tmp_path / "file" / "a.html", FAST)


def test_a_kill_leaves_the_old_page(llama, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("old")
    # at the last moment: the page is on disk, and about to be put in place
    code = f"""
import os, signal
from pathlib import Path
from kvprobe.cli import main as cli
from kvprobe.report import report
report.SECTIONS = report.SECTIONS[:1]
replace = Path.replace
Path.replace = lambda path, to: os.kill(os.getpid(), 9) if str(to) == {str(out)!r} else replace(path, to)
cli.main()
"""
    command = [sys.executable, "-c", code, "report", str(llama), "--tokens", "48", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert out.read_text() == "old"
    # the next that is written there clears up
    assert len(list(tmp_path.iterdir())) == 2
    write_whole(out, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_model_or_text_that_cannot_be_had_leaves_no_page(llama, tmp_path):
    for model, plan in (
        (str(tmp_path / "nosuch"), FAST),
        (str(llama), report.ReportConfig(text=str(tmp_path / "no.txt"))),
    ):
        with pytest.raises(KvprobeError):
            report.write(model, tmp_path / "a.html", plan)
    assert not (tmp_path / "a.html").exists()


def test_the_command_takes_all_positions_of_a_short_model_and_says_where_the_page_is(
    llama, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(report, "SECTIONS", report.SECTIONS[:4])
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(llama), "--out", str(tmp_path / "a.html")])
    said = capfd.readouterr()
    assert stopped.value.code == 0
    assert said.out == ""
    assert said.err.splitlines()[-1] == f"wrote {tmp_path / 'a.html'}"
    # the tiny model's 256 positions, fewer than 1,024
    assert "256 tokens of bundled" in (tmp_path / "a.html").read_text()


def test_cells_are_escaped_and_what_cannot_be_seen_is_shown():
    text = table([Column("a", "<a>"), Column("n", "n")], [{"a": "<b>\n", "n": 1234}, {"a": None, "n": 0.12345}])
    assert "<th scope=col>&lt;a&gt;</th>" in text
    assert "<td>&#39;&lt;b&gt;\\n&#39;</td><td class=n>1,234</td>" in text
    assert "<td>–</td><td class=n>0.1235</td>" in text
    assert plain({"a": [0.123456, None], "b": {"c": "<"}}) == "a: [0.1235, –], b: c: <"
    assert plain({}) == "–"


def test_a_page_is_utf8_even_where_a_name_is_not():
    data = document("model \udcff", "lead", [section(sentences=["µ"])])
    assert "model" in data.decode()
    assert "µ" in data.decode()


def test_a_busy_machine_is_named_with_the_speed_and_below_its_table(llama, tmp_path, monkeypatch, busy_machine):
    monkeypatch.setattr(report, "SECTIONS", [part for part in report.SECTIONS if part[0] in ("model", "speed")])
    speed = report.measure(str(llama), FAST)[1]
    assert speed.sentences[0].endswith("; busy machine, not to be quoted.")
    assert speed.caption.endswith("under the machine's own roofline; busy machine, not to be quoted.")
    assert [figure.get_suptitle() for figure in speed.pictures] == ["busy machine, not to be quoted"] * 2
    assert speed.record["busy"] == ["other work used 1.00 of 2 cores while it was timed"]
    text = document("t", "l", [speed]).decode()
    warning = "Busy machine, not to be quoted: other work used 1.00 of 2 cores while it was timed."
    assert f'</table></div>\n<p class="warning">{warning}</p>' in text


def test_a_warning_is_no_markup():
    text = document("t", "l", [section(rows=[{"a": 1}], columns=[Column("a", "a")], warnings=["<b>"])]).decode()
    assert '<p class="warning">&lt;b&gt;</p>' in text
    assert 'class="warning"' not in document("t", "l", [section()]).decode()


def test_what_all_runs_share_stands_once():
    records = {"model": "tiny", "seed": 0}, {"model": "tiny", "seed": 1}
    parts = [section(anchor=f"s{i}", record=record) for i, record in enumerate(records)]
    text = document("t", "l", parts).decode()
    assert text.count("<dt>model</dt>") == 1
    assert text.count("<dt>seed</dt>") == 2


def test_a_notebook_sees_an_escaped_table_and_how_many_rows_more_there_are():
    result = Result("sinks", [{"layer": i, "token": "<i>"} for i in range(100)], {"model": "<tiny>"})
    text = result._repr_html_()
    assert "<caption>sinks, &lt;tiny&gt;, and 40 more rows</caption>" in text
    assert text.count("<tr>") == 61
    assert "<i>" not in text
    loaded = Result("latency", [{"ms_median": 1.0}], {"model": "tiny", "busy": ["other work"]})
    assert "<caption>latency, tiny; busy machine, not to be quoted</caption>" in loaded._repr_html_()


def test_the_rank_section_tells_later_tokens_of_the_text_from_another_text(measured):
    found = measured["rank"]
    bases = ["oracle", "heldout: later tokens of the same text", "heldout: another text (manual)"]
    assert [*dict.fromkeys(row["basis"] for row in found.rows)] == bases
    for sentence, words in zip(
        found.sentences, ("an oracle", *(base.split(": ")[1] for base in bases[1:])), strict=True
    ):
        assert words in sentence
    # each is a line of its own, over the same ranks
    n_ranks = len({row["rank"] for row in found.rows}) - 1
    assert len(found.rows) == 1 + 3 * n_ranks
    (_, *lines) = found.pictures[0].axes[0].get_legend_handles_labels()[1]
    assert lines == ["oracle: the scored tokens", *bases[1:]]


def test_window_sentences_are_those_of_the_rows(measured):
    found = measured["window"]
    said = found.sentences[0]
    assert said == f"{Window.sentence(Result('window', list(found.rows), dict(found.record)))}."
