"""`python -m gemmkit explain --html` and `gk.explain`: one page that fetches nothing; its timeline and its bank conflicts."""

from __future__ import annotations

import dataclasses
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.launch import recorded
from gemmkit.layouts import ColMajor, Padded, RowMajor
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.compile import AssemblerError
from gemmkit.runtime.device import H100, assumed
from gemmkit.tiling import Tile
from gemmkit.tools import figures
from gemmkit.tools.cli import main
from gemmkit.tools.explain import page, summary
from gemmkit.tools.figures import AccessRow, count, warp_tiles
from gemmkit.tools.timeline import (
    FINISH,
    ISSUE,
    LATENCY,
    TILE,
    Run,
    Timeline,
    _lanes,
    drawn,
    of_call,
    small_run,
    small_sizes,
)
from tests.support.patches import Seeded
from tests.support.sm90 import mapping
from tools.browser import NAMES, Browser, address_of

# ==========================================================================================================================
# `python -m gemmkit explain --html` and `gk.explain`: one page that fetches nothing, with a toolkit and without.

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


@pytest.mark.usefixtures("no_assembler")
def test_a_page_without_a_toolkit(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert main(["explain", "--m", "64", "--n", "64", "--k", "64", "--html", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert re.findall('<section id="([a-z]+)">', text) == SECTIONS
    check_alone(text)
    assert "no ptxas is here" in text and "gemmkit[cu13]" in text
    assert "core matrices (wgmma)" in text and "TMA copies" in text and "TFLOP/s" in text


def test_a_page_without_a_disassembler(replaced: Seeded) -> None:
    """Registers and occupancy are shown, and what is missing for the instructions is said."""
    def none(*given: object) -> None:
        raise AssemblerError("no nvdisasm is here")

    replaced(ahead, "disassemble", none)
    x = np.zeros((64, 64), np.float32)
    text = page(of_call(x, x, None, gk.get_config(operator=FPUOp(), global_a_layout=gk.layouts.RowMajor("float32"),
                                                  kernel="singlestage"), device=H100))
    check_alone(text)
    assert "no nvdisasm is here" in text and "registers a thread" in text and "occupancy" in text
    assert "this one is singlestage" in text


def subject_of(m: int, n: int, k: int) -> Any:
    return of_call(np.empty((m, k), np.float16), np.empty((k, n), np.float16), device=H100)


@pytest.mark.usefixtures("no_assembler")
@pytest.mark.parametrize("sizes, bound, tried", [
    ((64, 64, 512), "global memory", "of 132 multiprocessors have a tile"), ((8192, 8192, 8192), "the tensor cores, float16", "gemmkit.tune"),
    ((8192, 8192, 32), "global memory", "to fuse"), ((512, 512, 512), "global memory", "several products in one launch")])
def test_three_lines_say_what_matters(sizes: tuple[int, int, int], bound: str, tried: str) -> None:
    subject = subject_of(*sizes)
    cells = re.findall("<td>(.*?)</td>", summary(subject))
    assert cells[::2] == ["Bound by", "Share of the roof", "To try"]
    assert cells[1].startswith(bound) and "ridge" in cells[1] and "TFLOP/s" in cells[3] and tried in cells[5]
    found = figures.standing(subject)
    assert not isinstance(found, str) and found.share is not None and cells[3].startswith(found.share)


@pytest.mark.usefixtures("no_assembler")
def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(256, 256, 256)
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


@pytest.mark.usefixtures("no_assembler")
def test_no_label_is_cut_off() -> None:
    text = page(subject_of(512, 512, 512))
    assert re.search("B [0-9]+ x [0-9]+", text) and labels_cut_off(text) == []
    assert labels_cut_off('<svg viewBox="0 0 20 9"><text x="0" y="1">B 128 x 32</text></svg>') == ["B 128 x 32"]


@pytest.mark.usefixtures("no_assembler")
def test_colours_have_a_legend() -> None:
    """Waves by their tiles, lanes by their numbers, stages; and a rectangle of a fragment says how many columns it is."""
    text = page(subject_of(2048, 2048, 256))
    for key in ("wave 1: tiles 0 to ", "lane 0", "lane 28", "stage 0"):
        assert f"</span>{key}" in text
    assert "A rectangle is 2 neighbouring columns; its number is the thread" in text
    assert len(re.findall("its colour is the bank", text)) == 1


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--html", str(tmp_path / "no" / "report.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.usefixtures("no_assembler")
def test_the_numbers_of_a_page() -> None:
    x = np.zeros((64, 64), np.float16)
    subject = of_call(x, x, None, mapping("one", WGMMAOp(64)), device=H100)
    assert not isinstance(subject.run, str)
    rows, text = count(subject.run.events, subject.run.spec), page(subject)
    assert len(rows) == 2
    for row in rows:
        cells = "".join(f'<td class="n">{n:,}</td>' for n in (row.accesses, row.extra, row.without))
        assert f"<td>{row.operand}</td><td>core matrices (wgmma)</td>{cells}" in text


@pytest.mark.usefixtures("no_assembler")
def test_explain_is_of_the_plan_that_runs(tmp_path: Path) -> None:
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


def test_a_contraction_is_explained() -> None:
    """What is copied first is named, and nothing else is said of one that is computed as it is."""
    large, small = ([np.empty(shape, np.float16) for shape in shapes] for shapes in (
        ((84, 72, 84, 72), (84, 72, 72, 72)), ((8, 16, 8, 16), (8, 16, 16, 16))))
    said = str(gk.explain(gk.einsum, "kmln,jnim->lkji", *large))
    assert said.startswith("einsum: A (69.8 MiB) and B (59.8 MiB) copied into another order first\nD (7056 x 6048) = ")
    assert str(gk.explain(gk.einsum, "kmln,jnim->lkji", *small)).startswith("einsum\nD (64 x 128) = ")


def test_explain_takes_the_callers_own() -> None:
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


@pytest.mark.usefixtures("no_assembler")
@pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="no Chromium is installed")
def test_a_page_in_a_browser(tmp_path: Path) -> None:
    """Nothing is asked for, no script raises, and the pointer tells what is under it."""
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


# ==========================================================================================================================
# The timeline of an emulated run: what waits for what, and how long by the lengths that are assumed.


@pytest.fixture(scope="module")
def hopper() -> Run:
    return small_run(mapping("one", WGMMAOp(64)), H100)


def test_a_consumer_waits_for_the_first_copy_and_multiplies_each_k_tile(hopper: Run) -> None:
    found = Timeline(hopper)
    mine = [bar for bar in found.bars if bar.role == "consumer 0"]
    assert mine[0].kind == "wait" and mine[0].what == "waits for full[0], phase 0"
    assert mine[0].end == pytest.approx(ISSUE + LATENCY)
    k_tiles = hopper.sizes[2] // hopper.spec.block.size.K * (hopper.sizes[1] // hopper.spec.block.size.N)
    multiplied = [bar for bar in mine if bar.kind == "multiply"]
    assert [bar.stage for bar in multiplied] == [n % hopper.spec.stages for n in range(k_tiles)]
    assert all(bar.end - bar.start == pytest.approx(TILE) for bar in multiplied)
    assert sum(bar.end - bar.start for bar in mine if bar.kind == "finish") == pytest.approx(FINISH * 2)
    copies = [bar for bar in found.bars if bar.role == "TMA copies"]
    assert len(copies) == k_tiles
    for copy, use in zip(copies, multiplied):
        assert copy.end <= use.start + 1e-9 and copy.stage == use.stage


def test_a_stage_is_filled_again_after_it_was_read(hopper: Run) -> None:
    found, stages = Timeline(hopper), hopper.spec.stages
    used = [bar for bar in found.bars if bar.role == "consumer 0" and bar.kind == "multiply"]
    copies = [bar for bar in found.bars if bar.role == "TMA copies"]
    assert all(copies[n + stages].start >= used[n].end - 1e-9 for n in range(len(copies) - stages))
    assert found.roles == ["producer", "TMA copies", "consumer 0"]
    assert any(bar.what.startswith("waits for empty[") for bar in found.bars if bar.role == "producer")


@pytest.mark.parametrize("sizes, products, wanted", [
    ((40, 72, 200), 1, (40, 72, 200)),                             # less than a tile, and less than once round the ring
    ((4096, 4096, 4096), 1, (64, 256, 384)),                       # a block has several tiles, and K goes round
    ((4096, 128, 128), 1, (64, 128, 128)),                         # one tile a block
    ((4096, 128, 128), 9, (128, 128, 128))])
def test_the_run_is_the_products_own(sizes: tuple[int, int, int], products: int, wanted: tuple[int, int, int]) -> None:
    conf = mapping("one", WGMMAOp(128), block_shape=gk.Tile(M=64, N=128, K=64), stages=4)
    assert small_sizes(conf, H100, sizes, products) == wanted
    if products == 1 and sizes[0] < 64:
        run = small_run(conf, H100, sizes)
        found = Timeline(run)
        assert sum(bar.kind == "multiply" for bar in found.bars if bar.role == "consumer 0") == -(-sizes[2] // 64)
        assert f"all of its {-(-sizes[2] // 64)} k-tiles" in drawn(run)


def test_a_part_of_a_product_is_said_to_be_one(hopper: Run) -> None:
    steps = hopper.sizes[2] // hopper.spec.block.size.K
    part = dataclasses.replace(hopper, asked=(hopper.sizes[0], hopper.sizes[1], 9 * hopper.sizes[2]))
    assert f"the first {steps} of its {9 * steps} k-tiles, which the others repeat" in drawn(part)


def test_bars_of_one_role_do_not_overlap(hopper: Run) -> None:
    found = Timeline(hopper)
    for role in ("producer", "consumer 0"):
        bars = [bar for bar in found.bars if bar.role == role]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(bars))
    lanes = _lanes([bar for bar in found.bars if bar.role == "TMA copies"])
    assert max(lanes.values()) < hopper.spec.stages


def test_warps_that_copy_for_themselves() -> None:
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor("float16"), block_shape=gk.Tile(M=32, N=32, K=32),
                         warps_per_block=2, kernel="multistage", stages=3)
    run = small_run(conf, H100)
    found = Timeline(run)
    k_tiles = run.sizes[2] // 32
    for warp in range(2):
        mine = [bar for bar in found.bars if bar.role == f"warp {warp}"]
        assert [bar.stage for bar in mine if bar.kind == "multiply"] == [n % 3 for n in range(k_tiles)]
        assert any(bar.kind == "wait" and bar.what.startswith("waits for its copies") for bar in mine)
    assert len([bar for bar in found.bars if bar.role == "cp.async copies"]) == k_tiles
    covered = np.zeros((32, 32), int)
    for _, m, n, rows, columns in warp_tiles(run.spec):
        covered[m:m + rows, n:n + columns] += 1
    assert (covered == 1).all()


# ==========================================================================================================================
# Conflicts of banks, counted from a recorded launch: none with the padding or swizzle of the layout, some without.


def _counted(**shared: Any) -> tuple[Any, list[AccessRow]]:
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor("float16"), block_shape=Tile(M=64, N=64, K=64),
                         warps_per_block=4, kernel="multistage", stages=2, **shared)
    a = np.zeros((64, 128), np.float16)
    with gk.emulate(), assumed(dataclasses.replace(H100, sm_count=1)), recorded() as seen:
        gk.matmul(a, a.T.copy(), None, conf)
    return conf.spec(), count(seen.launches[0], conf.spec())


def test_a_padded_layout_has_none() -> None:
    layout = Padded(RowMajor("float16"), 8)
    _, rows = _counted(shared_a_layout=layout, shared_b_layout=layout)
    assert [(row.operand, row.kind) for row in rows] == [("A", "copy"), ("A", "read"), ("B", "copy"), ("B", "read")]
    assert all(row.extra == 0 for row in rows) and all(row.without > 0 for row in rows if row.kind == "read")
    assert [row.accesses for row in rows if row.kind == "copy"] == [2 * 64 * 64 * 2 // (32 * 16)] * 2


def test_a_plain_layout_has_the_conflicts_of_the_others_without() -> None:
    _, rows = _counted(shared_a_layout=RowMajor("float16"), shared_b_layout=RowMajor("float16"))
    _, padded = _counted(shared_a_layout=Padded(RowMajor("float16"), 8), shared_b_layout=Padded(RowMajor("float16"), 8))
    assert [row.extra for row in rows] == [row.without for row in rows] == [row.without for row in padded]


def test_core_matrices_of_a_swizzle_have_none() -> None:
    """A and B K-major, and B along N: 128 bytes of each line."""
    for b in (ColMajor, RowMajor):
        conf = mapping("one", WGMMAOp(64), b=b)
        x = np.zeros((64, 64), np.float16)
        with gk.emulate(), assumed(dataclasses.replace(H100, sm_count=1)), recorded() as seen:
            gk.matmul(x, np.zeros((64, 64), np.float16, order="CF"[b is ColMajor]), None, conf)       # type: ignore[call-overload]
        rows = count(seen.launches[0], conf.spec())
        assert [(row.operand, row.kind, row.accesses, row.extra) for row in rows] == [("A", "wgmma", 64, 0), ("B", "wgmma", 64, 0)]
        assert all(row.without == 64 * 7 for row in rows)
