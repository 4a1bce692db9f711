"""Tensor maps in a table in global memory: for operands of which there are as many as the user has (the layers of an MLP).

A map that is a parameter is there when the kernel begins. A map in memory was written by a copy, through another proxy than
TMA's, so that each block acquires it first: `acquire_map`, then a barrier, then `map_at` by any thread (PTX ISA,
``fence.proxy.tensormap``; CUDA programming guide, "Encoding a tensor map", global memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemmkit import emulator
from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import ViewType, coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import ir, models, register_model, signature, types
from gemmkit.lang.sites import current

BYTES = 128                            # of a tensor map
WORDS_DTYPE = np.dtype(np.int64)
WORDS = BYTES // WORDS_DTYPE.itemsize  # columns of a table

i32, i64 = ir.IntType(32), ir.IntType(64)


class MapAddressType(types.Type):
    """The address of a tensor map, as TMA takes it."""

    def __init__(self) -> None:
        super().__init__("TensorMapAddress")


@register_model(MapAddressType)
class _MapAddressModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: MapAddressType):
        super().__init__(dmm, fe_type, i64)


map_address = MapAddressType()


class MapTable:
    """A table of maps in the emulator, which knows the blocks that have acquired each."""

    def __init__(self, maps: Sequence[emulator.copies.EmulatedTensorMap]) -> None:
        self.maps = list(maps)
        self.acquired: set[tuple[int, int]] = set()


def _is_table(table: Any, row: Any) -> bool:
    return (isinstance(table, ViewType) and table.dtype == WORDS_DTYPE and table.ndim == 2 and table.unit == 1
            and isinstance(row, types.Integer))


def _address(c: Any, b: Any, table: ViewType, value: Any, ty: Any, row: Any) -> Any:
    place = [coordinates_of(c, b, ty, row, table.coordinate)[0], c.get_value_type(table.coordinate)(0)]
    return b.ptrtoint(global_pointer(b, table, proxy(c, b, table, value), [place], i64), i64)


def _type_acquire(context: Any, table: Any, row: Any) -> Any:
    if not _is_table(table, row):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        text = f"{{ .reg .u64 map; cvta.global.u64 map, $0; fence.proxy.tensormap::generic.acquire.sys [map], {BYTES}; }}"
        assembly(b, text, [], [_address(c, b, table, v[0], row, v[1])], memory=True)
        return c.get_dummy_value()

    return signature(types.none, table, row), codegen


@atom(_type_acquire)
def acquire_map(table: Any, row: int) -> None:
    """Let TMA see a map of a table as the copy before the launch wrote it; of this block, after the barrier that follows."""
    table.acquired.add((id(current().block), int(row)))


def _type_map_at(context: Any, table: Any, row: Any) -> Any:
    if not _is_table(table, row):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return assembly(b, "cvta.global.u64 $0, $1;", [i64], [_address(c, b, table, v[0], row, v[1])], pure=True)[0]

    return signature(map_address, table, row), codegen


@atom(_type_map_at)
def map_at(table: Any, row: int) -> Any:
    """The ``row``-th map of a table, for `gemmkit.ptx.tma`."""
    if not 0 <= int(row) < len(table.maps):
        raise emulator.mbarriers.fault(current(), f"map {int(row)} of a table of {len(table.maps)}")
    if (id(current().block), int(row)) not in table.acquired:
        raise emulator.mbarriers.fault(current(), f"map {int(row)} of a table is used, and this block has not acquired it "
                                       "(acquire_map)")
    return table.maps[int(row)]
