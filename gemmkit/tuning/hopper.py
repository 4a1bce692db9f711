"""Default mappings of the warp-specialised kernel, and when it is the one to take."""

from __future__ import annotations

import dataclasses
from typing import Any

from gemmkit.components import with_fields
from gemmkit.config import Config
from gemmkit.epilogues import Epilogue
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.spec import Condition
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts import ArrayLayout, Plain, RowMajor
from gemmkit.operators.algebra import units
from gemmkit.operators.base import Operator
from gemmkit.operators.wgmma import WGMMAOp
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning import algebras
from gemmkit.tuning.copied import Copies
from gemmkit.tuning.hopper_fields import LEAST_STAGES, assumed_spec, can_share, complete
from gemmkit.tuning.mappings import BY_ELEMENTS, LIKELY, MAPPING_FIELDS, PROMOTED, Table, table_by_arrays, table_of
from gemmkit.tuning.model import LINE, Mapping, by_workspace, choose_mapping, smallest, with_rows_exchanged, with_second_pass
from gemmkit.tuning.operators import EIGHT, result_dtype

MOST_STAGES = 8
PROMOTION = 128                        # elements along K after which sums of float8 are added to others in float32


def choice(a: ArrayLayout, b: ArrayLayout, infos: dict[str, ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int,
           int, int], device: DeviceInfo, products: int = 1, c: ArrayLayout | None = None,
           d: ArrayLayout | None = None) -> tuple[Operator, dict[str, Any]]:
    """The operator for a product of 16-bit floats in these layouts (``c`` and ``d`` where they are given), and the fields of
    its mapping."""
    of_a, of_b = infos["a"], infos["b"]
    table = table_for(a, b, of_a, of_b, fields, sizes)
    always = getattr(fields.get("condition"), "is_always", True)
    supply = table.supply_of(of_a, of_b)
    listed = table.mappings
    if table is BY_ELEMENTS and isinstance(a, Plain) and isinstance(b, Plain) and of_a is not None and of_b is not None:
        copies = Copies.of(a, b, of_a, of_b, infos["out"], sizes[1])
        listed = tuple(one for one in copies.hoppers(sizes, device, products) if always or one.splits == 1)
    elif always:
        listed += by_workspace(sizes, device, products, table.workspace, table.least_shared)
        listed += table.aligned if supply is None else table.clustered
    listed = can_share(listed, a, b)
    if not always:
        listed = _in_blocks(listed, fields["condition"], a.dtype.itemsize)
    reads_late = _reads_late(a, b, c, d, infos, fields, sizes)
    if reads_late:
        # What a finishing consumer reads by way of L1 makes the one that multiplies wait: 7 % of its time, measured.
        listed = tuple(dataclasses.replace(one, step=1.07 * one.step) if one.schedule == "pingpong" else one
                       for one in listed)
    epilogue = fields.get("epilogue")
    if isinstance(epilogue, Epilogue) and epilogue.is_last and epilogue.reduces:
        together = (with_rows_exchanged(one, sizes) for one in listed) if _has_short_states(d) and always else ()
        listed = tuple(with_second_pass(one, sizes, products, a.dtype.itemsize) for one in listed)
        listed += can_share(filter(None, together), a, b)
    mapping = choose_mapping(sizes, device, mappings=listed, supply=supply, is_tall=reads_late, products=products)
    if table.orders_few:
        mapping = mapping.ordered(sizes, products)
    if table.halves_stages and sizes[2] * a.dtype.itemsize <= LINE // 2:
        mapping = dataclasses.replace(mapping, depth=LINE // 2)
    return WGMMAOp(mapping.N, dtype=a.dtype), mapping.fields


def narrow(a: ArrayLayout, b: ArrayLayout, infos: dict[str, ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int,
           int, int], device: DeviceInfo, products: int, promote: bool = True) -> WGMMAOp | None:
    """The operator of a product of 8-bit operands, or of float32 as tf32, as wide as the mapping with the least modelled
    time; None where Hopper's kernel is not the one to take. Sums of float8 are promoted to float32 unless ``promote`` is
    False. Raises ConfigError where the kernel does not take what is given."""
    epilogue = fields.get("epilogue")
    stores_blocks = isinstance(epilogue, Epilogue) and epilogue.stores_blocks
    if device.arch[0] != 9 or stores_blocks or set(fields) & MAPPING_FIELDS:
        return None
    is_float = a.dtype in EIGHT
    made = WGMMAOp(LIKELY.N, dtype=a.dtype, b_dtype=b.dtype, promote=PROMOTION if is_float and promote else 0)
    of_a, of_b = infos["a"], infos["b"]
    given = dict(fields, operator=made, global_a_layout=a, global_b_layout=b)
    arrays = None if of_a is None or of_b is None else Arrays(of_a, of_b, None, *sizes)
    listed = PROMOTED if made.promote else _table(given, arrays).mappings
    mapping = choose_mapping(sizes, device, itemsize=a.dtype.itemsize, mappings=listed, products=products)
    return dataclasses.replace(made, N=mapping.N)


def _in_blocks(listed: tuple[Mapping, ...], condition: Condition, itemsize: int) -> tuple[Mapping, ...]:
    """The mappings of whose tiles a condition can be asked (they divide the blocks of a mask); all where it can of none: the
    configuration's rule then says why."""
    def is_asked(one: Mapping) -> bool:
        try:
            condition.check_tiles(Tile(M=one.M, N=one.N, K=one.depth // itemsize))
        except ConfigError:
            return False
        return True

    return tuple(filter(is_asked, listed)) or listed


def _reads_late(a: ArrayLayout, b: ArrayLayout, c: ArrayLayout | None, d: ArrayLayout | None, infos: dict[str,
                ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int, int, int]) -> bool:
    """Whether consumers read C, or as many elements for the epilogue, from global memory at a tile's end: what does not come
    to D's subtiles ahead of time, where there is room for one array (`gemmkit.kernels.sm90.ahead`)."""
    epilogue, of_c, out = fields.get("epilogue"), infos.get("c"), infos.get("out")
    if isinstance(epilogue, Epilogue) and epilogue.reads_tiles:
        if of_c is not None or len(epilogue.alongside()) != 1:
            return True
    elif of_c is None:
        return False
    operator = WGMMAOp(LIKELY.N, dtype=a.dtype)
    given = dict(fields, operator=operator, global_a_layout=a, global_b_layout=b)
    if c is not None:
        given["global_c_layout"] = c
    given.setdefault("global_d_layout", d or RowMajor(result_dtype(a.dtype, b.dtype, c, operator)))
    if out is None:                                            # one that the call makes
        M, N, _ = sizes
        out = ArrayInfo(0, (M, N), (N, 1), given["global_d_layout"].dtype, -1, False, "numpy")
    spec = assumed_spec(given, LIKELY, Arrays(infos["a"], infos["b"], out, *sizes, of_c))
    return not spec.store.reads_ahead


def _has_short_states(d: Any) -> bool:
    """Whether rows of D are normalised in float32."""
    return d is None or (d.dtype.itemsize < 8 and d.folds == 1)


_OF_A_MAPPING = {"block_shape", "compute_warp", "warps_per_block", "schedule", "cluster", "stages", "shared_d_layout"}


def fill(values: dict[str, Any], sizes: tuple[int, int, int] | None, device: DeviceInfo,
         products: int = 1) -> tuple[Config, int] | None:
    """Complete the mapping of a Config for WGMMAOp in place; layouts are given. Where that made the configuration, to ask
    what it takes: it, and the bytes of shared memory that it needs at most."""
    whole: Any = values["operator"]
    operator = units(whole)
    is_algebra = whole is not operator
    streams = isinstance(values.get("splits"), StreamK)
    shares = not (is_algebra or streams) and operator.accumulator.itemsize == 4 and not set(values) & _OF_A_MAPPING
    if set(LIKELY.fields) <= set(values):
        return _fit(values, LIKELY, device, sizes)             # of which nothing is left to take
    table = (algebras.mappings(whole, values) if is_algebra else PROMOTED if operator.promote
             else _table(values).mappings)
    listed = _agreeing([one for one in table if shares or one.splits in (1, values.get("splits"))], values)
    refused: ConfigError | None = None
    while listed:
        mapping = choose_mapping(sizes, device, operator.N, operator.dtype.itemsize, tuple(listed), products=products)
        completed = dict(values)
        completed.setdefault("splits", mapping.splits if shares else 1)
        try:
            made = _fit(completed, mapping, device, sizes)
        except ConfigError as error:                           # with what is given, that mapping is none
            refused = refused or error
            others = [one for one in listed if one.N == operator.N and one is not mapping]
            listed = others or [one for one in (smallest(operator.N),) if mapping != one]
            continue
        values.update(completed)
        return made
    assert refused is not None
    raise refused


def _agreeing(listed: list[Mapping], values: dict[str, Any]) -> list[Mapping]:
    """Those of the mappings that have what is given of one; where none has, all."""
    for name in ("schedule", "splits", "warps_per_block"):
        if name in values:
            listed = [one for one in listed if one.fields[name] == values[name]] or listed
    return listed


def _fit(values: dict[str, Any], mapping: Mapping, device: DeviceInfo,
         sizes: tuple[int, int, int] | None) -> tuple[Config, int] | None:
    """A mapping's fields and those that follow from them, with as many stages as fit beside what else the kernel keeps in
    shared memory: the kernel itself says how much that is. Raises ConfigError where it does not take them."""
    complete(values, mapping)
    if "stages" in values:
        return None
    least = Config(**values, stages=LEAST_STAGES)
    spec: Any = least.spec()
    if spec.shared_bytes > device.shared_memory_per_block:
        least.check_device(device)                             # says so
    more = (device.shared_memory_per_block - spec.shared_bytes - spec.row_bytes(sizes)) // spec.bytes_per_stage
    more = max(0, min(MOST_STAGES - LEAST_STAGES, more))
    values["stages"] = LEAST_STAGES + more
    return with_fields(least, {"stages": values["stages"]}), spec.shared_bytes + more * spec.bytes_per_stage


# -- what the kernel is asked -----------------------------------------------------------------------------------------

def table_for(a: ArrayLayout, b: ArrayLayout, of_a: ArrayInfo | None, of_b: ArrayInfo | None, fields: dict[str, Any],
              sizes: tuple[int, int, int]) -> Table:
    """The mappings to choose among for 16-bit operands in these layouts and arrays; ``fields`` are the caller's."""
    given = dict(fields, operator=WGMMAOp(LIKELY.N, dtype=a.dtype), global_a_layout=a, global_b_layout=b)
    return _table(given, None if of_a is None or of_b is None else Arrays(of_a, of_b, None, *sizes))


def _table(values: dict[str, Any], arrays: Arrays | None = None) -> Table:
    """The mappings to choose among, by the routes that operands take in the kernel on a likely mapping. Without ``arrays``
    all suit TMA."""
    return table_by_arrays(values, arrays) or table_of(assumed_spec(values, LIKELY, arrays), arrays)


__all__ = ["choice", "fill", "narrow", "table_for"]
