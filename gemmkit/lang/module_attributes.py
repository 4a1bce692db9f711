"""The compiler pass for what a function reads from modules and classes."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any, ClassVar

from gemmkit.lang.numba_hooks import FunctionPass, register_pass
from gemmkit.lang.numba_hooks import numba_ir as ir
from gemmkit.lang.references import is_fixed


class ModuleAttributes(FunctionPass):
    """What a function reads from a module or class becomes what its own globals would be: ``math.pi`` is a weak constant,
    ``np.float32`` a conversion, ``helpers.f`` and ``Base.method`` are device functions."""

    _name = "gemmkit_module_attributes"
    #: What a value that a function's code names becomes, by function, name and value; whether it may be one that changes in
    #: place. Set by `gemmkit.lang.functions`, which makes device functions.
    prepared: ClassVar[Any]

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        changed = False
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                if isinstance(statement, ir.Assign) and _is_getattr(statement.value):
                    holder = _module(state.func_ir, statement.value.value)
                    value = getattr(holder, statement.value.attr, None)
                    of_user = holder is not None and not is_fixed(type(holder) if isinstance(holder, enum.Enum) else holder)
                    prepared = self.prepared(state.func_id.func, statement.value.attr, value, of_user)
                    if prepared is not value:
                        statement.value = (ir.Const(prepared, statement.loc) if isinstance(prepared, (int, float, complex))
                                           else ir.Global(statement.value.attr, prepared, statement.loc))
                        changed = True
        if changed:
            _forget_classes(state.func_ir)
        return changed


def _forget_classes(func_ir: Any) -> None:
    """Blank out the classes that nothing but a replaced attribute was read from: Numba knows no type of them, and none of
    those that are read from a module."""
    statements = [s for block in func_ir.blocks.values() for s in block.body]
    for statement in statements:
        if isinstance(statement, ir.Assign) and isinstance(_class_read(func_ir, statement.value), type):
            name = statement.target.name
            if not any(v.name == name for s in statements if s is not statement for v in s.list_vars()):
                statement.value = ir.Const(None, statement.loc)


def _class_read(func_ir: Any, value: Any) -> Any:
    """What an expression reads, if it is a global or an attribute of a module or class; else None."""
    if isinstance(value, (ir.Global, ir.FreeVar)):
        return value.value
    return getattr(_module(func_ir, value.value), value.attr, None) if _is_getattr(value) else None


def _is_getattr(value: Any) -> bool:
    return isinstance(value, ir.Expr) and value.op == "getattr"


def _module(func_ir: Any, variable: Any) -> ModuleType | type | enum.Enum | None:
    """The module or class that a variable of the code is, or the member of an enumeration, if it is one."""
    try:
        definition = func_ir.get_definition(variable)
    except KeyError:
        return None
    if isinstance(definition, (ir.Global, ir.FreeVar)):
        value = definition.value
    elif _is_getattr(definition):
        value = getattr(_module(func_ir, definition.value), definition.attr, None)
    else:
        return None
    return value if isinstance(value, (ModuleType, type, enum.Enum)) else None


register_pass(mutates_CFG=False, analysis_only=False)(ModuleAttributes)
