"""What the derivative of an operator is: which products, of what, and what must be kept for them.

    X = A B + C,  D = e(X, operands);      dX = dD e'(X),  dA = dX B^H,  dB = A^H dX,  dC = dX

In a semiring whose ``add`` picks one of its arguments every element of D is one product A_ik * B_kj: its gradient goes to
these two, by the k that `gemmkit.functions.select` gives. One object decides (`Derivative`): operators, `gemmkit.matmul`
and the tests ask it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from gemmkit.components import held_values
from gemmkit.epilogues import Bias, Default, Epilogue, Residual, Store, fast
from gemmkit.functions.matmul import matmul as multiply_matrices
from gemmkit.functions.number_systems import select
from gemmkit.functions.slope import PASSED_ON, Replay, World
from gemmkit.kernels.config import TRANSFORMS, Config
from gemmkit.operators import COMPLEX, Algebra, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.operators.algebra import Semiring, plus, selects
from gemmkit.plans.problem import check_mapping
from gemmkit.runtime.arrays import is_array
from gemmkit.torch import product as forms
from gemmkit.torch.dual import ONE, DualTensor, Paths, functions, tangents
from gemmkit.torch.product import (
    autocast,
    batched_by,
    check_dtypes,
    gradients,
    known,
    product,
    products,
    result_shape,
    summed_to,
)

# --------------------------------------------------------------------------------------------------
# Epilogues run again on tensors: what each of D's elements depends on, and how much.
#
# An epilogue is device code of one element. A `gemmkit.functions.slope.Replay` stands for it with other things in the
# place of its arrays (`Leaf`: an operand of the operator), of coordinates and of mathematical functions, so that the same
# code runs on dual tensors (`gemmkit.torch.dual`).

X = 0                                  # the variable that is the product itself; operands follow


class EpilogueRecipe(NamedTuple):
    """An epilogue that is made of operands: ``make(*operands)``, and what it looks like.

    ``model`` is one made of placeholders, which say where each operand is.
    """

    make: Callable[..., Epilogue]
    names: tuple[str, ...]
    model: Epilogue
    placeholders: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, given: Any, name: str = "epilogue") -> EpilogueRecipe:
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
                return f"{kind} writes another array than D"
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

    def __init__(self, tensor: torch.Tensor, variable: int, at: OutputCoordinates):
        self.tensor, self.variable, self.at = tensor, variable, at

    def __getitem__(self, key: object) -> DualTensor:
        seen = self.at.seen(self.tensor, key)
        if seen is None:                                   # (no coordinates as they are: a table)
            keys = key if isinstance(key, tuple) else (key,)
            found = self.tensor[tuple(k.value.clamp(0, self.tensor.shape[axis] - 1) if isinstance(k, DualTensor) else k
                                      for axis, k in enumerate(keys))]
            if self.variable >= 0:
                raise TypeError("an operand indexed by something else than its row and column")
            return DualTensor(found.float() if found.dtype in forms.NARROW else found, self.at.paths)
        known = self.at.read.setdefault(self.variable, seen.shape)
        if self.variable >= 0 and known != seen.shape:
            raise TypeError("an operand that is read both by rows and by columns")
        seen = seen.to(self.at.dtype)
        return DualTensor(seen, self.at.paths, {self.variable: ONE} if self.variable >= 0 else None)


class OutputCoordinates:
    """The rows and columns of D, as device code is given them."""

    def __init__(self, x: torch.Tensor, paths: Paths, dtype: torch.dtype | None, read: dict[int, Any]):
        rows, columns = x.shape[-2:]
        self.paths, self.dtype, self.read = paths, dtype, read
        self.m = DualTensor(torch.arange(rows, device=x.device).unsqueeze(-1), paths)
        self.n = DualTensor(torch.arange(columns, device=x.device), paths)

    def seen(self, tensor: torch.Tensor, key: object) -> Any:
        """A tensor as it lies along D where ``key`` are D's coordinates; None for any other key."""
        if key is self.m:
            return tensor.unsqueeze(-1)
        if key is self.n:
            return tensor.unsqueeze(-2)
        if isinstance(key, tuple) and len(key) == 2 and key[0] is self.m and key[1] is self.n:
            return tensor
        return None


class TensorWorld(World):
    """Device code on tensors. ``leaves``: by the ids of placeholders, the operands that they stand for."""

    def __init__(self, leaves: dict[int, Leaf], at: OutputCoordinates):
        super().__init__({**_STANDS_FOR, **leaves}, functions)
        self.at = at

    def leaf(self, x: Any) -> Any:
        if is_array(x) or isinstance(x, torch.Tensor):
            tensor = x if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x), device=self.at.m.value.device)
            return Leaf(tensor, -1, self.at)
        return x

    def unknown(self, name: str) -> Callable[..., Any]:
        def raises(*args: object) -> Any:
            if any(isinstance(x, DualTensor) for x in args):
                raise TypeError(f"{name}, whose derivative is not known")
            raise TypeError(f"{name} in an epilogue that is to be differentiated")

        return raises


#: What device code calls of gemmkit's own: by the object, what stands for it.
_STANDS_FOR: dict[int, Any] = {**{id(getattr(fast, name)): functions[name] for name in fast.__all__}, **PASSED_ON}


# -- partial derivatives ----------------------------------------------------------------------------------------------

def partials(recipe: EpilogueRecipe, x: torch.Tensor, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
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
        at = OutputCoordinates(x, paths, dtype, read)
        leaves = {id(p): Leaf(t, 1 + n, at) for n, (p, t) in enumerate(zip(recipe.placeholders, operands))}
        return Replay(recipe.model, TensorWorld(leaves, at))(DualTensor(wide, paths, {X: ONE}), at.m, at.n)

    try:
        found = tangents(paths, run, 1 + len(operands), zero)
    except TypeError as error:
        raise TypeError(f"the derivative of {recipe.model!r} is not known: {error}; give derivative=") from error
    return found, [read.get(1 + n) for n in range(len(operands))]


_ORDINARY = FPUOp, MMAOp, WGMMAOp, WMMAOp
_WHAT_WOULD_DO = "; take it apart into operators that have derivatives, or detach its operands"


@dataclass(frozen=True)
class Derivative:
    """The derivative of an operator.

    ``refuses`` says why there is none (None: there is one); ``keeps`` what a call whose gradient is wanted gives beside D:
    "product" (X, where e is more than a sum), "index" (the k of a semiring) or "" for nothing.
    """

    recipe: EpilogueRecipe
    a_form: str
    b_form: str
    semiring: Any
    given: Callable[..., Any] | None
    refuses: str | None

    @classmethod
    def of(cls, conf: Config | None, components: dict[str, Any], recipe: EpilogueRecipe, forms: tuple[str, str],
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
        """Raise NotImplementedError, naming the operator and why, where there is none, or where the epilogue has captured a
        tensor that is to get one, too."""
        if self.refuses is not None:
            raise NotImplementedError(f"{name} has no derivative: {self.refuses}{_WHAT_WOULD_DO}")
        for captured, x, _ in held_values(self.recipe.model):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise NotImplementedError(
                    f"{name}: {captured} requires a gradient, and only operands get one; pass .detach(), or make it an "
                    "operand of an operator: gemmkit.torch.op(name=..., epilogue=lambda bias: Bias(bias))")

    def __call__(self, grad: torch.Tensor, of_kept: torch.Tensor | None, kept: torch.Tensor | None, a: torch.Tensor,
                 b: torch.Tensor, c: torch.Tensor | None, operands: Sequence[Any], needed: Sequence[bool]) -> list[Any]:
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

    def _product(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> Any:
        found = product(a, b, self.a_form, self.b_form)
        return found if c is None else found + c

    def _partials(self, x: torch.Tensor, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
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


def _of_operand(full: torch.Tensor, operand: torch.Tensor, shape: object) -> Any:
    """The gradient of an operand of an epilogue, which lies along D in this shape: summed along what it was broadcast
    along."""
    if full.dim() == 2 and operand.dim() == 1 and shape == (1, full.shape[1]) and full.dtype == operand.dtype:
        return full.sum(0)                                 # adds up in float32, and rounds once
    full = full.expand(torch.broadcast_shapes(full.shape, shape))
    return summed_to(full, shape, _wide(full)).reshape(operand.shape).to(operand.dtype)


def _is_wider(operand: torch.Tensor, of_x: torch.Tensor) -> bool:
    """Whether an operand's dtype holds more than dX's, to which dX has been rounded."""
    return bool(torch.promote_types(operand.dtype, of_x.dtype) != of_x.dtype)


def _wide(x: torch.Tensor) -> Any:
    """The dtype that elements of a gradient are added up in."""
    return torch.promote_types(x.dtype, torch.float32)


def _times(grad: torch.Tensor, partial: torch.Tensor, dtype: torch.dtype | None) -> Any:
    """dD times a derivative: of complex numbers its conjugate."""
    if partial is None:
        return torch.zeros_like(grad, dtype=dtype)
    return (grad * (partial.conj() if torch.is_tensor(partial) and partial.is_complex() else partial)).to(dtype)


# -- semirings --------------------------------------------------------------------------------------------------------

def _selected(semiring: Semiring, grad: torch.Tensor, index: Any, a: torch.Tensor, b: torch.Tensor) -> list[Any]:
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


def _scattered(gradient: torch.Tensor, dim: int, k: torch.Tensor, of_all: torch.Tensor, operand: torch.Tensor) -> Any:
    """The gradient of an operand: each element of D's goes to the k that decided, and stacks that it was broadcast along
    are summed."""
    dtype = _wide(gradient)
    found = torch.zeros(of_all.shape, dtype=dtype, device=operand.device).scatter_add(dim, k, gradient.to(dtype))
    return summed_to(found, operand.shape).to(operand.dtype)


def _of_factors(mul: Callable[[Any, Any], Any], x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """The derivatives of a semiring's mul by both factors."""
    paths, one = Paths(), torch.ones_like(x)
    given = DualTensor(x, paths, {0: one}), DualTensor(y, paths, {1: one})
    return tangents(paths, lambda: mul(*given), 2, torch.zeros_like(x))


# -- what has none ----------------------------------------------------------------------------------------------------

def _refusal(conf: Config | None, components: dict[str, Any], operator: object, recipe: EpilogueRecipe,
             forms: tuple[str, str], given: Callable[..., Any] | None) -> str | None:
    """Why an operator has no derivative; None if it has."""
    def part(name: str) -> Any:
        return components.get(name, getattr(conf, name, None))

    for name in TRANSFORMS:
        transform = part(name)
        if transform is not None and not transform.is_identity:
            return f"{name}={transform!r} changes elements on the way"
    d = part("global_d_layout")
    if d is not None and (d.is_half or d.is_discarded):
        return f"global_d_layout={d!r} does not keep all that the product gives"
    if components.get("condition") is not None or part("observe_a") is not None:
        return "condition= and observe_a= decide more than D's elements"
    if isinstance(operator, Semiring):
        if not selects(operator):
            return f"operator={operator!r} combines all products, so that no k decides"
        if recipe.model.stages() and not recipe.model.passes_on:
            return f"operator={operator!r} has an epilogue, and gemmkit.functions.select none"
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


# --------------------------------------------------------------------------------------------------
# Products that autograd records: `gemmkit.matmul` of tensors that require a gradient comes here.

def matmul(a: Any, b: Any, c: torch.Tensor | None = None, *, mapping: str | None = None) -> Any:
    """A B + C of tensors (..., M, K), (..., K, N) and (..., M, N), as an operator: autograd, compile, vmap, export. An A or
    a B of one dimension is a row or a column, which the result lacks. ``torch.autocast`` casts a, b and c. With
    ``mapping="batch_invariant"`` a row of A B has the same bits in any batch, as in `gemmkit.matmul`; gradients are computed
    as without it.

    Raises ValueError for shapes that do not fit and for another mapping, TypeError for tensors of several dtypes.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> a = torch.ones(2, 3, requires_grad=True)
    >>> with gk.emulate():
    ...     gk.torch.matmul(a, torch.ones(3, 2)).sum().backward()
    >>> a.grad.tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    if c is None and mapping is None:
        found = known(products, None, (a, b), recorded=(a, b))
        if found is not None:
            return found
    check_mapping(mapping)
    for name, x in (("a", a), ("b", b), ("c", c)):
        if not isinstance(x, torch.Tensor) and not (name == "c" and x is None):
            raise TypeError(f"{name} is a {type(x).__name__}; gemmkit.torch.matmul takes tensors, gemmkit.matmul any array")
    a, b, c = autocast(a, b, c)
    check_dtypes(a, b=b, c=c)
    return (product(a, b) if c is None and mapping is None and a.dim() == b.dim() == 2
            else _matmul(a, b, c, mapping))


def _matmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, mapping: str | None = None) -> Any:
    multiply = functools.partial(product, mapping=mapping)
    found = _of_vectors(multiply, a, b) if 1 in (a.dim(), b.dim()) else multiply(a, b)
    return found if c is None else found + c


def _of_vectors(multiplied: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *more: object) -> Any:
    """A product of which a or b has one dimension, by PyTorch's own views, so that the gradient has one, too."""
    is_row, is_column = a.dim() == 1, b.dim() == 1
    found = multiplied(a[None] if is_row else a, b[:, None] if is_column else b, *more)
    found = found.squeeze(-1) if is_column else found
    return found.squeeze(-1 if is_column else -2) if is_row else found


def recorded(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, conf: Config | None, out: torch.Tensor | None,
             stream: object, keywords: dict[str, Any]) -> Any:
    """`gemmkit.matmul` where a tensor among a, b and c requires a gradient.

    Raises ValueError for an ``out``, whose former values autograd would have to keep, and NotImplementedError where there
    is no derivative.
    """
    if out is not None:
        raise ValueError("out= is given, and a tensor that requires a gradient is among a, b and c: what is written in "
                         "place cannot be recorded; leave out= away, or call under torch.no_grad()")
    if stream is not None:
        raise ValueError("stream= is given, and a tensor that requires a gradient is among a, b and c: autograd computes on "
                         "PyTorch's current stream; use torch.cuda.stream(...)")
    for name, x in (("a", a), ("b", b), ("c", c)):
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, and another operand is a tensor that requires a gradient; give "
                            "PyTorch tensors (for a matrix with structure, make an operator with gemmkit.torch.op)")
    if conf is None and not keywords and c is None:
        return _matmul(a, b, None)
    derivative = _derivative(conf, keywords)
    derivative.check("gemmkit.matmul")
    if 1 in (a.dim(), b.dim()) and derivative.a_form == derivative.b_form == forms.PLAIN:
        if c is not None:
            c = c[..., None, :] if a.dim() == 1 and b.dim() > 1 else c[..., None] if a.dim() > 1 else c[None, None]
        return _of_vectors(lambda a, b: _Recorded.apply(derivative, conf, keywords, a, b, c)[0], a, b)
    return _Recorded.apply(derivative, conf, keywords, a, b, c)[0]


def _derivative(conf: Config | None, keywords: dict[str, Any]) -> Derivative:
    layouts = [keywords.get(f"global_{name}_layout", getattr(conf, f"global_{name}_layout", None)) for name in "ab"]
    of = [forms.PLAIN if layout is None else forms.form_of_layout(layout, f"global_{name}_layout")
          for name, layout in zip("ab", layouts)]
    epilogue = keywords.get("epilogue", getattr(conf, "epilogue", None))
    return Derivative.of(conf, keywords, _recipe(epilogue), (of[0], of[1]), None)


@functools.lru_cache(maxsize=64)
def _recipe(epilogue: Epilogue | None) -> EpilogueRecipe:
    return EpilogueRecipe.of(epilogue)


class _Recorded(torch.autograd.Function):
    """A product by components of one call, which is no operator by name. What is kept of it is a result, too, through which
    second derivatives go."""

    @staticmethod
    def forward(derivative: Derivative, conf: Config | None, keywords: dict[str, Any], a: torch.Tensor, b: torch.Tensor,
                c: torch.Tensor | None) -> Any:
        if derivative.keeps == "index":
            if c is not None:
                raise ValueError("c is given with a semiring: what was there before may decide an element, which has no k")
            return select(a, b, operator=derivative.semiring)
        if derivative.keeps == "product":
            stack, sizes = _split(result_shape(a, b, derivative.a_form, derivative.b_form))
            shape = (*(stack if c is None else torch.broadcast_shapes(stack, c.shape[:-2])), *sizes)
            kept = a.new_empty(shape, dtype=torch.promote_types(a.dtype, b.dtype))
            after = Store(kept) | derivative.recipe.model
            return multiply_matrices(a, b, c, conf, **{**keywords, "epilogue": after}), kept
        return (multiply_matrices(a, b, c, conf, **keywords),)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.derivative, _, _, a, b, c = inputs
        ctx.has_c = c is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(x for x in (a, b, c, *output[1:]) if x is not None))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, of_kept: torch.Tensor | None = None) -> Any:
        a, b, *more = ctx.saved_tensors
        c = more.pop(0) if ctx.has_c else None
        kept = more[0] if more else None
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *ctx.derivative(grad, of_kept, kept, a, b, c, (), needed)[:3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], derivative: Derivative, conf: Config | None, keywords: dict[str, Any],
             *tensors: torch.Tensor) -> Any:
        """A launch for each of the batch: components may have arrays, which all share."""
        return batched_by(lambda *one: _Recorded.apply(derivative, conf, keywords, *one), info.batch_size, in_dims[3:],
                          tensors, (None, None, None), {})


def _split(shape: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return shape[:-2], shape[-2:]
