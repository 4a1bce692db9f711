"""Drawn schedules (`tests.support.drawn_schedules`), compiled and run by the interpreter of PTX, which has no races and no Python.
(Emulated, and on a GPU: tests/kernels/specs/test_on_gpu.py.)"""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest

from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100
from gemmkit.specs.lower import Kernel as Launch
from gemmkit.specs.lower import Matrix
from gemmkit.specs.nodes import scheduled
from gemmkit.specs.run import READ_ONLY, kernel_of, matrix_of, prepared
from tests.ptx_machine.launch import run_ptx
from tests.support.drawn_schedules import PARTS, Drawn, part_of_many, schedules
from tests.support.schedules import operands


def check(out: Any, a: Any, b: Any) -> None:
    np.testing.assert_allclose(out.astype(float), a.astype(float) @ b.astype(float), atol=1e-4 if out.dtype == np.float32 else 0.06)


#: Of three neighbours that odd pads leave in an aligned 16 bytes NVVM loads all four, and the interpreter says that the fourth was
#: never written.
PTX_PADS = (0, 4)


def as_ptx(drawn: Drawn) -> None:
    a, b, out = drawn.matrices()
    by_ptx(drawn.schedule, a, b, out)
    drawn.check(out, a, b)


@pytest.mark.kin(5)
@pytest.mark.compile
@hypothesis.settings(max_examples=5, phases=[hypothesis.Phase.generate])      # each is compiled: no hunt for a smaller one
@hypothesis.given(schedules(pads=PTX_PADS))
def test_as_ptx(drawn: Drawn) -> None:
    as_ptx(drawn)


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS)
def test_many_as_ptx(part: int) -> None:
    part_of_many(part, as_ptx, pads=PTX_PADS)


def by_ptx(schedule: Any, a: Any, b: Any, out: Any) -> None:
    """The product by the schedule's PTX."""
    infos = tuple(describe(x) for x in (a, b, out))
    kernel, _ = prepared(schedule, infos)
    made = kernel.launchable(READ_ONLY, infos, H100)
    ptx = to_ptx(scheduled, tuple(argument.type for argument in made.arguments), kernel.threads, H100)
    values = list(made.values)
    for n, array in enumerate((a, b, out)):
        values[made.slot(n + 1)] = array  # type: ignore[index]
    run_ptx(ptx, kernel.threads, kernel.blocks, values, [a, b, out], kernel.shared_bytes)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_maxwell_as_ptx() -> None:
    """Warps, a swizzle, strided tiles, shared memory."""
    from tests.support.schedules import maxwell

    a, b, out = operands(64, 64, 16)
    by_ptx(maxwell(), a, b, out)
    check(out, a, b)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_tiles_over_the_edge_as_ptx() -> None:
    from tests.support.schedules import maxwell

    a, b, out = operands(70, 35, 13)
    by_ptx(maxwell(), a, b, out)
    check(out, a, b)
    code = maxwell().compile(*[Matrix(np.dtype("f4"), "col", 16, is_partial=True)] * 3)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0


@pytest.mark.kin(5)
@pytest.mark.compile
def test_prefetch_as_ptx() -> None:
    from tests.support.schedules import maxwell

    a, b, out = operands(64, 64, 24)
    by_ptx(maxwell(prefetch=True), a, b, out)
    check(out, a, b)
    code = maxwell(prefetch=True).compile(*[("f4", "col")] * 3)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0 and "cp.async" in code.ptx


@pytest.mark.compile
def test_a_users_micro_kernel_as_ptx() -> None:
    from tests.kernels.specs.test_schedules import with_micro_kernel

    a, b, out = operands(16, 16, 8, orders="CCC")
    by_ptx(with_micro_kernel(), a, b, out)
    check(out, a, b)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_wmma_as_ptx() -> None:
    """Fragments, by a smaller sample."""
    from gemmkit.specs.products import cuda_wmma_sample

    a, b, out = operands(128, 128, 128, "f2", "CFC")
    by_ptx(cuda_wmma_sample, a, b, out)
    check(out, a, b)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_the_cache_knows_a_schedule(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch compiles is kept by a text of all that is in it: another swizzle is another kernel, the same one is found."""
    from gemmkit.runtime import compile as compiling
    from gemmkit.runtime.cache import CubinCache
    from tests.support.schedules import maxwell

    built: list[str] = []
    real = compiling.assemble

    def counted(ptx: str, arch: str) -> Any:
        built.append(ptx)
        return real(ptx, arch)

    def entry(schedule: Any) -> Any:
        infos = tuple(describe(x) for x in operands(64, 64, 16))
        lowered = kernel_of(schedule, *[matrix_of("a", ("f4", "col"))] * 3)
        kernel = Launch(scheduled, lowered.root, lowered.threads, 1, lowered.shared_bytes)
        return kernel.launchable((True, True, False), infos, H100).entry()

    monkeypatch.setattr(compiling, "assemble", counted)
    cache = CubinCache(tmp_path)                               # the process's own may know them from other runs
    monkeypatch.setattr(compiling, "default_cache", lambda: cache)
    first = entry(maxwell(swizzle=lambda i: i ^ 3))
    assert entry(maxwell(swizzle=lambda i: i ^ 3)).cubin == first.cubin and len(built) == 1
    entry(maxwell(swizzle=lambda i: i ^ 5))
    assert len(built) == 2
