"""Components in device code: static fields and properties are constants, runtime fields values, methods compiled code.

`gemmkit.components.freeze` makes a component's type; Numba asks it for attributes and methods.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import sys
from abc import ABCMeta
from collections.abc import Callable
from functools import cache, cached_property
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.aggregates import static_type, static_value
from gemmkit.lang.fingerprint import mutable_in_property
from gemmkit.lang.functions import DeviceFunction, Kind, device, freeze_function, kind, without_captures
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.passes import UnknownValue, asked, of_type
from gemmkit.lang.references import class_version, is_fixed, names_of
from gemmkit.lang.scalars import IndexType, index, wide_index


class ComponentType(nb.OwnCallable):
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
        """What is known of an attribute before types are inferred (:mod:`gemmkit.lang.passes`)."""
        if name in self.runtime:
            return of_type(self.runtime[name])
        if self.method(name) is not None and name not in self.static:
            raise UnknownValue
        return asked(self.skeleton, name)

    def get_call_type(self, context: TypingContext, args: tuple, kws: dict) -> Any:
        function = self.method("__call__")
        if function is None:
            return None
        return MethodType(self, "__call__", function).get_call_type(context, args, kws)

    def get_impl_key(self, sig: Signature) -> Any:
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
        raise TypeError(f"a property that device code uses may not depend on the runtime field {self._what}; write a method")

    __hash__ = object.__hash__


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(_RuntimeField, _side, _RuntimeField._refuse)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "index",
              "len", "iter", "getitem", "contains", "call", "round", "array"):
    setattr(_RuntimeField, f"__{_name}__", _RuntimeField._refuse)


nb.kept_as(ComponentType, lambda ty: list(ty.runtime.items()))


class MethodType(nb.OwnCallable):
    """A component's method; the value is the component."""

    def __init__(self, component: ComponentType, name: str, function: DeviceFunction):
        self.component, self.function = component, function
        super().__init__(f"{component.name}.{name}")

    @property
    def key(self) -> Any:
        return self.component, self.function

    def get_call_type(self, context: TypingContext, args: tuple, kws: dict) -> Any:
        args, declared = self.function.bind(args, kws, bound=1)
        result = self.function.compile((self.component, *args))
        return signature(result.signature.return_type, *args, recvr=self.component).replace(pysig=declared)

    def get_impl_key(self, sig: Signature) -> Any:
        return self.function.compile(tuple(sig.args)).entry_point


nb.kept_as(MethodType, lambda ty: ty.component)


@nb.lowering_registry.lower_constant(ComponentType)
def _constant(context: Context, builder: ir.IRBuilder, ty: ComponentType, value: object) -> Any:
    from numba.cuda import cgutils

    if ty.runtime:
        raise TypeError(f"{ty.cls.__qualname__} has runtime fields ({', '.join(ty.runtime)}) and cannot be a constant")
    return cgutils.create_struct_proxy(ty)(context, builder)._getvalue()


@nb.attributes_of(ComponentType)
def _attribute_type(ty: ComponentType, attr: str) -> Any:
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


def _type_of_static(ty: ComponentType, attr: str, value: object) -> Any:
    from numba.cuda.core.errors import TypingError

    try:
        if isinstance(value, FunctionType):
            return freeze_function(value, attr).type
        found = static_type(value)
        mutable = mutable_in_property(ty.skeleton, attr)
        if mutable is not None:
            raise TypeError(f"the property reads {mutable}, but the kernel would keep the old value; use a field (a number, "
                            "a tuple, an Enum, a types.MappingProxyType), or a gk.Array field that a method reads")
        return found
    except TypeError as error:
        raise TypingError(f"{ty.cls.__qualname__}.{attr}: {error}") from error


@nb.lowering_registry.lower_getattr_generic(ComponentType)
def _getattr(context: Context, builder: ir.IRBuilder, ty: ComponentType, value: ir.Value, attr: str) -> Any:
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


# --------------------------------------------------------------------------------------------------
# The class of components' classes: it counts their changes, and looks at every component when it is made.

class ComponentClass(ABCMeta):
    """What the classes of components are instances of.

    * An attribute that is set on a class (``S.K = 3``, ``S.__call__ = ...``) is counted, so that guards look at classes only
      after one has changed.
    * A class whose instances could not be told apart, or that defines nothing which a kernel would ever ask for, is refused
      when the first instance is made, by name.
    """

    counts_changes = True                # in `guards.class_version`

    # ABCMeta's own look for registered classes takes ten times as long, and freezing asks for every value.
    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__

    def __new__(mcs, name: str, bases: tuple, namespace: dict[str, Any], **kwargs: Any) -> Any:
        # A class that is made by a call of `type` would be of ABCMeta's module: Python asks the caller's frame.
        namespace.setdefault("__module__", sys._getframe(1).f_globals.get("__name__", "__main__"))
        made: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        if mcs is CheckedClass:                           # as its bases are, which says nothing of this one
            type.__setattr__(made, "__class__", ComponentClass)
        return made

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        class_version[0] += 1

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        class_version[0] += 1

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        check_class(cls)
        type.__setattr__(cls, "__class__", CheckedClass)
        return type.__call__(cls, *args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of ``__init__``, for ``help``: Python would give that of `__call__`."""
        own = inspect.signature(cls.__init__)             # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:])


class CheckedClass(ComponentClass):
    """A class of components that has an instance: others are made as Python makes any object, in half of the time."""

    __call__ = type.__call__


# -- gemmkit's own classes --------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    def dataclass(cls=None, /, **how):
        """`dataclasses.dataclass` for gemmkit's own components, which makes the same class in half of the time, and
        instances in a third.

        Python compiles methods for each class. What tells components apart is the same code for all of them, and they have a
        ``__repr__`` already: a quarter of what the import for a first product took.
        """
        if cls is None:
            return lambda cls: dataclass(cls, **how)
        if not isinstance(cls, ComponentClass) or not how.get("frozen") or not how.get("eq", True):
            return dataclasses.dataclass(cls, **how)
        dataclasses.dataclass(cls, **{**how, "repr": False, "eq": False, "init": False})
        own = vars(cls)
        if how.get("init", True) and "__init__" not in own:
            _add_init(cls)
        if own.get("__hash__") is None:                       # as Python has it: where the class says nothing of its own
            cls.__hash__ = _hash
        if "__eq__" not in own:
            cls.__eq__ = _equal
        return cls


#: Types whose objects are what an annotation asks for: `gemmkit.lang.checks` need not look at them.
SURE: dict[str, set[type]] = {"str": {str}, "bool": {bool}, "float": {float}, "Scalar": {float}, "Array": set()}


def words_of(annotation: Any) -> tuple[str, ...]:
    """The words that ``Literal["M", "N"]`` allows; none for another annotation."""
    text = str(annotation)
    return ast.literal_eval(f"({text[8:-1]},)") if text.startswith("Literal[") else ()


def _add_init(cls: Any) -> None:
    """Give a class the ``__init__`` of a frozen dataclass. It writes the fields into the instance's dictionary, and calls
    ``__post_init__`` unless that checks fields alone, and their types say enough."""
    space: dict[str, Any] = {"_type": type, "_str": str}       # (a field has any name without an underscore in front)
    arguments, keyword_only, body, sure = list[str](), list[str](), ["_fields = self.__dict__"], list[str]()
    for field in dataclasses.fields(cls):
        assert field.init and field.default_factory is dataclasses.MISSING, f"{cls.__qualname__}.{field.name}"
        space[f"_of_{field.name}"] = field.default
        default = f"=_of_{field.name}" if field.default is not dataclasses.MISSING else ""
        (keyword_only if field.kw_only else arguments).append(field.name + default)
        body.append(f"_fields[{field.name!r}] = {field.name}")
        words = words_of(field.type)
        space[f"_sure_{field.name}"] = words or SURE.get(str(field.type), ())
        sure.append(f"_type({field.name}) is _str and {field.name} in _sure_{field.name}" if words else
                    f"_type({field.name}) in _sure_{field.name}")
    checks = getattr(cls.__post_init__, "checks_fields_alone", False)
    if not sure and checks:
        return                                            # `object.__init__`
    body.append(f"if not ({' and '.join(sure)}):\n        self.__post_init__()" if checks else "self.__post_init__()")
    given = ", ".join(["self", *arguments, *["*"] * bool(keyword_only), *keyword_only])
    exec(f"def __init__({given}):\n    " + "\n    ".join(body), space)
    made = cls.__init__ = space["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__annotations__ = {field.name: field.type for field in dataclasses.fields(cls)} | {"return": None}


@cache
def _fields_of(cls: type) -> Callable[[Any], Any]:
    """What gets the fields of a component that tell it from another: a tuple, or the only one."""
    names = [field.name for field in dataclasses.fields(cls) if field.compare]
    return attrgetter(*names) if names else lambda component: ()


def _equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    fields = _fields_of(self.__class__)
    return (fields(self),) == (fields(other),)                # tuples: what is the same object is equal


def _hash(self: Any) -> int:
    return hash(_fields_of(self.__class__)(self))


def check_class(cls: Any) -> None:
    """Raise TypeError for a class of components whose instances, or whose methods, a kernel would not see."""
    _check_dataclass(cls)
    if not is_fixed(cls):
        _check_contract(cls)


def _check_dataclass(cls: Any) -> None:
    """Fields tell instances apart: a class has to be a frozen dataclass as soon as there are any."""
    own = vars(cls)
    inherited = [base for base in cls.__mro__[1:] if has_fields(base)]
    if "__dataclass_params__" in own:
        sound = own["__dataclass_params__"].frozen
    else:
        sound = not own.get("__annotations__") and "__init__" not in own and not inherited
    if not sound:
        raise TypeError(f"{cls.__qualname__}: a component is a frozen dataclass; write @dataclass(frozen=True) above the "
                        "class" + (f" (a subclass of {inherited[0].__qualname__} needs its own)" if inherited else ""))


def has_fields(cls: Any) -> bool:
    return dataclasses.is_dataclass(cls) and len(dataclasses.fields(cls)) > 0


# -- contracts --------------------------------------------------------------------------------------------------------

def _check_contract(cls: Any) -> None:
    """A kind of component says which methods a kernel asks for (`device_methods`); a user's class overrides one of them, and
    has none that is one letter off. A kind of several roles is made of classes that say ``is_contract``."""
    kinds = [base for base in cls.__mro__ if isinstance(base, ComponentClass)][:-1]
    if len(kinds) < 2 or not vars(kinds[-1]).keys() & {"device_methods", "is_contract"}:      # of no kind that kernels ask
        return
    contracts = [base for base in kinds if base is kinds[-1] or "is_contract" in vars(base)]
    kind, contract = contracts[0], cls.device_methods
    classes = [base for base in kinds if base not in contracts]
    defined = {name for base in classes for name in vars(base)}
    of_user = {name for base in classes if not is_fixed(base) for name in vars(base)}
    used = {name for base in classes for value in vars(base).values() if hasattr(value, "__code__")
            for name in names_of(value.__code__)}
    for name in sorted(set(vars(cls)) - used - set(dir(kind)) - set(contract)):
        meant = next((hook for hook in contract if hook not in of_user and is_one_edit(name, hook)), None)
        if meant is not None:
            raise TypeError(f"{cls.__qualname__}.{name}: no kernel calls it; did you mean {meant}? (The methods of "
                            f"{kind.__qualname__} are {', '.join(contract)}.)")
    if not defined & set(contract):
        raise TypeError(f"{cls.__qualname__} defines none of the methods of {kind.__qualname__} that a kernel calls: "
                        f"{', '.join(contract)}")
    for name, other in getattr(kind, "needs", {}).items():
        if name in defined and other not in defined:
            raise TypeError(f"{cls.__qualname__} has {name} and not {other}, which edges and other kernels call; write "
                            f"{other} too")


def is_one_edit(one: str, other: str) -> bool:
    """Whether a name becomes another by one letter more, less or different, or two neighbours exchanged.

    >>> is_one_edit("__cal__", "__call__"), is_one_edit("fiinsh", "finish"), is_one_edit("load_a", "load")
    (True, True, False)
    """
    if one == other or abs(len(one) - len(other)) > 1:
        return False
    at = next((n for n, (x, y) in enumerate(zip(one, other)) if x != y), min(len(one), len(other)))
    return (one[at + 1:] == other[at + 1:] or one[at + 1:] == other[at:] or one[at:] == other[at + 1:]
            or (one[at:at + 2] == other[at:at + 2][::-1] and one[at + 2:] == other[at + 2:]))


# --------------------------------------------------------------------------------------------------
# Coordinates of 64 bits: what user code gets of operands with 2^31 elements and more.
#
# Kernels count rows and columns in 32 bits, which is enough: no operand has more than `gemmkit.plans.problem.LIMIT` of
# either. What a user's method *computes* from them may be as large as the operand has elements (``i * (i + 1) // 2 +
# j``). ``widened`` is called where a kernel hands its coordinates over; nothing that kernels do themselves comes by here.

NARROW, WIDE = 32, 64                  # bits of a coordinate
COUNT = 2**31                          # elements from which on a place among them takes more than 32 bits


def wide_type(ty: types.Type) -> Any:
    """The type of a coordinate, or of a component whose fields are coordinates, with 64 bits for 32; None for another."""
    if isinstance(ty, (IndexType, types.IntegerLiteral)):
        return wide_index
    if isinstance(ty, ComponentType) and ty.runtime and all(isinstance(t, IndexType) for t in ty.runtime.values()):
        return _of_wide_fields(ty)
    return None


@cache
def _of_wide_fields(ty: ComponentType) -> ComponentType:
    made: Any = object.__new__(ComponentType)
    vars(made).update(vars(ty), runtime=dict.fromkeys(ty.runtime, wide_index), name=f"{ty.name}, {WIDE} bits",
                      _key=(WIDE, ty.key))
    return cast(ComponentType, type(made)._intern(made))       # Numba numbers its types; as if its constructor had made it


def _type_widened(context: TypingContext, value: types.Type) -> Any:
    to = wide_type(value)
    if to is None:
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        from numba.cuda import cgutils

        if isinstance(to, IndexType):
            return c.cast(b, v[0], value, to)
        given, out = (cgutils.create_struct_proxy(t)(c, b, **how) for t, how in ((value, {"value": v[0]}), (to, {})))
        for name, ty in value.runtime.items():
            setattr(out, name, c.cast(b, getattr(given, name), ty, wide_index))
        return out._getvalue()

    return signature(to, value), codegen


_long: type[int] = int                 # a coordinate of 64 bits on the host


def emulate_with(long_coordinate: type[int]) -> None:
    """What a coordinate of 64 bits is in emulated code: the emulator says so."""
    global _long
    _long = long_coordinate


@atom(_type_widened)
def widened(value: Any) -> Any:
    """A coordinate, or the sizes of a problem, as 64-bit ones."""
    if isinstance(value, int):
        return _long(value)
    return type(value)(*(_long(getattr(value, field.name)) for field in dataclasses.fields(value)))


def _type_narrowed(context: TypingContext, value: types.Type) -> Any:
    if not isinstance(value, types.Integer):
        return None
    return signature(index, value), lambda c, b, s, v: c.cast(b, v[0], value, index)


@atom(_type_narrowed)
def narrowed(value: int) -> int:
    """A coordinate as kernels count, in 32 bits; it fits."""
    return int(value)
