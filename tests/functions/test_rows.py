"""Functions of rows against NumPy in float64: dtypes, odd sizes, views, in place, functions of the user's, bad input."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import ComponentError
from gemmkit.emulator.errors import EmulatorError
from gemmkit.emulator.machine import current
from gemmkit.functions.rows import RowFunction
from gemmkit.kernels import rows as team
from gemmkit.kernels.rows import (
    BlockTeam,
    ClusterTeam,
    RegisterRow,
    StreamedRow,
    fold,
    largest,
    moments,
    put,
    put_one,
    smallest,
    total,
)
from gemmkit.runtime.device import A100, H100
from gemmkit.tuning import problems
from gemmkit.tuning.problems import choose
from tests.support.machines import BF16, epsilon, on_machines, poison
from tests.support.patches import Seeded

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")


def softmax(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    raised = np.exp(scale * x - np.max(scale * x, axis=-1, keepdims=True, initial=-np.inf))
    return raised / raised.sum(axis=-1, keepdims=True)


def layernorm(x: np.ndarray, gamma: Any = 1.0, beta: Any = 0.0, eps: float = 1e-5) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) * gamma + beta


def rmsnorm(x: np.ndarray, gamma: Any = 1.0, eps: float = 1e-6) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gamma


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., np.ndarray]]] = {
    "softmax": (gk.softmax, softmax),
    "log_softmax": (gk.log_softmax, lambda x: np.log(softmax(x))),
    "layernorm": (gk.layernorm, layernorm),
    "rmsnorm": (gk.rmsnorm, rmsnorm),
}


def close(found: np.ndarray, expected: np.ndarray, dtype: Any, working: Any = F32) -> None:
    """Within the rounding of the result, and of a few operations in the working type."""
    scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
    bound = 2 * epsilon(dtype) * np.abs(expected) + 40 * epsilon(working) * scale + float(np.finfo("f2").tiny if dtype == F16 else 0)
    assert not np.isnan(found.astype(float)).any()
    assert np.all(np.abs(found.astype(np.float64) - expected) <= bound)


@on_machines
@pytest.mark.sample(13)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 7), (2, 31), (9, 33), (4, 64), (3, 127), (2, 768), (2, 1000), (3, 1024), (2, 1031),
                                   (1, 4104)])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows(machine: Any, name: str, dtype: np.dtype, shape: tuple[int, int], rng: np.random.Generator) -> None:
    ours, numpy = FUNCTIONS[name]
    x = (2 * rng.standard_normal(shape) + 0.5).astype(dtype)
    given, out = machine.array(x), machine.array(poison(shape, dtype))
    with machine.session():
        assert ours(given, out=out) is out
        made = ours(given)
    expected = numpy(x.astype(np.float64))
    close(machine.numpy(out), expected, dtype, max(F32, dtype, key=lambda d: d.itemsize))
    assert np.array_equal(machine.numpy(made), machine.numpy(out)) and type(made) is type(given)
    assert machine.numpy(made).dtype == dtype


@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("source", ["held", "streamed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_that_no_block_can_hold_are_streamed(machine: Any, name: str, source: str, rng: np.random.Generator,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """33,000 elements of 16 bits; in the emulator a block that may hold less."""
    columns = 300 if machine.emulated else 32_768 if source == "held" else 33_000
    monkeypatch.setattr(problems, "RESIDENT", 0)                          # no rows are few
    if machine.emulated:
        monkeypatch.setattr(problems, "MOST_WARPS", 2)
        monkeypatch.setattr(problems, "MOST_PIECES", 2 if source == "held" else 1)
    team, kind, vector = choose(problems.RowsProblem(columns, 2, F32, rows=2), H100).spec
    assert isinstance(team, BlockTeam) and isinstance(kind, RegisterRow if source == "held" else StreamedRow) and vector > 1
    rows_are_right(machine, name, columns, rng)


@on_machines
@pytest.mark.parametrize("source", ["held", "streamed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_long_rows_of_clusters(machine: Any, name: str, source: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows that no block holds, or rows that no cluster holds. Not all threads have a last piece."""
    columns = 33_000 if source == "held" else 140_000
    if machine.emulated and source == "streamed":
        columns = 40_008
        monkeypatch.setattr(problems, "MOST_PIECES", 1)
    team, kind, _ = choose(problems.RowsProblem(columns, 2, F32, rows=2), H100).spec
    assert isinstance(team, ClusterTeam) and isinstance(kind, RegisterRow if source == "held" else StreamedRow)
    many, kind, _ = choose(problems.RowsProblem(columns, 2, F32, rows=34), H100).spec
    assert isinstance(many, ClusterTeam) == (source == "streamed") and isinstance(kind, StreamedRow)
    assert not isinstance(choose(problems.RowsProblem(columns, 2, F32, rows=2), A100).spec[0], ClusterTeam)
    rows_are_right(machine, name, columns, rng)


def rows_are_right(machine: Any, name: str, columns: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, columns)).astype(F16)
    given = machine.array(x)
    with machine.session():
        found = machine.numpy(FUNCTIONS[name][0](given))
        FUNCTIONS[name][0](given, out=given)                          # each element is read by the thread that stores it
    close(found, FUNCTIONS[name][1](x.astype(np.float64)), F16)
    assert np.array_equal(machine.numpy(given), found)


@dataclass(frozen=True)
class Halved(RowFunction):
    """Each row as often as its own sum asks for."""

    def __call__(self, row: Any) -> None:
        factor = total(row, lambda x, n: 0 * x) + 1
        while total(row, lambda x, n: abs(x)) * factor > 1:
            factor *= 0.5
        put(row, lambda x, n: x * factor)


@on_machines
@pytest.mark.parametrize("columns", [8, 40, 128])
def test_rows_of_a_warp_go_their_own_ways(machine: Any, columns: int, rng: np.random.Generator) -> None:
    """Lanes of a warp have rows of their own, and fold them as often as each needs; not all lanes have one."""
    team, source, _ = choose(problems.RowsProblem(columns, 2, F32), H100).spec
    assert team.threads < 32 and team.rows == 4 * 32 // team.threads and source.pieces <= 2
    x = (rng.standard_normal((team.rows + 3, columns)) * 2.0 ** rng.integers(-4, 9, (team.rows + 3, 1))).astype(F16)
    given = machine.array(x)
    with machine.session():
        found = machine.numpy(gk.rowwise(given, Halved())).astype(F64)
    sums = np.abs(x.astype(F64)).sum(1, keepdims=True)
    close(found, x / 2.0 ** np.maximum(0, np.ceil(np.log2(sums))), F16)


@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("columns", [8, 9, 96])
@pytest.mark.parametrize("affine", [F16, F32, F64], ids=str)
def test_gamma_and_beta(machine: Any, columns: int, affine: np.dtype, rng: np.random.Generator) -> None:
    """Of any float dtype, at any address; other ones of the same kind compile nothing."""
    x = rng.standard_normal((5, columns)).astype(F16)
    for n in range(2):
        memory = rng.standard_normal(2 * columns + 1).astype(affine)
        gamma, beta = memory[1:columns + 1], memory[columns + 1:]
        held = machine.array(memory)
        with machine.session():
            given = machine.array(x), held[1:columns + 1], held[columns + 1:]
            if n:
                with machine.compiles_nothing():
                    found = gk.layernorm(*given), gk.rmsnorm(*given[:2], eps=0.1)
            else:
                found = gk.layernorm(*given), gk.rmsnorm(*given[:2], eps=0.1)
        wide = x.astype(np.float64), gamma.astype(np.float64), beta.astype(np.float64)
        close(machine.numpy(found[0]), layernorm(*wide), F16)
        close(machine.numpy(found[1]), rmsnorm(*wide[:2], eps=0.1), F16)


@pytest.mark.kin(4)
@on_machines
def test_views(machine: Any, rng: np.random.Generator) -> None:
    """Leading axes that are one, rows at any distance, elements at any, misaligned rows, one row; results of another dtype."""
    x = rng.standard_normal((4, 6, 40)).astype(F32)
    held = machine.array(x)
    out = machine.array(poison((4, 6, 41), F16))
    for cut in (np.s_[:, :, :32], np.s_[:, :, 1:34], np.s_[1, ::2, 3:], np.s_[2, 3], np.s_[:, 0], np.s_[:, :, ::3], np.s_[:, :, ::-1],
                np.s_[..., :1]):
        with machine.session():
            found = gk.softmax(held[cut])
        close(machine.numpy(found), softmax(x[cut].astype(np.float64)), F32)
    with machine.session():
        gk.softmax(held[:, :, 3:], scale=0.5, out=out[:, :, 2:39])
    found = machine.numpy(out)
    close(found[:, :, 2:39], softmax(x[:, :, 3:].astype(np.float64), 0.5), F16)
    assert np.isnan(found[:, :, :2]).all() and np.isnan(found[:, :, 39:]).all()       # nothing is written beside it


@on_machines
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype, result", [(F64, F16), (F32, BF16), (F16, F32), (F32, F64), (BF16, F16)], ids=str)
def test_results_of_another_dtype(machine: Any, name: str, dtype: np.dtype, result: np.dtype, rng: np.random.Generator) -> None:
    """The exponential is as short as both the working type and the result allow."""
    function, reference = FUNCTIONS[name]
    x = (3 * rng.standard_normal((3, 130))).astype(dtype)
    out = machine.array(poison(x.shape, result))
    with machine.session():
        function(machine.array(x), out=out)
    close(machine.numpy(out), reference(x.astype(np.float64)), result, F32 if dtype.itemsize < 8 else F64)


@on_machines
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 0, 4), (0,)])
def test_nothing(machine: Any, shape: tuple[int, ...]) -> None:
    with machine.session():
        assert gk.softmax(machine.array(np.empty(shape, F32))).shape == shape


@on_machines
def test_what_is_not_finite(machine: Any) -> None:
    """A NaN makes its row NaN and no other; -inf has no weight; the largest of floats do not overflow."""
    x = np.array([[1, np.nan, 2, 3], [-np.inf, 0, 0, -np.inf], [3e38, -3e38, 3e38, 0], [-np.inf] * 4], F32)
    with machine.session():
        found = machine.numpy(gk.softmax(machine.array(x)))
    assert np.isnan(found[0]).all() and np.isnan(found[3]).all()
    assert np.array_equal(found[1:3], [[0, 0.5, 0.5, 0], [0.5, 0, 0.5, 0]])


def test_the_variance_does_not_cancel(rng: np.random.Generator) -> None:
    x = (1e4 + rng.standard_normal((2, 200))).astype(F32)
    with gk.emulate():
        found = gk.layernorm(x, eps=0.0)
    assert np.abs(found - layernorm(x.astype(np.float64), eps=0.0)).max() < 2e-3


# -- functions of the user's --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ArgMax(RowFunction):
    """The largest element's first place, into an array; and the row without it."""

    where: gk.Array
    outputs = ("where",)

    def __call__(self, row: Any) -> None:
        top = largest(row, lambda x, n: x)
        at = smallest(row, lambda x, n: n if x == top else 1e9)
        put_one(row, self.where, np.int32(at))
        put(row, lambda x, n: 0 if n == at else x)


@dataclass(frozen=True)
class Powers(RowFunction):
    """The product of all elements, by a fold of its own, and the sum of those left of the diagonal."""

    power: gk.Scalar
    times: int = 2

    def __call__(self, row: Any) -> None:
        product = fold(row, lambda x, n: x, lambda a, b: a * b, 1)
        left = total(row, lambda x, n: x if n < row.m else 0)
        put(row, lambda x, n: self.times * product + left * self.power)


@on_machines
def test_functions_of_the_users(machine: Any, rng: np.random.Generator) -> None:
    x = rng.permutation(60).reshape(4, 15).astype(F32)
    where = machine.array(poison((4,), np.int32))
    with machine.session():
        found = machine.numpy(gk.rowwise(machine.array(x), ArgMax(where)))
    assert np.array_equal(machine.numpy(where), x.argmax(axis=1))
    assert np.array_equal(found, np.where(x == x.max(axis=1, keepdims=True), 0, x))
    x = rng.choice([1.0, 2.0, -1.0], (4, 15)).astype(F32)
    with machine.session():
        found = machine.numpy(gk.rowwise(machine.array(x), Powers(np.float32(3))))
    left = np.tril(x, -1)[:, :15].sum(axis=1)
    assert np.array_equal(found, np.repeat((2 * x.prod(axis=1) + 3 * left)[:, None], 15, axis=1))


@on_machines
def test_changed_code_is_what_runs(machine: Any) -> None:
    """A helper that the function names is bound anew between two calls."""
    x = machine.array(np.ones((1, 4), F32))
    space: dict[str, Any] = {}
    exec("def helper(x):\n    return 2 * x\n", space)
    globals()["_helper"] = space["helper"]
    with machine.session():
        first = machine.numpy(gk.rowwise(x, _Named()))
        exec("def helper(x):\n    return 3 * x\n", space)
        globals()["_helper"] = space["helper"]
        second = machine.numpy(gk.rowwise(x, _Named()))
    assert first.tolist() == [[2.0] * 4] and second.tolist() == [[3.0] * 4]


@dataclass(frozen=True)
class _Named(RowFunction):
    def __call__(self, row: Any) -> None:
        put(row, lambda x, n: _helper(x))                              # type: ignore[name-defined]  # noqa: F821


@on_machines
def test_the_same_bits_every_time(machine: Any, rng: np.random.Generator) -> None:
    x = machine.array(rng.standard_normal((3, 1500)).astype(F32))
    with machine.session():
        one, two = machine.numpy(gk.softmax(x)), machine.numpy(gk.softmax(x))
    assert np.array_equal(one, two)
    if machine.emulated:
        with gk.emulate(seed=3):
            assert np.array_equal(gk.softmax(x), one)


def test_they_are_compiled_ahead() -> None:
    from gemmkit.plans.ahead import recorded

    found = recorded(lambda: gk.softmax(np.zeros((2, 64), F16)))
    assert [made.launchable.kernel.__name__ for made in found] == ["rows"]
    assert found[0].launchable.threads == 128 and found[0].launchable.blocks == 1


# -- moments --------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Moments(RowFunction):
    """Twice, so that what the first ones leave is in the way of the second ones."""

    means: gk.Array
    variances: gk.Array

    outputs = "means", "variances"

    def __call__(self, row: Any) -> None:
        mean, _ = moments(row)
        _, variance = moments(row)
        put_one(row, self.means, mean)
        put_one(row, self.variances, variance)
        put(row, lambda x, n: x)


@pytest.mark.kin(4)
@on_machines
@pytest.mark.sample(9)
@pytest.mark.parametrize("columns", [1, 31, 96, 1024, 1025, 1111, 2048, 4104, 33000])
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_moments(machine: Any, dtype: np.dtype, columns: int, rng: np.random.Generator) -> None:
    """Far from 0, and with an element far from the others: the squares of neither cancel. Warps may have no element of a row."""
    x = (rng.standard_normal((2, columns)) + 300).astype(dtype)
    x[1, columns // 2] = -30000
    working = np.promote_types(dtype, F32)
    means, variances = machine.array(poison((2,), working)), machine.array(poison((2,), working))
    given = machine.array(x)
    with machine.session():
        gk.rowwise(given, Moments(means, variances), out=given)
    wide, eps = x.astype(F64), np.finfo(working).eps
    np.testing.assert_allclose(machine.numpy(means), wide.mean(1), rtol=0, atol=8 * eps * np.abs(wide).mean(1).max())
    np.testing.assert_allclose(machine.numpy(variances), wide.var(1), rtol=64 * eps, atol=(8 * eps * 300) ** 2)
    assert np.array_equal(machine.numpy(given), x)


# -- faults -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_barrier_of_a_cluster_is_found(which: int, seeded: Seeded) -> None:
    """Before warps leave their values, and after."""
    original, seen = team.cluster_barrier, Counter[tuple]()

    def barrier() -> None:
        thread = current()
        seen[thread.block.index, thread.index] += 1
        if (seen[thread.block.index, thread.index] - 1) % 2 != which:
            original()

    seeded(team, "cluster_barrier", barrier)
    with gk.emulate(), pytest.raises(EmulatorError):
        gk.softmax(np.zeros((1, 33_000), F16))


def test_blocks_of_a_cluster_end_together(seeded: Seeded) -> None:
    original, seen = team.cluster_barrier, Counter[tuple]()

    def barrier() -> None:
        thread = current()
        seen[thread.block.index, thread.index] += 1
        if seen[thread.block.index, thread.index] <= 4:                   # two of each of the two folds
            original()

    seeded(team, "cluster_barrier", barrier)
    with gk.emulate(), pytest.raises(EmulatorError, match="has ended|must meet"):
        gk.softmax(np.zeros((1, 33_000), F16))


@pytest.mark.parametrize("function", [gk.softmax, lambda x: gk.rowwise(x, Moments(poison((1,), F32), poison((1,), F32)))],
                         ids=["folds", "moments"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_barrier_is_found(which: int, function: Any, seeded: Seeded) -> None:
    """Before warps leave their values, where the last ones may still be read, and after."""
    original, seen = team.barrier, Counter[int]()

    def barrier() -> None:
        seen[current().index] += 1
        if (seen[current().index] - 1) % 2 != which:
            original()

    seeded(team, "barrier", barrier)
    with gk.emulate(), pytest.raises(EmulatorError):
        function(np.zeros((1, 2048), F16))


EXTREMES = [-720, -1e4, -1e9, -1e10, -1e30, -2.4e38, -3.4e38, 1e4, 1e10, 3.3e38, -np.inf, np.inf, np.nan, 1e-40, 0.0]


@pytest.mark.kin(4)
@on_machines
@pytest.mark.sample(7)
@pytest.mark.parametrize("columns", [6, 32, 129])
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.3, -0.3], ids=str)
def test_rows_of_large_numbers(machine: Any, scale: float, dtype: np.dtype, columns: int) -> None:
    """One number all along a row, or beside ordinary ones: nothing raises, and infinities and NaN are where NumPy has them. Products with
    the scale are rounded before they are subtracted from each other, so that equal ones leave 0."""
    x = np.repeat(np.array([EXTREMES, EXTREMES], F64).T.reshape(-1, 1), columns, 1)
    x[::2, ::3] = np.arange(len(x[0, ::3])) % 4
    x = np.clip(x, -3.3e38, 3.3e38, out=x, where=np.isfinite(x)).astype(dtype)
    working = max(F32, dtype, key=lambda d: d.itemsize)
    with np.errstate(all="ignore"):
        scaled = (x.astype(working) * working.type(scale)).astype(F64)
        less = scaled - scaled.max(-1, keepdims=True)
        total = np.exp(less).sum(-1, keepdims=True)
    with machine.session():
        found = machine.numpy(gk.softmax(machine.array(x), scale=scale))
        logarithms = machine.numpy(gk.log_softmax(machine.array(x), scale=scale))
    unit = max(epsilon(dtype), 40 * epsilon(working))
    for made, expected in ((found, np.exp(less) / total), (logarithms, less - np.log(total))):
        made = made.astype(F64)
        assert np.array_equal(np.isnan(made), np.isnan(expected))
        held = np.isfinite(expected) & (np.abs(expected) < 3e38)        # by a number of the dtype
        assert np.all(np.abs(made[held] - expected[held]) <= 2 * unit * np.maximum(np.abs(expected[held]), 1))


# -- bad input ----------------------------------------------------------------------------------------------------------

X = np.zeros((4, 6), F32)


@dataclass(frozen=True)
class Turned(RowFunction):
    def __call__(self, row: Any) -> None:
        put(row, lambda x, n: x * 1j)


@pytest.mark.parametrize("call,error,words", [
    (lambda: gk.softmax([[1.0]]), TypeError, "x must be"),
    (lambda: gk.softmax(X.astype(int)), TypeError, "x has dtype int64; float16, bfloat16, float32 or float64 is needed"),
    (lambda: gk.softmax(X, out=X.astype(complex)), TypeError, "out has dtype complex128"),
    (lambda: gk.softmax(np.float32(1)), TypeError, "x must be"),
    (lambda: gk.softmax(np.zeros((), F32)), ValueError, "x has no axis"),
    (lambda: gk.softmax(X, out=np.zeros((6, 4), F32)), ValueError, r"out has shape \(6, 4\); x has \(4, 6\)"),
    (lambda: gk.softmax(X[:2], out=X[1:3]), ValueError, "out overlaps x in memory; it may be x itself"),
    (lambda: gk.softmax(X, out=np.broadcast_to(np.zeros(6, F32), (4, 6))), ValueError, "out is read-only"),
    (lambda: gk.softmax(np.zeros((4, 5, 6), F32)[:, ::2]), ValueError, "its rows do not lie at one distance"),
    (lambda: gk.softmax(X, scale="1"), TypeError, "scale='1': a real number is needed"),
    (lambda: gk.softmax(X, scale=True), TypeError, "scale=True"),
    (lambda: gk.layernorm(X, eps=math.nan), ValueError, "eps=nan: a finite number is needed"),
    (lambda: gk.softmax(X, scale=1e39), ValueError, r"scale=1e\+39: a finite number of float32 is needed.*x of float32"),
    (lambda: gk.rmsnorm(X.astype(F16), eps=1e39), ValueError, r"eps=1e\+39: a finite number of float32"),
    (lambda: gk.layernorm(X, X[0] + 2j, X[0]), TypeError, "gamma has dtype complex64; it must be real"),
    (lambda: gk.layernorm(X, X[0], X[0] + 2j), TypeError, "beta has dtype complex64"),
    (lambda: gk.rowwise(X, Turned()), ComponentError, "Turned.__call__ returned complex64.*\n.*\n.*\n.*a real number is needed"),
    (lambda: gk.layernorm(X, np.ones(6, F32)), ValueError, "gamma is given alone; give gamma and beta"),
    (lambda: gk.layernorm(X, beta=np.ones(6, F32)), ValueError, "beta is given alone"),
    (lambda: gk.layernorm(X, np.ones(5, F32), np.ones(6, F32)), ValueError, r"gamma has shape \(5,\); rows of 6 elements need \(6,\)"),
    (lambda: gk.rmsnorm(X, np.ones((1, 6), F32)), ValueError, "gamma.*1"),
    (lambda: gk.rmsnorm(X, X[0], out=X), ValueError, "gamma of RMSNormRows overlaps out"),
    (lambda: gk.rowwise(X, lambda row: None), TypeError, "function=.*a RowFunction is needed"),
    (lambda: gk.rowwise(X, ArgMax(np.zeros(3, np.int32))), ValueError, r"where has shape \(3,\); 4 rows need \(4,\)"),
    (lambda: gk.softmax(X, stream="first"), TypeError, "stream"),
])
def test_bad_input(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    before = X.copy()
    with gk.emulate(), pytest.raises(error, match=words):
        call()
    assert np.array_equal(X, before)


def test_a_host_array_needs_the_emulator() -> None:
    with pytest.raises(TypeError, match="x is a host array"):
        gk.softmax(X)


@dataclass(frozen=True)
class Outside(RowFunction):
    def __call__(self, row: Any) -> None:
        put(row, lambda x, n: x + row.x[row.m, row.columns])


def test_an_access_beyond_a_row_is_found() -> None:
    with gk.emulate(), pytest.raises(EmulatorError):
        gk.rowwise(np.zeros((1, 4), F32), Outside())
