"""Single instructions of the interpreter, against Python's integers and fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx_machine.faults import UnknownInstruction
from tests.ptx_machine.kinds import KINDS
from tests.ptx_machine.launch import run_ptx

COUNT = 128


def evaluate(opcode: str, kinds: list[str], out: str, *inputs: np.ndarray, literals: str = "") -> np.ndarray:
    """``opcode d, a, b, ...;`` of arrays of `COUNT` values; ``kinds`` are the operands' types, ``out`` the result's."""
    names = [f"%a{n}" for n in range(len(inputs))]
    lines = ["ld.param.u64 %at, [run_param_0];", "mov.u32 %t, %tid.x;"]
    for n, (kind, name) in enumerate(zip(kinds, names)):
        lines += [f"ld.param.u64 %at, [run_param_{n}];", f"mad.wide.u32 %at, %t, {KINDS[kind].size}, %at;", f"ld.global.b{KINDS[kind].bits} {name}, [%at];"]
    lines += [f"{opcode} %d, {', '.join(names)}{literals};", f"ld.param.u64 %at, [run_param_{len(inputs)}];",
              f"mad.wide.u32 %at, %t, {KINDS[out].size}, %at;", f"st.global.b{KINDS[out].bits} [%at], %d;", "ret;"]
    registers = [f".reg .b{max(16, KINDS[kind].bits)} {name};" for kind, name in zip([*kinds, out], [*names, "%d"])]
    parameters = ", ".join(f".param .u64 run_param_{n}" for n in range(len(inputs) + 1))
    body = "\n".join([".reg .b64 %at;", ".reg .b32 %t;", *registers, *lines])
    result = np.zeros(COUNT, KINDS[out].dtype if KINDS[out].lanes == 1 else np.uint32)
    arrays = [np.ascontiguousarray(x) for x in inputs] + [result]
    run_ptx(f".visible .entry run({parameters})\n{{\n{body}\n}}", COUNT, 1, arrays, arrays)
    return result


def integers(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Any, and those at the ends."""
    limits = np.iinfo(KINDS[kind].dtype)
    out = rng.integers(limits.min, limits.max, COUNT, KINDS[kind].dtype, endpoint=True)
    out[:40] = rng.choice(np.array([limits.min, limits.max, 0, 1, limits.max // 2, -1 % (limits.max + 1)], KINDS[kind].dtype), 40)
    return out


def wrapped(x: int, kind: str) -> int:
    bits = KINDS[kind].bits
    x &= (1 << bits) - 1
    return x - (1 << bits) if KINDS[kind].is_signed and x >> (bits - 1) else x


def towards_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers(kind: str, rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, kind) for _ in range(3))
    divisor = np.where(b == 0, 3, b).astype(b.dtype)
    bits = KINDS[kind].bits
    cases: list[tuple[str, list, Any]] = [
        (f"add.{kind}", [a, b], lambda x, y: x + y), (f"sub.{kind}", [a, b], lambda x, y: x - y), (f"mul.lo.{kind}", [a, b], lambda x, y: x * y),
        (f"mul.hi.{kind}", [a, b], lambda x, y: x * y >> bits), (f"mad.lo.{kind}", [a, b, c], lambda x, y, z: x * y + z),
        (f"min.{kind}", [a, b], min), (f"max.{kind}", [a, b], max), (f"div.{kind}", [a, divisor], towards_zero),
        (f"rem.{kind}", [a, divisor], lambda x, y: x - towards_zero(x, y) * y)]
    if KINDS[kind].is_signed:
        cases += [(f"abs.{kind}", [a], abs), (f"neg.{kind}", [a], lambda x: -x)]
    for opcode, given, f in cases:
        got = evaluate(opcode, [kind] * len(given), kind, *given)
        assert got.tolist() == [wrapped(f(*map(int, x)), kind) for x in zip(*given)], opcode
    if bits < 64:
        wide = f"{kind[0]}{2 * bits}"
        assert evaluate(f"mul.wide.{kind}", [kind, kind], wide, a, b).tolist() == [int(x) * int(y) for x, y in zip(a, b)]


@pytest.mark.parametrize("kind", ["s16", "b16", "s32", "b32", "s64", "b64"])
def test_shifts(kind: str, rng: np.random.Generator) -> None:
    a, by = integers(rng, kind), rng.integers(0, 80, COUNT, np.uint32)
    right = f"{'s' if kind[0] == 's' else 'u'}{KINDS[kind].bits}"
    assert evaluate(f"shr.{right}", [kind, "u32"], kind, a, by).tolist() == [int(x) >> int(n) for x, n in zip(a, by)]
    assert evaluate(f"shl.b{KINDS[kind].bits}", [kind, "u32"], kind, a, by).tolist() == [wrapped(int(x) << int(n), kind) for x, n in zip(a, by)]


def test_fields_and_bytes(rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, "b32") for _ in range(3))
    at, length = rng.integers(0, 40, COUNT, np.uint32), rng.integers(0, 40, COUNT, np.uint32)
    each = list(zip(*(x.tolist() for x in (a, b, c, at, length))))
    assert evaluate("bfe.u32", ["b32", "u32", "u32"], "b32", a, at, length).tolist() == [x >> n & (1 << m) - 1 for x, _, _, n, m in each]
    assert evaluate("bfe.s32", ["b32", "u32", "u32"], "s32", a, at, length).tolist() == [_signed_field(wrapped(x, "s32"), n, m) for x, _, _, n, m in each]
    assert evaluate("bfi.b32", ["b32", "b32", "u32", "u32"], "b32", a, b, at, length).tolist() == [
        wrapped(y & ~(((1 << m) - 1) << n) | (x & (1 << m) - 1) << n, "b32") if n < 32 else y for x, y, _, n, m in each]
    assert evaluate("popc.b32", ["b32"], "u32", a).tolist() == [x.bit_count() for x, *_ in each]
    assert evaluate("clz.b32", ["b32"], "u32", a).tolist() == [32 - x.bit_length() for x, *_ in each]
    assert evaluate("brev.b32", ["b32"], "b32", a).tolist() == [int(f"{x:032b}"[::-1], 2) for x, *_ in each]
    assert evaluate("shf.r.wrap.b32", ["b32"] * 3, "b32", a, b, c).tolist() == [wrapped((y << 32 | x) >> z % 32, "b32") for x, y, z, *_ in each]
    assert evaluate("shf.l.clamp.b32", ["b32", "b32", "u32"], "b32", a, b, at).tolist() == [
        wrapped((y << 32 | x) << min(n, 32) >> 32, "b32") for x, y, _, n, _ in each]
    digits = rng.integers(0, 2**16, COUNT).astype(np.uint32)
    both = np.stack([a, b], 1).view(np.uint8)
    expected = []
    for row, how in zip(both, digits.tolist()):
        chosen = [(how >> 4 * n) & 15 for n in range(4)]
        expected.append(int.from_bytes(bytes((255 if row[d & 7] & 128 else 0) if d & 8 else int(row[d & 7]) for d in chosen), "little"))
    assert evaluate("prmt.b32", ["b32"] * 3, "b32", a, b, digits).tolist() == expected
    table = 0b11101000                                                 # the majority
    assert evaluate("lop3.b32", ["b32"] * 3, "b32", a, b, c, literals=f", {table}").tolist() == [x & y | x & z | y & z for x, y, z, *_ in each]


def _signed_field(x: int, at: int, length: int) -> int:
    if length == 0:
        return 0
    field = x >> at & (1 << length) - 1
    return field - (1 << length) if field >> (length - 1) else field


def test_dots(rng: np.random.Generator) -> None:
    a, b = (rng.integers(0, 2**32, COUNT, np.uint32) for _ in range(2))
    c = rng.integers(-1000, 1000, COUNT).astype(np.int32)
    left, right = a.view(np.int16).reshape(-1, 2).astype(int), b.view(np.int8).reshape(-1, 4).astype(int)
    assert evaluate("dp2a.lo.s32.s32", ["b32", "b32", "s32"], "s32", a, b, c).tolist() == ((left * right[:, :2]).sum(1) + c).tolist()
    left = a.view(np.int8).reshape(-1, 4).astype(int)
    assert evaluate("dp4a.s32.s32", ["b32", "b32", "s32"], "s32", a, b, c).tolist() == ((left * right).sum(1) + c).tolist()


# -- floats ---------------------------------------------------------------------------------------------------------------

def floats(rng: np.random.Generator, kind: str, spread: int) -> np.ndarray:
    dtype = KINDS[kind].dtype
    return (rng.standard_normal(COUNT) * 2.0 ** rng.integers(-spread, spread, COUNT)).astype(dtype)


def check_rounded(got: np.ndarray, exact: list[Fraction], mode: str) -> None:
    """Each is the neighbour of the exact number that the direction wants."""
    largest = Fraction(float(ml_dtypes.finfo(got.dtype).max))
    for value, x in zip(got, exact):
        if abs(x) >= largest:
            continue
        assert np.isfinite(value)
        r = Fraction(float(value))
        low, high = (Fraction(float(np.nextafter(value, got.dtype.type(end)))) if abs(r) < largest else r for end in (-math.inf, math.inf))
        if mode == "rn":
            assert 2 * abs(r - x) <= min(abs(high - r), abs(r - low)) or (2 * abs(r - x) <= abs((high if x > r else low) - r)), (value, x)
        elif mode == "rz":
            assert abs(r) <= abs(x) < abs(high if x > 0 else low) or r == x, (value, x)
        elif mode == "rm":
            assert r <= x < high, (value, x)
        else:
            assert low < x <= r, (value, x)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_rounding(kind: str, mode: str, rng: np.random.Generator) -> None:
    a, b = (floats(rng, kind, 30) for _ in range(2))
    c = (-(a.astype(np.float64) * b) * (1 + 2.0**-20 * rng.standard_normal(COUNT))).astype(a.dtype)     # what is left is cut off often
    c[:64] = floats(rng, kind, 60)[:64]
    x, y, z = ([Fraction(float(v)) for v in of] for of in (a, b, c))
    check_rounded(evaluate(f"fma.{mode}.{kind}", [kind] * 3, kind, a, b, c), [p * q + r for p, q, r in zip(x, y, z)], mode)
    check_rounded(evaluate(f"add.{mode}.{kind}", [kind] * 2, kind, a, b), [p + q for p, q in zip(x, y)], mode)
    check_rounded(evaluate(f"sub.{mode}.{kind}", [kind] * 2, kind, a, b), [p - q for p, q in zip(x, y)], mode)
    check_rounded(evaluate(f"mul.{mode}.{kind}", [kind] * 2, kind, a, b), [p * q for p, q in zip(x, y)], mode)


def test_fused_at_halves_and_ends(rng: np.random.Generator) -> None:
    """A float32 sum that float64 would round to the middle of two first; float64 products that overflow on the way."""
    a, b, c = (np.full(COUNT, x, np.float32) for x in (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60))
    c[1::2] *= -1
    got = evaluate("fma.rn.f32", ["f32"] * 3, "f32", a, b, c)
    assert got[0] == np.float32(1 + 2.0**-11 + 2.0**-23) and got[1] == np.float32(1 + 2.0**-11)
    a, b, c = np.full(COUNT, 1e200), np.full(COUNT, 1e120), np.full(COUNT, -1e308)
    b[1::2] = 1.79e108
    got = evaluate("fma.rn.f64", ["f64"] * 3, "f64", a, b, c)
    assert got[0] == math.inf and got[1] == float(Fraction(1e200) * Fraction(1.79e108) + Fraction(-1e308))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_narrow_floats(kind: str, rng: np.random.Generator) -> None:
    a, b, c = (floats(rng, kind, 4) for _ in range(3))
    x, y, z = ([Fraction(float(v)) for v in of] for of in (a, b, c))
    check_rounded(evaluate(f"fma.rn.{kind}", [kind] * 3, kind, a, b, c), [p * q + r for p, q, r in zip(x, y, z)], "rn")
    for of in ("f32", "f64"):
        wide = floats(rng, of, 6)
        check_rounded(evaluate(f"cvt.rn.{kind}.{of}", [of], kind, wide), [Fraction(float(v)) for v in wide], "rn")
    halves = np.stack([a, b], 1).view(np.uint32)[:, 0]
    assert np.array_equal(evaluate(f"add.rn.{kind}x2", [f"{kind}x2"] * 2, f"{kind}x2", halves, halves).view(a.dtype), (np.stack([a, b], 1) * 2).reshape(-1))
    assert np.array_equal(evaluate(f"cvt.rn.{kind}x2.f32", ["f32", "f32"], f"{kind}x2", b.astype(np.float32), a.astype(np.float32)), halves)


def test_least_and_largest() -> None:
    a = np.resize(np.array([0.0, -0.0, np.nan, 1.0, np.nan, -np.inf], np.float32), COUNT)
    b = np.resize(np.array([-0.0, 0.0, 2.0, np.nan, np.nan, 3.0], np.float32), COUNT)
    least, largest = (evaluate(f"{name}.f32", ["f32"] * 2, "f32", a, b)[:6] for name in ("min", "max"))
    assert np.array_equal(least, np.float32([0, 0, 2, 1, np.nan, -np.inf]), equal_nan=True) and np.signbit(least[:2]).all()
    assert np.array_equal(largest, np.float32([0, 0, 2, 1, np.nan, 3]), equal_nan=True) and not np.signbit(largest[:2]).any()
    assert np.isnan(evaluate("min.NaN.f32", ["f32"] * 2, "f32", a, b)[2:5]).all()


def test_conversions() -> None:
    x = np.resize(np.array([2.5, -2.5, 3.5, 1e30, -1e30, np.nan, np.inf, 0.49, -0.51, 300], np.float32), COUNT)
    top, low = 2**31 - 1, -2**31
    for mode, expected in (("rni", [2, -2, 4, top, low, 0, top, 0, -1, 300]), ("rzi", [2, -2, 3, top, low, 0, top, 0, 0, 300]),
                           ("rmi", [2, -3, 3, top, low, 0, top, 0, -1, 300]), ("rpi", [3, -2, 4, top, low, 0, top, 1, 0, 300])):
        assert evaluate(f"cvt.{mode}.s32.f32", ["f32"], "s32", x)[:10].tolist() == expected
    assert evaluate("cvt.rzi.u8.f32", ["f32"], "u16", x)[:10].tolist() == [2, 0, 3, 255, 0, 0, 255, 0, 0, 255]
    n = np.resize(np.array([-1, 127, 128, 300, -300], np.int32), COUNT)
    assert evaluate("cvt.s8.s32", ["s32"], "s16", n)[:5].tolist() == [-1, 127, -128, 44, -44]
    assert evaluate("cvt.sat.u8.s32", ["s32"], "u16", n)[:5].tolist() == [0, 127, 128, 255, 0]
    assert evaluate("cvt.u64.s32", ["s32"], "u64", n)[0] == 2**64 - 1
    large = np.resize(np.array([2**24 + 1, 2**63 - 1, -2**24 - 1], np.int64), COUNT)
    assert evaluate("cvt.rn.f32.s64", ["s64"], "f32", large)[:3].tolist() == [2.0**24, 2.0**63, -2.0**24]
    assert evaluate("cvt.rz.f32.s64", ["s64"], "f32", large)[1] == np.nextafter(np.float32(2.0**63), np.float32(0))
    assert evaluate("cvt.sat.f32.f32", ["f32"], "f32", x)[:6].tolist() == [1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("opcode", ["frobnicate.b32", "fma.rn.odd.f32", "add.v9.s32", "add.s31"])
def test_what_is_not_known_is_refused_with_its_line(opcode: str, rng: np.random.Generator) -> None:
    given = [integers(rng, "b32")] * (3 if "fma" in opcode else 2)
    with pytest.raises(UnknownInstruction, match=rf"PTX line \d+: {opcode} %d, %a0"):
        evaluate(opcode, ["b32"] * len(given), "b32", *given)
