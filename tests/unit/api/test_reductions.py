"""Reductions that do not fit: what is said, and that nothing has been written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import ColumnReduce, Combine, Elementwise, Fold, RowReduce, Scale
from gemmkit.functions.grouped import grouped
from tests.support.machines import is_poison, poison

A, B = np.ones((7, 5), np.float32), np.ones((5, 9), np.float32)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with gk.emulate():
        yield


def rows(dtype: Any = "f4", count: int = 7) -> np.ndarray:
    return poison((count,), dtype)


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "no reduction of the name": (lambda out: RowReduce(out, "mean"), TypeError, r"RowReduce\(op='mean'\): one of 'sum', .* or an epilogues.Combine"),
    "a function alone": (lambda out: RowReduce(out, max), TypeError, r"an epilogues.Combine\(combine, identity\), is needed"),
    "no array": (lambda out: gk.matmul(A, B, epilogue=RowReduce([0.0], "sum")), TypeError, "RowReduce.out: got list; an array"),
    "as many as columns": (lambda out: gk.matmul(A, B, epilogue=RowReduce(rows(count=9), "sum")), ValueError,
                           r"out of RowReduce has shape \(9,\); the rows of a 7 x 9 result need \(7,\)"),
    "as many as rows": (lambda out: gk.matmul(A, B, epilogue=ColumnReduce(out, "sum")), ValueError,
                        r"out of ColumnReduce has shape \(7,\); the columns of a 7 x 9 result need \(9,\)"),
    "integers for floats": (lambda out: gk.matmul(A, B, epilogue=RowReduce(rows("i4"), "sum")), gk.ConfigError,
                            "out of RowReduce holds int32 and would get float32 values"),
    "short places": (lambda out: gk.matmul(A, B, epilogue=RowReduce(rows("i2"), "argmax")), gk.ConfigError,
                     "out of RowReduce holds int16 and would get int32 values"),
    "no largest of nothing": (lambda out: gk.matmul(A, B[:, :0], epilogue=RowReduce(rows("i4"), "argmax")), ValueError,
                              r"RowReduce\(op='argmax'\) with the rows of a 7 x 0 result: a row of no elements has no largest one"),
    "an operand": (lambda out: gk.matmul(A, B, epilogue=RowReduce(A[:, 0], "sum")), ValueError, "out of RowReduce overlaps a in memory"),
    "the result": (lambda out: gk.matmul(A, B, out=(d := poison((7, 9), "f4")), epilogue=RowReduce(d[:, 0], "sum")), ValueError,
                   "out of RowReduce overlaps out in memory"),
    "twice the same": (lambda out: gk.matmul(A, B, epilogue=RowReduce(out, "sum") | RowReduce(out, "max")), ValueError,
                       "out of RowReduce overlaps out of RowReduce in memory"),
    "in front of a fold": (lambda out: RowReduce(out, "sum") | Fold(lambda x, y: x + y), TypeError, "nothing can stand before it"),
    "five of them": (lambda out: gk.matmul(A, B, epilogue=RowReduce(out, "sum") | RowReduce(rows(), "sum") | RowReduce(rows(), "sum")
                                           | RowReduce(rows(), "sum") | RowReduce(rows(), "sum")), gk.ConfigError,
                     "a launch may have 4 reductions; this is one more"),
    "in a group": (lambda out: grouped([A], [B], epilogue=RowReduce(out, "sum")), gk.ConfigError,
                   "the products of a group have rows of their own each"),
    "combine of one": (lambda out: Combine(lambda a: a, 0), TypeError, r"it takes 1 arguments; f\(a, b\), a function of two states"),
    "of of two": (lambda out: Combine(lambda a, b: a, 0, of=lambda x, m: x), TypeError, r"f\(x\) or f\(x, m, n\)"),
    "parts of an identity": (lambda out: Combine(lambda a, b: a, (0, 0)), ValueError, r"identity=\(0, 0\)\): it has 2 parts, and a state of dtype=None has 1"),
    "parts of two sizes": (lambda out: Combine(lambda a, b: a, (0, 0), dtype=[("x", "f4"), ("y", "i8")]), TypeError, "packed numbers of one size"),
    "narrow states": (lambda out: Combine(lambda a, b: a, 0, dtype="i1"), ValueError, "1 to 4 numbers of 2, 4 or 8 bytes"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, kind, said = CALLS[name]
    out = rows()
    with pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


def test_how_they_print() -> None:
    out = np.zeros(7, np.float32)
    assert "op='sum'" in repr(RowReduce(out, "sum")) or "'sum'" in repr(RowReduce(out, "sum"))
    assert (Scale(2.0) | RowReduce(out, "max")).reduces and not (Scale(2.0) | Elementwise(lambda x: x)).reduces
