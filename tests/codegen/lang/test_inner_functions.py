"""Inner functions that captured run-time values, handed to `each`, `apply`, `generate` and `fold`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.registers import apply, each, fold, generate, outer
from gemmkit.ptx.special import thread_index
from tests.support.harness import Out, compiled, constants_stored, emulated, leaves_nothing


@dataclass(frozen=True)
class Static(gk.Component):
    count: int = 3
    is_odd: bool = True


def store(out: Any, i: int, value: int) -> None:
    out[i] = value


def captures(out: Any, static: Any) -> None:
    zero, scale = static.count - 3, static.count + 7
    made = generate(static.count, lambda i: scale + i)                          # 10 11 12
    moved = apply(lambda x, i: x * static.count + made[i] + zero, made)         # 40 44 48
    each(lambda x, i: store(out, i, x if static.is_odd else x.no_such_attribute), moved)
    out[3] = fold(2, lambda x, n: x + scale * n, 5)
    (out[4],) = outer(lambda c, a, b: c + a * b * scale, (1,), (2,), (3,), 1)
    for step in range(2):
        each(lambda x, i: store(out, 5 + i + step, x + step), (20,))
    out[7] = generate(1, lambda i: generate(2, lambda j: 10 * (i + j) + scale)[1])[0]


EXPECTED = [40, 44, 48, 15, 61, 20, 21, 20]


def test_what_was_captured_is_an_argument() -> None:
    out = Out((len(EXPECTED),), np.int32)
    assert list(emulated(captures, out, Static(), threads=1)[0]) == EXPECTED
    ptx = compiled(captures, out, Static())
    assert constants_stored(ptx) == {4 * n: x for n, x in enumerate(EXPECTED)}


def at_run_time(out: Any, x: Any) -> None:
    i = thread_index()
    each(lambda value, n: store(out, i + n, value + x[i]), (1, 2))


def test_values_of_a_thread() -> None:
    assert leaves_nothing(compiled(at_run_time, Out((40,), np.int32), np.zeros(32, np.int32)))


def changed(out: Any, x: Any) -> None:
    scale = x[0]

    def scaled(value: int, n: int) -> int:
        return value * scale

    scale = x[1]
    out[0] = apply(scaled, (1, 2))[0]


def test_a_variable_that_changes_after_it_was_captured_is_refused() -> None:
    """Python reads the later value, and what is captured by value would be the earlier."""
    with pytest.raises(Exception, match="scale"):
        compiled(changed, Out((1,), np.int32), np.zeros(2, np.int32))
