"""Products of arrays of more than two dimensions: matrices in the last two, NumPy's broadcasting in those before."""

from __future__ import annotations

import itertools
import string
from typing import Any

import numpy as np

from gemmkit.config import Config
from gemmkit.contraction import einsum
from gemmkit.lang.given import check_dtype
from gemmkit.operators import Algebra
from gemmkit.problem import check_places
from gemmkit.products import multiply
from gemmkit.runtime.arrays import ArrayInfo, describe, empty_like
from gemmkit.runtime.device import target
from gemmkit.runtime.views import strided
from gemmkit.tuning.operators import operator_for, result_dtype

__all__ = ["is_batched", "matmul_batched"]


def is_batched(a: Any, b: Any, c: Any, conf: Config | None, keywords: dict[str, Any]) -> bool:
    """Whether a call is one for `matmul_batched`: a stack of matrices among the operands that have no layout given.

    Not for an algebra's operator, whose numbers may have their parts along a last axis.
    """
    if isinstance(keywords.get("operator", getattr(conf, "operator", None)), Algebra):
        return False
    return any(x is not None and f"global_{name}_layout" not in keywords and len(describe(x, name).shape) > 2
               for name, x in (("a", a), ("b", b), ("c", c)))


def matmul_batched(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any]) -> Any:
    """`gemmkit.matmul` of stacks of matrices.

    Where only one of a and b has a dimension (or the other is 1 there), it is made part of that operand's rows or columns
    and costs no further launch; a dimension that both have is one launch for each of its products, as is everything with a
    c, a conf or components whose coordinates would change.
    """
    infos = {name: describe(x, name) for name, x in (("a", a), ("b", b), ("c", c)) if x is not None}
    check_places(dict(infos))
    for name, info in infos.items():
        check_dtype(info.dtype, name)
    shape = _shape(infos)
    if out is None:
        dtypes = infos["a"].dtype, infos["b"].dtype
        operator = keywords.get("operator") or (
            conf.operator if conf else operator_for(*dtypes, (1, 1, 1), target(infos["a"].device)))
        dtype = infos["c"].dtype if c is not None else result_dtype(*dtypes, None, operator)
        out = empty_like(a, shape, conf.global_d_layout.dtype if conf else dtype)
    of_out = describe(out, "out")
    if of_out.shape != shape:
        raise ValueError(f"out has shape {of_out.shape}; the result has {shape}")
    if c is None and conf is None and not set(keywords) - {"operator"}:
        labels = string.ascii_letters[:len(shape) - 2]
        (a, in_a), (b, in_b) = (_without_ones(x, infos[name], labels) for name, x in (("a", a), ("b", b)))
        summed = "".join(label for label in labels if label in in_a + in_b)
        ones = [n for n, label in enumerate(labels) if label not in summed]          # both are 1 there
        axes = [n for n in range(len(shape)) if n not in ones]
        view = strided(out, of_out, tuple(shape[n] for n in axes), tuple(of_out.strides[n] for n in axes))
        einsum(f"{in_a}MK,{in_b}KN->{summed}MN", a, b, out=view, stream=stream, **keywords)
        return out
    views = {name: _broadcast(x, infos[name], shape[:-2]) for name, x in (("a", a), ("b", b), ("c", c)) if x is not None}
    for at in itertools.product(*map(range, shape[:-2])):
        multiply(views["a"][at], views["b"][at], views["c"][at] if c is not None else None, conf, out[at], stream, keywords)
    return out


def _shape(infos: dict[str, ArrayInfo]) -> tuple[int, ...]:
    """The result's shape. Raises ValueError for what does not fit."""
    for name, info in infos.items():
        if len(info.shape) < 2:
            raise ValueError(f"{name} has {len(info.shape)} dimensions; matrices, in the last two of them, are needed")
    a, b = infos["a"].shape, infos["b"].shape
    if a[-1] != b[-2]:
        raise ValueError(f"a has shape {a} and b has shape {b}: the matrices of a have {a[-1]} columns and those of b "
                         f"{b[-2]} rows; both are K")
    try:
        stack = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ValueError(f"a has shape {a} and b has shape {b}: {a[:-2]} and {b[:-2]} cannot be broadcast "
                         "together") from None
    shape = (*stack, a[-2], b[-1])
    if "c" in infos:
        c = infos["c"].shape
        if c[-2:] != shape[-2:] or len(c) > len(shape) or any(n not in (1, m) for n, m in zip(c[-3::-1], shape[-3::-1])):
            raise ValueError(f"c has shape {c}, which cannot be broadcast to the result's {shape}")
    return shape


def _without_ones(x: Any, info: ArrayInfo, labels: str) -> tuple[Any, str]:
    """A stack without the dimensions along which it is broadcast, and the labels of the others."""
    own = labels[len(labels) - (len(info.shape) - 2):]
    kept = [n for n, extent in enumerate(info.shape[:-2]) if extent != 1]
    axes = [*kept, len(info.shape) - 2, len(info.shape) - 1]
    view = strided(x, info, tuple(info.shape[n] for n in axes), tuple(info.strides[n] for n in axes))
    return view, "".join(own[n] for n in kept)


def _broadcast(x: Any, info: ArrayInfo, stack: tuple[int, ...]) -> Any:
    """A stack repeated along the dimensions where it is 1, without copying."""
    missing = len(stack) - (len(info.shape) - 2)
    strides = (*(0,) * missing, *(0 if extent == 1 else stride for extent, stride in zip(info.shape[:-2], info.strides)))
    return strided(x, info, (*stack, *info.shape[-2:]), (*strides, *info.strides[-2:]))
