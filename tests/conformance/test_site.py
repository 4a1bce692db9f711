"""The site's pages: each has a place, their links lead somewhere, and their blocks run and show what they print.

`make docs` builds the site; nothing here needs what it is built with.
"""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import markdown

DOCS = markdown.ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")

#: How many blocks of Python each has that are run here. The other pages have tests of their own.
BLOCKS = {"design/fusion.md": 2, "design/lines.md": 1, "reference/device_code.md": 1, "reference/results.md": 2, "multistage.md": 1,
          "schedulers.md": 8, "index.md": 1, "start.md": 2, "recipes.md": 11, "tutorials/layout.md": 5, "tutorials/algebra.md": 3,
          "tutorials/semiring.md": 5, "tutorials/epilogue.md": 3, "tutorials/contraction.md": 4, "tutorials/debugging.md": 3,
          "how_to/cache.md": 1, "how_to/export.md": 1, "how_to/decoder_layer.md": 4, "how_to/distances.md": 6, "how_to/float64_by_int8.md": 1,
          "how_to/batch_invariant.md": 1, "how_to/convolution.md": 3, "how_to/float8.md": 2, "how_to/from_cublas.md": 4,
          "how_to/gpu_without_hopper.md": 1, "how_to/quantised_weights.md": 4, "how_to/troubleshooting.md": 14}


def name(page: Path) -> str:
    return page.relative_to(markdown.ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The headings of a page as mkdocs and GitHub name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


def test_every_page_has_a_place() -> None:
    text = (markdown.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    placed = re.findall(r"^ +- [^:]+: (\S+\.md)$", text[text.index("\nnav:"):], re.MULTILINE)
    assert sorted(placed) == [page.relative_to(DOCS).as_posix() for page in PAGES] and len(set(placed)) == len(placed)


@pytest.mark.parametrize("page", [markdown.ROOT / "README.md", *PAGES], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in (one or other for one, other in LINK.findall(text)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{page.name}: {link}"
        if page.name != "README.md":
            inside = to.is_relative_to(DOCS) or to.parent == markdown.ROOT / "bench" / "results"
            assert inside, f"{page.name}: {link} is no page of the site"
        assert not anchor or anchor in anchors(to), f"{page.name}: {link}"


def test_a_wrong_anchor_would_be_found() -> None:
    assert "the-emulator" in anchors(DOCS / "architecture.md") and "the-simulator" not in anchors(DOCS / "architecture.md")


@pytest.mark.parametrize("page", BLOCKS)
def test_blocks_run(page: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    path = DOCS / page
    given = markdown.blocks(path)
    shown = {block.line: after.text for block, after in pairwise(given) if (block.language, after.language) == ("python", "text")}

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        wanted = shown.get(block.line, "") if re.search(r"\bprint\w*\(", block.text) else ""
        assert list(markdown.without_places(said)) == list(markdown.without_places(wanted))

    assert markdown.run(path, monkeypatch, rng, {}, check) == BLOCKS[page]


@pytest.mark.parametrize("page", [markdown.ROOT / "README.md", *PAGES], ids=name)
def test_blocks_are_at_most_88_columns_wide(page: Path) -> None:
    wide = [line for block in markdown.blocks(page) for line in block.text.splitlines() if len(line) > 88]
    assert not wide, f"{page.name}: {wide}"


def referred() -> dict[str, Any]:
    """What each ``::: module.name`` of the reference's pages names; without PyTorch, all but the two rooms that import it."""
    from importlib import import_module
    from importlib.util import find_spec

    found = {}
    for page in (DOCS / "reference").glob("*.md"):
        for given in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            if given in ("gemmkit.torch", "gemmkit.distributed") and find_spec("torch") is None:
                continue
            module, _, attribute = given.rpartition(".")
            try:
                is_module = find_spec(given) is not None
            except ModuleNotFoundError:                                  # a name of a module
                is_module = False
            found[given] = import_module(given) if is_module else getattr(import_module(module), attribute)
    return found


def test_examples_of_the_reference_are_at_most_88_columns_wide() -> None:
    """Those of docstrings, which the site shows."""
    docs = {}
    for name, thing in referred().items():
        docs[name] = inspect.getdoc(thing) or ""
        names = getattr(thing, "__all__", ()) if inspect.ismodule(thing) else vars(thing) if inspect.isclass(thing) else ()
        docs |= {f"{name}.{member}": inspect.getdoc(getattr(thing, member)) or "" for member in names if member[0] != "_"}
    wide = {name: line for name, doc in docs.items() for line in doc.splitlines()
            if len(line) > 88 and re.match(r">>> |\.\.\. |    \S.* = ", line)}
    assert len(docs) > 100 and not wide, wide


def test_every_block_of_python_is_run_somewhere() -> None:
    """By this file, or by one that names the page."""
    tests = "".join(path.read_text(encoding="utf-8") for path in (markdown.ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        if any(block.language == "python" for block in markdown.blocks(page)):
            assert page.relative_to(DOCS).as_posix() in BLOCKS or f'"{page.name}"' in tests, page


def test_references_name_what_there_is() -> None:
    assert len(referred()) > 50
