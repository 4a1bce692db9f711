"""A schedule run: its kernel for these matrices, in the emulator or on a GPU; and its machine code, without one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import freeze
from gemmkit.emulator import machine
from gemmkit.emulator.errors import EmulatorError
from gemmkit.emulator.mode import current_mode
from gemmkit.lang.freezing import freeze_array
from gemmkit.lang.host import View
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, alignment, shares_memory, unit_axis
from gemmkit.runtime.arrays import describe, empty_like
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.streams import as_stream_handle, current_stream
from gemmkit.specs.lower import Lowered, Matrix, lower
from gemmkit.specs.nodes import scheduled

__all__ = ["compile_schedule", "kernel_of", "launchable", "run"]

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
    given = describe(a, "a"), describe(b, "b")
    m, n, _ = _sizes(*given)
    if out is None:
        out = empty_like(a, (m, n), np.dtype(_SUMS.get(given[0].dtype.name, given[0].dtype)))
    infos = (*given, describe(out, "out"))
    lowered = kernel_of(schedule, *map(_matrix, "a b out".split(), infos))
    blocks = _check(schedule, lowered, infos)
    if all(info.library == "numpy" for info in infos):
        _emulate(lowered, (a, b, out), blocks)
    else:
        _launch(lowered, infos, blocks, stream)
    return out


@lru_cache(maxsize=256)
def kernel_of(schedule: Any, a: Matrix, b: Matrix, c: Matrix) -> Lowered:
    """The lowered schedule, once for each kind of matrices."""
    return lower(schedule, a, b, c)


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


def _check(schedule: Any, lowered: Lowered, infos: tuple) -> int:
    """How many blocks are launched. Raises ValueError where the kernel's tiles do not fit, or arrays overlap."""
    a, b, out = infos
    m, n, k = _sizes(a, b)
    if out.shape != (m, n):
        raise ValueError(f"out is of shape {out.shape}; the product is {m} x {n}")
    for name, size, wanted in zip("MNK", (m, n, k), schedule.sizes):
        if wanted is not None and size != wanted:
            raise ValueError(f"{name} is {size}, and the schedule is of MatMul{schedule.sizes}")
    for name, size, tile in zip("MNK", (m, n, k), (*lowered.tile, lowered.depth)):
        if size % tile:
            raise ValueError(f"{name} is {size}, which the schedule's tiles of {tile} do not divide; pad the matrices with "
                             "zeros, or take another tile")
    for name, info in (("a", a), ("b", b)):
        if shares_memory(out, info):
            raise ValueError(f"out overlaps {name}; give memory of its own")
    return (m // lowered.tile[0]) * (n // lowered.tile[1])


# -- the emulator -----------------------------------------------------------------------------------------------------

def _emulate(lowered: Lowered, arrays: tuple, blocks: int) -> None:
    mode = current_mode()
    if mode is None:
        raise TypeError("a, b and out are host arrays (NumPy); compute them in the emulator: with gemmkit.emulate(): ...")
    views = []
    for name, array, how in zip(("a", "b", "out"), arrays, (dict(readonly=True), dict(readonly=True), dict(written=False))):
        info = describe(array, name)
        views.append(View(array, machine.Memory.for_array(array, name, **how), unit_axis(info), alignment(info)))
    try:
        with np.errstate(all="ignore"):
            machine.launch(scheduled, (lowered.root, *views), grid=(blocks, 1, 1), block=(lowered.threads, 1, 1),
                           shared_memory=lowered.shared_bytes, schedule_seed=mode.seed)
    except EmulatorError as error:
        steps = "".join(f"\n  {step}" for step in lowered.in_shared)
        error.args = (f"{error.args[0]}\nThe schedule's steps that use shared memory:{steps}", *error.args[1:])
        raise


# -- compiled ---------------------------------------------------------------------------------------------------------

def launchable(lowered: Lowered, infos: tuple, blocks: int, target: Any, ordinal: int = 0) -> Launchable:
    """The kernel with its arguments, to be compiled and launched."""
    arguments = [freeze(lowered.root), *(freeze_array(info, readonly=n < 2) for n, info in enumerate(infos))]
    return Launchable(scheduled, arguments, lowered.threads, blocks, target, ordinal, lowered.shared_bytes)


class Bound(NamedTuple):
    kernel: Any
    values: tuple
    slots: tuple[int, ...]


_bound: dict[tuple, Bound] = {}


def _launch(lowered: Lowered, infos: tuple, blocks: int, stream: Any) -> None:
    device_of = infos[0].device
    if len({info.device for info in infos}) != 1 or any(info.library == "numpy" for info in infos):
        raise ValueError("a, b and out are in different places; put them on one GPU")
    key = id(lowered), device_of, blocks, *((info.shape, info.strides, info.dtype, alignment(info)) for info in infos)
    bound = _bound.get(key)
    if bound is None:
        with device.made_current(device_of):
            made = launchable(lowered, infos, blocks, device.current(), device_of)
        slots = tuple(made.slot(n) for n in (1, 2, 3))
        bound = _bound[key] = Bound((lowered, made.bind()), tuple(made.values), slots)     # type: ignore[arg-type]
    values = list(bound.values)
    for slot, info in zip(bound.slots, infos):
        values[slot] = info.pointer
    where = current_stream(infos[0].library, device_of, infos[0].stream) if stream is None else as_stream_handle(stream)
    bound.kernel[1].launch(where, values)


class Code(NamedTuple):
    """A schedule's compiled kernel."""

    ptx: str
    cubin: bytes
    usage: Any


def compile_schedule(schedule: Any, a: Matrix, b: Matrix, c: Matrix, *, blocks_per_sm: int = 1) -> Code:
    """PTX and machine code of a schedule for an H100, without a GPU; ``usage`` has registers, spills and stack."""
    from gemmkit.runtime.assemble import assemble
    from gemmkit.runtime.compile import to_ptx

    lowered = kernel_of(schedule, a, b, c)
    infos = [ArrayInfo(2**20, (4096, 4096), (4096, 1) if x.order == "row" else (1, 4096), x.dtype, 0, False, "cupy")
             for x in (a, b, c)]
    made = launchable(lowered, tuple(infos), 1, device.H100)
    ptx = to_ptx(scheduled, tuple(argument.type for argument in made.arguments), lowered.threads, device.H100, blocks_per_sm)
    assembled = assemble(ptx, device.H100.arch_name)
    return Code(ptx, assembled.cubin, assembled.usage)
