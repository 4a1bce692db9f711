"""README.md and docs/command_line.md say what is true: blocks run and give what they should, commands are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import markdown
from tests.support.checks import assert_close

README, COMMAND_LINE = markdown.ROOT / "README.md", markdown.ROOT / "docs" / "command_line.md"


def expected(block: markdown.Block, names: dict[str, Any]) -> np.ndarray:
    """What a block's last product must be, by NumPy."""
    a, b = (np.asarray(names[x], np.float64) for x in "ab")
    if "class RBF" in block.text:
        return np.asarray(np.exp(-0.1 * ((a[:, :, None] - b[None, :, :]) ** 2).sum(axis=1)))
    return names["p"] @ names["q"] if "emulate" in block.text else a @ b


def test_its_blocks_run(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    def check(block: markdown.Block, names: dict[str, Any], printed: str) -> None:
        assert_close(names["d"], expected(block, names), 1e-5)

    assert markdown.run(README, monkeypatch, rng, {"M, N, K = 1000, 700, 300": "M, N, K = 20, 12, 10"}, check) == 3


def test_it_names_every_command() -> None:
    from gemmkit.tools.cli import COMMANDS

    commands, text = COMMAND_LINE.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"python -m gemmkit {name}" in commands
    for target in ("demo", "test", "bench", "docs"):
        assert f"make {target}" in text


def test_what_it_shows_of_explain_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows that it shows are rows of the real answer; their figures are one compiler's."""
    from gemmkit.tools.cli import main

    shown = next(b for b in markdown.blocks(COMMAND_LINE) if b.text.startswith("$ python -m gemmkit explain"))
    command, *lines = shown.text.splitlines()
    assert main(command.split()[4:]) == 0
    said = capsys.readouterr().out
    rows = {tuple(cell.strip() for cell in line.split("│")[1:2]) for line in said.splitlines() if "│" in line}
    for line in lines:
        if line != "...":
            assert tuple(cell.strip() for cell in line.split("│")[1:2]) in rows
