"""``QuantisedLinear``: a layer whose weights are integers of 2 or 4 bits with group scales.

The operator ``gemmkit::quantised_linear`` multiplies; its gradient is that of x (and of the bias), for the weights are
integers:

    y = x B + bias,   dx^T = B dy^T,   dbias = sum of dy's rows

B is dequantised as it is read in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gemmkit.epilogues import Bias
from gemmkit.layouts import GroupQuantised
from gemmkit.matmul_call import matmul
from gemmkit.matrices import Matrix
from gemmkit.quantisation import quantise
from gemmkit.runtime.arrays import dtype_from_torch
from gemmkit.torch.batching import batched_by
from gemmkit.torch.library import Differentiable, define
from gemmkit.torch.linear import ACTIVATIONS, FUNCTIONS, check_layer, check_width
from gemmkit.torch.product import autocast, summed_to

_DTYPES = torch.float16, torch.bfloat16


class QuantisedLinear(torch.nn.Module):
    """``activation(x W^T + bias)`` of float16 or bfloat16 (..., in_features) to (..., out_features); W has integers of
    ``bits`` bits.

    Each ``group`` input features of an output share a float16 scale (`gemmkit.quantisation.quantise`). `from_linear` makes
    a layer of a trained one; a new layer has weights of zero, which a ``state_dict`` replaces. The buffers are ``words``
    (int32, in_features * bits / 32 x out_features), ``scales`` (float16, in_features / group x out_features) and, where not
    ``symmetric``, ``zeros`` (uint8); the parameter is ``bias``. Weights have no gradient. ``to(dtype)``, ``half()`` and the
    like convert ``bias`` alone: buffers are bits, and keep their dtypes. ``torch.autocast`` casts x and ``bias``.

    A call raises TypeError for an x of another dtype, ValueError for one of another width. The constructor raises
    ConfigError for other bits and groups than `GroupQuantised` takes, ValueError for ``in_features`` that is no multiple of
    ``group`` and for another activation than `gemmkit.torch.Linear` has.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> linear = torch.nn.Linear(32, 2, bias=False)
    >>> _ = torch.nn.init.constant_(linear.weight, 0.5)
    >>> layer = gk.torch.QuantisedLinear.from_linear(linear, group=32)
    >>> with gk.emulate():
    ...     layer(torch.ones(1, 32, dtype=torch.float16)).tolist()
    [[16.0, 16.0]]
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bits: int = 4, group: int = 128, bias: bool = True,
                 activation: str | None = None, symmetric: bool = True, device: Any = None):
        super().__init__()
        check_layer(in_features, out_features, activation)
        layout = GroupQuantised("float16", np.empty((0, 0), np.float16), bits, group)
        if in_features % group:
            raise ValueError(f"in_features={in_features}: a multiple of group={group} is needed")
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.bits, self.group, self.symmetric = bits, group, symmetric
        groups = in_features // group, out_features
        middle = sum(layout.middle << bits * n for n in range(layout.rows))            # every integer stands for 0
        middle = middle - 2**32 if middle >= 2**31 else middle
        self.register_buffer("words", torch.full((in_features // layout.rows, out_features), middle, dtype=torch.int32,
                                                 device=device))
        self.register_buffer("scales", torch.zeros(groups, dtype=torch.float16, device=device))
        self.register_buffer("zeros", None if symmetric else torch.full(groups, layout.middle, dtype=torch.uint8,
                                                                        device=device))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=torch.float16, device=device)) if bias else None

    @classmethod
    def from_linear(cls, linear: Any, bits: int = 4, group: int = 128, activation: str | None = None,
                    symmetric: bool = True) -> QuantisedLinear:
        """The layer of a ``torch.nn.Linear`` (or `gemmkit.torch.Linear`, with its activation), its weights rounded to the
        nearest integers, on its device."""
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise TypeError(f"linear={type(linear).__name__}: a torch.nn.Linear is needed")
        activation = getattr(linear, "activation", None) if activation is None else activation
        out_features, in_features = weight.shape
        layer = cls(in_features, out_features, bits, group, linear.bias is not None, activation, symmetric, weight.device)
        made = quantise(np.ascontiguousarray(weight.detach().float().cpu().numpy().T), bits, group, symmetric)
        layout: Any = made.layout
        with torch.no_grad():
            layer.words.copy_(torch.from_numpy(made.array.view(np.int32)))
            layer.scales.copy_(torch.from_numpy(layout.scales))
            if layer.zeros is not None:
                layer.zeros.copy_(torch.from_numpy(layout.zeros))
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """As ``torch.nn.Module`` has it, of buffers without a change of dtype."""
        def moved(x: Any) -> Any:
            found = fn(x)
            is_bits = found.dtype != x.dtype and any(x is buffer for buffer in self._buffers.values())
            return x.to(found.device) if is_bits else found

        return super()._apply(moved, recurse)

    def forward(self, x: Any) -> Any:
        check_width(x, self.in_features)
        x, bias = autocast(x, self.bias)
        if x.dtype not in _DTYPES:
            raise TypeError(f"x has dtype {x.dtype}; weights become float16 or bfloat16, and x must be one of them: "
                            "x.half() or x.bfloat16()")
        rows = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        is_recorded = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
        fused = None if is_recorded else self.activation
        found = _LINEAR(rows, self.words, self.scales, self.zeros, bias, self.bits, self.group, fused)
        if is_recorded and self.activation is not None:
            found = FUNCTIONS[self.activation](found)
        return found.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (f"{self.in_features}, {self.out_features}, bits={self.bits}, group={self.group}, "
                f"bias={self.bias is not None}, activation={self.activation!r}, symmetric={self.symmetric}")


# -- the operators ----------------------------------------------------------------------------------------------------

def _weights(x: Any, words: Any, scales: Any, zeros: Any, bits: int, group: int) -> Matrix:
    """B, whose elements are of x's dtype."""
    return Matrix(words.view(torch.uint32), GroupQuantised(dtype_from_torch(x.dtype), scales, bits, group, zeros))


def _compute(x: Any, words: Any, scales: Any, zeros: Any, bias: Any, bits: int, group: int, activation: str | None) -> Any:
    out = _allocate(x, words, scales, zeros, bias, bits, group, activation)
    more: dict[str, Any] = {} if activation is None else {"epilogue": ACTIVATIONS[activation]}
    if bias is not None:
        of_bias = Bias(bias.detach())
        more["epilogue"] = of_bias | more["epilogue"] if more else of_bias
    matmul(x, _weights(x, words, scales, zeros, bits, group), out=out, **more)
    return out


def _allocate(x: Any, words: Any, scales: Any, zeros: Any, bias: Any, bits: int, group: int, activation: str | None) -> Any:
    return x.new_empty((x.shape[0], words.shape[1]))


def _compute_gradient(grad: Any, words: Any, scales: Any, zeros: Any, bits: int, group: int) -> Any:
    out = _allocate_gradient(grad, words, scales, zeros, bits, group)
    matmul(_weights(grad, words, scales, zeros, bits, group), grad.mT, out=out.mT)
    return out


def _allocate_gradient(grad: Any, words: Any, scales: Any, zeros: Any, bits: int, group: int) -> Any:
    return grad.new_empty((grad.shape[0], words.shape[0] * 32 // bits))


def _keep(ctx: Any, inputs: tuple, output: Any) -> None:
    _, words, scales, zeros, bias, ctx.bits, ctx.group, ctx.activation = inputs
    ctx.of_bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(words, scales, zeros)


def _backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    if ctx.activation is not None:
        raise NotImplementedError(f"a gradient through gemmkit::quantised_linear with activation={ctx.activation!r}, which "
                                  "keeps no product; leave activation out and apply the function to the result")
    words, scales, zeros = ctx.saved_tensors
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = _GRADIENT(grad, words, scales, zeros, ctx.bits, ctx.group)
    if ctx.needs_input_grad[4]:
        shape, dtype = ctx.of_bias
        of_bias = summed_to(grad, shape, torch.float32).to(dtype)
    return of_x, None, None, None, of_bias, None, None, None


def _backward_of_gradient(ctx: Any, grad: Any) -> tuple[Any, ...]:
    words, scales, zeros = ctx.saved_tensors
    found = _LINEAR(grad, words, scales, zeros, None, ctx.bits, ctx.group, None)
    return found, None, None, None, None, None


def _keep_of_gradient(ctx: Any, inputs: tuple, output: Any) -> None:
    _, words, scales, zeros, ctx.bits, ctx.group = inputs
    ctx.save_for_backward(words, scales, zeros)


def _in_batches(operator: Differentiable, size: int, in_dims: tuple, x: Any, *rest: Any) -> tuple[Any, int]:
    """A batch of x is more rows; of weights or a bias there is a launch for each."""
    if any(dim is not None for dim in in_dims[1:]):
        found: tuple[Any, int] = batched_by(operator, size, in_dims, (x, *rest), (None,) * len(in_dims), {})
        return found
    rows = x.movedim(in_dims[0], 0)
    return operator(rows.flatten(0, 1), *rest).unflatten(0, (size, rows.shape[1])), 0


_LINEAR: Differentiable = Differentiable(
    define("gemmkit::quantised_linear", "(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, int bits, "
           "int group, str? activation) -> Tensor", _compute, _allocate),
    _backward, _keep, lambda *batch: _in_batches(_LINEAR, *batch), _compute)
_GRADIENT: Differentiable = Differentiable(
    define("gemmkit::quantised_linear_gradient", "(Tensor grad, Tensor words, Tensor scales, Tensor? zeros, int bits, "
           "int group) -> Tensor", _compute_gradient, _allocate_gradient),
    _backward_of_gradient, _keep_of_gradient, lambda *batch: _in_batches(_GRADIENT, *batch), _compute_gradient)
