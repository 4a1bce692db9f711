"""Dual numbers of tensors: device code of one element, run on whole tensors, with its derivatives.

A function of an element is plain Python: it runs on anything that computes. Here an element is a tensor of all elements,
with a tangent for each variable (forward mode; for functions of one element that is all of the Jacobian). A branch on an
element is decided both ways: the function runs once for each way through it, and ``torch.where`` takes from each run the
elements that go its way.

Source: dual numbers, as in `gemmkit.functions.Dual`; the enumeration of paths is that of symbolic execution (King, 1976).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gemmkit.functions.slope import MOST_WAYS, Ways

ONE = 1.0                              # the tangent of a variable itself: by any other variable it is the same object
_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)


class Paths(Ways):
    """The ways through a function of tensors; branches ask tensors of truth values."""

    def __init__(self) -> None:
        super().__init__("an element")

    def taken(self) -> Any:
        """Where elements go the way of this run; None where all do."""
        out: Any = None
        for condition, way in zip(self.asked, self.planned):
            here = condition if way else torch.logical_not(condition)
            out = here if out is None else torch.logical_and(out, here)
        return out


def tangents(paths: Paths, run: Callable[[], Any], count: int, zero: torch.Tensor) -> list[Any]:
    """Of what ``run()`` returns, the derivatives by variables 0 to ``count`` - 1, over all ways through it; None where it
    depends on nothing of a variable. Variables that it depends on alike (a product, and the bias that is added to it) have
    one tensor. Raises TypeError where there are more than `MOST_WAYS`."""
    out: list[Any] = [None] * count
    for _ in range(MOST_WAYS):
        made = run()
        found = made.tangents if isinstance(made, DualTensor) else {}
        where = paths.taken()

        def joined(here: object, before: object, where: object = where) -> Any:
            if where is None or (here is None and before is None):
                return here
            return torch.where(where, zero if here is None else here, zero if before is None else before)

        out = _once(joined, ((found.get(n), out[n]) for n in range(count)))
        if not paths.next():
            return _once(lambda x: torch.full_like(zero, x) if isinstance(x, (float, int, complex)) else x, zip(out))
    raise TypeError(f"more than {MOST_WAYS} ways through it")


def values(paths: Paths, run: Callable[[], Any], zero: torch.Tensor) -> torch.Tensor:
    """What ``run()`` returns, over all ways through it, in zero's dtype. Raises TypeError where there are more than
    `MOST_WAYS`."""
    out = zero
    for _ in range(MOST_WAYS):
        made = run()
        found = made.condition if isinstance(made, Truth) else made.value if isinstance(made, DualTensor) else made
        found, where = torch.as_tensor(found, dtype=zero.dtype, device=zero.device), paths.taken()
        out = found if where is None else torch.where(where, found, out)
        if not paths.next():
            return out
    raise TypeError(f"more than {MOST_WAYS} ways through it")


def _once(function: Callable[..., Any], many: Iterable[tuple[Any, ...]]) -> list[Any]:
    """``function`` of each of ``many``, called once for the same objects: then the results are the same, too."""
    known: dict[tuple[int, ...], Any] = {}
    out = []
    for given in many:
        key = tuple(map(id, given))
        if key not in known:
            known[key] = function(*given)
        out.append(known[key])
    return out


def _scaled(slope: torch.Tensor, tangent: torch.Tensor) -> Any:
    return tangent if slope is ONE else slope if tangent is ONE else slope * tangent


class Truth:
    """Of each element, whether a condition holds."""

    def __init__(self, condition: torch.Tensor | Truth, paths: Paths):
        self.condition, self.paths = condition, paths

    def __bool__(self) -> bool:
        return self.paths.decide(self.condition)

    def __and__(self, other: Truth | torch.Tensor) -> Truth:
        return Truth(torch.logical_and(self.condition, _condition(other, self.condition)), self.paths)

    def __or__(self, other: Truth | torch.Tensor) -> Truth:
        return Truth(torch.logical_or(self.condition, _condition(other, self.condition)), self.paths)

    def __invert__(self) -> Truth:
        return Truth(torch.logical_not(self.condition), self.paths)

    __rand__, __ror__ = __and__, __or__


def _condition(x: object, like: torch.Tensor) -> Any:
    return x.condition if isinstance(x, Truth) else torch.full_like(like, bool(x))


class DualTensor:
    """A tensor of values, and of each variable that they depend on the derivatives."""

    __slots__ = ("paths", "tangents", "value")
    __hash__ = None                                                            # type: ignore[assignment]

    def __init__(self, value: torch.Tensor, paths: Paths, tangents: dict[int, Any] | None = None):
        self.value, self.paths, self.tangents = value, paths, tangents or {}

    def chain(self, value: torch.Tensor, slope: torch.Tensor) -> DualTensor:
        """A function of these numbers: its values and its derivative there."""
        scaled = _once(lambda t: _scaled(slope, t), ((t,) for t in self.tangents.values()))
        return DualTensor(value, self.paths, dict(zip(self.tangents, scaled)))

    def _sum(self, value: torch.Tensor, other: DualTensor, of_self: torch.Tensor, of_other: torch.Tensor) -> DualTensor:
        def added(mine: torch.Tensor, theirs: torch.Tensor) -> Any:
            if mine is None or theirs is None:
                return _scaled(of_other, theirs) if mine is None else _scaled(of_self, mine)
            return _scaled(of_self, mine) + _scaled(of_other, theirs)

        names = [*self.tangents, *(n for n in other.tangents if n not in self.tangents)]
        sums = _once(added, ((self.tangents.get(n), other.tangents.get(n)) for n in names))
        return DualTensor(value, self.paths, dict(zip(names, sums)))

    # -- arithmetic -----------------------------------------------------------------------------------------------

    def __add__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        if isinstance(other, DualTensor):
            return self._sum(self.value + other.value, other, ONE, ONE)
        return self.chain(self.value + _number(other), ONE)

    def __sub__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        if isinstance(other, DualTensor):
            return self._sum(self.value - other.value, other, ONE, -1)
        return self.chain(self.value - _number(other), ONE)

    def __rsub__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        return self.chain(_number(other) - self.value, -1)

    def __mul__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        if isinstance(other, DualTensor):
            return self._sum(self.value * other.value, other, other.value, self.value)
        return self.chain(self.value * _number(other), _number(other))

    def __truediv__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        if isinstance(other, DualTensor):
            value = self.value / other.value
            return self._sum(value, other, 1 / other.value, -value / other.value)
        return self.chain(self.value / _number(other), 1 / _number(other))

    def __rtruediv__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        value = _number(other) / self.value
        return self.chain(value, -value / self.value)

    def __pow__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        if isinstance(other, DualTensor):
            raise TypeError("a power whose exponent is not a constant; write exp(log(x) * y)")
        return self.chain(self.value ** other, other * self.value ** (other - 1))

    def __neg__(self) -> DualTensor:
        return self.chain(-self.value, -1)

    def __pos__(self) -> DualTensor:
        return self

    def __abs__(self) -> DualTensor:
        _check_real(self.value, "abs")
        return self.chain(torch.abs(self.value), torch.sign(self.value))

    def __mod__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        return self._whole("%", self.value % _whole_number(other))

    def __floordiv__(self, other: DualTensor | torch.Tensor | float) -> DualTensor:
        return self._whole("//", self.value // _whole_number(other))

    def _whole(self, what: str, value: torch.Tensor) -> DualTensor:
        if self.tangents:
            raise TypeError(f"{what} of a number that is to be differentiated")
        return DualTensor(value, self.paths)

    __radd__, __rmul__ = __add__, __mul__

    # -- comparisons ----------------------------------------------------------------------------------------------

    def _compared(self, function: Callable[..., Any], other: DualTensor | torch.Tensor | float) -> Truth:
        if function not in (torch.eq, torch.ne):
            _check_real(self.value, "an order")
        return Truth(function(self.value, other.value if isinstance(other, DualTensor) else _number(other)), self.paths)

    def __bool__(self) -> bool:
        return bool(self._compared(torch.ne, 0))

    def __float__(self) -> float:
        raise TypeError("float(x), int(x) or a function of Python's own, whose derivative is not known")

    __int__ = __index__ = __float__
    __hash__ = None                                                                              # type: ignore[assignment]


for _name in "lt", "le", "gt", "ge", "eq", "ne":
    setattr(DualTensor, f"__{_name}__", lambda self, other, function=getattr(torch, _name): self._compared(function, other))


def _number(x: Any) -> Any:
    """A constant: a number of Python's, whose type gives way to the tensor's."""
    return x if isinstance(x, (bool, int, float, complex)) else x.item() if hasattr(x, "item") else float(x)


def _whole_number(x: object) -> Any:
    return x.value if isinstance(x, DualTensor) else _number(x)


def _check_real(x: Any, what: str) -> None:
    if x.is_complex():
        raise TypeError(f"{what} of a complex number, which has no complex derivative")


# -- functions --------------------------------------------------------------------------------------------------------

def _function(name: str, derivative: Callable[[Any, Any], Any], is_real: bool = False) -> Callable[[Any], Any]:
    """A function of dual tensors, and of plain numbers as `math` has it."""
    of_tensors, of_numbers = getattr(torch, name), getattr(math, name, None)

    def function(x: object) -> Any:
        if not isinstance(x, DualTensor):
            return of_numbers(x) if of_numbers is not None else of_tensors(torch.tensor(x)).item()
        if is_real:
            _check_real(x.value, name)
        value = of_tensors(x.value)
        return x.chain(value, derivative(x.value, value))

    return function


def _nothing(x: object) -> Any:
    return torch.zeros_like(x)


#: Functions of one number, by the names that `math` and NumPy have for them.
functions: dict[str, Callable[..., Any]] = {
    "exp": _function("exp", lambda x, y: y),
    "exp2": _function("exp2", lambda x, y: y * math.log(2)),
    "expm1": _function("expm1", lambda x, y: y + 1),
    "log": _function("log", lambda x, y: 1 / x),
    "log2": _function("log2", lambda x, y: 1 / (x * math.log(2))),
    "log10": _function("log10", lambda x, y: 1 / (x * math.log(10))),
    "log1p": _function("log1p", lambda x, y: 1 / (1 + x)),
    "sqrt": _function("sqrt", lambda x, y: 0.5 / y),
    "reciprocal": _function("reciprocal", lambda x, y: -y * y),
    "sin": _function("sin", lambda x, y: torch.cos(x)),
    "cos": _function("cos", lambda x, y: -torch.sin(x)),
    "tan": _function("tan", lambda x, y: 1 + y * y),
    "atan": _function("atan", lambda x, y: 1 / (1 + x * x)),
    "sinh": _function("sinh", lambda x, y: torch.cosh(x)),
    "cosh": _function("cosh", lambda x, y: torch.sinh(x)),
    "tanh": _function("tanh", lambda x, y: 1 - y * y),
    "erf": _function("erf", lambda x, y: _TWO_OVER_ROOT_PI * torch.exp(-x * x), is_real=True),
    "erfc": _function("erfc", lambda x, y: -_TWO_OVER_ROOT_PI * torch.exp(-x * x), is_real=True),
    "floor": _function("floor", lambda x, y: _nothing(x), is_real=True),
    "ceil": _function("ceil", lambda x, y: _nothing(x), is_real=True),
}
functions["fabs"] = functions["absolute"] = functions["abs"] = abs
functions["arctan"] = functions["atan"]
functions["maximum"] = max
functions["minimum"] = min
functions["square"] = lambda x: x * x
functions["isnan"] = lambda x: x != x if isinstance(x, DualTensor) else math.isnan(x)
