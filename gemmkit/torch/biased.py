"""Rows plus a bias, as `torch.compile` is to see it: the sum is fused into what follows, the bias's gradient is not.

The gradient of the rows is in memory, since the gradient of the weights is a product of it. Where the bias's gradient was a
sum that the compiler saw, its kernel computed the activation's derivative a second time instead of reading it: 80 us for
8192 x 4096 of float16 with GELU, where summing what is there takes 16 (H200, PyTorch 2.11). An operator is read from memory.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmkit.torch.library import Differentiable, define


def biased(x: Any, bias: Any) -> Any:
    """x (M, N) plus a bias (N,), recorded."""
    return _Biased.apply(x, bias)


class _Biased(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, bias: Any) -> Any:
        return x + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.of_x, ctx.of_bias = inputs[0].dtype, inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
        of_bias = _SUM(grad).to(ctx.of_bias) if ctx.needs_input_grad[1] else None
        return grad.to(ctx.of_x), of_bias


def _compute(x: Any) -> Any:
    return x.sum(0)


def _allocate(x: Any) -> Any:
    return x.new_empty(x.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.shape = inputs[0].shape


def _backward(ctx: Any, grad: Any) -> Any:
    return grad.expand(ctx.shape)


def _in_batches(size: int, in_dims: tuple, x: Any) -> tuple[Any, int]:
    """One sum of rows that are a batch long."""
    rows = x.movedim(in_dims[0], 1).flatten(1)
    return _SUM(rows).unflatten(0, (size, -1)), 0


_SUM = Differentiable(define("gemmkit::sum_of_rows", "(Tensor x) -> Tensor", _compute, _allocate), _backward, _keep,
                      _in_batches, _compute)
