"""Device code that runs again with other things in place of what it names: arrays, coordinates, functions of `math`.

Device code is plain Python, so that it runs on whatever computes. A `World` says what stands for what: derivatives are found
so, of epilogues on tensors (`gemmkit.torch.autograd`) and of scores on symbols (`gemmkit.functions.slope`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from gemmkit.components import Component
from gemmkit.lang import aggregates, checks
from gemmkit.lang.functions import DeviceFunction

#: What device code calls of gemmkit's own that computes nothing: by the object, what stands for it.
PASSED_ON: dict[int, Any] = {
    id(checks.number): lambda component, method, value, like: value,
    id(checks.truth): lambda component, method, value: value,
    id(aggregates.convert): lambda dtype, value: value,
}


MOST_WAYS = 64                         # through device code, and branches on one of them


class Ways:
    """The ways through code that runs once for each: which way each branch goes in this run, and whether there is another.
    ``end``: what a loop without an end depends on."""

    def __init__(self, end: str) -> None:
        self._end = end
        self.planned: list[bool] = []
        self.asked: list[Any] = []

    def decide(self, condition: object) -> bool:
        """The way that this run takes at a branch on ``condition``. Raises TypeError behind `MOST_WAYS` branches: a loop
        whose end depends on what is not known would have no last one."""
        if len(self.asked) >= MOST_WAYS:
            raise TypeError(f"more than {MOST_WAYS} branches, or a loop whose end depends on {self._end}")
        if len(self.asked) == len(self.planned):
            self.planned.append(True)
        self.asked.append(condition)
        return self.planned[len(self.asked) - 1]

    def next(self) -> bool:
        """Prepare the next run; False if all ways have been gone."""
        del self.planned[len(self.asked):]
        while self.planned and not self.planned[-1]:
            self.planned.pop()
        self.asked = []
        if self.planned:
            self.planned[-1] = False
        return bool(self.planned)


class World:
    """What stands for a value. ``stands_for``: by objects' ids; ``functions``: by the names that `math` and NumPy have for
    them; subclasses say what an array, a number or a component's field is."""

    def __init__(self, stands_for: dict[int, Any], functions: dict[str, Any]):
        self.stands_for, self.functions = stands_for, functions
        self._made: dict[int, FunctionType] = {}

    def leaf(self, x: Any) -> Any:
        """What stands for anything that is neither code nor a component."""
        raise NotImplementedError

    def field(self, component: Component, name: str) -> Any:
        """What stands for a component's field or property."""
        return self(getattr(component, name))

    def unknown(self, name: str) -> Callable[..., Any]:
        """What stands for a function without a stand-in."""
        def raises(*args: object) -> Any:
            raise TypeError(f"{name}, whose derivative is not known")

        return raises

    def __call__(self, x: Any) -> Any:
        if id(x) in self.stands_for:
            return self.stands_for[id(x)]
        if isinstance(x, ModuleType):
            return _Functions(x, self) if x.__name__ in ("math", "numpy") else _Module(x, self) if x.__name__.startswith(
                "gemmkit") else x
        if isinstance(x, DeviceFunction):
            return self(x.function)
        if isinstance(x, FunctionType):
            return self._made.get(id(x)) or self._rebound(x)
        if isinstance(x, Component):
            return Replay(x, self)
        return self.leaf(x)

    def _rebound(self, function: FunctionType) -> FunctionType:
        """The function with what stands for its globals and for what it captured."""
        scope: dict[str, Any] = {"__builtins__": __builtins__}
        cells = tuple(CellType() for _ in function.__closure__ or ())
        out = FunctionType(function.__code__, scope, function.__name__, None, cells)
        self._made[id(function)] = out                 # it may call itself
        out.__defaults__ = tuple(map(self, function.__defaults__ or ())) or None
        out.__kwdefaults__ = {name: self(x) for name, x in (function.__kwdefaults__ or {}).items()} or None
        names = _names(function.__code__)
        scope.update((name, self.stands_for[id(x)]) for name, x in _BUILT_IN.items() if name in names
                     and id(x) in self.stands_for)
        for name in names & set(function.__globals__):
            scope[name] = self(function.__globals__[name])
        for cell, new in zip(function.__closure__ or (), cells):
            new.cell_contents = self(cell.cell_contents)
        return out


_BUILT_IN: dict[str, Any] = {x.__name__: x for x in (abs, max, min, float, int, round, sum, pow, bool)}


class Replay:
    """A component in a world: its own code, properties and fields."""

    def __init__(self, component: Component, world: World):
        self._component, self._world = component, world

    def __getattr__(self, name: str) -> Any:
        found = next((vars(cls)[name] for cls in type(self._component).__mro__ if name in vars(cls)), None)
        if isinstance(found, FunctionType):
            return self._world(found).__get__(self)
        return self._world.field(self._component, name)

    def __call__(self, *args: object) -> Any:
        return self._world(type(self._component).__call__)(self, *args)


class _Functions:
    """`math`, or NumPy."""

    def __init__(self, module: ModuleType, world: World):
        self._module, self._world = module, world

    def __getattr__(self, name: str) -> Any:
        if name in self._world.functions:
            return self._world.functions[name]
        found = getattr(self._module, name)
        return found if not callable(found) else self._world.unknown(f"{self._module.__name__}.{name}")


class _Module:
    """A module of gemmkit's."""

    def __init__(self, module: ModuleType, world: World):
        self._of, self._world = module, world

    def __getattr__(self, name: str) -> Any:
        return self._world(getattr(self._of, name))


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)
