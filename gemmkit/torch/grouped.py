"""Operators of PyTorch's for products of groups of rows, and of 8-bit floats with scales.

``gemmkit::grouped_mm`` has gradients of all orders. ``gemmkit::experts`` is a mixture of gated experts, whose rows are taken
where they lie. ``gemmkit::scaled_mm`` multiplies scaled numbers.
"""

from __future__ import annotations

import functools
from operator import or_
from typing import Any, Literal

import torch

from gemmkit.epilogues import Bias, Epilogue, Scale
from gemmkit.functions import grouped as programs
from gemmkit.functions.grouped import by_groups, of_groups
from gemmkit.functions.matmul import Door
from gemmkit.operators.wgmma import BLOCK, BlockScaledOp
from gemmkit.runtime.arrays import describe, dtype_from_torch
from gemmkit.runtime.device import target
from gemmkit.torch.product import (
    NARROW,
    autocast,
    batched_by,
    check_dtypes,
    check_together,
    define,
    derived,
    is_eager,
    keep,
    known,
    records,
)
from gemmkit.torch.rows import GATED_BACKWARD, gated, operator, unit
from gemmkit.tuning.sm90 import columns_of_scaled

_FORMS = ("(rows, K) and (groups, K, N), or (M, rows) and (rows, N), are needed; of equal groups, (groups, M, K) and "
          "(groups, K, N), gemmkit.torch.matmul is the product")


def grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor) -> Any:
    """Multiply groups of rows with a matrix each, or with each other, in one launch: the arguments of PyTorch's
    ``torch._grouped_mm``. Sizes of groups stay on the GPU: nothing is synchronised.

    Args:
        mat_a, mat_b: float16 or bfloat16.

            | mat_a | mat_b | contiguous axes | the result |
            |---|---|---|---|
            | (rows, K) | (groups, K, N) | K; K or N | (rows, N): the rows of a group times its matrix |
            | (M, rows) | (rows, N) | M; N | (groups, M, N): the products of the columns and rows of a group |

            A tensor of which another axis is contiguous, or none, is copied first.

        offs: (groups,) int32 or int64: behind the last row of each group, in ascending order. ``torch.autocast`` casts the
            others.

    Returns: a new tensor of their dtype. It has gradients by both, the same bits every time, and so have these. Rows behind
    the last group belong to none: they are in no product, whatever they hold, and those of results are zeros. A group
    without rows has a product of zeros.

    Raises, before anything is launched
        TypeError: no tensors, other dtypes, or two of them.
        ValueError: other shapes; rows that do not begin at multiples of 16 bytes; tensors on several devices.
        ConfigError: a GPU other than of compute capability 9.0.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> x, ends = torch.ones(3, 8).half().requires_grad_(), torch.tensor([1, 3])
    >>> w = torch.stack((torch.ones(8, 8), 2 * torch.ones(8, 8))).half()
    >>> with gk.emulate():
    ...     y = gk.torch.grouped_mm(x, w, ends)
    ...     y.sum().backward()
    >>> y[:, 0].tolist(), x.grad[:, 0].tolist()
    ([8.0, 16.0, 16.0], [8.0, 16.0, 16.0])
    """
    for name, x in (("mat_a", mat_a), ("mat_b", mat_b), ("offs", offs)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; gemmkit.torch.grouped_mm takes tensors")
    mat_a, mat_b = autocast(mat_a, mat_b)
    return _OPERATOR(mat_a, mat_b, offs)


def _check(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> None:
    if offs.dim() != 1 or offs.dtype not in (torch.int32, torch.int64) or not offs.shape[0]:
        raise ValueError(f"offs has shape {tuple(offs.shape)} and dtype {offs.dtype}; (groups,) of int32 or int64 is needed,"
                         " at least one")
    if a.dim() != 2 or b.dim() not in (2, 3):
        raise ValueError(f"mat_a has shape {tuple(a.shape)} and mat_b has shape {tuple(b.shape)}; {_FORMS}")
    if a.shape[1] != b.shape[-2]:
        raise ValueError(f"mat_a has {a.shape[1]} columns and mat_b has {b.shape[-2]} rows; both must be "
                         f"{'K' if b.dim() == 3 else 'the rows of all groups'}")
    if b.dim() == 3 and b.shape[0] != offs.shape[0]:
        raise ValueError(f"mat_b has {b.shape[0]} matrices and offs has {offs.shape[0]} ends; each group needs one of both")
    if a.dtype not in NARROW:
        raise TypeError(f"mat_a has dtype {a.dtype}; float16 or bfloat16 is needed")
    check_dtypes(a, mat_b=b)
    check_together(a, mat_b=b, offs=offs)


def _lines(x: torch.Tensor) -> torch.Tensor:
    """With contiguous rows; a copy, where they are not."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _right(w: torch.Tensor, *others: torch.Tensor) -> tuple[Any, ...]:
    """Right operands that a program takes, and whether they are transposes of what it takes: all of one order."""
    if w.stride(1) == 1 and w.shape[1] > 1 and 0 not in w.stride():
        return *(_lines(y.mT) for y in (w, *others)), True
    return *map(_lines, (w, *others)), False


def _compute(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Any:
    _check(a, b, offs)
    with torch.no_grad():
        rows = a.shape[0] if b.dim() == 3 else a.shape[1]
        bounds = offs.new_full((offs.shape[0] + 2,), rows)             # 0, the ends, and the end of all rows
        bounds[:1].zero_()                             # an element of Python's is copied from the host, which graphs refuse
        bounds[1:-1].copy_(offs)
        if b.dim() == 2:
            out = a.new_empty((offs.shape[0], a.shape[0], b.shape[1]))
            if rows and out.numel():
                of_groups(out, _lines(a.t()), _lines(b), bounds[:-1])
            return out if rows else out.zero_()
        out = a.new_empty((rows, b.shape[2]))
        if not out.numel() or not a.shape[1]:
            return out.zero_()
        w, turned = _right(b)
        by_groups(out, _lines(a), w, bounds[:-1], turned)
        zeros = a.new_zeros(8 * (rows + out.shape[1]))
        by_groups(out, zeros[:8 * rows].view(rows, 8), zeros[8 * rows:].view(1, 8, -1), bounds[-2:], False)
        return out


def _allocate(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Any:
    """The result, uninitialised."""
    _check(a, b, offs)
    return a.new_empty((a.shape[0], b.shape[2]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1]))


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    """Products of groups of rows are those of columns' gradients, and the other way round."""
    a, b, offs = ctx.saved_tensors
    of_a, of_b = ctx.needs_input_grad[:2]
    if b.dim() == 3:
        return (_OPERATOR(grad, b.mT, offs) if of_a else None), (_OPERATOR(a.mT, grad, offs) if of_b else None), None
    return (_OPERATOR(b, grad.mT, offs).mT if of_a else None), (_OPERATOR(a.mT, grad, offs) if of_b else None), None


_OPERATOR = operator("grouped_mm", "(Tensor a, Tensor b, Tensor offs) -> Tensor", _compute, _allocate, _backward, keep,
                     of_rows=False)


# --------------------------------------------------------------------------------------------------
# A mixture of experts.

def experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
            down: torch.Tensor, activation: str = "silu") -> Any:
    """Give each token to the gated experts that are chosen for it, and add up what they make of it:

        y[t] = sum over j of  weights[t, j] (activation(x[t] gate[e]) * (x[t] up[e])) down[e],   e = chosen[t, j]

    Args:
        x: (tokens, width), float16 or bfloat16.
        chosen: (tokens, choices) int32 or int64: numbers of experts, such as ``topk(router(x), 8).indices``. A number that
            is none of them, such as -1 for an expert of another GPU, is a choice that adds nothing.
        weights: (tokens, choices), of any floating-point dtype.
        gate, up: (experts, width, hidden) of x's dtype, contiguous along either of the last two axes: ``w.mT`` of
            ``torch.nn.Linear``'s order.
        down: (experts, hidden, width).
        activation: as `gemmkit.torch.glu` takes it.

    ``torch.autocast`` casts x and the experts.

    Returns: a new tensor (tokens, width). It has gradients by x, weights, gate, up and down, the same bits every time, and
        so have these. Two kernels multiply: the first takes tokens where they lie, the second puts weighted results where
        they are added up. Second derivatives copy tokens for each choice. PyTorch sorts what is chosen; nothing is
        synchronised.

    Raises, before anything is launched
        TypeError: no tensors, other dtypes, or two of them.
        ValueError: other shapes and activations; rows that do not begin at multiples of 16 bytes; several devices.
        ConfigError: a GPU other than of compute capability 9.0.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> x, chosen, weights = torch.ones(2, 8).half(), torch.tensor([[0, 1], [1, -1]]), torch.tensor([[0.5, 0.5], [1.0, 1.0]])
    >>> gate, up, down = (torch.stack((torch.eye(8), 2 * torch.eye(8))).half() for _ in range(3))
    >>> with gk.emulate():
    ...     gk.torch.experts(x, chosen, weights, gate, up, down, "relu")[:, 0].tolist()
    [4.5, 8.0]
    """
    x, gate, up, down = checked_experts("gemmkit.torch.experts", x, chosen, weights, gate, up, down, activation)
    return compute_experts(x, chosen, weights, gate, up, down, activation)


def checked_experts(call: str, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor,
                    up: torch.Tensor, down: torch.Tensor, activation: str) -> Any:
    """x and the experts as ``torch.autocast`` casts them. Raises what `experts` raises, but for how rows lie."""
    for name, y in dict(x=x, chosen=chosen, weights=weights, gate=gate, up=up, down=down).items():
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"{name} is a {type(y).__name__}; {call} takes tensors")
    unit(activation)
    x, gate, up, down = autocast(x, gate, up, down)
    _check_experts(x, chosen, weights, gate, up, down)
    return x, gate, up, down


def compute_experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                    down: torch.Tensor, activation: str, rows: torch.Tensor | None = None) -> Any:
    """`experts` of checked tensors. ``rows`` names the row of x for each row of ``chosen``, which has one expert's number
    then; no gradient is recorded."""
    if rows is None:
        token, order, bounds = _sorted(chosen, gate.shape[0])
    else:
        order, bounds = _in_order(chosen.flatten(), gate.shape[0])
        token = rows[order]
    y, _, _ = _EXPERTS(x, weights, gate, up, down, token, order, bounds, activation=activation,
                       kept=records(x, weights, gate, up, down))
    return y


def _sorted(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all choices in the order of their experts: each one's token, -1 for what is no expert's; each one's place; where
    each expert's begin."""
    known, device = chosen.clamp(0, count - 1), chosen.device
    token = torch.where(chosen == known, torch.arange(chosen.shape[0], device=device)[:, None], -1)
    order, bounds = _in_order(known.flatten(), count)
    return token.flatten()[order], order, bounds


def _in_order(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of numbers in ascending order, and where each of ``count`` begins. A radix sort takes a pass for each byte,
    so that numbers of 16 bits take two in place of eight."""
    dtype = torch.int16 if count < torch.iinfo(torch.int16).max else torch.int32
    numbers, order = numbers.to(dtype).sort(stable=True)
    return order, torch.searchsorted(numbers, torch.arange(count + 1, dtype=dtype, device=numbers.device))


def _check_experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                   down: torch.Tensor) -> None:
    if x.dim() != 2 or x.dtype not in NARROW:
        raise (TypeError if x.dim() == 2 else ValueError)(
            f"x has shape {tuple(x.shape)} and dtype {x.dtype}; (tokens, width) of float16 or bfloat16 is needed")
    if chosen.dim() != 2 or chosen.shape[0] != x.shape[0] or chosen.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"chosen has shape {tuple(chosen.shape)} and dtype {chosen.dtype}; ({x.shape[0]}, choices) of "
                         "int32 or int64 is needed, because x has so many tokens")
    if weights.shape != chosen.shape or not weights.is_floating_point():
        raise ValueError(f"weights has shape {tuple(weights.shape)} and dtype {weights.dtype}; {tuple(chosen.shape)} of "
                         "floating point is needed, as chosen is")
    if gate.dim() != 3 or not gate.shape[0] or gate.shape[1] != x.shape[1]:
        raise ValueError(f"gate has shape {tuple(gate.shape)}; (experts, {x.shape[1]}, hidden) is needed, at least one, "
                         f"because x has {x.shape[1]} columns")
    for name, y, shape in (("up", up, tuple(gate.shape)), ("down", down, (gate.shape[0], gate.shape[2], x.shape[1]))):
        if tuple(y.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(y.shape)}; {shape} is needed, because gate has shape "
                             f"{tuple(gate.shape)}")
    if not x.shape[1] or not gate.shape[2]:
        raise ValueError(f"gate has shape {tuple(gate.shape)}; experts need columns, and hidden ones")
    check_dtypes(x, gate=gate, up=up, down=down)
    check_together(x, chosen=chosen, weights=weights, gate=gate, up=up, down=down)


def _sorted_weights(weights: torch.Tensor, order: torch.Tensor) -> Any:
    return weights.flatten()[order].float()


def _compute_experts(x: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
                     token: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor, *, activation: str,
                     kept: bool) -> tuple[Any, Any, Any]:
    y, g, u = _allocate_experts(x, weights, gate, up, down, token, order, bounds, activation=activation, kept=kept)
    rows, f = token.shape[0], unit(activation).of_a_number
    if not rows:
        return y.zero_(), g, u
    with torch.no_grad():
        h = x.new_empty(rows, gate.shape[2])
        found = y if weights.shape[1] == 1 else x.new_empty(rows, x.shape[1])
        w, v, turned = _right(gate, up)
        programs.gated_groups(h, g if kept else None, u if kept else None, _lines(x), w, v, token, bounds, turned, f)
        w, turned = _right(down)
        programs.scattered_groups(found, h, None, w, None, order, bounds, _sorted_weights(weights, order), turned)
        if found is not y:
            torch.sum(found.view(*weights.shape, -1), 1, out=y)
        return y, g, u


def _allocate_experts(x: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
                      token: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor, *, activation: str,
                      kept: bool) -> tuple[Any, Any, Any]:
    products = (x.new_empty(token.shape[0] if kept else 0, gate.shape[2]) for _ in range(2))
    return x.new_empty(weights.shape[0], x.shape[1]), *products


def _keep_experts(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any],
                  output: tuple[Any, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.activation, ctx.kept = keyword_only_inputs["activation"], keyword_only_inputs["kept"]


def _backward_experts(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, *others: object) -> tuple[Any, ...]:
    """Of a call that kept no products they are computed a second time."""
    *inputs, g, u = ctx.saved_tensors
    if not ctx.kept:
        _, g, u = _EXPERTS(*inputs, activation=ctx.activation, kept=True)
    found = _EXPERTS_BACKWARD(grad, *inputs, g, u, activation=ctx.activation)
    return *(y if needed else None for y, needed in zip(found, ctx.needs_input_grad)), None, None, None


def _compute_experts_backward(grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor,
                              up: torch.Tensor, down: torch.Tensor, token: torch.Tensor, order: torch.Tensor,
                              bounds: torch.Tensor, g: torch.Tensor, u: torch.Tensor, *, activation: str) -> tuple[Any, ...]:
    of_x, of_weights, of_gate, of_up, of_down = found = _allocate_experts_backward(
        grad, x, weights, gate, up, down, token, order, bounds, g, u, activation=activation)
    rows, how = token.shape[0], unit(activation)
    if not rows:
        return tuple(y.zero_() for y in found)
    with torch.no_grad():
        grad, x = _lines(grad), _lines(x)
        e, h, dg, du = (x.new_empty(rows, gate.shape[2]) for _ in range(4))
        of_rows = torch.empty(rows, dtype=torch.float32, device=x.device)
        w, turned = _right(down.mT)
        by_groups(e, grad, w, bounds, turned, token)
        programs.gate_backward(e, g, u, _sorted_weights(weights, order), dg, du, h, of_rows, how.of_a_number, how.slope)
        programs.of_token_groups(of_gate, of_up, x, dg, du, token, bounds)
        of_groups(of_down, h, grad, bounds, token)
        found_x = x.new_empty(rows, x.shape[1])
        w, v, turned = _right(gate.mT, up.mT)
        programs.scattered_groups(found_x, dg, du, w, v, order, bounds, None, turned)
        torch.sum(found_x.view(*weights.shape, -1), 1, out=of_x)
        of_weights.view(-1)[order] = of_rows.to(weights.dtype)
        return found


def _allocate_experts_backward(grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor,
                               up: torch.Tensor, down: torch.Tensor, token: torch.Tensor, order: torch.Tensor,
                               bounds: torch.Tensor, g: torch.Tensor, u: torch.Tensor, *,
                               activation: str) -> tuple[Any, ...]:
    return tuple(y.new_empty(y.shape) for y in (x, weights, gate, up, down))


def _first_of_experts(grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                      down: torch.Tensor, token: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor, *_: object,
                      activation: str) -> tuple[torch.Tensor, ...]:
    """By products of groups, of copies of tokens."""
    ends, place, nobody = bounds[1:], order.argsort(), token[:, None] < 0

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x[:, None].expand(*weights.shape, -1).flatten(0, 1)[order].masked_fill(nobody, 0)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> Any:
        return _OPERATOR(a, b, ends)

    copies, grads, factors = rows(x), rows(grad), weights.flatten()[order, None].to(x.dtype)
    g, u, e = multiply(copies, gate), multiply(copies, up), multiply(grads, down.mT)
    h = gated(g, u, activation)
    dg, du = GATED_BACKWARD(e * factors, g, u, activation=activation)
    of_x = multiply(dg, gate.mT) + multiply(du, up.mT)
    return (of_x[place].view(*weights.shape, -1).sum(1), (e.float() * h).sum(1)[place].view(weights.shape),
            multiply(copies.mT, dg), multiply(copies.mT, du), multiply((h * factors).mT, grads))


_OF_EXPERTS = "Tensor x, Tensor weights, Tensor gate, Tensor up, Tensor down, Tensor token, Tensor order, Tensor bounds"
_EXPERTS = operator("experts", f"({_OF_EXPERTS}, *, str activation, bool kept) -> (Tensor, Tensor, Tensor)",
                    _compute_experts, _allocate_experts, _backward_experts, _keep_experts, of_rows=False)
_EXPERTS_BACKWARD = operator("experts_backward", f"(Tensor grad, {_OF_EXPERTS}, Tensor g, Tensor u, *, str activation) -> "
                             "(Tensor, Tensor, Tensor, Tensor, Tensor)", _compute_experts_backward,
                             _allocate_experts_backward, *derived(_first_of_experts), of_rows=False)


# --------------------------------------------------------------------------------------------------
# ``gemmkit::scaled_mm``: products of 8-bit floats with scales, as an operator of PyTorch's.

EIGHT = torch.float8_e4m3fn, torch.float8_e5m2
RESULTS = torch.bfloat16, torch.float16, torch.float32


def scaled_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
              bias: torch.Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16,
              use_fast_accum: bool = False) -> Any:
    """Multiply 8-bit floats that have scales: (scale_a * mat_a) @ (scale_b * mat_b) + bias, with the arguments of PyTorch's
    ``torch._scaled_mm``. Scales stay on the GPU: nothing is synchronised.

    Args:
        mat_a: (M, K) float8_e4m3fn or float8_e5m2. By rows it is read as it lies.
        mat_b: (K, N) of either dtype. By columns it is read as it lies.
        scale_a, scale_b: float32, any strides. For either matrix one of the first two rows, or for both one of the others
            (quotients are rounded up).

            | scales | scale_a | scale_b |
            |---|---|---|
            | of the matrix | one element | one element |
            | of its rows, or columns | (M, 1) | (1, N) |
            | of blocks of 128 along K | (M, K / 128) | (K / 128, N) |
            | of blocks of 128 x 128 | (M / 128, K / 128) | (K / 128, N / 128) |

        bias: (N,) float16, bfloat16 or float32, added behind the scales.
        out_dtype: bfloat16, float16 or float32.
        use_fast_accum: keep the 14 bits of a sum that Hopper's tensor cores keep. By default, and with scales of blocks
            always, sums of 128 elements are added in float32.

    Returns: a new (M, N) tensor of ``out_dtype``. It has no gradient.

    Raises, before anything is launched
        TypeError: no tensors, or other dtypes.
        ValueError: shapes that do not fit each other; tensors on several devices.
        NotImplementedError: a tensor requires a gradient, and gradients are enabled.
        ConfigError: scales of blocks on a GPU other than of compute capability 9.0.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> a, b = torch.ones(2, 256).to(torch.float8_e4m3fn), torch.ones(3, 256).to(torch.float8_e4m3fn).t()
    >>> with gk.emulate():
    ...     gk.torch.scaled_mm(a, b, torch.tensor([[1.0, 0.5], [2.0, 2.0]]), torch.ones(2, 1)).tolist()
    [[192.0, 192.0, 192.0], [512.0, 512.0, 512.0]]
    """
    tensors = (mat_a, mat_b, scale_a, scale_b) if bias is None else (mat_a, mat_b, scale_a, scale_b, bias)
    found = known(_scaled, (out_dtype, use_fast_accum), tensors)
    if found is not None:
        return found
    for name, x in zip(("mat_a", "mat_b", "scale_a", "scale_b", "bias"), tensors):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; gemmkit.torch.scaled_mm takes tensors")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} requires a gradient, which scaled_mm does not have; use torch.no_grad(), or "
                                      "detach it")
    if is_eager(tensors):
        return _compute_scaled(mat_a, mat_b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    return _SCALED(mat_a, mat_b, scale_a, scale_b, bias, out_dtype, use_fast_accum)


_scaled = Door()                       # by the result's dtype and the accumulation, of all tensors


def _check_scaled(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
                  out_dtype: torch.dtype) -> str:
    """Of what the scales are: "matrices", for rows, columns and whole ones, or "blocks"."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"mat_a has shape {tuple(a.shape)} and mat_b has shape {tuple(b.shape)}; (M, K) and (K, N) are "
                         "needed")
    for name, x in (("mat_a", a), ("mat_b", b)):
        if x.dtype not in EIGHT:
            raise TypeError(f"{name} has dtype {x.dtype}; float8_e4m3fn or float8_e5m2 is needed")
    for name, x in (("scale_a", scale_a), ("scale_b", scale_b)):
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; float32 is needed")
    if out_dtype not in RESULTS:
        raise TypeError(f"out_dtype={out_dtype}: bfloat16, float16 or float32 is needed")
    check_together(a, mat_b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    (M, K), N = a.shape, b.shape[1]
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype not in RESULTS):
        raise ValueError(f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}; ({N},) of bfloat16, float16 or "
                         "float32 is needed")
    of_a, of_b = tuple(scale_a.shape), tuple(scale_b.shape)
    if (scale_a.numel() == 1 or of_a == (M, 1)) and (scale_b.numel() == 1 or of_b == (1, N)):
        return "matrices"
    blocks, rows, columns = _blocks(K), _blocks(M), _blocks(N)
    if of_a in ((M, blocks), (rows, blocks)) and of_b in ((blocks, N), (blocks, columns)):
        return "blocks"
    raise ValueError(f"scale_a has shape {of_a} and scale_b has shape {of_b}; a product of {M} x {N} x {K} takes one "
                     f"element or ({M}, 1) beside one element or (1, {N}), or ({M}, {blocks}) or ({rows}, {blocks}) beside "
                     f"({blocks}, {N}) or ({blocks}, {columns})")


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _compute_scaled(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                    bias: torch.Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool) -> Any:
    kind = _check_scaled(a, b, scale_a, scale_b, bias, out_dtype)

    def described() -> tuple[Any, Any, dict[str, Any]]:
        keywords: dict[str, Any] = {"dtype": dtype_from_torch(out_dtype)}
        stages: list[Epilogue] = []
        if kind == "blocks":
            keywords["operator"] = _operator(a, b, scale_a.detach(), scale_b.detach())
        else:
            stages = [_factor(scale_a.detach(), "M"), _factor(scale_b.detach(), "N")]
            if use_fast_accum:
                keywords["precision"] = "fast"
        if bias is not None:
            stages.append(Bias(bias.detach()))
        if stages:
            keywords["epilogue"] = functools.reduce(or_, stages)
        return a, b, keywords

    arrays = (a, b, scale_a, scale_b) if bias is None else (a, b, scale_a, scale_b, bias)
    with torch.no_grad():
        return _scaled((out_dtype, use_fast_accum), arrays, None, None, described)


def _factor(scale: torch.Tensor, along: Literal["M", "N"]) -> Scale:
    """Of one element, in memory; else of each row or column."""
    return Scale(scale.reshape(()) if scale.numel() == 1 else scale.select(1 if along == "M" else 0, 0), along)


def _operator(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> BlockScaledOp:
    (M, K), N = a.shape, b.shape[1]
    rows, columns = (1 if own == size else BLOCK for own, size in ((scale_a.shape[0], M), (scale_b.shape[1], N)))
    width = columns_of_scaled((M, N, K), target(describe(a, "mat_a").device), BLOCK if columns == 1 else 2 * BLOCK)
    return BlockScaledOp(width, dtype_from_torch(a.dtype), b_dtype=dtype_from_torch(b.dtype), scale_a=scale_a,
                         scale_b=scale_b, rows=rows, columns=columns)


def _allocate_scaled(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
                     bias: torch.Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool) -> Any:
    """The result, uninitialised."""
    _check_scaled(a, b, scale_a, scale_b, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _scaled_one_by_one(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """Of a batch there is one launch after the other."""
    tensors, options = args[:5], args[5:]
    return batched_by(lambda *one: _SCALED(*one, *options), info.batch_size, in_dims[:5], tensors, (None,) * 5, {})


_SCALED_SCHEMA = ("(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, "
                  "bool use_fast_accum) -> Tensor")
_SCALED: Any = define("gemmkit::scaled_mm", _SCALED_SCHEMA, _compute_scaled, _allocate_scaled)
torch.library.register_vmap(_SCALED, _scaled_one_by_one)
