"""Norms, softmaxes and gated linear units as operators of PyTorch's, with gradients that are programs of rows.

A norm's gradient computes the row's statistics a second time: reading them would cost what computing them costs, since the
row is read anyway. `gemmkit.functions.gradients` has those of x, gamma and beta in one pass over x and the gradient.
Gradients of softmaxes and gates are programs of rows. Both take up to 32 bits an element, so that float64 is computed by
PyTorch, as are second derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from gemmkit import programs as gp
from gemmkit.epilogues import activations as of_numbers
from gemmkit.functions import rows as forward
from gemmkit.functions.glu import gating, units
from gemmkit.functions.glu import glu as forward_glu
from gemmkit.functions.gradients import norm_gradients_of
from gemmkit.functions.matmul import Door
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Numeric
from gemmkit.layouts import InterleavedColumns
from gemmkit.programs import program
from gemmkit.torch.autograd import matmul
from gemmkit.torch.layers import QUANTISED_GRADIENT, QUANTISED_LINEAR, QuantisedLinear, of_rows, packed_weights
from gemmkit.torch.product import (
    Differentiable,
    autocast,
    batched_by,
    check_dtypes,
    check_together,
    define,
    derived,
    is_looked_at,
    keep,
    records,
    result_shape,
)

# --------------------------------------------------------------------------------------------------
# Calls.

def softmax(x: torch.Tensor, *, scale: float = 1.0) -> Any:
    """`gemmkit.softmax` of tensors as an operator: softmax(scale x) along the last axis, with a gradient.

    Args:
        x: (..., N) float16, bfloat16, float32 or float64, of any strides; rows that do not lie at one distance from each
            other are copied first.
        scale: the factor of x.

    Returns: a new tensor of x's shape and dtype. Under ``torch.autocast`` on a GPU it is float32, as PyTorch's is.

    Raises: what `gemmkit.softmax` raises, TypeError for what is no tensor.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> x = torch.zeros(1, 2, requires_grad=True)
    >>> with gk.emulate():
    ...     gk.torch.softmax(x)[0, 0].backward()
    >>> x.grad.tolist()
    [[0.25, -0.25]]
    """
    return _SOFTMAX(tensor_given(x, "softmax"), scale=float(scale), log=False, dtype=_widened(x))


def log_softmax(x: torch.Tensor, *, scale: float = 1.0) -> Any:
    """The logarithm of `gemmkit.torch.softmax`, which does not underflow. It takes and raises the same."""
    return _SOFTMAX(tensor_given(x, "log_softmax"), scale=float(scale), log=True, dtype=_widened(x))


def layernorm(x: torch.Tensor, gamma: torch.Tensor | None = None, beta: torch.Tensor | None = None, *, eps: float = 1e-5,
              dtype: torch.dtype | None = None) -> Any:
    """`gemmkit.layernorm` of tensors as an operator, with gradients of x, gamma and beta.

    Args:
        x: as `gemmkit.torch.softmax` takes it.
        gamma, beta: (N,), of any of these dtypes; None for a factor of 1, and for nothing to add.
        eps: what is added to the variance.
        dtype: the result's; None takes x's, and float32 under ``torch.autocast`` on a GPU where PyTorch's own does.

    Returns: a new tensor of x's shape. Gradients have the dtypes of what they are of.

    Raises: what `gemmkit.layernorm` raises, TypeError for what is no tensor.
    """
    if beta is not None and gamma is None:
        raise ValueError("beta is given alone; give gamma, too")
    return _NORM(tensor_given(x, "layernorm"), gamma, beta, eps=float(eps), centred=True, dtype=dtype or _widened(x))


def rmsnorm(x: torch.Tensor, gamma: torch.Tensor | None = None, *, eps: float = 1e-6,
            dtype: torch.dtype | None = None) -> Any:
    """`gemmkit.rmsnorm` of tensors as an operator, with gradients of x and gamma. Arguments, results and errors are those
    of `gemmkit.torch.layernorm`.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> x, gamma = torch.tensor([[2.0, -2.0]]), torch.ones(2, requires_grad=True)
    >>> with gk.emulate():
    ...     gk.torch.rmsnorm(x, gamma, eps=0.0).sum().backward()
    >>> gamma.grad.tolist()
    [1.0, -1.0]
    """
    return _NORM(tensor_given(x, "rmsnorm"), gamma, None, eps=float(eps), centred=False,
                 dtype=dtype or (_widened(x) if _WIDENS_RMS else None))


def glu(x: torch.Tensor, w: torch.Tensor | QuantisedLinear, v: torch.Tensor | QuantisedLinear,
        activation: str = "silu") -> Any:
    """``activation(x w) * (x v)`` (`gemmkit.glu`) as an operator, with gradients of x, w and v.

    Args:
        x: (..., K).
        w, v: (K, N) of x's dtype: the weights of the gate, and of what is gated. ``torch.autocast`` casts all three. Or two
            `gemmkit.torch.QuantisedLinear`, for a float16 or bfloat16 x.
        activation: "silu" (SwiGLU), "gelu", "gelu_tanh" (both GeGLU), "relu" (ReGLU) or "sigmoid" (GLU itself).

    Returns: a new tensor (..., N). Without a gradient it is one launch. With one it is two products, which are kept, and one
        launch of `gemmkit.torch.gated`; ``torch.compile`` fuses that with what is around it. Layers with a bias or an
        activation, and layers that differ in bits, groups or order, are two products in any case.

    Raises: TypeError for two dtypes, and for a layer beside a tensor; ValueError for shapes that do not fit and for another
        activation.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> x, w, v = torch.tensor([[1.0, 2.0]]), torch.ones(2, 1), torch.tensor([[5.0], [0.0]])
    >>> with gk.emulate():
    ...     gk.torch.glu(x, w, v, "relu").tolist()
    [[15.0]]
    """
    unit(activation)
    if isinstance(w, QuantisedLinear) or isinstance(v, QuantisedLinear):
        return _glu_of_layers(tensor_given(x, "glu"), w, v, activation)
    x, w, v = autocast(tensor_given(x, "glu"), w, v)
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if records(rows, w, v):
        _check_glu(rows, w, v)
        found = gated(matmul(rows, w), matmul(rows, v), activation)
    else:
        found = _GLU(rows, w, v, activation=activation)
    return found if x.dim() == 2 else found.view(*x.shape[:-1], w.shape[1])


def _glu_of_layers(x: torch.Tensor, w: object, v: object, activation: str) -> Any:
    if not (isinstance(w, QuantisedLinear) and isinstance(v, QuantisedLinear)):
        raise TypeError(f"w is a {type(w).__name__} and v a {type(v).__name__}; two tensors are needed, or two "
                        "QuantisedLinear")
    if (w.in_features, w.out_features) != (v.in_features, v.out_features):
        raise ValueError(f"w has {w.in_features} inputs and {w.out_features} outputs, and v has {v.in_features} and "
                         f"{v.out_features}; both must be the same")
    alike = (w.bits, w.group, w.zeros is None) == (v.bits, v.group, v.zeros is None) and w.order is v.order and all(
        layer.bias is None and layer.activation is None for layer in (w, v))
    (x,) = autocast(x)
    if not alike or (torch.is_grad_enabled() and x.requires_grad):
        return gated(w(x), v(x), activation)
    w.check(x)
    found = _QUANTISED_GLU(w.rows(x), w.words, w.scales, w.zeros, v.words, v.scales, v.zeros, bits=w.bits, group=w.group,
                           activation=activation)
    return found.view(*x.shape[:-1], w.out_features)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> Any:
    """``activation(gate) * up``, element by element, in one launch, and its two gradients in another.

    Args:
        gate, up: (..., N), of one shape and dtype.
        activation: as `gemmkit.torch.glu` takes it.

    Returns: a new tensor like gate. ``torch.compile`` sees PyTorch's own functions instead, which it fuses.

    Raises: TypeError for two dtypes, ValueError for two shapes and for another activation.
    """
    how = unit(activation)
    check_dtypes(tensor_given(gate, "gated"), up=up)
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)} and up has shape {tuple(up.shape)}; both must be the same")
    if torch.compiler.is_compiling() or gate.dtype not in _PROGRAMS:
        return how.of_tensors(gate) * up
    return _GATED(gate, up, activation=activation)


def tensor_given(x: object, name: str) -> Any:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; gemmkit.torch.{name} takes tensors")
    return x


def _widened(x: torch.Tensor) -> torch.dtype | None:
    """What ``torch.autocast`` makes of the result of a norm or a softmax on a GPU: float32. On the CPU it leaves them."""
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return None


#: Whether this version of PyTorch has its RMS norm among what ``torch.autocast`` computes in float32 (2.13; 2.11 has not).
_WIDENS_RMS = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


# --------------------------------------------------------------------------------------------------
# Activations of gated units: as device code, its derivative, and as a function of tensors.

class Unit(NamedTuple):
    of_a_number: Callable[[Any], Any]
    slope: Callable[[Any], Any]
    of_tensors: Callable[[Any], Any]


def _slope_of_silu(x: Numeric) -> Any:
    s = of_numbers.sigmoid(x)
    return s * (1 + x * (1 - s))


def _slope_of_gelu(x: Numeric) -> Any:
    return 0.5 * (1 + math.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * math.exp(-0.5 * x * x)


def _slope_of_gelu_tanh(x: Numeric) -> Any:
    t = math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x)


def _slope_of_relu(x: Numeric) -> Any:
    return 1.0 if x > 0 else 0.0


def _slope_of_sigmoid(x: Numeric) -> Any:
    s = of_numbers.sigmoid(x)
    return s * (1 - s)


#: What `glu` and `gated` take for ``activation``.
UNITS = {"silu": Unit(of_numbers.silu, _slope_of_silu, F.silu),
         "gelu": Unit(of_numbers.gelu, _slope_of_gelu, F.gelu),
         "gelu_tanh": Unit(of_numbers.gelu_tanh, _slope_of_gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
         "relu": Unit(of_numbers.relu, _slope_of_relu, F.relu),
         "sigmoid": Unit(of_numbers.sigmoid, _slope_of_sigmoid, torch.sigmoid)}


def unit(activation: object) -> Unit:
    """The unit of a name. Raises ValueError for another."""
    if not isinstance(activation, str) or activation not in UNITS:
        raise ValueError(f"activation={activation!r}: one of {', '.join(map(repr, UNITS))} is needed")
    return UNITS[activation]


# --------------------------------------------------------------------------------------------------
# The programs.

@program
def _softmax_backward(grad: Any, y: Any, dx: Any, scale: float) -> None:
    for m in gp.parallel(y.rows):
        p, g = y[m], grad[m]
        dx[m] = scale * p * (g - (g * p).sum(axis=1))


@program
def _log_softmax_backward(grad: Any, y: Any, dx: Any, scale: float) -> None:
    for m in gp.parallel(y.rows):
        g = grad[m]
        dx[m] = scale * (g - gp.exp(y[m]) * g.sum(axis=1))


@program
def _gate(gate: Any, up: Any, y: Any, function: Any) -> None:
    for m in gp.parallel(gate.rows):
        y[m] = gp.call(function, gate[m]) * up[m]


@program
def _gate_backward(grad: Any, gate: Any, up: Any, of_gate: Any, of_up: Any, function: Any, slope: Any) -> None:
    for m in gp.parallel(gate.rows):
        g, x = grad[m], gate[m]
        of_gate[m] = g * up[m] * gp.call(slope, x)
        of_up[m] = g * gp.call(function, x)


_PROGRAMS = torch.float16, torch.bfloat16, torch.float32


def rows_of(x: torch.Tensor) -> Any:
    """x as a matrix of its rows: a view, or a copy where they do not lie at one distance from each other."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# --------------------------------------------------------------------------------------------------
# The operators of ``torch.library``.

def operator(name: str, schema: str, compute: Callable[..., Any], allocate: Callable[..., Any],
             backward: Callable[..., Any], keep: Callable[..., Any], of_rows: bool = True) -> Any:
    """An operator of rows. A batch of the first tensor alone is more rows, if it is ``of_rows`` alone; of others there is a
    launch for each."""
    def rule(size: int, in_dims: tuple[Any, ...], *args: torch.Tensor, **options: object) -> tuple[Any, Any]:
        if of_rows and in_dims[0] is not None and all(dim is None for dim in in_dims[1:]):
            return made(args[0].movedim(in_dims[0], 0), *args[1:], **options), 0
        return batched_by(made, size, in_dims[:len(args)], args, (None,) * len(args), options)

    made: Any = Differentiable(define(f"gemmkit::{name}", schema, compute, allocate), backward, keep, rule, compute)
    return made


def is_recorded() -> bool:
    return torch.is_grad_enabled() or is_looked_at()


# -- norms ------------------------------------------------------------------------------------------------------------

def _compute_norm(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, *, eps: float, centred: bool,
                  dtype: torch.dtype | None = None) -> Any:
    rows = x if x.is_contiguous() else rows_of(x)
    out = None if dtype is None or dtype == x.dtype else torch.empty_like(rows, dtype=dtype)
    if not centred:
        found = forward.rmsnorm(rows, gamma, eps=eps, out=out)
    else:
        beta = torch.zeros_like(gamma) if beta is None and gamma is not None else beta
        found = forward.layernorm(rows, gamma, beta, eps=eps, out=out)
    return found if rows is x else found.view(x.shape)


def _allocate_norm(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, *, eps: float, centred: bool,
                   dtype: torch.dtype | None = None) -> Any:
    if not x.dim():
        raise ValueError("x has no axis; it needs one at least, along which its rows lie")
    for name, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None and tuple(vector.shape) != (x.shape[-1],):
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; rows of {x.shape[-1]} elements need "
                             f"{(x.shape[-1],)}")
    check_together(x, gamma=gamma, beta=beta)
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def _keep_norm(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any],
               output: object) -> None:
    x, gamma, beta = inputs
    ctx.save_for_backward(x, gamma)
    ctx.options = {name: keyword_only_inputs[name] for name in ("eps", "centred")}
    ctx.of_beta = None if beta is None else beta.dtype


def _backward_norm(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    x, gamma = ctx.saved_tensors
    of_x, of_gamma, of_beta = ctx.needs_input_grad[:3]
    compute = _NORM_BACKWARD if is_recorded() else _compute_norm_backward
    found = compute(grad, x, gamma, **ctx.options, sums=of_gamma or of_beta, beta=ctx.of_beta if of_beta else None)
    return tuple(y if wanted else None for y, wanted in zip(found, (of_x, of_gamma, of_beta)))


def _compute_norm_backward(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor | None, *, eps: float, centred: bool,
                           sums: bool = True, beta: torch.dtype | None = None) -> tuple[Any, Any, Any]:
    of_gamma, of_beta = _allocate_sums(x, gamma, sums, beta)
    if not x.numel():
        return x.new_empty(x.shape), of_gamma.zero_(), of_beta.zero_()
    with torch.no_grad():
        g, rows = rows_of(grad), rows_of(x.detach())       # calls of tensors that require a gradient are not known
        factors = None if gamma is None else gamma.detach()
        if all(y is None or y.dtype in _PROGRAMS for y in (g, x, gamma)):
            try:
                out = norm_gradients_of(g, rows, factors, eps, centred, of_gamma if of_gamma.numel() else None,
                                        of_beta if of_beta.numel() else None)
            except ConfigError:                        # sums of so many columns fit no block
                pass
            else:
                return out if out.shape == x.shape else out.view(x.shape), of_gamma, of_beta
        found, *terms = _norm_gradients(g, rows, factors, eps, centred)
        for total, of_rows in ((of_gamma, terms[0]), (of_beta, terms[1])):
            if total.numel():
                total.copy_(of_rows.sum(0))
        return x.new_empty(x.shape).copy_(found.view(x.shape)), of_gamma, of_beta


def _norm_gradients(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor | None, eps: float,
                    centred: bool) -> tuple[torch.Tensor, ...]:
    """By PyTorch: dx of rows, and of each row what is added up for dgamma and dbeta."""
    wide = wide_of(grad, x, gamma)
    g, c = grad.to(wide), x.to(wide)
    c = c - c.mean(-1, keepdim=True) if centred else c
    r = torch.rsqrt((c * c).mean(-1, keepdim=True) + eps)
    n, h = c * r, g if gamma is None else g * gamma
    least = h.mean(-1, keepdim=True) if centred else 0.0
    return r * (h - least - n * (h * n).mean(-1, keepdim=True)), g * n, g


def wide_of(*tensors: torch.Tensor | None) -> torch.dtype:
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def _first_of_norm(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor | None, *, eps: float, centred: bool,
                   **_: object) -> tuple[torch.Tensor, ...]:
    found, of_gamma, of_beta = _norm_gradients(rows_of(grad), rows_of(x), gamma, eps, centred)
    return found.view(x.shape), of_gamma.sum(0), of_beta.sum(0)


def _allocate_norm_backward(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor | None, *, eps: float, centred: bool,
                            sums: bool = True, beta: torch.dtype | None = None) -> tuple[Any, Any, Any]:
    return x.new_empty(x.shape), *_allocate_sums(x, gamma, sums, beta)


def _allocate_sums(x: torch.Tensor, gamma: torch.Tensor | None, sums: bool, beta: torch.dtype | None) -> tuple[Any, Any]:
    """For dgamma and dbeta; empty ones where these are not wanted."""
    if not sums or gamma is None:
        return x.new_empty(0), x.new_empty(0)
    of_beta = gamma.new_empty(0) if beta is None else torch.empty_like(gamma, dtype=beta)
    return torch.empty_like(gamma), of_beta


_NORM = operator("norm", "(Tensor x, Tensor? gamma, Tensor? beta, *, float eps, bool centred, ScalarType? dtype=None) -> "
                 "Tensor", _compute_norm, _allocate_norm, _backward_norm, _keep_norm)
_NORM_BACKWARD = operator("norm_backward", "(Tensor grad, Tensor x, Tensor? gamma, *, float eps, bool centred, "
                          "bool sums=True, ScalarType? beta=None) -> (Tensor, Tensor, Tensor)", _compute_norm_backward,
                          _allocate_norm_backward, *derived(_first_of_norm), of_rows=False)


# -- softmaxes --------------------------------------------------------------------------------------------------------

def _compute_softmax(x: torch.Tensor, *, scale: float, log: bool, dtype: torch.dtype | None = None) -> Any:
    rows = x if x.is_contiguous() else rows_of(x)
    out = None if dtype is None or dtype == x.dtype else torch.empty_like(rows, dtype=dtype)
    found = (forward.log_softmax if log else forward.softmax)(rows, scale=scale, out=out)
    return found if rows is x else found.view(x.shape)


def _allocate_softmax(x: torch.Tensor, *, scale: float, log: bool, dtype: torch.dtype | None = None) -> Any:
    if not x.dim():
        raise ValueError("x has no axis; it needs one at least, along which its rows lie")
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def _keep_softmax(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any],
                  output: object) -> None:
    ctx.save_for_backward(output)
    ctx.options = dict(scale=keyword_only_inputs["scale"], log=keyword_only_inputs["log"], dtype=inputs[0].dtype)


def _backward_softmax(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> Any:
    (y,) = ctx.saved_tensors
    return (_SOFTMAX_BACKWARD if is_recorded() else _compute_softmax_backward)(grad, y, **ctx.options)


def _compute_softmax_backward(grad: torch.Tensor, y: torch.Tensor, *, scale: float, log: bool, dtype: torch.dtype) -> Any:
    out = _allocate_softmax_backward(grad, y, scale=scale, log=log, dtype=dtype)
    if not y.numel():
        return out
    with torch.no_grad():
        grad, rows = rows_of(grad), rows_of(y)
        if torch.float64 in (grad.dtype, y.dtype):
            return out.copy_(_first_of_softmax(grad, rows, scale=scale, log=log).view(y.shape))
        (_log_softmax_backward if log else _softmax_backward)(grad, rows, out.view(rows.shape), scale)
        return out


def _allocate_softmax_backward(grad: torch.Tensor, y: torch.Tensor, *, scale: float, log: bool, dtype: torch.dtype) -> Any:
    return y.new_empty(y.shape, dtype=dtype)


def _first_of_softmax(grad: torch.Tensor, y: torch.Tensor, *, scale: float, log: bool, **_: object) -> torch.Tensor:
    """By PyTorch."""
    compute = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    wide = wide_of(grad, y)
    return scale * compute(grad.to(wide), y.to(wide), -1, wide)


_SOFTMAX = operator("softmax", "(Tensor x, *, float scale, bool log, ScalarType? dtype=None) -> Tensor", _compute_softmax,
                    _allocate_softmax, _backward_softmax, _keep_softmax)
_SOFTMAX_BACKWARD = operator("softmax_backward", "(Tensor grad, Tensor y, *, float scale, bool log, ScalarType dtype) -> "
                             "Tensor", _compute_softmax_backward, _allocate_softmax_backward, *derived(_first_of_softmax),
                             of_rows=False)


# -- gated units ------------------------------------------------------------------------------------------------------

def _compute_gated(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> Any:
    out = _allocate_gated(gate, up, activation=activation)
    if out.numel():
        rows = rows_of(gate)
        _gate(rows, rows_of(up), out.view(rows.shape), unit(activation).of_a_number)
    return out


def _allocate_gated(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> Any:
    return gate.new_empty(gate.shape)


def _backward_gated(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> Any:
    compute = GATED_BACKWARD if is_recorded() else _compute_gated_backward
    return compute(grad, *ctx.saved_tensors, **ctx.options)


def _compute_gated_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> tuple[Any, Any]:
    out = _allocate_gated_backward(grad, gate, up, activation=activation)
    if gate.numel():
        how, rows = unit(activation), rows_of(gate)
        with torch.no_grad():
            _gate_backward(rows_of(grad), rows, rows_of(up), *(x.view(rows.shape) for x in out), how.of_a_number, how.slope)
    return out


def _allocate_gated_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *,
                             activation: str) -> tuple[Any, Any]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _first_of_gated(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> Any:
    """By PyTorch."""
    function = unit(activation).of_tensors
    return torch.func.vjp(lambda x, y: function(x) * y, gate.float(), up.float())[1](grad.float())


_GATED = operator("gated", "(Tensor gate, Tensor up, *, str activation) -> Tensor", _compute_gated, _allocate_gated,
                  _backward_gated, keep, of_rows=False)
GATED_BACKWARD = operator("gated_backward", "(Tensor grad, Tensor gate, Tensor up, *, str activation) -> (Tensor, Tensor)",
                           _compute_gated_backward, _allocate_gated_backward, *derived(_first_of_gated), of_rows=False)


def _check_glu(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> None:
    for name, weights in (("w", w), ("v", v)):
        if not isinstance(weights, torch.Tensor) or weights.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(getattr(weights, 'shape', ()))}; a matrix (K, N) is needed")
    if w.shape != v.shape:
        raise ValueError(f"w has shape {tuple(w.shape)} and v has shape {tuple(v.shape)}; both must be the same")
    if not x.dim() or x.shape[-1] != w.shape[0]:
        raise ValueError(f"x has shape {tuple(x.shape)}; (..., {w.shape[0]}) is needed, because w has {w.shape[0]} rows")
    check_dtypes(x, w=w, v=v)
    check_together(x, w=w, v=v)


def _compute_glu(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, activation: str) -> Any:
    function = unit(activation).of_a_number
    found = units.again(function, (x, w, v))
    if found is None:
        _check_glu(x, w, v)
        found = forward_glu(x, w, v, function)
    return found


def _allocate_glu(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, activation: str) -> Any:
    _check_glu(x, w, v)
    return x.new_empty(result_shape(x, w, "plain", "plain"))


def _backward_glu(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    """Of a call that kept no products (by ``torch.ops``, or within ``torch.func``): they are computed a second time."""
    x, w, v = ctx.saved_tensors
    of_gate, of_up = GATED_BACKWARD(grad, matmul(x, w), matmul(x, v), **ctx.options)
    of_x, of_w, of_v = ctx.needs_input_grad[:3]
    return (matmul(of_gate, w.mT) + matmul(of_up, v.mT) if of_x else None,
            matmul(x.mT, of_gate) if of_w else None, matmul(x.mT, of_up) if of_v else None)


_GLU = operator("glu", "(Tensor x, Tensor w, Tensor v, *, str activation) -> Tensor", _compute_glu, _allocate_glu,
                _backward_glu, keep)


# -- of layers with packed weights: two matrices of words, and one launch -------------------------------------------------

def _compute_quantised_glu(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
                           up_words: torch.Tensor, up_scales: torch.Tensor, up_zeros: torch.Tensor | None, *, bits: int,
                           group: int, activation: str) -> Any:
    rows = rows_of(x)

    def described() -> tuple[Any, Any, dict[str, Any]]:
        w = packed_weights(x, words, scales, zeros, bits, group)
        v = packed_weights(x, up_words, up_scales, up_zeros, bits, group)
        return rows, InterleavedColumns(w, v), {"epilogue": gating(unit(activation).of_a_number)}

    tensors = rows, words, scales, zeros, up_words, up_scales, up_zeros
    found = of_rows(_pairs, (bits, group, activation, zeros is None), tensors, described)
    return found if found.dim() == x.dim() else found.view(*x.shape[:-1], words.shape[1])


_pairs = Door()                        # products of layers' pairs that come again


def _allocate_quantised_glu(x: torch.Tensor, words: torch.Tensor, *rest: object, **options: object) -> Any:
    return x.new_empty((*x.shape[:-1], words.shape[1]))


def _backward_quantised_glu(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    """Of a call that kept no products: they are computed a second time. Words have no gradient."""
    x, *tensors = ctx.saved_tensors
    bits, group = ctx.options["bits"], ctx.options["group"]
    products = (QUANTISED_LINEAR(x, *of, None, bits, group, None, False) for of in (tensors[:3], tensors[3:]))
    of_gate, of_up = GATED_BACKWARD(grad, *products, activation=ctx.options["activation"])
    of_x = QUANTISED_GRADIENT(of_gate, *tensors[:3], bits, group) + QUANTISED_GRADIENT(of_up, *tensors[3:], bits, group)
    return of_x, *(None for _ in tensors)


_QUANTISED_GLU = operator("quantised_glu", "(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor up_words, "
                          "Tensor up_scales, Tensor? up_zeros, *, int bits, int group, str activation) -> Tensor",
                          _compute_quantised_glu, _allocate_quantised_glu, _backward_quantised_glu, keep)
