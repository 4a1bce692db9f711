"""Stacks of matrices on the host: a call's arrays as one product's, and the steps to the others.

What a layout describes is one matrix, of `Layout.dimensions_of` dimensions of its array. Those before are a stack's, and are
broadcast as NumPy does. From here on a call is planned for the first matrices; each knows by its ``steps``
(`gemmkit.runtime.array_info.ArrayInfo`) where those of the other products lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemmkit.layouts import ArrayLayout, Plain
from gemmkit.layouts.base import check_dimensions, leading
from gemmkit.runtime.array_info import ArrayInfo, steps_of

__all__ = ["check_dimensions", "check_steps", "first_matrices", "first_matrix", "leading", "seen_stack", "stack_of",
           "steps_of", "tuple_text"]

LIMIT = 2**31 - 2**10                  # products are counted in 32 bits

Layouts = Mapping[str, ArrayLayout | None]
Infos = Mapping[str, ArrayInfo | None]


def stack_of(infos: Infos, layouts: Layouts) -> tuple[int, ...] | None:
    """The shape of the stack of products, ``infos`` and ``layouts`` by "a", "b", "c" and "out"; None where none of a, b and
    c has more dimensions than its layout's matrix. (A diagonal's matrix is a vector: two dimensions are a stack of them.)

    Raises ValueError, naming the operand, for stacks that do not fit each other.
    """
    stacks = {name: info.shape[:leading(info, layouts[name])] for name, info in infos.items() if info is not None}
    if not any(stack for name, stack in stacks.items() if name != "out"):
        return None
    a, b, (M, K, rows, N) = infos["a"], infos["b"], _extents(infos, layouts)
    assert a is not None and b is not None
    if K is not None and rows is not None and K != rows:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: the matrices of a have {K} columns and those of "
                         f"b {rows} rows; both are K")
    try:
        stack = np.broadcast_shapes(stacks["a"], stacks["b"])
    except ValueError:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: {stacks['a']} and {stacks['b']} cannot be "
                         "broadcast together") from None
    if math.prod(stack) > LIMIT:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: a stack of {math.prod(stack)} products is over "
                         f"the limit of {LIMIT}")
    shape = (*stack, "M" if M is None else M, "N" if N is None else N)
    c, out = infos.get("c"), infos.get("out")
    if c is not None and (not broadcasts(stacks["c"], stack) or _misfits(c, layouts["c"], M, N)):
        raise ValueError(f"c has shape {c.shape}, which cannot be broadcast to the result's {tuple_text(shape)}")
    if out is not None and (stacks["out"] != stack or _misfits(out, layouts["out"], M, N)):
        raise ValueError(f"out has shape {out.shape}; the result has {tuple_text(shape)}")
    return stack


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a stack of this shape is one of another, repeated.

    >>> broadcasts((1, 3), (2, 3)), broadcasts((3,), (2, 3)), broadcasts((2,), (2, 3))
    (True, True, False)
    """
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1]))


def _extents(infos: Infos, layouts: Layouts) -> tuple[int | None, ...]:
    """Rows and columns of A, then of B, as far as plain layouts say them."""
    found: list[int | None] = []
    for name in ("a", "b"):
        info, layout = infos[name], layouts[name]
        assert info is not None
        is_plain = isinstance(layout, Plain) and layout.dimensions_of(info) == 2 and len(info.shape) >= 2
        found += info.shape[-2:] if is_plain else (None, None)
    return tuple(found)


def _misfits(info: ArrayInfo, layout: ArrayLayout | None, M: int | None, N: int | None) -> bool:
    return (isinstance(layout, Plain) and layout.dimensions_of(info) == 2 and None not in (M, N)
            and info.shape[-2:] != (M, N))


def tuple_text(shape: tuple[Any, ...]) -> str:
    """A shape of which some extents may be letters, as Python writes a tuple."""
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


# -- the first product ------------------------------------------------------------------------------------------------

def first_matrices(infos: Infos, layouts: Layouts, stack: tuple[int, ...] | None) -> dict[str, ArrayInfo | None]:
    """The operands of the first product of a stack; without one the operands themselves."""
    return {name: None if info is None else first_matrix(info, leading(info, layouts[name]), stack)
            for name, info in infos.items()}


def first_matrix(info: ArrayInfo, count: int, stack: tuple[int, ...] | None) -> ArrayInfo:
    """The first matrix of an array whose first ``count`` dimensions are those of a stack, with the steps to the others."""
    if stack is None:
        return info
    steps = steps_of(info.shape[:count], info.strides[:count], stack)
    return info._replace(shape=info.shape[count:], strides=info.strides[count:], steps=steps)


def seen_stack(info: ArrayInfo, layout: ArrayLayout) -> ArrayInfo:
    """All matrices of an array as ``layout`` sees them, in the stack's own dimensions.

    Raises ValueError for an array that the layout does not take.
    """
    count = leading(info, layout)
    if count == 0:
        return layout.seen(info)
    first = info._replace(shape=info.shape[count:], strides=info.strides[count:], steps=tuple(
        (extent, stride if extent > 1 else 0) for extent, stride in zip(info.shape[:count], info.strides)))
    found = layout.seen(first)
    if found is first:
        return info
    return found._replace(shape=(*info.shape[:count], *found.shape), steps=(),
                          strides=(*(stride for _, stride in found.steps), *found.strides))


def check_steps(shape: tuple[int, ...], own: int, stack: tuple[int, ...] | None, name: str, is_output: bool) -> None:
    """Raise ValueError unless the array of a component, of which a product has ``own`` dimensions, fits a stack."""
    before = shape[:max(0, len(shape) - own)]
    if stack is None:
        if before:
            raise ValueError(f"{name} has shape {shape}; without a stack of products it has {own} dimensions")
        return
    if not broadcasts(before, stack):
        raise ValueError(f"{name} has shape {shape}: {before} cannot be broadcast to the stack of products, {stack}")
    if is_output and math.prod(before) != math.prod(stack):
        raise ValueError(f"{name} has shape {shape}, and every product of the stack {stack} would be stored there; give it "
                         f"the shape of all, {(*stack, *shape[-own:])}")
