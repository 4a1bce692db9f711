"""Operands that cp.async brings in pieces: lines of joined and braided operands, and tensors by separable coordinates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.epilogues import Fold
from gemmkit.layouts import ColMajor, Matricised, RowMajor
from gemmkit.operators import MIN_PLUS, FPUOp, MMAOp
from gemmkit.plans import ahead
from gemmkit.ptx.copy_async import offset_of
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.ptx_machine.compare import PTX
from tests.support.machines import MACHINES, on_machines, poison, whole
from tests.support.sm80 import routes
from tools.sass_gate.listing import Listing

# ==========================================================================================================================
# Lines of joined and braided operands by cp.async (`kernels.sm80.joined`): where it is taken, and what it brings.

OPERATORS: dict[str, Any] = {"f16": MMAOp(), "f64": MMAOp(dtype="f8"), "f32": FPUOp(32, 32)}
MACHINE = [pytest.param(MACHINES["emulator"], id="emulator"), pytest.param(PTX, id="ptx", marks=[pytest.mark.compile, pytest.mark.thorough]),
           pytest.param(MACHINES["gpu"], id="gpu", marks=pytest.mark.gpu)]


def config(kind: str, b: Any) -> gk.Config:
    operator = OPERATORS[kind]
    dtype = operator.fragment_a.dtype
    return gk.get_config(kernel="multistage", operator=operator, global_a_layout=RowMajor(dtype), global_b_layout=b(dtype),
                         global_d_layout=RowMajor(operator.fragment_c.dtype), block_shape=Tile(M=32, N=32, K=16))


def parts(rng: np.random.Generator, rows: tuple[int, ...], columns: tuple[int, ...], dtype: Any, order: Any) -> list[np.ndarray]:
    return [np.asarray(whole(rng, shape, dtype), order=order) for shape in zip(rows, columns)]


@pytest.mark.kin(4)
@pytest.mark.sample(6)
@pytest.mark.parametrize("machine", MACHINE)
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_lines_are_copied_from_the_array_that_has_them(machine: Any, kind: str, order: str) -> None:
    """Extents that are no multiples of the tile's, so that some lie beyond an edge; boundaries that are none of the k-tile's."""
    rng, dtype = np.random.default_rng(0), OPERATORS[kind].fragment_a.dtype
    x, w = parts(rng, (20,) * 3, (24, 8, 40), dtype, "C"), parts(rng, (24, 8, 40), (40,) * 3, dtype, order)
    v = parts(rng, (72,) * 2, (24,) * 2, dtype, order)
    conf = config(kind, RowMajor if order == "C" else ColMajor)
    with machine.session():
        a, b = gk.layouts.Concat(*map(machine.array, x), axis=1), gk.layouts.Concat(*map(machine.array, w), axis=0)
        braid = gk.layouts.InterleavedColumns(*map(machine.array, v))
        joined, braided = gk.plan(a, b, conf=conf), gk.plan(a, braid, conf=conf, epilogue=Fold(lambda gate, up: gate - 2 * up))
        out = machine.array(poison((20, 40), conf.global_d_layout.dtype))
        joined(a, b, out=out)
        folded = machine.array(poison((20, 24), conf.global_d_layout.dtype))
        braided(a, braid, out=folded)
    left = np.concatenate(x, 1).astype("f8")
    np.testing.assert_array_equal(machine.numpy(out), left @ np.concatenate(w).astype("f8"))
    np.testing.assert_array_equal(machine.numpy(folded), left @ (v[0].astype("f8") - 2 * v[1].astype("f8")))
    routes = [type(plan._compiled.spec.b.route).__name__ for plan in (joined, braided)]          # type: ignore[attr-defined]
    across = kind == "f32" and order == "F"                    # single elements are left to the registers
    assert routes == ["StagedByThreads" if across else "CpAsyncJoined"] * 2


REFUSED = {"a boundary of 7": (7, 33, 0, "C"), "a misaligned part": (8, 32, 1, "C"), "parts of different orders": (8, 32, 0, "F")}


@pytest.mark.kin(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_the_registers(name: str) -> None:
    first, second, shift, order = REFUSED[name]
    rng = np.random.default_rng(1)
    x = whole(rng, (24, first), "f2")
    room = np.zeros(24 * second + shift, "f2")
    h = room[shift:].reshape((24, second), order=order)
    h[:] = whole(rng, (24, second), "f2")
    w = whole(rng, (first + second, 16), "f2")
    with gk.emulate():
        a = gk.layouts.Concat(x, h, axis=1)
        run = gk.plan(a, w, conf=config("f16", RowMajor))
        got = run(a, w)
    assert type(run._compiled.spec.a.route).__name__ == "StagedByThreads"                                  # type: ignore[attr-defined]
    np.testing.assert_array_equal(got, np.concatenate([x, h], 1).astype("f8") @ w.astype("f8"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("machine", MACHINE)
def test_beyond_the_end_stands_the_identity(machine: Any) -> None:
    rng = np.random.default_rng(2)
    x, w = whole(rng, (9, 20), "f4"), parts(rng, (12, 8), (36,) * 2, "f4", "C")
    with machine.session():
        b = gk.layouts.Concat(*map(machine.array, w), axis=0)
        run = gk.plan(machine.array(x), b, operator=MIN_PLUS.sized(dict(M=32, N=32, MB=4, NB=8), np.dtype("f4"), np.dtype("f4"), np.dtype("f4")))
        got = run(machine.array(x), b)
    np.testing.assert_array_equal(machine.numpy(got), (x[:, :, None] + np.concatenate(w)[None]).min(1))


# ==========================================================================================================================
# Tensors in the multistage kernel: cp.async from wherever an element's row and column say. Values are small whole numbers, so
# that every result is exactly right or wrong; D is poisoned before.

F32, F64, C64 = np.dtype("f4"), np.dtype("f8"), np.dtype("c8")
SMALL = dict(operator=FPUOp(16, 16), block_shape=Tile(M=32, N=32, K=16), kernel="multistage",
             compute_warp=Tile(M=16, N=16, K=16), warps_per_block=4, stages=3)

#: Extents in which vectors fit, in which they do not, with a comb of four, and with one that stands alone.
EXTENTS = (dict(i=8, j=5, k=12, l=3, m=8, n=7), dict(i=5, j=7, k=3, l=9, m=5, n=6), dict(i=4, j=9, k=4, l=12, m=4, n=9),
           dict(i=1, j=37, k=1, l=41, m=1, n=23))
SPECS = ("minl,njmk->ijkl", "mink,jnlm->ijkl", "imln,jnkm->ijkl", "inmk,jlmn->ijkl", "ikl,ljk->ij", "ijm,mkl->lkij")


def tensors(rng: np.random.Generator, spec: str, extents: dict[str, int], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    a, b = spec.split("->")[0].split(",")
    return whole(rng, tuple(extents[x] for x in a), dtype), whole(rng, tuple(extents[x] for x in b), dtype)


def contracted(machine: Any, spec: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result, poisoned before, and what it should be."""
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    wanted = np.asarray(np.einsum(spec, a.astype(kind), b.astype(kind)))
    out = machine.array(poison(wanted.shape, a.dtype))
    with machine.session():
        gk.einsum(spec, machine.array(a), machine.array(b), out=out)
    return np.asarray(machine.numpy(out)), wanted


@pytest.mark.kin(4)
@pytest.mark.sample(72)
@on_machines
@pytest.mark.parametrize("extents", EXTENTS, ids=lambda of: "x".join(map(str, of.values())))
@pytest.mark.parametrize("dtype", [F32, F64, C64], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_contractions(machine: Any, spec: str, dtype: np.dtype, extents: dict[str, int], rng: np.random.Generator) -> None:
    """By the mapping that is chosen."""
    found, wanted = contracted(machine, spec, *tensors(rng, spec, extents, dtype))
    assert np.array_equal(found, wanted)


# -- by a mapping of many small tiles -------------------------------------------------------------------------------------

def product(machine: Any, a: Any, b: Any, rows_a: int, rows_b: int, near: bool, **fields: Any) -> np.ndarray:
    """A's first dimensions are rows and B's first are terms; D is poisoned before."""
    la, lb = (replace(Matricised.of(describe(x), rows), near=near) for x, rows in ((a, rows_a), (b, rows_b)))
    M, K, N = np.prod(a.shape[:rows_a]), np.prod(b.shape[:rows_b]), np.prod(b.shape[rows_b:])
    out = machine.array(poison((M, N), F32))
    with machine.session():
        conf = gk.get_config(gemm_shape=dict(M=M, N=N, K=K), global_a_layout=la, global_b_layout=lb,
                             global_d_layout=layouts.RowMajor(F32), **{**SMALL, **fields})
        gk.matmul(a, b, out=out, conf=conf, gemm_shape=dict(M=M, N=N, K=K))
    return np.asarray(machine.numpy(out))


def matrix(x: np.ndarray, rows: int) -> np.ndarray:
    """A tensor's matrix: of each group of dimensions the first is the fastest."""
    order = (*range(rows)[::-1], *range(rows, x.ndim)[::-1])
    return x.astype(np.float64).transpose(order).reshape(int(np.prod(x.shape[:rows])), -1)


VIEWS = {
    "whole": lambda x: x,
    "reversed": lambda x: x[::-1, :, ::-1],
    "every other": lambda x: x[:, ::2],
    "off by one": lambda x: x[:, :, 1:],
    "not contiguous": lambda x: x[..., ::2],
}


@pytest.mark.kin(4)
@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("near", [False, True], ids=["64 bits", "32 bits"])
@pytest.mark.parametrize("side", "ab")
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("view", VIEWS)
def test_views(machine: Any, view: str, order: str, side: str, near: bool, rng: np.random.Generator) -> None:
    """Offsets in both widths; contiguous along the first dimension or the last; several tiles and rounds, none of them
    whole."""
    x = whole(rng, (8, 9, 12, 4), F32)
    x = VIEWS[view](machine.array(np.asfortranarray(x) if order == "first" else x))
    seen = np.asarray(machine.numpy(x))
    other = whole(rng, (*seen.shape[2:], 7, 5) if side == "a" else (7, 5, *seen.shape[:2]), F32)
    a, b = (seen, other) if side == "a" else (other, seen)
    given = (x, machine.array(other)) if side == "a" else (machine.array(other), x)
    assert np.array_equal(product(machine, *given, 2, 2, near), matrix(a, 2) @ matrix(b, 2))


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("splits", [1, 3])
def test_a_semiring_at_edges(machine: Any, splits: int, rng: np.random.Generator) -> None:
    """Beyond the end of K stands infinity."""
    a, b = whole(rng, (5, 7, 3, 9), F32), whole(rng, (3, 9, 4, 8), F32)
    wanted = (matrix(a, 2)[:, :, None] + matrix(b, 2)[None]).min(axis=1)
    operator = MIN_PLUS.sized(dict(M=16, N=16, MB=4, NB=8), F32, F32, F32)
    found = product(machine, machine.array(a), machine.array(b), 2, 2, True, operator=operator, splits=splits)
    assert np.array_equal(found, wanted)


@dataclass(frozen=True)
class Panels(layouts.Layout):
    """A user's: columns lie in panels of 8."""

    is_separable, vector_axis, neighbours = True, 1, 8

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return data[j // 8, i, j % 8]

    def row_offset(self, data: Any, i: int) -> int:
        return offset_of(data, (0, i, 0))

    def column_offset(self, data: Any, j: int) -> int:
        return offset_of(data, (j // 8, 0, j % 8))


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("side", "ab")
def test_a_layout_of_the_users(machine: Any, side: str, rng: np.random.Generator) -> None:
    panels, other = whole(rng, (6, 37, 8), F32), whole(rng, (48, 37) if side == "a" else (29, 37), F32)
    plain = panels.transpose(1, 0, 2).reshape(37, 48)
    given = dict(global_a_layout=Panels("float32")) if side == "a" else dict(global_b_layout=Panels("float32"))
    M, N, K = (37, 37, 48) if side == "a" else (29, 48, 37)
    out = machine.array(poison((M, N), F32))
    left, right = (panels, other) if side == "a" else (other, panels)
    with machine.session():
        conf = gk.get_config(gemm_shape=dict(M=M, N=N, K=K), **{"global_a_layout": layouts.RowMajor(F32), "global_b_layout":
                             layouts.RowMajor(F32), **given}, global_d_layout=layouts.RowMajor(F32), **SMALL)
        gk.matmul(machine.array(left), machine.array(right), out=out, conf=conf, gemm_shape=dict(M=M, N=N, K=K))
    assert np.array_equal(machine.numpy(out), (plain @ other if side == "a" else other @ plain))


# -- which route ----------------------------------------------------------------------------------------------------------

def route_of_a(a: np.ndarray, **fields: Any) -> str:
    M, K = int(np.prod(a.shape[:2])), int(np.prod(a.shape[2:]))
    sizes = dict(M=M, N=64, K=K)
    conf = gk.get_config(gemm_shape=sizes, device=H100, global_a_layout=Matricised.of(describe(a), 2), **{
        "global_b_layout": layouts.RowMajor(a.dtype), "global_d_layout": layouts.RowMajor(a.dtype), **SMALL, **fields})
    return routes(MACHINES["emulator"], conf, a, np.empty((K, 64), a.dtype), gemm_shape=sizes)[0]


def test_routes() -> None:
    """Vectors along M, single elements along K and where extents are odd, and through registers what is transformed or has
    elements of two bytes at odd places."""
    assert route_of_a(np.empty((8, 8, 8, 8), F32).transpose(3, 2, 1, 0)) == "CpAsyncSeparable 4"
    assert route_of_a(np.empty((8, 8, 8, 8), F32)) == "CpAsyncSeparable 1"
    assert route_of_a(np.empty((9, 5, 6, 7), F32).transpose(3, 2, 1, 0)) == "CpAsyncSeparable 1"
    doubled = Map(lambda x: x + x)
    assert route_of_a(np.empty((8, 8, 8, 8), F32), transform_global_to_shared_a=doubled) == "StagedByThreads"
    halves = dict(operator=MMAOp(), block_shape=Tile(M=32, N=32, K=32), compute_warp=Tile(M=16, N=16, K=32))
    assert route_of_a(np.empty((8, 8, 8, 8), np.float16).transpose(0, 1, 3, 2), **halves) == "CpAsyncSeparable 8"
    assert route_of_a(np.empty((5, 7, 9, 7), np.float16), **halves) == "StagedByThreads"


def test_an_array_that_is_not_near() -> None:
    """32 bits would not hold its offsets: refused before anything is launched."""
    far = np.lib.stride_tricks.as_strided(np.zeros(8, F32), (2, 2, 2), (2**31, 8, 4))
    assert not Matricised.of(describe(far), 1).near
    with pytest.raises(ValueError, match=r"near=False"):
        Matricised(F32, (2,), (2, 2), near=True).check(describe(far), 2, 4, "a")


@pytest.mark.thorough
def test_machine_code() -> None:
    """A contraction of the TCCG benchmark: copies of 16 bytes without registers, nothing spilled, and few instructions beside
    the products: 1,024 of 1,186 in a round inside."""
    a, b = np.empty((72, 84, 72, 84), F32).transpose(3, 1, 2, 0), np.empty((72, 84, 72, 72), F32).transpose(0, 2, 3, 1)
    out = np.empty((84, 84, 84, 72), F32)
    M, N, K = 84 * 84, 84 * 72, 72 * 72
    la, lb, ld = Matricised.of(describe(a), 2), Matricised.of(describe(b), 2), Matricised.of(describe(out), 2)
    conf = gk.get_config(gemm_shape=dict(M=M, N=N, K=K), device=H100, global_a_layout=la, global_b_layout=lb, global_d_layout=ld,
                         kernel="multistage", operator=FPUOp(M=64, N=32, MB=8, NB=4, dtype="float32"), stages=4,
                         block_shape=Tile(M=128, N=64, K=16), compute_warp=Tile(M=64, N=32, K=16), warps_per_block=4,
                         blocks_per_sm=3)
    kernel = ahead.compile_config(conf, device=H100, gemm_shape=dict(M=M, N=N, K=K), operands=dict(a=a, b=b, out=out))
    assert (kernel.usage.spill_stores, kernel.usage.stack_bytes) == (0, 0)
    listing = Listing.of(kernel.sass)
    loops = [[listing.opcode(n) for n in range(loop.begin, loop.end)] for loop in listing.loops()]
    inside = min((loop for loop in loops if loop.count("FFMA") == 1024), key=len)
    assert len(inside) < 1210 and "LDG" not in inside and "STS" not in inside
