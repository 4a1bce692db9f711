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
import typing
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import numpy as np

from gemmkit.lang.closures import captured, closure_type, without_captures
from gemmkit.lang.component_types import component_type
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.fingerprint import digest, function_text, value_text
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.given import check_fields
from gemmkit.lang.memory import ViewType
from gemmkit.lang.numba_hooks import typeof_impl, types
from gemmkit.lang.references import References
from gemmkit.lang.scalars import index, numba_type, weak_float64
from gemmkit.lang.values import static_type
from gemmkit.runtime.arrays import ArrayInfo, alignment, describe, offers

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

    def __post_init__(self, *_: Any) -> None:
        check_fields(self)

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
def annotated(cls: type) -> dict[str, Any]:
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
    return isinstance(value, np.ndarray) or offers(value, "__cuda_array_interface__") or offers(value, "__dlpack__")


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
    kind = annotated(cls).get(field)
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


# -- for Numba -------------------------------------------------------------------------------------------------------

@typeof_impl.register(Component)
def _typeof(value: Component, c: Any) -> types.Type:
    return freeze(value).type
