"""LLVM code of integers that wrap around in their own width, with NumPy's results where hardware has none: a division by
zero is 0, and a shift by the width or more leaves nothing but the sign."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.numba_hooks import ir

_COMPARE = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "==", "!=": "!="}
_HELD_BY_SMALLER = {"<": True, "<=": True, ">": False, ">=": False, "==": False, "!=": True}


def emit(builder: Any, op: str, a: Any, b: Any, signed: bool, literal: int | None = None) -> Any:
    """``a op b`` of two integers of one LLVM type; ``literal`` is b's value where it is known."""
    plain = _PLAIN.get(op)
    if plain is not None:
        return plain(builder, a, b)
    if op in ("max", "min"):
        compare = builder.icmp_signed if signed else builder.icmp_unsigned
        return builder.select(compare(">" if op == "max" else "<", a, b), a, b)
    if op in ("<<", ">>"):
        return _shifted(builder, op, a, b, signed, literal)
    if op == "**":
        return _power(builder, a, b, literal)
    return _divided(builder, op, a, b, signed, literal)


_PLAIN = {"+": lambda b, x, y: b.add(x, y), "-": lambda b, x, y: b.sub(x, y), "*": lambda b, x, y: b.mul(x, y),
          "&": lambda b, x, y: b.and_(x, y), "|": lambda b, x, y: b.or_(x, y), "^": lambda b, x, y: b.xor(x, y)}


def emit_bool(builder: Any, op: str, a: Any, b: Any) -> Any:
    """Of booleans: + is or, * is and."""
    if op in ("+", "|", "max"):
        return builder.or_(a, b)
    return builder.xor(a, b) if op == "^" else builder.and_(a, b)


def _divided(builder: Any, op: str, a: Any, b: Any, signed: bool, literal: int | None) -> Any:
    kind = a.type
    zero, one = ir.Constant(kind, 0), ir.Constant(kind, 1)
    if literal == 0:
        return zero
    if not signed:
        if literal is not None:
            return builder.udiv(a, b) if op == "//" else builder.urem(a, b)
        is_zero = builder.icmp_unsigned("==", b, zero)
        by = builder.select(is_zero, one, b)
        out = builder.udiv(a, by) if op == "//" else builder.urem(a, by)
        return builder.select(is_zero, zero, out)
    if literal is not None and literal > 0 and literal & (literal - 1) == 0:
        shift = literal.bit_length() - 1
        return builder.ashr(a, ir.Constant(kind, shift)) if op == "//" else builder.and_(a, ir.Constant(kind, literal - 1))
    # the smallest number divided by -1 has no result in hardware; NumPy's wraps around
    negated = builder.icmp_signed("==", b, ir.Constant(kind, -1))
    is_zero = builder.icmp_signed("==", b, zero)
    by = builder.select(builder.or_(negated, is_zero), one, b)
    quotient = builder.sdiv(a, by)
    remainder = builder.sub(a, builder.mul(quotient, by))
    adjust = builder.and_(builder.icmp_signed("!=", remainder, zero),
                          builder.icmp_signed("<", builder.xor(remainder, by), zero))
    if op == "//":
        out = builder.sub(quotient, builder.zext(adjust, kind))
        out = builder.select(negated, builder.neg(a), out)
    else:
        out = builder.select(adjust, builder.add(remainder, by), remainder)
    return builder.select(is_zero, zero, out)


def _shifted(builder: Any, op: str, a: Any, b: Any, signed: bool, literal: int | None) -> Any:
    kind = a.type
    zero, most = ir.Constant(kind, 0), ir.Constant(kind, kind.width - 1)
    arithmetic = op == ">>" and signed
    if literal is not None:
        if not 0 <= literal < kind.width:
            return builder.ashr(a, most) if arithmetic else zero
        return builder.shl(a, b) if op == "<<" else builder.ashr(a, b) if signed else builder.lshr(a, b)
    outside = builder.icmp_unsigned(">", b, most)              # negative counts, too
    if arithmetic:
        return builder.ashr(a, builder.select(outside, most, b))
    count = builder.select(outside, zero, b)
    out = builder.shl(a, count) if op == "<<" else builder.lshr(a, count)
    return builder.select(outside, zero, out)


def _power(builder: Any, a: Any, b: Any, literal: int | None) -> Any:
    """By squaring."""
    kind = a.type
    one, zero = ir.Constant(kind, 1), ir.Constant(kind, 0)
    if literal is not None:
        out = one
        while literal:
            if literal & 1:
                out = a if out is one else builder.mul(out, a)
            literal >>= 1
            a = builder.mul(a, a) if literal else a
        return out
    before = builder.block
    header, body, after = (builder.append_basic_block(f"power_{name}") for name in ("header", "body", "after"))
    builder.branch(header)
    builder.position_at_end(header)
    exponent, base, product = (builder.phi(kind) for _ in range(3))
    for value, start in ((exponent, b), (base, a), (product, one)):
        value.add_incoming(start, before)
    builder.cbranch(builder.icmp_unsigned("!=", exponent, zero), body, after)
    builder.position_at_end(body)
    is_odd = builder.icmp_unsigned("!=", builder.and_(exponent, one), zero)
    multiplied = builder.select(is_odd, builder.mul(product, base), product)
    further = (builder.lshr(exponent, one), builder.mul(base, base), multiplied)
    for value, then in zip((exponent, base, product), further):
        value.add_incoming(then, body)
    builder.branch(header)
    builder.position_at_end(after)
    return product


def compare(builder: Any, op: str, a: Any, b: Any, a_signed: bool, b_signed: bool) -> Any:
    """A comparison of integers of any widths and signs, exact as in Python."""
    width = max(a.type.width, b.type.width)
    if a_signed != b_signed and (a if b_signed else b).type.width >= width and width < 64:
        width = 64                                             # where both fit
    kind = ir.IntType(width)
    wide = [_extended(builder, x, kind, signed) for x, signed in ((a, a_signed), (b, b_signed))]
    unsigned_fits = a_signed == b_signed or (a if b_signed else b).type.width < width
    if unsigned_fits:
        ask = builder.icmp_signed if a_signed or b_signed else builder.icmp_unsigned
        return ask(_COMPARE[op], *wide)
    # a uint64 and a signed number: a negative one is the smaller
    smaller = _HELD_BY_SMALLER[op] if a_signed or op in ("==", "!=") else not _HELD_BY_SMALLER[op]
    negative = builder.icmp_signed("<", wide[0 if a_signed else 1], ir.Constant(kind, 0))
    return builder.select(negative, ir.Constant(ir.IntType(1), smaller), builder.icmp_unsigned(_COMPARE[op], *wide))


def _extended(builder: Any, value: Any, kind: Any, signed: bool) -> Any:
    if value.type.width == kind.width:
        return value
    return builder.sext(value, kind) if signed else builder.zext(value, kind)
