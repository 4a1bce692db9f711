"""Plain Python functions as device code.

``device(f)`` keeps ``f`` callable in Python (the emulator does just that) and teaches Numba to compile it when another
device function calls it. Three things make plain Python enough:

* **Weak constants.** In NumPy (NEP 50) ``x + 1.0`` has the type of ``x``; Numba would widen a float32 to float64 and an
  int32 to int64. The constants of a function's code object are therefore replaced by *weak* ones, whose Numba types
  adopt the type of the other operand.
* **Functions that call functions.** Plain Python functions that the code refers to (globals, closures) become device
  functions themselves, so a user's helper needs no decorator.
* **Everything is inlined**, with line information for profilers.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection
from functools import cached_property
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import numpy as np

from gemmkit.lang.compact import compacted
from gemmkit.lang.errors import ComponentError, changeable, explain, line_of, refused
from gemmkit.lang.fingerprint import read_closure, read_value, when_forgetting
from gemmkit.lang.later import at_load
from gemmkit.lang.module_attributes import ModuleAttributes
from gemmkit.lang.numba_hooks import (
    NumbaError,
    OpaqueModel,
    TypingError,
    fold_arguments,
    global_compiler_lock,
    lowering_registry,
    register_model,
    signature,
    target_context,
    typeof_impl,
    types,
)
from gemmkit.lang.records import device_dtype
from gemmkit.lang.references import Owner, globals_of, is_fixed, owner_of
from gemmkit.lang.target import target_arch
from gemmkit.lang.values import static_type
from gemmkit.lang.weak import weaken, weaken_code

_all: weakref.WeakSet[DeviceFunction] = weakref.WeakSet()


@when_forgetting
def _forget_all() -> None:
    for function in list(_all):
        function.forget()


class DeviceFunction:
    """A Python function that device code can call; in Python it is the function itself."""

    def __init__(self, function: FunctionType, runtime: Collection[str] = ()):
        self.function: Any = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._compiled: dict[tuple, Any] = {}
        self._weakened: FunctionType | None = None
        self._runtime = frozenset(runtime)                    # the names of captured values that are arguments
        self._reading: Any = None
        _all.add(self)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __repr__(self) -> str:
        return f"<device function {self.function.__qualname__}>"

    def __device_type__(self) -> types.Type:
        return DeviceFunctionType(self)

    @property
    def weakened(self) -> Any:
        """The function that Numba compiles: weak constants, and helpers turned into device functions."""
        self._look()
        if self._weakened is None:
            self._weakened = _weaken_function(self.function, self._runtime)
        return self._weakened

    def _look(self) -> None:
        """Start anew when the function, or what it refers to, is not what was compiled."""
        if self._reading is None or not self._reading.guards.stand():
            self.forget()
            self._reading = read_closure(self.function, self._runtime)

    def forget(self) -> None:
        """Drop all that was compiled."""
        self._weakened = self._reading = None
        self._compiled.clear()
        for known in ("_parameters", "_is_plain"):
            vars(self).pop(known, None)

    def bind(self, args: tuple, kws: dict, bound: int = 0) -> tuple[tuple, inspect.Signature | None]:
        """A call's argument types with keywords in their places and defaults as constants, and the signature by which Numba
        does the same with the values; the first ``bound`` parameters (``self``) are not among them."""
        declared = self._parameters[bound:]
        if not kws and len(args) == len(declared) and self._is_plain:
            return tuple(args), None
        for p in declared:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise TypingError(f"{self.function.__qualname__} takes {str(p).partition(':')[0]}; device code needs a "
                                  "fixed number of arguments")
        plain = inspect.Signature([p.replace(kind=p.POSITIONAL_OR_KEYWORD, default=weaken(p.default), annotation=p.empty)
                                   for p in declared], __validate_parameters__=False)
        return fold_arguments(plain, args, kws, lambda _n, _p, given: given, _default_type, None), plain

    @cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())

    @cached_property
    def _is_plain(self) -> bool:
        return all(p.kind is p.POSITIONAL_OR_KEYWORD for p in self._parameters)

    def compile(self, args: tuple, captures: Any = None) -> Any:
        """Numba's compile result for the argument types; raises ComponentError with the user's file and line.

        ``captures`` is the struct type of the runtime values that the function captured (:mod:`gemmkit.lang.closures`).
        """
        from gemmkit.lang.compiling import compile_function

        self._look()
        key = (self, target_arch(), args, captures)
        result = self._compiled.get(key)
        if result is None:
            with global_compiler_lock:
                if key in _open or sum(other[0] is self for other in _open) > _NESTED:
                    raise TypingError(f"{self.function.__qualname__} calls itself, which device code cannot; write a loop")
                _open.append(key)
                try:
                    result = compile_function(self.weakened, args, captures)
                    for look in _looks:
                        look(result)
                    result = compacted(result)
                except ComponentError:
                    raise
                except (NumbaError, NotImplementedError, TypeError) as error:
                    raise explain(self.function, args, error) from error
                finally:
                    _open.remove(key)
                result.target_context.insert_user_function(result.entry_point, result.fndesc, [result.library])
            self._compiled[key] = result
        return result


_looks: list[Callable[[Any], None]] = []


def when_compiled(look: Callable[[Any], None]) -> Callable[[Any], None]:
    """Have ``look(result)`` called for every device function that was compiled (Numba's result); it raises TypingError for
    what a function may not be."""
    _looks.append(look)
    return look


_open: list[tuple] = []                                       # what is being compiled; under Numba's compiler lock
_NESTED = 16                                                  # components in components of one class, each another type


def _default_type(_number: int, parameter: inspect.Parameter, default: Any) -> Any:
    try:
        return static_type(default)
    except TypeError as error:
        raise TypingError(f"the default of {parameter.name}: {error}") from None


_functions: dict[FunctionType, DeviceFunction] = {}


def device(function: Any) -> DeviceFunction:
    """``function`` as a device function; the same object for the same function."""
    if isinstance(function, DeviceFunction):
        return function
    found = _functions.get(function)
    if found is None:
        found = _functions.setdefault(function, DeviceFunction(function))
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, FunctionType) and owner_of(value) is not Owner.PACKAGE


def _prepare(value: Any) -> Any:
    if _is_plain(value):
        return device(value)
    if _is_plain(getattr(value, "py_func", None)):            # of cuda.jit, which would keep the globals that it saw
        return device(value.py_func)
    if isinstance(value, type) and issubclass(value, np.generic):
        return _conversion(value)
    if isinstance(value, (ModuleType, type, BuiltinFunctionType)):
        return value
    return weaken(value)


def _conversion(scalar: type) -> Any:
    """``np.float32`` as the dtype that converts in device code; a class of which there is none stays."""
    try:
        return device_dtype(scalar)
    except TypeError:
        return scalar


def _weaken_function(function: FunctionType, runtime: Collection[str] = ()) -> FunctionType:
    """A copy with weak constants, which refers to device functions. Raises ComponentError where a name other than those in
    ``runtime`` (they are arguments) stands for what can change in place."""
    names = globals_of(function.__code__) - set(runtime)
    scope = dict(function.__globals__)
    closure = function.__closure__
    of_user = not is_fixed(function)

    scope.update((name, _prepared(function, name, scope[name], of_user)) for name in names if name in scope)
    scope.setdefault("__builtins__", __builtins__)
    if closure is not None:
        closure = tuple(cell if name in runtime else CellType(_prepared(function, name, cell.cell_contents, of_user))
                        for name, cell in zip(function.__code__.co_freevars, closure))
    weak = FunctionType(weaken_code(function.__code__), scope, function.__name__,
                        weaken(function.__defaults__), closure)
    weak.__qualname__ = function.__qualname__
    weak.__module__ = function.__module__
    weak.__kwdefaults__ = function.__kwdefaults__
    return weak


def _prepared(function: FunctionType, name: str, value: Any, of_user: bool) -> Any:
    """What a value that a function's code names becomes; a user's may not be one that can change in place."""
    if of_user:
        _refuse_mutable(function, name, value)
    return _prepare(value)


at_load(setattr, ModuleAttributes, "prepared", staticmethod(_prepared))


def _refuse_mutable(function: FunctionType, name: str, value: Any) -> None:
    """Raise ComponentError when a name of device code stands for a value that can change in place."""
    if isinstance(value, (FunctionType, DeviceFunction, ModuleType, type)):
        return                                                # read, and looked at, by themselves
    mutable = read_value(value, name).mutable
    if mutable:
        raise refused(function, line_of(function, name), changeable(*mutable[0]))


class DeviceFunctionType(types.Callable, types.Opaque):
    """Numba's view of a DeviceFunction."""

    def __init__(self, function: DeviceFunction):
        self.function = function
        super().__init__(f"device({function.function.__qualname__} at {id(function):#x})")

    @property
    def key(self) -> Any:
        return self.function

    def get_call_type(self, context: Any, args: tuple, kws: dict) -> Any:
        args, declared = self.function.bind(args, kws)
        result = self.function.compile(args)
        return signature(result.signature.return_type, *args).replace(pysig=declared)

    def get_call_signatures(self) -> Any:
        return [], True

    def get_impl_key(self, sig: Any) -> Any:
        return self.function.compile(tuple(sig.args)).entry_point


register_model(DeviceFunctionType)(OpaqueModel)


@typeof_impl.register(DeviceFunction)
def _typeof_device_function(value: DeviceFunction, _c: Any) -> types.Type:
    return DeviceFunctionType(value)


@lowering_registry.lower_constant(DeviceFunctionType)
def _constant(context: Any, builder: Any, ty: types.Type, value: Any) -> Any:
    return context.get_dummy_value()


@lowering_registry.lower_cast(DeviceFunctionType, DeviceFunctionType)
def _cast(context: Any, builder: Any, fromty: types.Type, toty: types.Type, value: Any) -> Any:
    return value


def call(context: Any, builder: Any, function: DeviceFunction, argument_types: tuple, values: Any) -> Any:
    """From inside a lowering: call a device function."""
    result = function.compile(tuple(argument_types))
    sig = signature(result.signature.return_type, *argument_types)
    return target_context().get_function(DeviceFunctionType(function), sig)(builder, values)
