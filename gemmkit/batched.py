"""Stacks of which one operand alone has a dimension: that dimension becomes rows or columns of fewer, larger products.
So does the stack beside a vector.

Any other stack is a plan like that of two matrices (`gemmkit.stacks`), and one launch; so is what is made here.
"""

from __future__ import annotations

import string
from typing import Any

from gemmkit.config import Config
from gemmkit.lang.given import check_dtype
from gemmkit.layouts import RowMajor
from gemmkit.operators import Algebra, Operator
from gemmkit.problem import asked_dtype, check_places
from gemmkit.runtime.arrays import ArrayInfo, describe, empty_like
from gemmkit.runtime.device import target
from gemmkit.runtime.views import strided
from gemmkit.stacks import stack_of
from gemmkit.tuning.operators import new_dtype


def folded(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any]) -> Any:
    """The product of stacks of which a or b alone has a dimension (the other lacks it, or is 1 there); None of any other
    call, and of one with a c, a conf or components, whose coordinates would change."""
    operator = keywords.get("operator")
    if (c is not None or conf is not None or set(keywords) - {"operator", "dtype"} or isinstance(operator, Algebra)
            or not isinstance(operator, (Operator, type(None)))):
        return None
    infos = {"a": describe(a, "a"), "b": describe(b, "b")}
    spec = _with_a_vector(infos["a"], infos["b"], None if out is None else describe(out, "out").shape)
    if spec is not None:
        return _einsum(spec, a, b, out=out, stream=stream, **keywords)
    if min(len(info.shape) for info in infos.values()) < 2 or not _folds(*infos.values()):
        return None
    check_places(dict(infos))
    keywords = dict(keywords)
    dtype = asked_dtype(keywords, None, None if out is None else describe(out, "out"))
    for name, info in infos.items():
        check_dtype(info.dtype, name)
    stack = stack_of(infos, {name: RowMajor(info.dtype) for name, info in infos.items()})
    assert stack is not None
    shape = (*stack, infos["a"].shape[-2], infos["b"].shape[-1])
    if out is None:
        dtypes = infos["a"].dtype, infos["b"].dtype
        out = empty_like(a, shape, new_dtype(*dtypes, operator, target(infos["a"].device), dtype))
    of_out = describe(out, "out")
    if of_out.shape != shape:
        raise ValueError(f"out has shape {of_out.shape}; the result has {shape}")
    labels = string.ascii_letters[:len(stack)]
    (a, in_a), (b, in_b) = (_without_ones(x, infos[name], labels) for name, x in (("a", a), ("b", b)))
    kept = [n for n, label in enumerate(labels) if label in in_a + in_b]         # both are 1 along the others
    axes = [*kept, len(stack), len(stack) + 1]
    view = strided(out, of_out, tuple(shape[n] for n in axes), tuple(of_out.strides[n] for n in axes))
    _einsum(f"{in_a}MK,{in_b}KN->{''.join(labels[n] for n in kept)}MN", a, b, out=view, stream=stream, **keywords)
    return out


def _einsum(spec: str, *operands: Any, **keywords: Any) -> Any:
    from gemmkit.contraction import einsum  # which a product of two matrices needs not

    return einsum(spec, *operands, **keywords)


def _with_a_vector(a: ArrayInfo, b: ArrayInfo, out: tuple[int, ...] | None) -> str | None:
    """The contraction that a stack and a vector are, whose dimensions become rows or columns; None for other operands, and
    for those that do not fit each other.

    >>> from gemmkit.runtime.arrays import describe
    >>> import numpy as np
    >>> _with_a_vector(describe(np.ones((2, 3, 4))), describe(np.ones(4)), None)
    'abK,K->ab'
    """
    if sorted((min(len(a.shape), 3), min(len(b.shape), 3))) != [1, 3]:
        return None
    stack, is_row = (b, True) if len(a.shape) == 1 else (a, False)
    K, vector = stack.shape[-2 if is_row else -1], (a if is_row else b).shape[0]
    result = (*stack.shape[:-2], stack.shape[-1 if is_row else -2])
    if K != vector or (out is not None and out != result):
        return None
    free = string.ascii_lowercase[:len(result)]
    return f"K,{free[:-1]}K{free[-1]}->{free}" if is_row else f"{free}K,K->{free}"


def _folds(a: ArrayInfo, b: ArrayInfo) -> bool:
    """Whether a dimension of the stacks is one of a's or of b's alone."""
    one, other = a.shape[:-2], b.shape[:-2]
    longest = max(len(one), len(other))
    pairs = zip((1,) * (longest - len(one)) + one, (1,) * (longest - len(other)) + other)
    return any((n == 1) != (m == 1) for n, m in pairs)


def _without_ones(x: Any, info: ArrayInfo, labels: str) -> tuple[Any, str]:
    """A stack without the dimensions along which it is broadcast, and the labels of the others."""
    own = labels[len(labels) - (len(info.shape) - 2):]
    kept = [n for n, extent in enumerate(info.shape[:-2]) if extent != 1]
    axes = [*kept, len(info.shape) - 2, len(info.shape) - 1]
    view = strided(x, info, tuple(info.shape[n] for n in axes), tuple(info.strides[n] for n in axes))
    return view, "".join(own[n] for n in kept)
