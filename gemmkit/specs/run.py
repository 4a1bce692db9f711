"""A schedule's kernel for given matrices: run, compiled, explained."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.collectives.scheduler import Columns
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts import Padded
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, alignment, shares_memory, unit_axis
from gemmkit.runtime.arrays import describe, empty_like
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.specs import nodes
from gemmkit.specs.lower import ArrayParameter, BlockKernel, Code, KnownMatrix, Lowered, example, lower
from gemmkit.specs.nodes import ScheduleStep, scaled_in_ring, scheduled, scheduled_in_ring, scheduled_scaled
from gemmkit.specs.tensors import FR, SH

if TYPE_CHECKING:
    from gemmkit.specs.schedule import Finished, Schedule

#: Which of A, B and C a kernel only reads.
READ_ONLY = (True, True, False)
#: What sums are of, where no ``out`` says it.
_SUMS = {"float16": np.float32, "bfloat16": np.float32}


def run(schedule: Finished, a: Any, b: Any, out: Any = None, *, c: Any = None, alpha: Any = 1, beta: Any = 1,
        stream: object = None) -> Any:
    """``alpha a @ b + beta c`` by the kernel of a schedule; ``out`` says where to, and the result's dtype and order.

    ``a`` is M x K, ``b`` K x N, of one dtype; ``c`` is M x N, and may be ``out`` itself; None, or a ``beta`` of 0, leaves it
    out. ``alpha`` and ``beta`` are numbers, whole ones for integers. Without ``out`` the product is row-major, float32 for
    16-bit floats, else of their dtype. NumPy arrays are multiplied within ``with gemmkit.emulate():``; arrays of a GPU by a
    launch on its current stream, or ``stream``.

    Raises ScheduleError where the schedule does not fit these matrices, ValueError and TypeError for matrices that do not
    fit each other, or the kernel's tiles, before anything is compiled; the emulator's errors for faults.
    """
    infos, out = described(a, b, out)
    scalars = tuple(_number(name, x, infos[2].dtype) for name, x in (("alpha", alpha), ("beta", beta)))
    c = None if beta == 0 else c
    scaling = 2 if c is not None else 1 if alpha != 1 else 0
    in_place = scaling == 2 and _check_c(describe(c, "c"), infos[2])
    kernel, lowered = prepared(schedule, infos, scaling)
    arrays = [ArrayParameter(a, "a", is_readonly=True), ArrayParameter(b, "b", is_readonly=True),
              ArrayParameter(out, "out", is_filled=not in_place)]
    if scaling:                                               # without a C another array stands for it, and is not read
        arrays.append(ArrayParameter(c, "c", is_readonly=True) if scaling > 1 else arrays[0]._replace(name="c"))
        kernel = dataclasses.replace(kernel, scalars=scalars, function=scaled_in_ring if lowered.maps else scheduled_scaled)
    try:
        kernel.run(arrays, stream)
    except EmulatorError as error:
        steps = "".join(f"\n  {step}" for step in lowered.in_shared)
        error.args = (f"{error.args[0]}\nThe schedule's steps that use shared memory:{steps}", *error.args[1:])
        raise
    return out


def described(a: object, b: ArrayParameter, out: object) -> tuple[tuple[ArrayInfo, ...], Any]:
    """What the three matrices are, and ``out``: a new one where there is none."""
    given = describe(a, "a"), describe(b, "b")
    m, n, _ = _sizes(*given)
    if out is None:
        out = empty_like(a, (m, n), np.dtype(_SUMS.get(given[0].dtype.name, given[0].dtype)))
    return (*given, describe(out, "out")), out


def _check_c(c: ArrayInfo, out: ArrayInfo) -> bool:
    """Whether C is ``out`` itself. Raises ValueError for another shape, or if they overlap otherwise; TypeError for numbers
    of another kind."""
    if c.shape != out.shape:
        raise ValueError(f"c is of shape {c.shape}; the product is {' x '.join(map(str, out.shape))}")
    if (c.dtype.kind in "iu") != (out.dtype.kind in "iu"):
        raise TypeError(f"c has dtype {c.dtype} and out has {out.dtype}; both are integers or both are floats")
    if not shares_memory(out, c):
        return False
    if (c.pointer, c.strides, c.dtype) != (out.pointer, out.strides, out.dtype):
        raise ValueError("out overlaps c; give the same array, or memory of its own")
    return True


def _number(name: str, value: Any, dtype: np.dtype) -> Any:
    """alpha or beta as the kernel takes it. Raises TypeError."""
    whole = dtype.kind in "iu"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer) if whole else (
            int, float, np.integer, np.floating)):
        raise TypeError(f"{name} is {value!r}; give a {'whole ' if whole else ''}number")
    return np.int32(value) if whole else np.float64(value) if dtype.itemsize == 8 else np.float32(value)


def prepared(schedule: Finished, infos: tuple[ArrayInfo, ...], scaling: int = 0) -> tuple[BlockKernel, Lowered]:
    """The kernel that multiplies these matrices. Raises ScheduleError and ValueError where it does not fit them."""
    matrices = list(map(_matrix, ("a", "b", "out"), infos))
    matrices[2] = matrices[2]._replace(scaling=scaling)
    lowered = kernel_of(schedule, *matrices)
    blocks, is_partial = _blocks(schedule, lowered, infos)
    if is_partial:                                            # a kernel that looks where the matrices end
        lowered = kernel_of(schedule, *(matrix._replace(is_partial=True) for matrix in matrices))
    if lowered.maps:
        blocks = _in_ring(schedule, lowered, infos, blocks)
    return BlockKernel(scheduled_in_ring if lowered.maps else scheduled, lowered.root, lowered.threads, blocks,
                       lowered.shared_bytes, lowered.blocks_per_sm, maps=lowered.maps, cluster=lowered.cluster), lowered


def _in_ring(schedule: Finished, lowered: Lowered, infos: tuple[ArrayInfo, ...], tiles: int) -> int:
    """The blocks of a kernel that stay and take a tile after the other: as many as fit, whole clusters. Raises ScheduleError
    for a GPU without wgmma, ValueError for an array that TMA does not read."""
    target = device.target(infos[0].device)
    if target.arch[0] != 9:
        raise schedule.steps[2].refuse(f"TMA and wgmma are Hopper's, and {target.name} has not got them; leave out .stages")
    for (which, stages), name in zip(lowered.maps, "ab"):
        reason = why_not(infos[which], stages.axis)
        if reason is not None:
            raise ValueError(f"{name}: TMA brings the tiles of a .split with .stages, and cannot: {reason}; copy it")
    fitting = target.sm_count * lowered.blocks_per_sm // lowered.cluster * lowered.cluster
    return min(tiles, fitting)


@lru_cache(maxsize=256)
def kernel_of(schedule: Finished, a: KnownMatrix, b: KnownMatrix, c: KnownMatrix) -> Lowered:
    """The lowered schedule, once for each kind of matrices."""
    return lower(schedule, a, b, c)


def matrix_of(name: str, given: object) -> KnownMatrix:
    """What is known of a matrix: of an array, or of (dtype, order) with order "row" or "col".

    Raises ValueError for another order, TypeError for what is neither.
    """
    if isinstance(given, KnownMatrix):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        if given[1] not in ("row", "col"):
            raise ValueError(f"{name}={given!r}: the order is 'row' or 'col'")
        return KnownMatrix(np.dtype(given[0]), given[1])
    return _matrix(name, describe(given, name))


def _matrix(name: str, info: ArrayInfo) -> KnownMatrix:
    unit = unit_axis(info)
    if unit is None:
        raise ValueError(f"{name} has strides {info.strides}: along a dimension its elements must be neighbours; copy it")
    return KnownMatrix(info.dtype, "col" if unit == 0 else "row", alignment(info))


def _sizes(a: ArrayInfo, b: ArrayInfo) -> tuple[int, int, int]:
    for name, info in (("a", a), ("b", b)):
        if len(info.shape) != 2:
            raise ValueError(f"{name} has {len(info.shape)} dimensions; a schedule multiplies matrices")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {a.shape[0]} x {a.shape[1]} and b is {b.shape[0]} x {b.shape[1]}: a's columns are b's rows")
    if a.dtype != b.dtype:
        raise TypeError(f"a has dtype {a.dtype} and b has {b.dtype}; convert one of them")
    return a.shape[0], b.shape[1], a.shape[1]


def _blocks(schedule: Finished, lowered: Lowered, infos: tuple) -> tuple[int, bool]:
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
    high = -(-m // lowered.tile[0])
    whole = -(-high // lowered.cluster) * lowered.cluster
    return whole * -(-n // lowered.tile[1]), is_partial or whole > high


def compile_schedule(schedule: Finished, a: object, b: object, c: object, *, blocks_per_sm: int | None = None) -> Code:
    """PTX and machine code of a schedule for an H100, without a GPU. Matrices are as `matrix_of` takes them;
    ``blocks_per_sm`` None is what the schedule says (`.occupancy`).

    Raises ScheduleError where the schedule does not fit them.
    """
    matrices = [matrix_of(name, x) for name, x in zip(("a", "b", "c"), (a, b, c))]
    lowered = kernel_of(schedule, *matrices)
    m, n, k = (size or 4096 for size in schedule.sizes)
    infos = [example(shape, x.dtype, x.order) for shape, x in zip(((m, k), (k, n), (m, n)), matrices)]
    resident = blocks_per_sm or lowered.blocks_per_sm
    kernel = BlockKernel(scheduled_in_ring if lowered.maps else scheduled, lowered.root, lowered.threads, lowered.cluster,
                         lowered.shared_bytes, resident, maps=lowered.maps, cluster=lowered.cluster)
    return kernel.compile(READ_ONLY, infos)


def explain(schedule: Schedule, a: object, b: object, c: object) -> str:
    """The decomposition as an indented tree: sizes, workers, memories, and what each leaf becomes."""
    return "\n".join(kernel_of(schedule, *map(matrix_of, ("a", "b", "c"), (a, b, c))).text)


# --------------------------------------------------------------------------------------------------
# A schedule as a Config: which of gemmkit's template kernels does the same, or what of the schedule does not fit it.
#
# The template is `singlestage` (`gemmkit.kernels.simt`): blocks; sums in registers or fragments; a loop over K with A
# and B by shared memory; warps; an epilogue by shared memory.

_PLAIN = {nodes.ROW_MAJOR: layouts.RowMajor, nodes.COLUMN_MAJOR: layouts.ColMajor}


def config(schedule: Finished, a: object, b: object, c: object, **fields: object) -> Any:
    """The Config for matrices (arrays, or (dtype, order)); ``fields`` are further ones of it.

    What differs and changes no result is left to the template: the order in which a warp's tiles are dealt, and barriers
    that it has besides. Raises ConfigError with all that does not fit.
    """
    of_a, of_b, of_c = (matrix_of(name, x) for name, x in zip(("a", "b", "c"), (a, b, c)))
    walk = _Walk(list(schedule.steps))
    values: dict[str, Any] = {f"global_{name}_layout": _PLAIN[x.order](x.dtype)
                              for name, x in zip("abd", (of_a, of_b, of_c))}
    block = walk.next(nodes.TileStep, ".tile(M, N).to(Block)", level=nodes.BLOCK)
    sums = walk.next(nodes.Accumulate, ".accumulate_in")
    split = walk.next(nodes.SplitStep, ".split(K)")
    values["order"] = Columns()
    values["block_shape"] = gk.Tile(M=block.rows, N=block.columns, K=split.k)
    if not split.sync:
        walk.refuse(split, "the template's loop ends with a barrier (.sync)")
    for name, x, dimensions, number in (("a", of_a, "MK", 0), ("b", of_b, "KN", 1)):
        step = walk.next(nodes.Move, f".move({name.upper()}, SH)", operand=number, memory=SH)
        layout = _PLAIN[step.order or x.order](x.dtype)
        values[f"shared_{name}_layout"] = Padded(layout, step.pad) if step.pad else layout
        if step.layout is not None or step.swizzle is not None:
            walk.refuse(step, "the template's shared tiles are padded (no .layout or .swizzle)")
        if step.prefetch:
            walk.refuse(step, "the template has one stage (no .prefetch)")
        tiles = _moved(walk, step, step.implementation, step.implementation.steps, dimensions)
        values |= dict(zip((f"mem_{name}_warp", f"mem_{name}_thread"), tiles))
    warp = walk.next(nodes.TileStep, ".tile(M, N).to(Warp)", level=nodes.WARP)
    if isinstance(warp.rows, tuple) or isinstance(warp.columns, tuple):
        walk.refuse(warp, "the template's warps have no pieces apart")
        raise walk.error()
    values["warps_per_block"] = block.rows // warp.rows * (block.columns // warp.columns)
    depth = _product(walk, sums, of_a.dtype, of_c.dtype, values)
    values["compute_warp"] = gk.Tile(M=warp.rows, N=warp.columns, K=depth)
    _epilogue(walk, sums, of_c, values)
    if walk.wrong:
        raise walk.error()
    return gk.get_config(**{**values, **fields})


class _Walk:
    """The steps that are left, and what does not fit so far."""

    def __init__(self, left: list):
        self.left = left
        self.wrong: list[str] = []

    def next(self, kind: Any, what: str, **wanted: Any) -> Any:
        """The next step, which must be of a kind. Raises ConfigError for another."""
        step = self.left[0] if self.left else None
        if isinstance(step, kind) and all(getattr(step, name) == value for name, value in wanted.items()):
            return self.left.pop(0)
        found = f"{step}, at {step.line}" if step is not None else "nothing"
        self.wrong.append(f"where {what} is expected stands {found}")
        raise self.error()

    def refuse(self, step: ScheduleStep, why: str) -> None:
        self.wrong.append(f"{step}: {why} (at {step.line})")

    def error(self) -> ConfigError:
        return ConfigError("no Config does what this schedule says:\n  " + "\n  ".join(self.wrong))


def _product(walk: _Walk, sums: Any, dtype: np.dtype, accumulator: object, values: dict[str, Any]) -> int:
    """The operator, and the depth of its steps."""
    if sums.memory == FR:
        depth = walk.next(nodes.SplitStep, ".split(16)", k=16)
        for number in (0, 1):
            walk.next(nodes.Move, "a move to FR", operand=number, memory=FR)
        walk.next(nodes.TileStep, ".tile(16, 16)", rows=16, columns=16)
        values["operator"] = operators.WMMAOp(16, 16, 16, dtype=dtype, accumulator=accumulator)
        return int(depth.k)
    thread = walk.next(nodes.TileStep, ".tile(M, N).to(Thread)", level=nodes.THREAD)
    if isinstance(thread.rows, tuple) or isinstance(thread.columns, tuple):
        walk.refuse(thread, "a thread's elements lie in pieces apart; FPUOp says itself how a warp's product is shared out")
    if thread.swizzle is not None:
        walk.refuse(thread, "FPUOp's threads are not renumbered (.swizzle)")
    depth = walk.next(nodes.SplitStep, ".split(k)")
    values["operator"] = operators.FPUOp(dtype=dtype, accumulator=accumulator)
    return int(depth.k)


def _epilogue(walk: _Walk, sums: Any, of_c: Any, values: dict[str, Any]) -> None:
    end = sums.end
    first = end.steps[0] if end.steps else None
    if end.micro is not None:
        walk.refuse(sums, f"the epilogue is the micro-kernel {end.micro.__name__}; the template's goes by shared memory "
                          "(write an Epilogue)")
    elif not isinstance(first, nodes.Move) or first.memory != SH:
        walk.refuse(sums, "the template's epilogue goes by shared memory: Move.move(SRC, SH, ...)")
    else:
        values |= dict(zip(("mem_cd_warp", "mem_cd_thread"), _moved(walk, first, end, end.steps[1:], "MN")))
        layout = _PLAIN[first.order or of_c.order](of_c.dtype)
        values["shared_c_layout"] = values["shared_d_layout"] = Padded(layout, first.pad) if first.pad else layout


def _moved(walk: _Walk, step: ScheduleStep, schedule: Finished, decomposition: tuple, names: str) -> tuple:
    """(mem_x_warp, mem_x_thread) of a move by tiles of warps, then of threads; nothing where it does not fit."""
    if schedule.micro is not None:
        walk.refuse(step, f"moved by the micro-kernel {schedule.micro.__name__}")
        return ()
    plain = all(isinstance(s, nodes.TileStep) and type(s.rows) is int and type(s.columns) is int for s in decomposition)
    levels = [step.level for step in decomposition if isinstance(step, nodes.TileStep)]
    if not plain or len(levels) < 2 or levels[0] != nodes.WARP or levels[-1] != nodes.THREAD:
        walk.refuse(step, "the template moves plain tiles of warps, then of threads")
        return ()
    return tuple(gk.Tile(**dict(zip(names, (s.rows, s.columns)))) for s in decomposition[-2:])
