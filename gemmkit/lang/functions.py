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

import dataclasses
import inspect
import weakref
import zlib
from collections.abc import Callable, Collection, Hashable
from functools import cached_property
from itertools import count
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.aggregates import static_type
from gemmkit.lang.deferred import at_load, load
from gemmkit.lang.errors import ComponentError, changeable, explain, line_of, refused
from gemmkit.lang.fingerprint import read_closure, read_value, when_forgetting
from gemmkit.lang.memory import ViewType
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, ir, signature, types
from gemmkit.lang.number_rules import Record, device_dtype, record_text
from gemmkit.lang.passes import CapturesType, InnerFunctions, ModuleAttributes
from gemmkit.lang.references import Fact, Guards, Owner, cell, contents, globals_of, is_fixed, item, owner_of
from gemmkit.lang.scalars import index, numba_type, weak_float64, weaken, weaken_code
from gemmkit.runtime.arrays import ArrayInfo, alignment, check_aligned, describe, is_array, part_bytes, unit_axis

# --------------------------------------------------------------------------------------------------
# What a kernel's arguments are, told without Numba: a `Kind` stands for a type that is made when it is compiled.
#
# Plans and the emulator ask for kinds: whether two arguments are of one type, how an array is accessed. Equal kinds are
# one object.

class Kind:
    """A type of device code that may not be made yet: `type` makes it; ``text`` tells it from others of its sort."""

    def __init__(self, text: str, make: Callable[[], Any]):
        self.text, self._make = text, make

    @cached_property
    def type(self) -> Any:
        load()                                         # a name of a type alone would be kept as its stand-in
        return self._make()

    def __str__(self) -> str:
        return self.text


class ViewKind(Kind):
    """An array's: ``unit`` is the axis of stride 1 (or None), ``alignment`` in bytes holds for every row."""

    def __init__(self, text: str, make: Callable[[], Any], ndim: int, unit: int | None, alignment: int):
        super().__init__(text, make)
        self.unit, self.alignment = unit, alignment
        self.strided_axes = [axis for axis in range(ndim) if axis != unit]


_known: dict[Hashable, Any] = {}


def kind(key: Hashable, make: Callable[[], Kind]) -> Any:
    """The kind of this key; ``make`` makes the first one."""
    found = _known.get(key)
    return found if found is not None else _known.setdefault(key, make())


def view_kind(dtype: np.dtype, ndim: int, unit: int | None, alignment: int, wide: bool, readonly: bool) -> Any:
    """An array's kind (`gemmkit.lang.memory.ViewType`); raises TypeError for a dtype that device code does not have."""
    how = ndim, unit, alignment, wide, readonly
    return kind(("view", _key(dtype), *how), lambda: ViewKind(
        f"view of {_text(dtype)} {how}", lambda: ViewType(dtype, *how), ndim, unit, alignment))


def scalar_kind(dtype: np.dtype) -> Any:
    """A NumPy scalar's kind; raises TypeError for a dtype that device code does not have."""
    return kind(("scalar", _key(dtype)), lambda: Kind(_text(dtype), lambda: numba_type(dtype)))


def _key(dtype: np.dtype) -> Any:
    return dtype if dtype.names is None else record_text(dtype)      # NumPy's equality leaves out an algebra's table


def _text(dtype: np.dtype) -> str:
    return device_dtype(dtype).name if dtype.names is None else record_text(device_dtype(dtype))


#: The kinds of Python's numbers: a truth, an integer of 32 bits or of 64, a float.
_NUMBERS = {"bool": Kind("bool", lambda: types.boolean), "i32": Kind("index", lambda: index),
            "i64": Kind("int64", lambda: types.int64), "f64": Kind("weak float64", lambda: weak_float64)}


def number_kind(name: str) -> Kind:
    """The kind of a Python number: ``bool``, ``i32``, ``i64`` or ``f64``."""
    return _NUMBERS[name]


# --------------------------------------------------------------------------------------------------
# What is kept of a compiled device function: its signature, and its LLVM IR as text, compressed.
#
# Another kernel may call it, so it is kept; but Numba keeps with it the types of all its variables, its intermediate code
# and a tree of Python objects for every LLVM instruction: 6 MB a kernel, which the garbage collector walked through again
# and again while the next one was compiled. A caller needs the signature, and NVVM the text.

class CompactModule:
    """Stands for an llvmlite module whose text is final."""

    functions = ()                                            # those whose linkage a caller's library would still set

    def __init__(self, module: Any):
        for function in module.functions:
            if not function.is_declaration:
                function.linkage = "linkonce_odr"             # as every library that calls it would set it
        self._text = zlib.compress(str(module).encode(), 1)

    def __str__(self) -> str:
        return zlib.decompress(self._text).decode()


def compacted(result: Any) -> Any:
    """Numba's compile result of a device function, without what no caller needs."""
    result.library._module = CompactModule(result.library._module)
    result.fndesc.typemap = result.fndesc.calltypes = None
    return result._replace(type_annotation=None, metadata=None)


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
                raise nb.TypingError(f"{self.function.__qualname__} takes {str(p).partition(':')[0]}; device code needs a "
                                  "fixed number of arguments")
        plain = inspect.Signature([p.replace(kind=p.POSITIONAL_OR_KEYWORD, default=weaken(p.default), annotation=p.empty)
                                   for p in declared], __validate_parameters__=False)
        return nb.fold_arguments(plain, args, kws, lambda _n, _p, given: given, _default_type, None), plain

    @cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())

    @cached_property
    def _is_plain(self) -> bool:
        return all(p.kind is p.POSITIONAL_OR_KEYWORD for p in self._parameters)

    def compile(self, args: tuple, captures: Any = None) -> Any:
        """Numba's compile result for the argument types; raises ComponentError with the user's file and line.

        ``captures`` is the struct type of the runtime values that the function captured (:mod:`gemmkit.lang.functions`).
        """
        from gemmkit.lang.compile import compile_function

        self._look()
        key = (self, nb.target_arch(), nb.inlines_calls(), args, captures)
        result = self._compiled.get(key)
        if result is None:
            with nb.global_compiler_lock:
                if key in _open or sum(other[0] is self for other in _open) > _NESTED:
                    raise nb.TypingError(f"{self.function.__qualname__} calls itself, which device code cannot; write a "
                                         "loop")
                _open.append(key)
                try:
                    result = compile_function(self.weakened, args, captures)
                    for look in _looks:
                        look(result)
                    result = compacted(result)
                except ComponentError:
                    raise
                except (nb.NumbaError, NotImplementedError, TypeError) as error:
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
        raise nb.TypingError(f"the default of {parameter.name}: {error}") from None


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


class DeviceFunctionType(nb.OwnCallable, types.Opaque):
    """Numba's view of a DeviceFunction."""

    def __init__(self, function: DeviceFunction):
        self.function = function
        super().__init__(f"device({function.function.__qualname__} at {id(function):#x})")

    @property
    def key(self) -> Any:
        return self.function

    def get_call_type(self, context: TypingContext, args: tuple, kws: dict) -> Any:
        args, declared = self.function.bind(args, kws)
        result = self.function.compile(args)
        return signature(result.signature.return_type, *args).replace(pysig=declared)

    def get_impl_key(self, sig: Signature) -> Any:
        return self.function.compile(tuple(sig.args)).entry_point


nb.kept_as(DeviceFunctionType, None)
nb.typeof_impl.register(DeviceFunction)(lambda value, c: DeviceFunctionType(value))


@nb.lowering_registry.lower_cast(DeviceFunctionType, DeviceFunctionType)
def _cast(context: Context, builder: ir.IRBuilder, fromty: types.Type, toty: types.Type, value: ir.Value) -> Any:
    return value


def call(context: Context, builder: ir.IRBuilder, function: DeviceFunction, argument_types: tuple, values: Values) -> Any:
    """From inside a lowering: call a device function."""
    result = function.compile(tuple(argument_types))
    sig = signature(result.signature.return_type, *argument_types)
    return nb.target_context().get_function(DeviceFunctionType(function), sig)(builder, values)


# --------------------------------------------------------------------------------------------------
# Functions that captured arrays or NumPy scalars: those become kernel arguments.
#
# ``Elementwise(lambda x, m, n: x + bias[n])`` refers to ``bias``. In Numba a captured array would be frozen into the
# kernel; here the function gets one more argument, a struct of what it captured, and a compiler pass reads the captured
# names from it.

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
    return isinstance(value, np.generic) or is_array(value)


class ClosureType(nb.OwnCallable):
    """A function with the struct of its captures as value."""

    def __init__(self, function: DeviceFunction, text: str, place: Any, captures: CapturesType):
        self.function, self.captures = function, captures
        self._key = (text, place, captures)
        super().__init__(f"closure {function.__name__}<{text[-12:]}>")

    @property
    def key(self) -> Any:
        return self._key

    def get_call_type(self, context: TypingContext, args: tuple, kws: dict) -> Any:
        args, declared = self.function.bind(args, kws)
        result = self.function.compile(args, self.captures)
        return signature(result.signature.return_type, *args, recvr=self.captures).replace(pysig=declared)

    def get_impl_key(self, sig: Signature) -> Any:
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


@nb.register_model(ClosureType)
class _ClosureModel(nb.models.PrimitiveModel):
    def __init__(self, dmm: nb.DataModelManager, fe_type: ClosureType):
        super().__init__(dmm, fe_type, dmm.lookup(fe_type.captures).get_value_type())

    def get_argument_type(self) -> Any:
        return self._dmm.lookup(self._fe_type.captures).get_argument_type()

    def as_argument(self, builder: ir.IRBuilder, value: ir.Value) -> Any:
        return self._dmm.lookup(self._fe_type.captures).as_argument(builder, value)

    def from_argument(self, builder: ir.IRBuilder, value: ir.Value) -> Any:
        return self._dmm.lookup(self._fe_type.captures).from_argument(builder, value)


# -- inner functions, which captured run-time values (:mod:`gemmkit.lang.passes`) ----------------------------

_numbers = count(1)


def inner_function(function: FunctionType, code: CodeType) -> nb.Atom:
    """Of a function's inner one, the same each time that the function is compiled: its captured values to the function."""
    known = vars(function).setdefault("gemmkit_inner", {})
    if code not in known:
        inner = _InnerFunction(function, code)

        def typer(context: TypingContext, *values: types.Type) -> Any:
            captures = CapturesType(dict(zip(code.co_freevars, values)))
            made = ClosureType(inner, f"{function.__qualname__}.{code.co_name}", inner, captures)
            return signature(made, *values), lambda c, b, s, v: _struct(c, b, captures, v)

        known[code] = nb.Atom(f"capture {next(_numbers)}", typer, lambda *values: None)
    return known[code]


def _struct(context: Context, builder: ir.IRBuilder, ty: CapturesType, values: Values) -> Any:
    out = nb.cgutils.create_struct_proxy(ty)(context, builder)
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


# --------------------------------------------------------------------------------------------------
# Arrays, numbers and functions as kernel arguments. (`gemmkit.components.freeze` does it for components as well.)

@dataclasses.dataclass
class Frozen:
    """A value as a kernel argument: its kind, its fingerprint, and the numbers to pass.

    ``leaves`` are (format code, value) pairs in the order in which Numba flattens the argument; ``arrays`` are the
    ArrayInfos among them, for checks of device and overlap. ``guards`` tell whether the code and the constants are still
    those of the fingerprint, ``captures`` whether functions still refer to the same arrays and NumPy scalars. ``places`` are
    where its functions are written: of two lambdas of one text each is reported at its own line.
    """

    kind: Any
    fingerprint: str
    leaves: list[tuple[str, Any]]
    arrays: list[ArrayInfo]
    guards: tuple[Guards, ...] = ()
    captures: tuple[Fact, ...] = ()
    places: tuple[Any, ...] = ()

    @property
    def facts(self) -> list[Fact]:
        """All that it rests on: of code and constants, and where functions refer to what they captured."""
        return [*(fact for held in self.guards for fact in held.facts), *self.captures]

    @property
    def type(self) -> Any:
        """Its Numba type, which is made here."""
        return self.kind.type


def freeze_runtime(value: Any, name: str, readonly: bool = False) -> Frozen:
    """An array or a NumPy scalar: what is an argument by itself. Raises TypeError, naming it, for a dtype that device code
    does not have, and ValueError for an array whose address is no multiple of its elements'."""
    try:
        if isinstance(value, np.generic):
            return freeze_scalar(value)
        info = describe(value, name)
        frozen = freeze_array(info, readonly=readonly)
    except TypeError as error:
        raise TypeError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
    if frozen.kind.alignment < part_bytes(info.dtype):
        check_aligned(info, name)
    return frozen


def freeze_array(info: ArrayInfo, unit: int | bool | None = True, align: int | None = None,
                 readonly: bool = False) -> Frozen:
    """An array as a view. ``unit`` is the axis of stride 1 (True: find one); a ``readonly`` one cannot be assigned to."""
    if unit is True:
        unit = unit_axis(info)
    align = alignment(info, unit) if align is None else align
    is_wide = any(extent >= 2**31 for extent in info.shape)
    made = view_kind(info.dtype, len(info.shape), unit, align, is_wide, readonly)
    leaves: list[tuple[str, Any]] = [("u64", info.pointer)]
    leaves += [("i64" if is_wide else "i32", extent) for extent in info.shape]
    leaves += [("i64", info.strides[axis]) for axis in made.strided_axes]
    return Frozen(made, str(made), leaves, [info])


def freeze_scalar(value: Any) -> Frozen:
    if isinstance(value, np.generic):
        made = scalar_kind(value.dtype)
        if value.dtype.kind == "c":
            part = f"f{4 * value.dtype.itemsize}"
            return Frozen(made, str(made), [(part, float(value.real)), (part, float(value.imag))], [])
        kind = {"f": "f", "i": "i", "u": "u", "b": "u"}.get(value.dtype.kind)
        if kind is None or (value.dtype.itemsize == 2 and kind == "f"):
            return Frozen(made, str(made), [("u16", int(value.view(np.uint16)))], [])
        code = f"{kind}{8 * value.dtype.itemsize}"
        return Frozen(made, str(made), [(code, value.item() if kind != "u" else int(value))], [])
    if isinstance(value, bool):
        return Frozen(number_kind("bool"), "bool", [("u8", int(value))], [])
    if isinstance(value, int):
        return (Frozen(number_kind("i32"), "index", [("i32", value)], []) if -2**31 <= value < 2**31
                else Frozen(number_kind("i64"), "int64", [("i64", value)], []))
    if isinstance(value, float):
        return Frozen(number_kind("f64"), "weak float64", [("f64", value)], [])
    if isinstance(value, Record):
        made = scalar_kind(value.dtype)
        return Frozen(made, str(made), [leaf for part in value for leaf in freeze_scalar(part).leaves], [])
    raise TypeError(f"{value!r} ({type(value).__name__}) is not a number that a kernel can take")


def freeze_function(function: Any, name: str) -> Frozen:
    """A function: what it captured are its arguments, and its text the constant."""
    values = captured(function)
    frozen = {key: freeze_runtime(value, f"{name}'s captured {key}", readonly=True) for key, value in values.items()}
    function = getattr(function, "__wrapped__", function)                      # a device function's
    reading = read_closure(function, values.keys())
    text, place = "function:" + reading.text, (function.__code__.co_filename, function.__code__.co_firstlineno)
    made = closure_kind(function, text, place, {key: f.kind for key, f in frozen.items()})
    leaves = [leaf for f in frozen.values() for leaf in f.leaves]
    arrays = [info for f in frozen.values() for info in f.arrays]
    text += "".join(f",{k}:{f.fingerprint}" for k, f in frozen.items())
    return Frozen(made, text, leaves, arrays, (reading.guards,),
                  tuple(captured_at(function, key) for key in values), (place,))
