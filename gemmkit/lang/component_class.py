"""The class of components' classes: it counts their changes, and looks at every component when it is made."""

from __future__ import annotations

import dataclasses
import sys
from abc import ABCMeta
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from gemmkit.lang.guards import class_version
from gemmkit.lang.references import is_fixed, names_of


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
        return super().__new__(mcs, name, bases, namespace, **kwargs)

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        class_version[0] += 1

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        class_version[0] += 1

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in _sound:
            check_class(cls)
            _sound.add(cls)
        return super().__call__(*args, **kwargs)


# -- gemmkit's own classes --------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    def dataclass(cls=None, /, **how):
        """`dataclasses.dataclass` for gemmkit's own components, which makes the same class in half of the time.

        Python compiles methods for each class. What tells components apart is the same code for all of them, and they have a
        ``__repr__`` already: a quarter of what the import for a first product took.
        """
        if cls is None:
            return lambda cls: dataclass(cls, **how)
        if not isinstance(cls, ComponentClass) or not how.get("frozen") or not how.get("eq", True):
            return dataclasses.dataclass(cls, **how)
        dataclasses.dataclass(cls, **{**how, "repr": False, "eq": False})
        own = vars(cls)
        if own.get("__hash__") is None:                       # as Python has it: where the class says nothing of its own
            cls.__hash__ = _hash
        if "__eq__" not in own:
            cls.__eq__ = _equal
        return cls


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


_sound: set[type] = set()


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
            raise TypeError(f"{cls.__qualname__}.{name}: no kernel asks for it, did you mean {meant}? (The methods of "
                            f"{kind.__qualname__} are {', '.join(contract)}.)")
    if not defined & set(contract):
        raise TypeError(f"{cls.__qualname__} defines none of the methods of {kind.__qualname__} that a kernel asks for: "
                        f"{', '.join(contract)}")
    for name, other in getattr(kind, "needs", {}).items():
        if name in defined and other not in defined:
            raise TypeError(f"{cls.__qualname__} has {name} and not {other}, which edges and other kernels ask for; write "
                            f"{other}, too")


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
