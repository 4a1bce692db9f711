"""`Launchable`: any kernel with any arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import Component, freeze
from gemmkit.lang.functions import freeze_array
from gemmkit.ptx.special import block_x, thread_index
from gemmkit.runtime import cache
from gemmkit.runtime import compile as compiling
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import cubin_of, key_of
from gemmkit.runtime.device import A100, H100, current, gpu
from gemmkit.runtime.launch import Launchable
from gemmkit.tools.cli import wanted
from tools import cubins


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


def test_a_kernel_that_came_with_gemmkit_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its file is damaged, or it is for another GPU."""
    made = launchable(np.ones(64, np.float32), np.zeros(64, np.float32), H100, -1)
    given = made.kernel, made.arguments, made.threads
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "cubins")
    monkeypatch.setattr(compiling, "to_ptx", lambda *given: pytest.fail("it was compiled"))
    monkeypatch.setenv("GEMMKIT_CACHE", "0")
    cache.default_cache.cache_clear()
    came = cache.Entry(b"machine code", {"usage": {"spill_stores": 0}}, True)
    cache.ship(key_of(*given, H100), came, cache.SHIPPED)
    try:
        for _ in range(2):
            cache.shipped.cache_clear()
            assert cubin_of(*given, H100) == came
        (file,) = cache.SHIPPED.iterdir()
        whole = file.read_bytes()
        for target, content in ((H100, whole[:-1]), (H100, whole[:-1] + b"!"), (H100, b""), (A100, whole)):
            file.write_bytes(content)
            cache.shipped.cache_clear()
            with pytest.raises(pytest.fail.Exception, match="it was compiled"):
                cubin_of(*given, target)
    finally:
        cache.shipped.cache_clear()
        cache.default_cache.cache_clear()


def test_every_call_of_the_wheels_kernels_is_planned() -> None:
    """For each GPU that the wheel has kernels for."""
    some = cubins.calls()[::40]
    found = list(wanted(some, [gpu(name) for name in cubins.ARCHITECTURES], False))
    assert {kernel.launchable.target.arch_name for kernel in found} >= {"sm_80", "sm_89", "sm_90a"}
    assert {name for kernel in found for name in kernel.products} == {name for name, _ in some}


@pytest.mark.gpu
def test_it_runs() -> None:
    import cupy

    x, y = cupy.arange(64, dtype=cupy.float32), cupy.full(64, cupy.nan, cupy.float32)
    made = launchable(x, y, current(), x.device.id)
    made.bind().launch(cupy.cuda.get_current_stream().ptr, made.values)
    assert np.array_equal(cupy.asnumpy(y), 3 * np.arange(64, dtype=np.float32) + 1)
