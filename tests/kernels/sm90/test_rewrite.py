"""Operands that TMA brings and warps change where they lie, alone or each block of a cluster a part for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.sm90 import rewrite
from gemmkit.kernels.sm90.family import Sm90Spec
from gemmkit.kernels.sm90.mainloop import RegisterMainloop
from gemmkit.kernels.sm90.rewrite import PartRewrite, Rewrite, RewriteProducer, Transpose
from gemmkit.kernels.sm90.routes import StagedRoute, Tma
from gemmkit.layouts import ColMajor, RowMajor, Triangular
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.arrays import describe
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.support.machines import E4M3, on_machines
from tests.support.patches import Seeded
from tests.support.sm90 import F16, F32, mapping, ordered, product

# ==========================================================================================================================
# Operands that TMA brings and the producer's warps change where they lie: turned, or transformed.
#
# The schedules, edges and captured arrays of transforms are tested with the other slots (`test_slots`).

ACROSS = {"RR": (RowMajor, RowMajor), "CR": (ColMajor, RowMajor), "CC": (ColMajor, ColMajor)}


def spec_of(conf: Any, a: np.ndarray, b: np.ndarray) -> Sm90Spec:
    d = np.zeros((a.shape[0], b.shape[1]), conf.global_d_layout.dtype)
    arrays = [describe(ordered(x, layout.stored)) for x, layout in (
        (a, conf.global_a_layout), (b, conf.global_b_layout), (d, conf.global_d_layout))]
    spec = conf.spec(OperandArrays(*arrays, a.shape[0], b.shape[1], a.shape[1]))
    assert isinstance(spec, Sm90Spec)
    return spec


def whole(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    return rng.integers(-2, 3, shape).astype(dtype)


I1 = np.dtype("i1")
TURNED = [("two", F32, "RR", True), ("two", F32, "CR", False), ("two", F32, "CC", False), ("pingpong", F32, "RR", False),
          ("two", I1, "RR", False), ("two", I1, "CR", True), ("pingpong", I1, "CR", False), ("two", E4M3, "RR", False)]


@pytest.mark.kin(4)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("schedule, dtype, orders, transformed", TURNED, ids=lambda x: str(x))
def test_tiles_are_turned(machine: Any, schedule: str, dtype: np.dtype, orders: str, transformed: bool,
                          rng: np.random.Generator) -> None:
    """Operands that the hardware reads along K alone, lying the other way; with edges along M, N and K."""
    columns, transform = 128 // dtype.itemsize, (lambda x: x + 1) if transformed else None
    fields = {} if transform is None else {"transform_global_to_shared_b": Map(transform)}
    stages = 2 if transformed or dtype.itemsize == 1 else 3
    a_kind, b_kind = ACROSS[orders]
    conf = mapping(schedule, WGMMAOp(columns, dtype), a=a_kind, b=b_kind, stages=stages, **fields)
    line = 128 // dtype.itemsize
    m, n, k = 144, columns + 16, stages * line + 32                # one block along K more than stages
    a, b = whole(rng, (m, k), dtype), whole(rng, (k, n), dtype)
    spec = spec_of(conf, a, b)
    by_registers = dtype == F32 and a_kind is ColMajor             # A, which then is not transposed (`across`)
    a_turns = orders[0] == "C" and not by_registers and conf.block_shape.size.M % line == 0
    a_staged = orders[0] == "C" and not by_registers and not a_turns          # by threads, which stage B, too
    assert isinstance(spec.mainloop, RegisterMainloop) == by_registers
    assert any(type(x.route) is Transpose for x in (spec.a, spec.b)) == (a_turns or (orders[1] == "R" and not a_staged))
    changed = b.astype(F32) if transform is None else transform(b.astype(F32))
    assert np.array_equal(product(machine, conf, a, b), a.astype(F32) @ changed)


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("masked", [False, True])
def test_lanes_that_do_not_divide_a_warps_tile(machine: Any, masked: bool, rng: np.random.Generator) -> None:
    """A warp moves 48 lines, 32 and then 16: a thread's registers hold both (drawn with GEMMKIT_SEED=524311433)."""
    kind = (lambda dtype: Triangular(RowMajor(dtype), "lower")) if masked else RowMajor
    conf = mapping("three", a=kind, stages=2, transform_global_to_shared_a=Map(lambda x: x + x),
                   mem_a_warp=Tile(M=3, K=64), mem_a_thread=Tile(M=1, K=4))
    a, b = whole(rng, (200, 200), F16), whole(rng, (200, 24), F16)
    spec = spec_of(conf, a, b)
    assert type(spec.a.route) is Rewrite and spec.a.shares == 0
    given = np.tril(a) if masked else a
    assert np.array_equal(product(machine, conf, a, b), 2 * given.astype(F32) @ b.astype(F32))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("schedule, which", [("two", "b"), ("pingpong", "b"), ("two-2x2", "a"), ("pingpong-1x2", "a"),
                                             ("three", "a")])
def test_two_stages(machine: Any, schedule: str, which: str, rng: np.random.Generator) -> None:
    """Consumers hold one until they have the other. (A alone goes by registers, but not to three consumers nor where blocks share it.)"""
    conf = mapping(schedule, stages=2, **{f"transform_global_to_shared_{which}": Map(lambda x: x + 1)})
    a, b = whole(rng, (208, 200), F16), whole(rng, (200, 40), F16)
    assert isinstance(spec_of(conf, a, b).producer, RewriteProducer)
    one = np.array([which == "a", which == "b"], F32)
    assert np.array_equal(product(machine, conf, a, b), (a.astype(F32) + one[0]) @ (b.astype(F32) + one[1]))


@pytest.mark.kin(4)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("orders", ["RR", "CC"])
@pytest.mark.parametrize("half, unit, transform", [("lower", False, None), ("upper", True, None),
                                                   ("lower", True, lambda x, i, j: x + j % 2)],
                         ids=["lower", "upper unit", "lower transformed"])
def test_triangular_operands_are_masked_where_they_lie(machine: Any, half: str, unit: bool, transform: Any, orders: str,
                                                       rng: np.random.Generator) -> None:
    """The other half holds NaN, and with a unit diagonal the diagonal too."""
    kinds = ACROSS["RR"] if orders == "RR" else ACROSS["CC"]
    fields = {} if transform is None else {"transform_global_to_shared_a": Map(transform)}
    n, columns = 200, 48
    a, b = whole(rng, (n, n), F16), whole(rng, (n, columns), F16)
    triangle = (np.tril if half == "lower" else np.triu)(a.astype(F32), (-1 if half == "lower" else 1) if unit else 0)
    holes = np.tril(np.ones((n, n), bool), -1 if unit else 0) if half == "lower" else np.triu(np.ones((n, n), bool), unit)
    matrix = triangle + np.eye(n, dtype=F32) if unit else triangle
    if transform is not None:
        matrix = matrix + np.indices((n, n))[1] % 2
    conf = mapping("two", a=kinds[0], b=kinds[1], global_a_layout=Triangular(kinds[0](F16), half, unit=unit), **fields)
    a = np.where(holes, a, np.nan).astype(F16)
    spec = spec_of(conf, ordered(a, kinds[0](F16)), b)
    assert type(spec.a.route) is Rewrite
    out = machine.array(np.full((n, columns), np.nan, F32))
    with machine.session():
        gk.matmul(machine.array(ordered(a, kinds[0](F16))), machine.array(ordered(b, kinds[1](F16))), None, conf, out=out)
    assert np.array_equal(machine.numpy(out), matrix @ b.astype(F32))


@pytest.mark.parametrize("columns, turns", [(96, True), (95, False)])
def test_rows_that_tma_cannot_take_are_turned_on_the_way(columns: int, turns: bool) -> None:
    conf = mapping("two", WGMMAOp(32, F32))
    a, b = np.zeros((64, 64), F32), np.zeros((64, columns), F32)
    spec = spec_of(conf, a, b)
    assert type(spec.b.route) is (Transpose if turns else StagedRoute)


def test_both_or_none() -> None:
    """An operand is changed in place only beside one that TMA moves too: the producer has one way at a time."""
    conf = mapping("three", transform_global_to_shared_a=Map(lambda x: x + 1))
    a = np.zeros((64, 64), F16)
    changed = spec_of(conf, a, np.zeros((64, 64), F16))
    assert type(changed.a.route) is Rewrite and type(changed.b.route) is Tma and changed.pipeline.has_raw
    assert isinstance(changed.producer, RewriteProducer)
    beside = spec_of(conf, a, np.zeros((64, 63), F16))
    assert type(beside.a.route) is type(beside.b.route) is StagedRoute


# ==========================================================================================================================
# Operands that a cluster's blocks share and rewrite, each a part for all of them.

MORE = {
    "one-2x1": "b", "pingpong-2x1": "b", "one-1x2": "a", "pingpong-1x2": "a", "two-2x2": "ab", "pingpong-2x2": "ab",
}


def routes(spec: Any) -> str:
    return "".join(name for name, x in (("a", spec.a), ("b", spec.b)) if type(x.route) is PartRewrite)


@pytest.mark.kin(4)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("orders", ACROSS)
@pytest.mark.parametrize("schedule", MORE)
def test_each_block_rewrites_a_part(machine: Any, schedule: str, orders: str, rng: np.random.Generator) -> None:
    """With edges along M, N and K, and coordinates, which tell a part's place."""
    a_kind, b_kind = ACROSS[orders]
    at = Map(lambda x, i, j: x + (i + 2 * j) % 3)
    fields = {f"transform_global_to_shared_{which}": at for which in MORE[schedule]}
    conf = mapping(schedule, WGMMAOp(32), a=a_kind, b=b_kind, **fields)
    m, n, k = 144, 40, 200
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    spec = spec_of(conf, a, b)
    assert routes(spec) == MORE[schedule] and spec.producer.sent_bytes > 0

    def changed(which: str, x: np.ndarray) -> np.ndarray:
        i, j = np.indices(x.shape)
        return x.astype(F32) + ((i + 2 * j) % 3 if which in MORE[schedule] else 0)

    assert np.array_equal(product(machine, conf, a, b), changed("a", a) @ changed("b", b))


@pytest.mark.kin(4)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("b_kind", [RowMajor, ColMajor])
def test_a_by_registers_beside_it(machine: Any, stages: int, b_kind: Any, rng: np.random.Generator) -> None:
    """Table 2's last row: A is transformed by the consumers, B a half by each block; pairs at once, and an epilogue."""
    both = {f"transform_global_to_shared_{x}": Map(lambda x: x + 1) for x in "ab"}
    conf = mapping("two-2x1", a=RowMajor, b=b_kind, stages=stages, **both)
    a, b = whole(rng, (256, 264), F16), whole(rng, (264, 40), F16)
    spec = spec_of(conf, a, b)
    assert isinstance(spec.mainloop, RegisterMainloop) and routes(spec) == "b"
    assert isinstance(spec.producer, RewriteProducer) and spec.producer.teams == (2 if stages == 6 else 1)
    assert np.array_equal(product(machine, conf, a, b), (a + F32.type(1)) @ (b + F32.type(1)))


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("k", [0, 8, 64, 72])
def test_few_stages(machine: Any, k: int, rng: np.random.Generator) -> None:
    conf = mapping("two-2x1", transform_global_to_shared_b=Map(lambda x: x + 1))
    a, b = whole(rng, (264, k), F16), whole(rng, (k, 40), F16)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F32) @ (b.astype(F32) + 1))


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("transform", [None, lambda x: x + x])
def test_a_mask_that_leaves_parts_as_they_are(machine: Any, transform: Any, rng: np.random.Generator) -> None:
    """They are sent, too."""
    fields = {} if transform is None else {"transform_global_to_shared_b": Map(transform)}
    conf = mapping("one-2x1", b=lambda dtype: Triangular(ColMajor(dtype), "lower"), **fields)
    a, b = whole(rng, (150, 136), F16), whole(rng, (136, 136), F16)
    assert routes(spec_of(conf, a, b)) == "b"
    factor = 1 if transform is None else 2
    assert np.array_equal(product(machine, conf, a, np.where(np.tri(136, dtype=bool), b, np.nan).astype(F16)),
                          factor * a.astype(F32) @ np.tril(b.astype(F32)))


def test_words_that_are_not_sent_are_missed(rng: np.random.Generator, seeded: Seeded) -> None:
    """The emulator says at which barrier the block waits for ever."""
    seeded(rewrite, "send", lambda *given: None)
    conf = mapping("one-2x1", transform_global_to_shared_b=Map(lambda x: x + 1))
    a, b = whole(rng, (128, 64), F16), whole(rng, (64, 32), F16)
    out = np.full((128, 32), np.nan, F32)
    with gk.emulate(), pytest.raises(EmulatorError, match="lacks 0 of 65 arrivals and 2048 bytes"):
        gk.matmul(a, b, None, conf, out=out)


def test_what_a_part_refuses(rng: np.random.Generator) -> None:
    """Without a cluster, or along the other axis, a block rewrites its whole tile."""
    at = Map(lambda x: x + 1)
    a, b = whole(rng, (128, 64), F16), whole(rng, (64, 32), F16)
    for schedule, which in (("one", "b"), ("one-2x1", "a"), ("one-1x2", "b")):
        spec = spec_of(mapping(schedule, **{f"transform_global_to_shared_{which}": at}), a, b)
        assert routes(spec) == ""
