"""Products by int8 products (`gemmkit.kernels.ozaki`): the arithmetic by itself, and products against
exact ones."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels import ozaki
from gemmkit.kernels.ozaki import (
    ELEMENTS,
    GAUSSIAN,
    MODULI,
    MOST_K,
    GaussianResidues,
    Residues,
    by_pair,
    by_root,
    by_single,
    reduced,
    scale_of,
    sums_of,
)
from gemmkit.lang.errors import ConfigError
from gemmkit.plans import ozaki as plans
from gemmkit.plans.ahead import recorded
from gemmkit.plans.ozaki import OzakiProduct, Remainder, microseconds, why_plain
from gemmkit.runtime.device import A100, H100
from gemmkit.tuner.subjects import TunedProduct
from gemmkit.tuning.problems import choose
from tests.support.machines import on_machines, poison

FEWEST = 7                             # moduli: 6 leave a row 23 bits, fewer than float32 has
COUNTS = range(FEWEST, len(MODULI) + 1)
SETS = [kind(count) for kind in (Residues, GaussianResidues) for count in COUNTS]
KINDS = np.float64, np.complex128, np.float32, np.complex64
MOSTLY_REAL = np.float64, pytest.param(np.complex128, marks=pytest.mark.thorough)      # emulated products are 30, and slow


def normal(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> np.ndarray:
    made = rng.standard_normal(shape)
    return np.asarray(made if np.dtype(kind).kind == "f" else made + 1j * rng.standard_normal(shape), kind)


# -- the arithmetic ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("moduli", [MODULI, GAUSSIAN])
def test_moduli_are_coprime(moduli: tuple[int, ...]) -> None:
    assert all(math.gcd(p, q) == 1 for n, p in enumerate(moduli) for q in moduli[:n])
    assert [Residues(count).bits for count in (7, 8, *range(13, 17))] == [27, 31, 50, 54, 58, 62]
    assert [GaussianResidues(count).bits for count in (7, 8, *range(13, 17))] == [26, 30, 48, 51, 55, 58]


def test_roots() -> None:
    """Their squares are -1; and no modulus that is left out, coprime to the others, is larger than the last one."""
    of = GaussianResidues(len(GAUSSIAN))
    assert all(j * j % p == p - 1 and j < p / 2 for p, j in zip(of.moduli, of.roots))
    has_root = [p for p in range(GAUSSIAN[-1], 256, 2) if any(j * j % p == p - 1 for j in range(p))]
    assert all(p in GAUSSIAN or any(math.gcd(p, q) > 1 for q in GAUSSIAN) for p in has_root)


@pytest.mark.parametrize("of", SETS)
def test_remainders_of_whole_numbers(of: Any, rng: np.random.Generator) -> None:
    """Of any size that a scaled row has, and of those whose remainders are next to half of a modulus. Of complex ones both
    planes, whose bytes are within 1 of half the modulus."""
    limit = math.isqrt(of.product // 2)
    numbers = [0, 1, -1, limit, -limit, *(int(limit * x) for x in rng.uniform(-1, 1, 40))]
    numbers += [p * int(k) + p // 2 + d for p in (*of.moduli, *map(int, of.of_pairs))
                for k in rng.uniform(-1, 1, 2) * limit / p for d in (0, 1)]
    others = list(map(float, rng.permutation(np.array(numbers, np.float64))))
    for x, y in zip(map(float, numbers), others):
        for n, p in enumerate(of.moduli):
            with np.errstate(all="ignore"):
                rough, other = (by_pair(np.float64(z), 0, of.of_pairs[n // 2], of.inverse_pairs[n // 2]) for z in (x, y))
                if of.parts == 1:
                    found = [by_single(rough, 0, of, n)]
                else:
                    found = [by_root(rough, 0, (other,), of, 2 * n + plane) for plane in (0, 1)]
            wanted = [x] if of.parts == 1 else [int(x) + of.roots[n] * int(y), int(x) - of.roots[n] * int(y)]
            assert all(z.dtype == np.int8 and (int(z) - int(w)) % p == 0 for z, w in zip(found, wanted)), (x, y, p)
            assert all(abs(int(z)) <= p / 2 + (of.parts == 2) for z in found)


@pytest.mark.parametrize("of", SETS)
def test_remainders_of_sums(of: Any, rng: np.random.Generator) -> None:
    """Of every sum of K products, with a byte added to it; in stacks of several products, too."""
    for plane in range(of.planes):
        p = of.moduli[plane // of.parts]
        most = 127 * 127 * MOST_K + 255 if p < 256 else 2**31 - 1
        sums = [0, -1, most, -most, *rng.integers(-most, most, 60)]
        sums += [int(s) // p * p + d for s in rng.integers(-most // 2, most // 2, 20) for d in (-1, 0, p - 1)]
        for s in sums:
            with np.errstate(all="ignore"):
                found = Remainder(of)(np.int32(s), 0, 0, plane)                 # type: ignore[call-arg]
            assert found.dtype == np.uint8 and int(found) == int(s) % p, (s, p)
        with np.errstate(all="ignore"):
            assert Remainder(of, True)(np.int32(-5), 0, 0, 3 * of.planes + plane) == -5 % p     # type: ignore[call-arg]


@pytest.mark.parametrize("of", SETS)
def test_whole_numbers_of_remainders(of: Any, rng: np.random.Generator) -> None:
    """Up to the margin below P / 2, to two roundings; no sum of parts of weights leaves 53 bits."""
    most_digits = 128 * of.count if of.parts == 1 else sum(max(256, p) for p in of.moduli)
    for weights in (of.of_weights, *(() if of.parts == 1 else (of.of_differences,))):
        for part, steps in enumerate(zip(*weights)):
            unit = 1 << max(0, of.product.bit_length() - of.part_bits * (part + 1))
            assert most_digits * (max(map(int, steps)) // unit) + int(of.start[part]) // unit <= 2**53
    most = int(of.norm(MOST_K)**2)
    numbers = [0, 1, -1, most, -most, *(int(Fraction(float(x)) * most) for x in rng.uniform(-1, 1, 100)),
               *(int(Fraction(float(x)) * 2**int(n)) for x, n in zip(rng.uniform(-1, 1, 60), rng.integers(1, most.bit_length(), 60)))]
    for C, D in zip(numbers, rng.permutation(np.array(numbers, object))):
        if of.parts == 1:
            words = tuple(np.uint32(C % p << 8) for p in of.moduli)
        else:
            pairs = [((C + j * D) % p, (C - j * D) % p) for p, j in zip(of.moduli, of.roots)]
            words = tuple(np.uint32(u << 8) for pair in pairs for u in pair)
        sums = sums_of(of, words)
        assert len(sums) == ELEMENTS
        for part, wanted in enumerate((C, D)[:of.parts]):
            found = reduced(sums[1][3 * part:3 * part + 3], part, of)
            assert abs(Fraction(float(found)) - wanted) <= abs(wanted) * Fraction(1, 2**52), wanted


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
    of = Residues.of(a.dtype, count)
    numbers, largest = of.parts * a.shape[1], of.norm(a.shape[1])
    share = 2 * math.sqrt(numbers) / largest + numbers / largest**2 + float(np.finfo(a.dtype).eps) / 2
    sizes = [np.array([float(_root(sum((Fraction(v.real)**2 + Fraction(v.imag)**2 for v in line), Fraction(0))))
                       for line in x.tolist()]) for x in (a, b.T)]
    return np.asarray(sizes[0][:, None] * sizes[1] * (share * (1 + 1e-6)))


def _root(x: Fraction) -> Fraction:
    """The root, from above."""
    scale = 2**2200
    return Fraction(math.isqrt(int(x * scale)) + 1, 2**1100)


def usual(a: np.ndarray) -> int:
    """Of precision="ozaki"."""
    return {"float32": 7, "float64": 14, "complex64": 7, "complex128": 15}[a.dtype.name]


def check(d: np.ndarray, a: np.ndarray, b: np.ndarray, count: int = 0) -> None:
    """Each part of D against exact sums of the parts' products."""
    most = bound(a, b, count or usual(a))
    if a.dtype.kind == "f":
        parts = [(d, exact(a, b))]
    else:
        both, crossed = np.concatenate([b.real, -b.imag]), np.concatenate([b.imag, b.real])
        whole = np.concatenate([a.real, a.imag], 1)
        parts = [(d.real, exact(whole, both)), (d.imag, exact(whole, crossed))]
    assert d.dtype == a.dtype
    for found, wanted in parts:
        for i, row in enumerate(wanted):
            for j, x in enumerate(row):
                assert abs(Fraction(float(found[i, j])) - x) <= Fraction(float(most[i, j])) + Fraction(float(np.finfo(d.dtype).smallest_subnormal)), (i, j)


def multiplied(machine: Any, a: np.ndarray, b: np.ndarray, order: Any = "C", **keywords: Any) -> np.ndarray:
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    out = machine.array(poison(shape, a.dtype, order))
    with machine.session():
        found = gk.matmul(machine.array(a), machine.array(b), out=out, **{"precision": "ozaki", **keywords})
    assert found is out
    return np.asarray(machine.numpy(out))


CASES = [(5, 6, 7, "C", "C", "C", 14), (6, 10, 37, "C", "F", "F", 7), (7, 5, 20, "F", "C", "C", 8), (9, 21, 70, "F", "C", "F", 13), (18, 3, 33, "C", "F", "C", 15), (1, 9, 16, "F", "F", "F", 16),
         (11, 1, 40, "C", "C", "C", 14)]


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("M", "N", "K", "of_a", "of_b", "of_d", "count"), CASES)
@on_machines
def test_products(machine: Any, rng: np.random.Generator, M: int, N: int, K: int, of_a: Any, of_b: Any, of_d: Any,
                  count: int, kind: Any) -> None:
    """Any order of each operand, and any number of moduli."""
    a, b = np.asarray(normal(rng, (M, K), kind), order=of_a), np.asarray(normal(rng, (K, N), kind), order=of_b)
    check(multiplied(machine, a, b, of_d, precision=f"ozaki{count}"), a, b, count)


def grown(x: np.ndarray, by: Any) -> np.ndarray:
    """Times powers of two, which NumPy's ldexp takes of real numbers alone."""
    return np.ldexp(x, by) if x.dtype == np.float64 else np.ldexp(x.real, by) + 1j * np.ldexp(x.imag, by)


@pytest.mark.kin(1)
@pytest.mark.parametrize("kind", MOSTLY_REAL)
@on_machines
def test_rows_that_are_graded(machine: Any, rng: np.random.Generator, kind: Any) -> None:
    """Rows of A and columns of B by powers of two: the result is scaled, to the bit. With subnormal and huge numbers among
    them, zeros, and rows of zeros."""
    a, b = normal(rng, (8, 12), kind), normal(rng, (12, 9), kind)
    a[3], b[:, 2], a[0, 5] = 0, 0, 0
    of_a, of_b = np.array([0, 900, -900, 3, 400, -460, -1, 950]), np.array([0, -100, 5, 60, -60, -40, 70, -170, 1])
    plain = multiplied(machine, a, b)
    check(plain, a, b)
    found = multiplied(machine, grown(a, of_a[:, None]), grown(b, of_b))
    assert np.array_equal(found, grown(grown(plain, of_a[:, None]), of_b))
    assert not plain[3].any() and not plain[:, 2].any()
    tiny = a * 5e-324 * 2.0**20 if kind is np.float64 else a.real * 5e-324 * 2.0**20 + 1j * (a.imag * 5e-324 * 2.0**20)
    check(multiplied(machine, tiny, grown(b, 1000)), tiny, grown(b, 1000))
    spread = a * np.exp(8 * rng.standard_normal(a.shape))
    check(multiplied(machine, spread, b), spread, b)
    if kind is np.complex128:                                        # one part far below the other
        lopsided = a.real + 1e-9j * a.imag
        check(multiplied(machine, lopsided, b), lopsided, b)


@pytest.mark.kin(1)
@on_machines
def test_cancellation(machine: Any) -> None:
    """Whole numbers are exact, where the float64 product rounds away all of the result."""
    a, b = np.array([[2.0**50, 1.0, -2.0**50]]), np.array([[2.0**3], [1.0], [2.0**3]])
    assert multiplied(machine, a, b).tolist() == [[1.0]]
    twice = np.array([[1, 1j]]) * 2.0**49                            # (x + ix) (x - ix) + ... : parts that cancel
    assert multiplied(machine, twice + np.array([[1, 0]]), twice.T).tolist() == [[2.0**49]]


@pytest.mark.kin(1)
@pytest.mark.parametrize("kind", KINDS)
@on_machines
def test_rows_that_are_not_finite(machine: Any, rng: np.random.Generator, kind: Any) -> None:
    """What the sum of products is, by the formula of parts where they are complex; other rows do not feel it."""
    a, b = normal(rng, (7, 10), kind), normal(rng, (10, 9), kind)
    plain = multiplied(machine, a, b)
    a[2, 3], a[4, 1], a[5, 5], a[5, 6], b[4, 7], b[3, 8], b[3, 0] = math.nan, math.inf, math.inf, -math.inf, -math.inf, math.nan, 0
    with np.errstate(all="ignore"):
        wanted = a @ b if a.dtype.kind == "f" else by_parts(a, b)
    found = multiplied(machine, a, b)
    hit = ~np.isfinite(a).all(1)[:, None] | ~np.isfinite(b).all(0)
    for x, y in ((found, wanted),) if a.dtype.kind == "f" else ((found.real, wanted.real), (found.imag, wanted.imag)):
        assert np.array_equal(np.isnan(x), np.isnan(y)) and np.array_equal(x[np.isinf(y)], y[np.isinf(y)])
        assert np.array_equal(np.isfinite(x), np.isfinite(y))
    hit[:, 0] = True                                                 # b[3, 0] is another number now
    assert np.array_equal(found[~hit], plain[~hit])


def by_parts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Each term by the formula of parts, in the order of K."""
    found = np.zeros((a.shape[0], b.shape[1]), np.complex128)
    for k in range(a.shape[1]):
        x, y = a[:, k, None], b[k]
        found.real += x.real * y.real - x.imag * y.imag
        found.imag += x.real * y.imag + x.imag * y.real
    return found


@pytest.mark.kin(1)
@on_machines
def test_overflow_is_that_of_the_result(machine: Any) -> None:
    a, b = np.array([[1e300, 1e300], [1e300, -1e300], [-1e300, -1e-300]]), np.array([[1e300, 1.0], [1e300, 1.0]])
    found = multiplied(machine, a, b)
    assert found[0, 0] == math.inf and found[2, 0] == -math.inf and found[1].tolist() == [0, 0]
    found = multiplied(machine, a * (1 + 0j), b * 1j)
    assert found[0, 0].imag == math.inf and found[0, 0].real == 0 and not found[1].any()


@pytest.mark.kin(1)
@pytest.mark.parametrize("kind", MOSTLY_REAL)
@on_machines
def test_views(machine: Any, rng: np.random.Generator, kind: Any) -> None:
    """Strides of any kind, bases that are aligned to 8 bytes, and a result in the middle of an array: nothing else is
    written."""
    wide_a, wide_b = normal(rng, (20, 41), kind), normal(rng, (50, 30), kind)
    out = machine.array(poison((12, 40), kind))
    with machine.session():
        gk.matmul(machine.array(wide_a)[1:19:2, 1:40:3], machine.array(wide_b)[3:42:3, 1:27:2], out=out[2:11, 5:31:2],
                  precision="ozaki")
    d = np.asarray(machine.numpy(out))
    check(d[2:11, 5:31:2], wide_a[1:19:2, 1:40:3], wide_b[3:42:3, 1:27:2])
    d = d.copy()
    d[2:11, 5:31:2] = math.nan
    assert np.isnan(d).all()


@pytest.mark.kin(1)
@pytest.mark.parametrize(("kind", "limit", "blocks"), [
    (np.float64, 13 * 32 * 12, (11, 7)),
    pytest.param(np.complex128, 26 * 32 * 12, (11, 7), marks=pytest.mark.thorough)])
@on_machines
def test_blocks(machine: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: Any, limit: int,
                blocks: tuple[int, int]) -> None:
    """Small workspaces: D comes in two by two blocks of lines, which are columns here, and of places in them."""
    a, b = normal(rng, (13, 20), kind), normal(rng, (20, 22), kind)
    whole = multiplied(machine, a, b, "F", precision="ozaki13")
    monkeypatch.setattr(plans, "LIMIT", limit)
    assert plans.blocks_of(Residues.of(a.dtype, 13).planes, 22, 13, 20) == blocks
    with machine.session():
        run = gk.plan(machine.array(a), machine.array(b), out=machine.array(poison((13, 22), kind, "F")),
                      precision="ozaki13")
        d = machine.array(poison((13, 22), kind, "F"))
        run(machine.array(a), machine.array(b), out=d)
    assert np.array_equal(machine.numpy(d), whole)


@pytest.mark.kin(1)
@pytest.mark.parametrize("kind", MOSTLY_REAL)
@on_machines
def test_pieces_of_k(machine: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """A K that int32 does not hold the sums of: remainders of one piece are added to the products of the next. Bits are
    those of one piece."""
    a, b = normal(rng, (5, 70), kind), normal(rng, (70, 6), kind)
    whole = multiplied(machine, a, b)
    monkeypatch.setattr(plans, "MOST_K", 32)
    with machine.session():
        run = gk.plan(machine.array(a), machine.array(b), precision="ozaki")
        assert len(run._compiled.steps) == 6
        assert np.array_equal(machine.numpy(run(machine.array(a), machine.array(b))), whole)


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", MOSTLY_REAL)
@pytest.mark.parametrize(("of_a", "of_b", "together"), [((2, 1), (2,), 4), ((), (3,), 3), ((3,), (), 2), ((2,), (2,), 1)])
@on_machines
def test_stacks(machine: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, of_a: tuple[int, ...],
                of_b: tuple[int, ...], together: int, kind: Any) -> None:
    """As many products at a time as workspaces hold; with shared matrices, and with an array of the epilogue that has a vector
    for each product. The first one's is zero, so that its bits are those of one product."""
    planes = 14 if kind is np.float64 else 30
    monkeypatch.setattr(plans, "LIMIT", together * (planes * 6 * 16 + 24))
    a, b = normal(rng, (*of_a, 5, 9), kind), normal(rng, (*of_b, 9, 6), kind)
    stack = np.broadcast_shapes(of_a, of_b)
    bias = normal(rng, (*stack, 6), kind)
    bias[(0,) * len(stack)] = 0
    with machine.session():
        run = gk.plan(machine.array(a), machine.array(b), precision="ozaki", epilogue=gk.epilogues.Bias(machine.array(bias)))
        d = machine.numpy(run(machine.array(a), machine.array(b)))
    assert run._compiled.together == together
    for n in np.ndindex(stack):
        one, other = (np.broadcast_to(x, (*stack, *x.shape[-2:]))[n] for x in (a, b))
        if not bias[n].any():
            check(d[n], one, other)
        assert np.abs(d[n] - (one @ other + bias[n])).max() < 1e-13


@pytest.mark.kin(1)
@pytest.mark.parametrize("kind", MOSTLY_REAL)
@on_machines
def test_einsum(machine: Any, rng: np.random.Generator, kind: Any) -> None:
    """Tensors of which no view is a matrix, a batch, and three operands."""
    for spec, shapes in (("aibj,jckb->aikc", ((2, 3, 4, 5), (5, 2, 3, 4))), ("abj,jbk,kl->bal", ((2, 2, 4), (4, 2, 3), (3, 5)))):
        given = [normal(rng, shape, kind) for shape in shapes]
        with machine.session():
            d = machine.numpy(gk.einsum(spec, *map(machine.array, given), precision="ozaki"))
        assert np.abs(d - np.einsum(spec, *given)).max() < 1e-13
    with machine.session(), pytest.raises(ValueError, match="multiplies by ones alone"):
        gk.einsum("ij->i", machine.array(given[-1]), precision="ozaki")


@pytest.mark.kin(1)
@on_machines
def test_conjugates(machine: Any, rng: np.random.Generator) -> None:
    """cuBLAS's "C", where an infinity is, too; and a function of coordinates."""
    a, b, c = normal(rng, (9, 6), np.complex128), normal(rng, (10, 9), np.complex128), normal(rng, (6, 10), np.complex128)
    a[3, 2] = complex(math.inf, 1)
    with machine.session():
        held = machine.array(c)
        gk.blas.gemmEx("C", "C", 2.0, machine.array(a), machine.array(b), -1j, held, precision="ozaki")
        scaled = gk.matmul(machine.array(b), machine.array(a), precision="ozaki",
                           transform_global_to_shared_a=gk.transforms.Map(lambda x, i, j: x * (i + 2 * j)))
    rows = np.arange(6) != 2
    with np.errstate(all="ignore"):
        wanted = 2 * (a.conj().T @ b.conj().T) - 1j * c
        assert not np.isfinite(machine.numpy(held)[2]).any()
        assert np.abs(machine.numpy(held) - wanted)[rows].max() < 1e-13
        factors = np.arange(10)[:, None] + 2 * np.arange(9)
        assert np.abs(machine.numpy(scaled) - (b * factors) @ a)[:, rows].max() < 1e-12


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
    assert multiplied(machine, np.ones((0, 2, 3)), np.ones((3, 4))).shape == (0, 2, 4)


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


def test_large_products() -> None:
    """Tiles of 128 x 256 by pairs of blocks, unless they compute much beyond D's edges; the tables' for small products and
    elsewhere."""
    def tile(rows: int, columns: int, device: Any = H100) -> Any:
        conf = choose(plans.ResidueProblem(rows, columns, Remainder(Residues(14))), device).spec
        return conf and (*conf.block_shape.size[:2], conf.cluster.size.M)

    assert tile(4096, 4096) == tile(2048, 8192) == (128, 256, 2) and tile(1100, 1150) == (128, 192, 1)
    assert tile(1000, 4096) is None and tile(4096, 4096, A100) is None
    x = np.empty((2048, 2048), np.complex128)
    made = recorded(lambda: gk.matmul(x, x, precision="ozaki"), H100, zeros=False)[0]
    assert made.products.config.block_shape.size[:2] == (128, 256)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "M", "N", "K"), [(np.float64, 1024, 1100, MOST_K + 40), (np.complex128, 1030, 1024, 2050),
                                                   (np.complex128, 2048, 1500, 700), (np.float64, 1600, 1024, 701)])
def test_large_products_on_a_gpu(kind: Any, M: int, N: int, K: int) -> None:
    """By the mappings of large products, with a K in pieces, too; beside cuBLAS's, whose own error is about 2e-16 here."""
    import cupy

    draw = cupy.random.RandomState(0)
    a, b = (draw.standard_normal(shape) + (1j * draw.standard_normal(shape) if kind is np.complex128 else 0)
            for shape in ((M, K), (K, N)))
    d = gk.matmul(a, b, precision="ozaki")
    norms = cupy.linalg.norm(a, axis=1)[:, None] * cupy.linalg.norm(b, axis=0)
    assert d.dtype == kind and float((abs(d - a @ b) / norms).max()) < 1e-15


def test_auto(rng: np.random.Generator) -> None:
    """What is faster by measured rates, whatever data there are; the other product where int8 ones are refused, or on a device
    whose times are not known."""
    def of(size: int, kind: Any = np.float64, device: Any = H100, **keywords: Any) -> Any:
        x = np.empty((size, size), kind)
        return recorded(lambda: gk.matmul(x, x, precision="auto", **keywords), device, zeros=False)[0]

    for size, kind, wanted in ((256, np.float64, False), (4096, np.float64, True), (256, np.complex128, False),
                               (2048, np.complex128, True), (256, np.float32, False), (4096, np.float32, True),
                               (2048, np.complex64, True)):
        made = of(size, kind)
        taken, plain = microseconds(made.problem)
        assert isinstance(made, OzakiProduct) == wanted == (taken < plain) == (why_plain(made.problem) is None)
    assert not isinstance(of(4096, np.float16), OzakiProduct)
    refused = of(4096, epilogue=gk.epilogues.Softmax())
    assert not isinstance(refused, OzakiProduct) and "sees more than an element" in str(why_plain(refused.problem))
    assert not isinstance(of(4096, device=A100), OzakiProduct)
    a, b = rng.standard_normal((5, 6)), rng.standard_normal((6, 7))
    with gk.emulate():
        assert np.array_equal(gk.matmul(a, b, precision="auto"), gk.matmul(a, b))
    x = np.empty((512, 512))
    assert "precision='auto': the float64 product" in repr(gk.explain(x, x, precision="auto"))


def by(factors: np.ndarray) -> gk.transforms.Map:
    return gk.transforms.Map(lambda x: x * factors[0])


F64 = np.ones((4, 4))


@pytest.mark.parametrize(("error", "said", "keywords"), [
    (ValueError, "'auto' .of ones of 32 and 64 bits. is needed", dict(precision="ozaki12")),
    (ValueError, "a is float64 and b float32; operands of one dtype", dict(b=np.ones((4, 4), np.float32))),
    (ValueError, "float32, float64, complex64, complex128 operands are needed; a is float16", dict(a=np.ones((4, 4), np.float16))),
    (ValueError, "a is complex128 and b float64", dict(a=F64 + 0j)),
    (ConfigError, "transform_shared_to_regs_a is given", dict(transform_shared_to_regs_a=gk.transforms.Map(lambda x: x + 1))),
    (ConfigError, "holds arrays or numbers", dict(transform_global_to_shared_a=by(np.full(1, 2.0)))),
    (ConfigError, "asks for a product's number", dict(transform_global_to_shared_a=gk.transforms.Map(lambda x, i, j, n: x + n))),
    (ConfigError, "sees more than an element", dict(epilogue=gk.epilogues.Softmax())),
    (ConfigError, "global_a_layout is", dict(a=gk.layouts.TriangularMatrix(F64))),
    (ConfigError, "it is given with operator", dict(operator=gk.operators.FPUOp(16, 16))),
])
def test_what_is_refused(error: type[Exception], said: str, keywords: dict[str, Any]) -> None:
    keywords = {"precision": "ozaki", **keywords}
    a, b = keywords.pop("a", F64), keywords.pop("b", F64)
    with gk.emulate(), pytest.raises(error, match=said):
        gk.matmul(a, b, **keywords)
