"""The derivative of a score of attention by what it changes: device code that is written from the score's own.

The score runs once for each way through its branches, on dual numbers whose parts are symbols.
What their tangents have become is a formula, and the branches are its cases. Arrays and numbers that the score has are
arguments of it, as they are of the score.

>>> import math
>>> from gemmkit.kernels.masks import ScoreFunction
>>> f = slope_of(ScoreFunction(lambda s, m, n: 2.0 * math.tanh(s / 2.0) if n < m else 0.5 * s))
>>> float(f(0.0, 5, 3, 0, 0)), float(f(0.0, 3, 5, 0, 0))
(1.0, 0.5)
>>> slope_of(ScoreFunction(lambda s, m, n: s - abs(m - n))) is None          # 1 everywhere
True

Source: dual numbers, as in `gemmkit.functions.Dual`; the enumeration of paths is that of symbolic execution (King, 1976).
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.epilogues import fast
from gemmkit.functions.number_systems import DERIVATIVES
from gemmkit.kernels.masks import ALiBi, PlainScores, Score, ScoreBias, ScoreFunction, SoftCap
from gemmkit.lang import aggregates, checks
from gemmkit.lang.fingerprint import Scalar, annotated
from gemmkit.lang.functions import DeviceFunction
from gemmkit.runtime.arrays import is_array

# --------------------------------------------------------------------------------------------------
# Device code that runs again with other things in place of what it names: arrays, coordinates, functions of `math`.
#
# Device code is plain Python, so that it runs on whatever computes. A `World` says what stands for what: derivatives are
# found so, of epilogues on tensors (`gemmkit.torch.autograd`) and of scores on symbols.

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


# --------------------------------------------------------------------------------------------------
# A score's derivative.

PLACES = "s", "m", "n", "head", "batch"


def slope_of(score: Score) -> ScoreFunction | None:
    """The derivative of a score by its first argument, as a score ``f(s, m, n, head, batch)``; None where it is 1.

    Raises TypeError, naming the score and what it is, for code whose derivative is not known.
    """
    if type(score) in _ADD:
        return None
    if type(score) is SoftCap:
        return _of_soft_cap(float(score.cap))
    return _written(score)


_ADD = PlainScores, ALiBi, ScoreBias                # which a call need not run to know


@lru_cache(maxsize=64)
def _of_soft_cap(cap: float) -> ScoreFunction | None:
    return _written(SoftCap(cap))


def _written(score: Score) -> ScoreFunction | None:
    writer = _Writer()
    try:
        text = writer.text(score)
    except (TypeError, AttributeError, IndexError, ValueError) as error:
        of = score.f.__name__ if isinstance(score, ScoreFunction) and hasattr(score.f, "__name__") else type(score).__name__
        raise TypeError(f"score={of}: the derivative of this score is not known: {error}; write it with + - * / **, "
                        "comparisons, abs, min, max and functions of math") from error
    if text is None:
        return None
    return ScoreFunction(_made(text)(*writer.captured.values()), score.real_places)


@lru_cache(maxsize=256)
def _made(text: str) -> Any:
    """What makes the function of a text. The same text is the same code, which is compiled once."""
    scope: dict[str, Any] = {"math": math, "np": np, "fast": fast, "__name__": __name__}
    name = f"<slope {len(linecache.cache)}>"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    exec(compile(text, name, "exec"), scope)
    return scope["make"]


# --------------------------------------------------------------------------------------------------
# Symbols: terms of a formula, and dual numbers of them.

class Formula:
    """A formula: ``form`` with its operands, terms or constants, in the place of ``{}``. Equal formulas are one object."""

    __slots__ = ("args", "form", "name")

    def __init__(self, form: str, args: tuple[Any, ...], name: str):
        self.form, self.args, self.name = form, args, name


def _literal(x: Formula | float) -> str:
    if isinstance(x, Formula):
        return x.name
    if isinstance(x, float) and not math.isfinite(x):
        return "math.nan" if x != x else "math.inf" if x > 0 else "(-math.inf)"
    return f"({x!r})" if x < 0 else repr(x)


class DualSymbol:
    """A dual number: a term, and its tangent, which is a number of Python's, or a symbol without a tangent."""

    __slots__ = ("tangent", "term", "writer")
    __hash__ = None                                                            # type: ignore[assignment]
    __array_ufunc__ = None             # a NumPy number beside a symbol leaves the operation to it

    def __init__(self, writer: _Writer, term: Formula, tangent: Any = 0.0):
        self.writer, self.term, self.tangent = writer, term, tangent

    def __add__(self, other: object) -> DualSymbol:
        return self.writer.made("{} + {}", (self, other), _plus(self.tangent, _tangent(other)))

    def __radd__(self, other: object) -> DualSymbol:
        return self.writer.made("{} + {}", (other, self), self.tangent)

    def __sub__(self, other: object) -> DualSymbol:
        return self.writer.made("{} - {}", (self, other), _plus(self.tangent, _times(-1.0, _tangent(other))))

    def __rsub__(self, other: object) -> DualSymbol:
        return self.writer.made("{} - {}", (other, self), _times(-1.0, self.tangent))

    def __mul__(self, other: object) -> DualSymbol:
        of_self, of_other = _times(self.tangent, _value(other)), _times(_tangent(other), _value(self))
        return self.writer.made("{} * {}", (self, other), _plus(of_self, of_other))

    def __rmul__(self, other: object) -> DualSymbol:
        return self.writer.made("{} * {}", (other, self), _times(self.tangent, other))

    def __truediv__(self, other: object) -> DualSymbol:
        made = self.writer.made("{} / {}", (self, other))
        above = _plus(self.tangent, _times(-1.0, _times(_tangent(other), _value(made))))
        made.tangent = 0.0 if _is(above, 0.0) else above / _value(other)
        return made

    def __rtruediv__(self, other: object) -> DualSymbol:
        made = self.writer.made("{} / {}", (other, self))
        if not _is(self.tangent, 0.0):
            made.tangent = _times(-1.0, _times(self.tangent, _value(made) / _value(self)))
        return made

    def __pow__(self, other: object) -> DualSymbol:
        if not _is(_tangent(other), 0.0):
            raise TypeError("a power whose exponent depends on the score; write exp(log(x) * y)")
        made = self.writer.made("{} ** {}", (self, other))
        if not _is(self.tangent, 0.0):
            less = _value(self) if _is(other, 2) else _value(self) ** (_value(other) - 1)
            made.tangent = _times(self.tangent, _times(_value(other), less))
        return made

    def __rpow__(self, other: object) -> DualSymbol:
        return self._whole("{} ** {}", other, self)

    def __neg__(self) -> DualSymbol:
        return self.writer.made("-{}", (self,), _times(-1.0, self.tangent))

    def __pos__(self) -> DualSymbol:
        return self

    def __abs__(self) -> DualSymbol:
        return self.writer.made("abs({})", (self,), _times(self.tangent, _value(self).sign()))

    def sign(self) -> DualSymbol:
        return self.writer.made("(1.0 if {0} > 0 else -1.0 if {0} < 0 else 0.0)", (self,))

    # -- numbers that do not depend on the score, and conditions ------------------------------------------------------

    def _whole(self, form: str, *given: Any) -> DualSymbol:
        if not all(_is(_tangent(x), 0.0) for x in given):
            raise TypeError(f"{form.replace('{}', 'x')} of a number that depends on the score")
        return self.writer.made(form, given)

    def __bool__(self) -> bool:
        return self.writer.ways.decide(self.term)

    def __float__(self) -> float:
        raise TypeError("a function of Python's own, or a loop, whose derivative is not known")

    __int__ = __index__ = __float__
    __hash__ = None                                                                              # type: ignore[assignment]


for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    setattr(DualSymbol, f"__{_name}__",
            lambda self, other, form=f"{{}} {_sign} {{}}": self.writer.made(form, (self, other)))
for _name, _sign in (("mod", "%"), ("floordiv", "//"), ("and", "&"), ("rand", "&"), ("or", "|"), ("ror", "|"), ("xor", "^"),
                     ("rxor", "^")):
    setattr(DualSymbol, f"__{_name}__", lambda self, other, form=f"{{}} {_sign} {{}}": self._whole(form, self, other))


class _Array:
    """An array of the score's: its elements are numbers that do not depend on the score."""

    def __init__(self, writer: _Writer, name: str):
        self._writer, self._name = writer, name

    def __getitem__(self, key: Any) -> DualSymbol:
        places = key if isinstance(key, tuple) else (key,)
        if not all(_is(_tangent(x), 0.0) for x in places):
            raise TypeError("an array at a place that depends on the score")
        return self._writer.made(f"{self._name}[{', '.join('{}' for _ in places)}]", places)

    @property
    def shape(self) -> _Array:
        return _Array(self._writer, f"{self._name}.shape")


def _tangent(x: object) -> Any:
    return x.tangent if isinstance(x, DualSymbol) else 0.0


def _value(x: object) -> Any:
    """The same number, which nothing is differentiated by."""
    return DualSymbol(x.writer, x.term) if isinstance(x, DualSymbol) else x


def _is(x: object, number: float) -> bool:
    return not isinstance(x, DualSymbol) and bool(x == number)


def _plus(x: Any, y: Any) -> Any:
    return y if _is(x, 0.0) else x if _is(y, 0.0) else x + y


def _times(x: Any, y: Any) -> Any:
    """A product of derivatives: no factor of 0 is multiplied, so that what is hidden by it need not be finite."""
    if _is(x, 0.0) or _is(y, 0.0):
        return 0.0
    return y if _is(x, 1.0) else x if _is(y, 1.0) else -y if _is(x, -1.0) else -x if _is(y, -1.0) else x * y


# --------------------------------------------------------------------------------------------------
# Functions of symbols.

def _function(form: str, derivative: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        if not isinstance(x, DualSymbol):
            return eval(form.format(repr(x)), {"math": math, "np": np, "fast": fast})
        found = x.writer.made(form, (x,))
        if not _is(x.tangent, 0.0):
            found.tangent = _times(x.tangent, derivative(_value(x), _value(found)))
        return found

    return function


#: By the names of `math`, beside those that `gemmkit.functions.Dual` has.
_MORE: dict[str, Callable[[Any, Any], Any]] = {
    "exp2": lambda x, y: y * math.log(2), "log2": lambda x, y: 1 / (x * math.log(2)),
    "log10": lambda x, y: 1 / (x * math.log(10)), "atan": lambda x, y: 1 / (1 + x * x), "fabs": lambda x, y: x.sign(),
    "erf": lambda x, y: 2 / math.sqrt(math.pi) * functions["exp"](-x * x),
    "erfc": lambda x, y: -2 / math.sqrt(math.pi) * functions["exp"](-x * x), "floor": lambda x, y: 0.0,
    "ceil": lambda x, y: 0.0,
}
functions: dict[str, Callable[..., Any]] = {
    name: _function(f"math.{name}({{}})", derivative) for name, derivative in {**DERIVATIVES, **_MORE}.items()
    if hasattr(math, name)}
for _name in ("cos", "sin", "cosh", "sinh"):           # which derivatives ask a number for
    setattr(DualSymbol, _name, lambda self, of=functions[_name]: of(self))
_FAST = {"exp2": _MORE["exp2"], "log2": _MORE["log2"], "reciprocal": DERIVATIVES["reciprocal"], "tanh": DERIVATIVES["tanh"]}


def _extremum(name: str, sign: str) -> Callable[..., Any]:
    """The larger or the smaller of numbers: of equal ones the first, as Python's own."""
    def function(*given: Any) -> Any:
        given = tuple(given[0]) if len(given) == 1 else given
        first = given[0]
        for other in given[1:]:
            writer = next((x.writer for x in (first, other) if isinstance(x, DualSymbol)), None)
            if writer is None:
                first = getattr(np, f"{name}imum")(first, other).item()
                continue
            tangents = _tangent(first), _tangent(other)
            tangent = tangents[0]
            if not _same(*tangents):
                chosen = f"(np.float32({{}}) if {{}} {sign} {{}} else np.float32({{}}))"
                tangent = writer.made(chosen, (tangents[1], _value(other), _value(first), tangents[0]))
            first = writer.made(f"{name}({{}}, {{}})", (first, other), tangent)
        return first

    return function


def _same(x: object, y: object) -> bool:
    """Whether two derivatives are one: of symbols the same formula."""
    if isinstance(x, DualSymbol) and isinstance(y, DualSymbol):
        return x.term is y.term
    return isinstance(y, (int, float)) and _is(x, y)


def _float(x: Any) -> Any:
    return x.writer.made("float({})", (x,), x.tangent) if isinstance(x, DualSymbol) else float(x)


def _int(x: Any) -> Any:
    return x._whole("int({})", x) if isinstance(x, DualSymbol) else int(x)


_max, _min = _extremum("max", ">"), _extremum("min", "<")
_STANDS_FOR: dict[int, Any] = {
    **{id(getattr(fast, name)): _function(f"fast.{name}({{}})", derivative) for name, derivative in _FAST.items()},
    **PASSED_ON, id(fast.maximum): _max, id(max): _max, id(min): _min, id(float): _float, id(int): _int}


class _Writer(World):
    """Runs a score on symbols, and writes what its tangent has become."""

    def __init__(self) -> None:
        super().__init__(_STANDS_FOR, functions)
        self.captured: dict[str, Any] = {}             # arrays and numbers of the score's, by what the text calls them
        self._named: dict[Any, Any] = {}   # what stands for them
        self._terms: dict[Any, Formula] = {}
        self.ways = Ways("a place")

    # -- what stands for what -----------------------------------------------------------------------------------------

    def leaf(self, x: Any) -> Any:
        return self._own(id(x), x) if is_array(x) or isinstance(x, np.number) else x

    def field(self, component: Component, name: str) -> Any:
        """A number that is a kernel's argument of a component is one here, too."""
        x = getattr(component, name)
        if annotated(type(component)).get(name) is Scalar and isinstance(x, (int, float)) and not isinstance(x, bool):
            kind = np.float32 if isinstance(x, float) else np.int32 if abs(x) < 2**31 else np.int64
            return self._own((id(component), name), kind(x))
        return self(x)

    def _own(self, key: Any, x: Any) -> Any:
        if key not in self._named:
            name = f"{'a' if is_array(x) else 'c'}{len(self.captured)}"
            self.captured[name] = x
            self._named[key] = _Array(self, name) if is_array(x) else DualSymbol(self, self.term(name, ()))
        return self._named[key]

    # -- terms --------------------------------------------------------------------------------------------------------

    def term(self, form: str, args: tuple[Any, ...]) -> Formula:
        key = form, tuple(x if isinstance(x, Formula) else (type(x), repr(x)) for x in args)
        if key not in self._terms:
            self._terms[key] = Formula(form, args, f"x{len(self._terms)}" if args else form)
        return self._terms[key]

    def made(self, form: str, given: tuple[Any, ...], tangent: Any = 0.0) -> DualSymbol:
        """A number of symbols and of Python's numbers."""
        for x in given:
            if not isinstance(x, (DualSymbol, int, float)):
                raise TypeError(f"{type(x).__name__} beside a number of the score")
        return DualSymbol(self, self.term(form, tuple(x.term if isinstance(x, DualSymbol) else x for x in given)), tangent)

    # -- ways through the score ---------------------------------------------------------------------------------------

    def text(self, score: Score) -> str | None:
        """That of the derivative; None where it is 1."""
        places = [DualSymbol(self, self.term(name, ()), float(name == "s")) for name in PLACES][:score.arity]
        run = self(score.f) if isinstance(score, ScoreFunction) else Replay(score, self)
        ways: list[_Way] = []
        while True:
            found = run(*places)
            if not isinstance(found, (DualSymbol, int, float)):
                raise TypeError(f"it returns {type(found).__name__}")
            ways.append(_Way(tuple(self.ways.asked), tuple(self.ways.planned), _tangent(found)))
            if not self.ways.next():
                break
            if len(ways) == MOST_WAYS:
                raise TypeError(f"more than {MOST_WAYS} ways through it")
        if all(_is(way.tangent, 1.0) for way in ways):
            return None
        lines = [f"    def slope({', '.join(PLACES)}):"]
        _write(lines, 2, 0, ways, set())
        words = set(re.findall(r"\w+", "\n".join(lines)))
        self.captured = {name: x for name, x in self.captured.items() if name in words}
        return "\n".join([f"def make({', '.join(self.captured)}):", *lines, "    return slope", ""])


class _Way(NamedTuple):
    """A way through a score: what its branches asked, which way they went, and the derivative at its end."""

    asked: tuple[Formula, ...]
    taken: tuple[bool, ...]
    tangent: Any


def _write(lines: list[str], depth: int, at: int, ways: list[_Way], known: set[str]) -> None:
    """Write what ways have in common from their branch ``at`` on; ``known``: the terms that have been written before."""
    def name_of(x: Any) -> str:
        if isinstance(x, Formula) and x.args and x.name not in known:
            names = list(map(name_of, x.args))
            lines.append(f"{'    ' * depth}{x.name} = {x.form.format(*names)}")
            known.add(x.name)
        return _literal(x)

    first = ways[0]
    if all(_same(first.tangent, way.tangent) for way in ways):
        found = name_of(first.tangent.term if isinstance(first.tangent, DualSymbol) else float(first.tangent))
        lines.append(f"{'    ' * depth}return np.float32({found})")          # of another way it may be whole
        return
    lines.append(f"{'    ' * depth}if {name_of(first.asked[at])}:")
    _write(lines, depth + 1, at + 1, [way for way in ways if way.taken[at]], set(known))
    _write(lines, depth, at + 1, [way for way in ways if not way.taken[at]], known)
