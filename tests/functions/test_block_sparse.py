"""Operands of which blocks are empty (`gemmkit.functions.BlockSparse`): as A, B and both, in all kernel families, with NaN in empty blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import operators, transforms
from gemmkit.functions.block_sparse import BlockMask
from gemmkit.kernels.spec import Both, Condition
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.plans import ahead
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import A100, H100
from gemmkit.tiling import Tile
from gemmkit.tuning import sm90 as hopper
from gemmkit.tuning.model import Asked
from tests.support import sm80, sm90
from tests.support.machines import on_machines, poison, whole

pytestmark = pytest.mark.sample(3)

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
Make = Callable[..., gk.Config]


def simt(**fields: Any) -> gk.Config:
    tile = Tile(M=16, N=16, K=8)
    a, b = fields.pop("a", RowMajor), fields.pop("b", RowMajor)
    return gk.get_config(operator=operators.FPUOp(M=16, N=16), block_shape=tile, compute_warp=tile, warps_per_block=1,
                         kernel="singlestage", global_a_layout=a(F32), global_b_layout=b(F32), global_d_layout=RowMajor(F32),
                         **fields)


def multistage(**fields: Any) -> gk.Config:
    return sm80.mapping(operators.MMAOp(), **fields)


def warp_specialised(**fields: Any) -> gk.Config:
    return sm90.mapping("one", depth=16, **fields)


FAMILIES: dict[str, Make] = {"singlestage": simt, "multistage": multistage, "warp_specialised": warp_specialised}


def sparse(rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int], dtype: Any,
           order: str = "C") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An array with NaN in its empty blocks, its mask, and what it stands for."""
    mask = rng.random((-(-shape[0] // block[0]), -(-shape[1] // block[1]))) < 0.5
    mask.flat[0], mask.flat[-1] = True, False
    there = np.kron(mask, np.ones(block, bool))[:shape[0], :shape[1]]
    x = whole(rng, shape, dtype)
    return np.asarray(np.where(there, x, np.nan), dtype, order=order), mask, np.where(there, x, 0).astype(dtype)


def multiplied(machine: Any, conf: gk.Config, a: Any, b: Any, shape: tuple[int, int], **keywords: Any) -> np.ndarray:
    out = machine.array(poison(shape, conf.global_d_layout.dtype))
    with machine.session():
        gk.matmul(a, b, conf=conf, out=out, **keywords)
    return machine.numpy(out)


def blocks_of(conf: gk.Config, times: int = 1) -> tuple[tuple[int, int], tuple[int, int]]:
    """Blocks of A and of B that the tiles divide."""
    size = conf.block_shape.size
    return (times * size.M, size.K), (size.K, times * size.N)


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("which", ["a", "b", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_empty_blocks_are_zero(machine: Any, family: str, which: str, rng: np.random.Generator) -> None:
    conf = FAMILIES[family]()
    of_a, of_b = blocks_of(conf)
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    M, N, K = size.M + 3, size.N + 5, 3 * size.K - 3
    (x, mask_x, a), (y, mask_y, b) = sparse(rng, (M, K), of_a, dtype), sparse(rng, (K, N), of_b, dtype)
    put = machine.array
    left = put(a) if which == "b" else gk.functions.BlockSparse(put(x), put(mask_x), of_a)
    right = put(b) if which == "a" else gk.functions.BlockSparse(put(y), put(mask_y), of_b)
    d = multiplied(machine, conf, left, right, (M, N))
    assert np.array_equal(d, a.astype("f8") @ b.astype("f8"))


@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_transposes_and_blocks_of_several_tiles(machine: Any, family: str, rng: np.random.Generator) -> None:
    conf = FAMILIES[family](a=ColMajor)
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    block = (2 * size.K, 2 * size.M)                                           # of A^T
    M, N, K = 2 * size.M + 1, 3, 3 * size.K
    x, mask, at = sparse(rng, (K, M), block, dtype)
    b = whole(rng, (K, N), dtype)
    given = gk.functions.BlockSparse(machine.array(x), machine.array(mask), block).T
    assert given.shape == (M, K) and given.block == block[::-1]
    d = multiplied(machine, conf, given, machine.array(b), (M, N))
    assert np.array_equal(d, at.T.astype("f8") @ b.astype("f8"))


@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_any_block(machine: Any, family: str, rng: np.random.Generator) -> None:
    conf = FAMILIES[family]()
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    M, N, K = 2 * size.M, size.N, size.K
    x = np.full((M, K), np.nan, dtype)
    given = gk.functions.BlockSparse(machine.array(x), machine.array(np.zeros((2, 1), bool)), (size.M, size.K))
    shifted = transforms.Map(lambda v: v + 1)                          # would make something of nothing
    d = multiplied(machine, conf, given, machine.array(whole(rng, (K, N), dtype)), (M, N), transform_global_to_shared_a=shifted)
    assert not d.any()


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2)])
def test_lists_of_several_words(machine: Any, cluster: tuple[int, int], rng: np.random.Generator) -> None:
    """75 k-tiles: runs of empty ones, words of which all are, the first and the last; a last row of blocks of fewer tiles. Blocks
    of a cluster share A, whose mask is the same for them; the order of tiles does not matter to the result."""
    conf = sm90.mapping("one", depth=16, cluster=Tile(M=1, N=cluster[1]))
    size = conf.block_shape.size
    M, N, K = 3 * size.M, size.N * cluster[1], 75 * size.K - 3
    mask = np.zeros((2, 75), bool)
    mask[0, [0, 31, 74]], mask[1, [33, 40, 63, 64]] = True, True
    there = np.kron(mask, np.ones((2 * size.M, size.K), bool))[:M, :K]
    a, b = np.where(there, whole(rng, (M, K), F16), 0).astype(F16), whole(rng, (K, N), F16)
    x = np.where(there, a, np.nan).astype(F16)
    given = gk.functions.BlockSparse(machine.array(x), machine.array(mask), (2 * size.M, size.K))
    with machine.session():
        ordered = given.longest_first("a", conf)
    assert machine.numpy(ordered.order.blocks).tolist() == [0, 1]
    for one in (conf, ordered):
        assert np.array_equal(multiplied(machine, one, given, machine.array(b), (M, N)), a.astype("f8") @ b.astype("f8"))


@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_first(machine: Any, family: str, rng: np.random.Generator) -> None:
    """Columns of blocks of B, of two tiles each; the last one, of fewer, stays the last."""
    conf = FAMILIES[family]()
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    M, N, K = 5, 5 * size.N, 2 * size.K
    mask = np.array([[True, False, True], [False, True, True]])
    mask[1, 0] = family == "multistage"
    there = np.kron(mask, np.ones((size.K, 2 * size.N), bool))[:K, :N]
    a, y = whole(rng, (M, K), dtype), np.where(there, whole(rng, (K, N), dtype), 0).astype(dtype)
    given = gk.functions.BlockSparse(machine.array(np.where(there, y, np.nan).astype(dtype)), machine.array(mask), (size.K, 2 * size.N))
    with machine.session():
        ordered = given.longest_first("b", conf)
    assert machine.numpy(ordered.order.blocks)[-1] == 2
    grid = -(-M // size.M), -(-N // size.N)
    on_host = dataclasses.replace(ordered.order, blocks=machine.numpy(ordered.order.blocks))
    assert sorted(on_host.block(n, *grid) for n in range(5)) == [(0, n) for n in range(5)]
    d = multiplied(machine, ordered, machine.array(a), given, (M, N))
    assert np.array_equal(d, a.astype("f8") @ y.astype("f8"))


def test_sizes_of_0_and_1_by_a_chosen_mapping() -> None:
    with gk.emulate():
        for shape in ((0, 8), (8, 0), (1, 1)):
            mask = np.zeros(tuple(min(n, 1) for n in shape), bool)
            d = gk.matmul(gk.functions.BlockSparse(np.full(shape, np.nan, F32), mask, (128, 128)), np.ones((shape[1], 2), F32))
            assert d.shape == (shape[0], 2) and not d.any()


@on_machines
def test_plans_take_other_masks(machine: Any, rng: np.random.Generator) -> None:
    conf = simt()
    M, N, K = 16, 4, 24
    b, masks = whole(rng, (K, N), F32), (np.array([[True, False, True]]), np.array([[False, True, True]]))
    x = whole(rng, (M, K), F32)
    put = machine.array
    with machine.session():
        plan = gk.plan(gk.functions.BlockSparse(put(x), put(masks[0]), (16, 8)), put(b), conf=conf)
        for mask in masks:
            d = plan(gk.functions.BlockSparse(put(x), put(mask), (16, 8)), put(b))
            assert np.array_equal(machine.numpy(d), np.where(np.repeat(mask[0], 8), x, 0) @ b)
        with pytest.raises(ValueError, match="no BlockSparse, but the plan was made with one"):
            plan(put(x), put(b))
        with pytest.raises(ValueError, match="the mask of a BlockSparse differs from the plan's"):
            plan(gk.functions.BlockSparse(put(x), put(np.ones((1, 2), bool)), (16, 16)), put(b))
        with pytest.raises(ValueError, match="the mask of a BlockSparse differs"):
            gk.plan(put(x), put(b), conf=conf)(gk.functions.BlockSparse(put(x), put(masks[0]), (16, 8)), put(b))


@on_machines
def test_as_operands_of_blas(machine: Any, rng: np.random.Generator) -> None:
    x, mask, at = sparse(rng, (16, 24), (8, 16), F32)
    b, c = whole(rng, (16, 3), F32), machine.array(np.ones((24, 3), F32))
    with machine.session():
        gk.blas.gemmEx("T", "N", 2.0, gk.functions.BlockSparse(machine.array(x), machine.array(mask), (8, 16)), machine.array(b), 1.0,
                       c, conf=simt(a=ColMajor))
    assert np.array_equal(machine.numpy(c), 2 * at.T @ b + 1)


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family: str) -> None:
    """One kernel reads both masks, and keeps nothing in local memory."""
    conf = FAMILIES[family]()
    of_a, of_b = blocks_of(conf)
    dtype, mask = conf.operator.fragment_a.dtype, np.ones((8, 8), bool)
    a, b = (np.zeros(tuple(8 * n for n in block), dtype) for block in (of_a, of_b))
    left, right = gk.functions.BlockSparse(a, mask, of_a), gk.functions.BlockSparse(b, mask, of_b)
    conf = dataclasses.replace(conf, condition=Both(left.condition("a"), right.condition("b")))
    kernel = ahead.compile_config(conf, device=H100, gemm_shape=dict(M=a.shape[0], N=b.shape[1], K=a.shape[1]))
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0
    assert "ld.global.u8" in kernel.ptx.replace(".nc", "") or "ld.global.s8" in kernel.ptx.replace(".nc", "")


# -- bad input --------------------------------------------------------------------------------------------------------

A, MASK = np.ones((32, 16), F32), np.ones((2, 2), bool)


@pytest.mark.parametrize(("array", "mask", "block", "kind", "said"), [
    (A, MASK.astype("u1"), (16, 8), ValueError, "mask has dtype uint8; bool is needed"),
    (A, MASK[:1], (16, 8), ValueError, r"mask has shape \(1, 2\); the array of shape \(32, 16\) has 2 x 2 blocks of 16 x 8"),
    (A, MASK[0], (16, 8), ValueError, r"mask has shape \(2,\)"),
    (A, [[True]], (16, 8), TypeError, "mask"),
    (A, MASK, 16, TypeError, "block=16: a tuple of two whole numbers"),
    (A, MASK, (16, True), TypeError, r"block=\(16, True\)"),
    (A, MASK, (16, 0), ValueError, r"block=\(16, 0\): a block has 1 row"),
    (A[0], MASK, (16, 8), ValueError, "array has shape"),
    (np.stack([A, A]), MASK, (16, 8), ValueError, "no stack"),
], ids=["dtype", "shape", "dimensions", "list", "number", "bool", "empty", "vector", "stack"])
def test_bad_masks(array: Any, mask: Any, block: Any, kind: type, said: str) -> None:
    with pytest.raises(kind, match=said):
        gk.functions.BlockSparse(array, mask, block)


def test_tiles_that_do_not_divide_the_blocks() -> None:
    out = poison((32, 2), F32)
    with gk.emulate(), pytest.raises(gk.ConfigError, match="its tiles of a, 16 x 8, must divide the blocks of its mask, 8 x "
                                     "16; give a conf whose block_shape has M=8 and K=16 or divisors"):
        gk.matmul(gk.functions.BlockSparse(A, np.ones((4, 1), bool), (8, 16)), np.ones((16, 2), F32), conf=simt(), out=out)
    with gk.emulate(), pytest.raises(gk.ConfigError, match="its tiles of b, 8 x 16, .* 4 x 16; .* has N=16 and K=4"):
        gk.matmul(A, gk.functions.BlockSparse(np.ones((16, 2), F32), np.ones((4, 1), bool), (4, 16)), conf=simt(), out=out)
    assert np.isnan(out).all()


def test_clusters_whose_blocks_may_differ() -> None:
    conf = sm90.mapping("one-2x1", depth=16)                                    # two blocks of different rows of A
    size = conf.block_shape.size
    a = gk.functions.BlockSparse(np.ones((4 * size.M, size.K), F16), np.ones((4, 1), bool), (size.M, size.K))
    with gk.emulate(), pytest.raises(gk.ConfigError, match="blocks of a cluster compute the same k-tiles, and the condition may "
                                     r"differ between them; use Tile\(M=1, N=1\)"):
        gk.matmul(a, np.ones((size.K, 16), F16), conf=conf)


BLOCKS = [(16, 16), (32, 32), (48, 16), (96, 64), (64, 128)]


@on_machines
@pytest.mark.parametrize("which", "ab")
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_masks_of_any_blocks(machine: Any, dtype: np.dtype, block: tuple[int, int], which: str, rng: np.random.Generator) -> None:
    """By the mapping that is chosen for a device."""
    shapes = (70, 100), (100, 40)
    found, mask, stands = sparse(rng, shapes["ab".index(which)], block, dtype)
    other = whole(rng, shapes["ba".index(which)], dtype)
    held, out = gk.functions.BlockSparse(machine.array(found), machine.array(mask), block), machine.array(poison((70, 40), dtype))
    a, b = (held, machine.array(other)) if which == "a" else (machine.array(other), held)
    with gk.emulate(mapping="device") if machine.emulated else machine.session():
        gk.matmul(a, b, out=out)
    exact = stands.astype(float) @ other.astype(float) if which == "a" else other.astype(float) @ stands.astype(float)
    assert np.array_equal(machine.numpy(out).astype(float), exact)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("device", [H100, A100], ids=["H100", "A100"])
def test_no_size_refuses_a_mask(device: Any, block: tuple[int, int]) -> None:
    """Tiles that the sizes would have otherwise may not divide its blocks."""
    for dtype in (F16, F32, np.dtype(np.float64)):
        for M, N, K in ((128, 64, 128), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 512, 512), (96, 40, 384)):
            mask = np.ones((-(-M // block[0]), -(-K // block[1])), bool)
            a, b = gk.functions.BlockSparse(np.empty((M, K), dtype), mask, block), np.empty((K, N), dtype)
            [made] = ahead.recorded(lambda: gk.matmul(a, b), device, zeros=False)
            a.condition("a").check_tiles(made.problem.config.block_shape)


@pytest.mark.parametrize(("block", "of_b"), [((128, 128), False), ((64, 64), False), ((256, 64), False), ((64, 128), True),
                                             ((128, 64), True)])
def test_the_mapping_is_chosen_by_the_blocks(block: tuple[int, int], of_b: bool) -> None:
    n, layout = 1024, RowMajor(F16)
    condition = BlockMask(np.ones((n // block[0], n // block[1]), bool), *block, of_b)
    info = describe(np.zeros((n, n), F16))
    layouts = dict(a=layout, b=layout, c=None, d=None)
    found = hopper.propose(Asked(dict(a=info, b=info, out=info, c=None), layouts, (n, n, n), dict(condition=condition)), H100)
    assert found is not None
    _, fields = found
    condition.check_tiles(fields["block_shape"])                               # raises where a tile lies in two blocks


def test_the_condition_of_a_matrix_is_one() -> None:
    """So a plan recognises it, and does not read its code in each call; another mask is another condition."""
    a, mask = np.ones((4, 4), np.float32), np.ones((2, 2), bool)
    sparse = gk.functions.BlockSparse(a, mask, (2, 2))
    assert sparse.condition("a") is sparse.condition("a") is not sparse.condition("b")
    before = sparse.condition("a")
    sparse.mask = ~mask
    assert sparse.condition("a") is not before and not sparse.condition("a").mask.any()


def test_an_order_for_no_operand() -> None:
    a = gk.functions.BlockSparse(A, MASK, (16, 8))
    with pytest.raises(ValueError, match="name='c': 'a' or 'b' is needed"):
        a.longest_first("c", simt())
    with pytest.raises(gk.ConfigError, match="must divide the blocks"):
        gk.functions.BlockSparse(A, np.ones((4, 2), bool), (8, 8)).longest_first("a", simt())


class Sometimes(Condition):
    def __call__(self, m: int, n: int, k: int) -> bool:
        return k == 0


def test_another_condition_beside_it() -> None:
    given, b = gk.functions.BlockSparse(A, MASK, (16, 8)), np.ones((16, 2), F32)
    for fields in (dict(condition=Sometimes()), dict(conf=simt(condition=Sometimes()))):
        with gk.emulate(), pytest.raises(TypeError, match="condition is given with"):
            gk.matmul(given, b, **fields)


def test_a_mask_that_overlaps_the_result() -> None:
    out = np.zeros((32, 2), F32)
    mask = out.view(bool)[:2, :2]
    with gk.emulate(), pytest.raises(ValueError, match="mask of BlockSparse overlaps out"):
        gk.matmul(gk.functions.BlockSparse(A, mask, (16, 8)), np.ones((16, 2), F32), conf=simt(), out=out)
