"""Fragments of 16-bit elements as the 32-bit registers that instructions take, and back."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.numba_hooks import ir

i32 = ir.IntType(32)


def elements(builder: Any, value: Any, count: int) -> list:
    return [builder.extract_value(value, n) for n in range(count)]


def to_registers(builder: Any, values: list) -> list:
    """Pairs of 16-bit values as 32-bit registers; wider values as they are."""
    if values[0].type != ir.IntType(16):
        return values
    packed = []
    for low, high in zip(values[::2], values[1::2]):
        vector = ir.Constant(ir.VectorType(ir.IntType(16), 2), ir.Undefined)
        vector = builder.insert_element(vector, low, i32(0))
        packed.append(builder.bitcast(builder.insert_element(vector, high, i32(1)), i32))
    return packed


def from_registers(builder: Any, registers: list, element: Any) -> list:
    """The inverse of `to_registers` for elements of an LLVM type."""
    if element != ir.IntType(16):
        return registers
    out = []
    for register in registers:
        vector = builder.bitcast(register, ir.VectorType(ir.IntType(16), 2))
        out += [builder.extract_element(vector, i32(0)), builder.extract_element(vector, i32(1))]
    return out
