"""Operands that the copy engine brings and the producer's warps change where they lie: turned, or transformed.

The schedules, edges and captured arrays of transforms are tested with the other slots (`test_warp_specialised_slots`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.engines import engines
from gemmkit.kernels.pipeline import PipelineSpec
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.arrays import describe
from gemmkit.transforms import Elementwise
from tests.hopper import F16, F32, mapping, ordered, product
from tests.machines import E4M3, on_machines

ACROSS = {"RR": (RowMajor, RowMajor), "CR": (ColMajor, RowMajor), "CC": (ColMajor, ColMajor)}


def spec_of(conf: Any, a: np.ndarray, b: np.ndarray) -> PipelineSpec:
    d = np.zeros((a.shape[0], b.shape[1]), conf.global_d_layout.dtype)
    arrays = [describe(ordered(x, layout)) for x, layout in (
        (a, conf.global_a_layout), (b, conf.global_b_layout), (d, conf.global_d_layout))]
    spec = conf.spec(engines=engines(conf, *arrays))
    assert isinstance(spec, PipelineSpec)
    return spec


def whole(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    return rng.integers(-2, 3, shape).astype(dtype)


I1 = np.dtype("i1")
TURNED = [("two", F32, "RR", True), ("two", F32, "CR", False), ("two", F32, "CC", False), ("pingpong", F32, "RR", False),
          ("two", I1, "RR", False), ("two", I1, "CR", True), ("pingpong", I1, "CR", False), ("two", E4M3, "RR", False)]


@on_machines
@pytest.mark.parametrize("schedule, dtype, orders, transformed", TURNED, ids=lambda x: str(x))
def test_tiles_are_turned(machine: Any, schedule: str, dtype: np.dtype, orders: str, transformed: bool,
                          rng: np.random.Generator) -> None:
    """Operands that the hardware reads along K alone, lying the other way; with edges along M, N and K."""
    columns, transform = 128 // dtype.itemsize, (lambda x: x + 1) if transformed else None
    fields = {} if transform is None else {"transform_global_to_shared_b": Elementwise(transform)}
    a_kind, b_kind = ACROSS[orders]
    conf = mapping(schedule, WGMMAOp(columns, dtype), a=a_kind, b=b_kind, **fields)
    line = 128 // dtype.itemsize
    m, n, k = 144, columns + 16, 4 * line + 32
    a, b = whole(rng, (m, k), dtype), whole(rng, (k, n), dtype)
    spec = spec_of(conf, a, b)
    assert spec.is_turning == (orders[0] == "R" or conf.block_shape.size.M % line == 0)
    changed = b.astype(F32) if transform is None else transform(b.astype(F32))
    assert np.array_equal(product(machine, conf, a, b), a.astype(F32) @ changed)


@pytest.mark.parametrize("columns, turns", [(96, True), (95, False)])
def test_rows_that_the_engine_cannot_take_are_turned_on_the_way(columns: int, turns: bool) -> None:
    conf = mapping("two", WGMMAOp(32, F32))
    a, b = np.zeros((64, 64), F32), np.zeros((64, columns), F32)
    spec = spec_of(conf, a, b)
    assert (spec.b_engine, spec.b_turns, spec.is_working) == (turns, turns, True)


def test_both_or_none() -> None:
    """An operand is changed in place only beside one that the engine moves too: the producer has one way at a time."""
    conf = mapping("two", transform_global_to_shared_a=Elementwise(lambda x: x + 1))
    a = np.zeros((64, 64), F16)
    changed = spec_of(conf, a, np.zeros((64, 64), F16))
    assert (changed.a_engine, changed.a_changes, changed.landed_offset < changed.shared_bytes) == (True, True, True)
    beside = spec_of(conf, a, np.zeros((64, 63), F16))
    assert (beside.a_engine, beside.a_changes, beside.b_engine) == (False, False, False)
