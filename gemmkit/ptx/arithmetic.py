"""Fused multiply-add of the ordinary floating-point units, and a difference that is never fused."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.control import to_and_fro
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.scalars import NarrowFloatType


def _typer(context: Any, a: Any, b: Any, c: Any) -> Any:
    if not (a == b == c):
        return None
    if isinstance(a, types.Float):
        def fused(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
            return builder.fma(*v)

        return signature(a, a, b, c), fused
    if isinstance(a, types.Integer):
        return signature(a, a, b, c), lambda ctx, builder, s, v: builder.add(builder.mul(v[0], v[1]), v[2])
    if isinstance(a, NarrowFloatType):
        def narrow(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
            wide = [ctx.cast(builder, x, a, types.float32) for x in v]
            out = builder.fma(*wide)
            return ctx.cast(builder, out, types.float32, a)

        return signature(a, a, b, c), narrow
    return None


@atom(_typer)
def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` rounded once (16-bit floats: in float32, then to 16 bits); integers wrap. All three of one type.

    The emulation computes in float64: it rounds a float64 product before the sum, too.
    """
    if type(a) is type(b) is type(c) is np.float32:
        value = float(a) * float(b) + float(c)
        # NumPy warns of no such number, nor of infinities and NaN: it need not be told to be silent.
        if 1e-37 < abs(value) < 3e38 or value == 0 or value - value != 0:
            return np.float32(value)
    kind = np.asarray(c).dtype
    with np.errstate(all="ignore"):
        if kind.kind in "iu":
            wrapped = (int(a) * int(b) + int(c)) % (1 << 8 * kind.itemsize)
            return np.array(wrapped, f"u{kind.itemsize}").view(kind)[()]
        return _rounded(np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64), kind)[()]


def _type_difference(context: Any, a: Any, b: Any) -> Any:
    if a != b or not isinstance(a, types.Float):
        return None
    kind = f"f{a.bitwidth}"

    def codegen(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
        return assembly(builder, f"sub.rn.{kind} $0, $1, $2;", [v[0].type], list(v), pure=True)[0]

    return signature(a, a, b), codegen


@atom(_type_difference)
def difference(a: Any, b: Any) -> Any:
    """``a - b`` of two float32 or float64, each rounded as it is: a product in ``a`` is not fused with the subtraction. What
    is the largest of rounded products is then 0 from itself, and not a rounding error that has no bound."""
    with np.errstate(all="ignore"):
        return a - b


def _rounded(value: np.ndarray, kind: np.dtype) -> np.ndarray:
    """A float64 result as the hardware gives it: 16-bit floats by way of float32. (Integers have wrapped already.)"""
    if value.dtype == kind:
        return value
    return value.astype(np.float32).astype(kind) if kind.itemsize == 2 else value.astype(kind)


def _type_outer_fma(context: Any, c: Any, a: Any, b: Any, depth: Any) -> Any:
    if not all(isinstance(t, types.UniTuple) for t in (c, a, b)) or not a.dtype == b.dtype == c.dtype:
        return None
    k = int(depth.literal_value)
    rows, columns = a.count // k, b.count // k
    if rows * columns != c.count:
        return None
    if isinstance(c.dtype, types.Complex):
        return signature(c, c, a, b, depth), _complex_products(rows, columns, k)
    element = _typer(context, c.dtype, c.dtype, c.dtype)
    if element is None:
        return None
    sig, multiply_add = element

    def codegen(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
        out, lhs, rhs = ([builder.extract_value(x, n) for n in range(t.count)] for x, t in zip(v, (c, a, b)))
        for step in range(k):
            for i, j in to_and_fro(rows, columns):
                n = i + j * rows
                given = [lhs[step * rows + i], rhs[step * columns + j], out[n]]
                out[n] = multiply_add(ctx, builder, sig, given)
        return ctx.make_tuple(builder, c, out)

    return signature(c, c, a, b, depth), codegen


def _complex_products(rows: int, columns: int, depth: int) -> Any:
    """The code of complex sums: four fused real products each. Of a column those with one part of B follow each other."""
    def codegen(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
        out, lhs, rhs = ([[builder.extract_value(builder.extract_value(x, n), part) for part in (0, 1)]
                          for n in range(t.count)] for x, t in zip(v[:3], s.args[:3]))
        minus = [builder.fsub(imaginary.type(-0.0), imaginary) for _, imaginary in rhs]
        for step in range(depth):
            for j in range(columns):
                real, imaginary = rhs[step * columns + j]
                for turn, (part, of_a, factor) in enumerate(((0, 0, real), (1, 1, real), (1, 0, imaginary),
                                                             (0, 1, minus[step * columns + j]))):
                    for i in (range(rows) if turn % 2 == 0 else range(rows - 1, -1, -1)):
                        sums = out[i + j * rows]
                        sums[part] = builder.fma(lhs[step * rows + i][of_a], factor, sums[part])
        made = []
        for real, imaginary in out:
            number = ctx.make_complex(builder, s.return_type.dtype)
            number.real, number.imag = real, imaginary
            made.append(number._getvalue())
        return ctx.make_tuple(builder, s.return_type, made)

    return codegen


@atom(_type_outer_fma)
def outer_fma(c: tuple, a: tuple, b: tuple, depth: int) -> tuple:
    """``c[i, j] += a[k, i] * b[k, j]`` for k < depth, all of one type: `control.outer` of `fma`. Of complex numbers each of
    the four real products is fused with the sum."""
    kind = c[0].dtype
    wide = kind if kind.kind in "iu" else np.dtype(np.complex128 if kind.kind == "c" else np.float64)
    out = np.array(c, kind).reshape(len(b) // depth, len(a) // depth)
    lhs = np.array(a, kind).astype(wide).reshape(depth, 1, -1)
    rhs = np.array(b, kind).astype(wide).reshape(depth, -1, 1)
    with np.errstate(all="ignore"):
        for step in range(depth):
            out = _rounded(rhs[step] * lhs[step] + out, kind)
    return tuple(out.reshape(-1))
