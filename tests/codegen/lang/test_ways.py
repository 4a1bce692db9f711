"""Where ways meet, a number has one type in both worlds, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, operators
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.scalars import numba_type
from tests.support.lang.typing import BF16, BOOL, FLOATS, INDEX, INTEGERS, NARROW, WEAK, result

F4, F8, I4, I8, U1 = map(np.dtype, ("f4", "f8", "i4", "i8", "u1"))

# From Python 3.12 on a conditional expression that is returned is two returns.
EITHER = "is .* on one way and .* on another|it returns one of several types"


def chosen(x: Any, y: Any) -> Any:
    return x if x > 0 else y


def assigned(x: Any, y: Any) -> Any:
    if x > 0:
        z = x
    else:
        z = y
    return z


def returned(x: Any, y: Any) -> Any:
    if x > 0:
        return x
    return y


def summed(x: Any, y: Any) -> Any:
    for _ in range(4):
        y += x
    return y


WAYS = [chosen, assigned, returned]
MIXED = [(F4, F8), (F8, F4), (NARROW[0], F4), (NARROW[0], BF16), (I4, I8), (np.dtype("i1"), U1), (I4, F4), (F4, BOOL), (I4, BOOL),
         (U1, INDEX), (np.dtype("u4"), INDEX), (I4, WEAK), (np.dtype("c8"), F4), (np.dtype("c8"), np.dtype("c16"))]


@pytest.mark.parametrize("ways", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("x", "y"), [pair for pair in MIXED if pair[0].kind != "c"], ids=str)
def test_two_types_are_refused(ways: Any, x: Any, y: Any) -> None:
    with pytest.raises(ComponentError, match=EITHER) as caught:
        result(ways, x, y)
    assert ways.__name__ in str(caught.value)


@pytest.mark.parametrize(("x", "y"), [pair for pair in MIXED if pair[0].kind == "c"], ids=str)
def test_two_types_of_complex_numbers_are_refused(x: Any, y: Any) -> None:
    with pytest.raises(ComponentError, match=EITHER):
        result(lambda x, y: x if x.real > 0 else y, x, y)


@pytest.mark.parametrize("x", [*FLOATS, *INTEGERS], ids=str)
def test_a_literal_takes_the_type_of_the_number_that_holds_it(x: np.dtype) -> None:
    assert result(lambda x: x if x > 0 else 0, x) == numba_type(x)
    if x.kind in "iu" and x.itemsize == 1:
        with pytest.raises(ComponentError, match=EITHER):
            result(lambda x: x if x > 0 else 300, x)
    if x.kind == "u":
        with pytest.raises(ComponentError, match=EITHER):
            result(lambda x: x if x > 0 else -1, x)
    if x.kind in "iu":
        with pytest.raises(ComponentError, match=EITHER):
            result(lambda x: x if x > 0 else 0.5, x)
    else:
        assert result(lambda x: x if x > 0 else 0.5, x) == numba_type(x)


def test_what_is_weak_takes_the_type_of_the_number() -> None:
    assert [result(chosen, x, y) for x, y in ((F4, INDEX), (F4, WEAK), (I4, INDEX), (I8, INDEX), (INDEX, WEAK), (F4, F4))] == [
        numba_type(F4), numba_type(F4), numba_type(I4), numba_type(I8), WEAK, numba_type(F4)]
    assert result(lambda x: 1 if x > 0 else 0.5, F4) == WEAK


def test_a_sum_keeps_its_type() -> None:
    assert result(summed, F4, F4) == result(summed, NARROW[0], F4) == numba_type(F4)
    with pytest.raises(ComponentError, match=EITHER):
        result(summed, F8, F4)


@pytest.mark.parametrize("literal", [2**63, 2**70, -2**63 - 1])
def test_a_literal_of_more_than_64_bits_by_itself_is_refused(literal: int) -> None:
    for returned_alone in (lambda x: literal, lambda x: (x, literal)):
        with pytest.raises(ComponentError, match=f"it returns {literal}, which 64 bits do not hold"):
            result(returned_alone, F4)
    assert result(lambda x: x * literal, F4) == result(lambda x: x if x > 0 else literal, F4) == numba_type(F4)
    assert result(lambda x: np.float32(literal), F4) == numba_type(F4)


def test_the_emulator_refuses_them_as_well() -> None:
    a = np.ones((4, 4), np.float32)
    with gk.emulate(), pytest.raises(ComponentError, match=EITHER):
        gk.matmul(a, a, epilogue=epilogues.Elementwise(lambda x: x if x > 0 else np.float64(1)),
                  operator=operators.FPUOp(M=16, N=16))
