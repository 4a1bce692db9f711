"""Static objects in device code: the algebra runs while the kernel is compiled, and emits what run-time numbers need."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.special import thread_index
from gemmkit.shapes import Shape, shape
from tests.support.harness import Out, compiled, emulated

pytestmark = pytest.mark.compile


@dataclass(frozen=True)
class Map(gk.Component):
    """What a kernel is given: shapes are compile-time values."""

    warp: Any = shape(32)
    layout: Any = Shape((4, (2, 4)), (2, (1, 8)))
    wide: Any = specs.T[2, 2].fp32.RF


def places(spec: Any, out: Any) -> None:
    groups, lanes = spec.warp.tile(8)
    i, j = groups.reshape(2, 2).places(thread_index())
    out[thread_index(), 0] = i * 10 + j
    out[thread_index(), 1] = spec.layout(thread_index() // 8, thread_index() % 8) + groups.size * 0
    out[thread_index(), 2] = lanes.extents[0]


def test_algebra_in_device_code() -> None:
    (out,) = emulated(places, Map(), Out((32, 3), "i4"))
    threads = np.arange(32)
    np.testing.assert_array_equal(out[:, 0], threads // 16 * 10 + threads // 8 % 2)
    np.testing.assert_array_equal(out[:, 1], [Map().layout(t // 8, t % 8) for t in threads])
    assert set(out[:, 2]) == {8}
    ptx = compiled(places, Map(), Out((32, 3), "i4"))
    assert not re.search(r"\b(div|rem)\.|call", ptx)              # shifts and masks; the tiling itself has gone


def not_there(spec: Any, out: Any) -> None:
    out[0, 0] = spec.layout.tile(3, 8)[0].size


def by_name(spec: Any, out: Any) -> None:
    out[0, 0] = spec.layout.reshape(4, 8, order="row").size


@pytest.mark.parametrize(("kernel", "words"), [(not_there, "3 elements .* do not divide 4"), (by_name, "gives order by position")])
def test_refused_while_compiling(kernel: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        compiled(kernel, Map(), Out((32, 3), "i4"))


def no_instruction(spec: Any, out: Any) -> None:
    wide = specs.Allocate(spec.wide)
    specs.Move(specs.THREAD, wide, wide.tile(1, 2)[0, 0])


def test_a_spec_that_is_no_instruction_says_so_when_compiled() -> None:
    with pytest.raises(Exception, match=r"(?s)Move <<<\[\].thread>>> .* is no instruction.*nearest instructions are.*but the source .* has two dimensions"):
        compiled(no_instruction, Map(), Out((32, 3), "i4"))
