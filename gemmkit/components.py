"""Components: the pluggable parts of a kernel (layouts, transforms, operators, epilogues, ...).

A component is a frozen dataclass whose plain Python methods are device code. Its fields are of two kinds:

* **static** (sizes, dtypes, functions, tiles, other components): part of the compiled kernel, as constants;
* **runtime** (arrays; scalars given as NumPy scalars or annotated `Scalar`): kernel arguments, so that another bias
  vector or another alpha compiles nothing.

>>> from dataclasses import dataclass
>>> import gemmkit as gk
>>> @dataclass(frozen=True)
... class Shift(gk.Component):
...     by: gk.Scalar                      # runtime
...     times: int = 2                     # static
...     def __call__(self, x):
...         return x + self.by * self.times
>>> Shift(0.5)(1.0)                        # in Python, and so in the emulator, it is just an object
2.0

In device code a component is a Numba value: static fields and properties fold to constants, methods are compiled for
the types they meet and inlined. Nothing of Numba shows in the class; a new component touches no file of gemmkit.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from functools import cache, cached_property
from types import FunctionType
from typing import Any, NoReturn

import numpy as np

from gemmkit.lang.closures import captured, closure_type, without_captures
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.fingerprint import digest, function_text, value_text
from gemmkit.lang.functions import DeviceFunction, device
from gemmkit.lang.memory import ViewType
from gemmkit.lang.numba_hooks import (
    AttributeTemplate,
    lowering_registry,
    models,
    register_model,
    signature,
    typeof_impl,
    types,
    typing_registry,
)
from gemmkit.lang.references import References
from gemmkit.lang.scalars import index, numba_type, weak_float64
from gemmkit.lang.values import static_type, static_value
from gemmkit.runtime.arrays import ArrayInfo, alignment, describe

__all__ = ["Array", "Component", "ComponentError", "Frozen", "Scalar", "freeze"]


if typing.TYPE_CHECKING:                # to a type checker they are what they hold: anything array- or number-like
    Array = Any
    Scalar = Any
else:
    class Array:
        """Annotation of a runtime array field: a CuPy array, PyTorch CUDA tensor, NumPy array (emulated), ..."""

    class Scalar:
        """Annotation of a runtime scalar field: a number. Python numbers are weak (NEP 50), NumPy scalars keep their
        type."""


class Component:
    """Base class of every pluggable part; subclasses are frozen dataclasses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):
            cls.__repr__ = _paste_able                                    # type: ignore[method-assign]

    def __device_type__(self) -> types.Type:
        return freeze(self).type

    def __fingerprint__(self) -> str:
        return freeze(self).fingerprint


def _paste_able(component: Any) -> str:
    """``RowMajor('float16')``: a component as one would write it, without the fields that are at their defaults."""
    parts = []
    leading = True
    for field in dataclasses.fields(component) if dataclasses.is_dataclass(component) else ():
        value = getattr(component, field.name)
        if not is_array(value) and field.default is not dataclasses.MISSING and _same(value, field.default):
            leading = False
            continue
        text = repr(value.name) if isinstance(value, np.dtype) else repr(value)
        parts.append(text if leading else f"{field.name}={text}")
    return f"{type(component).__qualname__}({', '.join(parts)})"


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, np.dtype):
        return default is not None and value == np.dtype(default)
    return type(value) is type(default) and value == default


@dataclasses.dataclass
class Frozen:
    """A value as a kernel argument: its Numba type, its fingerprint, and the numbers to pass.

    ``leaves`` are (format code, value) pairs in the order in which Numba flattens the argument; ``arrays`` are the
    ArrayInfos among them, for checks of device and overlap.
    """

    type: Any
    fingerprint: str
    leaves: list[tuple[str, Any]]
    arrays: list[ArrayInfo]


# -- which fields are runtime -----------------------------------------------------------------------------------------

@cache
def _annotated(cls: type) -> dict[str, Any]:
    """Fields whose annotation says that they are runtime."""
    try:
        hints = typing.get_type_hints(cls)
    except Exception:                     # names that only a type checker can see: read the text of the annotation
        hints = {}
        for base in reversed(cls.__mro__):
            for name, text in getattr(base, "__annotations__", {}).items():
                last = str(text).rpartition(".")[2]
                hints[name] = {"Array": Array, "Scalar": Scalar}.get(last)
    out = {}
    for name, hint in hints.items():
        kinds = set(typing.get_args(hint)) | {hint}
        if Array in kinds:
            out[name] = Array
        elif Scalar in kinds:
            out[name] = Scalar
    return out


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library (and not a NumPy scalar)."""
    if isinstance(value, (np.generic, int, float, complex, str, bytes, type(None), np.dtype, type)):
        return False
    return (isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__")
            or hasattr(value, "__dlpack__"))


def field_values(component: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(component):
        return {}
    return {field.name: getattr(component, field.name) for field in dataclasses.fields(component)}


def without_arrays(component: Any) -> Any:
    """The component with descriptions (ArrayInfo) in place of arrays, also of nested ones and of those that a function
    captured: it freezes to the same type, and keeps no array alive."""
    changed: dict[str, Any] = {}
    for field, value in field_values(component).items():
        if isinstance(value, Component):
            inner = without_arrays(value)
            if inner is not value:
                changed[field] = inner
        elif isinstance(value, FunctionType):
            held = {name: describe(x, name) for name, x in captured(value).items() if is_array(x)}
            if held:
                changed[field] = without_captures(value, held, held.__getitem__)
        elif is_array(value):
            changed[field] = describe(value, field)
    return with_fields(component, changed)


def with_fields(component: Any, changed: dict[str, Any]) -> Any:
    """The component with other values in some fields, which nothing checks: itself if there are none."""
    if not changed:
        return component
    out = copy.copy(component)
    for field, value in changed.items():
        object.__setattr__(out, field, value)
    return out


# -- freezing ---------------------------------------------------------------------------------------------------------

def freeze(value: Any, name: str = "value") -> Frozen:
    """A Python object as a kernel argument.

    Components freeze field by field; arrays become views, NumPy scalars and annotated numbers runtime scalars, and all
    else compile-time constants. Raises TypeError, naming the field, for what device code cannot hold.
    """
    if isinstance(value, Component):
        return _freeze_component(value, name)
    if isinstance(value, (FunctionType, DeviceFunction)):
        return _freeze_function(value, name)
    try:
        if isinstance(value, ArrayInfo) or is_array(value):
            return freeze_array(value if isinstance(value, ArrayInfo) else describe(value, name))
        if isinstance(value, np.generic):
            return freeze_scalar(value)
        ty = static_type(value)
    except TypeError as error:
        raise TypeError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
    return Frozen(ty, value_text(value), [], [])


def freeze_array(info: ArrayInfo, unit: int | bool | None = True, align: int | None = None) -> Frozen:
    """An array as a view. ``unit`` is the axis of stride 1 (True: find one)."""
    if unit is True:
        unit = unit_axis(info)
    align = alignment(info) if align is None else align
    ty = ViewType(info.dtype, len(info.shape), unit, align)
    leaves: list[tuple[str, Any]] = [("u64", info.pointer)]
    leaves += [("i32", extent) for extent in info.shape]
    leaves += [("i64", info.strides[axis]) for axis in ty.strided_axes]
    return Frozen(ty, str(ty), leaves, [info])


def unit_axis(info: ArrayInfo) -> int | None:
    """The last axis of stride 1 (an axis of extent 1 has any stride), or None."""
    axes = [axis for axis, stride in enumerate(info.strides) if stride == 1]
    if not axes:
        axes = [axis for axis, extent in enumerate(info.shape) if extent <= 1]
    return axes[-1] if axes else None


def freeze_scalar(value: Any) -> Frozen:
    if isinstance(value, np.generic):
        ty = numba_type(value.dtype)
        if value.dtype.kind == "c":
            part = f"f{4 * value.dtype.itemsize}"
            return Frozen(ty, str(ty), [(part, float(value.real)), (part, float(value.imag))], [])
        kind = {"f": "f", "i": "i", "u": "u", "b": "u"}.get(value.dtype.kind)
        if kind is None or (value.dtype.itemsize == 2 and kind == "f"):
            return Frozen(ty, str(ty), [("u16", int(value.view(np.uint16)))], [])
        code = f"{kind}{8 * value.dtype.itemsize}"
        return Frozen(ty, str(ty), [(code, value.item() if kind != "u" else int(value))], [])
    if isinstance(value, bool):
        return Frozen(types.boolean, "bool", [("u8", int(value))], [])
    if isinstance(value, int):
        return (Frozen(index, "index", [("i32", value)], []) if -2**31 <= value < 2**31
                else Frozen(types.int64, "int64", [("i64", value)], []))
    if isinstance(value, float):
        return Frozen(weak_float64, "weak float64", [("f64", value)], [])
    raise TypeError(f"{value!r} ({type(value).__name__}) is not a number that a kernel can take")


def _freeze_field(component: Component, field: str, value: Any, path: str) -> tuple[bool, Frozen | None]:
    """(runtime?, frozen); None for a static field."""
    cls: Any = type(component)
    kind = _annotated(cls).get(field)
    where = f"{path}.{field}"
    if kind is Scalar and value is not None and not isinstance(value, Component):
        try:
            return True, freeze_scalar(value)
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from None
    if kind is Array and value is not None and not is_array(value) and not isinstance(value, ArrayInfo):
        raise TypeError(f"{where}: got {type(value).__name__}; an array (CuPy, PyTorch, NumPy under emulation) is needed")
    if isinstance(value, (np.generic, ArrayInfo)) or is_array(value):
        return True, freeze(value, where)
    if isinstance(value, (Component, FunctionType)):
        frozen = freeze(value, where)
        return bool(frozen.leaves), frozen
    return False, None


def _freeze_component(component: Component, path: str) -> Frozen:
    cls: Any = type(component)
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        if parameters is not None or getattr(cls, "__annotations__", None):
            raise TypeError(f"{cls.__qualname__}: a component is a frozen dataclass; write @dataclass(frozen=True)")
    path = cls.__qualname__ if path == "value" else path
    runtime: dict[str, Any] = {}
    static: dict[str, Any] = {}
    texts, leaves, arrays = [], [], []
    for field, value in field_values(component).items():
        is_runtime, frozen = _freeze_field(component, field, value, path)
        if is_runtime and frozen is not None:
            runtime[field] = frozen.type
            leaves += frozen.leaves
            arrays += frozen.arrays
            texts.append(f"{field}:{frozen.fingerprint}")
        else:
            static[field] = value
            texts.append(f"{field}={frozen.fingerprint if frozen else value_text(value)}")
    fingerprint = digest(class_text(cls) + "\n" + "\n".join(texts))
    return Frozen(component_type(cls, fingerprint, runtime, static, component), fingerprint, leaves, arrays)


_class_texts: dict[type, tuple[str, list[References]]] = {}


def class_text(cls: type) -> str:
    """A component class as text: its name, its constants, and the code of all its functions (inherited ones too)."""
    known = _class_texts.get(cls)
    if known is not None and all(references.stand() for references in known[1]):
        return known[0]
    parts, references = [f"{cls.__module__}.{cls.__qualname__}"], []
    for base in cls.__mro__[:-1]:
        if base is Component:
            continue
        for name, value in sorted(vars(base).items()):
            if name.startswith("__") and name != "__call__":
                continue
            function = _function_of(value)
            if function is not None:
                parts.append(f"{name}:{function_text(function)}")
                references.append(References(function))
            elif isinstance(value, _CONSTANTS) or hasattr(value, "__device_type__"):
                parts.append(f"{name}={value_text(value)}")
    _class_texts[cls] = text, _ = digest("\n".join(parts)), references
    return text


_CONSTANTS = (bool, int, float, complex, str, bytes, tuple, np.dtype, np.generic, type, type(None))


def _function_of(value: Any) -> FunctionType | None:
    """The function in an entry of a class: a method, a static method or a property's getter."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def _freeze_function(function: Any, name: str) -> Frozen:
    values = captured(function)
    frozen = {key: freeze(value, f"{name}'s captured {key}") for key, value in values.items()}
    text = "function:" + function_text(function, values.keys())
    ty = closure_type(function, text, {key: f.type for key, f in frozen.items()})
    leaves = [leaf for f in frozen.values() for leaf in f.leaves]
    arrays = [info for f in frozen.values() for info in f.arrays]
    return Frozen(ty, text + "".join(f",{k}:{f.fingerprint}" for k, f in frozen.items()), leaves, arrays)


# -- the Numba side ---------------------------------------------------------------------------------------------------

class ComponentType(types.Callable):
    """Numba's view of a component: static fields in the type, runtime fields in the value."""

    def __init__(self, cls: type, fingerprint: str, runtime: dict[str, Any], static: dict[str, Any], skeleton: Any):
        self.cls, self.runtime, self.static, self.skeleton = cls, runtime, static, skeleton
        self._key = (cls, fingerprint, tuple(runtime.items()))
        super().__init__(f"{cls.__qualname__}<{fingerprint[:12]}>")

    @property
    def key(self) -> Any:
        return self._key

    def method(self, name: str) -> DeviceFunction | None:
        value = inspect.getattr_static(self.cls, name, None)          # a static method is an attribute like any other
        return device(value) if isinstance(value, (FunctionType, DeviceFunction)) else None

    def get_call_type(self, context: Any, args: tuple, kws: dict) -> Any:
        function = self.method("__call__")
        if function is None:
            return None
        return MethodType(self, "__call__", function).get_call_type(context, args, kws)

    def get_call_signatures(self) -> Any:
        return [], True

    def get_impl_key(self, sig: Any) -> Any:
        function = self.method("__call__")
        assert function is not None
        return function.compile(tuple(sig.args)).entry_point


_types: dict[Any, ComponentType] = {}


def component_type(cls: type, fingerprint: str, runtime: dict, static: dict, component: Any) -> ComponentType:
    key = (cls, fingerprint, tuple(runtime.items()))
    found = _types.get(key)
    if found is None:
        skeleton = copy.copy(component)
        for name in [n for n in vars(skeleton) if isinstance(inspect.getattr_static(cls, n, None), cached_property)]:
            del vars(skeleton)[name]                          # known for this component's runtime values alone
        for name in runtime:
            object.__setattr__(skeleton, name, _without_runtime(cls, name, runtime[name], getattr(component, name)))
        found = _types.setdefault(key, ComponentType(cls, fingerprint, runtime, static, skeleton))
    return found


def _without_runtime(cls: type, name: str, ty: Any, value: Any) -> Any:
    """What stands for a runtime field in a skeleton: a component or a function may be asked for all that is static."""
    if isinstance(ty, ComponentType):
        return ty.skeleton
    if isinstance(value, FunctionType):
        return without_captures(value, ty.captures.members, lambda key: _RuntimeField(cls, f"{name}'s captured {key}"))
    return _RuntimeField(cls, name)


class _RuntimeField:
    """Stands for a runtime field while a property is evaluated at compile time; any use of it is an error."""

    def __init__(self, cls: type, name: str):
        self.__dict__["_what"] = f"{cls.__qualname__}.{name}"

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(f"a property of a component used in device code may not depend on the runtime field {self._what}; "
                        "write a method")

    __hash__ = object.__hash__


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(_RuntimeField, _side, _RuntimeField._refuse)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "index",
              "len", "iter", "getitem", "contains", "call", "round", "array"):
    setattr(_RuntimeField, f"__{_name}__", _RuntimeField._refuse)


@register_model(ComponentType)
class _ComponentModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: ComponentType):
        super().__init__(dmm, fe_type, list(fe_type.runtime.items()))


class MethodType(types.Callable):
    """A component's method; the value is the component."""

    def __init__(self, component: ComponentType, name: str, function: DeviceFunction):
        self.component, self.function = component, function
        super().__init__(f"{component.name}.{name}")

    @property
    def key(self) -> Any:
        return self.component, self.function

    def get_call_type(self, context: Any, args: tuple, kws: dict) -> Any:
        args, declared = self.function.bind(args, kws, bound=1)
        result = self.function.compile((self.component, *args))
        return signature(result.signature.return_type, *args, recvr=self.component).replace(pysig=declared)

    def get_call_signatures(self) -> Any:
        return [], True

    def get_impl_key(self, sig: Any) -> Any:
        return self.function.compile(tuple(sig.args)).entry_point


@register_model(MethodType)
class _MethodModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: MethodType):
        super().__init__(dmm, fe_type, dmm.lookup(fe_type.component).get_value_type())


@typeof_impl.register(Component)
def _typeof(value: Component, c: Any) -> types.Type:
    return freeze(value).type


@lowering_registry.lower_constant(ComponentType)
def _constant(context: Any, builder: Any, ty: ComponentType, value: Any) -> Any:
    from numba.cuda import cgutils

    if ty.runtime:
        raise TypeError(f"{ty.cls.__qualname__} has runtime fields ({', '.join(ty.runtime)}) and cannot be a constant")
    return cgutils.create_struct_proxy(ty)(context, builder)._getvalue()


@typing_registry.register_attr
class _Attributes(AttributeTemplate):
    key = ComponentType

    def generic_resolve(self, ty: ComponentType, attr: str) -> Any:
        if attr == "__call__":
            return None
        if attr in ty.runtime:
            return ty.runtime[attr]
        method = ty.method(attr)
        if method is not None and attr not in ty.static:
            return MethodType(ty, attr, method)
        try:
            value = getattr(ty.skeleton, attr)
        except AttributeError:
            return None
        return _static_attribute_type(ty, attr, value)


def _static_attribute_type(ty: ComponentType, attr: str, value: Any) -> Any:
    from numba.cuda.core.errors import TypingError

    try:
        if isinstance(value, FunctionType):
            return _freeze_function(value, attr).type
        return static_type(value)
    except TypeError as error:
        raise TypingError(f"{ty.cls.__qualname__}.{attr}: {error}") from error


@lowering_registry.lower_getattr_generic(ComponentType)
def _getattr(context: Any, builder: Any, ty: ComponentType, value: Any, attr: str) -> Any:
    from numba.cuda import cgutils

    if attr in ty.runtime:
        return getattr(cgutils.create_struct_proxy(ty)(context, builder, value=value), attr)
    if ty.method(attr) is not None and attr not in ty.static:
        return value
    static = getattr(ty.skeleton, attr)
    static_ty = _static_attribute_type(ty, attr, static)
    if isinstance(static, FunctionType):
        return cgutils.create_struct_proxy(static_ty.captures)(context, builder)._getvalue()
    return static_value(context, builder, static_ty, static)
