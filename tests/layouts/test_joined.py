"""Matrices joined along M, N or K, in every kernel: values, machine code, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, transforms
from gemmkit.epilogues import Bias, Elementwise, Epilogue, Fold, ReLU, Residual, Scale, activations
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import MAX_PLUS, FPUOp, MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.ptx_machine.compare import PTX
from tests.support.joined import F32, FAMILIES, JOINS, config, dtype_of, folded_product, joined_product, parts
from tests.support.machines import is_poison, on_machines, poison, whole

# ==========================================================================================================================
# Matrices joined along M, N or K as A, B or both, in every kernel: against NumPy in float64, into poisoned outputs.
#
# Values are small whole numbers, so results are right or wrong.


@pytest.mark.kin(4)
@pytest.mark.sample(32)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("join", JOINS)
def test_joined_along_every_axis(machine: Any, family: str, join: str) -> None:
    got, expected = joined_product(machine, family, join)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(48)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("order", [("C", "F"), ("F", "C"), ("F", "F")])
@pytest.mark.parametrize(("shift", "gap"), [(0, 0), (1, 0), (8, 8), (0, 3)], ids=str)
def test_orders_misaligned_bases_and_lines(machine: Any, family: str, order: tuple[str, str], shift: int, gap: int) -> None:
    got, expected = joined_product(machine, family, "K", order, shift, gap)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("join", ["K in three", "M and N"])
def test_a_transpose_joins_the_transposes(machine: Any, family: str, join: str) -> None:
    got, expected = joined_product(machine, family, join, transposed=True)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_with_transforms_and_an_epilogue(machine: Any, family: str) -> None:
    """Coordinates are those in the joined matrix."""
    signs = transforms.Map(lambda x, i, k: x if k < 20 else -x)
    bias = whole(np.random.default_rng(0), (29,), "f4")
    with machine.session():
        there = machine.array(bias)
    got, _ = joined_product(machine, family, "K", transform_global_to_shared_a=signs,
                     epilogue=epilogues.Bias(there) | epilogues.ReLU())
    rng, dtype = np.random.default_rng(len("K")), dtype_of(family)
    x, h = parts(rng, (37,) * 2, (20, 13), dtype)
    w, u = parts(rng, (20, 13), (29,) * 2, dtype)
    expected = np.maximum(x.astype("f8") @ w.astype("f8") - h.astype("f8") @ u.astype("f8") + bias, 0)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.kin(4)
@pytest.mark.sample(10, at=9)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
@pytest.mark.parametrize("shape", [(1, 1, (1, 1)), (33, 17, (16, 32)), (7, 65, (31, 2, 5)), (3, 4, (0, 0)), (0, 5, (2, 3))], ids=str)
def test_the_kernel_that_a_call_chooses(machine: Any, dtype: str, shape: tuple[int, int, tuple[int, ...]]) -> None:
    rng, (M, N, widths) = np.random.default_rng(2), shape
    x, w = ([whole(rng, (M, k), dtype) for k in widths], [whole(rng, (k, N), dtype) for k in widths])
    with machine.session():
        got = gk.matmul(gk.layouts.Concat(*map(machine.array, x), axis=1), gk.layouts.Concat(*map(machine.array, w), axis=0))
    expected = sum(a.astype("c16" if dtype == "c8" else "f8") @ b.astype("c16" if dtype == "c8" else "f8") for a, b in zip(x, w))
    np.testing.assert_array_equal(machine.numpy(got), expected)


@on_machines
def test_parts_of_different_orders(machine: Any) -> None:
    """Where no one layout reads all parts, each is read by its own."""
    rng = np.random.default_rng(3)
    x, h, w = whole(rng, (21, 20), "f4"), np.asfortranarray(whole(rng, (21, 13), "f4")), whole(rng, (33, 9), "f4")
    with machine.session():
        got = gk.matmul(gk.layouts.Concat(machine.array(x), machine.array(h), machine.array(x), axis=1), machine.array(np.concatenate([w, w[:20]])))
    np.testing.assert_array_equal(machine.numpy(got), np.concatenate([x, h, x], 1).astype("f8") @ np.concatenate([w, w[:20]]).astype("f8"))


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_stacks(machine: Any, dtype: str) -> None:
    rng = np.random.default_rng(4)
    x, h, z = (whole(rng, (2, 3, 7, k), dtype) for k in (5, 4, 2))
    w = whole(rng, (3, 11, 9), dtype)
    with machine.session():
        got = gk.matmul(gk.layouts.Concat(*map(machine.array, (x, h, z)), axis=-1), machine.array(w))
        one = gk.matmul(gk.layouts.Concat(*(machine.array(part[0, 0]) for part in (x, h, z)), axis=1), machine.array(w))
    both = np.concatenate([x, h, z], -1).astype("f8")
    np.testing.assert_array_equal(machine.numpy(got), both @ w.astype("f8"))
    np.testing.assert_array_equal(machine.numpy(one), both[0, 0] @ w.astype("f8"))


@on_machines
def test_gemm_ex(machine: Any) -> None:
    rng = np.random.default_rng(5)
    x, h, w, u, c = (whole(rng, shape, "f4") for shape in ((5, 20), (4, 20), (12, 5), (12, 4), (20, 12)))
    with machine.session():
        there = machine.array(c)
        gk.blas.gemmEx("T", "T", 2.0, gk.layouts.Concat(machine.array(x), machine.array(h), axis=0),
                       gk.layouts.Concat(machine.array(w), machine.array(u), axis=1), 3.0, there)
    np.testing.assert_array_equal(machine.numpy(there), 2 * (x.T @ w.T + h.T @ u.T) + 3 * c)


@on_machines
def test_a_plan_takes_other_parts(machine: Any) -> None:
    rng = np.random.default_rng(6)
    shapes = (7, 5), (7, 4), (5, 9), (4, 9)
    with machine.session():
        x, h, w, u = (machine.array(whole(rng, shape, "f4")) for shape in shapes)
        run = gk.plan(gk.layouts.Concat(x, h, axis=1), gk.layouts.Concat(w, u, axis=0))
        others = [whole(rng, shape, "f4") for shape in shapes]
        x, h, w, u = map(machine.array, others)
        with machine.compiles_nothing():
            got = run(gk.layouts.Concat(x, h, axis=1), gk.layouts.Concat(w, u, axis=0))
            again = gk.matmul(gk.layouts.Concat(x, h, axis=1), gk.layouts.Concat(w, u, axis=0))
        with pytest.raises(ValueError, match="a differs from the plan's"):
            run(gk.layouts.Concat(x, h[:, :3], axis=1), gk.layouts.Concat(w, u, axis=0))
        with pytest.raises(ValueError, match="b is one array, and the plan was made with one of several"):
            run(gk.layouts.Concat(x, h, axis=1), w)
        room = machine.array(np.zeros((11, 9), "f4"))
        with pytest.raises(ValueError, match=r"a part of a Concat or InterleavedColumns \(b\) overlaps out"):
            run(gk.layouts.Concat(x, h, axis=1), gk.layouts.Concat(w, room[5:9], axis=0), out=room[:7])
    expected = others[0] @ others[2] + others[1] @ others[3]
    np.testing.assert_array_equal(machine.numpy(got), expected)
    np.testing.assert_array_equal(machine.numpy(again), expected)


@on_machines
def test_other_numbers_on_the_ordinary_units(machine: Any) -> None:
    """An identity other than 0 stands beyond K's end, and never between parts."""
    rng = np.random.default_rng(7)
    x, h, w = whole(rng, (9, 5), "f4"), whole(rng, (9, 8), "f4"), whole(rng, (13, 11), "f4")
    with machine.session():
        got = gk.matmul(gk.layouts.Concat(machine.array(x), machine.array(h), axis=1), machine.array(w),
                        operator=MAX_PLUS)
    both = np.concatenate([x, h], 1)
    np.testing.assert_array_equal(machine.numpy(got), (both[:, :, None] + w[None]).max(1))


# ==========================================================================================================================
# Operands of several arrays that do not fit: what is said, and that nothing has been written.

X, H, W, U = (np.ones(shape, np.float32) for shape in ((7, 5), (7, 4), (5, 9), (4, 9)))
V = np.ones((5, 9), np.float32)
ROOM = np.zeros((16, 16), np.float32)


class OfItsOwn(Epilogue):
    def tile(self, spec: Any, d: Any, tile: Any, values: Any, shape: Any) -> None: ...


CONCATS: dict[str, tuple[Any, type[Exception], str]] = {
    "one array": (lambda: gk.layouts.Concat(X, axis=1), ValueError, r"Concat\(\) got 1 arrays; two or more are needed"),
    "no array": (lambda: gk.layouts.Concat(X, [[1.0]], axis=1), TypeError, "part 1 of Concat must be a CuPy array"),
    "a structured one": (lambda: gk.layouts.Concat(X, gk.layouts.DiagonalMatrix(X[0]), axis=1), TypeError, "part 1 of Concat is a DiagonalMatrix; an array is needed"),
    "a vector": (lambda: gk.layouts.Concat(X, X[0], axis=1), ValueError, "part 1 of Concat has 1 dimensions; a matrix of 2 is needed"),
    "dtypes": (lambda: gk.layouts.Concat(X, H.astype("f2"), axis=1), ValueError, "part 1 of Concat has dtype float16 and part 0 float32; convert one"),
    "rows": (lambda: gk.layouts.Concat(X, H[:3], axis=1), ValueError, r"part 1 of Concat has shape \(3, 4\) and part 0 \(7, 5\); both need as many rows"),
    "columns": (lambda: gk.layouts.Concat(X, X, H, axis=0), ValueError, r"part 2 of Concat has shape \(7, 4\) .* both need as many columns"),
    "axis 2": (lambda: gk.layouts.Concat(X, H, axis=2), ValueError, "axis=2 of Concat: its parts have 2 dimensions; axis=-2 joins rows, axis=-1 columns"),
    "axis of a stack": (lambda: gk.layouts.Concat(ROOM.reshape(4, 8, 8), ROOM.reshape(4, 8, 8), axis=0), ValueError,
                        "axis=0 of Concat would join stacks of matrices; axis=-2 joins rows"),
    "axis K": (lambda: gk.layouts.Concat(X, H, axis="K"), TypeError, "axis='K' of Concat: a whole number is needed"),
    "axis True": (lambda: gk.layouts.Concat(X, H, axis=True), ValueError, "axis=True of Concat"),
    "stacks": (lambda: gk.layouts.Concat(X, X[None], axis=-1), ValueError, "the dimensions before the last two must be the same"),
    "one braided": (lambda: gk.layouts.InterleavedColumns(W), ValueError, r"InterleavedColumns\(\) got 1 arrays; two or more"),
    "five braided": (lambda: gk.layouts.InterleavedColumns(W, W, W, W, W), ValueError, r"InterleavedColumns\(\) got 5 arrays; 4 are the most"),
    "shapes": (lambda: gk.layouts.InterleavedColumns(W, V[:, :8]), ValueError, r"part 1 of InterleavedColumns has shape \(5, 8\) and part 0 \(5, 9\)"),
    "its transpose": (lambda: gk.layouts.InterleavedColumns(W, V).T, TypeError, "an InterleavedColumns has no transpose, .* interleave the parts' transposes"),
    "a function of one": (lambda: Fold(lambda x: x), TypeError, r"Fold\(f=.*takes 1 arguments; a function of the parts, f\(gate, up\)"),
    "what follows": (lambda: Fold(lambda x, y: x) | 3, TypeError, r"Fold\(then=3\): an Epilogue is needed"),
    "what follows stores": (lambda: Fold(lambda x, y: x) | OfItsOwn(), TypeError, "cannot follow a Fold; override finish instead"),
    "what stands before": (lambda: ReLU() | Fold(lambda x, y: x), TypeError, "takes interleaved columns, so no epilogue can precede it"),
    "a layout's part": (lambda: layouts.Joined(3, layouts.RowMajor("f4"), X, 0, 1), TypeError, r"Joined\(first=3\): a Layout is needed"),
    "a layout's dtypes": (lambda: layouts.Joined(layouts.RowMajor("f2"), layouts.RowMajor("f4"), X, 0, 1), ValueError, "first has dtype float16"),
    "a layout's axis": (lambda: layouts.Joined(layouts.RowMajor("f4"), layouts.RowMajor("f4"), X, 2, 1), ValueError, r"Joined\(axis=2\)"),
    "a braid of nothing": (lambda: layouts.ColumnInterleaved(3, 1, 2), TypeError, r"ColumnInterleaved\(layout=3\): a Layout is needed"),
    "a layout of five": (lambda: layouts.ColumnInterleaved(layouts.RowMajor("f4"), 1, 5), ValueError, r"ColumnInterleaved\(parts=5\): 2 to 4 are needed"),
    "an activation": (lambda: gk.glu(X, W, V, lambda x, y: x), TypeError, r"glu\(activation=.*takes 2 arguments; f\(x\)"),
}


@pytest.mark.usefixtures("in_the_emulator")
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CONCATS)
def test_what_cannot_be_made(name: str) -> None:
    make, kind, said = CONCATS[name]
    with pytest.raises(kind, match=said):
        make()


def two(gate: float, up: float) -> float:
    return gate + up


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "K": (lambda out: gk.matmul(gk.layouts.Concat(X, H, axis=1), W, out=out), ValueError, "that is K=5 rows, and a says K=9"),
    "a layout beside": (lambda out: gk.matmul(gk.layouts.Concat(X, H, axis=1), gk.layouts.Concat(W, U, axis=0), out=out,
                                              global_a_layout=layouts.RowMajor("f4")), TypeError, "global_a_layout is given with a, a Concat"),
    "no fold": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), out=out), gk.ConfigError, r"B interleaves the columns of 2 matrices.*give epilogues.Fold\(f\)"),
    "another epilogue": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), out=out, epilogue=ReLU()), gk.ConfigError, "B interleaves the columns of 2 matrices"),
    "no braid": (lambda out: gk.matmul(X, W, out=out, epilogue=Fold(two)), gk.ConfigError, "it folds interleaved columns; give gemmkit.layouts.InterleavedColumns"),
    "a braid as a": (lambda out: gk.matmul(gk.layouts.InterleavedColumns(X, X), W, out=out, epilogue=Fold(two)), TypeError, "a is an InterleavedColumns, .* it can be b alone"),
    "too few parts": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V, W), out=out, epilogue=Fold(two)), gk.ConfigError,
                      "its function takes 2 arguments, and B interleaves 3 matrices; a function of 3 values is needed"),
    "too many parts": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), out=out, epilogue=Fold(lambda i, f, g: i)), gk.ConfigError,
                       "its function takes 3 arguments, and B interleaves 2 matrices"),
    "with c": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), ROOM[:7, :9], out=out, epilogue=Fold(two)), gk.ConfigError,
               r"c is given with an InterleavedColumns.*Fold\(f\) \| Residual\(c\)"),
    "a transform of D": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), out=out, epilogue=Fold(two),
                                               transform_shared_to_global_d=transforms.Map(activations.relu)), gk.ConfigError,
                         "transform_shared_to_global_d=.*put it into the fold's function"),
    "out's columns": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W[:, :8], V[:, :8]), out=out, epilogue=Fold(two)), ValueError,
                      r"out has shape \(7, 9\); \(7, 8\) is needed"),
    "a residual's shape": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), out=out, epilogue=Fold(two) | Residual(ROOM[:7, :8])), ValueError,
                           r"array of Residual has shape \(7, 8\); the result is 7 x 9"),
    "a bias' length": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), out=out, epilogue=Fold(two) | Bias(ROOM[0])), ValueError, "9"),
    "a layout of its own": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), out=out, epilogue=Fold(two), global_d_layout=layouts.Planar("c8")),
                            TypeError, "of a folded product: RowMajor or ColMajor is needed"),
    "a block of 16 columns": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V, W, V), out=out, conf=gk.get_config(
        operator=FPUOp(16, 16), global_a_layout=layouts.RowMajor("f4"), block_shape=gk.Tile(M=16, N=16, K=8)),
        epilogue=Fold(lambda i, f, g, o: i)), gk.ConfigError, "block_shape=.*N must be a multiple of 32, 8 columns of each"),
    "what f returns": (lambda out: gk.matmul(X, gk.layouts.InterleavedColumns(W, V), out=out, epilogue=Fold(lambda gate, up: None)), gk.ComponentError, "returned None"),
    "gemmEx": (lambda out: gk.blas.gemmEx("N", "N", 1.0, X, gk.layouts.InterleavedColumns(W, V), 0.0, out), TypeError, "b is an InterleavedColumns, whose products only a Fold"),
}


@pytest.mark.usefixtures("in_the_emulator")
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused_write_nothing(name: str) -> None:
    call, kind, said = CALLS[name]
    out = poison((7, 9), "f4")
    with pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


@pytest.mark.usefixtures("in_the_emulator")
@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("operand", ["a", "b", "braid"])
def test_out_may_overlap_no_part(at: int, operand: str) -> None:
    """Neither the first, which is the operand's own array, nor those that its layout holds."""
    room = poison((20, 20), "f4")
    of_a, of_b = [X, H, X], [np.ones((14, 9), "f4")[:5], U, V]
    if operand == "a":
        of_a[at] = room[3:10, 2:2 + of_a[at].shape[1]]
    else:
        of_b[at] = room[3:3 + (5 if operand == "braid" else of_b[at].shape[0]), 2:11]
    out = room[:7, :9]
    with pytest.raises(ValueError, match=f"{'b' if operand == 'braid' else operand}.* overlap|overlaps {'b' if operand != 'a' else 'a'}"):
        if operand == "braid":
            of_b = [V if part.shape != (5, 9) else part for part in of_b]
            gk.matmul(X, gk.layouts.InterleavedColumns(*of_b), out=out, epilogue=Fold(lambda i, f, g: i + f + g))
        else:
            gk.matmul(gk.layouts.Concat(*of_a, axis=1), gk.layouts.Concat(*of_b, axis=0), out=out)
    assert is_poison(room)


@pytest.mark.usefixtures("in_the_emulator")
def test_parts_on_different_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    names = gk.layouts.Concat.__init__.__globals__
    real = names["describe"]
    monkeypatch.setitem(names, "describe", lambda x, name="array": real(x, name)._replace(device=1 if x is H else 0))
    with pytest.raises(ValueError, match="part 1 of Concat has its memory on device 1 and part 0 on device 0; all parts must be"):
        gk.layouts.Concat(X, H, axis=1)


@pytest.mark.usefixtures("in_the_emulator")
def test_a_fold_reads_as_it_is_written() -> None:
    chain = Fold(two) | ReLU() | Elementwise(activations.relu)
    assert repr(chain).startswith("Fold(<function two") and repr(chain).endswith(f"| ReLU() | Elementwise({activations.relu!r})")
    assert [type(part).__name__ for part in gk.epilogues.parts(chain)] == ["Fold", "ReLU", "Elementwise"]


@pytest.mark.usefixtures("in_the_emulator")
def test_what_is_not_chosen_for_a_braid_is_said() -> None:
    """A configuration for plain operands takes a braid: what it says of D is made to fit."""
    conf = config("multistage")
    out = gk.matmul(X.astype("f2"), gk.layouts.InterleavedColumns(W.astype("f2"), V.astype("f2")), conf=conf, epilogue=Fold(two))
    np.testing.assert_array_equal(out, np.full((7, 9), 10, "f4"))
    assert isinstance(conf.global_d_layout, layouts.RowMajor)


# ==========================================================================================================================
# Machine code of joined and braided operands: no spills, no calls, accesses as wide as the parts allow.

SIZE = 512
MAPPINGS: dict[str, tuple[str, Any, Tile]] = {
    "singlestage": ("singlestage", MMAOp(), Tile(M=64, N=64, K=32)), "multistage": ("multistage", MMAOp(), Tile(M=64, N=64, K=32)),
    "warp_specialised": ("warp_specialised", WGMMAOp(128), Tile(M=128, N=128, K=64)),
    "ordinary units": ("multistage", FPUOp(32, 32), Tile(M=64, N=64, K=16))}


def gated(gate: Any, up: Any) -> Any:
    return activations.silu(gate) * up


def gates(i: Any, f: Any, g: Any, o: Any, m: int, n: int) -> Any:
    return i * f + g * o + m


def compiled(name: str, a: Any, b: Any, d: Any = RowMajor, columns: int = SIZE, **fields: Any) -> ahead.CompiledKernel:
    """The kernel of operands that are matrices or come with layouts."""
    kernel, operator, block = MAPPINGS[name]
    dtype = operator.fragment_a.dtype
    of_a, of_b = (x.layout if isinstance(x, gk.layouts.Matrix) else (ColMajor if x.flags.f_contiguous else RowMajor)(dtype) for x in (a, b))
    conf = gk.get_config(operator=operator, kernel=kernel, block_shape=block, global_a_layout=of_a, global_b_layout=of_b,
                         global_d_layout=d(dtype), **fields)
    out = np.zeros((SIZE, columns), dtype, order="F" if d is ColMajor else "C")
    arrays = {name: x.array if isinstance(x, gk.layouts.Matrix) else x for name, x in (("a", a), ("b", b))}
    return ahead.compile_config(conf, device=H100, gemm_shape=dict(M=SIZE, N=SIZE, K=SIZE), operands=dict(arrays, out=out))


def zeros(name: str, rows: int, columns: int, order: Any = "C") -> np.ndarray:
    return np.zeros((rows, columns), MAPPINGS[name][1].fragment_a.dtype, order=order)


@pytest.mark.thorough
@pytest.mark.sample(12)
@pytest.mark.compile
@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("boundary", [256, 100, 7])
def test_joined_along_k(name: str, boundary: int) -> None:
    a = gk.layouts.Concat(zeros(name, SIZE, boundary), zeros(name, SIZE, SIZE - boundary), axis=1)
    b = gk.layouts.Concat(zeros(name, boundary, SIZE), zeros(name, SIZE - boundary, SIZE), axis=0)
    kernel = compiled(name, a, b)
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0
    assert "ld.local" not in kernel.ptx and "call" not in kernel.ptx.replace("callprototype", "")
    if boundary == 256:                                        # whole boxes, or 16 bytes
        assert any(copy in kernel.ptx for copy in ("cp.async.bulk.tensor", "ld.global.v4", "ld.global.nc.v4", "cp.async.cg"))


@pytest.mark.sample(16)
@pytest.mark.compile
@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("count", "f"), [(2, gated), (4, gates)])
@pytest.mark.kin(4)
def test_braids(name: str, order: str, count: int, f: Any) -> None:
    """As many loads as a plain operand's: the part is chosen in front of them."""
    b = gk.layouts.InterleavedColumns(*(zeros(name, SIZE, SIZE // count, order) for _ in range(count)))
    kernel = compiled(name, zeros(name, SIZE, SIZE), b, columns=SIZE // count, epilogue=Fold(f) | Scale(2.0))
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0
    assert kernel.instructions["LDL"] == 0
    assert kernel.instructions["LDG"] <= 24
    if name == "warp_specialised":
        assert kernel.instructions["UTMASTG"] == 1 and kernel.instructions["UTMALDG"] > 0      # D and A by TMA


# ==========================================================================================================================
# What was compiled of joined and braided operands, run without a GPU: by the PTX of their kernels (`tests.ptx_machine`), against
# NumPy in float64. (TMA and wgmma the interpreter does not have: Hopper's kernel is emulated, and runs on a GPU.)

INTERPRETED = [family for family in FAMILIES if family != "warp_specialised"]


@pytest.mark.compile
@pytest.mark.kin(4)
@pytest.mark.sample(5)
@pytest.mark.parametrize("family", INTERPRETED)
@pytest.mark.parametrize("join", ["K at odds", "M and N", "K, nothing of one"])
def test_joined(family: str, join: str) -> None:
    assert join in JOINS
    got, expected = joined_product(PTX, family, join)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.compile
@pytest.mark.kin(4)
@pytest.mark.sample(9)
@pytest.mark.parametrize("family", INTERPRETED)
@pytest.mark.parametrize(("order", "shift", "gap"), [(("C", "F"), 1, 0), (("F", "C"), 8, 8), (("F", "F"), 0, 3)], ids=str)
def test_joined_of_any_order_and_alignment(family: str, order: tuple[str, str], shift: int, gap: int) -> None:
    got, expected = joined_product(PTX, family, "K", order, shift, gap)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.compile
@pytest.mark.kin(4)
@pytest.mark.sample(12)
@pytest.mark.parametrize("family", INTERPRETED)
@pytest.mark.parametrize(("count", "shape", "order", "d"), [(2, (37, 29, 33), "C", RowMajor(F32)), (3, (20, 32, 16), "F", ColMajor(F32)),
                                                            (4, (33, 24, 40), "C", RowMajor(F32)), (4, (5, 13, 0), "F", RowMajor(F32))], ids=str)
def test_folded(family: str, count: int, shape: tuple[int, int, int], order: str, d: Any) -> None:
    got, expected = folded_product(PTX, family, count, shape, order, d=d, coordinates=True)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.compile
@pytest.mark.kin(4)
def test_parts_of_different_orders_and_stacks() -> None:
    rng = np.random.default_rng(3)
    x, h, w = whole(rng, (2, 21, 20), "f4"), whole(rng, (2, 13, 21), "f4").swapaxes(1, 2), whole(rng, (33, 9), "f4")
    with PTX.session():
        got = gk.matmul(gk.layouts.Concat(x, h, axis=-1), gk.layouts.InterleavedColumns(w, 2 * w, w + 1), epilogue=Fold(lambda i, f, g: f - i + g) | epilogues.ReLU())
    a = np.concatenate([x, h], -1).astype("f8")
    np.testing.assert_array_equal(got, np.maximum(a @ w + a @ (w + 1), 0))
