"""B of 2 and 4 bits with a few rows of A: the kernel that dequantises in registers. Elements of A are small whole numbers and
scales powers of two, so that every result is exactly right or wrong; D is poisoned before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.layouts import ColMajor, GroupQuantised, InterleavedColumns, RowMajor
from gemmkit.layouts.matrices import Matrix
from gemmkit.layouts.quantised import dequantise
from gemmkit.operators import MMAOp, QuantisedMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.ptx_machine.compare import PTX
from tests.support.machines import E4M3, MACHINES, on_machines, poison, whole

pytestmark = pytest.mark.sample(8)

F16, BF16, F32 = np.dtype("f2"), np.dtype(ml_dtypes.bfloat16), np.dtype("f4")
WORD = 32
_EMULATOR = MACHINES["emulator"]


def weights(rng: np.random.Generator, k: int, n: int, bits: int, group: int, symmetric: bool, dtype: Any = F16) -> Matrix:
    """All words, scales of 1/2, 1 and 2, and any zeros."""
    scales = rng.choice([0.5, 1, 2], (k // group, n)).astype(F16)
    zeros = None if symmetric else rng.integers(0, 1 << bits, (k // group, n)).astype(np.uint8)
    words = rng.integers(0, 2**32, (k * bits // WORD, n), dtype=np.uint32)
    return Matrix(words, GroupQuantised(dtype, scales, bits, group, zeros))


def at(machine: Any, b: Matrix) -> Matrix:
    """The matrix where the machine multiplies."""
    layout: Any = b.layout
    zeros = None if layout.zeros is None else machine.array(layout.zeros)
    return Matrix(machine.array(b.array), replace(layout, scales=machine.array(layout.scales), zeros=zeros))


def mapping(b: Matrix, m: int, n: int, k: int, part: int, **fields: Any) -> gk.Config:
    """A block of m x n with k of K, divided into parts of 32 columns and ``part`` of K."""
    layout: Any = b.layout
    given: dict[str, Any] = dict(
        operator=QuantisedMMAOp(layout.bits), kernel="quantised", global_a_layout=RowMajor(F16), global_b_layout=layout,
        global_d_layout=RowMajor(F32), block_shape=Tile(M=m, N=n, K=k), compute_warp=Tile(M=m, N=32, K=part),
        warps_per_block=n // 32 * (k // part), device=H100)
    return gk.get_config(**{**given, **fields})


def product(machine: Any, a: np.ndarray, b: Matrix, conf: Any = None, **keywords: Any) -> np.ndarray:
    out = machine.array(poison((a.shape[0], b.shape[1]), F32))
    of_b = at(machine, b)
    with machine.session():
        if conf is None:
            gk.matmul(machine.array(a), of_b, out=out, **keywords)
        else:
            gk.matmul(machine.array(a), of_b.array, out=out, conf=replace(conf, global_b_layout=of_b.layout), **keywords)
    return np.asarray(machine.numpy(out))


def expected(a: np.ndarray, b: Matrix) -> np.ndarray:
    return np.asarray(a.astype("f8") @ dequantise(b).astype(F16).astype("f8"))


# -- by mappings ----------------------------------------------------------------------------------------------------------

@pytest.mark.sample(17)
@on_machines
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "part", "group"), [(4, 32, 8), (4, 64, 64), (2, 64, 16), (2, 64, 128)])
@pytest.mark.parametrize("m", [1, 8, 19])
@pytest.mark.parametrize(("warps", "stages", "splits"), [((1, 2), 1, 1), ((2, 1), 3, 1), ((1, 2), 2, 2)])
def test_products(machine: Any, m: int, bits: int, part: int, group: int, symmetric: bool, warps: tuple[int, int], stages: int,
                  splits: int, rng: np.random.Generator) -> None:
    """Warps along N and K, rounds of the ring that end within it, blocks that share K; columns and rows beyond the last."""
    k = 5 * 128
    b = weights(rng, k, 36, bits, group, symmetric)
    a = whole(rng, (m, k), F16, 2)
    conf = mapping(b, 8 if m <= 8 else 16, 32 * warps[0], part * warps[1], part, stages=stages, splits=splits)
    assert np.array_equal(product(machine, a, b, conf), expected(a, b))


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.parametrize(("bits", "symmetric", "m"), [(4, True, 3), (2, False, 17)])
def test_products_as_compiled(bits: int, symmetric: bool, m: int, rng: np.random.Generator) -> None:
    """By the PTX of the kernel."""
    b, a = weights(rng, 256, 36, bits, 64, symmetric), whole(rng, (m, 256), F16, 2)
    assert np.array_equal(product(PTX, a, b), expected(a, b))


@on_machines
@pytest.mark.parametrize(("m", "n", "k", "bits", "symmetric"), [(1, 32, 128, 4, True), (16, 36, 128, 4, False), (17, 36, 192, 2, True)])
def test_bfloat16(machine: Any, m: int, n: int, k: int, bits: int, symmetric: bool, rng: np.random.Generator) -> None:
    b, a = weights(rng, k, n, bits, 64, symmetric, BF16), whole(rng, (m, k), BF16, 2)
    with gk.emulate():
        assert gk.plan(a, b, out=poison((m, n), F32)).config.operator == QuantisedMMAOp(bits, BF16)
    assert np.array_equal(product(machine, a, b), expected(a, b))


@pytest.mark.kin(1)
@pytest.mark.compile
def test_bfloat16_as_compiled(rng: np.random.Generator) -> None:
    b, a = weights(rng, 128, 36, 4, 64, False, BF16), whole(rng, (3, 128), BF16, 2)
    assert np.array_equal(product(PTX, a, b), expected(a, b))


@pytest.mark.sample(1)
@pytest.mark.parametrize("machine", [pytest.param(MACHINES["emulator"], id="emulator"),
                                     pytest.param(PTX, id="ptx", marks=[pytest.mark.compile, pytest.mark.kin(1)]),
                                     pytest.param(MACHINES["gpu"], id="gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("m", "n", "k", "group", "symmetric"), [(1, 36, 256, 128, False), (8, 64, 256, 256, True),
                                                                 (16, 68, 384, 128, False)])
def test_float8(machine: Any, m: int, n: int, k: int, group: int, symmetric: bool, rng: np.random.Generator) -> None:
    """Columns that no other kernel takes, and zero points that TMA does not; scales that float8 does not hold."""
    b, a = weights(rng, k, n, 4, group, symmetric, E4M3), whole(rng, (m, k), E4M3, 2)
    layout: Any = b.layout
    layout.scales[:] = rng.integers(1, 2**11, layout.scales.shape).astype(F16) / 8
    with gk.emulate():
        assert gk.plan(a, b, out=poison((m, n), F32)).config.operator == QuantisedMMAOp(4, E4M3)
    assert np.array_equal(product(machine, a, b), a.astype("f8") @ dequantise(b).astype("f8"))


@pytest.mark.parametrize(("group", "dtype"), [(64, BF16), (32, BF16), (16, BF16), (64, F16), (16, F16)])
def test_where_a_weight_is_rounded(group: int, dtype: Any, rng: np.random.Generator) -> None:
    """Not at all where a part's sums are multiplied by its scale; else as float16, and then as bfloat16."""
    b = weights(rng, 64, 32, 4, group, True, dtype)
    layout: Any = b.layout
    layout.scales[:] = (rng.random(layout.scales.shape) * 3).astype(F16)
    wanted = dequantise(b).astype(F32)
    if group < 32:
        wanted = wanted.astype(F16).astype(F32).astype(dtype).astype(F32)
    assert np.array_equal(product(_EMULATOR, np.eye(64, dtype=dtype)[:8], b), wanted[:8])


def test_the_largest_bfloat16_overflows_no_sum(rng: np.random.Generator) -> None:
    """Sums of integers by large elements, whose products with the scales are finite."""
    b = weights(rng, 128, 32, 4, 128, False, BF16)
    layout: Any = b.layout
    layout.scales[:], layout.zeros[:], b.array[:] = 2.0**-14, 0, 0xFFFFFFFF
    a = np.full((1, 128), 2.0**126, BF16)
    assert np.array_equal(product(_EMULATOR, a, b), np.full((1, 32), 128 * 15 * 2.0**(126 - 14), F32))


# -- as a call chooses ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("m", "n", "k", "bits", "group"), [(1, 32, 128, 4, 128), (16, 4, 64, 4, 8), (33, 132, 192, 2, 64),
                                                            (65, 36, 64, 4, 8)])
def test_a_call_takes_it(m: int, n: int, k: int, bits: int, group: int, rng: np.random.Generator) -> None:
    b, a = weights(rng, k, n, bits, group, True), whole(rng, (m, k), F16, 2)
    bias, out = whole(rng, (n,), F32), poison((m, n), F32)
    with gk.emulate():
        after = epilogues.Bias(bias) | epilogues.ReLU()
        plan = gk.plan(a, b, out=out, epilogue=after)
        gk.matmul(a, b, out=out, epilogue=after)
    assert plan.config.kernel == "quantised"
    assert np.array_equal(out, np.maximum(expected(a, b) + bias, 0))


@pytest.mark.parametrize(("m", "n", "columns", "warps", "stages"), [
    (1, 4096, 32, 16, 1), (8, 6144, 32, 8, 2), (1, 11008, 32, 8, 1), (8, 14336, 64, 8, 1), (1, 28672, 32, 8, 1), (9, 6144, 32, 8, 1)])
def test_all_tiles_are_held_at_once_where_they_can_be(m: int, n: int, columns: int, warps: int, stages: int) -> None:
    words, scales = np.zeros((512, n), np.uint32), np.ones((32, n), F16)
    [made] = ahead.recorded(lambda: gk.matmul(np.empty((m, 4096), F16), Matrix(words, GroupQuantised(F16, scales, 4, 128, None))), H100)
    conf = made.problem.config
    assert (conf.kernel, conf.block_shape.size.N, conf.warps_per_block, conf.stages) == ("quantised", columns, warps, stages)


@pytest.mark.parametrize("case", ["columns", "part", "rows of A", "C", "transform", "a view of B"])
def test_what_it_does_not_take_is_right(case: str, rng: np.random.Generator) -> None:
    """By the layout's own dequantisation."""
    m, n, k = 3, (33 if case == "columns" else 32), (24 if case == "part" else 64)
    b, a = weights(rng, k, n, 4, 8, True), whole(rng, (m, k), F16, 2)
    more: dict[str, Any] = {}
    c = whole(rng, (m, n), F32) if case == "C" else None
    if case == "rows of A":
        a = np.asfortranarray(a)
    if case == "transform":
        more["transform_global_to_shared_a"] = gk.transforms.Map(lambda x: x + x)
    if case == "a view of B":
        b = Matrix(np.concatenate([b.array[:, :1], b.array], axis=1)[:, 1:], b.layout)
    out = poison((m, n), F32)
    with gk.emulate():
        plan = gk.plan(a, b, c, out=out, **more)
        gk.matmul(a, b, c, out=out, **more)
    assert plan.config.kernel != "quantised"
    wanted = expected(a, Matrix(np.ascontiguousarray(b.array), b.layout))
    assert np.array_equal(out, (2 * wanted if case == "transform" else wanted) + (0 if c is None else c))


@pytest.mark.parametrize("sizes", [(0, 32, 64), (3, 0, 64), (3, 32, 0)])
def test_nothing(sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    m, n, k = sizes
    b, a = weights(rng, k, n, 4, 32, True), whole(rng, (m, k), F16)
    assert np.array_equal(product(_EMULATOR, a, b), np.zeros((m, n)))


def test_special_values(rng: np.random.Generator) -> None:
    """A row with a NaN is NaN, others are not touched by it; an infinite scale is one."""
    b, a = weights(rng, 64, 32, 4, 32, True), whole(rng, (3, 64), F16)
    a[1, 5] = np.nan
    layout: Any = b.layout
    layout.scales[0, 7] = np.inf
    b.array[0, 7] = 0                                                         # -8 times infinity
    a[:, 0] = 1
    found = product(_EMULATOR, a, b)
    assert np.isnan(found[1]).all() and np.isfinite(np.delete(found[[0, 2]], 7, axis=1)).all()
    assert not np.isfinite(found[[0, 2], 7]).any()


# -- two whose columns are interleaved ------------------------------------------------------------------------------------

def gated(machine: Any, a: np.ndarray, w: Matrix, v: Matrix) -> np.ndarray:
    """relu(a w) * (a v), by one product."""
    out = machine.array(poison((a.shape[0], w.shape[1]), F32))
    with machine.session():
        gk.glu(machine.array(a), at(machine, w), at(machine, v), lambda x: max(x, 0), out=out)
    return np.asarray(machine.numpy(out))


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize(("m", "n", "k", "bits", "group", "symmetric", "dtype", "kernel"), [
    (1, 64, 256, 4, 128, True, F16, "quantised"), (3, 12, 64, 4, 16, False, BF16, "quantised"),
    (17, 20, 128, 2, 64, False, F16, "quantised"), (70, 136, 192, 4, 64, True, BF16, "quantised"),
    (3, 9, 24, 4, 24, False, F16, ""), (2, 6, 64, 4, 8, True, F16, "")])
def test_a_fold_of_two(machine: Any, m: int, n: int, k: int, bits: int, group: int, symmetric: bool, dtype: Any, kernel: str,
                       rng: np.random.Generator) -> None:
    """One launch; lanes of an octet take their part's columns, of which the last octet has four, or none."""
    w, v = (weights(rng, k, n, bits, group, symmetric, dtype) for _ in "wv")
    a = whole(rng, (m, k), dtype, 1)
    with gk.emulate():
        fold = epilogues.Fold(lambda x, y: max(x, 0) * y)
        plan = gk.plan(a, InterleavedColumns(w, v), out=poison((m, n), F32), epilogue=fold)
    assert (plan.config.kernel == "quantised") == bool(kernel)
    wanted = np.maximum(expected(a, w), 0) * expected(a, v)
    assert np.array_equal(gated(machine, a, w, v), wanted.astype(F32))


@pytest.mark.compile
def test_a_fold_of_two_as_compiled(rng: np.random.Generator) -> None:
    w, v = (weights(rng, 128, 36, 4, 64, False) for _ in "wv")
    a = whole(rng, (3, 128), F16, 1)
    assert np.array_equal(gated(PTX, a, w, v), (np.maximum(expected(a, w), 0) * expected(a, v)).astype(F32))


@pytest.mark.compile
@pytest.mark.parametrize("m", [1, 256])
def test_a_fold_of_two_spills_nothing(m: int, rng: np.random.Generator) -> None:
    w, v = (weights(rng, 512, 256, 4, 128, False, BF16) for _ in "wv")
    a = np.ones((m, 512), BF16)
    (made,) = ahead.compiled(ahead.recorded(lambda: gk.glu(a, w, v), H100), 1)
    assert made.error is None and made.usage["spill_stores"] == made.usage["spill_loads"] == made.usage["stack_bytes"] == 0


def test_parts_that_are_not_alike(rng: np.random.Generator) -> None:
    """Two of other bits, and three, are right in the default kernel; what has no sense is refused."""
    w, v, u = (weights(rng, 64, 32, bits, 32, True) for bits in (4, 2, 4))
    a = whole(rng, (3, 64), F16, 1)
    with gk.emulate():
        found = gk.glu(a, w, v, lambda x: max(x, 0), out=poison((3, 32), F32))
        three = gk.matmul(a, InterleavedColumns(w, v, u), out=poison((3, 32), F32), epilogue=epilogues.Fold(lambda x, y, z: x + y - z))
    assert np.array_equal(found, np.maximum(expected(a, w), 0) * expected(a, v))
    assert np.array_equal(three, expected(a, w) + expected(a, v) - expected(a, u))
    with pytest.raises(TypeError, match="packed integers beside another part"):
        InterleavedColumns(w, np.ones((64, 32), F16))
    with pytest.raises(ValueError, match=r"part 1 of InterleavedColumns has shape \(64, 36\)"):
        InterleavedColumns(w, weights(rng, 64, 36, 4, 32, True))
    with pytest.raises(ValueError, match="glu: .* has dtype bfloat16 and part 0 float16"), gk.emulate():
        gk.glu(a, w, weights(rng, 64, 32, 4, 32, True, BF16))


# -- what is refused ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("fields", "said"), [
    (dict(operator=MMAOp()), "operator=.*QuantisedMMAOp"),
    (dict(operator=QuantisedMMAOp(2)), r"operator=QuantisedMMAOp\(2\).*4 bits"),
    (dict(global_a_layout=RowMajor(BF16)), r"global_a_layout=.*QuantisedMMAOp\(\) multiplies float16"),
    (dict(operator=QuantisedMMAOp(4, BF16), global_a_layout=RowMajor(BF16)), "(?s)global_b_layout=.*multiplies bfloat16"),
    (dict(global_a_layout=ColMajor(F16)), "global_a_layout=.*RowMajor"),
    (dict(global_c_layout=RowMajor(F32)), "global_c_layout=.*Residual"),
    (dict(stages=0), "stages=0"),
    (dict(splits=3), "splits=3"),
    (dict(block_shape=Tile(M=32, N=64, K=64)), "compute_warp=.*all rows of the block"),
    (dict(warps_per_block=3), "warps_per_block=3.*4 warps"),
    (dict(block_shape=Tile(M=16, N=64, K=128), compute_warp=Tile(M=16, N=32, K=64)), "compute_warp=.*group=32"),
    (dict(transform_shared_to_regs_b=gk.transforms.Map(abs)), "transform_shared_to_regs_b=")])
def test_configurations(fields: dict[str, Any], said: str, rng: np.random.Generator) -> None:
    b = weights(rng, 128, 64, 4, 32, True)
    with pytest.raises(gk.ConfigError, match=said):
        mapping(b, 16, 64, 64, 32, **fields)


def test_problems(rng: np.random.Generator) -> None:
    for k, n, said in ((64, 33, "N=33.*multiple of 4"), (40, 32, "K=40")):
        b = weights(rng, k, n, 4, 8, True)
        with pytest.raises(gk.ConfigError, match=said):
            product(_EMULATOR, np.ones((1, k), F16), b, mapping(b, 16, 32, 32, 32))


@pytest.mark.parametrize(("changed", "said"), [
    (dict(scales=np.ones((2, 36), F32)), "scales has dtype float32; float16 is needed"),
    (dict(scales=np.ones((2, 36), BF16)), "scales has dtype bfloat16; float16 is needed"),
    (dict(zeros=np.ones((2, 36), np.int32)), "zeros has dtype int32; uint8 is needed")])
def test_dtypes_of_its_arrays(changed: dict[str, Any], said: str, rng: np.random.Generator) -> None:
    b, a = weights(rng, 128, 36, 4, 64, False), whole(rng, (3, 128), F16, 2)
    for of_a in (a, np.asfortranarray(a)):                                    # by this kernel, and by another one
        with gk.emulate(), pytest.raises(TypeError, match=said):
            gk.matmul(of_a, Matrix(b.array, replace(b.layout, **changed)))
    with gk.emulate(), pytest.raises(TypeError, match="b has dtype int32; words of uint32"):
        gk.matmul(a, Matrix(b.array.view(np.int32), b.layout))


def test_other_kernels_refuse_the_operator() -> None:
    for kernel in ("singlestage", "multistage"):
        with pytest.raises(gk.ConfigError, match="kernel='quantised'"):
            gk.get_config(operator=QuantisedMMAOp(), kernel=kernel, global_a_layout=RowMajor(F16), device=H100)
    with pytest.raises(ValueError, match="bits=3"):
        QuantisedMMAOp(3)
    for bits, dtype in ((4, F32), (2, E4M3)):
        with pytest.raises(ValueError, match=rf"QuantisedMMAOp\(bits={bits}, dtype={dtype}\)"):
            QuantisedMMAOp(bits, dtype)


# -- machine code ---------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.parametrize(("bits", "rows"), [(4, 1), pytest.param(4, 16, marks=pytest.mark.thorough),
                                             pytest.param(2, 1, marks=pytest.mark.thorough), (4, 64)])
def test_its_code(bits: int, rows: int) -> None:
    """Nothing is spilled, words come 16 bytes at a time, and an integer takes 1.6 instructions to become a float16; 1.1 where
    a part's sums are multiplied by its scale."""
    n = 4096 if rows <= 32 else 4100                  # columns that TMA does not take: others are Hopper's kernel's
    b = Matrix(np.zeros((4096 * bits // WORD, n), np.uint32), GroupQuantised(F16, np.ones((32, n), F16), bits, 128))
    with gk.emulate():
        conf = gk.plan(np.ones((rows, 4096), F16), b, out=np.empty((rows, n), F16)).config
    assert conf.kernel == "quantised"
    made = ahead.compile_config(conf, device=H100, gemm_shape=dict(M=rows, N=n, K=4096), operands=dict(b=b.array))
    assert made.usage.spill_stores == made.usage.spill_loads == made.usage.stack_bytes == 0
    counts = made.instructions
    slabs = conf.stages * conf.compute_warp.size.K // conf.operator.shape[2]
    loaded = slabs * (conf.block_shape.size.M // 8 * (4 // bits) + conf.compute_warp.size.N // 32)
    assert made.sass.count("LDG.E.128") == 2 * loaded, counts
    pairs = slabs * conf.compute_warp.size.N // 8 * 16 // bits
    halves = sum(count for name, count in counts.items() if name.startswith(("HMUL2", "HADD2", "HFMA2")))
    a_pair = 1 if rows <= 16 else 2                    # without the scale, or with it
    assert a_pair * pairs <= halves <= a_pair * pairs + 40, counts
