"""Operands of one dimension, by NumPy's rules: a vector A is a row, a vector B a column, and D lacks that dimension.

A call is planned for the matrices; the arrays that are passed stay vectors, since a kernel is given addresses alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.runtime.array_info import ArrayInfo

__all__ = ["Vectors"]

Info = ArrayInfo | None


class Vectors(NamedTuple):
    """Which of A and B is a vector.

    >>> Vectors(False, True).result_shape((5, 3, 1))
    (5, 3)
    """

    a: bool = False
    b: bool = False

    @classmethod
    def of(cls, a: ArrayInfo, b: ArrayInfo, conf: Any, keywords: dict[str, Any]) -> Vectors:
        """Those among a call's operands. Of the layouts that the caller gave a `Diagonal` makes a matrix of one dimension in
        its own way."""
        fields = "global_a_layout", "global_b_layout"
        given = [keywords.get(field, getattr(conf, field, None)) for field in fields]
        return cls(*(len(info.shape) == 1 and (layout is None or type(layout) in (RowMajor, ColMajor))
                     for info, layout in zip((a, b), given)))

    def matrices(self, a: ArrayInfo, b: ArrayInfo, c: Info, out: Info) -> tuple[ArrayInfo, ArrayInfo, Info, Info]:
        """The operands as those of a product of matrices, or of a stack of them.

        Raises ValueError for sizes that do not fit each other, of the arrays as they were given.
        """
        if not (self.a or self.b):
            return a, b, c, out
        self._check(a, b, c, out)
        if self.a:
            a = _row(a)
        if self.b:                                      # contiguous along K, which is what is loaded in vectors
            b = b._replace(shape=(*b.shape, 1), strides=(*b.strides, b.shape[0] * b.strides[0] or 1))
        return a, b, None if c is None else self.matrix(c), None if out is None else self.matrix(out)

    def matrix(self, out: ArrayInfo) -> ArrayInfo:
        """A result, or a C, as a matrix."""
        if self.b:
            out = out._replace(shape=(*out.shape, 1), strides=(*out.strides, 1))
        return _row(out) if self.a else out

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a result of (..., M, N)."""
        *stack, M, N = shape
        return (*stack, *(() if self.a else (M,)), *(() if self.b else (N,)))

    def host(self, a: Any, b: Any, c: Any, out: Any) -> tuple[Any, Any, Any, Any]:
        """NumPy's arrays of a call as matrices: views."""
        if not (self.a or self.b):
            return a, b, c, out

        def of_result(x: Any) -> Any:
            x = np.asarray(x)[..., None] if self.b else np.asarray(x)
            return x[..., None, :] if self.a else x

        return (np.asarray(a)[None] if self.a else a, np.asarray(b)[:, None] if self.b else b,
                None if c is None else of_result(c), of_result(out))

    def _check(self, a: ArrayInfo, b: ArrayInfo, c: Info, out: Info) -> None:
        if not a.shape or not b.shape:
            name, info = ("b", b) if a.shape else ("a", a)
            raise ValueError(f"{name} has shape {info.shape}: a number is no operand of a product; multiply by it")
        K, rows = a.shape[-1], b.shape[0] if self.b else b.shape[-2]
        if K != rows:
            of_a, of_b = "elements" if self.a else "columns", "elements" if self.b else "rows"
            raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: a has {K} {of_a} and b {rows} {of_b}; both "
                             "are K")
        stack = b.shape[:-2] if self.a else a.shape[:-2]
        shape = (*stack, *(() if self.a else a.shape[-2:-1]), *(() if self.b else b.shape[-1:]))
        for name, given in (("c", c), ("out", out)):
            if given is not None and given.shape != shape:
                raise ValueError(f"{name} has shape {given.shape}; the result has {shape} (an a of one dimension is a row, "
                                 "a b a column, and the result lacks that dimension)")


def _row(info: ArrayInfo) -> ArrayInfo:
    """The rows of one matrix each that the last dimension of an array is."""
    extent, stride = info.shape[-1], info.strides[-1]
    return info._replace(shape=(*info.shape[:-1], 1, extent), strides=(*info.strides[:-1], extent * stride or 1, stride))
