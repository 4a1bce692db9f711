"""stmatrix in the emulator, in PTX, and against the hardware; and that it undoes ldmatrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import AlignmentError, UninitialisedRead
from gemmkit.lang.registers import each, generate
from gemmkit.ptx.memory import load_shared, shared, store_global
from gemmkit.ptx.mma import ldmatrix, stmatrix
from gemmkit.ptx.special import barrier, lane_index
from tests.support.harness import Out, Runtime, compiled, emulated, instructions, leaves_nothing, on_device, same_bits

F16, BF16 = np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)
CASES = [(m, t) for m in (1, 2, 4) for t in (False, True)]
every_case = pytest.mark.parametrize("count, trans", CASES)


@dataclass(frozen=True)
class Store(gk.Component):
    dtype: Any
    matrices: int
    trans: bool
    meets: bool = True

    @property
    def values(self) -> int:
        return 2 * self.matrices

    @property
    def rows(self) -> int:
        return 8 * self.matrices


def stmatrix_kernel(out: Any, a: Any, stride: int, case: Any) -> None:
    """Every lane's fragment, from global memory, to rows ``stride`` elements apart in shared memory, and out row by row."""
    lane = lane_index()
    pointer = shared(case.dtype, 16)
    stmatrix(pointer, lane * stride, 8, generate(case.values, take, a, lane, case), case.trans)
    if case.meets:
        barrier()
    row = (lane + 1) % case.rows                                     # one that another lane has stored
    if lane < case.rows:
        store_global(out, 0, (8 * row,), (0,), load_shared(pointer, row * stride, 8, 8))


def take(n: int, a: Any, lane: int, case: Any) -> Any:
    return a[lane * case.values + n]


def expected_rows(a: np.ndarray, count: int, trans: bool) -> np.ndarray:
    """From the PTX ISA: lane t's n-th pair is elements (t // 4, 2 (t % 4)) and the next of matrix n, or of its transpose."""
    out = np.zeros((count, 8, 8), a.dtype)
    for lane, fragment in enumerate(a.reshape(32, count, 2)):
        for m in range(count):
            matrix = out[m].T if trans else out[m]
            matrix[lane // 4, 2 * (lane % 4):2 * (lane % 4) + 2] = fragment[m]
    return out.reshape(-1)


def arguments(count: int, trans: bool, dtype: np.dtype, rng: np.random.Generator, stride: int = 24, **more: Any) -> tuple:
    a = rng.integers(-1000, 1000, 64 * count).astype(dtype)
    return Out((64 * count,), dtype), a, Runtime(stride), Store(dtype, count, trans, **more)


SHARED = 32 * 24 * 2 + 32


@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype("i2")], ids=str)
@every_case
def test_collects_rows(count: int, trans: bool, dtype: np.dtype, rng: np.random.Generator) -> None:
    given = arguments(count, trans, dtype, rng)
    (result,) = emulated(stmatrix_kernel, *given, shared=SHARED)
    assert same_bits(result, expected_rows(given[1], count, trans))


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype("i2")], ids=str)
@every_case
def test_is_one_instruction(count: int, trans: bool, dtype: np.dtype, rng: np.random.Generator) -> None:
    ptx = compiled(stmatrix_kernel, *arguments(count, trans, dtype, rng))
    text = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    assert [(k, n) for k, n in instructions(ptx).items() if k.startswith("stmatrix")] == [(text, 1)]
    assert leaves_nothing(ptx)


def test_is_assembled(rng: np.random.Generator) -> None:
    from gemmkit.runtime.compile import assemble, disassemble

    assembled = assemble(compiled(stmatrix_kernel, *arguments(4, True, F16, rng)))
    assert assembled.usage.stack_bytes == 0
    assert "STSM.16.MT88.4" in disassemble(assembled.cubin)


def test_lanes_do_not_meet(rng: np.random.Generator) -> None:
    """It orders nothing: other lanes' rows are there after a barrier only."""
    with pytest.raises(UninitialisedRead, match="read of 16 bytes"):
        emulated(stmatrix_kernel, *arguments(4, False, F16, rng, meets=False), shared=SHARED)


def test_rows_are_aligned(rng: np.random.Generator) -> None:
    with pytest.raises(AlignmentError, match="multiple of 16"):
        emulated(stmatrix_kernel, *arguments(4, False, F16, rng, stride=12), shared=SHARED)


def back_kernel(out: Any, a: Any, case: Any) -> None:
    """Fragments to shared memory and back."""
    lane = lane_index()
    pointer = shared(case.dtype, 0)
    stmatrix(pointer, lane * 8, 0, generate(case.values, take, a, lane, case), case.trans)
    barrier()
    each(put, ldmatrix(pointer, lane * 8, 0, case.matrices, case.trans), out, lane, case)


def put(value: Any, n: int, out: Any, lane: int, case: Any) -> None:
    out[lane * case.values + n] = value


@every_case
def test_undoes_ldmatrix(count: int, trans: bool, rng: np.random.Generator) -> None:
    out, a, _, case = arguments(count, trans, F16, rng)
    (result,) = emulated(back_kernel, out, a, case, shared=512)
    assert same_bits(result, a)


@pytest.mark.gpu
def test_on_the_gpu(rng: np.random.Generator) -> None:
    for count, trans in CASES:
        given = arguments(count, trans, F16, rng)
        (result,) = on_device(stmatrix_kernel, *given, shared=SHARED)
        assert same_bits(result, expected_rows(given[1], count, trans))
