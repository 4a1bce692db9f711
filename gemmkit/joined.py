"""Operands of several arrays: matrices joined along an axis (`Concat`), or column by column for a fold (`Braid`).

Nothing is copied together. The kernel gets all arrays, and the operand's layout says from which of them an element comes
(`gemmkit.layouts.Joined`), so that every kernel, transform and epilogue takes them as it takes one matrix.
"""

from __future__ import annotations

import operator
from typing import Any

from gemmkit.lang.errors import ConfigError
from gemmkit.lang.given import check_dtype
from gemmkit.layouts import Braided, ColMajor, GlobalLayout, Joined, RowMajor
from gemmkit.layouts.braided import MOST
from gemmkit.matrices import Matrix, transposed
from gemmkit.runtime.arrays import ArrayInfo, describe


class Concat(Matrix):
    """Matrices side by side (``axis`` 1) or one above the other (``axis`` 0), as `numpy.concatenate` has them, uncopied.

    As A or B of `gemmkit.matmul`, `gemmkit.plan` and `gemmkit.blas.gemmEx`, joined along M, N or K. The parts are arrays of
    any strides, of one library, dtype and device, with as many rows (or columns) each along the other axis; of stacks, of
    the same leading dimensions, the matrices are joined (``axis`` -2 or -1). ``T`` is the transpose, of the parts' views.

    Raises TypeError for a part that is no array, ValueError for fewer than two parts, an ``axis`` that is none of a
    matrix's, and parts of which dtypes, devices, dimensions or extents do not fit each other.

    An LSTM cell's product: ``x w + h u``, with one accumulator.

    >>> import numpy as np, gemmkit as gk
    >>> x, h = np.float32([[1, 2]]), np.float32([[10]])
    >>> w, u = np.float32([[1, 0], [0, 1]]), np.float32([[3, -3]])
    >>> with gk.emulate():
    ...     gk.matmul(Concat(x, h, axis=1), Concat(w, u, axis=0), epilogue=gk.epilogues.ReLU()).tolist()
    [[31.0, 0.0]]
    """

    def __init__(self, *arrays: Any, axis: int):
        infos = _parts(arrays, "Concat")
        self.parts, self.axis = arrays, _axis(axis, infos[0])
        for n, info in enumerate(infos[1:], 1):
            _check_part(info, n, infos[0], 1 - self.axis, "Concat")
        super().__init__(arrays[0], joined(arrays, infos, self.axis))

    @property
    def T(self) -> Concat:
        return Concat(*(transposed(part) for part in self.parts), axis=-1 - self.axis)


class Braid(Matrix):
    """Matrices of one shape as B of one product, which computes those by all of them: D = Fold(f) of A W, A V, ...

    Of 2 to 4 arrays of (K, N), or stacks of them, of any strides, and one library, dtype and device. Columns are interleaved
    in the kernel (`gemmkit.layouts.Braided` says how), so its products can be had by ``epilogue=epilogues.Fold(f)`` alone:
    any other epilogue is refused. ``Concat(w, v, axis=1)`` gives the products side by side.

    Raises TypeError for a part that is no array and for its transpose (braid the parts' transposes), ValueError for a number
    of parts other than 2 to 4 and for parts of which dtypes, devices or shapes differ.

    A gated linear unit, ``relu(x w) * (x v)``, in one kernel:

    >>> import numpy as np, gemmkit as gk
    >>> x, w, v = np.float32([[1, 2]]), np.float32([[1], [1]]), np.float32([[5], [0]])
    >>> with gk.emulate():
    ...     gk.matmul(x, gk.Braid(w, v), epilogue=gk.epilogues.Fold(lambda gate, up: max(gate, 0) * up)).tolist()
    [[15.0]]
    """

    def __init__(self, *arrays: Any):
        infos = _parts(arrays, "Braid")
        if len(arrays) > MOST:
            raise ValueError(f"Braid() got {len(arrays)} arrays; {MOST} are the most")
        for n, info in enumerate(infos):
            for axis in (0, 1):
                _check_part(info, n, infos[0], axis, "Braid")
        self.parts = arrays
        super().__init__(arrays[0], Braided(joined(arrays, infos, 1), infos[0].shape[-1], len(arrays)))

    def check_place(self, name: str, c: Any) -> None:
        if c is not None:
            raise ConfigError("c is given beside a Braid, and a folded product has no C; add it behind the fold, by "
                              "epilogue=Fold(f) | Residual(c)")
        if name != "b":
            raise TypeError(f"{name} is a Braid, whose columns become columns of D: it can be b alone")

    @property
    def T(self) -> Matrix:
        raise TypeError("a Braid has no transpose, since its columns become columns of D; braid the parts' transposes")

    def __repr__(self) -> str:
        shape = (*self.shape[:-1], describe(self.array).shape[-1])
        return f"<Braid of {len(self.parts)} matrices of shape {shape}, {self.dtype}>"


def joined(arrays: tuple, infos: list[ArrayInfo], axis: int) -> GlobalLayout:
    """The layout of matrices joined along an axis of the last two, from the first on."""
    layout, boundary = _plain(infos[0]), infos[0].shape[axis - 2]
    for array, info in zip(arrays[1:], infos[1:]):
        layout = Joined(layout, _plain(info), array, axis, boundary)
        boundary += info.shape[axis - 2]
    return layout


def _plain(info: ArrayInfo) -> GlobalLayout:
    rows, columns = info.strides[-2:]
    return (ColMajor if rows == 1 and columns != 1 else RowMajor)(info.dtype)


# -- checks -----------------------------------------------------------------------------------------------------------

def _parts(arrays: tuple, what: str) -> list[ArrayInfo]:
    """The parts, described."""
    if len(arrays) < 2:
        raise ValueError(f"{what}() got {len(arrays)} arrays; two or more are needed")
    infos = []
    for n, array in enumerate(arrays):
        if isinstance(array, Matrix):
            raise TypeError(f"part {n} of {what} is a {type(array).__name__}; an array is needed")
        info = describe(array, f"part {n} of {what}")
        check_dtype(info.dtype, f"part {n} of {what}")
        if len(info.shape) < 2:
            raise ValueError(f"part {n} of {what} has {len(info.shape)} dimensions; a matrix of 2 is needed (a vector v: "
                             "v[:, None] or v[None, :])")
        infos.append(info)
    return infos


def _axis(axis: Any, info: ArrayInfo) -> int:
    """0 to join rows, 1 to join columns, of an axis counted as NumPy does."""
    ndim = len(info.shape)
    try:
        number = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis={axis!r} of Concat: a whole number is needed") from None
    if not -ndim <= number < ndim or isinstance(axis, bool):
        raise ValueError(f"axis={axis!r} of Concat: its parts have {ndim} dimensions; axis=-2 joins rows, axis=-1 columns")
    if number % ndim < ndim - 2:
        raise ValueError(f"axis={axis!r} of Concat would join stacks of matrices; axis=-2 joins rows, axis=-1 columns")
    return number % ndim - (ndim - 2)


def _check_part(info: ArrayInfo, n: int, first: ArrayInfo, across: int, what: str) -> None:
    """Part ``n`` fits the first one, ``across`` being the axis along which both are as long."""
    said = f"part {n} of {what} has"
    if info.dtype != first.dtype:
        raise ValueError(f"{said} dtype {info.dtype} and part 0 {first.dtype}; convert one of them")
    if info.device != first.device:
        raise ValueError(f"{said} its memory on device {info.device} and part 0 on device {first.device}; all parts must be "
                         "on one device")
    if len(info.shape) != len(first.shape) or info.shape[:-2] != first.shape[:-2]:
        raise ValueError(f"{said} shape {info.shape} and part 0 {first.shape}; the dimensions before the last two must be "
                         "the same")
    if info.shape[across - 2] != first.shape[across - 2]:
        raise ValueError(f"{said} shape {info.shape} and part 0 {first.shape}; both need as many "
                         f"{('rows', 'columns')[across]}")
