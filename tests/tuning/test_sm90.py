"""What is chosen for Hopper's kernel where little is given, and the model that chooses: its times are those that were
measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, operators, transforms
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.collectives.scheduler import Hilbert
from gemmkit.kernels.config import Config
from gemmkit.kernels.sm90.mainloop import SharedMainloop
from gemmkit.kernels.sm90.routes import Tma
from gemmkit.layouts import RowMajor
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import H100
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile
from gemmkit.tuning import choose, sm90
from gemmkit.tuning.candidates import EXTRA, candidates
from gemmkit.tuning.model import UNALIGNED_LINES, Asked, CostedTile, fastest, streaming
from gemmkit.tuning.sm90 import (
    ALIGNED,
    BY_CP_ASYNC,
    CLUSTERED,
    LIKELY,
    MAPPINGS,
    MOST_STAGES,
    _table,
    assumed_spec,
    can_share,
)
from tests.support.machines import E4M3, whole
from tests.support.patches import Seeded
from tests.support.user_layouts import Packed

# ==========================================================================================================================
# What `get_config` takes for Hopper's kernel where little is given: the routes and the room are the kernel's own answers.

F16 = np.dtype("f2")
ORDERS = {"row": layouts.RowMajor, "column": layouts.ColMajor}
DOUBLED = transforms.Map(lambda x: x * 2)
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
ROUTES: dict[str, tuple[str, Any, Any, dict[str, Any], sm90.MappingTable]] = {
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
        arrays = OperandArrays(of_a, of_b, None, M, N, K)
        found = sm90.table_by_arrays(values, arrays)
        spec: Any = assumed_spec(values, sm90.LIKELY, arrays)
        by_tma = type(spec.a.route) is type(spec.b.route) is Tma and type(spec.mainloop) is SharedMainloop
        refused = any(why_not(info, layout.axis) is not None for layout, info in ((a, of_a), (b, of_b)))
        assert found is (sm90.BY_ELEMENTS if refused else sm90.BY_TMA if by_tma else None), (values, of_a, of_b)
        told.add(id(found))
    assert len(told) == 3


@pytest.mark.parametrize("kind", OPERATORS)
def test_shared_memory_is_what_the_kernel_asks_for(kind: str, replaced: Seeded) -> None:
    """A default's stages are counted from those of the least: the bytes are those of its own specialisation."""
    found = []

    def check_device(self: Config, device: Any, needed: int | None = None) -> None:
        found.append((needed, self.spec().shared_bytes))

    replaced(Config, "check_device", check_device)
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


# ==========================================================================================================================
# The model of Hopper's kernel where rows begin between lines of the L2: its times are those that were measured.

RESULTS = Path(__file__).parents[2] / "tests/data"
GIGAHERTZ = 1.47                       # the card's clock at its power limit
COSTS = {(one.M, one.N, one.schedule): one for one in (*MAPPINGS, *EXTRA, LIKELY)}


def measured() -> list[tuple[tuple[int, int, int], CostedTile, float]]:
    """(sizes, mapping, microseconds) on an H200."""
    def costs(m: Any, n: Any, schedule: str, cluster: tuple[int, int]) -> CostedTile:
        one = COSTS[int(m), int(n), schedule]
        return dataclasses.replace(one, cluster=cluster)

    found = []
    clusters = json.loads((RESULTS / "clusters.json").read_text())
    for key in ("with 33 clusters of four", "with 32 clusters of four"):
        for row in clusters[key]:
            m, n, schedule, a, b = re.fullmatch(r"(\d+)x(\d+)([cp])-(\d)x(\d)", row["name"]).groups()       # type: ignore[union-attr]
            if row["size"] == 5000 and (a, b) != ("2", "2"):                   # of which 30 are resident, and no more
                schedule = {"c": "cooperative", "p": "pingpong"}[schedule]
                found.append(((5000,) * 3, costs(m, n, schedule, (int(a), int(b))), row["us"]))
    for row in json.loads((RESULTS / "unaligned.json").read_text())["rows"]:
        words = re.fullmatch(r"warp_specialised (\d+)x(\d+)x64, (\w+), \d warps,(?: clusters of (\d)x(\d),)? groups of 8", row["mapping"])
        if words and row["m"] % 64:
            m, n, schedule, a, b = words.groups(default="1")
            found.append(((row["m"], row["n"], row["k"]), costs(m, n, schedule, (int(a), int(b))), row["us"]))
    return found


def test_times_are_those_that_were_measured() -> None:
    rows = measured()
    off = [math.log(mapping.cycles(sizes, H100, 2, UNALIGNED_LINES, 1) / GIGAHERTZ / 1e3 / us) for sizes, mapping, us in rows]
    assert len(rows) == 34
    assert max(map(abs, off)) < 0.08 and math.sqrt(sum(x * x for x in off) / len(off)) < 0.04


def test_unaligned_rows_take_clusters() -> None:
    """5000^3 in clusters of 2x2: 0.93 of cuBLAS, where a tile alone reaches 0.66 (`clusters.json`)."""
    for size, cluster in ((5000, (2, 2)), (4096, (1, 1))):
        supply = UNALIGNED_LINES if size % 64 else None
        found = fastest((size,) * 3, H100, mappings=MAPPINGS + CLUSTERED * (supply is not None), supply=supply)
        assert found.cluster == cluster


@pytest.mark.parametrize("name", ["aligned", "unaligned", "structured", "odd"])
def test_products_take_clusters_where_they_may(name: str) -> None:
    size = {"aligned": 3072, "odd": 3001}.get(name, 3000)
    a: Any = np.empty((size, size), np.float16)
    *_, found = recorded(lambda: gk.matmul(gk.layouts.TriangularMatrix(a) if name == "structured" else a, a), H100, zeros=False)
    config = found.problem.config
    assert config.kernel == "warp_specialised"
    assert (config.cluster.count > 1) == (name == "unaligned"), config.cluster


@pytest.mark.parametrize(("sizes", "orders", "block", "cluster"), [
    ((1216, 406, 1544), "nt", (128, 64, 64), (2, 2)), ((224, 7312, 7560), "tt", (128, 128, 64), (2, 2)),
    ((544, 2112, 3738), "tn", (128, 128, 64), (1, 2)), ((192, 192, 321), "tn", (64, 32, 128), (1, 1)),
    ((56, 64, 64), "nn", (64, 32, 64), (1, 1)),
    ((1536, 1536, 1536), "nn", (192, 96, 64), (1, 1)), ((1152, 1152, 1152), "nn", (64, 192, 64), (1, 1)),
    ((768, 768, 768), "tn", (64, 96, 64), (1, 1)), ((3072, 3072, 3072), "nn", (128, 192, 64), (1, 1)),
    ((4096, 4096, 4096), "nt", (128, 256, 64), (1, 1)), ((8192, 8192, 8192), "nt", (128, 192, 64), (1, 1)),
    ((16384, 16384, 16384), "tn", (128, 192, 64), (1, 1)), ((3000, 3000, 3000), "nt", (192, 192, 64), (1, 2)),
    ((10000, 128, 10000), "nn", (192, 64, 64), (1, 2)),
    ((33, 64, 2504), "nt", (64, 128, 64), (1, 1)), ((90, 416, 592), "nt", (64, 32, 128), (1, 1))])
def test_what_was_the_fastest_is_chosen(sizes: tuple[int, int, int], orders: str, block: tuple[int, ...],
                                        cluster: tuple[int, int]) -> None:
    """Products of `choice_before.json` of which the default was not, or must stay, the fastest."""
    M, N, K = sizes
    a, b = (np.empty(shape if order == "n" else shape[::-1], np.float16) for shape, order in zip(((M, K), (K, N)), orders))
    found, = recorded(lambda: gk.matmul(a if orders[0] == "n" else a.T, b if orders[1] == "n" else b.T), H100, zeros=False)
    config = found.problem.config
    assert (config.block_shape.extents, config.cluster.extents) == (block, cluster)


@pytest.mark.parametrize(("sizes", "order", "columns"), [
    ((8192, 8192, 8192), "C", 128), ((8192, 14336, 4096), "C", 128), ((4096, 14336, 4096), "C", 128), ((4096, 4096, 4096), "C", 128),
    ((2048, 2048, 2048), "C", 128), ((16384, 1024, 4096), "C", 128), ((8192, 8192, 8192), "F", 192), ((4096, 14336, 4096), "F", 128),
    ((4096, 4096, 4096), "F", 128), ((2048, 2048, 2048), "F", 128), ((16384, 1024, 4096), "F", 128)])
def test_braids_of_two_take_what_was_the_fastest(sizes: tuple[int, int, int], order: Any, columns: int) -> None:
    """On an H200 within 4 %, and on an H100 never the tile of 192 columns, half of which ends within a line of the L2 (5.6 ms in place
    of 3.6 at 8192^3). Weights that lie along K, as PyTorch has them, may take it."""
    M, N, K = sizes
    x, w, v = np.empty((M, K), np.float16), *(np.empty((K, N), np.float16, order) for _ in range(2))
    found, = recorded(lambda: gk.glu(x, w, v), H100, zeros=False)
    config = found.problem.config
    assert config.block_shape.extents == (128, columns, 64) and config.schedule == "pingpong"


@pytest.mark.parametrize(("sizes", "is_few"), [((56, 64, 64), True), ((5824, 64, 160), True), ((4096, 4096, 64), False)])
def test_few_tiles_take_the_order_that_needs_no_division(sizes: tuple[int, int, int], is_few: bool) -> None:
    M, N, K = sizes
    found, = recorded(lambda: gk.matmul(np.empty((M, K), np.float16), np.empty((K, N), np.float16)), H100, zeros=False)
    assert isinstance(found.problem.config.order, Hilbert) == is_few


def test_an_aligned_operand_is_fetched_at_its_own_rate() -> None:
    """Where A alone is unaligned, to share A saves more than to share B."""
    supply = type(UNALIGNED_LINES)(UNALIGNED_LINES.bytes, UNALIGNED_LINES.order, a=True, b=False)
    times = {cluster: CostedTile(128, 128, "pingpong", 8, cluster, 532, 1200, 2000).cycles((5000,) * 3, H100, 2, supply, 1)
             for cluster in ((1, 1), (2, 1), (1, 2))}
    assert times[1, 2] < times[2, 1] < times[1, 1]


def unaligned_products(count: int) -> Iterator[tuple[tuple[int, int, int], str]]:
    """Products whose rows begin at multiples of 16 bytes, the most of them between lines of the L2."""
    draw = random.Random(41)
    for _ in range(count):
        yield tuple(round(2 ** draw.uniform(4, 12)) // 8 * 8 for _ in range(3)), draw.choice(("nn", "nt", "tn", "tt"))     # type: ignore[misc]


@pytest.mark.parametrize(("sizes", "orders"), [((128, 3080, 1000), "tn"), ((2384, 176, 1656), "tn"), ((3512, 256, 3384), "tn"),
                                              ((3496, 48, 3336), "nn"), *unaligned_products(200)])
def test_what_is_chosen_is_legal(sizes: tuple[int, int, int], orders: str) -> None:
    """The blocks of a cluster may have no part each of an operand that they share: 64 columns of a row-major B are one panel."""
    M, N, K = sizes
    a = np.empty((M, K), np.float16) if orders[0] == "n" else np.empty((K, M), np.float16).T
    b = np.empty((K, N), np.float16) if orders[1] == "n" else np.empty((N, K), np.float16).T
    found, = recorded(lambda: gk.matmul(a, b), H100, zeros=False)
    assert found.problem.config.kernel in ("warp_specialised", "multistage")


def mapping_of(sizes: tuple[int, int, int], dtype: Any = "f4", orders: str = "nt", **given: Any) -> tuple:
    M, N, K = sizes
    a = np.empty((M, K), np.float16) if orders[0] == "n" else np.empty((K, M), np.float16).T
    b = np.empty((K, N), np.float16) if orders[1] == "n" else np.empty((N, K), np.float16).T
    c = np.empty((M, N), dtype) if given.pop("c", False) else None
    (found,) = recorded(lambda: gk.matmul(a, b, c, out=np.empty((M, N), dtype), **given), H100, zeros=False)
    config = found.problem.config
    return config.block_shape.extents[:2], config.schedule, config.splits


@pytest.mark.parametrize(("sizes", "dtype", "orders", "wanted"), [
    ((64, 64, 512), "f4", "nt", ((64, 32), 1)), ((64, 64, 1024), "f4", "nt", ((64, 32), 4)), ((64, 64, 1024), "f2", "nt", ((64, 32), 1)),
    ((64, 64, 4096), "f4", "nt", ((64, 64), 8)), ((64, 64, 4096), "f2", "nt", ((64, 64), 4)), ((64, 40, 2048), "f2", "tt", ((64, 64), 4)),
    ((256, 1024, 6272), "f2", "tn", ((64, 64), 2)), ((512, 512, 1024), "f4", "nt", ((64, 32), 1)),
])
def test_few_tiles_share_a_long_k(sizes: tuple[int, int, int], dtype: str, orders: str, wanted: tuple) -> None:
    """Within clusters, each of whose blocks finishes a piece of D's lines: of 8 columns of float32, of 16 of float16."""
    block, _, splits = mapping_of(sizes, dtype, orders)
    assert (block, splits) == wanted


@pytest.mark.parametrize("K", [2048, 4096])
def test_shares_of_a_narrow_d(K: int) -> None:
    """D of 8 bits lies in lines of 32 columns at least. (A product of a few tiles that packed its D to int8 was refused.)"""
    a, b = np.empty((64, K), np.float16), np.empty((64, K), np.float16).T
    (packed,) = recorded(lambda: gk.matmul(a, b, epilogue=gk.epilogues.Pack(lambda x, y: x)), H100, zeros=False)
    config = packed.problem.config
    assert config.splits == 1 or config.block_shape.size.N // config.splits % 32 == 0
    block, _, splits = mapping_of((64, 64, K), np.dtype(ml_dtypes.float8_e4m3fn))
    assert splits == 1 or block[1] // splits % 32 == 0


def test_tiles_of_64_columns() -> None:
    """For few columns, and for a C, whose tiles two warpgroups finish."""
    assert mapping_of((100352, 64, 256), "f2", "nn") == ((128, 64), "pingpong", 1)
    assert mapping_of((1024, 1024, 1024), c=True) == ((128, 64), "cooperative", 1)


@pytest.mark.parametrize(("sizes", "dtype"), [((40, 24, 1024), "f4"), ((40, 24, 2048), "f2"), ((16, 16, 4096), "f4")], ids=str)
def test_small_shares_are_right(sizes: tuple[int, int, int], dtype: str, rng: np.random.Generator) -> None:
    M, N, K = sizes
    assert mapping_of(sizes, dtype)[2] > 1
    a, b = rng.integers(-3, 4, (M, K)).astype(np.float16), rng.integers(-3, 4, (N, K)).astype(np.float16).T
    with gk.emulate(mapping="device"):
        assert np.array_equal(gk.matmul(a, b, out=np.empty((M, N), dtype)), a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("columns", [3072, 3000])
def test_the_tuner_tries_what_may_be_chosen(columns: int) -> None:
    """`gemmkit.tune` has each tile among its candidates that the tables have, whether rows begin at lines or between."""
    a, b = (ArrayInfo(0, (4096, columns), (columns, 1), np.dtype(np.float16), 0, False, "numpy") for _ in "ab")
    layout = RowMajor(np.float16)
    found = candidates(layout, layout, None, (4096, columns, columns), H100, infos=(a, b))
    tiles = {(one.block[:2], one.schedule, one.cluster) for one in found}
    for one in (*MAPPINGS, *(ALIGNED if columns % 64 == 0 else CLUSTERED)):
        assert not can_share([one], layout, layout) or ((one.M, one.N), one.schedule, one.cluster) in tiles


def test_what_a_stream_is_modelled_to_cost() -> None:
    """No waves, but k-tiles: a tile more costs about a tile's share. Where tiles fill waves there is nothing to stream."""
    one = CostedTile(128, 256, "cooperative", 8, (1, 1), 1046, 6000, 0)
    stream, = streaming((one,))
    times = [stream.cycles((128 * tiles, 256, 8192), H100, 2, None, 1) for tiles in (133, 140, 160, 200, 263)]
    assert times == sorted(times) and times[-1] < 2.3 * 128 * 1046
    assert stream.cycles((128 * 132, 256, 8192), H100, 2, None, 1) == math.inf
    assert times[0] < 0.7 * one.cycles((128 * 133, 256, 8192), H100, 2, None, 1)
    assert streaming((LIKELY, dataclasses.replace(LIKELY, N=64))) == (dataclasses.replace(LIKELY, splits=gk.kernels.StreamK()),)
    turns = dataclasses.replace(stream, schedule="pingpong")                # which hand over beside the other's products
    assert turns.cycles((128 * 140, 256, 8192), H100, 2, None, 1) < times[1]


@pytest.mark.parametrize("sizes", [(2048, 2048, 2048), (6048, 7056, 6048), (6048, 6048, 7056)])
def test_of_equal_tiles_by_cp_async_the_tall_one_is_chosen(sizes: tuple[int, int, int]) -> None:
    """Contractions of these sizes took 0.81 (2048) and 0.91 to 0.96 of 128x256's time by 256x128."""
    chosen = fastest(sizes, H100, mappings=BY_CP_ASYNC.mappings, supply=BY_CP_ASYNC.supply)
    assert (chosen.M, chosen.N) == (256, 128)


def test_the_tuner_tries_streams() -> None:
    layout = gk.layouts.RowMajor("float16")
    found = candidates(layout, layout, None, (1728, 640, 15936), H100)
    streams = [one for one in found if one.kernel == "warp_specialised" and one.splits == "stream"]
    assert streams and found[0] == streams[0]
    operator, fields = streams[0].proposal(Asked({}, dict(a=layout, b=layout, c=None, d=None), (1728, 640, 15936), {}), H100)
    conf = gk.get_config(operator=operator, global_a_layout=layout, global_d_layout=layout, device=H100, **fields)
    assert conf.splits == gk.kernels.StreamK() and "streamed K" in streams[0].name
    assert not [one for one in candidates(layout, layout, None, (1024, 1024, 2**14), H100)
                if one.kernel == "warp_specialised" and one.splits == "stream" and one.block[:2] == (64, 64)]
