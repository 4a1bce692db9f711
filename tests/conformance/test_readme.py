"""README.md says what is true: its Python blocks run, and give what it says that they give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import markdown
from tests.support.checks import assert_close

pytestmark = pytest.mark.usefixtures("small_tiles")

README = markdown.ROOT / "README.md"


def expected(block: markdown.Block, names: dict[str, Any]) -> np.ndarray | None:
    """What a block's last product must be, by NumPy; None for a block that has another kind of result."""
    a, b, m, n, k = (np.asarray(names[x], np.float64) if x in "ab" else names[x] for x in ("a", "b", "M", "N", "K"))
    if "class Toeplitz" in block.text:
        rows, columns = np.indices((m, k))
        return names["t"].astype(np.float64)[rows - columns + k - 1] @ b
    if "class Decay" in block.text:
        return a / (1 + 0.01 * np.arange(k)) @ b
    if "class MinPlus" in block.text:
        return np.asarray((a[:, :, None] + b[None, :, :]).min(axis=1))
    if "class RBF" in block.text:
        return np.asarray(np.exp(-0.1 * ((a[:, :, None] - b[None, :, :]) ** 2).sum(axis=1)))
    if "operators.MMAOp" in block.text:
        return np.asarray(names["x"].astype(np.float64) @ names["y"].T.astype(np.float64))
    if "gk.Concat" in block.text:
        assert_close(names["g"], np.maximum(a @ names["w"], 0) * (a @ names["v"]), 1e-5)
        assert_close(names["j"], a @ (names["w"].astype(np.float64) + names["v"]), 1e-5)
        raised = np.exp(np.asarray(names["j"], np.float64))
        assert_close(names["p"], raised / raised.sum(axis=1, keepdims=True), 1e-5)
    return a @ b if "gk.plan" in block.text else None


def test_its_blocks_run(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    checked = []

    def check(block: markdown.Block, names: dict[str, Any], printed: str) -> None:
        want = expected(block, names)
        if want is not None:
            assert_close(names["d"], want, 1e-5)
            checked.append(block)
        if "class Shifted" in block.text:
            shown = next(b for b in markdown.blocks(README) if "bias[n + 1]" in b.text and b.language == "text")
            assert list(markdown.without_places(printed)) == list(markdown.without_places(shown.text))
            checked.append(block)

    markdown.run(README, monkeypatch, rng, {"M, N, K = 1000, 700, 300": "M, N, K = 20, 12, 10"}, check)
    assert len(checked) == 7


def test_it_names_every_command() -> None:
    from gemmkit.cli import COMMANDS

    text = README.read_text(encoding="utf-8")
    for module in COMMANDS:
        assert f"python -m gemmkit {module.__name__.rpartition('.')[2]}" in text
    for target in ("demo", "test", "bench"):
        assert f"make {target}" in text


@pytest.mark.shipped
def test_what_it_shows_of_explain_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows that it shows are rows of the real answer; their figures are one compiler's."""
    from gemmkit.cli import main

    shown = next(b for b in markdown.blocks(README) if b.text.startswith("$ python -m gemmkit explain"))
    command, *lines = shown.text.splitlines()
    assert main(command.split()[4:]) == 0
    said = capsys.readouterr().out
    rows = {tuple(cell.strip() for cell in line.split("│")[1:2]) for line in said.splitlines() if "│" in line}
    for line in lines:
        if line != "...":
            assert tuple(cell.strip() for cell in line.split("│")[1:2]) in rows
