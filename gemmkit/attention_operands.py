"""Q, K, V and the result of attention as (batch, heads, rows, head size), whatever their layout; what does not fit is
refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.config import ConfigError
from gemmkit.kernels.attention.mapping import HEADS
from gemmkit.problem import check_places
from gemmkit.runtime.arrays import ArrayInfo, overlaps_itself, shares_memory
from gemmkit.runtime.tensor_maps import why_not

LAYOUTS = {"bhnd": (0, 1, 2, 3), "bnhd": (0, 2, 1, 3)}
DTYPES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
LIMIT = 2**30                          # rows: coordinates are 32 bits wide, and masks add to them


class Sequences(NamedTuple):
    """Where packed sequences begin among the rows of Q, and of K and V; at last where all end."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


class Operands(NamedTuple):
    """The arrays as (batch, heads, rows, head size); of K and V an axis of stride 0 has one element."""

    q: ArrayInfo
    k: ArrayInfo
    v: ArrayInfo

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]


def as_heads(info: ArrayInfo, name: str, layout: str, packed: bool) -> ArrayInfo:
    """The array's axes in the order (batch, heads, rows, head size); packed ones have a batch of 1.

    >>> from gemmkit.runtime.arrays import describe
    >>> as_heads(describe(np.zeros((2, 5, 3, 64), np.float16)), "q", "bnhd", False).shape
    (2, 3, 5, 64)
    """
    wanted = layout[1:] if packed else layout
    if len(info.shape) != len(wanted):
        axes = ", ".join(AXES[c] for c in wanted)
        raise ValueError(f"{name} has shape {info.shape}; {len(wanted)} axes are needed, {axes} (layout={layout!r}"
                         f"{', with lengths' if packed else ''})")
    shape, strides = ((1, *info.shape), (0, *info.strides)) if packed else (info.shape, info.strides)
    order = LAYOUTS[layout]
    return info._replace(shape=tuple(shape[axis] for axis in order), strides=tuple(strides[axis] for axis in order))


AXES = {"b": "batch", "h": "heads", "n": "rows", "d": "head size"}


def operands_of(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, layout: str, packed: bool) -> Operands:
    """Q, K and V, checked against each other.

    Raises:
        TypeError: dtypes other than float16 and bfloat16, or different ones; arrays on the host outside of the emulator.
        ConfigError: a head size that no mapping exists for.
        ValueError: shapes that do not go together; strides that TMA cannot follow.
    """
    infos = {"q": q, "k": k, "v": v}
    check_places(infos)                                                                        # type: ignore[arg-type]
    for name, info in infos.items():
        if info.dtype not in DTYPES:
            raise TypeError(f"{name} is of {info.dtype}; float16 or bfloat16 is needed")
        if info.dtype != q.dtype:
            raise TypeError(f"{name} is of {info.dtype} and q of {q.dtype}; q, k and v need one dtype")
    found = {name: as_heads(info, name, layout, packed) for name, info in infos.items()}
    q, k, v = found.values()
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"v has {v.shape[2]} rows and k has {k.shape[2]}; they need as many")
    for name, info in found.items():
        if info.shape[3] != q.shape[3]:
            raise ValueError(f"{name} has head size {info.shape[3]} and q has {q.shape[3]}; they need one size")
        if info.shape[2] >= LIMIT:
            raise ValueError(f"{name} has {info.shape[2]} rows; less than 2**30 are needed")
        if info.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"{name} has a batch of {info.shape[0]} and q of {q.shape[0]}; q's, or 1, is needed")
        if q.shape[1] and (info.shape[1] == 0 or q.shape[1] % info.shape[1]):
            raise ValueError(f"{name} has {info.shape[1]} heads and q has {q.shape[1]}; a number that divides q's is needed")
    if q.shape[3] not in HEADS:
        sizes = ", ".join(map(str, HEADS))
        raise ConfigError(f"q has head size {q.shape[3]}; there are kernels for {sizes}; pad q, k and v with zeros to one "
                          "of these, and give scale")
    return Operands(q, *(_shared(found[name]) for name in "kv"))


def check_loadable(operands: Operands) -> None:
    """Raise ValueError for arrays that TMA cannot load."""
    for name, info in zip("qkv", operands):
        reason = why_not(info, 3)
        if reason is not None:
            raise ValueError(f"{name} cannot be loaded by TMA, as (batch, heads, rows, head size): {reason}; pass a "
                             "contiguous copy")


def _shared(info: ArrayInfo) -> ArrayInfo:
    """One element along axes of stride 0, which is what broadcasting leaves: all heads read it."""
    shape = tuple(1 if axis < 2 and info.strides[axis] == 0 else extent for axis, extent in enumerate(info.shape))
    return info._replace(shape=shape)


def check_out(out: ArrayInfo, operands: Operands, given: ArrayInfo) -> None:
    """Raise where ``out`` (``given`` as the caller passed it) does not fit the result."""
    if given.dtype != operands.q.dtype:
        raise TypeError(f"out is of {given.dtype}; the result is of q's dtype, {operands.q.dtype}")
    if out.shape != operands.q.shape:
        raise ValueError(f"out has shape {given.shape}; q's shape is needed")
    if out.readonly:
        raise ValueError("out is read-only; give a writable array, or leave it out")
    if overlaps_itself(out):
        raise ValueError(f"out has strides {given.strides}: several of its elements share memory")
    for name, info in zip("qkv", operands):
        if shares_memory(out, info):
            raise ValueError(f"out overlaps {name} in memory; blocks read {name} while others write out")


def sequences_of(lengths: Any, queries: int, keys: int) -> Sequences:
    """``lengths`` checked: offsets on the host, of as many sequences of queries as of keys."""
    if not isinstance(lengths, (tuple, list)) or len(lengths) != 2:
        raise TypeError(f"lengths={lengths!r}: a pair of offsets, of queries and of keys, is needed")
    made = []
    for name, offsets, rows in (("q_offsets", lengths[0], queries), ("k_offsets", lengths[1], keys)):
        if not isinstance(offsets, (list, tuple, np.ndarray)):
            raise TypeError(f"lengths: {name} is a {type(offsets).__name__}; a list or NumPy array is needed: tiles are "
                            "dealt out on the host, and nothing is copied from the device for it")
        numbers = np.asarray(offsets)
        if numbers.ndim != 1 or numbers.size < 1 or numbers.dtype.kind not in "iu":
            raise TypeError(f"lengths: {name} is an array of {numbers.dtype} and shape {numbers.shape}; whole numbers in "
                            "one dimension are needed, one more than sequences")
        found = tuple(int(n) for n in numbers)
        if found[0] != 0 or found[-1] != rows or any(a > b for a, b in pairwise(found)):
            raise ValueError(f"lengths: {name} goes from {found[0]} to {found[-1]}; offsets that begin with 0, never fall "
                             f"and end with the {rows} rows are needed")
        made.append(found)
    if len(made[0]) != len(made[1]):
        raise ValueError(f"lengths: q_offsets are of {len(made[0]) - 1} sequences and k_offsets of {len(made[1]) - 1}; as "
                         "many are needed")
    return Sequences(*made)
