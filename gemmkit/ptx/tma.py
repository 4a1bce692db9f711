"""TMA (sm_90), which copies boxes of a tensor between global and shared memory; and tensor maps in a table in global memory.

A map that is a parameter is there when the kernel begins. A map in memory was written by a copy, through another proxy than
TMA's, so that each block acquires it first: `acquire_map`, then a barrier, then `map_at` by any thread (PTX ISA,
``fence.proxy.tensormap``; CUDA programming guide, "Encoding a tensor map", global memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemmkit import emulator
from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.host import current
from gemmkit.lang.memory import SharedType, ViewType, coordinate_count, coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.scalars import assembly, index, plain
from gemmkit.ptx.barriers import all_but, element_address, is_barrier, place
from gemmkit.runtime.compile import PLACEHOLDER

BYTES = 128                            # of a tensor map
WORDS_DTYPE = np.dtype(np.int64)
WORDS = BYTES // WORDS_DTYPE.itemsize  # columns of a table

i8, i16, i32, i64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)


class MapAddressType(types.Type):
    """The address of a tensor map, as TMA takes it."""

    def __init__(self) -> None:
        super().__init__("TensorMapAddress")


nb.kept_as(MapAddressType, lambda ty: i64)


map_address = MapAddressType()


class MapTable:
    """A table of maps in the emulator, which knows the blocks that have acquired each."""

    def __init__(self, maps: Sequence[emulator.copies.EmulatedTensorMap]) -> None:
        self.maps = list(maps)
        self.acquired: set[tuple[int, int]] = set()


def _is_table(table: types.Type, row: types.Type) -> bool:
    return (isinstance(table, ViewType) and table.dtype == WORDS_DTYPE and table.ndim == 2 and table.unit == 1
            and isinstance(row, types.Integer))


def _address(c: Context, b: ir.IRBuilder, table: ViewType, value: ir.Value, ty: types.Type, row: ir.Value) -> Any:
    place = [coordinates_of(c, b, ty, row, table.coordinate)[0], c.get_value_type(table.coordinate)(0)]
    return b.ptrtoint(global_pointer(b, table, proxy(c, b, table, value), [place], i64), i64)


def _type_acquire(context: TypingContext, table: types.Type, row: types.Type) -> Any:
    if not _is_table(table, row):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        text = f"{{ .reg .u64 map; cvta.global.u64 map, $0; fence.proxy.tensormap::generic.acquire.sys [map], {BYTES}; }}"
        assembly(b, text, [], [_address(c, b, table, v[0], row, v[1])], memory=True)

    return signature(types.none, table, row), codegen


@atom(_type_acquire)
def acquire_map(table: Any, row: int) -> None:
    """Let TMA see a map of a table as the copy before the launch wrote it; of this block, after the barrier that follows."""
    table.acquired.add((id(current().block), int(row)))


def _type_map_at(context: TypingContext, table: types.Type, row: types.Type) -> Any:
    if not _is_table(table, row):
        return None
    return signature(map_address, table, row), lambda c, b, s, v: (
        assembly(b, "cvta.global.u64 $0, $1;", [i64], [_address(c, b, table, v[0], row, v[1])], pure=True)[0])


@atom(_type_map_at)
def map_at(table: Any, row: int) -> Any:
    """The ``row``-th map of a table, for `gemmkit.ptx.tma`."""
    if not 0 <= int(row) < len(table.maps):
        raise emulator.barriers.fault(current(), f"map {int(row)} of a table of {len(table.maps)}")
    if (id(current().block), int(row)) not in table.acquired:
        raise emulator.barriers.fault(current(), f"map {int(row)} of a table is used, and this block has not acquired it "
                                       "(acquire_map)")
    return table.maps[int(row)]


# --------------------------------------------------------------------------------------------------
# TMA: the unit that copies boxes of a tensor between global and shared memory by itself (sm_90).
#
# A tensor map (`TensorMapSpec`, `gemmkit.runtime.tensor_maps`) describes the tensor, the box and the swizzle. One
# thread asks for a copy and goes on. A load ends at an mbarrier, which it gives the bytes of the box: all of them, also
# where the box is out of the tensor and zeros are written. Stores are awaited in groups by the thread that asked for
# them.
#
# Device code gets a map as a kernel parameter of type `TensorMapType`. TMA wants its address, which only the assembler
# knows: the code says ``PLACEHOLDER`` and the map's number, and `gemmkit.runtime.compile` puts the parameter's name in.
# Or it takes one of a table (`gemmkit.ptx.tma`).


class TensorMapType(types.Type):
    """A tensor map, passed by value: ``ordinal`` says which of the kernel's maps it is (0, 1, ...)."""

    def __init__(self, ordinal: int):
        self.ordinal = int(ordinal)
        super().__init__(f"TensorMap({self.ordinal})")


@nb.register_model(TensorMapType)
class _TensorMapModel(nb.models.PrimitiveModel):
    """128 bytes as a parameter, nothing as a value: whatever the code does with it, no copy is made of the bytes."""

    def __init__(self, dmm: nb.DataModelManager, fe_type: TensorMapType):
        super().__init__(dmm, fe_type, i8)

    def get_argument_type(self) -> Any:
        return ir.ArrayType(i64, BYTES // 8)

    def as_argument(self, builder: ir.IRBuilder, value: ir.Value) -> Any:
        return ir.Constant(self.get_argument_type(), ir.Undefined)

    def from_argument(self, builder: ir.IRBuilder, value: ir.Value) -> Any:
        return ir.Constant(i8, 0)


def _is_map(ty: types.Type) -> bool:
    return isinstance(ty, (TensorMapType, MapAddressType))


def _map_address(builder: ir.IRBuilder, ty: TensorMapType | MapAddressType, value: ir.Value) -> Any:
    if isinstance(ty, MapAddressType):
        return value
    text = f"{{ .reg .u64 map; mov.b64 map, {PLACEHOLDER}{ty.ordinal}; cvta.param.u64 $0, map; }}"
    return assembly(builder, text, [i64], [], pure=True)[0]


def _type_map_of(context: TypingContext, view: types.Type, number: types.Type, spec: types.Type, axis: types.Type) -> Any:
    if not isinstance(view, ViewType) or not isinstance(number, types.IntegerLiteral):
        return None
    return (signature(TensorMapType(number.literal_value), view, number, spec, axis),
            lambda c, b, s, v: ir.Constant(i8, 0))


@atom(_type_map_of)
def map_of(view: Any, number: int, spec: Any, axis: int) -> Any:
    """The kernel's tensor map ``number``: that of an array contiguous along ``axis``, with this `TensorMapSpec`."""
    return emulator.copies.EmulatedTensorMap.of(view, spec, axis)


def _is_copy(map: types.Type, coordinates: types.Type, pointer: types.Type, position: types.Type) -> bool:
    return (_is_map(map) and isinstance(coordinates, types.BaseTuple)
            and 1 <= coordinate_count(coordinates) <= 5 and isinstance(pointer, SharedType)
            and isinstance(position, types.Integer))


def _box(first: int, rank: int) -> str:
    """The operands of a tensor map's address, at ``$first``, and of the coordinates after it."""
    return f"[${first}, {{{', '.join(f'${first + 1 + n}' for n in range(rank))}}}]"


def _load(im2col: bool = False, multicast: bool = False) -> Any:
    """The typer of a load, which is given offsets in im2col mode, and a mask where it goes into several blocks."""
    def typer(context: TypingContext, map: types.Type, coordinates: types.Type, *given: types.Type) -> Any:
        if len(given) != 4 + im2col + multicast:
            return None
        pointer, position, barriers, n = given[im2col:4 + im2col]
        if not _is_copy(map, coordinates, pointer, position) or not is_barrier(barriers, n):
            return None
        if multicast and not isinstance(given[-1], types.Integer):
            return None
        rank, moved = coordinate_count(coordinates), 0
        if im2col:
            moved = coordinate_count(given[0]) if isinstance(given[0], types.BaseTuple) else 0
            if not (3 <= rank <= 5 and moved == rank - 2):
                return None
        mode, taps = (".im2col", ", {" + ", ".join(f"${rank + 3 + n}" for n in range(moved)) + "}") if moved else ("", "")
        many, last = (".multicast::cluster", f", ${rank + moved + 3}") if multicast else ("", "")
        text = (f"cp.async.bulk.tensor.{rank}d.shared::cluster.global{mode}.mbarrier::complete_tx::bytes{many} [$0], "
                f"{_box(1, rank)}, [${rank + 2}]{taps}{last};")

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            to = v[2 + im2col:]
            operands = [element_address(c, b, pointer, to[0], position, to[1]), _map_address(b, map, v[0]),
                        *coordinates_of(c, b, coordinates, v[1]), element_address(c, b, barriers, to[2], n, to[3])]
            if im2col:
                operands += [b.trunc(offset, i16) for offset in coordinates_of(c, b, given[0], v[2])]
            if multicast:
                operands.append(b.trunc(c.cast(b, to[4], given[-1], index), i16))
            assembly(b, text, [], operands, memory=True)

        return signature(types.none, map, coordinates, *given), codegen

    return typer


@atom(_load())
def tma_load(map: Any, coordinates: tuple, pointer: Any, position: int, barriers: Any, n: int) -> None:
    """Copy the box at ``coordinates`` (1 to 5 numbers, the fastest dimension first) to element ``position`` of ``pointer``.

    The bytes of the whole box are given to barrier ``n`` of ``barriers``; elements out of the tensor are zeros. The first
    coordinate is a multiple of 16 bytes (or the instruction is illegal); coordinates may be negative.
    """
    emulator.copies.load(current(), map, coordinates, place(pointer, position), place(barriers, n), None)


@atom(_load(multicast=True))
def tma_load_multicast(map: Any, coordinates: tuple, pointer: Any, position: int, barriers: Any, n: int,
                       mask: int) -> None:
    """`tma_load` into every block of the cluster whose bit in ``mask`` is set, at the same place and for its own barrier."""
    emulator.copies.load(current(), map, coordinates, place(pointer, position), place(barriers, n), int(mask))


@atom(_load(im2col=True))
def tma_load_im2col(map: Any, coordinates: tuple, offsets: tuple, pointer: Any, position: int, barriers: Any,
                    n: int) -> None:
    """`tma_load` in im2col mode (PTX ISA, "im2col mode"): channels of as many positions as the map's box has, from
    ``coordinates`` (channel, spatial dimensions and image) on, each read ``offsets`` (of the spatial dimensions, the fastest
    first) further. What lies out of the tensor is zeros."""
    emulator.copies.load(current(), map, coordinates, place(pointer, position), place(barriers, n), None, offsets)


@atom(_load(im2col=True, multicast=True))
def tma_load_im2col_multicast(map: Any, coordinates: tuple, offsets: tuple, pointer: Any, position: int, barriers: Any,
                              n: int, mask: int) -> None:
    """`tma_load_im2col` into every block of the cluster whose bit in ``mask`` is set."""
    emulator.copies.load(current(), map, coordinates, place(pointer, position), place(barriers, n), int(mask), offsets)


def _store_by(begin: str, end: str) -> Any:
    def typer(context: TypingContext, map: types.Type, coordinates: types.Type, pointer: types.Type,
              position: types.Type) -> Any:
        if not _is_copy(map, coordinates, pointer, position):
            return None
        rank = coordinate_count(coordinates)
        text = f"{begin}.{rank}d.global.shared::cta{end}.bulk_group {_box(0, rank)}, [${rank + 1}];"

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            operands = [_map_address(b, map, v[0]), *coordinates_of(c, b, coordinates, v[1]),
                        element_address(c, b, pointer, v[2], position, v[3])]
            assembly(b, text, [], operands, memory=True)

        return signature(types.none, map, coordinates, pointer, position), codegen

    return typer


@atom(_store_by("cp.async.bulk.tensor", ""))
def tma_store(map: Any, coordinates: tuple, pointer: Any, position: int) -> None:
    """Copy from element ``position`` of ``pointer`` to the box at ``coordinates``; what is out of the tensor is left out.

    The first coordinate is a multiple of 16 bytes, and none may be negative (or the instruction is illegal). Rows of the
    tensor are a multiple of 16 bytes: TMA clips there alone. The writers of the shared memory call `fence_async`
    first. `tma_commit` closes the group that the copy belongs to.
    """
    thread = current()
    emulator.copies.stores(thread).store(thread, map, coordinates, place(pointer, position))


@atom(_store_by("cp.reduce.async.bulk.tensor", ".add.tile"))
def tma_add(map: Any, coordinates: tuple, pointer: Any, position: int) -> None:
    """`tma_store` that adds float32 to what is there, each element at once for all blocks of the device
    (PTX ISA, ``cp.reduce.async.bulk.tensor``)."""
    thread = current()
    emulator.copies.stores(thread).store(thread, map, coordinates, place(pointer, position), adds=True)


@atom(plain("cp.async.bulk.commit_group;"))
def tma_commit() -> None:
    """Close this thread's group of stores."""
    emulator.copies.stores(current()).commit()


@atom(all_but("cp.async.bulk.wait_group.read"))
def tma_wait_read(pending: int) -> None:
    """Wait until all but the last ``pending`` (a constant) groups of stores have read their shared memory."""
    thread = current()
    emulator.copies.stores(thread).wait(thread, pending, done=False)


@atom(all_but("cp.async.bulk.wait_group"))
def tma_wait(pending: int) -> None:
    """Wait until all but the last ``pending`` (a constant) groups of stores are done."""
    thread = current()
    emulator.copies.stores(thread).wait(thread, pending, done=True)


def _type_prefetch(context: TypingContext, map: types.Type) -> Any:
    if not _is_map(map):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        assembly(b, "prefetch.tensormap [$0];", [], [_map_address(b, map, v[0])], memory=True)

    return signature(types.none, map), codegen


@atom(_type_prefetch)
def tma_prefetch(map: Any) -> None:
    """Have TMA read the map itself, so that the first copy need not wait for it."""
