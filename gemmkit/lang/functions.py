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
import threading
import weakref
from collections.abc import Collection
from functools import cached_property
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba.cuda import compiler as numba_compiler
from numba.cuda import lowering
from numba.cuda.core import ir
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.core.compiler_machinery import FunctionPass, register_pass
from numba.cuda.core.untyped_passes import IRProcessing

from gemmkit.lang import dialect
from gemmkit.lang.assertions import Assertions
from gemmkit.lang.compact import compacted
from gemmkit.lang.errors import ComponentError, changeable, explain, line_of, refused
from gemmkit.lang.fingerprint import read_closure, read_value, when_forgetting
from gemmkit.lang.numba_hooks import (
    NumbaError,
    OpaqueModel,
    TypingError,
    fold_arguments,
    lowering_registry,
    register_model,
    rules_hold_in,
    signature,
    target_context,
    typeof_impl,
    types,
)
from gemmkit.lang.pipeline import Passes, analysed_once, contexts
from gemmkit.lang.references import Owner, globals_of, is_fixed, owner_of
from gemmkit.lang.static_branches import StaticBranches

_target = threading.local()


def target_arch() -> tuple[int, int, str] | tuple[int, int]:
    """The compute capability that is compiled for, as Numba writes it: ``(9, 0, "a")``."""
    return getattr(_target, "cc", (9, 0, "a"))


def set_target_arch(cc: tuple) -> None:
    _target.cc = cc


def _answer_for_the_device() -> None:
    """Numba's own library functions ask which device is current while they compile; without one, ours is the answer."""
    from types import SimpleNamespace

    from numba.cuda import dispatcher

    asked = dispatcher.get_current_device

    def get_current_device() -> Any:
        if getattr(_target, "compiling", 0):
            return SimpleNamespace(compute_capability=target_arch())
        return asked()

    dispatcher.get_current_device = get_current_device


_answer_for_the_device()


class WeakInt(int):
    """An integer constant that takes the type of what it meets."""


class WeakFloat(float):
    """A float constant that takes the type of what it meets."""


def weaken(value: Any) -> Any:
    """A constant as the code of a device function should hold it."""
    if type(value) is int:
        return WeakInt(value)
    if type(value) is float:
        return WeakFloat(value)
    if type(value) is tuple:
        return tuple(weaken(v) for v in value)
    return value


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
        self._look()
        key = (self, target_arch(), args, captures)
        result = self._compiled.get(key)
        if result is None:
            from gemmkit.lang.registers import refuse_returned

            with global_compiler_lock:
                if key in _open or sum(other[0] is self for other in _open) > _NESTED:
                    raise TypingError(f"{self.function.__qualname__} calls itself, which device code cannot; write a loop")
                _open.append(key)
                try:
                    result = compile_function(self.weakened, args, captures)
                    refuse_returned(result)
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


_open: list[tuple] = []                                       # what is being compiled; under Numba's compiler lock
_NESTED = 16                                                  # components in components of one class, each another type


def _default_type(_number: int, parameter: inspect.Parameter, default: Any) -> Any:
    from gemmkit.lang.values import static_type

    try:
        return static_type(default)
    except TypeError as error:
        raise TypingError(f"the default of {parameter.name}: {error}") from None


class _ModuleAttributes(FunctionPass):
    """What a function reads from a module or class becomes what its own globals would be: ``math.pi`` is a weak constant,
    ``np.float32`` a conversion, ``helpers.f`` and ``Base.method`` are device functions."""

    _name = "gemmkit_module_attributes"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        changed = False
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                if isinstance(statement, ir.Assign) and _is_getattr(statement.value):
                    holder = _module(state.func_ir, statement.value.value)
                    value = getattr(holder, statement.value.attr, None)
                    if holder is not None and not is_fixed(holder):
                        _refuse_mutable(state.func_id.func, statement.value.attr, value)
                    prepared = _prepare(value)
                    if prepared is not value:
                        statement.value = (ir.Const(prepared, statement.loc) if isinstance(prepared, (int, float))
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


def _module(func_ir: Any, variable: Any) -> ModuleType | type | None:
    """The module or class that a variable of the code is, if it is one."""
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
    return value if isinstance(value, (ModuleType, type)) else None


register_pass(mutates_CFG=False, analysis_only=False)(_ModuleAttributes)


class _Captures(FunctionPass):
    """Reads captured names from an extra argument instead of the closure."""

    _name = "gemmkit_captures"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        from gemmkit.lang.closures import CapturesType, bind_captures

        first = state.args[0] if state.args else None
        if not isinstance(first, CapturesType):
            return False
        bind_captures(state.func_ir, tuple(first.members))
        return True


register_pass(mutates_CFG=False, analysis_only=False)(_Captures)


class _Pipeline(numba_compiler.CUDACompiler):
    """numba-cuda's pipeline with four passes more, right after the bytecode is read."""

    _passes: Passes | None = None                             # the same for all functions

    def define_pipelines(self) -> Any:
        if _Pipeline._passes is None:
            (pipeline,) = super().define_pipelines()
            passes = Passes(pipeline.passes)
            passes.add_pass_after(_ModuleAttributes, numba_compiler.CUDATranslateBytecode)
            passes.add_pass_after(_Captures, numba_compiler.CUDATranslateBytecode)
            passes.add_pass_after(Assertions, numba_compiler.CUDATranslateBytecode)
            passes.add_pass_after(StaticBranches, IRProcessing)
            passes.finalize()
            _Pipeline._passes = passes
        return [_Pipeline._passes]


rules_hold_in(_Pipeline)


def compile_function(function: FunctionType, args: tuple, captures: Any = None, inline: bool = True) -> Any:
    """What numba-cuda's ``compile_cuda`` does, with our pipeline; ``inline``: a device function, not a kernel."""
    dialect.check_compiled(function, args)
    typing_context, context = contexts()
    flags = numba_compiler.CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.debuginfo = flags.dbg_directives_only = True
    flags.inline, flags.error_model = "never", "numpy"
    flags.forceinline = inline
    flags.nvvm_options = {"opt": 3, "fastmath": False}
    flags.compute_capability = target_arch()
    if captures is not None:
        args = (captures, *args)
    _target.compiling = getattr(_target, "compiling", 0) + 1
    try:
        with numba_compiler.utils.numba_target_override(), analysed_once():
            result = _run_pipeline(function, args, flags, typing_context, context)
    finally:
        _target.compiling -= 1
    dialect.check_result(function, result.signature.return_type)
    result.library.finalize()
    return result


def _run_pipeline(function: FunctionType, args: tuple, flags: Any, typing_context: Any, context: Any) -> Any:
    # Numba parses a function's source for the line of its ``def``, which fails for a lambda inside a longer expression
    # (its lines alone are no syntax); the code object knows the line. The caller holds the compiler lock.
    parse, lowering.get_func_def_lineno = lowering.get_func_def_lineno, _first_line
    try:
        return numba_compiler.compile_extra(
            typingctx=typing_context, targetctx=context, func=function, args=args, return_type=None, flags=flags,
            locals={}, pipeline_class=_Pipeline, call_conv=numba_compiler.CUDACallConv(context), abi_info={})
    finally:
        lowering.get_func_def_lineno = parse


def _first_line(function: FunctionType) -> int:
    return function.__code__.co_firstlineno


_functions: dict[FunctionType, DeviceFunction] = {}


def device(function: Any) -> DeviceFunction:
    """``function`` as a device function; the same object for the same function."""
    if isinstance(function, DeviceFunction):
        return function
    found = _functions.get(function)
    if found is None:
        found = _functions.setdefault(function, DeviceFunction(function))
    return found


def _weaken_code(code: CodeType) -> CodeType:
    return code.replace(co_consts=tuple(
        _weaken_code(c) if isinstance(c, CodeType) else weaken(c) for c in code.co_consts))


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
    from gemmkit.lang.scalars import numba_type

    try:
        numba_type(scalar)
    except TypeError:
        return scalar
    return np.dtype(scalar)


def _weaken_function(function: FunctionType, runtime: Collection[str] = ()) -> FunctionType:
    """A copy with weak constants, which refers to device functions. Raises ComponentError where a name other than those in
    ``runtime`` (they are arguments) stands for what can change in place."""
    names = globals_of(function.__code__) - set(runtime)
    scope = dict(function.__globals__)
    closure = function.__closure__
    of_user = not is_fixed(function)

    def prepared(name: str, value: Any) -> Any:
        if of_user:
            _refuse_mutable(function, name, value)
        return _prepare(value)

    scope.update((name, prepared(name, scope[name])) for name in names if name in scope)
    scope.setdefault("__builtins__", __builtins__)
    if closure is not None:
        closure = tuple(cell if name in runtime else CellType(prepared(name, cell.cell_contents))
                        for name, cell in zip(function.__code__.co_freevars, closure))
    weak = FunctionType(_weaken_code(function.__code__), scope, function.__name__,
                        weaken(function.__defaults__), closure)
    weak.__qualname__ = function.__qualname__
    weak.__module__ = function.__module__
    weak.__kwdefaults__ = function.__kwdefaults__
    return weak


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
