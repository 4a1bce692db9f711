"""docs/architecture.md, "Adding to it": its toys are the code that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gemmkit.kernels.collectives.scheduler import Persistent
from gemmkit.kernels.sm90.family import ROUTES
from gemmkit.kernels.spec import FAMILIES, ProblemShape
from gemmkit.plans.ahead import compile_config
from tests.support import markdown

PAGE = markdown.ROOT / "docs" / "architecture.md"
TOYS = "Mirrored", "reversed_bits", "Backwards", "HalfBoxes", "Dots"


@pytest.fixture(autouse=True)
def _lists() -> Iterator[None]:
    """What the page puts into the lists of families and routes is taken out again."""
    kept = [(entries, dict(entries)) for entries in (FAMILIES, ROUTES)]
    yield
    for entries, before in kept:
        entries.clear()
        entries.update(before)


@pytest.mark.compile
def test_the_toys_run_and_compile(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Each block asserts that its product is right; here: that the toy had a part in it, and what the page shows. Compiled for an
    H100, the instruction is in the PTX, each operand comes in two boxes, and nothing spills."""
    met, printed = [], []

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        met.extend(name for name in TOYS if name in names and name not in met)
        printed.extend([said] if said else [])
        if "Backwards" in met and "HalfBoxes" not in met:
            scheduler, shape = names["conf"].spec().scheduler, ProblemShape(128, 64, 64)
            forwards = Persistent(scheduler.order, scheduler.block, scheduler.cluster)
            assert type(scheduler) is names["Backwards"]
            assert ([scheduler.place(n, 0, shape) for n in range(4)]
                    == [forwards.place(n, 0, shape) for n in reversed(range(4))])
        if "Dots" in met:
            assert names["dots"].family.kernel is names["dot_products"]
        if "class HalfBoxes" in block.text:
            kernel = compile_config(names["conf"])
            assert kernel.ptx.count("cp.async.bulk.tensor.2d.shared") == 4 and kernel.usage.spill_stores == 0
        if "class Dots" in block.text:
            kernel = compile_config(names["dots"], operands={})
            assert "st.shared" not in kernel.ptx and kernel.usage.spill_stores == 0

    assert markdown.run(PAGE, monkeypatch, rng, {}, check) == 6
    assert met == list(TOYS)
    assert printed == [block.text for block in markdown.blocks(PAGE) if block.language == "text"]


def test_the_diffs_apply() -> None:
    """What a diff takes out of a file stands there, once."""
    diffs = [block.text.splitlines() for block in markdown.blocks(PAGE) if block.language == "diff"]
    for head, *lines in diffs:
        text = (markdown.ROOT / head.removeprefix("--- ")).read_text(encoding="utf-8").splitlines()
        taken = [line[1:] for line in lines if line.startswith("-")]
        assert taken and all(text.count(line) == 1 for line in taken), head
    assert len(diffs) == 3
