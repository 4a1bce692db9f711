"""Which first calls in the emulator the compiler is asked of: those by name, too, and with 64-bit coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, operators
from gemmkit.emulator import functions
from gemmkit.emulator.functions import Coordinate, LongCoordinate
from gemmkit.kernels.spec import ProblemShape
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.scalars import wide_index

FPU = operators.FPUOp(M=16, N=16)


@dataclass(frozen=True)
class Talkative(epilogues.Epilogue):
    """It prints what no compiler takes; the method that it calls prints nothing."""

    def part(self, x: Any, m: int) -> Any:
        return x + m

    def __call__(self, x: Any, m: int, n: int) -> Any:
        if m == n == 0:
            print(f"{x}")
        return self.part(x, m) + self.part(x, m=m)


def test_no_method_of_a_component_that_prints_is_compiled(capsys: pytest.CaptureFixture) -> None:
    a = np.ones((2, 2), np.float32)
    with gk.emulate():
        out = gk.matmul(a, a, operator=FPU, epilogue=Talkative())
    assert out.tolist() == [[4, 4], [6, 6]] and capsys.readouterr().out == "2.0\n"


def _given(value: Any) -> Any:
    return value


def at(x: Any, i: Any) -> Any:
    return x * i


def sliced(x: Any, i: Any) -> Any:
    return (x, x)[i % 2:][0]


def of_shape(x: Any, shape: Any) -> Any:
    return x * (shape.M * shape.N)


@pytest.mark.parametrize("coordinate", [Coordinate, LongCoordinate])
def test_coordinates_of_either_width_are_tried(coordinate: Any) -> None:
    x, i = np.float32(1), coordinate(3)
    functions.tried(at, (x, i), {}, _given)
    functions.tried(at, (x,), {"i": i}, _given)
    functions.tried(of_shape, (x, ProblemShape(i, i, i)), {}, _given)
    for given, named in (((x, i), {}), ((x,), {"i": i})):
        with pytest.raises(ComponentError, match="sliced cannot be compiled"):
            functions.tried(sliced, given, named, _given)


def test_what_is_long_has_the_long_type() -> None:
    assert functions._type_of(LongCoordinate(2**40), _given) is wide_index
    long, short = (functions._type_of(ProblemShape(kind(1), kind(1), kind(1)), _given) for kind in (LongCoordinate, Coordinate))
    assert long != short and set(long.runtime.values()) == {wide_index}
