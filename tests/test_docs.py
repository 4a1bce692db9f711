"""docs/: the Python blocks run, their assertions hold, and what they print is what the text shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import markdown

DOCS = markdown.ROOT / "docs"


@pytest.mark.compile
def test_components(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    path = DOCS / "components.md"
    shown = [b.text for b in markdown.blocks(path) if b.language == "text"]
    printed: list[str] = []

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        if said:
            printed.append(said)

    assert markdown.run(path, monkeypatch, rng, {}, check) == 16
    assert len(printed) == len(shown) == 3
    for said, text in zip(printed, shown, strict=True):
        assert list(markdown.without_places(said)) == list(markdown.without_places(text))


def test_number_systems(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert not said, said

    assert markdown.run(DOCS / "number_systems.md", monkeypatch, rng, {}, check) == 9


def test_experiments_shows_the_results_that_are_there() -> None:
    """Where it does not: `python -m bench.asked --into docs/experiments.md`."""
    from bench import asked

    text = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert asked.put(text, asked.made(asked.FILES)) == text


def test_the_map_names_what_is_there() -> None:
    """Every file and folder that a text names in the package, the tests or the benches exists."""
    import re

    for path in (*DOCS.glob("*.md"), markdown.ROOT / "README.md"):
        named = re.findall(r"`((?:gemmkit|tests|bench|examples|docs)/[\w./]*)`", path.read_text(encoding="utf-8"))
        for name in named:
            assert (markdown.ROOT / name).exists() or name.endswith("results/"), f"{path.name} names {name}"


def test_the_map_names_every_package() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    for package in (markdown.ROOT / "gemmkit").iterdir():
        if (package / "__init__.py").exists() or (package.suffix == ".py" and not package.name.startswith("__")):
            assert f"`{package.name}{'/' if package.is_dir() else ''}`" in text, f"architecture.md has no {package.name}"
