"""Float64 products by int8 products (`gemmkit.kernels.ozaki`): the arithmetic by itself, and products against exact ones."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels import ozaki
from gemmkit.kernels.ozaki import FEWEST, MODULI, MOST_K, Residues, by_pair, by_single, scale_of, whole_of
from gemmkit.lang.errors import ConfigError
from gemmkit.plans import ozaki as plans
from gemmkit.plans.ozaki import Remainder
from gemmkit.tuner.subjects import TunedProduct
from tests.support.machines import on_machines, poison

COUNTS = range(FEWEST, len(MODULI) + 1)


# -- the arithmetic ---------------------------------------------------------------------------------------------------

def test_moduli_are_coprime() -> None:
    assert all(math.gcd(p, q) == 1 for n, p in enumerate(MODULI) for q in MODULI[:n])
    assert [Residues(count).bits for count in COUNTS] == [50, 54, 58, 62]


@pytest.mark.parametrize("count", COUNTS)
def test_remainders_of_whole_numbers(count: int, rng: np.random.Generator) -> None:
    """Of any size that a scaled row has, and of those whose remainders are next to half of a modulus."""
    of = Residues(count)
    limit = math.isqrt(of.product // 2)
    numbers = [0, 1, -1, limit, -limit, *(int(limit * x) for x in rng.uniform(-1, 1, 40))]
    numbers += [p * int(k) + p // 2 + d for p in (*of.moduli, *map(int, of.of_pairs))
                for k in rng.uniform(-1, 1, 2) * limit / p for d in (0, 1)]
    for x in map(float, numbers):
        for n, p in enumerate(of.moduli):
            with np.errstate(all="ignore"):
                found = by_single(by_pair(np.float64(x), 0, of.of_pairs[n // 2], of.inverse_pairs[n // 2]), 0, of, n)
            assert found.dtype == np.int8 and (int(found) - int(x)) % p == 0, (x, p)


@pytest.mark.parametrize("count", COUNTS)
def test_remainders_of_sums(count: int, rng: np.random.Generator) -> None:
    """Of every sum of K products: bytes that are the remainder plus what `Residues.centres` says."""
    of, epilogue = Residues(count), Remainder(Residues(count))
    for n, p in enumerate(of.moduli):
        most = 127 * 127 * MOST_K if p < 256 else 2**31 - 1
        sums = [0, -1, most, -most, *rng.integers(-most, most, 60)]
        sums += [int(s) // p * p + d for s in rng.integers(-most // 2, most // 2, 20) for d in (-1, 0, p - 1)]
        for s in sums:
            with np.errstate(all="ignore"):
                found = epilogue(np.int32(s), 0, 0, n)                 # type: ignore[call-arg]
            assert found.dtype == np.uint8 and (int(found) - of.centres[n] - int(s)) % p == 0, (s, p)


@pytest.mark.parametrize("count", COUNTS)
def test_whole_numbers_of_remainders(count: int, rng: np.random.Generator) -> None:
    """Up to the margin below P / 2, to two roundings; no sum of parts of weights leaves 53 bits."""
    of = Residues(count)
    for part, steps in enumerate(zip(*of.of_weights)):
        unit = 1 << max(0, of.product.bit_length() - ozaki.PART * (part + 1))
        assert (sum(map(int, steps)) * 128 + int(of.start[part])) // unit <= 2**53
    most = int(of.norm(MOST_K)**2)
    numbers = [0, 1, -1, most, -most, *(int(Fraction(float(x)) * most) for x in rng.uniform(-1, 1, 100)),
               *(int(Fraction(float(x)) * 2**int(n)) for x, n in zip(rng.uniform(-1, 1, 60), rng.integers(1, 100, 60)))]
    for C in numbers:
        words = tuple(np.uint32((C % p + centre) << 8) for p, centre in zip(of.moduli, of.centres))
        found = whole_of(of, words, 1)
        assert abs(Fraction(float(found)) - C) <= abs(C) * Fraction(1, 2**52), C


def test_scales(rng: np.random.Generator) -> None:
    """The largest exponent whose power of four takes a sum to the limit or below it."""
    limit = np.float64(Residues(14).norm(100)**2)
    for squares in (*np.exp2(rng.uniform(-300, 300, 50)), limit, limit / 4, np.nextafter(limit, math.inf)):
        scale = scale_of(np.uint32(1), np.float64(squares), limit, 0)
        assert Fraction(float(squares)) * Fraction(4)**scale <= Fraction(float(limit)) * (1 + Fraction(1, 2**52))
        assert Fraction(float(squares)) * Fraction(4)**(scale + 1) > Fraction(float(limit)) * (1 - Fraction(1, 2**52))
    assert scale_of(np.uint32(0), np.float64(0), limit, 800) == 0
    for x in (math.inf, math.nan):
        assert scale_of(np.float64(x).view(np.uint64) >> np.uint64(32), np.float64(x), limit, 0) == ozaki.BAD


# -- products ---------------------------------------------------------------------------------------------------------

def exact(a: np.ndarray, b: np.ndarray) -> list[list[Fraction]]:
    rows, columns = ([[*map(Fraction, line)] for line in x.tolist()] for x in (a, b.T))
    return [[sum((x * y for x, y in zip(row, column)), Fraction(0)) for column in columns] for row in rows]


def bound(a: np.ndarray, b: np.ndarray, count: int) -> np.ndarray:
    """What rows and columns of finite numbers may be off by: that of the documentation, and the last rounding."""
    K, largest = a.shape[1], Residues(count).norm(a.shape[1])
    share = 2 * math.sqrt(K) / largest + K / largest**2 + 2.0**-53
    sizes = [np.array([float(_root(sum((Fraction(v)**2 for v in line), Fraction(0)))) for line in x.tolist()]) for x in (a, b.T)]
    return np.asarray(sizes[0][:, None] * sizes[1] * (share * (1 + 1e-6)))


def _root(x: Fraction) -> Fraction:
    """The root, from above."""
    scale = 2**2200
    return Fraction(math.isqrt(int(x * scale)) + 1, 2**1100)


def check(d: np.ndarray, a: np.ndarray, b: np.ndarray, count: int = 14) -> None:
    most = bound(a, b, count)
    for i, row in enumerate(exact(a, b)):
        for j, wanted in enumerate(row):
            assert abs(Fraction(float(d[i, j])) - wanted) <= Fraction(float(most[i, j])) + Fraction(1, 2**1074), (i, j)


def multiplied(machine: Any, a: np.ndarray, b: np.ndarray, order: Any = "C", **keywords: Any) -> np.ndarray:
    out = machine.array(poison((a.shape[0], b.shape[1]), np.float64, order))
    with machine.session():
        found = gk.matmul(machine.array(a), machine.array(b), out=out, **{"precision": "ozaki", **keywords})
    assert found is out
    return np.asarray(machine.numpy(out))


CASES = [(5, 6, 7, "C", "C", "C", 14), (9, 21, 70, "F", "C", "F", 13), (18, 3, 33, "C", "F", "C", 15), (1, 9, 16, "F", "F", "F", 16),
         (11, 1, 40, "C", "C", "C", 14)]


@pytest.mark.kin(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize(("M", "N", "K", "of_a", "of_b", "of_d", "count"), CASES)
@on_machines
def test_products(machine: Any, rng: np.random.Generator, M: int, N: int, K: int, of_a: Any, of_b: Any, of_d: Any,
                  count: int) -> None:
    """Any order of each operand, and any number of moduli."""
    a, b = np.asarray(rng.standard_normal((M, K)), order=of_a), np.asarray(rng.standard_normal((K, N)), order=of_b)
    check(multiplied(machine, a, b, of_d, precision=f"ozaki{count}"), a, b, count)


@pytest.mark.kin(1)
@on_machines
def test_rows_that_are_graded(machine: Any, rng: np.random.Generator) -> None:
    """Rows of A and columns of B by powers of two: the result is scaled, to the bit. With subnormal and huge numbers among
    them, zeros, and rows of zeros."""
    a, b = rng.standard_normal((8, 12)), rng.standard_normal((12, 9))
    a[3], b[:, 2], a[0, 5] = 0, 0, 0
    of_a, of_b = np.array([0, 900, -900, 3, 400, -460, -1, 950]), np.array([0, -100, 5, 60, -60, -40, 70, -170, 1])
    plain = multiplied(machine, a, b)
    check(plain, a, b)
    found = multiplied(machine, np.ldexp(a, of_a[:, None]), np.ldexp(b, of_b))
    assert np.array_equal(found, np.ldexp(np.ldexp(plain, of_a[:, None]), of_b))
    assert not plain[3].any() and not plain[:, 2].any()
    tiny = a * 5e-324 * 2.0**20
    check(multiplied(machine, tiny, np.ldexp(b, 1000)), tiny, np.ldexp(b, 1000))
    spread = a * np.exp(8 * rng.standard_normal(a.shape))
    check(multiplied(machine, spread, b), spread, b)


@pytest.mark.kin(1)
@on_machines
def test_cancellation(machine: Any) -> None:
    """Whole numbers are exact, where the float64 product rounds away all of the result."""
    a, b = np.array([[2.0**50, 1.0, -2.0**50]]), np.array([[2.0**3], [1.0], [2.0**3]])
    assert multiplied(machine, a, b).tolist() == [[1.0]]


@pytest.mark.kin(1)
@on_machines
def test_rows_that_are_not_finite(machine: Any, rng: np.random.Generator) -> None:
    """What the sum of float64 products is; other rows do not feel it."""
    a, b = rng.standard_normal((7, 10)), rng.standard_normal((10, 9))
    plain = multiplied(machine, a, b)
    a[2, 3], a[4, 1], a[5, 5], a[5, 6], b[4, 7], b[3, 8], b[3, 0] = math.nan, math.inf, math.inf, -math.inf, -math.inf, math.nan, 0
    with np.errstate(all="ignore"):
        wanted = a @ b
    found = multiplied(machine, a, b)
    hit = ~np.isfinite(a).all(1)[:, None] | ~np.isfinite(b).all(0)
    assert np.array_equal(np.isnan(found), np.isnan(wanted)) and np.array_equal(found[np.isinf(wanted)], wanted[np.isinf(wanted)])
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted))
    hit[:, 0] = True                                                 # b[3, 0] is another number now
    assert np.array_equal(found[~hit], plain[~hit])


@pytest.mark.kin(1)
@on_machines
def test_overflow_is_that_of_the_result(machine: Any) -> None:
    a, b = np.array([[1e300, 1e300], [1e300, -1e300], [-1e300, -1e-300]]), np.array([[1e300, 1.0], [1e300, 1.0]])
    found = multiplied(machine, a, b)
    assert found[0, 0] == math.inf and found[2, 0] == -math.inf and found[1].tolist() == [0, 0]


@pytest.mark.kin(1)
@on_machines
def test_views(machine: Any, rng: np.random.Generator) -> None:
    """Strides of any kind, bases that are aligned to 8 bytes, and a result in the middle of an array: nothing else is
    written."""
    wide_a, wide_b = rng.standard_normal((20, 41)), rng.standard_normal((50, 30))
    out = machine.array(poison((12, 40), np.float64))
    with machine.session():
        gk.matmul(machine.array(wide_a)[1:19:2, 1:40:3], machine.array(wide_b)[3:42:3, 1:27:2], out=out[2:11, 5:31:2],
                  precision="ozaki")
    d = np.asarray(machine.numpy(out))
    check(d[2:11, 5:31:2], wide_a[1:19:2, 1:40:3], wide_b[3:42:3, 1:27:2])
    d = d.copy()
    d[2:11, 5:31:2] = math.nan
    assert np.isnan(d).all()


@pytest.mark.kin(1)
@on_machines
def test_blocks(machine: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small workspaces: D comes in two by two blocks of lines, which are columns here, and of places in them."""
    a, b = rng.standard_normal((13, 20)), rng.standard_normal((20, 22))
    whole = multiplied(machine, a, b, "F", precision="ozaki13")
    monkeypatch.setattr(plans, "LIMIT", 13 * 32 * 12)
    assert plans.blocks_of(13, 22, 13, 20) == (11, 7)
    with machine.session():
        run = gk.plan(machine.array(a), machine.array(b), out=machine.array(poison((13, 22), np.float64, "F")),
                      precision="ozaki13")
        d = machine.array(poison((13, 22), np.float64, "F"))
        run(machine.array(a), machine.array(b), out=d)
    assert np.array_equal(machine.numpy(d), whole)


@pytest.mark.kin(1)
@on_machines
def test_c_epilogues_and_gemmex(machine: Any, rng: np.random.Generator) -> None:
    """C, element-wise epilogues with arrays that change from call to call, alpha and beta; into another dtype."""
    a, b, c = rng.standard_normal((6, 9)), rng.standard_normal((9, 10)), rng.standard_normal((6, 10))
    wanted = multiplied(machine, a, b)
    with machine.session():
        given = machine.array(a), machine.array(b)
        for bias in rng.standard_normal((2, 10)):
            d = gk.matmul(*given, machine.array(c), precision="ozaki", epilogue=gk.epilogues.Bias(machine.array(bias)))
            assert np.array_equal(machine.numpy(d), wanted + c + bias)
        held = machine.array(c)
        gk.blas.gemmEx("N", "N", 2.0, *given, -1.0, held, precision="ozaki")
        assert np.array_equal(machine.numpy(held), 2 * wanted - c)
        transposed = machine.array(np.ascontiguousarray(a.T))
        gk.blas.gemmEx("T", "N", 1.0, transposed, given[1], 0.0, held, precision="ozaki")
        assert np.array_equal(machine.numpy(held), wanted)
        narrow = machine.array(poison((6, 10), np.float32))
        gk.matmul(*given, out=narrow, precision="ozaki")
        assert np.array_equal(machine.numpy(narrow), wanted.astype(np.float32))


@on_machines
def test_nothing_to_multiply(machine: Any) -> None:
    for M, N, K in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        d = multiplied(machine, np.ones((M, K)), np.ones((K, N)))
        assert d.shape == (M, N) and not d.any()


@pytest.mark.kin(1)
@on_machines
def test_vectors(machine: Any, rng: np.random.Generator) -> None:
    a, v = rng.standard_normal((6, 9)), rng.standard_normal(9)
    with machine.session():
        d = gk.matmul(machine.array(a), machine.array(v), precision="ozaki")
    check(np.asarray(machine.numpy(d))[:, None], a, v[:, None])


def test_default_results_are_as_they_were(rng: np.random.Generator) -> None:
    from gemmkit.plans.ahead import recorded

    a = np.ones((64, 64))
    (made,) = recorded(lambda: gk.matmul(a, a))
    assert not made.problem.moduli and type(made).__name__ == "Compiled"


@pytest.mark.kin(1)
def test_explain_and_tune() -> None:
    a = np.empty((512, 512))
    said = gk.explain(a, a, precision="ozaki15")
    assert "15 int8 products" in repr(said) and "58 bits" in repr(said) and "15 x D (512 x 512)" in repr(said)
    assert "Ozaki scheme II" in said.html()
    with pytest.raises(ValueError, match="no mapping to tune"), gk.emulate():
        TunedProduct(F64, F64, precision="ozaki")


F64 = np.ones((4, 4))


@pytest.mark.parametrize(("error", "said", "keywords"), [
    (ValueError, "'ozaki' .of float64 ones. is needed", dict(precision="ozaki12")),
    (ValueError, "float64 operands are needed; b is float32", dict(b=np.ones((4, 4), np.float32))),
    (ValueError, "a is complex128", dict(a=F64 + 0j, b=F64 + 0j)),
    (ValueError, "a stack of 3 products", dict(a=np.ones((3, 4, 4)), b=np.ones((3, 4, 4)))),
    (ValueError, "K=131073 columns; .* exact up to K=131072", dict(a=np.ones((1, 2**17 + 1)), b=np.ones((2**17 + 1, 1)))),
    (ConfigError, "transform_global_to_shared_a is given", dict(transform_global_to_shared_a=gk.transforms.Map(lambda x: x + 1))),
    (ConfigError, "sees more than an element", dict(epilogue=gk.epilogues.Softmax())),
    (ConfigError, "global_a_layout is", dict(a=gk.layouts.TriangularMatrix(F64))),
    (ConfigError, "it is given with operator", dict(operator=gk.operators.FPUOp(16, 16))),
])
def test_what_is_refused(error: type[Exception], said: str, keywords: dict[str, Any]) -> None:
    keywords = {"precision": "ozaki", **keywords}
    a, b = keywords.pop("a", F64), keywords.pop("b", F64)
    with gk.emulate(), pytest.raises(error, match=said):
        gk.matmul(a, b, **keywords)
