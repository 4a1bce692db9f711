"""`Launchable`: any kernel with any arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import Component, freeze
from gemmkit.lang.freezing import freeze_array
from gemmkit.ptx.special import block_x, thread_index
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import cubin_of
from gemmkit.runtime.device import H100, current
from gemmkit.runtime.launchable import Launchable


@dataclass(frozen=True)
class Line(Component):
    """y = slope x + 1."""

    slope: gk.Scalar

    def __call__(self, x: Any) -> Any:
        return self.slope * x + 1


@dataclass(frozen=True)
class Quiet(Component):
    """No number of it is an argument."""


def apply_line(line: Any, quiet: Any, x: Any, y: Any) -> None:
    i = block_x() * 32 + thread_index()
    y[i] = line(x[i])


def launchable(x: Any, y: Any, target: Any, ordinal: int) -> Launchable:
    arguments = [freeze(Line(np.float32(3))), freeze(Quiet()), freeze_array(describe(x, "x"), readonly=True),
                 freeze_array(describe(y, "y"))]
    return Launchable(apply_line, arguments, threads=32, blocks=2, target=target, ordinal=ordinal)


def test_its_numbers_stand_in_the_order_of_its_arguments() -> None:
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    made = launchable(x, y, H100, -1)
    assert [made.slot(n) for n in range(4)] == [0, None, 1, 1 + len(made.arguments[2].leaves)]
    assert made.values[0] == 3 and made.values[made.slot(2)] == x.ctypes.data and made.values[made.slot(3)] == y.ctypes.data
    assert len(made.formats) == len(made.values)


def test_it_is_compiled_as_any_kernel() -> None:
    made = launchable(np.ones(64, np.float32), np.zeros(64, np.float32), H100, -1)
    entry = cubin_of(made.kernel, made.arguments, made.threads, made.target)
    assert entry.cubin and entry.meta["usage"]["spill_stores"] == 0
    made.forget_code()
    assert not any(argument.guards or argument.captures for argument in made.arguments)


@pytest.mark.gpu
def test_it_runs() -> None:
    import cupy

    x, y = cupy.arange(64, dtype=cupy.float32), cupy.full(64, cupy.nan, cupy.float32)
    made = launchable(x, y, current(), x.device.id)
    made.bind().launch(cupy.cuda.get_current_stream().ptr, made.values)
    assert np.array_equal(cupy.asnumpy(y), 3 * np.arange(64, dtype=np.float32) + 1)
