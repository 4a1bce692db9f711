"""What the emulator finds in kernels that use wgmma wrongly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gemmkit.emulator.errors import ProtocolError, ProxyError, RaceError
from gemmkit.lang.control import each
from gemmkit.lang.values import fill
from gemmkit.ptx.descriptors import matrix_descriptor
from gemmkit.ptx.memory import load_global, shared, store_shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.warpgroup import fence_async
from gemmkit.ptx.wgmma import WgmmaSpec, wgmma_commit, wgmma_fence, wgmma_wait
from tests.ptx.harness import Out, emulated
from tests.ptx.wgmma_cases import F16, F32, Product, put


@dataclass(frozen=True)
class Faulty(Product):
    fence: str = "writers"                     # who calls fence_async, and when
    pending: int = 0
    shift: int = 0                             # what thread 77 adds to its descriptor

    @property
    def map_dtype(self) -> np.dtype:
        return self.spec.accumulator


def faulty_kernel(d: Any, a: Any, b: Any, case: Any) -> None:
    """Warpgroup 1 fills the operands, 0 multiplies and gives them back, 1 fills them again."""
    t = thread_index()
    if case.fence == "early":
        fence_async()
    if t >= 128:
        fill_operands(a, b, case)
    if case.fence == "writers":
        fence_async()
    barrier()
    if case.fence == "reader":
        if t == 0:
            fence_async()
    if t < 128:
        left = matrix_descriptor(shared(case.word, 0), 0, case.a.leading_bytes, case.a.stride_bytes, case.width)
        right = matrix_descriptor(shared(case.word, case.b_start), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
        if t == 77:
            left += case.shift
        sums = fill(case.map_dtype, case.count, 0)
        wgmma_fence()
        sums = case.instruction(sums, left, right, 0)
        wgmma_commit()
        (sums,) = wgmma_wait(case.pending, (sums,))
    barrier()
    if t >= 128:
        fill_operands(a, b, case)
    if t < 128:
        each(put, sums, d, case.map_c)


def fill_operands(a: Any, b: Any, case: Any) -> None:
    for chunk in range(thread_index() - 128, case.a.nbytes // 16, 128):
        store_shared(shared(case.word, 0), 4 * chunk, 0, load_global(a, 0, (0,), (0,), 4))
    for chunk in range(thread_index() - 128, case.b.nbytes // 16, 128):
        store_shared(shared(case.word, case.b_start), 4 * chunk, 0, load_global(b, 0, (0,), (0,), 4))


def run_faulty(**changes: Any) -> np.ndarray:
    case = Faulty(WgmmaSpec(8, F16, F16, F32), 32, **changes)
    ones = np.ones(8, F16).view(np.uint32)
    (d,) = emulated(faulty_kernel, Out((64, 8), F32), ones, ones, case, threads=256, shared=case.shared)
    return d


def test_stages_that_are_waited_for_may_be_filled_again() -> None:
    assert (run_faulty() == 16).all()


def test_stages_given_back_too_early_are_races() -> None:
    with pytest.raises(RaceError, match="first a read by the tensor cores of threads 0-127") as caught:
        run_faulty(pending=1)
    assert "case.instruction(" in caught.value.accesses[0].kernel_line.text
    assert "store_shared(" in caught.value.accesses[1].kernel_line.text


@pytest.mark.parametrize("fence", ["nobody", "early", "reader"])
def test_writes_that_are_not_fenced_are_not_seen(fence: str) -> None:
    with pytest.raises(ProxyError, match=r"call fence_async\(\) after it") as caught:
        run_faulty(fence=fence)
    assert "store_shared(" in caught.value.write.kernel_line.text
    assert caught.value.write.thread.tid >= 128


def test_descriptors_that_differ_are_refused() -> None:
    with pytest.raises(ProtocolError, match="the descriptor a differs between the threads of a warpgroup"):
        run_faulty(shift=2)
