"""Which operator computes a product of given dtypes, when the caller does not say."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.narrowing import narrows
from gemmkit.lang.records import SIGNS, TABLE, metadata_of, part_dtypes
from gemmkit.layouts import Embedded, Interleaved, Layout, Plain, Planar
from gemmkit.operators import COMPLEX, OR_AND, Algebra, FPUOp, MMAOp, Operator
from gemmkit.runtime.device import DeviceInfo

SHORT, BUSY = 48, 8                    # along such a K, and with so many tiles a multiprocessor, D is nearly all that moves
DEPTH, STEPS = 64, 16                  # of a k-tile, and how many each should have of blocks that share K
MOST_DOUBLES = 4                       # parts of numbers in float64 whose sums fit a thread's registers
LARGE = 4096                           # a size where nothing is known of it
SIXTEEN = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# The shapes on tensor cores whose products are those of the ordinary units: of each dtype from the newest GPU's on.
TENSOR_CORES = {SIXTEEN[0]: (MMAOp(), MMAOp(K=8)), SIXTEEN[1]: (MMAOp(dtype=SIXTEEN[1]),),
                np.dtype(np.float64): (MMAOp(dtype=np.float64), MMAOp(M=8, K=4, dtype=np.float64))}


def check_multiplied(dtype: np.dtype, name: str) -> None:
    """Raise TypeError, naming the argument, for a dtype of which the ordinary units multiply no numbers."""
    if dtype.kind not in "iufc" and dtype not in SIXTEEN:
        raise TypeError(f"{name} has dtype {dtype}; the operators take integers, floats and complex numbers")


def operator_for(a: np.dtype, b: np.dtype, sizes: tuple[int, int, int], device: DeviceInfo, products: int = 1) -> Operator:
    """Tensor cores for float16, bfloat16 and float64, the ordinary units for everything else; of complex and other numbers
    by parts. ``products`` is how many there are of these sizes.

    float32 stays float32 (tf32 is a choice of the caller's), and int8 int8 (tensor cores have sums of int32, which NumPy's
    result does not hold). Raises TypeError for dtypes that no operator takes.
    """
    algebra = algebra_of(a)
    if algebra is not None and a == b:
        return sized(algebra, a, b, sizes, device, products)
    if a.kind == b.kind == "b":                    # NumPy's product of booleans: whether any k has both
        return sized(OR_AND, a, b, sizes, device, products)
    on_tensor_cores = tensor_cores(a, b, device)
    if on_tensor_cores is not None:
        return on_tensor_cores
    for dtype, name in ((a, "a"), (b, "b")):
        if dtype.kind != "b":                      # beside a number a boolean is 0 or 1, as NumPy has it
            check_multiplied(dtype, name)
    accumulator = accumulator_for(a, b)
    shape = fpu_shape(max(a.itemsize, b.itemsize, accumulator.itemsize), sizes, device, products=products)
    return FPUOp(**shape, dtype=a, b_dtype=b, accumulator=accumulator)


def tensor_cores(a: np.dtype, b: np.dtype, device: DeviceInfo) -> MMAOp | None:
    """The tensor cores' operator that gives what the ordinary units would; None where there is none."""
    shapes = TENSOR_CORES.get(a, ()) if a == b else ()
    return next((operator for operator in shapes if device.arch >= operator.minimum_arch), None)


def shares_of(K: int, depth: int, device: DeviceInfo) -> int:
    """In how many parts K is long enough to be shared out among the blocks of a cluster, if there are clusters."""
    return max(1, min(8, K // (STEPS * depth))) if device.arch >= (9, 0) else 1


def fpu_shape(size: int, sizes: tuple[int, int, int] | None, device: DeviceInfo, may_share: bool = True,
              products: int = 1) -> dict[str, int]:
    """The shape of an operation on the ordinary units whose widest element has ``size`` bytes; ``may_share`` says that
    blocks may share the K of a tile, which makes large tiles worth while where they are few."""
    M, N, K = sizes or (LARGE, LARGE, LARGE)
    shares = shares_of(K, DEPTH, device) if may_share and sizes is not None else 1

    def tiles(m: int, n: int) -> float:
        """Blocks a multiprocessor gets when each computes m x n."""
        return -(-M // m) * -(-N // n) * products / device.sm_count

    if size == 16:
        return dict(M=16, N=16, MB=4, NB=8)
    if size == 8:                                 # half as many fit the registers
        return dict(M=32, N=32, MB=4, NB=8) if tiles(64, 64) * shares >= 1 else dict(M=16, N=16, MB=4, NB=8)
    if K <= SHORT and size == 4 and tiles(64, 64) >= BUSY:
        return dict(M=32, N=32, MB=8, NB=4)
    if tiles(64, 128) >= 2:
        return dict(M=64, N=32, MB=8, NB=4)
    if tiles(64, 64) * shares >= 0.75:
        return dict(M=32, N=16, MB=8, NB=4)
    return dict(M=16, N=16, MB=4, NB=8)


def algebra_of(dtype: np.dtype) -> Algebra | None:
    """The algebra whose numbers have this dtype."""
    if dtype.kind == "c":
        return COMPLEX
    metadata = metadata_of(dtype)
    return Algebra(None, metadata[TABLE], dtype.names, metadata[SIGNS]) if TABLE in metadata else None


def embed(layouts: dict[str, Any], operator: Operator | None) -> None:
    """Where an algebra multiplies a real matrix by one of its numbers, have the real one's elements read as numbers, in the
    ``layouts`` of A and B."""
    a, b = layouts["a"], layouts["b"]
    if not isinstance(operator, Algebra) or a is None or b is None:
        return
    for name, layout, other in (("a", a, b), ("b", b, a)):
        is_real = len(part_dtypes(layout.dtype)) == 1 and layout.dtype.kind not in "iub"
        if is_real and len(part_dtypes(other.dtype)) == operator.parts:
            layouts[name] = Embedded(operator.number_dtype(layout.dtype), layout)


def new_layout(a: Layout, b: Layout, dtype: np.dtype, plain: type[Plain]) -> Layout:
    """The layout of a D that the call makes: numbers of several parts lie as A's do, or as B's where A is real, side by side
    or in planes; all else is ``plain``."""
    like = b if isinstance(a, Embedded) else a
    return type(like)(dtype) if isinstance(like, (Interleaved, Planar)) else plain(dtype)


def sized(operator: Operator, a: np.dtype, b: np.dtype, sizes: tuple[int, int, int] | None, device: DeviceInfo,
          products: int = 1) -> Operator:
    """An operator that leaves its shape or its dtypes open, completed for operands; any other as it is."""
    if getattr(operator, "is_sized", True):
        return operator
    if isinstance(operator, Algebra):
        return operator.with_base(_base_for(operator.parts, part_dtypes(a)[0], part_dtypes(b)[0], sizes, device, products))
    accumulator = accumulator_for(a, b)
    shape = fpu_shape(max(a.itemsize, b.itemsize, accumulator.itemsize), sizes, device, products=products)
    return operator.sized(shape, a, b, accumulator)          # type: ignore[attr-defined]


def _base_for(parts: int, a: np.dtype, b: np.dtype, sizes: tuple[int, int, int] | None, device: DeviceInfo,
              products: int) -> Operator:
    """What multiplies the parts of numbers."""
    on_tensor_cores = tensor_cores(a, b, device)
    if on_tensor_cores is not None and (a != np.float64 or parts <= MOST_DOUBLES):
        return on_tensor_cores
    accumulator = accumulator_for(a, b)
    size = parts * max(a.itemsize, b.itemsize, accumulator.itemsize)
    shape = fpu_shape(4 if size == 8 else 8 if size <= 12 else 16, sizes, device, False, products)
    return FPUOp(**shape, dtype=a, b_dtype=b, accumulator=accumulator)


def accumulator_for(a: np.dtype, b: np.dtype) -> np.dtype:
    """NumPy's result type of the operands; at least float32 for floats."""
    try:
        common = np.result_type(a, b)
    except TypeError:
        raise TypeError(f"a is {a} and b is {b}: they have no common type; convert one of them") from None
    return np.dtype(np.float32) if common in SIXTEEN else common


def result_dtype(a: np.dtype, b: np.dtype, c: Layout | None, operator: Operator) -> np.dtype:
    """The dtype of a result that the call makes: C's if there is one, else NumPy's result type of a and b, or the
    accumulator's where that type does not hold its sums."""
    if c is not None:
        return c.dtype
    if isinstance(operator, Algebra):
        parts = [part_dtypes(dtype)[0] for dtype in (a, b)]
        return operator.number_dtype(np.result_type(*parts) if parts[0] != parts[1] else parts[0])
    if (a.kind in "biufc" and b.kind in "biufc") or (a in SIXTEEN and b in SIXTEEN):
        try:
            common = np.result_type(a, b)
        except TypeError:
            return operator.fragment_c.dtype
        return operator.fragment_c.dtype if narrows(operator.fragment_c.dtype, common) else common
    return operator.fragment_c.dtype


__all__ = ["accumulator_for", "algebra_of", "embed", "fpu_shape", "new_layout", "operator_for", "result_dtype", "sized"]
