"""docs/specs.md's tables of what was measured, from the result file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import report, specs_page
from bench.experiments import specs
from tests.support import markdown

PAGE = markdown.ROOT / "docs" / "specs.md"


def row(group: str, work: str, m: int, k: int, ratio: float, peer: str = "cuBLAS", config: str = "schedule") -> dict[str, Any]:
    return {"work": work, "dtype": "f16", "m": m, "n": m, "k": k, "layout": "nt", "ours_us": 10.0, "peer": peer, "peer_us": 10 * ratio,
            "ratio": ratio, "error": 0.0, "graph": True, "group": group, "config": config, "tflops": 5.0}


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    between = text[text.index(specs_page.BEGIN) + len(specs_page.BEGIN):text.index(specs_page.END)]
    assert between.strip() == specs_page.text().strip()


def test_tables(tmp_path: Path) -> None:
    rows = [row("listings", "x", 1024, 1024, 1.25, "gemmkit's template, same tiles"), row("listings", "x", 1024, 1024, 0.5),
            row("decompositions", "y", 1024, 1024, 0.25), row("small", "small", 16, 64, 2.5), row("small", "small", 16, 128, 0.9, config="gemmkit.matmul"),
            row("small", "small", 32, 64, 1.0)]
    report.write(report.document("specs", rows, "a GPU"), tmp_path / "specs.json")
    text = specs_page.text(tmp_path / "specs.json")
    assert "| x | 1024 | 10.0 us | 5.0 | 1.25 | 0.50 |" in text and "| y | 1024 | 10.0 us | 5.0 |  | 0.25 |" in text
    assert "| 16 | 2.50* | 0.90 |" in text and "| 32 | 1.00* |  |" in text
    assert "Geometric mean 1.31 of 3 products, the worst 0.90, 1 below 1. The fastest was a schedule in 2, `gemmkit.matmul` in 1." in text
    assert "Twice as fast as cuBLAS: 16 x 16 x 64." in text and specs_page.text(tmp_path / "none.json").startswith("Not measured yet")


def test_a_candidates_tiles_divide() -> None:
    """Each small product has one schedule at least; none knows edges."""
    assert len(specs.CANDIDATES) == 9 and all(specs.candidates(case.m, case.n, case.k) for case in specs.small())
    assert len(list(specs.small())) == 42 and set(specs.candidates(16, 16, 64)) == {"schedule 16x16x64, warp 16x16"}
