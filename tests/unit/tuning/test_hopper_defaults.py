"""What `get_config` takes for Hopper's kernel where little is given: the routes and the room are the kernel's own answers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, operators, transforms
from gemmkit.kernels.collectives.operand import Arrays
from gemmkit.kernels.config import Config
from gemmkit.kernels.sm90.mainloop import SharedMainloop
from gemmkit.kernels.sm90.tma import Tma
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import H100
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile
from gemmkit.tuning import choose, sm90
from gemmkit.tuning.sm90 import MOST_STAGES, _table, assumed_spec
from tests.support.machines import E4M3, whole
from tests.support.user_layouts import Packed

F16 = np.dtype("f2")
ORDERS = {"row": layouts.RowMajor, "column": layouts.ColMajor}
DOUBLED = transforms.Elementwise(lambda x: x * 2)
OPERATORS = {"f16": operators.WGMMAOp, "tf32": lambda N: operators.WGMMAOp(N, "float32"),
             "int8": lambda N: operators.WGMMAOp(N, "int8"), "e4m3": lambda N: operators.WGMMAOp(N, E4M3)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("a,b", [(a, b) for a in ORDERS for b in ORDERS])
def test_stages_fill_shared_memory(kind: str, a: str, b: str) -> None:
    """D, like A, may lie along its columns, in the accumulator's dtype: its subtiles then take twice the room. (Counted by
    a rule of the tuner's own, they did not fit: every default for such an A was refused.)"""
    for N, given in itertools.product((48, 64, 128, 256), ({}, dict(splits=2), dict(transform_global_to_shared_b=DOUBLED))):
        operator = OPERATORS[kind](N)
        if given.get("splits") and N == 48:
            continue
        config = gk.get_config(operator=operator, global_a_layout=ORDERS[a](operator.dtype), device=H100,
                               global_b_layout=ORDERS[b](operator.dtype), **given)
        spec: Any = config.spec()
        left = H100.shared_memory_per_block - spec.shared_bytes
        assert left >= 0
        assert config.stages == MOST_STAGES or left < spec.bytes_per_stage


def test_a_config_with_little_given_computes(rng: np.random.Generator) -> None:
    a, b = whole(rng, (70, 33), F16), whole(rng, (33, 130), F16)
    conf = gk.get_config(operator=operators.WGMMAOp(64), global_a_layout=layouts.ColMajor(F16), device=H100,
                         global_b_layout=layouts.RowMajor(F16), block_shape=Tile(M=64, N=64, K=64))
    out = np.full((130, 70), np.nan, np.float32).T
    with gk.emulate():
        gk.matmul(np.asfortranarray(a), b, conf=conf, out=out)
    assert np.array_equal(out, a.astype(np.float64) @ b)


ROW, COLUMN = layouts.RowMajor(F16), layouts.ColMajor(F16)
TRANSFORM_A, TRANSFORM_B = dict(transform_global_to_shared_a=DOUBLED), dict(transform_global_to_shared_b=DOUBLED)


E4M3_ROW, E4M3_COLUMN = layouts.RowMajor(E4M3), layouts.ColMajor(E4M3)
ROUTES: dict[str, tuple[str, Any, Any, dict[str, Any], sm90.Table]] = {
    "as they lie": ("f16", ROW, ROW, {}, sm90.BY_TMA),
    "A along M": ("f16", COLUMN, ROW, {}, sm90.BY_TMA),
    "A transformed": ("f16", ROW, ROW, TRANSFORM_A, sm90.BY_REGISTERS),
    "A transformed in clusters": ("f16", ROW, ROW, dict(TRANSFORM_A, cluster=Tile(M=2, N=1)), sm90.BY_REGISTERS),
    "A transformed and shared": ("f16", ROW, ROW, dict(TRANSFORM_A, cluster=Tile(M=1, N=2)), sm90.BY_REWRITES),
    "B transformed": ("f16", ROW, ROW, TRANSFORM_B, sm90.BY_REWRITES),
    "both transformed": ("f16", ROW, ROW, TRANSFORM_A | TRANSFORM_B, sm90.BY_REWRITES),
    "a layout of the user's": ("f16", Packed(F16), ROW, {}, sm90.BY_THREADS),
    "a triangle": ("f16", layouts.Triangular(ROW), ROW, {}, sm90.BY_THREADS),
    "bytes along K": ("e4m3", E4M3_ROW, E4M3_COLUMN, {}, sm90.BY_TMA),
    "bytes across K": ("e4m3", E4M3_ROW, E4M3_ROW, {}, sm90.BY_TRANSPOSES),
    # A would be transformed in registers, were B not transposed in place.
    "bytes across K, A transformed": ("e4m3", E4M3_ROW, E4M3_ROW, TRANSFORM_A, sm90.BY_REWRITES),
}


@pytest.mark.parametrize("name", ROUTES)
def test_mappings_are_those_of_the_routes(name: str) -> None:
    operator, a, b, fields, table = ROUTES[name]
    values = dict(fields, operator=OPERATORS[operator](128), global_a_layout=a, global_b_layout=b)
    assert _table(values) is table


# -- decided without asking the kernel ------------------------------------------------------------------------------------

def drawn_operand(random: np.random.Generator, rows: int, columns: int) -> tuple[Any, ArrayInfo]:
    """A matrix of 1, 2 or 4 bytes an element, in either order, whose rows begin anywhere."""
    dtype = np.dtype(random.choice(["int8", "float16", "float32"]))
    order = str(random.choice(list(ORDERS)))
    length, lines = (columns, rows) if order == "row" else (rows, columns)
    apart = length + int(random.choice([0, 0, 0, 1, 2, 16]))
    strides = (apart, 1) if order == "row" else (1, apart)
    pointer = 4096 + int(random.choice([0, 0, 0, 0, 4, 8]))
    return ORDERS[order](dtype), ArrayInfo(pointer, (rows, columns), strides, dtype, 0, False, "cai")


def test_tables_by_arrays_are_those_of_the_routes() -> None:
    """Where arrays alone tell a table, the kernel on a likely mapping says the same: TMA brings both operands as they are,
    or one of the arrays cannot be brought by TMA at all."""
    random, told = np.random.default_rng(42), set()
    for _ in range(200):
        M, N, K = (int(random.choice([1, 32, 64, 128, 130])) for _ in range(3))
        (a, of_a), (b, of_b) = drawn_operand(random, M, K), drawn_operand(random, K, N)
        if a.dtype != b.dtype:
            continue
        values = dict(operator=operators.WGMMAOp(128, a.dtype), global_a_layout=a, global_b_layout=b)
        if random.random() < 0.3:
            values["transform_global_to_shared_a"] = DOUBLED
        arrays = Arrays(of_a, of_b, None, M, N, K)
        found = sm90.table_by_arrays(values, arrays)
        spec: Any = assumed_spec(values, sm90.LIKELY, arrays)
        by_tma = type(spec.a.route) is type(spec.b.route) is Tma and type(spec.mainloop) is SharedMainloop
        refused = any(why_not(info, layout.axis) is not None for layout, info in ((a, of_a), (b, of_b)))
        assert found is (sm90.BY_ELEMENTS if refused else sm90.BY_TMA if by_tma else None), (values, of_a, of_b)
        told.add(id(found))
    assert len(told) == 3


@pytest.mark.parametrize("kind", OPERATORS)
def test_shared_memory_is_what_the_kernel_asks_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default's stages are counted from those of the least: the bytes are those of its own specialisation."""
    found = []

    def check_device(self: Config, device: Any, needed: int | None = None) -> None:
        found.append((needed, self.spec().shared_bytes))

    monkeypatch.setattr(Config, "check_device", check_device)
    for N, given in itertools.product((48, 64, 128, 256), ({}, dict(splits=3), dict(transform_global_to_shared_b=DOUBLED))):
        operator = OPERATORS[kind](N)
        gk.get_config(operator=operator, global_a_layout=ROW if kind == "f16" else layouts.RowMajor(operator.dtype),
                      global_b_layout=layouts.ColMajor(operator.dtype), device=H100, **given)
    assert len(found) == 12 and all(needed == asked for needed, asked in found)


def test_configurations_that_are_known_are_those_of_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of plain operands on a table's tiles is what is made for each size."""
    def chosen() -> list[str]:
        found = []
        for dtype, orders, (M, N, K) in itertools.product(
                ("float16", "float32", "float64"), ("nn", "tn", "nt"),
                ((500, 500, 500), (512, 512, 512), (520, 512, 4096), (64, 4096, 64), (33, 7, 2500))):
            a = np.zeros((M, K) if orders[0] == "n" else (K, M), dtype)
            b = np.zeros((K, N) if orders[1] == "n" else (N, K), dtype)
            a, b = a if orders[0] == "n" else a.T, b if orders[1] == "n" else b.T
            of, = recorded(lambda a=a, b=b: gk.matmul(a, b), H100, zeros=False)                        # type: ignore[misc]
            found.append(repr(of.problem.config))
        return found

    known = chosen()
    monkeypatch.setattr(choose, "CONSTANT", set())
    assert chosen() == known
