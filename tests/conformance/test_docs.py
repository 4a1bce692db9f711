"""docs/: the Python blocks run, their assertions hold, and what they print is what the text shows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support import markdown

DOCS = markdown.ROOT / "docs"


#: Of the long pages: `make test` runs one part of each, with the blocks that it needs.
PARTS = 4


def part_of(count: int, part: int) -> range:
    return range(part, count, PARTS)


@pytest.mark.kin(4)
@pytest.mark.compile
@pytest.mark.sample(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_components(part: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    path = DOCS / "components.md"
    given = markdown.blocks(path)
    shown = {block.line: after.text for block, after in pairwise(given) if (block.language, after.language) == ("python", "text")}
    assert len(shown) == sum(b.language == "text" for b in given) == 2
    assert sum(b.language == "python" for b in given) == 17

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert list(markdown.without_places(said)) == list(markdown.without_places(shown.get(block.line, "")))

    assert markdown.run(path, monkeypatch, rng, {}, check, part_of(17, part)) >= 17 // PARTS


@pytest.mark.kin(4)
def test_number_systems(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert not said, said

    assert markdown.run(DOCS / "number_systems.md", monkeypatch, rng, {}, check) == 11


@pytest.mark.kin(4)
@pytest.mark.parametrize(("about", "blocks"), [("Band", 1), ("BlockSparse", 2), ("Scatter", 1)])
def test_conditions(about: str, blocks: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    path, ran = DOCS / "schedulers.md", []
    wanted = [n for n, block in enumerate(b for b in markdown.blocks(path) if b.language == "python") if about in block.text]

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        ran.append(block.text)
        assert not said, said

    assert markdown.run(path, monkeypatch, rng, {}, check, wanted) == blocks and about in ran[0]


def test_rows(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert not said, said
        if "lse" in names:
            x = np.asarray(names["x"], np.float64) / 0.5
            assert np.allclose(names["lse"], np.log(np.exp(x).sum(axis=1)), rtol=1e-5)

    assert markdown.run(DOCS / "rows.md", monkeypatch, rng, {"rand(64, 768,": "rand(64, 12,", "ones(768,": "ones(12,",
                                                             "zeros(768,": "zeros(12,"}, check) == 3


@pytest.mark.kin(4)
@pytest.mark.sample(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_fusion(part: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    path = DOCS / "fusion.md"
    assert sum(b.language == "python" for b in markdown.blocks(path)) == 19

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert not said, said

    assert markdown.run(path, monkeypatch, rng, {}, check, part_of(19, part)) >= 19 // PARTS


def test_experiments_shows_the_results_that_are_there() -> None:
    """Where it does not: `python -m bench.asked --into docs/experiments.md`."""
    from bench import asked

    text = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert asked.put(text, asked.made(asked.FILES), asked.BEGIN, asked.END) == text


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


def test_the_glossary_names_what_is_there() -> None:
    """A name that stands behind a file is defined in it."""
    import re

    from tests.support import code_lines

    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    named = re.findall(r"`(gemmkit/[\w/]+\.py)`: `(\w+)`", text)
    assert len(named) > 10
    for path, name in named:
        known = code_lines.defined(code_lines.source_of(path))
        assert name in known or any(entry.endswith(f".{name}") for entry in known), f"{path} defines no {name}"


def test_every_page_leads_to_the_glossary() -> None:
    for page in (markdown.ROOT / "README.md", DOCS / "architecture.md", DOCS / "hopper.md"):
        assert "glossary.md)" in page.read_text(encoding="utf-8"), page.name
