"""Functions that captured arrays or NumPy scalars: those become kernel arguments.

``Elementwise(lambda x, m, n: x + bias[n])`` refers to ``bias``. In Numba a captured array would be frozen into the
kernel; here the function gets one more argument, a struct of what it captured, and a compiler pass reads the captured
names from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np

from gemmkit.lang.atoms import Atom
from gemmkit.lang.captures import CapturesType
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.guards import Fact, cell, contents, item
from gemmkit.lang.inner_functions import InnerFunctions
from gemmkit.lang.kinds import Kind, kind
from gemmkit.lang.later import at_load
from gemmkit.lang.numba_hooks import (
    cgutils,
    models,
    register_model,
    signature,
    types,
)
from gemmkit.lang.references import globals_of
from gemmkit.runtime.arrays import ArrayInfo, is_array


def captured(function: Any) -> dict[str, Any]:
    """The runtime values (arrays, NumPy scalars) that a function refers to, by name; closure first, then globals."""
    function = function.function if isinstance(function, DeviceFunction) else function
    found: dict[str, Any] = {}
    for name, of in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if is_runtime(contents(of)):
            found[name] = of.cell_contents
    for name in sorted(globals_of(function.__code__)):
        value = function.__globals__.get(name)
        if name not in found and is_runtime(value):
            found[name] = value
    return found


def captured_at(function: FunctionType, name: str) -> Fact:
    """Where a function refers to the runtime value ``name``, as a fact to be looked at again."""
    if name in function.__code__.co_freevars:
        return cell((function.__closure__ or ())[function.__code__.co_freevars.index(name)])
    return item(function.__globals__, name)


def is_runtime(value: Any) -> bool:
    """Whether a value is an argument of kernels by itself."""
    return isinstance(value, (np.generic, ArrayInfo)) or is_array(value)


class ClosureType(types.Callable):
    """A function with the struct of its captures as value."""

    def __init__(self, function: DeviceFunction, text: str, place: Any, captures: CapturesType):
        self.function, self.captures = function, captures
        self._key = (text, place, captures)
        super().__init__(f"closure {function.__name__}<{text[-12:]}>")

    @property
    def key(self) -> Any:
        return self._key

    def get_call_type(self, context: Any, args: tuple, kws: dict) -> Any:
        args, declared = self.function.bind(args, kws)
        result = self.function.compile(args, self.captures)
        return signature(result.signature.return_type, *args, recvr=self.captures).replace(pysig=declared)

    def get_call_signatures(self) -> Any:
        return [], True

    def get_impl_key(self, sig: Any) -> Any:
        captures, *args = sig.args
        return self.function.compile(tuple(args), captures).entry_point


class ClosureKind(Kind):
    """A function's: ``members`` are the kinds of what it captured."""

    def __init__(self, text: str, make: Callable[[], Any], members: dict[str, Kind]):
        super().__init__(text, make)
        self.members = members


def closure_kind(function: Any, text: str, place: Any, members: dict[str, Kind]) -> Any:
    """The kind of a function; functions of one text, written at one place, are of one, whichever object came first.

    What is kept is a copy: with the code that the text was made of, should the function's own be replaced, and without its
    captured values, since an array that a lambda captured dies with the lambda.
    """
    def make() -> ClosureKind:
        kept = DeviceFunction(without_captures(function, members, lambda name: None), members)
        return ClosureKind(f"closure {kept.__name__}<{text[-12:]}>", lambda: ClosureType(
            kept, text, place, CapturesType({name: member.type for name, member in members.items()})), members)

    return kind(("function", text, place, tuple(members.items())), make)


def without_captures(function: Any, names: Collection[str], instead: Callable[[str], Any]) -> FunctionType:
    """The function with other values in the cells of the captured ``names``."""
    function = function.function if isinstance(function, DeviceFunction) else function
    cells = tuple(CellType(instead(name)) if name in names else of
                  for name, of in zip(function.__code__.co_freevars, function.__closure__ or ()))
    out = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    out.__qualname__, out.__module__ = function.__qualname__, function.__module__
    out.__kwdefaults__ = function.__kwdefaults__
    return out


@register_model(ClosureType)
class _ClosureModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: ClosureType):
        super().__init__(dmm, fe_type, dmm.lookup(fe_type.captures).get_value_type())

    def get_argument_type(self) -> Any:
        return self._dmm.lookup(self._fe_type.captures).get_argument_type()

    def as_argument(self, builder: Any, value: Any) -> Any:
        return self._dmm.lookup(self._fe_type.captures).as_argument(builder, value)

    def from_argument(self, builder: Any, value: Any) -> Any:
        return self._dmm.lookup(self._fe_type.captures).from_argument(builder, value)


# -- inner functions, which captured run-time values (:mod:`gemmkit.lang.inner_functions`) ----------------------------

_numbers = count(1)


def inner_function(function: FunctionType, code: CodeType) -> Atom:
    """Of a function's inner one, the same each time that the function is compiled: its captured values to the function."""
    known = vars(function).setdefault("gemmkit_inner", {})
    if code not in known:
        inner = _InnerFunction(function, code)

        def typer(context: Any, *values: Any) -> Any:
            captures = CapturesType(dict(zip(code.co_freevars, values)))
            made = ClosureType(inner, f"{function.__qualname__}.{code.co_name}", inner, captures)
            return signature(made, *values), lambda c, b, s, v: _struct(c, b, captures, v)

        known[code] = Atom(f"capture {next(_numbers)}", typer, lambda *values: None)
    return known[code]


def _struct(context: Any, builder: Any, ty: CapturesType, values: Any) -> Any:
    out = cgutils.create_struct_proxy(ty)(context, builder)
    for name, value in zip(ty.members, values):
        setattr(out, name, value)
    return out._getvalue()


class _InnerFunction(DeviceFunction):
    """An inner function of one that is being compiled: its constants are weak already, and its globals looked at."""

    def __init__(self, outer: FunctionType, code: CodeType):
        cells = tuple(CellType(None) for _ in code.co_freevars)
        function = FunctionType(code, outer.__globals__, code.co_name, None, cells)
        function.__module__ = outer.__module__
        super().__init__(function, code.co_freevars)

    @property
    def weakened(self) -> Any:
        return self.function

    def _look(self) -> None:
        """Its outer function has been looked at."""


at_load(setattr, InnerFunctions, "atom", staticmethod(inner_function))
