"""Fragments of 16- and 8-bit elements as the 32-bit registers that instructions take, and back."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.numba_hooks import ir

i1, i8, i32 = ir.IntType(1), ir.IntType(8), ir.IntType(32)


def elements(builder: Any, value: Any, count: int) -> list:
    return [builder.extract_value(value, n) for n in range(count)]


def _is_narrow(element: Any) -> bool:
    return isinstance(element, ir.IntType) and element.width < 32


def to_registers(builder: Any, values: list) -> list:
    """Pairs of 16-bit values, or fours of 8-bit ones, as 32-bit registers; wider values as they are. A bool is a byte."""
    if not _is_narrow(values[0].type):
        return values
    values = [builder.zext(value, i8) for value in values] if values[0].type == i1 else values
    per, packed = 32 // values[0].type.width, []
    for at in range(0, len(values), per):
        vector = ir.Constant(ir.VectorType(values[0].type, per), ir.Undefined)
        for n in range(per):
            vector = builder.insert_element(vector, values[at + n], i32(n))
        packed.append(builder.bitcast(vector, i32))
    return packed


def from_registers(builder: Any, registers: list, element: Any) -> list:
    """The inverse of `to_registers` for elements of an LLVM type."""
    if element == i1:
        return [builder.icmp_unsigned("!=", byte, i8(0)) for byte in from_registers(builder, registers, i8)]
    if not _is_narrow(element):
        return [builder.bitcast(register, element) for register in registers]
    per, out = 32 // element.width, []
    for register in registers:
        vector = builder.bitcast(register, ir.VectorType(element, per))
        out += [builder.extract_element(vector, i32(n)) for n in range(per)]
    return out
