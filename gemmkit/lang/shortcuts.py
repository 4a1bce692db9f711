"""Questions that Numba asks thousands of times a kernel, answered faster. The answers are Numba's.

* Whether an object is a type of some class: Numba's types are abstract base classes, whose ``isinstance`` asks a registry of
  virtual subclasses (there are none) of 50,000 objects a kernel.
* Which variables a statement names: asked of all that a statement holds, its line included, a dozen times for each.
* Whether a lowering takes a ``loc``: by a signature for every operation that is lowered.
* The type of a name in a function: an atom knows its own, and a built-in of Python's is looked up without asking first
  whether it is a buffer, an array of another library or an object of cffi.
* Which templates of an operator are for this target, and in which order: once for a list of templates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import BuiltinFunctionType, NoneType
from typing import Any

import numba.core.utils
from numba.core.types import Type
from numba.cuda.core import base, ir

from gemmkit.lang.atoms import Atom

_NOTHING = {str, int, float, bool, NoneType, ir.Loc, ir.Scope}             # what names no variable


def _variables(self: Any, value: Any) -> list:
    """``ir.Inst._rec_list_vars``: the variables in a value of a statement, in order."""
    found: list = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list) -> None:
    cls = type(value)
    if cls in _NOTHING:
        return
    if isinstance(value, ir.var_types):
        found.append(value)
    elif isinstance(value, ir.inst_types):
        found += value.list_vars()
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)


_by_signature = base._has_loc


def _has_loc(function: Any) -> bool:
    """Whether a lowering has a parameter ``loc``."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or hasattr(function, "__signature__"):
        return bool(_by_signature(function))
    return "loc" in code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]


_in_order = numba.core.utils.order_by_target_specificity


@lru_cache(maxsize=1024)
def _ordered(target: Any, templates: tuple, fnkey: Any) -> tuple:
    return tuple(_in_order(target, list(templates), fnkey))


def _order(target: Any, templates: Any, fnkey: Any = "") -> list:
    """``order_by_target_specificity``, which looks at every template of an operator at every call of it."""
    return list(_ordered(target, tuple(templates), fnkey))


def value_types(context: Any) -> Callable[[Any], Any]:
    """``resolve_value_type`` of a typing context."""
    ask = context.resolve_value_type

    def resolve(value: Any) -> Any:
        if isinstance(value, Atom):
            return value.device_type
        if type(value) is BuiltinFunctionType:                # of no type by itself, as `typeof` says in the end
            found = context._get_global_type(value)
            if found is not None:
                return found
        return ask(value)

    return resolve


def install() -> None:
    """Put the shortcuts in the places of what they answer for."""
    metaclass: Any = type(Type)
    metaclass.__instancecheck__, metaclass.__subclasscheck__ = type.__instancecheck__, type.__subclasscheck__
    ir.Inst._rec_list_vars = _variables
    base._has_loc = _has_loc
    numba.core.utils.order_by_target_specificity = _order
