"""The tables under "Arithmetic" in docs/reference/device_code.md say what `gemmkit.lang.number_rules` does: every row is read and tried."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmkit.emulator.user_code import arguments
from gemmkit.lang import number_rules as rules
from gemmkit.lang.number_rules import BOOL, FLOAT32, FLOAT64, INT32, INT64, OF_ML_DTYPES, Weak

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "device_code.md").read_text().split("### Arithmetic")[1].split("\n## ")[0]

FLOATS = [*(np.dtype(x) for x in ("f2", "f4", "f8")), *OF_ML_DTYPES]
INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
COORDINATES = [Weak.COORDINATE, Weak.LONG_COORDINATE]
LITERALS = [3, 100]
COMPLEX = [rules.COMPLEX64, rules.COMPLEX128]

#: What the first table's words stand for: kinds of numbers, ...
KINDS: dict[str, list] = {
    "a coordinate": COORDINATES, "a loop variable": [rules.of_range(5)], "an `int` in a `Scalar` field": [Weak.COORDINATE],
    "another": COORDINATES, "a literal": LITERALS, "a float": FLOATS, "NumPy's integers": INTEGERS, "booleans": [BOOL],
    "an integer of 32 or 64 bits": INTEGERS[2:4] + INTEGERS[6:], "a boolean": [BOOL],
    "an integer of 8 or 16 bits": INTEGERS[:2] + INTEGERS[4:6], "a plain float": [Weak.FLOAT],
    "a plain complex number": [Weak.COMPLEX], "a complex number": COMPLEX,
}
#: ... and kinds of results, of the first number (the weak one) and the second.
RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "a coordinate": lambda a, b: max((a, b), key=lambda x: getattr(x, "value", 0) if x in COORDINATES else 0),
    "that float": lambda a, b: b, "float64": lambda a, b: FLOAT64, "a plain float": lambda a, b: Weak.FLOAT,
    "that integer, modulo 2^bits": lambda a, b: b if b.itemsize * 8 >= a.value else a,
    "that complex number": lambda a, b: b, "a plain complex number": lambda a, b: Weak.COMPLEX,
    "complex64 of float32 and narrower, complex128 of float64": lambda a, b: rules.COMPLEX128 if b == FLOAT64 else rules.COMPLEX64,
    "complex128": lambda a, b: rules.COMPLEX128,
    "that float (bfloat16 and 8-bit floats: float32)": lambda a, b: FLOAT32 if b in OF_ML_DTYPES else b,
}
OPERATORS = ("+", "-", "*", "//", "%", "max", "min")
OF_COMPLEX = ("+", "-", "*", "/")


def rows(heading: str) -> list[list[str]]:
    """The cells of a table; an empty one is the one above."""
    table = TEXT.split(f"| {heading} |")[1].split("\n\n")[0]
    out: list[list[str]] = []
    for line in table.splitlines()[2:]:
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        out.append([cell or out[-1][n] for n, cell in enumerate(cells)])
    return out


def kinds_of(cell: str) -> list:
    """The kinds of numbers of "a coordinate, a literal"; what stands in brackets is an example."""
    return [kind for words in re.sub(r" \(.*\)", "", cell).split(", ") for kind in KINDS[words]]


@pytest.mark.parametrize("row", rows("of | beside | gives"), ids=lambda row: f"{row[0][:20]} beside {row[1]}")
def test_two_numbers(row: list[str]) -> None:
    first, second, gives = row
    whole, _, divided = gives.partition("; `/` ")
    for a, b in itertools.product(kinds_of(first), kinds_of(second)):
        for x, y in ((a, b), (b, a)):
            for op in (OF_COMPLEX if rules.is_complex(a) else OPERATORS):
                assert rules.result(op, x, y) == RESULTS[whole](a, b), (op, x, y)
            if divided:
                assert rules.result("/", x, y) == RESULTS[divided](a, b), (x, y)


def wraps(a: Any, b: Any) -> bool:
    """Whether the operators of integers give these two's common type (where one holds both), and no wider one."""
    ops = [op for op in (*rules.ARITHMETIC, *rules.BITWISE) if op != "/"]
    return all(rules.result(op, a, b) == np.result_type(a, b) for op in ops if np.result_type(a, b).kind in "iu")


def is_given(name: str, wanted: Callable[[Any], Any], kinds: list) -> bool:
    return all(rules.converted(name, kind) == wanted(kind) for kind in kinds)


WEAK_INTEGERS = [*COORDINATES, 3]
EVERY = [*FLOATS, *INTEGERS, BOOL, *WEAK_INTEGERS, Weak.FLOAT]
WHOLE = ("floor", "ceil", "trunc")
#: A row of the second table, its words as they are, and what they say of the rules. What is None is of values, and tried on those
#: in `tests.lang.test_number_rules`, `test_drawn_expressions` and `test_forms`.
FUNCTIONS: dict[tuple[str, str], Callable[[], bool] | None] = {
    ("`+ - * // % ** & | ^ << >>`, `divmod`, `pow` of integers",
     "their common type, in which they wrap; `bool + bool` is or, `bool * bool` and"):
        lambda: all(wraps(a, b) for a in INTEGERS for b in INTEGERS) and rules.result("+", BOOL, BOOL) == rules.result("*", BOOL, BOOL) == BOOL,
    ("`x // 0`, `x % 0` of NumPy's integers", "0"): None,
    ("a shift by the width or more, or by a negative number", "0; `>>` of a negative number -1"): None,
    ("`==`, `<`, ...", "a boolean, exact for integers of any two types"):
        lambda: all(rules.result(op, a, b) == BOOL for op in rules.COMPARISONS for a in EVERY for b in EVERY),
    ("`max`, `min` of two or more", "the common type; NaN if any is NaN (which of two zeros is not specified)"):
        lambda: all(rules.result(op, a, b) == rules.common(a, b) for op in rules.EXTREMA for a in FLOATS[:3] + INTEGERS for b in FLOATS[:3]),
    ("`int(x)`", "int64; coordinates and literals as they are"):
        lambda: is_given("int", lambda kind: kind if kind in WEAK_INTEGERS else INT64, EVERY),
    ("`float(x)`, `bool(x)`", "float64, a boolean"):
        lambda: is_given("float", lambda kind: FLOAT64, EVERY) and is_given("bool", lambda kind: BOOL, EVERY),
    ("`round(x)`", "int64, halves to even; integers as they are"):
        lambda: is_given("round", lambda kind: kind if rules.is_integer(kind) else INT64, [kind for kind in EVERY if kind != BOOL]),
    ("`math.floor`, `ceil`, `trunc`", "a float (an integer as it is): `int(math.floor(x))` is an index"):
        lambda: rules.MATH_TO_WHOLE == ("ceil", "floor", "trunc") and all(
            rules.of_math(name, kind) == kind if rules.is_integer(kind) else rules.is_float(rules.of_math(name, kind))
            for name in WHOLE for kind in EVERY),
    ("the other functions of `math`", "float32 of float32 and narrower, float64 of float64 and integers, a plain float of plain "
     "numbers"):
        lambda: all(rules.of_math(name, kind) == (
            Weak.FLOAT if rules.is_weak(kind) else FLOAT64 if kind == FLOAT64 or not rules.is_float(kind) else FLOAT32)
            for name in rules.MATH_OF_ONE for kind in EVERY),
    ("floats where Python raises: `x / 0.0`, `x % 0.0`, `10.0 ** 400`, `0.0 ** -1`, `math.exp(1e3)`, `math.log(-1.0)`",
     "infinity or NaN, of plain floats and literals, too"): lambda: [str(x) for x in where_python_raises()] == [
         "inf", "nan", "inf", "inf", "inf", "nan"],
    ("`np.float32(x)` and its like", "that type; integers wrap"): None,
    ("`range`", "coordinates; int32 or int64 where NumPy's integers are among its limits"):
        lambda: [rules.of_range(5), rules.of_range(Weak.LONG_COORDINATE)] == COORDINATES and {
            rules.of_range(0, kind) for kind in INTEGERS} == {INT32, INT64},
    ("`complex(x, y)`, `complex(x)`", "complex64 of float32 and narrower, complex128 of float64 and integers, a plain one of plain "
     "numbers"):
        lambda: all(rules.of_parts(kind) == rules.of_parts(kind, 0) == (
            Weak.COMPLEX if rules.is_weak(kind) else rules.COMPLEX128 if kind == FLOAT64 or not rules.is_float(kind) else
            rules.COMPLEX64) for kind in EVERY),
    ("`cmath.exp` and its like", "that of `complex(x)`; `cmath.phase` its parts'"):
        lambda: all(rules.of_cmath(name, kind) == rules.of_parts(kind) for name in rules.CMATH if name != "phase" for kind in EVERY)
        and [rules.of_cmath("phase", kind) for kind in (FLOAT32, FLOAT64, 3)] == [FLOAT32, FLOAT64, Weak.FLOAT],
    ("`t.count(x)`, `t.index(x)`, `n.bit_count()`", "a coordinate (`index` of what is not there: nothing defined on the GPU)"): None,
    ("`t[i]`, by a run-time number", "the tuple's one type; of literals a coordinate, a plain float"): None,
}


def where_python_raises() -> tuple:
    (function,) = arguments([of_literals])
    with np.errstate(all="ignore"):
        return function(1.0)                                   # type: ignore[no-any-return]


def of_literals(x: Any) -> tuple:
    return x / 0.0, x % 0.0, 10.0 ** 400, 0.0 ** -1, math.exp(1e3), math.log(-1.0)


def test_functions() -> None:
    written = [(row[0], row[1]) for row in rows("function | gives")]
    assert written == list(FUNCTIONS), "docs/reference/device_code.md has rows that this test does not know, or other words for them"
    for row, holds in FUNCTIONS.items():
        assert holds is None or holds(), row


REFUSED: dict[str, list[Callable[[], Any]]] = {
    "a literal that the integer beside it does not hold (`u8 + 300`)": [lambda: rules.result("+", np.dtype("u1"), 300)],
    "`-` of two booleans": [lambda: rules.result("-", BOOL, BOOL)],
    "`-` and `+` of one boolean": [lambda: rules.unary("neg", BOOL), lambda: rules.unary("pos", BOOL)],
    "bits of floats": [lambda: rules.result("&", FLOAT32, INT32), lambda: rules.unary("invert", FLOAT32)],
    "uint64 with a signed integer, if no type holds both": [lambda: rules.result("|", np.dtype("u8"), INT64)],
    "negative powers of integers": [lambda: rules.result("**", INT32, -1)],
    "coordinates as exponents of coordinates and literals": [lambda: rules.result("**", Weak.COORDINATE, Weak.COORDINATE),
                                                             lambda: rules.result("**", 2, Weak.COORDINATE)],
}


def test_what_is_refused() -> None:
    words = TEXT.split("These are refused, when compiled and in the emulator:\n\n* ")[1].split("\n\n")[0].split("\n* ")
    others = ["`round(x, digits)`", "`<`, `//`, `%`, `max` and `int` of complex numbers", "`is` between numbers"]
    assert words == [*REFUSED, *others]
    for calls in REFUSED.values():
        for call in calls:
            with pytest.raises(TypeError):
                call()


def test_how_exact() -> None:
    bounds = [bound for pair in rules.ULPS.values() for bound in pair]
    assert f"are within `number_rules.ULPS`: {min(bounds)} to {max(bounds)} units in the last place" in " ".join(TEXT.split())
