"""What the derivative of an operator is: which products, of what, and what must be kept for them.

    X = A B + C,  D = e(X, operands);      dX = dD e'(X),  dA = dX B^H,  dB = A^H dX,  dC = dX

In a semiring whose ``add`` picks one of its arguments every element of D is one product A_ik * B_kj: its gradient goes to
these two, by the k that `gemmkit.select` gives. One object decides (`Derivative`): operators, `gemmkit.matmul` and the tests
ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gemmkit.config import TRANSFORMS, Config
from gemmkit.operators import COMPLEX, Algebra, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.operators.semiring import Semiring, plus, selects
from gemmkit.torch.dual_tensors import DualTensor, Paths, tangents
from gemmkit.torch.product import gradients, product, summed_to
from gemmkit.torch.replay import Recipe, partials

_ORDINARY = FPUOp, MMAOp, WGMMAOp, WMMAOp
_WHAT_WOULD_DO = "; take it apart into operators that have derivatives, or detach its operands"


@dataclass(frozen=True)
class Derivative:
    """The derivative of an operator.

    ``refuses`` says why there is none (None: there is one); ``keeps`` what a call whose gradient is wanted gives beside D:
    "product" (X, where e is more than a sum), "index" (the k of a semiring) or "" for nothing.
    """

    recipe: Recipe
    a_form: str
    b_form: str
    semiring: Any
    given: Callable[..., Any] | None
    refuses: str | None

    @classmethod
    def of(cls, conf: Config | None, components: dict[str, Any], recipe: Recipe, forms: tuple[str, str],
           given: Callable[..., Any] | None) -> Derivative:
        operator = components.get("operator", getattr(conf, "operator", None))
        semiring = operator if isinstance(operator, Semiring) else None
        why = _refusal(conf, components, operator, recipe, forms, given)
        return cls(recipe, *forms, semiring, given, why)

    @property
    def keeps(self) -> str:
        if self.refuses is not None:
            return ""
        if self.semiring is not None:
            return "index"
        return "" if self.given is None and self.recipe.adds_only else "product"

    def check(self, name: str) -> None:
        """Raise NotImplementedError, naming the operator and why, where there is none."""
        if self.refuses is not None:
            raise NotImplementedError(f"{name} has no derivative: {self.refuses}{_WHAT_WOULD_DO}")

    def __call__(self, grad: Any, of_kept: Any, kept: Any, a: Any, b: Any, c: Any, operands: Sequence[Any],
                 needed: Sequence[bool]) -> list[Any]:
        """The gradients of a, b, c and each operand from that of D and (None: none) that of the product that was kept.

        ``needed`` says of each of them whether it is wanted; where it is not, None is returned.
        """
        if self.semiring is not None:
            return [*_selected(self.semiring, grad, kept, a, b), None]
        out: list[Any] = [None] * (3 + len(operands))
        of_x = grad
        if self.keeps == "product":
            x = self._product(a, b, c) if kept is None else kept
            found, shapes = self._partials(x, operands)
            of_d = of_x = None if grad is None else _times(grad, found[0], x.dtype)
            if of_kept is not None:
                of_x = of_kept if of_x is None else of_x + of_kept
        else:
            of_d, found, shapes = grad, [None] * (1 + len(operands)), self._shapes(operands)
        if of_x is not None:
            out[:2] = gradients(of_x, a, b, tuple(needed[:2]), self.a_form, self.b_form)
            if needed[2] and c is not None:
                out[2] = summed_to(of_x, c.shape).to(c.dtype)
        # Behind the products, which have dX in memory: torch.compile then sums what is there, and computes it once.
        for n, (operand, partial, shape) in enumerate(zip(operands, found[1:], shapes)):
            if needed[3 + n] and grad is not None and (partial is not None or self.keeps != "product"):
                is_there = partial is None or (partial is found[0] and not _is_wider(operand, of_d))
                out[3 + n] = _of_operand(of_d if is_there else _times(grad, partial, _wide(grad)), operand, shape)
        return out

    def _product(self, a: Any, b: Any, c: Any) -> Any:
        found = product(a, b, self.a_form, self.b_form)
        return found if c is None else found + c

    def _partials(self, x: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        if self.given is None:
            return partials(self.recipe, x, operands)
        found = self.given(x, *operands)
        many = list(found) if isinstance(found, (tuple, list)) else [found]
        if not 1 <= len(many) <= 1 + len(operands):
            raise ValueError(f"derivative= returned {len(many)} tensors; the derivative of D by the product, and those by "
                             f"the {len(operands)} operands, are at most {1 + len(operands)}")
        return many + [None] * (1 + len(operands) - len(many)), self._shapes(operands)

    def _shapes(self, operands: Sequence[Any]) -> list[Any]:
        """Of each operand its shape as it lies along D, by the field ``along`` of what reads it."""
        out = []
        for operand, (along, own) in zip(operands, self._lie):
            shape = operand.shape
            own = own or operand.dim()
            out.append(shape if own != 1 else (*shape[:-1], 1, shape[-1]) if along == "N" else (*shape, 1))
        return out

    @cached_property
    def _lie(self) -> list[tuple[str, int | None]]:
        """Of each operand along what it lies, and its dimensions (None: all that it has)."""
        out: list[tuple[str, int | None]] = []
        for placeholder in self.recipe.placeholders:
            found: tuple[str, int | None] = "N", None
            for stage in self.recipe.model.stages():
                for field, dimensions in stage.array_dimensions().items():
                    if getattr(stage, field) is placeholder:
                        found = getattr(stage, "along", "N"), dimensions
            out.append(found)
        return out


def _of_operand(full: Any, operand: Any, shape: Any) -> Any:
    """The gradient of an operand of an epilogue, which lies along D in this shape: summed along what it was broadcast
    along."""
    if full.dim() == 2 and operand.dim() == 1 and shape == (1, full.shape[1]) and full.dtype == operand.dtype:
        return full.sum(0)                                 # adds up in float32, and rounds once
    full = full.expand(torch.broadcast_shapes(full.shape, shape))
    return summed_to(full, shape, _wide(full)).reshape(operand.shape).to(operand.dtype)


def _is_wider(operand: Any, of_x: Any) -> bool:
    """Whether an operand's dtype holds more than dX's, to which dX has been rounded."""
    return bool(torch.promote_types(operand.dtype, of_x.dtype) != of_x.dtype)


def _wide(x: Any) -> Any:
    """The dtype that elements of a gradient are added up in."""
    return torch.promote_types(x.dtype, torch.float32)


def _times(grad: Any, partial: Any, dtype: Any) -> Any:
    """dD times a derivative: of complex numbers its conjugate."""
    if partial is None:
        return torch.zeros_like(grad, dtype=dtype)
    return (grad * (partial.conj() if torch.is_tensor(partial) and partial.is_complex() else partial)).to(dtype)


# -- semirings --------------------------------------------------------------------------------------------------------

def _selected(semiring: Semiring, grad: Any, index: Any, a: Any, b: Any) -> list[Any]:
    """The gradients of A and B in a semiring that selects, where ``index`` says which k is D's; -1 is none.

    All are stacks (..., M, K), (..., K, N) and (..., M, N), of which a and b may be broadcast along D's.
    """
    if grad is None:
        return [None, None]
    if not a.shape[-1]:                                    # no k is any element's
        return [torch.zeros_like(a), torch.zeros_like(b)]
    stack = index.shape[:-2]
    of_all_a, of_all_b = a.expand(*stack, *a.shape[-2:]), b.expand(*stack, *b.shape[-2:])
    k = index.to(torch.int64)
    grad = torch.where(k < 0, torch.zeros_like(grad), grad)
    k = k.clamp(min=0)
    if semiring.mul is plus:
        of_a = of_b = grad
    else:
        of_a, of_b = (torch.zeros_like(grad) if t is None else grad * t
                      for t in _of_factors(semiring.mul, of_all_a.gather(-1, k), of_all_b.gather(-2, k)))
    return [_scattered(of_a, -1, k, of_all_a, a), _scattered(of_b, -2, k, of_all_b, b)]


def _scattered(gradient: Any, dim: int, k: Any, of_all: Any, operand: Any) -> Any:
    """The gradient of an operand: each element of D's goes to the k that decided, and stacks that it was broadcast along
    are summed."""
    dtype = _wide(gradient)
    found = torch.zeros(of_all.shape, dtype=dtype, device=operand.device).scatter_add(dim, k, gradient.to(dtype))
    return summed_to(found, operand.shape).to(operand.dtype)


def _of_factors(mul: Callable[[Any, Any], Any], x: Any, y: Any) -> list[Any]:
    """The derivatives of a semiring's mul by both factors."""
    paths, one = Paths(), torch.ones_like(x)
    given = DualTensor(x, paths, {0: one}), DualTensor(y, paths, {1: one})
    return tangents(paths, lambda: mul(*given), 2, torch.zeros_like(x))


# -- what has none ----------------------------------------------------------------------------------------------------

def _refusal(conf: Config | None, components: dict[str, Any], operator: Any, recipe: Recipe, forms: tuple[str, str],
             given: Callable[..., Any] | None) -> str | None:
    """Why an operator has no derivative; None if it has."""
    def part(name: str) -> Any:
        return components.get(name, getattr(conf, name, None))

    for name in TRANSFORMS:
        transform = part(name)
        if transform is not None and not transform.is_identity:
            return f"{name}={transform!r} changes elements on the way"
    if components.get("condition") is not None or part("observe_a") is not None:
        return "condition= and observe_a= decide more than D's elements"
    if isinstance(operator, Semiring):
        if not selects(operator):
            return f"operator={operator!r} combines all products, so that no k decides"
        if recipe.model.stages() and not recipe.model.passes_on:
            return f"operator={operator!r} has an epilogue, and gemmkit.select none"
        if forms != ("plain", "plain"):
            return f"operator={operator!r} has a matrix with structure"
        if not _is_known(operator.mul):
            return f"operator={operator!r}: its mul calls what has no known derivative"
        return None
    if isinstance(operator, Algebra):
        if operator.table != COMPLEX.table:
            return f"operator={operator!r} is an algebra whose adjoint is not known"
    elif operator is not None and (not isinstance(operator, _ORDINARY) or any(
            getattr(type(operator), method, None) is not getattr(kind, method, None)
            for kind in _ORDINARY if isinstance(operator, kind) for method in ("multiply", "combine", "mma"))):
        return f"operator={operator!r} multiplies in its own way"
    return recipe.refuses() if given is None else None


def _is_known(mul: Callable[[Any, Any], Any]) -> bool:
    """Whether a semiring's mul runs on dual tensors."""
    try:
        _of_factors(mul, torch.ones((1, 1)), torch.ones((1, 1)))
    except TypeError:
        return False
    return True
