"""Operands of one dimension, by NumPy's rules: a vector A is a row, a vector B a column, and D lacks that dimension.

A call is planned for the matrices; the arrays that are passed stay vectors, since a kernel is given addresses alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.arrays import on_host
from gemmkit.stacks import tuple_text

Info = ArrayInfo | None


class Vectors(NamedTuple):
    """Which of A and B is a vector.

    >>> Vectors(False, True).result_shape((5, 3, 1))
    (5, 3)
    """

    a: bool = False
    b: bool = False

    @classmethod
    def of(cls, a: ArrayInfo, b: ArrayInfo, layouts: Iterable[Any]) -> Vectors:
        """Those among a call's operands; ``layouts`` are those that the caller gave, or None. An array that has a layout of
        another kind (`layouts.Diagonal`, the caller's own) is what that layout makes of it."""
        return cls(*(len(info.shape) == 1 and (layout is None or isinstance(layout, (RowMajor, ColMajor)))
                     for info, layout in zip((a, b), layouts)))

    def operands(self, a: ArrayInfo, b: ArrayInfo) -> tuple[ArrayInfo, ArrayInfo]:
        """A and B as matrices. Raises ValueError for a number beside a vector."""
        if self.a or self.b:
            for name, info in (("a", a), ("b", b)):
                if not info.shape:
                    raise ValueError(f"{name} has shape (): a number is no operand of a product; multiply by it")
        if self.a:
            a = _row(a)
        if self.b:                                      # contiguous along K, which is what is loaded in vectors
            b = b._replace(shape=(*b.shape, 1), strides=(*b.strides, b.shape[0] * b.strides[0] or 1))
        return a, b

    def results(self, c: Info, out: Info, stack: tuple[int, ...], M: int | None, N: int | None) -> tuple[Info, Info]:
        """C and ``out`` as matrices, of a product of ``stack`` x M x N (None: not known yet). Raises ValueError for another
        number of dimensions; extents are compared with those of all operands."""
        if not (self.a or self.b):
            return c, out
        shape = self.result_shape((*stack, "M" if M is None else M, "N" if N is None else N))     # type: ignore[arg-type]
        for name, given in (("c", c), ("out", out)):
            if given is not None and len(given.shape) != len(shape):
                raise ValueError(f"{name} has shape {given.shape}; the result has {tuple_text(shape)} (an a of one "
                                 "dimension is a row, a b a column, and the result lacks that dimension)")
        return None if c is None else self.matrix(c), None if out is None else self.matrix(out)

    def matrix(self, out: ArrayInfo) -> ArrayInfo:
        """A result, or a C, as a matrix."""
        if self.b:
            out = out._replace(shape=(*out.shape, 1), strides=(*out.strides, 1))
        return _row(out) if self.a else out

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a result of (..., M, N)."""
        *stack, M, N = shape
        return (*stack, *(() if self.a else (M,)), *(() if self.b else (N,)))

    def given_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the caller's operand ``name`` has, whose matrix has this one."""
        if name in ("a", "b"):
            return (shape[1:] if name == "a" else shape[:1]) if getattr(self, name) else shape
        return self.result_shape(shape)

    def host(self, a: Any, b: Any, c: Any, out: Any) -> tuple[Any, Any, Any, Any]:
        """NumPy's arrays of a call as matrices: views."""
        if not (self.a or self.b):
            return a, b, c, out

        def of_result(x: Any) -> Any:
            x = on_host(x)[..., None] if self.b else on_host(x)
            return x[..., None, :] if self.a else x

        return (on_host(a)[None] if self.a else a, on_host(b)[:, None] if self.b else b,
                None if c is None else of_result(c), of_result(out))


def _row(info: ArrayInfo) -> ArrayInfo:
    """The rows of one matrix each that the last dimension of an array is."""
    extent, stride = info.shape[-1], info.strides[-1]
    return info._replace(shape=(*info.shape[:-1], 1, extent), strides=(*info.strides[:-1], extent * stride or 1, stride))
