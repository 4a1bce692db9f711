"""The rooms of `gemmkit/`: how large each may be, which words its names may not have, and the names that modules had."""

from __future__ import annotations

import ast
import importlib
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from gemmkit.lang.deferred import moved
from tests.support.markdown import ROOT
from tools import house

BUDGET = json.loads(Path(__file__).with_name("budget.json").read_text(encoding="utf-8"))
SOURCES = {path: text for path, text in house.of_tree().items() if path.startswith("gemmkit/")}


@pytest.mark.parametrize("room", BUDGET["lines"])
def test_a_room_keeps_its_budget(room: str) -> None:
    """Numbers go down, or up with a reason in the commit that raises them."""
    lines = sum(text.count("\n") for path, text in SOURCES.items() if room == "all" or house.room_of(path) == room)
    assert lines <= BUDGET["lines"][room], f"{room}: {lines} lines, and its budget is {BUDGET['lines'][room]}"


def test_every_room_has_a_budget() -> None:
    assert set(BUDGET["lines"]) == {"all", *house.ROOMS}


def test_the_tree_can_be_held_in_the_head() -> None:
    entries = [path for path in (ROOT / "gemmkit").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert len(entries) <= BUDGET["entries"] and len(SOURCES) <= BUDGET["files"]
    longest = max(SOURCES, key=lambda path: SOURCES[path].count("\n"))
    assert SOURCES[longest].count("\n") <= BUDGET["longest"], longest


def test_parameters_name_their_types() -> None:
    """Their number goes down: a parameter is of a class, a protocol, or an object that is only passed on."""
    untyped = house.untyped({path: ast.parse(text) for path, text in SOURCES.items()})
    most = max(untyped, key=lambda path: untyped[path])
    assert sum(untyped.values()) <= BUDGET["parameters annotated Any"], f"{most} has {untyped[most]} of them"


def test_a_parameter_without_a_type_is_counted() -> None:
    source = "def f(a: Any, *b: Any, c: int, **d: Any) -> Any:\n    def g(x: Any, y: list[Any]) -> None: ...\n"
    assert house.untyped({"one.py": ast.parse(source)}) == {"one.py": 4}


def test_a_class_has_a_name_of_its_own() -> None:
    twice = {name: where for name, where in house.classes(SOURCES).items() if len(where) > 1}
    assert not twice, twice


# -- words ------------------------------------------------------------------------------------------------------------

def names(source: str) -> set[str]:
    """All names of a file, within f-strings and comments too where they stand alone."""
    found = {token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.NAME}
    return found | {part for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
                    for part in (node.module or "").split(".")}


@pytest.mark.parametrize("path", sorted(SOURCES))
def test_names_are_the_fields(path: str) -> None:
    """A name that HOUSE's words replaced does not grow back."""
    banned = sorted(names(SOURCES[path]) & set(BUDGET["banned"]))
    assert not banned, "; ".join(f"{path}: {name} is called {BUDGET['banned'][name]}" for name in banned)


def test_a_banned_name_is_found() -> None:
    assert {"weave_words", "anew"} <= names("from gemmkit.anew import x\ny = [weave_words(z) for z in x]\n")


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
    from gemmkit.kernels.sm90.routes import Tma
import gemmkit as gk
assert attention is gk.attention and StreamK is gk.StreamK and masks.Causal is gk.masks.Causal
assert gemmkit.observers.RowSum.__module__ == "gemmkit.epilogues.observers" and inspection.compile_config
said = [str(warning.message) for warning in seen]
assert Tma.__module__ == "gemmkit.kernels.sm90.tma"
assert len(said) == 5 and all(warning.category is DeprecationWarning for warning in seen), said
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
