"""`python -m gemmkit explain --html` and `gk.explain`: one page that fetches nothing, with a toolkit and without."""

from __future__ import annotations

import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.operators import FPUOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.compile import AssemblerError
from gemmkit.runtime.device import H100
from gemmkit.tools import figures
from gemmkit.tools.cli import main
from gemmkit.tools.explain import page, summary
from gemmkit.tools.figures import count
from gemmkit.tools.subject import of_call
from tests.support.sm90 import mapping
from tools.browser import NAMES, Browser, address_of

SECTIONS = ["mapping", "tiles", "banks", "pipeline", "resources", "roofline"]


class Read(HTMLParser):
    """What a page asks for, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        asks = {name: value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action", "srcset")}
        self.asked += [value for value in asks.values() if not value.startswith("#")]
        if tag in ("link", "base", "object", "embed", "img"):
            self.asked.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_alone(text: str) -> None:
    found = Read(text)
    assert not found.open and not found.asked
    assert not re.search(r"https?:|@import|fetch\(|XMLHttpRequest|import\(|url\((?!#)", text)


def no_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: object) -> None:
        raise AssemblerError("no ptxas is here")

    monkeypatch.setattr(ahead, "assemble", none)


def test_a_page_without_a_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_assembler(monkeypatch)
    file = tmp_path / "report.html"
    assert main(["explain", "--m", "64", "--n", "64", "--k", "64", "--html", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert re.findall('<section id="([a-z]+)">', text) == SECTIONS
    check_alone(text)
    assert "no ptxas is here" in text and "gemmkit[cu13]" in text
    assert "core matrices (wgmma)" in text and "TMA copies" in text and "TFLOP/s" in text


def test_a_page_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers and occupancy are shown, and what is missing for the instructions is said."""
    def none(*given: object) -> None:
        raise AssemblerError("no nvdisasm is here")

    monkeypatch.setattr(ahead, "disassemble", none)
    x = np.zeros((64, 64), np.float32)
    text = page(of_call(x, x, None, gk.get_config(operator=FPUOp(), global_a_layout=gk.layouts.RowMajor("float32"),
                                                  kernel="singlestage"), device=H100))
    check_alone(text)
    assert "no nvdisasm is here" in text and "registers a thread" in text and "occupancy" in text
    assert "this one is singlestage" in text


def subject_of(monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int) -> Any:
    no_assembler(monkeypatch)
    return of_call(np.empty((m, k), np.float16), np.empty((k, n), np.float16), device=H100)


@pytest.mark.parametrize("sizes, bound, tried", [
    ((64, 64, 512), "global memory", "of 132 multiprocessors have a tile"), ((8192, 8192, 8192), "the tensor cores, float16", "gemmkit.tune"),
    ((8192, 8192, 32), "global memory", "to fuse"), ((512, 512, 512), "global memory", "several products in one launch")])
def test_three_lines_say_what_matters(sizes: tuple[int, int, int], bound: str, tried: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(monkeypatch, *sizes)
    cells = re.findall("<td>(.*?)</td>", summary(subject))
    assert cells[::2] == ["Bound by", "Share of the roof", "To try"]
    assert cells[1].startswith(bound) and "ridge" in cells[1] and "TFLOP/s" in cells[3] and tried in cells[5]
    found = figures.standing(subject)
    assert not isinstance(found, str) and found.share is not None and cells[3].startswith(found.share)


def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(monkeypatch, 256, 256, 256)
    monkeypatch.setattr(figures, "MEMORY", {})
    cells = re.findall("<td>(.*?)</td>", summary(subject))
    assert "rates of" in cells[1] and cells[3] == "not known" and cells[5]


def labels_cut_off(text: str, each: float = 0.6) -> list[str]:
    """Labels that reach beyond their drawing: ``each`` of a font's size is what a character takes (measured in Chromium: 0.54 of a
    line of text, 0.64 of figures)."""
    found = []
    for low, wide, inside in re.findall(r'<svg[^>]* viewBox="(\S+) 0 (\S+) [^"]*">(.*?)</svg>', text, re.DOTALL):
        for x, more, said in re.findall('<text x="([^"]*)"([^>]*)>([^<]*)</text>', inside):
            if "rotate" not in more:
                size = int((re.search('font-size="([0-9]+)"', more) or ["", "11"])[1])
                before = {"end": 1.0, "middle": 0.5}.get((re.search('text-anchor="([a-z]+)"', more) or ["", "start"])[1], 0.0)
                begin = float(x) - before * len(unescape(said)) * each * size
                if begin < float(low) or begin + len(unescape(said)) * each * size > float(low) + float(wide) + 0.01:
                    found.append(said)
    return found


def test_no_label_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(subject_of(monkeypatch, 512, 512, 512))
    assert re.search("B [0-9]+ x [0-9]+", text) and labels_cut_off(text) == []
    assert labels_cut_off('<svg viewBox="0 0 20 9"><text x="0" y="1">B 128 x 32</text></svg>') == ["B 128 x 32"]


def test_colours_have_a_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves by their tiles, lanes by their numbers, stages; and a rectangle of a fragment says how many columns it is."""
    text = page(subject_of(monkeypatch, 2048, 2048, 256))
    for key in ("wave 1: tiles 0 to ", "lane 0", "lane 28", "stage 0"):
        assert f"</span>{key}" in text
    assert "A rectangle is 2 neighbouring columns; its number is the thread" in text
    assert len(re.findall("its colour is the bank", text)) == 1


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--html", str(tmp_path / "no" / "report.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_numbers_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    no_assembler(monkeypatch)
    x = np.zeros((64, 64), np.float16)
    subject = of_call(x, x, None, mapping("one", WGMMAOp(64)), device=H100)
    assert not isinstance(subject.run, str)
    rows, text = count(subject.run.events, subject.run.spec), page(subject)
    assert len(rows) == 2
    for row in rows:
        cells = "".join(f'<td class="n">{n:,}</td>' for n in (row.accesses, row.extra, row.without))
        assert f"<td>{row.operand}</td><td>core matrices (wgmma)</td>{cells}" in text


def test_explain_is_of_the_plan_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_assembler(monkeypatch)
    a, b = np.empty((128, 64), np.float16), np.empty((64, 256), np.float16)
    said = gk.explain(a, b)
    with gk.emulate(mapping="device"):
        plan = gk.plan(a, b)
    assert repr(said.config) == repr(plan.config)
    assert said.choice.owner in repr(said) and "D (128 x 256)" in repr(said)
    said.save(tmp_path / "x.html")
    inside = re.search('srcdoc="(.*)"', said._repr_html_(), re.DOTALL)
    assert inside is not None and inside[1].startswith("&lt;!doctype html&gt;")
    with pytest.raises(ValueError, match="path=.*no folder"):
        said.save(tmp_path / "no" / "x.html")


def test_explain_takes_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.empty((64, 64), np.float32)
    assert gk.explain(x, x, operator=FPUOp()).choice.by == "operator"
    with pytest.raises(ValueError, match="no element"):
        gk.explain(x[:0], x)
    with pytest.raises(TypeError, match="unknown keywords no"):
        gk.explain(x, x, no=1)
    with pytest.raises(ValueError):
        gk.explain(x, x[:7])


#: Labels that reach beyond their drawing, as the browser measures them.
CUT_OFF = """[...document.querySelectorAll("svg text")].filter(t => { const a = t.getBoundingClientRect(),
  b = t.closest("svg").getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1; }).map(t => t.textContent)"""


#: Parts that reach beyond the window and are not scrolled by themselves.
WIDER = """[...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1
  && !e.closest(".wide, pre, #tip") && !e.parentElement.closest("table")).map(e => e.tagName + " " + e.textContent.slice(0, 40))"""


@pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="no Chromium is installed")
def test_a_page_in_a_browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is asked for, no script raises, and the pointer tells what is under it."""
    no_assembler(monkeypatch)
    x = np.zeros((64, 64), np.float16)
    file = tmp_path / "report.html"
    file.write_text(page(of_call(x, x, None, mapping("one", WGMMAOp(64)), device=H100)), encoding="utf-8")
    with Browser() as browser:
        opened = browser.open(address_of(file), width=1100, height=800)
        assert opened.run(CUT_OFF) == []
        opened.hover("#pipeline rect.h")
        assert opened.run("getComputedStyle(document.getElementById('tip')).display") == "block"
        assert "stage" in opened.run("document.getElementById('tip').textContent")
        assert opened.run("document.documentElement.scrollWidth <= innerWidth")
        narrow = browser.open(address_of(file), width=400, height=800)
        assert narrow.run(CUT_OFF) == [] and narrow.run(WIDER) == []
        assert not opened.fetched and not opened.errors
