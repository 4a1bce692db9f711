"""The references that are written by hand name what there is.

docs/reference/programs.md: the words that gemmkit.programs exports, with their signatures. docs/reference/component_classes.md:
members of the base classes, and all epilogues that ship.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit import programs as gp
from gemmkit.kernels import masks
from gemmkit.kernels.collectives.scheduler import Order
from gemmkit.kernels.spec import Condition
from gemmkit.programs import decorated, values
from tests.support.markdown import ROOT

PAGE = (ROOT / "docs" / "reference" / "programs.md").read_text(encoding="utf-8")


def first_cells(heading: str, text: str = PAGE) -> list[str]:
    """The first cell of each row of the first table under a heading."""
    section = text[text.index(f"\n{heading}\n"):]
    table = section[section.index("\n|---"):].split("\n\n")[0]
    return [re.split(r"(?<!\\)\|", line)[1].strip() for line in table.strip().splitlines()[1:]]


def signature(f: object) -> str:
    """``(extent, stop=None)``, without types."""
    found = inspect.signature(f)                       # type: ignore[arg-type]
    plain = [x.replace(annotation=x.empty) for x in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def test_every_word_has_a_row_with_its_signature() -> None:
    words = [word for word in gp.__all__ if word not in ("Mapping", "Program", "program")]
    assert sorted(first_cells("## Words")) == sorted(f"`gp.{word}{signature(getattr(gp, word))}`" for word in words)


def test_a_missing_row_would_be_found() -> None:
    assert "`gp.exp(x)`" not in first_cells("## Words", PAGE.replace("| `gp.exp(x)` |", "| `gp.exponential(x)` |"))


def test_every_field_of_a_mapping_has_a_row() -> None:
    assert sorted(first_cells("## The mapping")) == sorted(f"`{name}`" for name in inspect.signature(gk.Mapping).parameters)


def test_what_values_and_arrays_provide_has_a_row() -> None:
    methods = {name for name in vars(values.Arithmetic) if not name.startswith("_") and name != "T"}
    rows = " ".join(first_cells("### Values"))
    assert methods == {"sum", "max", "min", "mean", "astype"}
    for name in methods:
        assert f"`x.{name}{signature(getattr(values.Arithmetic, name)).replace('self, ', '')}`" in rows, name
    axes = {name for name, x in vars(values.Parameter).items() if isinstance(x, property)}
    assert axes == {cell.strip("`").removeprefix("a.") for cell in first_cells("### Arrays")[:5]}


@pytest.mark.parametrize("sign", ["__add__", "__sub__", "__mul__", "__truediv__", "__neg__", "__abs__", "__pow__",
                                  "__matmul__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__and__",
                                  "__or__", "__invert__"])
def test_operators_have_a_row(sign: str) -> None:
    written = dict(add="x + y", sub="x - y", mul="x * y", truediv="x / y", neg="-x", abs="abs(x)", pow="x ** y", matmul="x @ y",
                   lt="x < y", le="x <= y", gt="x > y", ge="x >= y", eq="x == y", ne="x != y", invert="~c",
                   **{"and": "c & d", "or": "c \\| d"})
    rows = " ".join(first_cells("### Values") + first_cells("### Conditions"))
    assert sign in vars(values.Arithmetic) and f"`{written[sign.strip('_')]}`" in rows


def test_names_that_arguments_may_not_have() -> None:
    sentence = PAGE[PAGE.index("may not be named"):].split(".\n")[0].split(". ")[0]
    assert tuple(re.findall(r"`(\w+)`", sentence)) == decorated.OWN


def test_calls_have_their_signatures() -> None:
    rows = first_cells("## Calls")
    for name in ("plan", "reference", "tune"):
        assert f"`f.{name}{signature(getattr(gp.Program, name)).replace('self, ', '')}`" in rows, name
    assert f"`f{signature(gp.Program.__call__).replace('self, ', '')}`" in rows


# -- classes of components ------------------------------------------------------------------------------------------------

CLASSES = (ROOT / "docs" / "reference" / "component_classes.md").read_text(encoding="utf-8")


def members(text: str, header: str) -> list[str]:
    """Methods and fields that the first cells of the table with a header name."""
    table = text[text.index(f"\n{header}"):].split("\n\n")[0].strip().splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", line)[1] for line in table]
    return [name for cell in cells for name in re.findall(r"`(\w+)(?:\([^)]*\))?`", cell)]


@pytest.mark.parametrize(("section", "header", "base"), [
    ("### GlobalLayout", "| member", layouts.GlobalLayout), ("### ResultLayout", "| member", layouts.ResultLayout),
    ("### Both", "| member", layouts.GlobalLayout), ("### SharedLayout", "| member", layouts.Swizzled),
    ("## Transforms", "| member", transforms.Transform), ("## Operators", "| member of `FPUOp`", operators.FPUOp),
    ("## Operators", "| member of `Operator`", operators.FPUOp), ("## Epilogues", "| member", epilogues.ComposedEpilogue),
    ("## Functions of rows", "| member of `gk.masks.Mask`", masks.Mask)])
def test_the_classes_have_the_members(section: str, header: str, base: type) -> None:
    names = members(CLASSES[CLASSES.index(f"\n{section}"):], header)
    known = {*dir(base), *getattr(base, "__dataclass_fields__", ())}
    written = {"store_element"} if base is layouts.ResultLayout else {"__call__"} if base is transforms.Transform else set()
    assert names and set(names) - written <= known, set(names) - written - known


def test_orders_and_conditions_have_the_members() -> None:
    rows = re.findall(r"^\| `(Order|Condition)` \| `(\w+)", CLASSES, re.MULTILINE)
    assert len(rows) == 4 and all(hasattr({"Order": Order, "Condition": Condition}[one], name) for one, name in rows)


def test_every_epilogue_that_ships_has_a_row() -> None:
    table = CLASSES[CLASSES.index("\n### Epilogues that ship"):].split("\n\n")[1]
    shown = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)", line.split("|")[1])}
    assert shown == {name for name in epilogues.__all__ if name[0].isupper()} - {"Combine", "ComposedEpilogue", "Default", "Epilogue"}


def test_every_layout_of_an_array_with_structure_has_a_row() -> None:
    names = first_cells("### Matrices with structure", CLASSES)
    shown = {name for cell in names for name in re.findall(r"`(\w+)", cell)}
    plain = {"ArrayLayout", "Boxed", "Embedded", "Folded", "GlobalLayout", "Interleaved", "Layout", "Packed", "Padded", "Plain",
             "Planar", "Planes", "ResultLayout", "SharedLayout", "Sliding", "Swizzled", "Zero"}
    of_arrays = {"Concat", "Discard", "Gather", "InterleavedColumns", "Matrix", "Scatter"}         # arrays with a layout: docs/reference/matrices.md
    assert shown == {name for name in set(layouts.__all__) - plain - of_arrays if not name.endswith("Matrix")}


# -- words that the field's nouns replace -----------------------------------------------------------------------------

#: In sentences of the pages; tests/conformance/budget.json has the names that code may not have.
REPLACED = {r"hand(s|ed|ing)?[ -]over|hand-over": "store partial sums; reuse accumulators as an operand", r"braid\w*": "interleave",
            r"teeth|tooth|combs?|combed": "interleaved vectors", r"weaves?|woven|weaving": "interleave", "anew": "again",
            "told": "stated", r"dealt": "distributed", r"(lie|lies|lying) across|across K": "MN-major",
            r"watch(es|ed)?": "reduce an operand", r"recognis\w+": "known"}


def replaced(text: str) -> list[str]:
    """The words of sentences that have another noun: code in blocks and within lines is left out."""
    sentences = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [f"{found[0]}: {noun}" for word, noun in REPLACED.items() for found in re.finditer(rf"\b({word})\b", sentences)]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_pages_use_the_fields_nouns(page: Path) -> None:
    assert not replaced(page.read_text(encoding="utf-8"))


def test_a_replaced_word_is_found() -> None:
    assert replaced("A block hands over once; a braid\n\n```\nanew\n```\n`told`") == [
        "hands over: store partial sums; reuse accumulators as an operand", "braid: interleave"]
