"""Epilogues run again on tensors: what each of D's elements depends on, and how much.

An epilogue is device code of one element. `Replay` stands for it with other things in the place of its arrays
(`Leaf`: an operand of the operator), of coordinates and of mathematical functions, so that the same code runs on dual
tensors (`gemmkit.torch.dual_tensors`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from gemmkit import fast
from gemmkit.components import Component
from gemmkit.epilogues import Bias, Default, Epilogue, Residual
from gemmkit.lang import returned, values
from gemmkit.lang.functions import DeviceFunction
from gemmkit.runtime.arrays import is_array
from gemmkit.torch.dual_tensors import ONE, DualTensor, Paths, functions, tangents

X = 0                                  # the variable that is the product itself; operands follow


class Recipe(NamedTuple):
    """An epilogue that is made of operands: ``make(*operands)``, and what it looks like.

    ``model`` is one made of placeholders, which say where each operand is.
    """

    make: Callable[..., Epilogue]
    names: tuple[str, ...]
    model: Epilogue
    placeholders: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, given: Any, name: str = "epilogue") -> Recipe:
        """Of an epilogue, or of a function of tensors that makes one."""
        if given is None:
            return cls(Default, (), Default(), ())
        if isinstance(given, Epilogue):
            return cls(lambda: given, (), given, ())
        code = getattr(given, "__code__", None)
        if code is None:
            raise TypeError(f"{name}={given!r}: an Epilogue, or a function of tensors that makes one, is needed")
        names = code.co_varnames[:code.co_argcount]
        tried: list[Exception] = []
        for dimensions in itertools.product((1, 2), repeat=len(names)):
            placeholders = tuple(np.zeros((1,) * n, np.float32) for n in dimensions)
            try:
                model = given(*placeholders)
            except Exception as error:                     # whatever a user's function raises
                tried.append(error)
                continue
            if not isinstance(model, Epilogue):
                raise TypeError(f"{name}={given!r} made {model!r}; an Epilogue is needed")
            return cls(given, names, model, placeholders)
        first = tried[0]
        raise TypeError(f"{name}={given!r}: called with arrays it raised {type(first).__name__}: {first}") from first

    @property
    def adds_only(self) -> bool:
        """Whether D is the product and operands added to it: then nothing need be kept of the product."""
        return all(type(stage) in (Bias, Residual, Default) for stage in self.model.stages())

    def own_ndim(self, n: int) -> int | None:
        """How many dimensions one product's operand ``n`` has; None where a stack's cannot have one for each."""
        for stage in self.model.stages():
            for field, own in stage.array_dimensions().items():
                if getattr(stage, field) is self.placeholders[n]:
                    return own
        return None

    def refuses(self) -> str | None:
        """Why it has no derivative of each element by itself; None if it has."""
        for stage in self.model.stages():
            kind = type(stage).__qualname__
            if stage.writes:
                return f"{kind} writes an array beside D"
            if stage.finishes_blocks or stage.is_last or stage.neighbours > 1 or stage.stores_itself:
                return f"{kind} sees more than one element of D"
            if type(stage).__call__ is Epilogue.__call__ and not stage.passes_on:
                return f"{kind} finishes tiles, and has no code of one element"
            if type(stage).__name__ == "LinearCombination":
                return "LinearCombination finishes tiles (give c, and epilogues.Scale)"
            if stage.with_batch:
                return f"{kind} asks for the number of the product"
        return None


# -- what stands for what ---------------------------------------------------------------------------------------------

class Leaf:
    """An array in device code, indexed by coordinates."""

    def __init__(self, tensor: Any, variable: int, at: Coordinates):
        self.tensor, self.variable, self.at = tensor, variable, at

    def __getitem__(self, key: Any) -> DualTensor:
        seen = self.at.seen(self.tensor, key)
        if seen is None:                                   # (no coordinates as they are: a table)
            index = tuple(k.value if isinstance(k, DualTensor) else k for k in (key if isinstance(key, tuple) else (key,)))
            found = self.tensor[index]
            if self.variable >= 0:
                raise TypeError("an operand indexed by something else than its row and column")
            return DualTensor(found, self.at.paths)
        known = self.at.read.setdefault(self.variable, seen.shape)
        if self.variable >= 0 and known != seen.shape:
            raise TypeError("an operand that is read both by rows and by columns")
        seen = seen.to(self.at.dtype)
        return DualTensor(seen, self.at.paths, {self.variable: ONE} if self.variable >= 0 else None)


class Coordinates:
    """The rows and columns of D, as device code is given them."""

    def __init__(self, x: Any, paths: Paths, dtype: Any, read: dict[int, Any]):
        rows, columns = x.shape[-2:]
        self.paths, self.dtype, self.read = paths, dtype, read
        self.m = DualTensor(torch.arange(rows, device=x.device).unsqueeze(-1), paths)
        self.n = DualTensor(torch.arange(columns, device=x.device), paths)

    def seen(self, tensor: Any, key: Any) -> Any:
        """A tensor as it lies along D where ``key`` are D's coordinates; None for any other key."""
        if key is self.m:
            return tensor.unsqueeze(-1)
        if key is self.n:
            return tensor.unsqueeze(-2)
        if isinstance(key, tuple) and len(key) == 2 and key[0] is self.m and key[1] is self.n:
            return tensor
        return None


class _Functions:
    """`math`, or NumPy, of dual tensors."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name in functions:
            return functions[name]
        found = getattr(self._module, name)
        return found if not callable(found) else _unknown(f"{self._module.__name__}.{name}")


def _unknown(name: str) -> Callable[..., Any]:
    def raises(*args: Any) -> Any:
        if any(isinstance(x, DualTensor) for x in args):
            raise TypeError(f"{name}, whose derivative is not known")
        raise TypeError(f"{name} in an epilogue that is to be differentiated")

    return raises


#: What device code calls of gemmkit's own: by the object, what stands for it.
_STANDS_FOR: dict[int, Any] = {
    **{id(getattr(fast, name)): functions[name] for name in fast.__all__},
    id(returned.number): lambda component, method, value, like: value,
    id(returned.truth): lambda component, method, value: value,
    id(values.convert): lambda dtype, value: value,
    id(abs): abs,
}


class Replay:
    """A component with leaves for its arrays: its own code, properties and fields."""

    def __init__(self, component: Any, world: Callable[[Any], Any]):
        self._component, self._world = component, world

    def __getattr__(self, name: str) -> Any:
        found = next((vars(cls)[name] for cls in type(self._component).__mro__ if name in vars(cls)), None)
        if isinstance(found, FunctionType):
            return self._world(found).__get__(self)
        return self._world(getattr(self._component, name))

    def __call__(self, *args: Any) -> Any:
        return self._world(type(self._component).__call__)(self, *args)


def _world(leaves: dict[int, Leaf], at: Coordinates) -> Callable[[Any], Any]:
    """What stands for a value in code that is run again."""
    made: dict[int, Any] = {}

    def of(x: Any) -> Any:
        if id(x) in leaves:
            return leaves[id(x)]
        if id(x) in _STANDS_FOR:
            return _STANDS_FOR[id(x)]
        if isinstance(x, ModuleType):
            return _Functions(x) if x.__name__ in ("math", "numpy") else _Module(x, of) if x.__name__.startswith(
                "gemmkit") else x
        if isinstance(x, DeviceFunction):
            return of(x.function)
        if isinstance(x, FunctionType):
            if id(x) not in made:
                made[id(x)] = _rebound(x, of, made)
            return made[id(x)]
        if isinstance(x, Component):
            return Replay(x, of)
        if is_array(x) or isinstance(x, torch.Tensor):
            tensor = x if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x), device=at.m.value.device)
            return Leaf(tensor, -1, at)
        return x

    return of


class _Module:
    """A module of gemmkit's in code that is run again."""

    def __init__(self, module: ModuleType, world: Callable[[Any], Any]):
        self._of, self._world = module, world

    def __getattr__(self, name: str) -> Any:
        return self._world(getattr(self._of, name))


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _rebound(function: FunctionType, world: Callable[[Any], Any], made: dict[int, Any]) -> FunctionType:
    """The function with what stands for its globals and for what it captured."""
    scope: dict[str, Any] = {"__builtins__": __builtins__}
    cells = tuple(CellType() for _ in function.__closure__ or ())
    out = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    out.__kwdefaults__ = function.__kwdefaults__
    made[id(function)] = out                               # it may call itself
    for name in _names(function.__code__) & set(function.__globals__):
        scope[name] = world(function.__globals__[name])
    for cell, new in zip(function.__closure__ or (), cells):
        new.cell_contents = world(cell.cell_contents)
    return out


# -- partial derivatives ----------------------------------------------------------------------------------------------

def partials(recipe: Recipe, x: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Of each element of D, the derivative by the product's element ``x``, and by what it reads of each operand; and of each
    operand its shape as it lies along D (a vector of columns (1, N), of rows (M, 1)).

    ``x`` is (..., M, N). A derivative is a tensor to be broadcast along it; None where D depends on nothing of an operand.
    Where D depends on an operand as on x (a bias), the two are one tensor.
    Raises TypeError, naming what it is, for code whose derivative is not known.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    paths = Paths()
    read: dict[int, Any] = {}
    zero, wide = torch.zeros((), dtype=dtype, device=x.device), x.to(dtype)

    def run() -> Any:
        at = Coordinates(x, paths, dtype, read)
        leaves = {id(p): Leaf(t, 1 + n, at) for n, (p, t) in enumerate(zip(recipe.placeholders, operands))}
        return Replay(recipe.model, _world(leaves, at))(DualTensor(wide, paths, {X: ONE}), at.m, at.n)

    try:
        found = tangents(paths, run, 1 + len(operands), zero)
    except TypeError as error:
        raise TypeError(f"the derivative of {recipe.model!r} is not known: {error}; give derivative=") from error
    return found, [read.get(1 + n) for n in range(len(operands))]
