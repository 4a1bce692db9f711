"""Convolutions as operators of PyTorch's. Each one's gradients are the two others, so there are derivatives of every order.

| operator | linear in | its gradients |
|---|---|---|
| ``gemmkit::conv`` | x, w, bias | `conv_input`, `conv_weight`, a sum |
| ``gemmkit::conv_input`` | w, gradient | `conv_weight`, `conv` |
| ``gemmkit::conv_weight`` | x, gradient | `conv_input`, `conv` |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemmkit.epilogues import Bias
from gemmkit.functions import conv as by_products
from gemmkit.functions.conv import Convolution, parameters, result_shape
from gemmkit.torch.product import Differentiable, autocast, batched_by, check_dtypes, check_together, define


def conv(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, stride: Any = 1, padding: Any = 0,
         dilation: Any = 1, groups: int = 1, layout: str | None = None) -> Any:
    """`gemmkit.conv` of tensors as an operator, with gradients of x, w and bias.

    Args:
        x: (N, C, H, W); one or three spatial dimensions are taken, too. ``torch.channels_last`` tensors are fast.
        w: (K, C / groups, R, S), of x's dtype; ``torch.autocast`` casts both, and the bias.
        bias: (K,), added in the kernel; None adds nothing.
        stride, padding, dilation, groups: as `gemmkit.conv` takes them.
        layout: the order of dimensions, as `gemmkit.conv` takes it; None is PyTorch's ("NCW", "NCHW", "NCDHW").

    Returns: a new tensor (N, K, P, Q), whose channels are neighbours in memory if x's are.

    Raises: what `gemmkit.conv` raises, TypeError for what is no tensor.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> x, w = torch.ones(1, 1, 3, 3, requires_grad=True), torch.ones(1, 1, 2, 2)
    >>> with gk.emulate():
    ...     gk.torch.conv(x, w, torch.tensor([1.0])).sum().backward()
    >>> x.grad[0, 0].tolist()
    [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]
    """
    if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor):
        raise TypeError(f"conv: x is a {type(x).__name__} and w a {type(w).__name__}; tensors are needed")
    if layout is None:
        layout = {3: "NCW", 5: "NCDHW"}.get(x.dim(), "NCHW")
    x, w, bias = autocast(x, w, bias)
    how = parameters("conv", x.shape, w.shape, stride, padding, dilation, groups, layout)
    flat = [n for pair in how.padding for n in pair]
    return _CONV(x, w, bias, list(how.stride), flat, list(how.dilation), how.groups, layout)


# -- the operators ----------------------------------------------------------------------------------------------------

_OF_GRADIENT = "Tensor gradient, SymInt[] shape"
_HOW = "int[] stride, int[] padding, int[] dilation, int groups, str layout"


def _given(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
           layout: str) -> dict[str, Any]:
    """The keywords of `gemmkit.conv`; ``padding`` has both ends of each dimension, one after the other."""
    return dict(stride=tuple(stride), padding=tuple(zip(padding[::2], padding[1::2])), dilation=tuple(dilation),
                groups=groups, layout=layout)


def _how(x: Any, w: Any, stride: Any, padding: Any, dilation: Any, groups: int, layout: str) -> Convolution:
    given = _given(stride, padding, dilation, groups, layout)
    return parameters("conv", x, w, *(given[name] for name in ("stride", "padding", "dilation", "groups", "layout")))


def _new(like: torch.Tensor, shape: Any, is_last: bool) -> torch.Tensor:
    """A new tensor, whose channels are neighbours in memory if those of ``like`` are."""
    if is_last or like.stride(1) != 1 or like.stride(-1) == 1:
        return like.new_empty(shape)
    return like.new_empty((shape[0], *shape[2:], shape[1])).movedim(-1, 1)


def _allocate(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    check_together(x, w=w, bias=bias)
    check_dtypes(x, w=w)
    made = _how(x.shape, w.shape, *how)
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise ValueError(f"conv: bias has shape {tuple(bias.shape)}; {(int(w.shape[0]),)} is needed, an element for each "
                         "filter")
    return _new(x, result_shape(x.shape, w.shape, made), made.is_last)


def _compute(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    out, given = _allocate(x, w, bias, *how), _given(*how)
    epilogue = None
    if bias is not None:
        epilogue = Bias(bias.detach() if given["groups"] == 1 else bias.detach().view(given["groups"], -1))
    by_products.conv(x.detach(), w.detach(), epilogue=epilogue, out=out, **given)
    return out


def _allocate_input(w: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], *how: Any) -> torch.Tensor:
    check_together(w, gradient=gradient)
    check_dtypes(w, gradient=gradient)
    return _new(gradient, tuple(shape), _how(shape, w.shape, *how).is_last)


def _compute_input(w: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], *how: Any) -> torch.Tensor:
    out = _allocate_input(w, gradient, shape, *how)
    by_products.conv_input_gradient(tuple(shape), w.detach(), gradient.detach(), out=out, **_given(*how))
    return out


def _allocate_weight(x: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], *how: Any) -> torch.Tensor:
    check_together(x, gradient=gradient)
    check_dtypes(x, gradient=gradient)
    return _new(x, tuple(shape), _how(x.shape, shape, *how).is_last)


def _compute_weight(x: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], *how: Any) -> torch.Tensor:
    out = _allocate_weight(x, gradient, shape, *how)
    by_products.conv_weight_gradient(x.detach(), tuple(shape), gradient.detach(), out=out, **_given(*how))
    return out


# -- autograd ---------------------------------------------------------------------------------------------------------

def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
    first, second, _, *ctx.how = inputs
    ctx.save_for_backward(first, second)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    of_x, of_w, of_bias, *_ = ctx.needs_input_grad
    axes = [n for n in range(x.dim()) if n != (x.dim() - 1 if ctx.how[-1].endswith("C") else 1)]
    return (_INPUT(w, gradient, list(x.shape), *ctx.how) if of_x else None,
            _WEIGHT(x, gradient, list(w.shape), *ctx.how) if of_w else None,
            gradient.sum(axes) if of_bias else None, *(None,) * len(ctx.how))


def _backward_input(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[Any, ...]:
    w, inner = ctx.saved_tensors
    of_w, of_inner, *_ = ctx.needs_input_grad
    return (_WEIGHT(gradient, inner, list(w.shape), *ctx.how) if of_w else None,
            _CONV(gradient, w, None, *ctx.how) if of_inner else None, None, *(None,) * len(ctx.how))


def _backward_weight(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, inner = ctx.saved_tensors
    of_x, of_inner, *_ = ctx.needs_input_grad
    return (_INPUT(gradient, inner, list(x.shape), *ctx.how) if of_x else None,
            _CONV(x, gradient, None, *ctx.how) if of_inner else None, None, *(None,) * len(ctx.how))


def _in_batches(operator: Any, count: int = 2) -> Any:
    """One convolution for each of a batch of ``torch.func.vmap``; ``count`` arguments are tensors."""
    def rule(size: int, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return batched_by(lambda *tensors: operator()(*tensors, *args[count:]), size, in_dims[:count], args[:count],
                          (None,) * count, {})

    return rule


_CONV: Any = Differentiable(define("gemmkit::conv", f"(Tensor x, Tensor w, Tensor? bias, {_HOW}) -> Tensor", _compute,
                                   _allocate), _backward, _keep, _in_batches(lambda: _CONV, 3), _compute)
_INPUT: Any = Differentiable(define("gemmkit::conv_input", f"(Tensor w, {_OF_GRADIENT}, {_HOW}) -> Tensor",
                                    _compute_input, _allocate_input), _backward_input, _keep, _in_batches(lambda: _INPUT),
                             _compute_input)
_WEIGHT: Any = Differentiable(define("gemmkit::conv_weight", f"(Tensor x, {_OF_GRADIENT}, {_HOW}) -> Tensor",
                                     _compute_weight, _allocate_weight), _backward_weight, _keep,
                              _in_batches(lambda: _WEIGHT), _compute_weight)
