"""Branches on what is known when a kernel is compiled are decided before Numba infers types.

Of ``if spec.is_cluster:`` in device code one side is compiled, as with ``if constexpr`` in C++. In Python, and so in the
emulator, it is an ordinary ``if``.

Known are constants, static fields and properties of components, elements of tuples that are one of these, tiles' sizes, and
comparisons, ``not``, ``and``, ``or``, ``len`` and whole-number arithmetic of what is known, and atoms that decide by types
(``decided``, for example `gemmkit.lang.pairs.is_pairwise`). All that a decision rests on is
in the kernel's key: types hold it (`ComponentType`, literals), or the function's text does (`gemmkit.lang.fingerprint`).
"""

from __future__ import annotations

import operator
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np

from gemmkit.lang.assertions import forget_unreached
from gemmkit.lang.numba_hooks import FunctionPass, build_definitions, register_pass, types
from gemmkit.lang.numba_hooks import numba_ir as ir
from gemmkit.lang.references import is_library
from gemmkit.lang.unrolled import unroll

LARGEST = 2**31                        # whole numbers stay below it, as coordinates do

_COMPARISONS = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.is_, operator.is_not}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod}


class Unknown(Exception):
    """What a variable holds is not known when its function is compiled."""


class Of:
    """A value of which the type is known: an argument, or part of one."""

    def __init__(self, ty: Any):
        self.ty = ty


class StaticBranches(FunctionPass):
    """Makes jumps of the branches that are decided, and forgets what is then not reached."""

    _name = "gemmkit_static_branches"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        changed = not is_library(state.func_id.func) and unroll(state.func_ir, state.args)
        while _decide(state.func_ir, state.args, state.typingctx):      # what a side that is gone assigned is known then
            changed = True
        return changed


register_pass(mutates_CFG=True, analysis_only=False)(StaticBranches)


def _decide(func_ir: Any, args: tuple, context: Any) -> bool:
    found = False
    for block in func_ir.blocks.values():
        branch = block.body[-1]
        if isinstance(branch, ir.Branch):
            reader = _Reader(func_ir, args, context)
            try:
                value = _truth(reader.value(branch.cond))
            except Unknown:
                continue
            block.body[-1] = ir.Jump(branch.truebr if value else branch.falsebr, branch.loc)
            _replace(func_ir.blocks, reader.truths)
            found = True
    if found:
        forget_unreached(func_ir.blocks)
        _forget_overwritten(func_ir.blocks)
        func_ir._definitions = build_definitions(func_ir.blocks)
    return found


def _replace(blocks: dict[int, Any], truths: dict[int, bool]) -> None:
    """Put constants in the place of a condition's parts: Numba would compile its own functions to compare strings."""
    for block in blocks.values():
        for statement in block.body:
            if isinstance(statement, ir.Assign) and id(statement.value) in truths:
                statement.value = ir.Const(truths[id(statement.value)], statement.loc)


def _forget_overwritten(blocks: dict[int, Any]) -> None:
    """Of ``both = first and second`` each side assigns to one name of the stack, and `first` is gone where it is decided."""
    entered = Counter(target for block in blocks.values() for target in block.body[-1].get_targets())
    for block in blocks.values():
        last = block.body[-1]
        if isinstance(last, ir.Jump) and entered[last.target] == 1 and blocks[last.target] is not block:
            following = blocks[last.target].body
            assigned = {name for s in following if (name := _stacked(s))}
            read = {v.name for s in following for v in s.list_vars() if _stacked(s) != v.name}
            block.body = [s for s in block.body if _stacked(s) not in assigned - read]


def _stacked(statement: Any) -> str | None:
    """The name on the interpreter's stack that a statement assigns to."""
    name = statement.target.name if isinstance(statement, ir.Assign) else ""
    return name if name.startswith("$phi") else None


class _Reader:
    """Reads variables of a function; ``truths`` are the comparisons that it met, by the ids of their expressions."""

    def __init__(self, func_ir: Any, args: tuple, context: Any):
        self.func_ir, self.args, self.context = func_ir, args, context
        self.truths: dict[int, bool] = {}

    def value(self, variable: Any) -> Any:
        """The value of a variable; raises Unknown where it has none yet."""
        found = self.read(variable)
        if isinstance(found, Of):
            raise Unknown
        return found

    def read(self, variable: Any) -> Any:
        """The value of a variable, or `Of` its type."""
        try:
            definition = self.func_ir.get_definition(variable)  # refuses a variable that is assigned more than once
        except KeyError:
            raise Unknown from None
        if isinstance(definition, (ir.Const, ir.Global, ir.FreeVar)):
            return definition.value
        if isinstance(definition, ir.Arg) and definition.index < len(self.args):
            return of_type(self.args[definition.index])
        if not isinstance(definition, ir.Expr):
            raise Unknown
        if definition.op == "getattr":
            return _attribute(self.read(definition.value), definition.attr)
        if definition.op == "getitem":
            return _item(self.read(definition.value), self.value(definition.index))
        found = self._evaluated(definition)
        if isinstance(found, bool):
            self.truths[id(definition)] = found
        return found

    def _evaluated(self, expression: Any) -> Any:
        if expression.op == "unary" and expression.fn in ("not", operator.not_):
            return not _truth(self.value(expression.value))
        if expression.op == "binop":
            return _combined(expression.fn, self.value(expression.lhs), self.value(expression.rhs))
        if expression.op != "call" or expression.kws or expression.vararg is not None:
            raise Unknown
        function = self.value(expression.func)
        decided = getattr(function, "decided", None)       # an atom whose result follows from its arguments' types
        if decided is not None:
            return decided(self.context, *map(self.read, expression.args))
        if len(expression.args) != 1:
            raise Unknown
        argument = expression.args[0]
        if function is bool:
            return _truth(self.value(argument))
        if function is len:
            return _length(self.read(argument))
        raise Unknown


def of_type(ty: Any) -> Any:
    if isinstance(ty, types.Literal):
        return ty.literal_value
    return None if isinstance(ty, types.NoneType) else Of(ty)


def _attribute(base: Any, name: str) -> Any:
    """An attribute of a component, a named tuple or a tile, or of the value of a static field."""
    if not isinstance(base, Of):
        if isinstance(base, (type, ModuleType)):           # a class's or module's: the pass for these has made constants
            raise Unknown
        return asked(base, name)
    ty = base.ty
    if isinstance(ty, types.BaseNamedTuple) and name in ty.fields:
        return of_type(ty.types[ty.fields.index(name)])
    known = getattr(ty, "known_attribute", None)           # of a component, a tile, a tile's size
    if known is None:
        raise Unknown
    return known(name)


def _item(base: Any, n: Any) -> Any:
    """An element of a tuple, or of a tile's size."""
    try:
        if not isinstance(base, Of):
            return base[n]
        if hasattr(base.ty, "known_item"):
            return base.ty.known_item(n)
        if isinstance(base.ty, types.BaseTuple):
            return of_type(base.ty.types[n])
    except Exception:
        raise Unknown from None
    raise Unknown


def asked(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except Exception:                                          # a property's: type inference meets it again, and reports it
        raise Unknown from None


def _combined(function: Any, left: Any, right: Any) -> Any:
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in (left, right))
    if function not in _COMPARISONS and not (function in _ARITHMETIC and whole):
        raise Unknown
    try:
        found = function(left, right)
    except Exception:
        raise Unknown from None
    if function in _ARITHMETIC and abs(found) >= LARGEST:
        raise Unknown
    return bool(found) if isinstance(found, np.bool_) else found


def _length(value: Any) -> int:
    if isinstance(value, Of) and isinstance(value.ty, types.BaseTuple):
        return len(value.ty)
    if isinstance(value, tuple):
        return len(value)
    raise Unknown


def _truth(value: Any) -> bool:
    """Whether a number or None is true; other values are left to type inference."""
    if value is None or isinstance(value, (bool, int, float, np.bool_)):
        return bool(value)
    raise Unknown
