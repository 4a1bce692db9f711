"""What types cannot describe is refused in the emulator, by the compiler, with the user's line; all else passes as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numba.cuda import types

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.lang.functions import device
from tests.lang.test_dialect import written
from tests.support.patches import Seeded

ONES, BIAS = np.ones((8, 8), np.float32), np.arange(8, dtype=np.float32)


def emulated(**components: Any) -> np.ndarray:
    with gk.emulate():
        return gk.matmul(ONES, ONES, **components)             # type: ignore[no-any-return]


def refused(**components: Any) -> list[str]:
    with pytest.raises(gk.ComponentError) as caught:
        emulated(**components)
    return str(caught.value).splitlines()


FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "a slice by a coordinate": (lambda x, m, n: (x, 2 * x)[n % 2:][0], "slice by a literal"),
    "an attribute of NumPy's": (lambda x: x.T, "Unknown attribute 'T'"),
    "a mixed tuple by a coordinate": (lambda x, m, n: (x, m)[n % 2], "decided at run time"),
    "a function chosen at run time": (lambda x: x * x + 2 * (abs if x > 9 else round)(x) + x * x, "which function is called"),
    "a method of tuples": (lambda x: sum((x, x).__mul__(2)), "Unknown attribute '__mul__'"),
    "what a captured array meets": (lambda x, m, n: (x, x)[int(BIAS[n]) % 2:][0], "slice by a literal"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_refused_with_its_line(name: str) -> None:
    function, words = FUNCTIONS[name]
    lines = refused(epilogue=epilogues.Elementwise(function))
    at = function.__code__.co_firstlineno
    assert lines[1] == f'  File "{__file__}", line {at}' and f'"{name}"' in lines[2] and words in lines[-1], lines


def test_the_words_are_those_of_the_compiler() -> None:
    function = written("return (x, 2 * x)[int(x) % 2:][0]", "the same words", "x")
    with pytest.raises(gk.ComponentError) as compiled:
        device(function).compile((types.float32,))
    assert refused(epilogue=epilogues.Elementwise(function)) == str(compiled.value).splitlines()


@dataclass(frozen=True)
class Shifted(epilogues.Epilogue):
    """Its array and its number are a view and a run-time argument."""

    shift: gk.Array
    times: gk.Scalar
    table: tuple = (0.5, 1.0, 2.0)

    def __call__(self, x, m, n):
        return x * self.times * self.table[n % 3] + self.shift[n]


@dataclass(frozen=True)
class Shortened(Shifted):
    def finish(self, values, tile, shape):
        return values[:1] if shape.M > 9 else values           # OF TWO LENGTHS


@dataclass(frozen=True)
class Viewed(layouts.RowMajor):
    def element(self, data, i, j, shape):
        return data[i, j].astype(np.float32)                   # AN ATTRIBUTE

    def load(self, data, tile, shape):
        return self.element(data, tile.index[0], tile.index[1], shape)


def test_components_with_fields() -> None:
    expected = 8 * 2 * np.array([0.5, 1, 2, 0.5, 1, 2, 0.5, 1]) + BIAS
    assert np.array_equal(emulated(epilogue=Shifted(BIAS, 2.0)), np.broadcast_to(expected, (8, 8)).astype(np.float32))
    lines = refused(epilogue=Shortened(BIAS, 2.0))
    assert (("# OF TWO LENGTHS" in lines[2] and "give it as many values" in lines[-1])
            or "it returns one of several types" in lines[-1])                # from Python 3.12 on these are two returns


def test_layouts() -> None:
    lines = refused(global_a_layout=Viewed("float32"))
    assert "# AN ATTRIBUTE" in lines[2] and "has no astype; write np.float16(x)" in lines[-1]


def test_what_the_emulator_alone_has_is_not_compiled(capsys: pytest.CaptureFixture, replaced: Seeded) -> None:
    replaced("sys.breakpointhook", lambda: None)
    out = emulated(epilogue=epilogues.Elementwise(written('print(f"x is {x}")\nbreakpoint()\nreturn x', "shown", "x")))
    assert (out == 8).all() and capsys.readouterr().out.count("x is 8.0") == 64


def test_an_error_of_pythons_own_comes_first() -> None:
    with pytest.raises(IndexError):
        emulated(epilogue=epilogues.Elementwise(written("return (x, x)[2]", "out of the tuple", "x")))
