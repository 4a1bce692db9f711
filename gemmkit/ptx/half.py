"""Arithmetic of 16-bit floats as the hardware has it: one element, or a pair in one register.

``+`` and ``*`` of device code compute in float32 and round back. These are single instructions: `hadd`, `hmul`, `hfma` of
elements, `hadd2`, `hmul2`, `hfma2` of pairs (CUDA's names).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import Atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import numba_type
from gemmkit.ptx.registers import elements, from_registers, to_registers

F16 = np.dtype(np.float16)
i16, i32 = ir.IntType(16), ir.IntType(32)


def _half(name: str, operation: str, operands: int, pairs: bool, compute: Any, doc: str) -> Atom:
    text = f"{operation}.rn.f16{'x2' if pairs else ''} {', '.join(f'${n}' for n in range(operands + 1))};"

    def typer(context: Any, *args: Any) -> Any:
        element = numba_type(F16)
        wanted = types.UniTuple(element, 2) if pairs else element
        if len(args) != operands or any(arg != wanted for arg in args):
            return None

        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            if not pairs:
                return assembly(b, text, [i16], list(v), pure=True)[0]
            given = [to_registers(b, elements(b, value, 2))[0] for value in v]
            out = from_registers(b, assembly(b, text, [i32], given, pure=True), i16)
            return c.make_tuple(b, wanted, out)

        return signature(wanted, *args), codegen

    def emulate(*args: Any) -> Any:
        if any(len(arg) != 2 for arg in args) if pairs else False:
            raise TypeError(f"{name} is of pairs of float16")
        wide = [np.asarray(arg, np.float64) for arg in args]            # exact but for sums of more than 53 bits
        with np.errstate(all="ignore"):
            out = compute(*wide).astype(F16)
        return tuple(out) if pairs else out[()]

    return Atom(name, typer, emulate, doc)


hadd = _half("hadd", "add", 2, False, lambda a, b: a + b, "``a + b`` of float16, in one instruction.")
hmul = _half("hmul", "mul", 2, False, lambda a, b: a * b, "``a * b`` of float16, in one instruction.")
hfma = _half("hfma", "fma", 3, False, lambda a, b, c: a * b + c, "``a * b + c`` of float16, rounded once.")
hadd2 = _half("hadd2", "add", 2, True, lambda a, b: a + b, "Sums of two pairs of float16.")
hmul2 = _half("hmul2", "mul", 2, True, lambda a, b: a * b, "Products of two pairs of float16.")
hfma2 = _half("hfma2", "fma", 3, True, lambda a, b, c: a * b + c, "``a * b + c`` of pairs of float16, each rounded once.")
