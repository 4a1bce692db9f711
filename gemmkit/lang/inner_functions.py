"""Inner functions that device code hands on: ``apply(lambda x, i: x + scale, values)``, which captured run-time values.

Numba inlines an inner function where it is called by name, and cannot hand one on that captured what is not a constant. The
pass here makes a value of it, the struct of what it captured; what calls it gives it that struct (`ClosureType`). A variable
is captured by value, so it may not change before the function is handed on: where it may, Numba is left to refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from gemmkit.lang.numba_hooks import FunctionPass, register_pass
from gemmkit.lang.numba_hooks import numba_ir as ir


class InnerFunctions(FunctionPass):
    """Makes values of the inner functions that are arguments of calls."""

    _name = "gemmkit_inner_functions"
    #: The atom that makes a function's inner one, of its code, of captured values; `gemmkit.lang.closures` gives it.
    atom: Callable[[FunctionType, CodeType], Any]

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        function = state.func_id.func
        if not any(isinstance(constant, CodeType) for constant in function.__code__.co_consts):
            return False
        found = False
        for block in state.func_ir.blocks.values():
            made = [n for n, statement in enumerate(block.body) if _is_inner(statement)]
            for n in reversed(made):                           # what is put in front moves those behind alone
                found |= _make_value(state.func_ir, function, block, n)
        return found


register_pass(mutates_CFG=False, analysis_only=False)(InnerFunctions)


def _is_inner(statement: Any) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ir.Expr) and value.op == "make_function" and value.defaults is None


def _make_value(func_ir: Any, function: FunctionType, block: Any, n: int) -> bool:
    """Put ``capture(variables)`` in the place of an inner function that is an argument further down its block."""
    statement = block.body[n]
    code, loc, name = statement.value.code, statement.loc, statement.target.name
    code = func_ir.get_definition(code).value if isinstance(code, ir.Var) else code
    captured = [] if statement.value.closure is None else func_ir.get_definition(statement.value.closure).items
    uses = [other for each in func_ir.blocks.values() for other in each.body
            if other is not statement and any(v.name == name for v in other.list_vars())]
    if len(uses) != 1 or uses[0] not in block.body[n:] or not _is_argument(uses[0], name):
        return False
    between = block.body[n + 1:block.body.index(uses[0])]
    names = {_source(func_ir, variable) for variable in captured}
    if any(isinstance(other, ir.Assign) and other.target.name in names for other in between):
        return False
    capture = block.scope.redefine("$capture", loc)
    atom = ir.Global("capture", InnerFunctions.atom(function, code), loc)
    block.body[n:n + 1] = [ir.Assign(atom, capture, loc),
                           ir.Assign(ir.Expr.call(capture, captured, (), loc), statement.target, loc)]
    func_ir._definitions[capture.name].append(atom)
    func_ir._definitions[name] = [block.body[n + 1].value]
    return True


def _is_argument(statement: Any, name: str) -> bool:
    call = getattr(statement, "value", None)
    return isinstance(call, ir.Expr) and call.op == "call" and call.func.name != name


def _source(func_ir: Any, variable: Any) -> str:
    """The variable that a captured one is read from."""
    definitions = func_ir._definitions[variable.name]
    return definitions[0].name if len(definitions) == 1 and isinstance(definitions[0], ir.Var) else variable.name
