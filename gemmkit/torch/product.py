"""``gemmkit::product``: the product of two matrices as an operator of PyTorch's, whose derivative is two of its kind.

    D = A B,   dA = dD B^H,   dB = A^H dD

An operand is plain or has a form (`gemmkit.torch.forms`), and may be conjugated as it is loaded. The derivative of a product
is of the same kind in all of these, so that one operator has derivatives of every order. Source: Giles, "Collected matrix
derivative results for forward and reverse mode algorithmic differentiation", 2008.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmkit.blas import CONJUGATE
from gemmkit.matmul_call import Door, matmul
from gemmkit.torch import forms
from gemmkit.torch.batching import batched_by
from gemmkit.torch.library import Differentiable, define, is_eager

_SCHEMA = ('(Tensor a, Tensor b, *, str a_form="plain", str b_form="plain", bool conj_a=False, bool conj_b=False, '
           "ScalarType? dtype=None) -> Tensor")


def result_shape(a: Any, b: Any, a_form: str, b_form: str) -> tuple[Any, ...]:
    """The shape of A B. Raises ValueError, naming both, where they do not fit each other."""
    of_a, of_b = forms.shape_of(a, a_form, "a"), forms.shape_of(b, b_form, "b")
    if of_a[-1] != of_b[-2]:
        raise ValueError(f"a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}: a has {of_a[-1]} columns and b "
                         f"{of_b[-2]} rows; both are K")
    if len(of_a) == 2 or len(of_b) == 2:                    # (`broadcast_shapes` takes 10 us for nothing)
        return (*of_a[:-2], *of_b[:-2], of_a[-2], of_b[-1])
    try:
        stack = torch.broadcast_shapes(of_a[:-2], of_b[:-2])
    except RuntimeError:
        raise ValueError(f"a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}: the stacks {tuple(of_a[:-2])} and "
                         f"{tuple(of_b[:-2])} cannot be broadcast together") from None
    return (*stack, of_a[-2], of_b[-1])


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Operands as ``torch.autocast`` casts those of ``torch.matmul``: floating-point ones to its dtype, except float64. None
    stays None; outside ``torch.autocast`` all stay as they are."""
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x is None or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type != kind
                 else x.to(dtype) for x in tensors)


def check_dtypes(a: Any, **others: Any) -> None:
    """Raise TypeError for operands of several dtypes, as PyTorch does: a forgotten cast would cost speed or digits."""
    for name, x in others.items():
        if x is not None and x.dtype != a.dtype:
            raise TypeError(f"a has dtype {a.dtype} and {name} has dtype {x.dtype}; operands must have one dtype: convert "
                            "one with .to(), or compute under torch.autocast")


def check_together(a: Any, **others: Any) -> None:
    """Raise ValueError for tensors that are not all on a's device."""
    for name, x in others.items():
        if x is not None and x.device != a.device:
            raise ValueError(f"{name} is on {x.device} and a on {a.device}; all operands of a product must be on one device")


def result_dtype(a: Any, b: Any, dtype: Any) -> Any:
    """``dtype``, or where it is None that which holds a's and b's. Raises TypeError for a real one of a complex product."""
    common = torch.promote_types(a.dtype, b.dtype)
    if dtype is not None and common.is_complex and not dtype.is_complex:
        raise TypeError(f"dtype={dtype}: the product of {a.dtype} and {b.dtype} is complex, and its imaginary part would be "
                        "lost; take a complex dtype, or .real of the result")
    return common if dtype is None else dtype


def _compute(a: Any, b: Any, *, a_form: str = forms.PLAIN, b_form: str = forms.PLAIN, conj_a: bool = False,
             conj_b: bool = False, dtype: Any = None) -> Any:
    out = _allocate(a, b, a_form=a_form, b_form=b_form, dtype=dtype)
    more: dict[str, Any] = {}
    for name, conjugated, x in (("a", conj_a, a), ("b", conj_b, b)):
        if conjugated and x.is_complex():
            more[f"transform_global_to_shared_{name}"] = CONJUGATE
    matmul(forms.matrix_of(a, a_form), forms.matrix_of(b, b_form), out=out, **more)
    return out


def _allocate(a: Any, b: Any, *, a_form: str = forms.PLAIN, b_form: str = forms.PLAIN, conj_a: bool = False,
              conj_b: bool = False, dtype: Any = None) -> Any:
    """The result, uninitialised: what the operator makes of tensors that have no data."""
    forms.check_form(a_form, "a_form")
    forms.check_form(b_form, "b_form")
    check_together(a, b=b)
    return a.new_empty(result_shape(a, b, a_form, b_form), dtype=result_dtype(a, b, dtype))


def _keep(ctx: Any, inputs: tuple, keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.told = keyword_only_inputs


def _backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    told = {name: value for name, value in ctx.told.items() if name != "dtype"}
    return gradients(grad, a, b, ctx.needs_input_grad[:2], **told)


def gradients(grad: Any, a: Any, b: Any, needed: tuple[bool, ...], a_form: str = forms.PLAIN, b_form: str = forms.PLAIN,
              conj_a: bool = False, conj_b: bool = False) -> tuple[Any, Any]:
    """The gradients of A and B, from that of A B; None where ``needed`` is false.

    Each has its operand's dtype. The product of a gradient and an operand of two dtypes is of their common one: by that
    nothing is rounded.
    """
    of_a = of_b = None
    if needed[0]:
        turned, form = forms.transposed(b, b_form)
        # conj(dD (B')^H), as A' = conj(A): both factors are conjugated where A is
        of_a = _like(a, a_form, grad, turned, forms.PLAIN, form, conj_a, conj_b == conj_a)
    if needed[1]:
        turned, form = forms.transposed(a, a_form)
        of_b = _like(b, b_form, turned, grad, form, forms.PLAIN, conj_a == conj_b, conj_b)
    return of_a, of_b


def _like(operand: Any, operand_form: str, a: Any, b: Any, a_form: str, b_form: str, conj_a: bool, conj_b: bool) -> Any:
    """The gradient of what is stored of an operand, of its shape and dtype: a product of a and b."""
    if (a_form == b_form == operand_form == forms.PLAIN and operand.dim() == a.dim() == b.dim() == 2
            and a.dtype == b.dtype == operand.dtype and not operand.is_complex()):      # no view more than it needs
        return _gradient(product, operand, a, b)
    a, b = _of_one_dtype(a, b)
    if operand_form == forms.PLAIN and operand.dim() == 2:
        a, b = _folded(a, b, a_form, b_form, operand)
    lies_in_columns = operand.dim() > 1 and operand.stride(-2) == 1 and operand.stride(-1) != 1
    if lies_in_columns and operand_form == forms.PLAIN:     # so does the gradient: no copy to where it adds up
        (a, a_form), (b, b_form) = forms.transposed(a, a_form), forms.transposed(b, b_form)
        found = product(b, a, b_form, a_form, conj_b, conj_a).mT
    else:
        found = product(a, b, a_form, b_form, conj_a, conj_b)
    stored = forms.gradient_of_stored(found, operand_form)
    if not operand.is_complex() and stored.is_complex():
        stored = stored.real
    return summed_to(stored, operand.shape).to(operand.dtype)


def _of_one_dtype(a: Any, b: Any) -> tuple[Any, Any]:
    """The factors of a gradient in the dtype that holds both."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _folded(a: Any, b: Any, a_form: str, b_form: str, operand: Any) -> tuple[Any, Any]:
    """The factors of the gradient of one matrix that was multiplied with a stack: a sum over the stack is one long K,
    where views can say so."""
    if a.dim() < 3 or a.shape[:-2] != b.shape[:-2] or a_form != forms.PLAIN or b_form != forms.PLAIN:
        return a, b
    try:
        return a.mT.view(-1, a.shape[-2]).mT, b.view(-1, b.shape[-1])
    except (RuntimeError, ValueError):                     # strides that one K does not have: a stack, summed up
        return a, b


def summed_to(x: Any, shape: Any, dtype: Any = None) -> Any:
    """A gradient summed over what was broadcast; in ``dtype``, where one is given: nothing of x is converted in memory."""
    if x.shape == shape:
        return x if dtype is None else x.to(dtype)
    if dtype is None:
        return x.sum_to_size(shape)
    first = x.dim() - len(shape)
    along = [n for n in range(x.dim()) if n < first or (shape[n - first] == 1 and x.shape[n] != 1)]
    return x.sum(along, keepdim=True, dtype=dtype).reshape(shape)


def product(a: Any, b: Any, a_form: str = forms.PLAIN, b_form: str = forms.PLAIN, conj_a: bool = False, conj_b: bool = False,
            dtype: Any = None) -> Any:
    """A B by the operator ``gemmkit::product``, of (..., M, K) and (..., K, N)."""
    if a_form == b_form == forms.PLAIN and dtype is None and not (conj_a or conj_b):
        if are_matrices(a, b) and a.shape[1] == b.shape[0] and is_eager((a, b)):
            return _Eager.apply(a, b, False, None, None) if records(a, b) else matmul(a, b)
        return _OPERATOR(a, b)                             # (the five by name take 2 us)
    return _OPERATOR(a, b, a_form=a_form, b_form=b_form, conj_a=conj_a, conj_b=conj_b, dtype=dtype)


def are_matrices(a: Any, b: Any) -> bool:
    """Whether both are matrices, of one dtype of `KEPT`."""
    return a.dim() == b.dim() == 2 and a.dtype == b.dtype and a.dtype in KEPT


def records(*tensors: Any) -> bool:
    """Whether autograd records what is computed of tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def layer(x: Any, weight: Any, bias: Any, operator: Any) -> Any:
    """x W^T of matrices (`are_matrices`) that nothing but autograd looks at (`is_eager`), with the epilogue of an operator
    (`gemmkit.torch.op`; None: none), which adds ``bias`` and nothing more where a gradient is wanted."""
    if records(x, weight, bias):
        return _Eager.apply(x, weight, True, operator, bias)
    return _of_layer(x, weight, bias, operator)


_layer = Door()


def _of_layer(x: Any, weight: Any, bias: Any, operator: Any) -> Any:
    """`layer` without autograd."""
    def described() -> tuple[Any, Any, dict[str, Any]]:
        epilogue = None if operator is None else operator.epilogue_of(() if bias is None else (bias,))
        return x, weight.mT, {} if epilogue is None else {"epilogue": epilogue}

    return _layer(operator, (x, weight, bias), None, None, described)


class _Eager(torch.autograd.Function):
    """A B of matrices, or a layer, whose B is stored by rows and whose operator adds a bias: what autograd runs is this
    alone, no view and no operator, and each gradient is one launch."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, is_layer: bool, operator: Any, bias: Any) -> Any:
        ctx.save_for_backward(a, b)
        ctx.is_layer = is_layer
        return _of_layer(a, b, bias, operator) if is_layer else matmul(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        of_a, of_b, _, _, of_bias = ctx.needs_input_grad
        multiply = product if torch.is_grad_enabled() else matmul          # a gradient of the gradient is recorded, too
        if ctx.is_layer:
            found = (_gradient(multiply, a, grad, b) if of_a else None,
                     _gradient(multiply, b, grad.mT, a) if of_b else None)
        else:
            found = (_gradient(multiply, a, grad, b.mT) if of_a else None,
                     _gradient(multiply, b, a.mT, grad) if of_b else None)
        return (*found, None, None, grad.sum(0) if of_bias else None)


def _gradient(multiply: Any, operand: Any, a: Any, b: Any) -> Any:
    """The gradient of an operand: a product, which lies as the operand does, so that nothing is copied where it adds up."""
    lies_in_columns = operand.stride(0) == 1 and operand.stride(1) != 1
    return multiply(b.mT, a.mT).mT if lies_in_columns else multiply(a, b)


def _in_batches(size: int, in_dims: tuple, a: Any, b: Any, **told: Any) -> tuple[Any, int]:
    cores = forms.own_ndim(told.get("a_form")), forms.own_ndim(told.get("b_form"))
    return batched_by(_OPERATOR, size, in_dims[:2], (a, b), cores, told)


#: Of whose products `gemmkit.matmul` makes results as the operator does, of the operands' own dtype.
KEPT = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def _compute_eagerly(a: Any, b: Any, **told: Any) -> Any:
    """`_compute`, by way of calls of `gemmkit.matmul` that are known, which make the result themselves."""
    if not told and a.dtype == b.dtype and a.dtype in KEPT and min(a.dim(), b.dim()) >= 2 and a.shape[-1] == b.shape[-2]:
        return matmul(a, b)
    return _compute(a, b, **told)


_OPERATOR = Differentiable(define("gemmkit::product", _SCHEMA, _compute, _allocate), _backward, _keep, _in_batches,
                           _compute_eagerly)
