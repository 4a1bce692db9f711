"""``gemmkit::grouped_mm``: products of groups of rows as an operator of PyTorch's, with gradients of all orders."""

from __future__ import annotations

from typing import Any

import torch

from gemmkit.functions.grouped import by_groups, of_groups
from gemmkit.torch.product import Differentiable, autocast, batched_by, check_dtypes, check_together, define

TAKEN = torch.float16, torch.bfloat16
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
    if a.dtype not in TAKEN:
        raise TypeError(f"mat_a has dtype {a.dtype}; float16 or bfloat16 is needed")
    check_dtypes(a, mat_b=b)
    check_together(a, mat_b=b, offs=offs)


def _lines(x: torch.Tensor) -> torch.Tensor:
    """With contiguous rows; a copy, where they are not."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


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
        turned = b.stride(1) == 1 and b.shape[1] > 1 and 0 not in b.stride()
        by_groups(out, _lines(a), b.mT if turned else _lines(b), bounds[:-1], turned)
        zeros = a.new_zeros(8 * (rows + out.shape[1]))
        by_groups(out, zeros[:8 * rows].view(rows, 8), zeros[8 * rows:].view(1, 8, -1), bounds[-2:], False)
        return out


def _allocate(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Any:
    """The result, uninitialised."""
    _check(a, b, offs)
    return a.new_empty((a.shape[0], b.shape[2]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1]))


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    """Products of groups of rows are those of columns' gradients, and the other way round."""
    a, b, offs = ctx.saved_tensors
    of_a, of_b = ctx.needs_input_grad[:2]
    if b.dim() == 3:
        return (_OPERATOR(grad, b.mT, offs) if of_a else None), (_OPERATOR(a.mT, grad, offs) if of_b else None), None
    return (_OPERATOR(b, grad.mT, offs).mT if of_a else None), (_OPERATOR(a.mT, grad, offs) if of_b else None), None


def _one_by_one(size: int, in_dims: tuple[int | None, ...], *args: torch.Tensor) -> tuple[Any, Any]:
    """Of a batch there is one launch after the other."""
    return batched_by(_OPERATOR, size, in_dims[:3], args, (None,) * 3, {})


_SCHEMA = "(Tensor a, Tensor b, Tensor offs) -> Tensor"
_OPERATOR: Any = Differentiable(define("gemmkit::grouped_mm", _SCHEMA, _compute, _allocate), _backward, _keep, _one_by_one,
                                _compute)
