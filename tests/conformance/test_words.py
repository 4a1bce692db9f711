"""docs/reference/programs.md lists the words of the program language that gemmkit.programs exports, with their signatures."""

from __future__ import annotations

import inspect
import re

import pytest

import gemmkit as gk
from gemmkit import programs as gp
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
    assert axes == {cell.strip("`").removeprefix("a.") for cell in first_cells("### Arrays")[:3]}


@pytest.mark.parametrize("sign", ["__add__", "__sub__", "__mul__", "__truediv__", "__neg__", "__abs__", "__pow__",
                                  "__matmul__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__and__",
                                  "__or__", "__invert__"])
def test_operators_have_a_row(sign: str) -> None:
    written = dict(add="x + y", sub="x - y", mul="x * y", truediv="x / y", neg="-x", abs="abs(x)", pow="x ** 2", matmul="x @ y",
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
