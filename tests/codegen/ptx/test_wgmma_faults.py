"""What the emulator finds in kernels that use wgmma wrongly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gemmkit.emulator.errors import ProtocolError, ProxyError, RaceError
from gemmkit.lang.aggregates import fill
from gemmkit.lang.registers import each, generate
from gemmkit.ptx.memory import load_global, shared, store_shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.wgmma import WgmmaSpec, fence_async, matrix_descriptor, settle, wgmma_commit, wgmma_fence, wgmma_wait
from tests.support.harness import Out, emulated
from tests.support.wgmma_cases import F16, F32, Product, copy_in, put, word_of_a


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
        (sums,) = wgmma_wait(0, (sums,))
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


# -- registers --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Registers(Product):
    fence: str = "every group"                 # before which wgmmas there is a fence, and whether behind A's registers
    pending: int = 0                           # how many groups may be pending when a round ends
    last: int = 0                              # and when the sums are stored
    resets: bool = False                       # whether the sums are changed after every wait
    waited: bool = True                        # whether what the last wait returns is taken

    @property
    def map_dtype(self) -> np.dtype:
        return self.spec.accumulator


def register_kernel(d: Any, a: Any, b: Any, case: Any) -> None:
    """Four rounds, each a group of one wgmma with the same A (by registers or not) and B."""
    copy_in(case.a, a, 0, case)
    copy_in(case.b, b, case.b_start, case)
    fence_async()
    barrier()
    right = matrix_descriptor(shared(case.word, case.b_start), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    sums = fill(case.map_dtype, case.count, 0)
    if case.fence == "once":
        wgmma_fence()
    for step in range(4):
        if case.fence == "too early":
            wgmma_fence()
        left = settled_a(case, a) if case.a_registers else descriptor_of_a(case, a)
        if case.fence == "every group":
            wgmma_fence()
        sums = case.instruction(sums, left, right, min(step, 1))
        wgmma_commit()
        (sums,) = wgmma_wait(case.pending, (sums,))
        if case.resets:
            sums = generate(case.count, same, sums)
    if case.waited:
        (sums,) = wgmma_wait(case.last, (sums,))
    else:
        wgmma_wait(0, (sums,))
    each(put, sums, d, case.map_c)


def settled_a(case: Any, a: Any) -> tuple:
    return settle(generate(4, word_of_a, a, 0))


def descriptor_of_a(case: Any, a: Any) -> int:
    return matrix_descriptor(shared(case.word, 0), 0, case.a.leading_bytes, case.a.stride_bytes, case.width)


def same(n: int, values: tuple) -> Any:
    return values[n]


def run_registers(a_registers: bool, **changes: Any) -> np.ndarray:
    case = Registers(WgmmaSpec(8, F16, F16, F32, a_registers=a_registers), 32, **changes)
    ones = np.ones(64 * 32, F16).view(np.uint32)
    (d,) = emulated(register_kernel, Out((64, 8), F32), ones, ones, case, threads=128, shared=case.shared)
    return d


SOUND = [(False, {}), (False, dict(fence="once", pending=1)), (False, dict(pending=1)), (False, dict(resets=True)), (True, {}),
         (True, dict(resets=True))]
FAULTY = {
    "no fence at all": (False, dict(fence="never"), "accumulators that other instructions may have touched"),
    "no fence, by registers": (True, dict(fence="never"), "accumulators that other instructions"),
    "the sums were touched": (False, dict(fence="once", resets=True), "accumulators that other instructions"),
    "A was written behind the fence": (True, dict(fence="too early"), "registers of A that were written since"),
    "A is written in flight": (True, dict(pending=1), "registers of A are written while a wgmma in flight"),
    "sums before their wait": (False, dict(pending=1, last=1), "accumulators are used while wgmmas in flight"),
    "sums changed before their wait": (False, dict(pending=1, resets=True), "accumulators are used while"),
    "sums that were not handed to the wait": (False, dict(pending=1, waited=False), "accumulators are used while"),
}


@pytest.mark.parametrize(("a_registers", "changes"), SOUND)
def test_registers_in_order(a_registers: bool, changes: dict) -> None:
    assert (run_registers(a_registers, **changes) == 4 * 16).all()


@pytest.mark.parametrize("name", FAULTY)
def test_registers_out_of_order(name: str) -> None:
    a_registers, changes, message = FAULTY[name]
    with pytest.raises(ProtocolError, match=message):
        run_registers(a_registers, **changes)


def fresh_kernel(d: Any, a: Any, b: Any, case: Any) -> None:
    """Two groups, the second with sums of its own, which instructions behind the first one's fence may have made."""
    copy_in(case.a, a, 0, case)
    copy_in(case.b, b, case.b_start, case)
    fence_async()
    barrier()
    left = descriptor_of_a(case, a)
    right = matrix_descriptor(shared(case.word, case.b_start), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    wgmma_fence()
    first = case.instruction(fill(case.map_dtype, case.count, 0), left, right, 0)
    wgmma_commit()
    if case.fence == "every group":
        wgmma_fence()
    second = case.instruction(fill(case.map_dtype, case.count, 0), left, right, 0)
    wgmma_commit()
    first, second = wgmma_wait(0, (first, second))
    each(put, second, d, case.map_c)


def test_sums_of_a_group_of_their_own_need_a_fence() -> None:
    ones = np.ones(64 * 32, F16).view(np.uint32)
    for fence in ("every group", "once"):
        case = Registers(WgmmaSpec(8, F16, F16, F32), 32, fence=fence)
        if fence == "once":
            with pytest.raises(ProtocolError, match="accumulators that other instructions"):
                emulated(fresh_kernel, Out((64, 8), F32), ones, ones, case, threads=128, shared=case.shared)
        else:
            (d,) = emulated(fresh_kernel, Out((64, 8), F32), ones, ones, case, threads=128, shared=case.shared)
            assert (d == 16).all()
