"""What a tensor is as an operand: a plain matrix, or what is stored of a matrix with structure.

A form is a word, so that it can be an argument of an operator of PyTorch's. The gradient of what is stored follows from that
of the matrix (G): the diagonal of G; the half of G; for a symmetric matrix the half of G + G^T, whose diagonal counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gemmkit import layouts, matrices

PLAIN = "plain"
#: The forms, and what makes a matrix of an array.
FORMS: dict[str, Callable[[Any], Any]] = {
    PLAIN: lambda x: x,
    "diagonal": matrices.Diagonal,
    "lower": lambda x: matrices.Triangular(x, "lower"),
    "upper": lambda x: matrices.Triangular(x, "upper"),
    "unit lower": lambda x: matrices.Triangular(x, "lower", unit=True),
    "unit upper": lambda x: matrices.Triangular(x, "upper", unit=True),
    "symmetric lower": lambda x: matrices.Symmetric(x, "lower"),
    "symmetric upper": lambda x: matrices.Symmetric(x, "upper"),
}
_TRANSPOSED = {"lower": "upper", "upper": "lower", "unit lower": "unit upper", "unit upper": "unit lower"}


def check_form(form: str, name: str) -> None:
    if form not in FORMS:
        raise ValueError(f"{name}={form!r}: one of {', '.join(map(repr, FORMS))} is needed")


def form_of(made: Any, name: str) -> str:
    """The form of what a user's ``a=`` or ``b=`` makes of tensors: None, or a function that gives a matrix with structure,
    such as `gemmkit.Triangular`."""
    if made is None:
        return PLAIN
    for shape in ((1, 1), (1,)):
        try:
            found = made(np.zeros(shape, np.float32))
        except ValueError:
            continue
        except TypeError as error:
            raise TypeError(f"{name}={made!r}: {error}; None or a function that makes a matrix with structure of an array "
                            "is needed, such as gemmkit.Triangular") from None
        if isinstance(found, matrices.Matrix) and found.condition(name) is not None:
            raise TypeError(f"{name}={made!r} makes a {type(found).__name__}, whose mask an operator of PyTorch does "
                            "not take; give it to gemmkit.matmul")
        return form_of_layout(found.layout if isinstance(found, matrices.Matrix) else None, name)
    raise TypeError(f"{name}={made!r} takes neither a matrix nor a vector")


def form_of_layout(layout: Any, name: str) -> str:
    """The form of an operand of a layout; raises TypeError for a layout that has no form."""
    kind = type(layout)
    if kind in (layouts.RowMajor, layouts.ColMajor):
        return PLAIN
    if kind is layouts.Diagonal:
        return "diagonal"
    if kind is layouts.Triangular and layout.nothing == 0:
        return f"{'unit ' if layout.unit else ''}{layout.half}"
    if kind is layouts.Symmetric:
        return f"symmetric {layout.half}"
    raise TypeError(f"{name}: {layout!r} has no form known to gemmkit.torch; plain matrices, Diagonal, Triangular and "
                    "Symmetric have")


def matrix_of(x: Any, form: str) -> Any:
    """The array as the matrix that a product takes."""
    return FORMS[form](x)


def own_ndim(form: str | None) -> int:
    """How many dimensions a matrix of this form has in its tensor; those before are a stack's."""
    return 1 if form == "diagonal" else 2


def shape_of(x: Any, form: str, name: str) -> tuple[Any, ...]:
    """The shape of the matrix, or the stack of them, that a tensor is. Raises ValueError where it is none."""
    if form == "diagonal":
        if x.dim() < 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; the diagonal of a matrix is a vector")
        return *x.shape, x.shape[-1]
    if x.dim() < 2:
        raise ValueError(f"{name} has {x.dim()} dimensions; a matrix of 2 is needed (a vector v: v[:, None] or v[None, :])")
    if form.startswith("symmetric") and x.shape[-2] != x.shape[-1]:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; a symmetric matrix is square")
    return tuple(x.shape)


def transposed(x: Any, form: str) -> tuple[Any, str]:
    """What is stored of the transpose, and its form; nothing is copied."""
    if form == "diagonal" or form.startswith("symmetric"):
        return x, form
    return x.mT, _TRANSPOSED.get(form, form)


def gradient_of_stored(gradient: Any, form: str) -> Any:
    """The gradient of what is stored, from that of the matrix."""
    if form == PLAIN:
        return gradient
    if form == "diagonal":
        return torch.diagonal(gradient, dim1=-2, dim2=-1)
    half = torch.tril if form.endswith("lower") else torch.triu
    if form.startswith("symmetric"):
        strictly = -1 if form.endswith("lower") else 1
        return half(gradient) + half(gradient.mT, strictly)
    strictly = 0 if not form.startswith("unit") else -1 if form.endswith("lower") else 1
    return half(gradient, strictly)
