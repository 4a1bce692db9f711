"""Components in device code: static fields and properties are constants, runtime fields values, methods compiled code.

`gemmkit.components.freeze` makes a component's type; Numba asks it for attributes and methods.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any, NoReturn

from gemmkit.lang.closures import without_captures
from gemmkit.lang.freezing import freeze_function
from gemmkit.lang.functions import DeviceFunction, device
from gemmkit.lang.kinds import Kind, kind
from gemmkit.lang.numba_hooks import (
    AttributeTemplate,
    lowering_registry,
    models,
    register_model,
    signature,
    types,
    typing_registry,
)
from gemmkit.lang.properties import mutable_in_property
from gemmkit.lang.static_branches import Unknown, asked, of_type
from gemmkit.lang.values import static_type, static_value


class ComponentType(types.Callable):
    """Numba's view of a component: static fields in the type, runtime fields in the value."""

    def __init__(self, cls: type, fingerprint: str, places: tuple, runtime: dict[str, Any], static: dict[str, Any],
                 skeleton: Any):
        self.cls, self.runtime, self.static, self.skeleton = cls, runtime, static, skeleton
        self._key = (cls, fingerprint, places, tuple(runtime.items()))
        self._static_types: dict[str, Any] = {}
        super().__init__(f"{cls.__qualname__}<{fingerprint[:12]}>")

    @property
    def key(self) -> Any:
        return self._key

    def method(self, name: str) -> DeviceFunction | None:
        value = next((vars(cls)[name] for cls in self.cls.__mro__ if name in vars(cls)), None)
        return device(value) if isinstance(value, (FunctionType, DeviceFunction)) else None   # a static method is a value

    def known_attribute(self, name: str) -> Any:
        """What is known of an attribute before types are inferred (:mod:`gemmkit.lang.static_branches`)."""
        if name in self.runtime:
            return of_type(self.runtime[name])
        if self.method(name) is not None and name not in self.static:
            raise Unknown
        return asked(self.skeleton, name)

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


class ComponentKind(Kind):
    """A component's: ``skeleton`` is the component without its runtime fields."""

    def __init__(self, text: str, make: Callable[[], Any], skeleton: Any):
        super().__init__(text, make)
        self.skeleton = skeleton


def component_kind(cls: type, fingerprint: str, places: tuple, runtime: dict[str, Kind], static: dict[str, Any],
                   component: Any) -> Any:
    """The kind of a component; ``places`` are where its functions are written, for messages."""
    def make() -> ComponentKind:
        skeleton = copy.copy(component)
        for name in [n for n in vars(skeleton) if isinstance(inspect.getattr_static(cls, n, None), cached_property)]:
            del vars(skeleton)[name]                          # known for this component's runtime values alone
        for name, field in runtime.items():
            object.__setattr__(skeleton, name, _without_runtime(cls, name, field, getattr(component, name)))
        return ComponentKind(f"{cls.__qualname__}<{fingerprint[:12]}>", lambda: ComponentType(
            cls, fingerprint, places, {name: field.type for name, field in runtime.items()}, static, skeleton), skeleton)

    return kind(("component", cls, fingerprint, places, tuple(runtime.items())), make)


def _without_runtime(cls: type, name: str, field: Any, value: Any) -> Any:
    """What stands for a runtime field in a skeleton: a component or a function may be asked for all that is static."""
    if isinstance(field, ComponentKind):
        return field.skeleton
    if isinstance(value, FunctionType):
        return without_captures(value, field.members, lambda key: _RuntimeField(cls, f"{name}'s captured {key}"))
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
    """The type of a static attribute, which its component's type decides: its fingerprint covers fields and properties."""
    found = ty._static_types.get(attr)
    if found is None:
        found = ty._static_types[attr] = _type_of_static(ty, attr, value)
    return found


def _type_of_static(ty: ComponentType, attr: str, value: Any) -> Any:
    from numba.cuda.core.errors import TypingError

    try:
        if isinstance(value, FunctionType):
            return freeze_function(value, attr).type
        found = static_type(value)
        mutable = mutable_in_property(ty.skeleton, attr)
        if mutable is not None:
            raise TypeError(f"the property reads {mutable}, while the kernel keeps the value that it had; take a field (a "
                            "number, a tuple, an Enum, a types.MappingProxyType), or a gk.Array field that a method reads")
        return found
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
