"""Products that autograd records: `gemmkit.matmul` of tensors that require a gradient comes here."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gemmkit.config import Config
from gemmkit.epilogues import Store
from gemmkit.matmul_call import matmul as multiply_matrices
from gemmkit.selection import select
from gemmkit.torch import forms
from gemmkit.torch.batching import batched_by
from gemmkit.torch.derivative import Derivative
from gemmkit.torch.product import autocast, check_dtypes, product, result_shape
from gemmkit.torch.replay import Recipe


def matmul(a: Any, b: Any, c: Any = None) -> Any:
    """A B + C of tensors (..., M, K), (..., K, N) and (..., M, N), as an operator: autograd, compile, vmap, export. An A or
    a B of one dimension is a row or a column, which the result lacks. ``torch.autocast`` casts a, b and c.

    Raises ValueError for shapes that do not fit and TypeError for tensors of several dtypes.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> a = torch.ones(2, 3, requires_grad=True)
    >>> with gk.emulate():
    ...     gk.torch.matmul(a, torch.ones(3, 2)).sum().backward()
    >>> a.grad.tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    for name, x in (("a", a), ("b", b), ("c", c)):
        if not isinstance(x, torch.Tensor) and not (name == "c" and x is None):
            raise TypeError(f"{name} is a {type(x).__name__}; gemmkit.torch.matmul takes tensors, gemmkit.matmul any array")
    a, b, c = autocast(a, b, c)
    check_dtypes(a, b=b, c=c)
    return product(a, b) if c is None and a.dim() == b.dim() == 2 else _matmul(a, b, c)


def _matmul(a: Any, b: Any, c: Any) -> Any:
    found = _of_vectors(product, a, b) if 1 in (a.dim(), b.dim()) else product(a, b)
    return found if c is None else found + c


def _of_vectors(multiplied: Any, a: Any, b: Any, *more: Any) -> Any:
    """A product of which a or b has one dimension, by PyTorch's own views, so that the gradient has one, too."""
    is_row, is_column = a.dim() == 1, b.dim() == 1
    found = multiplied(a[None] if is_row else a, b[:, None] if is_column else b, *more)
    found = found.squeeze(-1) if is_column else found
    return found.squeeze(-1 if is_column else -2) if is_row else found


def recorded(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any]) -> Any:
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
            raise TypeError(f"{name} is {type(x).__name__}, and beside it is a tensor that requires a gradient; give "
                            "tensors of PyTorch's (a matrix with structure: make an operator by gemmkit.torch.op)")
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
def _recipe(epilogue: Any) -> Recipe:
    return Recipe.of(epilogue)


class _Recorded(torch.autograd.Function):
    """A product by components of one call, which is no operator by name. What is kept of it is a result, too, through which
    second derivatives go."""

    @staticmethod
    def forward(derivative: Derivative, conf: Any, keywords: dict[str, Any], a: Any, b: Any, c: Any) -> Any:
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
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.derivative, _, _, a, b, c = inputs
        ctx.has_c = c is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(x for x in (a, b, c, *output[1:]) if x is not None))

    @staticmethod
    def backward(ctx: Any, grad: Any, of_kept: Any = None) -> Any:
        a, b, *more = ctx.saved_tensors
        c = more.pop(0) if ctx.has_c else None
        kept = more[0] if more else None
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *ctx.derivative(grad, of_kept, kept, a, b, c, (), needed)[:3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, derivative: Derivative, conf: Any, keywords: dict[str, Any], *tensors: Any) -> Any:
        """A launch for each of the batch: components may have arrays, which all share."""
        return batched_by(lambda *one: _Recorded.apply(derivative, conf, keywords, *one), info.batch_size, in_dims[3:],
                          tensors, (None, None, None), {})


def _split(shape: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return shape[:-2], shape[-2:]
