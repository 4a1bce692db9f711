"""Guards: whether what a fingerprint was made of still is what it was.

A kernel is found by the text of all code and constants in it. Making that text takes tens of microseconds and a call of a
plan takes seven, so the text is kept, and beside it the *facts* that it rests on: this function has this code object, this
global is this object, this class has these attributes. Constants cannot change in place (what can is refused), so that
identity is enough, and the facts become one expression of ``is`` comparisons, 20 to 30 ns each. (TorchDynamo does the same
for its graphs, under the same name.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import CellType, FunctionType
from typing import Any, NamedTuple, cast

MISSING = object()


class Fact(NamedTuple):
    """One thing that was seen: ``kind`` is "item" (of a mapping), "absent" (a key of it), "length" (of it), "cell",
    "attribute" or "class"."""

    kind: str
    holder: Any
    name: str
    value: Any

    @property
    def key(self) -> tuple:
        return self.kind, id(self.holder), self.name


def item(scope: Mapping[str, Any], name: str) -> Fact:
    """That a namespace has this value under a name, or nothing."""
    value = scope.get(name, MISSING)
    return Fact("absent", scope, name, None) if value is MISSING else Fact("item", scope, name, value)


def cell(of: CellType) -> Fact:
    """That a captured variable holds what it does."""
    return Fact("cell", of, "", contents(of))


def contents(of: CellType) -> Any:
    """What a captured variable holds; MISSING while it is not bound yet."""
    try:
        return of.cell_contents
    except ValueError:
        return MISSING


def function_of(value: Any) -> FunctionType | None:
    """The function in an entry of a class: a method, a static method or a property's getter."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def code(function: FunctionType) -> list[Fact]:
    """That a function has the code and the defaults that it has."""
    names = ["__code__", "__defaults__"] + ["__kwdefaults__"] * (function.__code__.co_kwonlyargcount > 0)
    facts = [Fact("attribute", function, name, getattr(function, name)) for name in names]
    named = function.__kwdefaults__ or {}
    return facts + [item(named, name) for name in named]


# -- classes of components --------------------------------------------------------------------------------------------

class_version = [0]                      # counts every attribute set on any class of components (`ComponentClass`)

UNSEEN = ("__abstractmethods__", "_abc_impl", "__slotnames__", "__doc__", "__annotations__", "__weakref__", "__dict__",
           "__module__", "__firstlineno__", "__static_attributes__")


def members(of: type) -> dict[str, Any]:
    """What a class itself defines."""
    return {name: value for name, value in vars(of).items() if name not in UNSEEN}


def class_facts(of: type, is_fixed: bool = False) -> list[Fact]:
    """That a class defines what it does.

    A class of components counts its changes (`ComponentClass`), so its fact is looked at only after some such class has
    changed; so is that of a class which nobody edits, ``is_fixed``. Any other class has a fact for each entry, one for its
    bases, and one for the number of entries, because a new entry may hide a base's.
    """
    if is_fixed or hasattr(type(of), "counts_changes"):
        return [Fact("class", of, "", members(of))]
    scope = vars(of)
    return [Fact("attribute", of, "__bases__", of.__bases__), Fact("length", scope, "", len(scope)),
            *(item(scope, name) for name in members(of))]


def _has_members(fact: Fact) -> bool:
    now = members(fact.holder)
    return now.keys() == fact.value.keys() and all(now[name] is value for name, value in fact.value.items())


def holds(fact: Fact) -> bool:
    """Whether one fact still holds: for those that are looked at rarely."""
    if fact.kind == "class":
        return _has_members(fact)
    if fact.kind == "attribute":
        return getattr(fact.holder, fact.name, MISSING) is fact.value
    if fact.kind == "cell":
        return contents(fact.holder) is fact.value
    if fact.kind == "length":
        return len(fact.holder) == fact.value
    return fact.holder.get(fact.name, MISSING) is (MISSING if fact.kind == "absent" else fact.value)


# -- all facts of something -------------------------------------------------------------------------------------------

class Guards:
    """Facts, and ``stand()``: whether all of them still hold.

    >>> scope = {"SCALE": 2.0}
    >>> guards = Guards([item(scope, "SCALE"), item(scope, "max")])
    >>> guards.stand()
    True
    >>> scope["max"] = min                           # a built-in's name is shadowed
    >>> guards.stand()
    False
    """

    def __init__(self, facts: Iterable[Fact]):
        self.facts: tuple[Fact, ...] = tuple({fact.key: fact for fact in facts}.values())
        self.stand: Callable[[], bool] = self._first

    def ready(self) -> Callable[[], bool]:
        """``stand`` for one who keeps it: a function without a look into this object."""
        self.stand()
        return self.stand

    def __bool__(self) -> bool:
        return bool(self.facts)

    def _first(self) -> bool:
        """The first look makes the function that all others are."""
        self.stand = _checker(self.facts)
        return self.stand()


def _checker(facts: tuple[Fact, ...]) -> Callable[[], bool]:
    """A function of one expression, since a loop over the facts would cost three times as much."""
    if not facts:
        return _true
    space: dict[str, Any] = {}
    clauses = []
    classes = [fact for fact in facts if fact.kind == "class"]
    if classes:
        seen = [class_version[0]] if all(map(_has_members, classes)) else [-1]

        def changed() -> bool:
            version = class_version[0]
            if not all(map(_has_members, classes)):
                return True
            seen[0] = version
            return False

        space.update(version=class_version, seen=seen, changed=changed)
        clauses.append("(version[0] == seen[0] or not changed())")
    for n, fact in enumerate(facts):
        if fact.kind == "class":
            continue
        space[f"h{n}"], space[f"v{n}"] = fact.holder, fact.value
        clauses.append({"item": f"h{n}[{fact.name!r}] is v{n}", "absent": f"{fact.name!r} not in h{n}",
                        "length": f"len(h{n}) == v{n}", "cell": f"h{n}.cell_contents is v{n}",
                        "attribute": f"h{n}.{fact.name} is v{n}"}[fact.kind])
    text = ("def stand():\n    try:\n        return " + "\\\n            and ".join(clauses)
            + "\n    except (KeyError, ValueError, AttributeError):\n        return False\n")
    exec(text, space)
    return cast("Callable[[], bool]", space["stand"])


def _true() -> bool:
    return True


NOTHING = Guards(())
