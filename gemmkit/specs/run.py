"""A schedule's kernel for given matrices: run, compiled, explained."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gemmkit.emulator.errors import EmulatorError
from gemmkit.runtime.array_info import ArrayInfo, alignment, shares_memory, unit_axis
from gemmkit.runtime.arrays import describe, empty_like
from gemmkit.specs.launching import Array, Code, Kernel, example
from gemmkit.specs.lower import Lowered, Matrix, lower
from gemmkit.specs.nodes import scheduled

#: Which of A, B and C a kernel only reads.
READ_ONLY = (True, True, False)
#: What sums are of, where no ``out`` says it.
_SUMS = {"float16": np.float32, "bfloat16": np.float32}


def run(schedule: Any, a: Any, b: Any, out: Any = None, *, stream: Any = None) -> Any:
    """``a @ b`` by the kernel of a schedule; ``out`` says where to, and C's dtype and order.

    ``a`` is M x K, ``b`` K x N, of one dtype. Without ``out`` the product is row-major, float32 for 16-bit floats, else of
    their dtype. NumPy arrays are multiplied within ``with gemmkit.emulate():``; arrays of a GPU by a launch on its current
    stream, or ``stream``.

    Raises ScheduleError where the schedule does not fit these matrices, ValueError and TypeError for matrices that do not
    fit each other, or the kernel's tiles, before anything is compiled; the emulator's errors for faults.
    """
    infos, out = described(a, b, out)
    kernel, lowered = prepared(schedule, infos)
    arrays = Array(a, "a", is_readonly=True), Array(b, "b", is_readonly=True), Array(out, "out", is_filled=True)
    try:
        kernel.run(arrays, stream)
    except EmulatorError as error:
        steps = "".join(f"\n  {step}" for step in lowered.in_shared)
        error.args = (f"{error.args[0]}\nThe schedule's steps that use shared memory:{steps}", *error.args[1:])
        raise
    return out


def described(a: Any, b: Any, out: Any) -> tuple[tuple[ArrayInfo, ...], Any]:
    """What the three matrices are, and ``out``: a new one where there is none."""
    given = describe(a, "a"), describe(b, "b")
    m, n, _ = _sizes(*given)
    if out is None:
        out = empty_like(a, (m, n), np.dtype(_SUMS.get(given[0].dtype.name, given[0].dtype)))
    return (*given, describe(out, "out")), out


def prepared(schedule: Any, infos: tuple[ArrayInfo, ...]) -> tuple[Kernel, Lowered]:
    """The kernel that multiplies these matrices. Raises ScheduleError and ValueError where it does not fit them."""
    matrices = list(map(_matrix, ("a", "b", "out"), infos))
    lowered = kernel_of(schedule, *matrices)
    blocks, is_partial = _blocks(schedule, lowered, infos)
    if is_partial:                                            # a kernel that looks where the matrices end
        lowered = kernel_of(schedule, *(matrix._replace(is_partial=True) for matrix in matrices))
    return Kernel(scheduled, lowered.root, lowered.threads, blocks, lowered.shared_bytes, lowered.blocks_per_sm), lowered


@lru_cache(maxsize=256)
def kernel_of(schedule: Any, a: Matrix, b: Matrix, c: Matrix) -> Lowered:
    """The lowered schedule, once for each kind of matrices."""
    return lower(schedule, a, b, c)


def matrix_of(name: str, given: Any) -> Matrix:
    """What is known of a matrix: of an array, or of (dtype, order) with order "row" or "col".

    Raises ValueError for another order, TypeError for what is neither.
    """
    if isinstance(given, Matrix):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        if given[1] not in ("row", "col"):
            raise ValueError(f"{name}={given!r}: the order is 'row' or 'col'")
        return Matrix(np.dtype(given[0]), given[1])
    return _matrix(name, describe(given, name))


def _matrix(name: str, info: ArrayInfo) -> Matrix:
    unit = unit_axis(info)
    if unit is None:
        raise ValueError(f"{name} has strides {info.strides}: along a dimension its elements must be neighbours; copy it")
    return Matrix(info.dtype, "col" if unit == 0 else "row", alignment(info))


def _sizes(a: ArrayInfo, b: ArrayInfo) -> tuple[int, int, int]:
    for name, info in (("a", a), ("b", b)):
        if len(info.shape) != 2:
            raise ValueError(f"{name} has {len(info.shape)} dimensions; a schedule multiplies matrices")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {a.shape[0]} x {a.shape[1]} and b is {b.shape[0]} x {b.shape[1]}: a's columns are b's rows")
    if a.dtype != b.dtype:
        raise TypeError(f"a is of {a.dtype} and b of {b.dtype}; convert one of them")
    return a.shape[0], b.shape[1], a.shape[1]


def _blocks(schedule: Any, lowered: Lowered, infos: tuple) -> tuple[int, bool]:
    """How many blocks are launched, and whether tiles reach over an edge. Raises ValueError where out does not fit, or
    overlaps."""
    a, b, out = infos
    m, n, k = _sizes(a, b)
    if out.shape != (m, n):
        raise ValueError(f"out is of shape {out.shape}; the product is {m} x {n}")
    for name, size, wanted in zip("MNK", (m, n, k), schedule.sizes):
        if wanted is not None and size != wanted:
            raise ValueError(f"{name} is {size}, and the schedule is of MatMul{schedule.sizes}")
    for name, info in (("a", a), ("b", b)):
        if shares_memory(out, info):
            raise ValueError(f"out overlaps {name}; give memory of its own")
    is_partial = any(size % tile for size, tile in zip((m, n, k), (*lowered.tile, lowered.depth)))
    return -(-m // lowered.tile[0]) * -(-n // lowered.tile[1]), is_partial


def compile_schedule(schedule: Any, a: Any, b: Any, c: Any, *, blocks_per_sm: int | None = None) -> Code:
    """PTX and machine code of a schedule for an H100, without a GPU. Matrices are as `matrix_of` takes them;
    ``blocks_per_sm`` None is what the schedule says (`.occupancy`).

    Raises ScheduleError where the schedule does not fit them.
    """
    matrices = [matrix_of(name, x) for name, x in zip(("a", "b", "c"), (a, b, c))]
    lowered = kernel_of(schedule, *matrices)
    m, n, k = (size or 4096 for size in schedule.sizes)
    infos = [example(shape, x.dtype, x.order) for shape, x in zip(((m, k), (k, n), (m, n)), matrices)]
    resident = blocks_per_sm or lowered.blocks_per_sm
    kernel = Kernel(scheduled, lowered.root, lowered.threads, 1, lowered.shared_bytes, resident)
    return kernel.compile(READ_ONLY, infos)


def explain(schedule: Any, a: Any, b: Any, c: Any) -> str:
    """The decomposition as an indented tree: sizes, workers, memories, and what each leaf becomes."""
    return "\n".join(kernel_of(schedule, *map(matrix_of, ("a", "b", "c"), (a, b, c))).text)
