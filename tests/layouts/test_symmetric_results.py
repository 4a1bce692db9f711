"""Symmetric results: which tiles are computed, what is stored in one half and in both, in every kernel; what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import Tile, epilogues
from gemmkit.kernels.collectives.scheduler import Columns, Grouped, HalfOfTiles, Hilbert
from gemmkit.layouts import ColMajor, RowMajor, Symmetric, SymmetricMatrix
from gemmkit.operators import WGMMAOp
from tests.support.joined import F16, F32, config, dtype_of
from tests.support.machines import is_poison, on_machines, poison, whole

HALVES = "lower", "upper", "both"
FAMILIES = "singlestage", "multistage", "warp_specialised", "multistage on the ordinary units"


def kept(half: str, n: int) -> np.ndarray:
    """Which elements are stored."""
    everything = np.ones((n, n), bool)
    return {"lower": np.tril, "upper": np.triu, "both": np.asarray}[half](everything)


def check(out: np.ndarray, wanted: np.ndarray, half: str, hermitian: bool = False) -> None:
    """All of the half, to the bit; nothing of the other."""
    there = kept(half, out.shape[-1])
    np.testing.assert_array_equal(out[..., there], wanted[..., there])
    assert is_poison(np.ascontiguousarray(out[..., ~there]))
    if half == "both":
        turned = np.swapaxes(out, -1, -2)
        np.testing.assert_array_equal(out, turned.conj() if hermitian else turned)


def product(x: np.ndarray) -> np.ndarray:
    turned = np.swapaxes(x, -1, -2)
    wide = "c16" if x.dtype.kind == "c" else "f8"
    return x.astype(wide) @ turned.astype(wide)


# -- the order --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("tile", [(128, 128), (128, 256), (256, 128), (64, 192), (128, 192)], ids=str)
@pytest.mark.parametrize("order", [Columns(), Grouped(3), Hilbert()], ids=repr)
def test_every_tile_of_the_half_once(order: Any, tile: tuple[int, int], upper: bool) -> None:
    half = HalfOfTiles.of(order, tile, upper)
    for n in (1, 128, 129, 300, 511, 1000, 1537, 2048):
        rows, columns = -(-n // tile[0]), -(-n // tile[1])
        found = [half.block(at, rows, columns) for at in range(half.count(rows, columns))]
        assert len(set(found)) == len(found)
        needed = {(m, k) for m in range(rows) for k in range(columns)
                  if (m * tile[0] < min((k + 1) * tile[1], n) if upper else k * tile[1] < min((m + 1) * tile[0], n))}
        assert needed <= set(found)
        side = math.ceil(n / math.lcm(*tile))
        assert len(found) == side * (side + 1) // 2 * (math.lcm(*tile) ** 2 // math.prod(tile))


# -- values -----------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("d", [RowMajor, ColMajor])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(37, 29), (96, 32), (1, 3), (65, 0)], ids=str)
def test_in_every_kernel(machine: Any, family: str, d: Any, half: str, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    n, K = sizes
    x = whole(rng, (n, K), dtype_of(family))
    conf = config(family, b=ColMajor, d=Symmetric(d(F32), half))
    with machine.session():
        out = machine.array(poison((n, n), F32, "C" if d is RowMajor else "F"))
        given = machine.array(x)
        gk.matmul(given, given.T, conf=conf, out=out)
        check(machine.numpy(out), product(x), half)


MAPPINGS = {
    "one": dict(M=64, N=64), "two": dict(M=128, N=64), "wide": dict(M=64, N=128), "pingpong": dict(M=64, N=64, schedule="pingpong"),
    "clusters": dict(M=64, N=64, cluster=(2, 1)), "clusters of rows": dict(M=64, N=64, cluster=(1, 2)), "thirds": dict(M=64, N=192),
    "shares": dict(M=64, N=128, splits=2), "by a workspace": dict(M=64, N=192, splits=3),
}


def hopper(half: str, M: int, N: int, schedule: str = "cooperative", cluster: tuple[int, int] = (1, 1), splits: int = 1,
           dtype: Any = F16, layout: Any = RowMajor) -> gk.Config:
    warps = 8 if schedule == "pingpong" else 4 * M // 64
    return gk.get_config(
        kernel="warp_specialised", operator=WGMMAOp(N), block_shape=Tile(M=M, N=N, K=64), schedule=schedule, splits=splits,
        warps_per_block=warps, cluster=Tile(M=cluster[0], N=cluster[1]), global_a_layout=RowMajor(F16), global_b_layout=ColMajor(F16),
        global_d_layout=Symmetric(layout(dtype), half))


@pytest.mark.kin(1)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("n", [136, 264, 61])
def test_by_tma(machine: Any, n: int, mapping: str, half: str, rng: np.random.Generator) -> None:
    """Square subtiles leave twice; those on the diagonal from the registers. 61 columns are no multiple of 16 bytes."""
    x = whole(rng, (n, 200), F16)
    with machine.session():
        out, given = machine.array(poison((n, n), F16)), machine.array(x)
        plan = gk.plan(given, given.T, conf=hopper(half, **MAPPINGS[mapping]), out=out)
        assert type(plan._compiled.spec.store).__name__ == ("DirectStore" if n % 8 else "SymmetricTmaStore")
        plan(given, given.T, out=out)
        check(machine.numpy(out), product(x), half)


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("half", HALVES)
def test_a_stack(machine: Any, half: str, rng: np.random.Generator) -> None:
    x = whole(rng, (3, 136, 40), F16)
    with machine.session():
        out, given = machine.array(poison((3, 136, 136), F16)), machine.array(x)
        gk.matmul(given, given.swapaxes(-1, -2), out=SymmetricMatrix(out, half))
        check(machine.numpy(out), product(x), half)


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("mapping", ["two", "pingpong"])
@pytest.mark.parametrize("half", HALVES)
def test_c_and_an_epilogue(machine: Any, half: str, mapping: str, rng: np.random.Generator) -> None:
    """They are asked for the elements of the half: what C has in the other is not seen in D."""
    x, c = whole(rng, (136, 72), F16), whole(rng, (136, 136), F32)
    there = kept("upper" if half == "upper" else "lower", 136)
    wanted = product(x) + c
    wanted = 2 * (wanted if half != "both" else np.where(there, wanted, wanted.T))
    with machine.session():
        out, given = machine.array(poison((136, 136), F16)), machine.array(x)
        gk.matmul(given, given.T, machine.array(np.where(there, c, np.float32(np.nan))), conf=hopper(half, **MAPPINGS[mapping]), out=out,
                  epilogue=epilogues.Scale(2.0))
        check(machine.numpy(out), wanted, half)


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
def test_as_chosen(machine: Any, dtype: str, half: str, rng: np.random.Generator) -> None:
    """In a view, whose rows lie further apart and begin anywhere; complex ones are Hermitian."""
    x = whole(rng, (75, 33), dtype)
    if x.dtype.kind == "c":
        x = x + 1j * whole(rng, (75, 33), dtype)
    with machine.session():
        out = machine.array(poison((80, 91), dtype))
        left, right = machine.array(x.astype(dtype)), machine.array(np.ascontiguousarray(x.conj().T.astype(dtype)))
        gk.matmul(left, right, out=SymmetricMatrix(out[3:78, 5:80], half, hermitian=True))
        found = machine.numpy(out)
    check(found[3:78, 5:80], x.astype("c16") @ x.astype("c16").conj().T, half, hermitian=True)
    found[3:78, 5:80] = poison((75, 75), dtype)
    assert is_poison(found)


@pytest.mark.sample(2)
@on_machines
def test_plans(machine: Any, rng: np.random.Generator) -> None:
    x, y = whole(rng, (72, 40), F16), whole(rng, (72, 40), F16)
    with machine.session():
        out = machine.array(poison((72, 72), F16))
        a, b = machine.array(x), machine.array(y)
        plan = gk.plan(a, a.T, out=SymmetricMatrix(out, "both"))
        for given, of in ((b, y), (a, x)):
            assert plan(given, given.T, out=SymmetricMatrix(out, "both")) is out
            check(machine.numpy(out), product(of), "both")
        check(machine.numpy(plan(b, b.T)), product(y), "both")


# -- bad input --------------------------------------------------------------------------------------------------------

X, OUT = np.ones((8, 4), F32), poison((8, 8), F32)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("call", "kind", "said"), [
    (lambda: gk.matmul(X, X.T, out=SymmetricMatrix(OUT, "left")), ValueError, ("half='left'", '"lower", "upper" or "both"')),
    (lambda: gk.matmul(X, X[:7].T, out=SymmetricMatrix(OUT)), ValueError, ("N=7", "N=8")),
    (lambda: gk.matmul(X, X.T, out=SymmetricMatrix(OUT[:, :7])), ValueError, ("(8, 7)", "square")),
    (lambda: gk.matmul(X, X[:7].T, conf=config("multistage on the ordinary units", b=ColMajor, d=Symmetric(RowMajor(F32)))), ValueError,
     ("8 x 7", "square")),
    (lambda: gk.matmul(SymmetricMatrix(OUT, "both"), X), TypeError, ("a is a SymmetricMatrix of both halves", "give the array")),
    (lambda: SymmetricMatrix(OUT, hermitian=1), TypeError, ("hermitian=1", "True or False")),
    (lambda: gk.matmul(X, X.T, out=SymmetricMatrix(OUT), epilogue=epilogues.RowReduce(np.empty(8, F32), "sum")), gk.ConfigError,
     ("RowReduce", "one half of D is computed")),
    (lambda: gk.matmul(X, X.T, out=SymmetricMatrix(OUT), epilogue=epilogues.Store(np.empty((8, 8), F32), RowMajor(F32))), gk.ConfigError,
     ("Store", "one half of D is computed")),
    (lambda: gk.matmul(X, X.T, OUT, out=SymmetricMatrix(OUT, "both")), ValueError, ("out is c", "give out memory of its own")),
    (lambda: gk.matmul(X, X.T, out=SymmetricMatrix(OUT, "both"), epilogue=epilogues.Residual(OUT, RowMajor(F32))), ValueError,
     ("overlaps out", "both halves is written at (j, i)")),
    (lambda: gk.matmul(OUT, X.T[:, :8], out=SymmetricMatrix(OUT, "both")), ValueError, ("K=4", "K=8")),
])
def test_refused(call: Any, kind: type, said: tuple[str, ...]) -> None:
    with gk.emulate(), pytest.raises(kind) as caught:
        call()
    for part in said:
        assert part in str(caught.value)
    assert is_poison(OUT)
