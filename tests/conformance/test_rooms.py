"""The rooms of `gemmkit/`: how large each may be, which words its names may not have, and the names that modules had."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping

import pytest

from gemmkit.lang.deferred import moved
from tests.support.markdown import ROOT, blocks
from tools import house

BUDGET = house.BUDGET
SOURCES = {path: text for path, text in house.of_tree().items() if path.startswith("gemmkit/")}


@pytest.fixture(scope="module")
def trees() -> Mapping[str, ast.Module]:
    """All files, parsed once."""
    return {path: house.parsed(text) for path, text in SOURCES.items()}


@pytest.fixture(scope="module")
def graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The files that each file imports."""
    return house.imports(trees)


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return house.figures(SOURCES)


@pytest.mark.parametrize("figure", house.limits())
def test_the_tree_keeps_its_budget(figure: str, counted: dict[str, int]) -> None:
    """Numbers go down, or up with a reason in the commit that raises them: lines of a room, entries, parameters without a type."""
    found, allowed = counted[figure], house.limits()[figure]
    assert found <= allowed, f"{figure}: {found}, and the budget is {allowed}"


def test_every_room_has_a_budget() -> None:
    assert set(BUDGET["lines"]) == {"all", *house.ROOMS} and BUDGET["longest"] == house.MOST_LINES


def test_entries_are_those_of_the_folder(counted: dict[str, int]) -> None:
    entries = [path for path in (ROOT / "gemmkit").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert counted["entries"] == len(entries)


def test_a_parameter_without_a_type_is_counted() -> None:
    source = "def f(a: Any, *b: Any, c: int, **d: Any) -> Any:\n    def g(x: Any, y: list[Any]) -> None: ...\n"
    assert house.untyped({"one.py": ast.parse(source)}) == {"one.py": 4}


def test_a_class_has_a_name_of_its_own(trees: Mapping[str, ast.Module]) -> None:
    twice = {name: where for name, where in house.classes(trees).items() if len(where) > 1}
    assert not twice, twice


# -- imports -----------------------------------------------------------------------------------------------------------

def _rooms(picture: str) -> dict[str, int]:
    """The row of each file and folder of the package that the picture of the house names."""
    here = ROOT / "gemmkit"
    rooms: dict[str, int] = {}
    row = 0
    for line in picture.splitlines():
        if line.strip().startswith("."):                      # files of the room above
            continue
        row += not line.startswith(("|", " "))                # a label begins a row
        for name in line.replace(",", " ").split():
            path = here / name.rstrip("/")
            if (name.endswith("/") and path.is_dir()) or path.with_suffix(".py").exists():
                rooms["gemmkit/" + name + ("" if name.endswith("/") else ".py")] = row
    return rooms


def test_imports_run_down_the_picture(graph: dict[str, set[str]]) -> None:
    """Of architecture.md: no file imports one of a row above; all that is in the package has a row."""
    picture = next(b.text for b in blocks(ROOT / "docs" / "architecture.md") if "what users call" in b.text)
    rooms = _rooms(picture)
    outside = "gemmkit/__init__.py", "gemmkit/__main__.py", "gemmkit/kernels/__init__.py"

    def row(path: str) -> int:
        found = [(len(room), rooms[room]) for room in rooms if path == room or (room.endswith("/") and path.startswith(room))]
        assert found, f"the picture has no room for {path}"
        return max(found)[1]

    checked = 0
    for path, imported in graph.items():
        if path in outside:
            continue
        for other in imported - set(outside):
            assert row(path) <= row(other), f"{path} imports {other}, which stands above it in the picture"
            checked += 1
    assert checked > 500


def test_no_imports_run_upwards(graph: dict[str, set[str]]) -> None:
    """From a room of `tools.house` to one above it: `python -m tools.house --upwards` lists them."""
    assert {path for path in graph if house.room_of(path) is None} == {"gemmkit/__init__.py", "gemmkit/__main__.py"}
    assert house.upwards(graph) == []
    for places in house.ROOMS.values():
        for place in places:
            assert (ROOT / "gemmkit" / (place if place.endswith("/") else f"{place}.py")).exists(), place


def test_no_files_import_each_other(graph: dict[str, set[str]]) -> None:
    """A circle of imports is one room with several doors: what its files share belongs into a file below them."""
    assert house.cycles(graph) == []


# -- words ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", sorted(SOURCES))
def test_names_are_the_fields(path: str) -> None:
    """A name that HOUSE's words replaced does not grow back."""
    banned = house.banned(SOURCES[path])
    assert not banned, "; ".join(f"{path}: {name} is called {BUDGET['banned'][name]}" for name in banned)


def test_a_banned_name_is_found() -> None:
    assert house.banned("from gemmkit.anew import x\ny = [weave_words(z) for z in x]\n") == ["anew", "weave_words"]


# -- what texts refer to -----------------------------------------------------------------------------------------------

def _is_there(name: str) -> bool:
    """Whether a name such as ``gemmkit.layouts.base.Layout.run`` leads to something, by no old name."""
    found, parts = None, name.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        for n, part in enumerate(parts, 1):
            path = ROOT.joinpath(*parts[:n])
            if path.is_dir() or path.with_suffix(".py").exists():
                found = importlib.import_module(".".join(parts[:n]))
            elif part in getattr(found, "__annotations__", {}):               # a field
                return n == len(parts)
            else:
                try:
                    found = getattr(found, part)
                except (AttributeError, DeprecationWarning):
                    return False
    return True


@pytest.mark.parametrize("path", sorted(SOURCES))
def test_texts_refer_to_what_is_there(path: str) -> None:
    """Docstrings and comments name modules, classes and functions by where they are today."""
    named = set(re.findall(r"`(gemmkit(?:\.\w+)+)(?:\([^`]*\))?`", SOURCES[path]))
    if any(name.startswith(("gemmkit.torch", "gemmkit.distributed")) for name in named):
        pytest.importorskip("torch")
    assert not [name for name in sorted(named) if not _is_there(name)]


def test_a_text_that_refers_to_nothing_is_found() -> None:
    assert _is_there("gemmkit.layouts.base.ArrayLayout.run") and _is_there("gemmkit.plans.problem.Call.config")
    assert _is_there("gemmkit.masks.Causal") and _is_there("gemmkit.matmul")
    assert not any(map(_is_there, ("gemmkit.layouts.base.Across", "gemmkit.nothing.at.all", "gemmkit.epilogues.observers.RowSum")))


# -- modules by their names before --------------------------------------------------------------------------------------

def test_a_module_is_imported_by_the_name_that_it_had() -> None:
    program = """
import warnings
import gemmkit
from gemmkit.lang import deferred
assert gemmkit.matmul and gemmkit.layouts.Concat and not deferred._table.cache_info().currsize     # today's names need no table
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from gemmkit.attention_call import attention
    from gemmkit.kernels.common.stream_k import StreamK
    import gemmkit.observers
    from gemmkit import inspection
    import gemmkit.masks as masks
    from gemmkit.kernels.sm90.tma import Tma
import gemmkit as gk
assert attention is gk.attention and StreamK is gk.StreamK and masks.Causal is gk.masks.Causal
assert gemmkit.observers.RowSum.__module__ == "gemmkit.epilogues.observers" and inspection.compile_config
said = [str(warning.message) for warning in seen]
assert Tma.__module__ == "gemmkit.kernels.sm90.routes"
assert len(said) == 6 and all(warning.category is DeprecationWarning for warning in seen), said
assert said[0] == "gemmkit.attention_call is gemmkit.functions.attention now; the old name goes with gemmkit 0.2", said
assert seen[0].filename == "<string>", seen[0].filename
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_of_old_names_leads_to_modules_that_are_there() -> None:
    present = {house._module(path) for path in SOURCES}
    assert len(moved()) > 300 and not set(moved()) & present
    assert set(moved().values()) <= present


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"gemmkit\.nothing"):
        importlib.import_module("gemmkit.nothing")
