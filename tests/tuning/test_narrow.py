"""Products of float32 as tf32, of 8-bit numbers and of float64: what is chosen where tiles are few and K is long, or where rows
begin at odd words, and that the kernels so chosen are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.operators import MMAOp
from gemmkit.operators.wgmma import WGMMAOp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import H100
from gemmkit.tuning import sm80, tables
from gemmkit.tuning.model import Asked
from tests.support.machines import BF16, E4M3, on_machines, poison, whole

F32, F64, I8 = np.dtype("f4"), np.dtype("f8"), np.dtype("i1")
ORDERS = "nn", "nt", "tn", "tt"


def operand(rng: np.random.Generator, rows: int, columns: int, dtype: np.dtype, order: str) -> np.ndarray:
    made = whole(rng, (rows, columns) if order == "n" else (columns, rows), dtype)
    return made if order == "n" else made.T


def chosen(dtype: np.dtype, out: np.dtype, order: str, sizes: tuple[int, int, int], **keywords: Any) -> Any:
    """The configuration that a GPU gets."""
    M, N, K = sizes
    a, b = (np.empty(shape if o == "n" else shape[::-1], dtype) for shape, o in zip(((M, K), (K, N)), order))
    with gk.emulate(mapping="device"):
        return gk.plan(a if order[0] == "n" else a.T, b if order[1] == "n" else b.T, out=np.empty((M, N), out), **keywords).config


@pytest.mark.parametrize("order,sizes", [("nn", (96, 64, 7200)), ("tt", (426, 53, 9152)), ("tn", (16, 112, 1928)), ("nn", (24, 64, 1618)),
                                         ("nt", (129, 65, 999)), ("tt", (10038, 114, 888))])
def test_tf32_goes_by_mma_where_it_is_faster(order: str, sizes: tuple[int, int, int]) -> None:
    """Measured on an H200 (2026-11-28): these took 59 to 180 us by Hopper's kernel, and 5 to 33 so."""
    config = chosen(F32, F32, order, sizes, precision="tf32")
    assert config.kernel == "multistage" and isinstance(config.operator, MMAOp) and config.operator.dtype == F32


@pytest.mark.parametrize("order,sizes", [(order, (4096, 4096, 4096)) for order in ORDERS] + [("nt", (1832, 1024, 4288))])
def test_large_tf32_stays_with_wgmma(order: str, sizes: tuple[int, int, int]) -> None:
    assert isinstance(chosen(F32, F32, order, sizes, precision="tf32").operator, WGMMAOp)


@pytest.mark.parametrize("dtype,out,order,sizes,keywords", [
    (E4M3, BF16, "nt", (896, 32, 15792), {}), (E4M3, BF16, "nt", (2144, 128, 14688), {}), (I8, np.dtype("i4"), "nt", (128, 64, 8192), {}),
    (F32, F32, "nn", (64, 1720, 4096), dict(precision="tf32"))])
def test_few_tiles_share_a_long_k(dtype: np.dtype, out: np.dtype, order: str, sizes: tuple[int, int, int],
                                  keywords: dict[str, Any]) -> None:
    config = chosen(dtype, out, order, sizes, **keywords)
    assert config.kernel == "warp_specialised" and config.splits > 1


def test_a_short_k_of_float8_needs_no_promotion() -> None:
    """128 elements are the portion after which sums are promoted: of one portion nothing is."""
    assert chosen(E4M3, BF16, "nt", (512, 512, 128)).operator.promote == 0
    assert chosen(E4M3, BF16, "nt", (512, 512, 144)).operator.promote == 128


@pytest.mark.parametrize("sizes,tile,splits", [((144, 14864, 6208), (128, 144), 1), ((80, 4544, 9472), (64, 80), 1),
                                               ((2624, 112, 4784), (128, 96), 4), ((5888, 48, 7712), (64, 96), 2)])
def test_float8_of_few_rows_or_columns_is_computed_as_its_transpose(sizes: tuple[int, int, int], tile: tuple[int, int],
                                                                    splits: int) -> None:
    """By tiles as wide as there are rows, or that fill the multiprocessors: 31, 19, 11 and 16 us on an H200 (2026-11-28), and
    61, 25, 12 and 20 as it is."""
    M, N, K = sizes
    with gk.emulate(mapping="device"):
        plan = gk.plan(np.empty((M, K), E4M3), np.empty((N, K), E4M3).T, out=np.empty((M, N), BF16))
    assert plan.swap_ab and plan.config.block_shape.extents[:2] == tile and plan.config.splits == splits


@pytest.mark.parametrize("sizes,order", [((11772, 3518, 64), "nn"), ((3072, 3072, 270), "nt"), ((64, 1600, 9054), "nt")])
def test_rows_at_words_stay_with_wgmma_where_it_is_faster(sizes: tuple[int, int, int], order: str) -> None:
    """46, 24 and 21 us on an H200 (2026-11-28), and 86, 47 and 37 by mma.sync."""
    assert chosen(np.dtype("f2"), np.dtype("f2"), order, sizes).kernel == "warp_specialised"


@on_machines
@pytest.mark.sample(5)
@pytest.mark.parametrize("sizes", [(24, 136, 400), (24, 131 * 16, 400), (20, 200, 656)])
@pytest.mark.parametrize("out", [BF16, np.dtype("f2"), F32], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["", "a view"])
def test_float8_as_its_transpose_is_right(machine: Any, sizes: tuple[int, int, int], out: np.dtype, wide: bool,
                                          rng: np.random.Generator) -> None:
    """With a bias of columns, factors of rows, and a D whose rows do not lie one behind the other."""
    M, N, K = sizes
    if machine.emulated and N > 200:
        N = 136
    a, b = operand(rng, M, K, E4M3, "n"), operand(rng, K, N, E4M3, "t")
    bias, factors = whole(rng, (N,), F32), 2.0 ** rng.integers(-2, 3, M).astype(F32)
    room = machine.array(poison((M, N + 24), out))
    d = room[:, 8:8 + N] if wide else machine.array(poison((M, N), out))
    epilogue = gk.epilogues.Scale(machine.array(factors), along="M") | gk.epilogues.Bias(machine.array(bias)) | gk.epilogues.ReLU()
    with gk.emulate(mapping="device") if machine.emulated else machine.session():
        x, y = machine.array(a), machine.array(b.T).T
        assert gk.plan(x, y, out=d, epilogue=epilogue).swap_ab
        gk.matmul(x, y, out=d, epilogue=epilogue)
    expected = np.maximum(machine.product64(a, b) * factors[:, None] + bias, 0).astype(out).astype(np.float64)
    np.testing.assert_array_equal(machine.numpy(d).astype(np.float64), expected)
    if wide:
        kept = machine.numpy(room).astype(np.float64)
        assert np.isnan(kept[:, :8]).all() and np.isnan(kept[:, 8 + N:]).all()


def test_a_short_k_of_float64_takes_tiles_that_store_side_by_side() -> None:
    """14585 x 2128 x 26 took 120 to 134 us by larger tiles, and 81 by these."""
    config = chosen(F64, F64, "tn", (14585, 2128, 26))
    assert config.block_shape.extents == (64, 64, 16) and config.blocks_per_sm == 3


@on_machines
@pytest.mark.sample(4)
@pytest.mark.parametrize("sizes", [(33, 65, 2571), (41, 27, 601), (70, 131, 19)])
@pytest.mark.parametrize("order", ORDERS)
def test_tf32_by_mma_is_right(machine: Any, order: str, sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    """Whole numbers, so that tf32 loses nothing; rows at any word, and a long K in shares. (Copies of single words take the
    emulator long.)"""
    M, N, K = (19, 21, 35) if machine.emulated else sizes
    a, b = operand(rng, M, K, F32, order[0]), operand(rng, K, N, F32, order[1])
    out = machine.array(poison((M, N), F32))
    with gk.emulate(mapping="device") if machine.emulated else machine.session():
        x, y = machine.array(a), machine.array(b)
        assert isinstance(gk.plan(x, y, out=out, precision="tf32").config.operator, MMAOp)
        gk.matmul(x, y, out=out, precision="tf32")
    np.testing.assert_array_equal(machine.numpy(out), machine.product64(a, b))


@on_machines
@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype,out,order,K", [(E4M3, BF16, "nt", 1280), (I8, np.dtype("i4"), "nt", 1280), (F32, F32, "nt", 320),
                                               (F32, F32, "nn", 320), (F32, F32, "tn", 320), (F32, F32, "tt", 320)])
@pytest.mark.parametrize("splits", [2, 5])
def test_wgmma_in_shares_is_right(machine: Any, dtype: np.dtype, out: np.dtype, order: str, K: int, splits: int,
                                  rng: np.random.Generator) -> None:
    """By the blocks of a cluster, and by a workspace."""
    a, b = operand(rng, 64, K, dtype, order[0]), operand(rng, K, 48, dtype, order[1])
    d = machine.array(poison((64, 48), out))
    promote = dict(promote=128) if dtype == E4M3 else {}
    layouts = ((gk.layouts.RowMajor if o == "n" else gk.layouts.ColMajor)(dtype) for o in order)
    config = gk.get_config(operator=WGMMAOp(64, dtype=dtype, **promote), splits=splits, gemm_shape=(64, 48, K), device=H100,
                           global_a_layout=next(layouts), global_b_layout=next(layouts),
                           global_d_layout=gk.layouts.RowMajor(out))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, config, out=d)
    np.testing.assert_array_equal(machine.numpy(d).astype(np.float64), machine.product64(a, b).astype(out).astype(np.float64))


def test_no_mapping_of_tf32_is_modelled_to_take_no_time() -> None:
    """Each row of the table is the choice of some product, or it is in vain."""
    seen = set()
    for M, N, K in [(16, 64, 30), (16, 24, 300), (24, 1000, 5167), (33, 3000, 5167), (64, 4096, 5167), (500, 3000, 5167),
                    (500, 3000, 1954), (500, 3000, 100), (500, 4096, 5167), (2048, 24, 1954)]:
        asked = Asked({}, {"a": gk.layouts.RowMajor(F32), "b": gk.layouts.ColMajor(F32), "c": None, "d": None}, (M, N, K), {})
        found = sm80.propose_tf32(asked, H100)
        assert found is not None
        seen.add(found[1]["block_shape"].extents)
        assert sm80.propose_tf32(asked, H100, most=1.0) is None
    assert seen == {row[0] for row in tables.TF32}


def test_a_row_major_a_costs_tf32_nothing_more() -> None:
    """Where the ordinary units copy A's elements across, tensor cores read them as they lie."""
    one, = (one for one in sm80.multistages_of(tables.TF32, 4) if one.block == (64, 128, 32))
    assert one.alone(1) == one.alone(0) == one.solo


@pytest.mark.compile
@pytest.mark.sample(4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("row", tables.TF32, ids=lambda row: "x".join(map(str, row[0])))
def test_tf32_tiles_spill_nothing(row: tuple[Any, ...], odd: int, order: str) -> None:
    (M, N, K), (m, n), stages, blocks, *_ = row
    a, b = (np.empty(shape if o == "n" else shape[::-1], F32) for shape, o in zip(((200, 512 + 2 * odd), (512 + 2 * odd, 144 + odd)), order))
    a, b = a if order[0] == "n" else a.T, b if order[1] == "n" else b.T
    layouts = [(gk.layouts.RowMajor if o == "n" else gk.layouts.ColMajor)(F32) for o in order]
    for splits in (1, 3):
        config = gk.get_config(operator=MMAOp(dtype=F32), kernel="multistage", global_a_layout=layouts[0], global_b_layout=layouts[1],
                               block_shape=gk.Tile(M=M, N=N, K=K), compute_warp=gk.Tile(M=m, N=n, K=K), stages=stages, blocks_per_sm=blocks,
                               splits=splits, device=H100)
        [made] = recorded(lambda: gk.matmul(a, b, None, config), zeros=False)
        usage = made.launchable.entry().meta["usage"]
        assert usage["spill_stores"] == usage["spill_loads"] == 0, usage
