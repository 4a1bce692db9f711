"""The cross entropy of a linear layer, as an operator of PyTorch's whose logits are never in memory all at a time.

Logits of a part of the rows lie in one matrix, whose rows begin at lines of the L2. A program of rows computes losses from
them, and puts the logits' gradient in their place, which the products of dx and dweight read. The gradient of a mean or a
sum is so computed along with it, since a later factor multiplies all of it: the logits are multiplied once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch.nn import functional as F

from gemmkit import programs as gp
from gemmkit.epilogues import Bias, Scale, Tanh
from gemmkit.functions.matmul import matmul as product
from gemmkit.lang.checks import FLOAT32_MAX
from gemmkit.programs import program
from gemmkit.torch.product import autocast, check_dtypes, check_together, derived, keep
from gemmkit.torch.rows import is_recorded, operator, rows_of, tensor_given, wide_of

LINE = 128                             # bytes
PART_ROWS, PART_LOGITS = 2048, 2**26   # of a part at least, and logits: each part reads and writes all of dweight
SOME_PARTS, HALF = 4, 256.0            # up to so many add up dweight in its own dtype; a factor of slopes of float16



def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None, *,
                         reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0,
                         z_loss: float = 0.0, softcap: float | None = None) -> Any:
    """The cross entropy of ``x weight^T + bias`` and labels, as an operator with gradients of x, weight and bias. Logits of
    some thousand rows are in memory at a time: of those the loss and the gradients are computed, then of the next.

    Args:
        x: (..., H) float16, bfloat16, float32 or float64: what a head gets. ``torch.autocast`` casts x, weight and bias.
        weight: (V, H) of x's dtype, as `torch.nn.Linear` has it.
        labels: (...) int32 or int64, from 0 to V - 1, or ``ignore_index``. A row of another label has the loss NaN.
        bias: (V,) of x's dtype; None adds nothing.
        reduction: "mean" (over the rows that are not ignored), "sum", or "none": one loss a row.
        ignore_index: the label of rows that have no loss.
        label_smoothing: from 0 to 1, as `torch.nn.functional.cross_entropy` has it.
        z_loss: a factor of log(sum(exp(logits)))^2, which is added to a row's loss.
        softcap: logits become ``softcap tanh(logits / softcap)``; None leaves them as they are.

    Returns: a float32 tensor (float64 of float64) of no dimension, or of labels' shape with "none". Gradients of "mean" and
        "sum" are computed along with the loss where autograd records: three products in all. Those of "none", and gradients
        that have gradients themselves, multiply the logits a second time.

    Raises: TypeError for two dtypes, and for labels that are no whole numbers; ValueError for shapes that do not fit, and
        for numbers out of their range.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> x, head = torch.zeros(2, 4, requires_grad=True), torch.ones(8, 4)
    >>> with gk.emulate():
    ...     loss = gk.torch.linear_cross_entropy(x, head, torch.tensor([3, -100]))
    >>> round(loss.item(), 4), loss.backward()
    (2.0794, None)
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: 'mean', 'sum' or 'none' is needed")
    for name, value, least, most in (("label_smoothing", label_smoothing, 0, 1), ("z_loss", z_loss, 0, FLOAT32_MAX),
                                     ("softcap", 1 if softcap is None else softcap, 1e-30, FLOAT32_MAX)):
        if not least <= value <= most:
            raise ValueError(f"{name}={value!r}: a number from {least} to {most} is needed")
    x, weight, bias = autocast(tensor_given(x, "linear_cross_entropy"), weight, bias)
    _check_entropy(x, weight, labels, bias)
    options = dict(ignored=int(ignore_index), smoothing=float(label_smoothing), z=float(z_loss), cap=float(softcap or 0.0))
    rows, places = rows_of(x), labels.reshape(-1)
    if reduction == "none":
        return _ENTROPY(rows, weight, places, bias, **options).view(labels.shape)
    wanted = [torch.is_grad_enabled() and y is not None and y.requires_grad for y in (rows, weight, bias)]
    return _ENTROPY_SUM(rows, weight, places, bias, mean=reduction == "mean", wanted=wanted, **options)[0]


def _put_loss(m: object, x: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, columns: int, ignored: int,
              smoothing: float, z: float) -> Any:
    """The part that both programs have: a row's loss is stored. The logarithm of the sum of exponentials is returned."""
    top = x[m].max(axis=1)
    whole = top + gp.log(gp.exp(x[m] - top).sum(axis=1))
    own = gp.where(lambda i, j: labels[i] == j, x[m], 0.0).sum(axis=1)
    loss = whole - (1.0 - smoothing) * own - smoothing / columns * x[m].sum(axis=1) + z * whole * whole
    there = gp.where(labels[m] < columns, gp.where(labels[m] < 0, math.nan, loss), math.nan)
    losses[m] = gp.where(labels[m] == ignored, 0.0, there)
    return whole


@program
def _row_losses(x: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, columns: int, ignored: int, smoothing: float,
                z: float) -> None:
    for m in gp.parallel(x.rows):
        _put_loss(m, x, labels, losses, columns, ignored, smoothing, z)


@program
def _row_losses_and_slopes(x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, losses: torch.Tensor, columns: int,
                           ignored: int, smoothing: float, z: float, bend: float) -> None:
    """Logits give way to the slopes of weights x losses. ``bend`` is 1 / cap^2 of logits that are capped, or 0."""
    for m in gp.parallel(x.rows):
        whole = _put_loss(m, x, labels, losses, columns, ignored, smoothing, z)
        share = (1.0 + 2.0 * z * whole) * gp.exp(x[m] - whole) - smoothing / columns
        slope = gp.where(lambda i, j: labels[i] == j, share - (1.0 - smoothing), share)
        x[m] = gp.where(labels[m] == ignored, 0.0, weights[m] * slope * (1.0 - bend * x[m] * x[m]))


def _check_entropy(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, y in (("weight", weight), ("labels", labels)):
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"{name}={y!r}: a tensor is needed")
    if labels.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"labels has dtype {labels.dtype}; int32 or int64 is needed")
    V, shapes = weight.shape[0] if weight.dim() else 0, {"x": x.shape, "weight": weight.shape, "labels": labels.shape}
    if not V or weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1] or labels.shape != x.shape[:-1] or (
            bias is not None and tuple(bias.shape) != (V,)):
        shapes |= {} if bias is None else {"bias": bias.shape}
        raise ValueError("x of (..., H), weight of (V, H), labels of (...) and bias of (V,) are needed; got "
                         + ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items()))
    check_dtypes(x, weight=weight, **({} if bias is None else {"bias": bias}))
    check_together(x, weight=weight, labels=labels, bias=bias)


def _entropy(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None,
             factors: torch.Tensor | None, wanted: Sequence[bool], *, ignored: int, smoothing: float, z: float,
             cap: float) -> tuple[Any, ...]:
    """Losses of rows, and the gradients of factors x losses that are wanted, of x, weight and bias; the others are empty."""
    (M, _), V = x.shape, weight.shape[0]
    x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    losses, options = x.new_empty(M, dtype=wide_of(x)), dict(ignored=ignored, smoothing=smoothing, z=z, cap=cap)
    if x.dtype == torch.float64:
        slopes = _slopes_by_pytorch(factors, x, weight, labels, bias, **options) if any(wanted) else (None,) * 3
        found = _entropy_by_pytorch(x, weight, labels, bias, **options)                                     # type: ignore
        return found, *(y if of else x.new_empty(0) for of, y in zip(wanted, slopes))
    rows = max(PART_ROWS, PART_LOGITS // V)
    size = LINE // x.dtype.itemsize
    logits = x.new_empty((min(rows, M), -(-V // size) * size))[:, :V]
    of_x = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    is_wide = M > SOME_PARTS * rows or x.dtype == torch.float16
    of_weight = (weight.new_empty if M else weight.new_zeros)(
        weight.shape if wanted[1] else 0, dtype=wide_of(x) if is_wide else weight.dtype)
    of_bias = x.new_zeros(V if wanted[2] else 0, dtype=wide_of(x))
    squash = () if not cap else (Scale(1.0 / cap), Tanh(), Scale(cap))
    stages = [*(() if bias is None else (Bias(bias),)), *squash]
    epilogue = reduce(or_, stages) if stages else None
    for first in range(0, M, rows):
        part, of = slice(first, first + rows), x[first:first + rows]
        found = logits[:of.shape[0]]
        product(of, weight.mT, out=found, epilogue=epilogue)
        if not any(wanted):
            _row_losses(found, labels[part], losses[part], V, ignored, smoothing, z)
            continue
        _row_losses_and_slopes(found, labels[part], factors[part], losses[part], V, ignored, smoothing, z,      # type: ignore
                               1.0 / cap**2 if cap else 0.0)
        if wanted[0]:
            product(found, weight, out=of_x[part])
        if wanted[1]:
            product(found.mT, of, of_weight if first else None, out=of_weight)
        if wanted[2]:
            of_bias += found.sum(0, dtype=of_bias.dtype)
    return losses, of_x, of_weight, of_bias


def _entropy_by_pytorch(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, *,
                        ignored: int, smoothing: float, z: float, cap: float) -> Any:
    """Losses of rows."""
    wide = wide_of(x)
    logits = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    logits = cap * torch.tanh(logits / cap) if cap else logits
    whole, counts = torch.logsumexp(logits, -1), labels != ignored
    is_there = (labels >= 0) & (labels < weight.shape[0])
    own = logits.gather(1, torch.where(is_there, labels, 0).long()[:, None])[:, 0]
    losses = whole - (1 - smoothing) * own - smoothing * logits.mean(-1) + z * whole * whole
    return torch.where(counts, torch.where(is_there, losses, math.nan), 0.0)


def _slopes_by_pytorch(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
                       bias: torch.Tensor | None, **options: Any) -> tuple[Any, ...]:
    """Gradients of grad x losses."""
    given = (x, weight) if bias is None else (x, weight, bias)

    def losses(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> Any:
        return _entropy_by_pytorch(x, weight, labels, bias[0] if bias else None, **options)

    found = torch.func.vjp(losses, *given)[1](grad.to(wide_of(x)))
    return *found, *([x.new_empty(0)] if bias is None else [])


def _counted(labels: torch.Tensor, mean: bool, ignored: int, dtype: torch.dtype) -> Any:
    """What the sum of losses is divided by: the number of rows that count, or 1."""
    return (labels != ignored).sum().to(dtype) if mean else torch.ones((), dtype=dtype, device=labels.device)


def _compute_entropy_sum(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, *,
                         mean: bool, wanted: Sequence[bool], ignored: int, **options: float) -> tuple[Any, ...]:
    """The last results are gradients, but of float16 `HALF` x those of the sum: what multiplies them comes later, and may
    be what keeps them from vanishing."""
    counted, is_half = _counted(labels, mean, ignored, wide_of(x)), x.dtype == torch.float16
    factor = torch.full_like(counted, HALF) if is_half else 1 / counted
    losses, *slopes = _entropy(x, weight, labels, bias, factor.repeat(x.shape[0]), wanted, ignored=ignored, **options)
    return losses.sum() / counted, *(y if is_half else y.to(x.dtype) for y in slopes)


def _allocate_entropy_sum(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, *,
                          wanted: Sequence[bool], **_: object) -> tuple[Any, ...]:
    wide = wide_of(x) if x.dtype == torch.float16 else x.dtype
    return x.new_empty((), dtype=wide_of(x)), *(
        x.new_empty(y.shape if of and y is not None else 0, dtype=dtype)
        for of, y, dtype in zip(wanted, (x, weight, bias), (x.dtype, wide, wide)))


def _keep_entropy_sum(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any],
                      output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _backward_entropy_sum(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor | None,
                          *_: object) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 4
    x, weight, labels, bias, *slopes = ctx.saved_tensors
    options = {name: value for name, value in ctx.options.items() if name not in ("mean", "wanted")}
    needed = [ctx.needs_input_grad[n] for n in (0, 1, 3)]
    is_again, is_half = is_recorded() or any(
        of and not had for of, had in zip(needed, ctx.options["wanted"])), x.dtype == torch.float16
    if is_again or is_half:                            # else the slopes have this factor
        grad = grad.to(wide_of(x)) * (1 / _counted(labels, ctx.options["mean"], options["ignored"], wide_of(x)))
    if is_again:
        slopes = _ENTROPY_BACKWARD(grad.expand(x.shape[0]), x, weight, labels, bias, wanted=needed, **options)
    else:
        factor = (grad / HALF if is_half else grad).reshape(1)
        slopes = [torch.mul(y, factor, out=torch.empty_like(y, dtype=x.dtype)) if of else None
                  for of, y in zip(needed, slopes)]
    of_x, of_weight, of_bias = (y if of else None for of, y in zip(needed, slopes))
    return of_x, of_weight, None, of_bias


def _backward_entropy(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight, labels, bias = ctx.saved_tensors
    needed = [ctx.needs_input_grad[n] for n in (0, 1, 3)]
    compute = _ENTROPY_BACKWARD if is_recorded() else _compute_entropy_backward
    of_x, of_weight, of_bias = (y if of else None for of, y in zip(needed, compute(
        grad, x, weight, labels, bias, wanted=needed, **ctx.options)))
    return of_x, of_weight, None, of_bias


def _compute_entropy_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
                              bias: torch.Tensor | None, *, wanted: Sequence[bool], **options: Any) -> tuple[Any, ...]:
    with torch.no_grad():
        found = _entropy(x, weight, labels, bias, grad.detach().to(wide_of(x)).contiguous(), wanted, **options)
        return tuple(y.to(x.dtype) for y in found[1:])


_OF_ENTROPY = "int ignored, float smoothing, float z, float cap"
_ENTROPY = operator(
    "linear_cross_entropy", f"(Tensor x, Tensor weight, Tensor labels, Tensor? bias, *, {_OF_ENTROPY}) -> Tensor",
    lambda x, weight, labels, bias, **options: _entropy(x, weight, labels, bias, None, (False,) * 3, **options)[0],
    lambda x, *_, **options: x.new_empty(x.shape[0], dtype=wide_of(x)), _backward_entropy, keep, of_rows=False)
_ENTROPY_SUM = operator(
    "linear_cross_entropy_sum", "(Tensor x, Tensor weight, Tensor labels, Tensor? bias, *, bool mean, bool[] wanted, "
    f"{_OF_ENTROPY}) -> (Tensor, Tensor, Tensor, Tensor)", _compute_entropy_sum, _allocate_entropy_sum,
    _backward_entropy_sum, _keep_entropy_sum, of_rows=False)
_ENTROPY_BACKWARD = operator(
    "linear_cross_entropy_backward", "(Tensor grad, Tensor x, Tensor weight, Tensor labels, Tensor? bias, *, bool[] wanted, "
    f"{_OF_ENTROPY}) -> (Tensor, Tensor, Tensor)", _compute_entropy_backward,
    lambda grad, x, *args, **options: tuple(y.to(x.dtype) for y in _allocate_entropy_sum(x, *args, **options)[1:]),
    *derived(lambda *args, wanted, **options: _slopes_by_pytorch(*args, **options)), of_rows=False)
