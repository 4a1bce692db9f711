"""Inline assembly from a text and operand types: the one place that knows how LLVM wants it."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.numba_hooks import ir, signature, types

_LETTER = {ir.IntType(32): "r", ir.IntType(64): "l", ir.IntType(16): "h", ir.FloatType(): "f", ir.DoubleType(): "d"}


def assembly(builder: Any, text: str, results: list, operands: list, *, memory: bool = False,
             pure: bool = False, convergent: bool = False, tied: bool = False) -> list:
    """Emit ``text`` (operands ``$0`` ... : results first) and return its results.

    ``memory`` says that it reads or writes memory: the compiler then keeps it in order with other accesses. ``pure``
    says that its results depend on its operands alone: the compiler may then move, merge or drop it. ``convergent`` says
    that the threads of a warp execute it together: the compiler then never copies it into two branches. ``tied`` says
    that the first operands are the results' old values, in the same registers.
    """
    outputs = [f"={_LETTER[t]}" for t in results]
    inputs = [str(n) if tied and n < len(results) else _LETTER[v.type] for n, v in enumerate(operands)]
    constraints = ",".join(outputs + inputs + (["~{memory}"] if memory else []))
    returns = ir.VoidType() if not results else results[0] if len(results) == 1 else ir.LiteralStructType(results)
    function = ir.FunctionType(returns, [v.type for v in operands])
    value = builder.call(ir.InlineAsm(function, text, constraints, side_effect=not pure), operands,
                         attrs=("convergent",) if convergent else ())
    if not results:
        return []
    return [value] if len(results) == 1 else [builder.extract_value(value, n) for n in range(len(results))]


def plain(text: str, convergent: bool = False) -> Any:
    """The typer of an atom without operands or result that orders memory; ``convergent`` as for `assembly`."""
    def typer(context: Any) -> Any:
        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            assembly(b, text, [], [], memory=True, convergent=convergent)
            return c.get_dummy_value()

        return signature(types.none), codegen

    return typer


def braces(first: int, count: int) -> str:
    """``{$4, $5}``: a vector operand."""
    return "{" + ", ".join(f"${n}" for n in range(first, first + count)) + "}"
