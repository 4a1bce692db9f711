"""Host objects in device code: what they are is known when a kernel is compiled, and their own methods run then.

`Static` objects (shapes, thread tensors, forms) are compile-time values. Where device code calls a method of one, the
compiler calls the Python method: with what is known, and with `Number`s for run-time coordinates, whose arithmetic emits
instructions (`gemmkit.lang.aggregates`). So host, emulator and device have one text of the algebra:

    outer, inner = shape(32).tile(8)          # in device code as in Python; nothing of it is left in the machine code
    at = outer.places(thread_index())         # a division, and a remainder

A method that reads the machine (a thread's number) is device code itself: its class names it in ``device_methods``.

`Split` is the base of objects that are partly run-time, as tensors are: it says what parts there are.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable
from typing import Any

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.aggregates import Number, static_type, static_value
from gemmkit.lang.components import ComponentType, MethodType
from gemmkit.lang.functions import device
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, ir, operation, signature, types
from gemmkit.lang.references import Static
from gemmkit.lang.scalars import WeakIntLiteral, index

i32 = ir.IntType(32)


class StaticType(nb.OwnCallable):
    """Numba's view of a static object: all of it is in the type."""

    def __init__(self, value: Hashable):
        self.value = value
        super().__init__(f"{type(value).__qualname__} {value!r}")

    def get_call_type(self, context: TypingContext, args: tuple, kws: dict) -> Any:
        return TracedMethod(self, "__call__").get_call_type(context, args, kws) if callable(self.value) else None

    def get_impl_key(self, sig: Signature) -> Any:
        return TracedMethod(self, "__call__").get_impl_key(sig)


nb.kept_as(StaticType, None)
nb.typeof_impl.register(Static)(lambda value, c: StaticType(value))
Static.__device_type__ = lambda value: StaticType(value)                               # type: ignore[attr-defined]


class Split:
    """Base class of objects with compile-time and run-time parts. Their methods are run by the compiler, too."""

    __slots__ = ()

    def __split__(self) -> tuple[Any, Any, tuple]:
        """(what is static, the storage that it stands on, its run-time numbers)."""
        raise NotImplementedError

    @classmethod
    def __of_parts__(cls, static: Any, storage: Any, numbers: tuple) -> Any:
        raise NotImplementedError


class OpaqueStorage:
    """What a traced method passes on and does not look into: a storage, by its type and LLVM value."""

    __slots__ = ("ty", "value")

    def __init__(self, ty: types.Type, value: ir.Value | None):
        self.ty, self.value = ty, value


class SplitType(types.Type):
    """Numba's view of a `Split`: ``static`` in the type; storage and ``count`` numbers in the value."""

    def __init__(self, cls: type[Split], static: object, storage: Any, count: int):
        self.cls, self.static, self.storage, self.count = cls, static, storage, count
        super().__init__(f"{cls.__qualname__} {static!r} on {storage}")

    @property
    def members(self) -> dict[str, Any]:
        """What `gemmkit.lang.registers.holds_registers` looks into: registers are not returned by functions."""
        return {"storage": self.storage}


nb.kept_as(SplitType, lambda ty: [("storage", ty.storage), *((f"n{n}", index) for n in range(ty.count))])


# -- between Numba's values and objects -------------------------------------------------------------------------------

class NotKnown(Exception):
    """A type that is no compile-time value."""


def known(ty: types.Type) -> Any:
    """The compile-time value that a type carries. Raises NotKnown."""
    if isinstance(ty, StaticType):
        return ty.value
    if isinstance(ty, types.Literal):
        return ty.literal_value
    if isinstance(ty, types.BaseTuple):
        return tuple(map(known, ty.types))
    if isinstance(ty, types.NoneType):
        return None
    if isinstance(ty, ComponentType) and not ty.runtime:
        return ty.skeleton
    raise NotKnown(f"{ty} is not known when the kernel is compiled")


def object_of(context: Any, builder: ir.IRBuilder | None, ty: types.Type, value: ir.Value | None) -> Any:
    """The Python object that a device value is to a traced method. Without a builder types alone count."""
    if isinstance(ty, SplitType):
        if builder is None:
            return ty.cls.__of_parts__(ty.static, OpaqueStorage(ty.storage, None), (Number(None, None),) * ty.count)
        parts = nb.cgutils.create_struct_proxy(ty)(context, builder, value=value)
        numbers = tuple(Number(builder, getattr(parts, f"n{n}")) for n in range(ty.count))
        return ty.cls.__of_parts__(ty.static, OpaqueStorage(ty.storage, parts.storage), numbers)
    if isinstance(ty, types.BaseTuple):
        values = [None if builder is None else builder.extract_value(value, n) for n in range(len(ty.types))]
        return tuple(object_of(context, builder, t, v) for t, v in zip(ty.types, values))
    try:
        return known(ty)
    except NotKnown:
        pass
    if isinstance(ty, types.Integer):
        return Number(builder, None if builder is None else context.cast(builder, value, ty, index))
    return OpaqueStorage(ty, value)


def type_of(value: Any) -> Any:
    """The type of what a traced method returned."""
    if isinstance(value, Number):
        return index
    if isinstance(value, OpaqueStorage):
        return value.ty
    if isinstance(value, Split):
        static, storage, numbers = value.__split__()
        return SplitType(type(value), static, storage.ty, len(numbers))
    if isinstance(value, tuple):
        return types.BaseTuple.from_types([type_of(part) for part in value])
    if type(value) is int:
        return WeakIntLiteral(value)
    return static_type(value)


def lowered(context: Context, builder: ir.IRBuilder, value: object) -> Any:
    """The LLVM value of what a traced method returned."""
    if isinstance(value, Number):
        return value.value
    if isinstance(value, OpaqueStorage):
        return value.value
    if isinstance(value, Split):
        _, storage, numbers = value.__split__()
        out = nb.cgutils.create_struct_proxy(type_of(value))(context, builder)
        out.storage = storage.value
        for n, number in enumerate(numbers):
            setattr(out, f"n{n}", number.value if isinstance(number, Number) else i32(number))
        return out._getvalue()
    if isinstance(value, tuple):
        return context.make_tuple(builder, type_of(value), [lowered(context, builder, part) for part in value])
    return static_value(context, builder, type_of(value), value)


def _traced(function: Callable[..., Any], args: tuple) -> Any:
    """(result's type, code) of a Python function of device values of these types. What it refuses is a TypingError."""
    try:
        result = type_of(function(*(object_of(None, None, ty, None) for ty in args)))
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise nb.TypingError(str(error)) from None

    def codegen(context: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
        given = [object_of(context, builder, ty, value) for ty, value in zip(args, values)]
        return lowered(context, builder, function(*given))

    return result, codegen


def traced(function: Callable[..., Any]) -> nb.Atom:
    """A function of static and split objects and coordinates, that the compiler runs where device code calls it."""
    def typer(context: TypingContext, *args: types.Type) -> Any:
        result, codegen = _traced(function, args)
        return signature(result, *args), codegen

    return nb.Atom(function.__name__, typer, function)


# -- methods and attributes -------------------------------------------------------------------------------------------

_codes: dict[tuple, Any] = {}                                 # of traced methods, by name and arguments' types


class TracedMethod(nb.OwnCallable):
    """A method that the compiler runs; the value is its object."""

    def __init__(self, owner: Any, method: str):
        self.owner, self.method = owner, method
        super().__init__(f"{owner.name}.{method}")

    def get_call_type(self, context: TypingContext, args: tuple, kws: dict) -> Any:
        if kws:
            raise nb.TypingError(f"{self.method}: device code gives {', '.join(kws)} by position")
        result, codegen = _traced(self._call, (self.owner, *args))
        key = self.method, (self.owner, *args)
        if key not in _codes:
            def code(context: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
                return codegen(context, builder, sig, values)

            _codes[key] = code
            nb.target_context().insert_func_defn([(code, code, key[1])])
        return signature(result, *args, recvr=self.owner)

    def _call(self, owner: Any, *args: Any) -> Any:
        return getattr(owner, self.method)(*args)

    def get_impl_key(self, sig: Signature) -> Any:
        return _codes[self.method, tuple(sig.args)]           # the first is the object


nb.kept_as(TracedMethod, lambda ty: ty.owner)


def _resolve(ty: types.Type, cls: type, example: Any, attr: str) -> Any:
    if attr.startswith("__"):
        return None
    if attr in getattr(cls, "device_methods", ()):
        return MethodType(ty, attr, device(inspect.getattr_static(cls, attr)))
    try:
        value = getattr(example, attr)
    except AttributeError:
        return None
    return TracedMethod(ty, attr) if inspect.ismethod(value) else type_of(value)


def _read(context: Context, builder: ir.IRBuilder, ty: types.Type, value: ir.Value, attr: str, cls: type) -> Any:
    if attr in getattr(cls, "device_methods", ()):
        return value
    found = getattr(object_of(context, builder, ty, value), attr)
    return value if inspect.ismethod(found) else lowered(context, builder, found)


@nb.attributes_of(StaticType)
def _static_attribute_type(ty: StaticType, attr: str) -> Any:
    return _resolve(ty, type(ty.value), ty.value, attr)


@nb.lowering_registry.lower_getattr_generic(StaticType)
def _static_getattr(context: Context, builder: ir.IRBuilder, ty: StaticType, value: ir.Value, attr: str) -> Any:
    return _read(context, builder, ty, value, attr, type(ty.value))


@nb.attributes_of(SplitType)
def _split_attribute_type(ty: SplitType, attr: str) -> Any:
    return _resolve(ty, ty.cls, object_of(None, None, ty, None), attr)


@nb.lowering_registry.lower_getattr_generic(SplitType)
def _split_getattr(context: Context, builder: ir.IRBuilder, ty: SplitType, value: ir.Value, attr: str) -> Any:
    return _read(context, builder, ty, value, attr, ty.cls)


def _getitem_typer(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 2 or not isinstance(args[0], SplitType):
        return None
    result, codegen = _traced(lambda owner, key: owner[key], args)
    return signature(result, *args), codegen


operation(operator.getitem)(_getitem_typer)
