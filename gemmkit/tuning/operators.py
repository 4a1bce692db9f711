"""Which operator computes a product of given dtypes, when the caller does not say, and in what it sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.epilogues import Bias, Epilogue, LinearCombination, Residual, parts
from gemmkit.lang.number_rules import SIGNS, TABLE, metadata_of, narrows, part_dtypes
from gemmkit.layouts import ArrayLayout, Embedded, Interleaved, Plain, Planar, Zero
from gemmkit.operators import COMPLEX, OR_AND, Algebra, FPUOp, MMAOp, Operator
from gemmkit.runtime.device import DeviceInfo

SHORT, BUSY = 48, 8                    # along such a K, and with so many tiles a multiprocessor, D is nearly all that moves
DEPTH, STEPS = 64, 16                  # of a k-tile, and how many each should have of blocks that share K
MOST_DOUBLES = 4                       # parts of numbers in float64 whose sums fit a thread's registers
LARGE = 4096                           # a size where nothing is known of it
BYTES = (np.dtype(np.int8), np.dtype(np.uint8))
EIGHT = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
SIXTEEN = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# The shapes on tensor cores whose products are those of the ordinary units: of each dtype from the newest GPU's on.
TENSOR_CORES = {SIXTEEN[0]: (MMAOp(), MMAOp(K=8)), SIXTEEN[1]: (MMAOp(dtype=SIXTEEN[1]),),
                np.dtype(np.float64): (MMAOp(dtype=np.float64), MMAOp(M=8, K=4, dtype=np.float64))}


@dataclass(frozen=True)
class AccumulatorRule:
    """What decides the dtype of a product's accumulators: the dtypes of A and B, what the result is asked to hold, and K.

    ``result`` is the dtype of out, or the ``dtype=`` of a call; ``c`` is C's. Each is None where the call has none. With
    ``is_seen`` a function gets the sums: an epilogue, or a transform of D.

    >>> int8, int32 = np.dtype("int8"), np.dtype("int32")
    >>> AccumulatorRule(int8, int8).accumulator, AccumulatorRule(int8, int8, int32).accumulator
    (dtype('int8'), dtype('int32'))
    """

    a: np.dtype
    b: np.dtype
    result: np.dtype | None = None
    c: np.dtype | None = None
    is_seen: bool = False
    K: int = LARGE

    @classmethod
    def of(cls, layouts: dict[str, Any], fields: dict[str, Any], K: int) -> AccumulatorRule:
        """Of operands in these layouts, of which D's is None where the call leaves its dtype open; ``fields`` are the
        components."""
        a, b, c, d = (layouts[name] for name in "abcd")
        c = None if isinstance(c, Zero) else c
        epilogue = fields.get("epilogue")
        result = getattr(epilogue, "result_dtype", None) if d is None else d.dtype
        return cls(_of_part(a.dtype), _of_part(b.dtype), None if result is None else _of_part(result),
                   None if c is None else _of_part(c.dtype), _sees(epilogue, fields, d is not None), K)

    @cached_property
    def usual(self) -> np.dtype:
        """The accumulators' dtype where only A and B decide it."""
        return accumulator_for(self.a, self.b)

    @cached_property
    def accumulator(self) -> np.dtype:
        """The dtype of ordinary sums."""
        if self.usual.kind not in "iub":
            return self._wider_float()
        wide = self._wider_integer()
        if self.c is not None and self.c.kind not in "iub":        # C is added to them
            return _joined(wide, self.c)
        if self.result is not None and self.result.kind not in "iub" and self.usual.itemsize >= 4:
            return np.dtype(np.float64)                            # no integer holds every sum
        return wide

    @cached_property
    def of_semiring(self) -> np.dtype:
        """The dtype of a semiring's sums: of integers it is an integer, because its extreme numbers stand for infinity."""
        if self.usual.kind not in "iub":
            return self._wider_float()
        wide = self._wider_integer()
        if self.c is not None and self.c.kind not in "iub":
            return _joined(wide, self.c)
        is_float = self.result is not None and self.result.kind not in "iub"
        return np.result_type(wide, np.int64) if is_float and self.usual.itemsize == 4 else wide

    @cached_property
    def widens(self) -> bool:
        """Whether the caller asks for more than A and B decide."""
        known = all(x.kind in "biufc" or x in SIXTEEN for x in (self.a, self.b)) or {self.a, self.b} <= {*EIGHT}
        return known and (self.counts or self.usual != self.accumulator)

    @cached_property
    def is_of_bytes(self) -> bool:
        """Whether tensor cores for 8-bit operands give these sums: int32 of integers, float32 of floats."""
        if {self.a, self.b} <= {*EIGHT}:
            return self.accumulator == np.float32
        return {self.a, self.b} <= {*BYTES} and self.accumulator == np.int32

    @cached_property
    def counts(self) -> bool:
        """Whether a product of booleans counts the k that both have: a number is asked for, or added."""
        return self.a.kind == self.b.kind == "b" and any(x is not None and x.kind != "b" for x in (self.result, self.c))

    def _wider_float(self) -> np.dtype:
        held = [part_dtypes(x)[0] for x in (self.result, self.c) if x is not None]
        wide = any(x == np.float64 or x == np.complex128 for x in held)
        return np.result_type(self.usual, np.float64) if wide else self.usual

    def _wider_integer(self) -> np.dtype:
        asked = [x for x in (self.result, self.c) if x is not None]
        wide = self.usual
        for x in asked:
            if x.kind in "iu" and np.can_cast(wide, x, "safe"):
                wide = x
        beyond = any(x.kind not in "iub" for x in asked)
        if (beyond or self.is_seen) and self.usual.itemsize < 4 and wide.itemsize < 4 and (self.usual.kind != "b" or beyond):
            return np.dtype(np.int32 if self._most < 2**31 else np.int64)
        return wide

    @property
    def _most(self) -> int:
        """The largest magnitude of an exact sum."""
        def largest(dtype: np.dtype) -> int:
            return 1 if dtype.kind == "b" else max(-int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))

        return largest(self.a) * largest(self.b) * max(1, self.K)


def _of_part(dtype: np.dtype) -> np.dtype:
    """That of a part of numbers with several; complex numbers are their own."""
    return dtype if dtype.names is None else part_dtypes(dtype)[0]


def _sees(epilogue: Any, fields: dict[str, Any], is_given: bool) -> bool:
    """Whether a function gets the sums. Those that only add and multiply give the same in a given D's integers."""
    for name in ("transform_regs_to_shared_d", "transform_shared_to_global_d"):
        if not getattr(fields.get(name), "is_identity", True):
            return True
    if not isinstance(epilogue, Epilogue) or (epilogue.passes_on and not epilogue.writes):
        return False
    linear = (Bias, LinearCombination, Residual) if is_given else (LinearCombination,)
    return not all(isinstance(part, linear) for part in parts(epilogue))


def _joined(x: np.dtype, y: np.dtype) -> np.dtype:
    """NumPy's result type, of float32 at least; float64 where NumPy has none."""
    try:
        common = np.result_type(x, y)
    except TypeError:
        return np.dtype(np.float64)
    return np.dtype(np.float32) if common in SIXTEEN else common


def check_multiplied(dtype: np.dtype, name: str) -> None:
    """Raise TypeError, naming the argument, for a dtype of which the ordinary units multiply no numbers."""
    if dtype.kind not in "iufc" and dtype not in SIXTEEN:
        raise TypeError(f"{name} has dtype {dtype}; the operators take integers, floats and complex numbers")


def operator_for(a: np.dtype, b: np.dtype, sizes: tuple[int, int, int], device: DeviceInfo, products: int = 1,
                 sums: AccumulatorRule | None = None) -> Operator:
    """Tensor cores for float16, bfloat16 and float64, the ordinary units for everything else; of complex and other numbers
    by parts. ``products`` is how many there are of these sizes, and ``sums`` what the result is to hold (None: NumPy's
    result type of A and B).

    float32 stays float32 (tf32 is a choice of the caller's), and int8 int8 unless a wider result is asked for, which
    tensor cores sum in int32. Raises TypeError for dtypes that no operator takes.
    """
    sums = sums or AccumulatorRule(a, b, K=sizes[2])
    algebra = algebra_of(a)
    if algebra is not None and a == b:
        return sized(algebra, a, b, sizes, device, products, sums)
    if a.kind == b.kind == "b" and not sums.counts:            # NumPy's product of booleans: whether any k has both
        return sized(OR_AND, a, b, sizes, device, products, sums)
    if sums.is_of_bytes:
        return of_bytes(sums, sizes, device, products)[0]
    on_tensor_cores = None if sums.widens else tensor_cores(a, b, device)
    if on_tensor_cores is not None:
        return on_tensor_cores
    for dtype, name in ((a, "a"), (b, "b")) if not {a, b} <= {*EIGHT} else ():
        if dtype.kind != "b":                      # beside a number a boolean is 0 or 1, as NumPy has it
            check_multiplied(dtype, name)
    accumulator = sums.accumulator
    shape = fpu_shape(max(a.itemsize, b.itemsize, accumulator.itemsize), sizes, device, products=products)
    return FPUOp(**shape, dtype=a, b_dtype=b, accumulator=accumulator)


def tensor_cores(a: np.dtype, b: np.dtype, device: DeviceInfo) -> MMAOp | None:
    """The tensor cores' operator that gives what the ordinary units would; None where there is none."""
    shapes = TENSOR_CORES.get(a, ()) if a == b else ()
    return next((operator for operator in shapes if device.arch >= operator.minimum_arch), None)


def of_bytes(sums: AccumulatorRule, sizes: tuple[int, int, int], device: DeviceInfo, products: int = 1) -> list[Operator]:
    """Operators for 8-bit operands whose sums are those of tensor cores (`AccumulatorRule.is_of_bytes`), the fastest first.
    The ordinary units take all layouts, and float8 where tensor cores keep too little of a sum (Hopper's mma.sync)."""
    found: list[Operator] = []
    if sums.a in BYTES or device.arch[0] != 9:
        shapes = (MMAOp(dtype=sums.a, b_dtype=sums.b), *((MMAOp(M=8, K=16, dtype=sums.a, b_dtype=sums.b),) if sums.a in BYTES
                                                         else ()))
        found += [shape for shape in shapes if device.arch >= shape.minimum_arch][:1]
    size = sums.accumulator.itemsize
    return [*found, FPUOp(**fpu_shape(size, sizes, device, products=products), dtype=sums.a, b_dtype=sums.b,
                          accumulator=sums.accumulator)]


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


def new_layout(a: ArrayLayout, b: ArrayLayout, dtype: np.dtype, plain: type[Plain]) -> ArrayLayout:
    """The layout of a D that the call makes: numbers of several parts lie as A's do, or as B's where A is real, side by side
    or in planes; all else is ``plain``."""
    like = b if isinstance(a, Embedded) else a
    return type(like)(dtype) if isinstance(like, (Interleaved, Planar)) else plain(dtype)


def sized(operator: Operator, a: np.dtype, b: np.dtype, sizes: tuple[int, int, int] | None, device: DeviceInfo,
          products: int = 1, sums: AccumulatorRule | None = None) -> Operator:
    """An operator that leaves its shape or its dtypes open, completed for operands; any other as it is."""
    if getattr(operator, "is_sized", True):
        return operator
    sums = sums or AccumulatorRule(a, b)
    if isinstance(operator, Algebra):
        return operator.with_base(_base_for(operator.parts, part_dtypes(a)[0], part_dtypes(b)[0], sizes, device, products,
                                            sums))
    accumulator = sums.of_semiring
    shape = fpu_shape(max(a.itemsize, b.itemsize, accumulator.itemsize), sizes, device, products=products)
    return operator.sized(shape, a, b, accumulator)          # type: ignore[attr-defined]


def _base_for(parts: int, a: np.dtype, b: np.dtype, sizes: tuple[int, int, int] | None, device: DeviceInfo,
              products: int, sums: AccumulatorRule) -> Operator:
    """What multiplies the parts of numbers."""
    result, c = (None if x is None else part_dtypes(x)[0] for x in (sums.result, sums.c))
    sums = AccumulatorRule(a, b, result, c, sums.is_seen, sums.K)
    on_tensor_cores = None if sums.widens else tensor_cores(a, b, device)
    if on_tensor_cores is not None and (a != np.float64 or parts <= MOST_DOUBLES):
        return on_tensor_cores
    accumulator = sums.accumulator
    size = parts * max(a.itemsize, b.itemsize, accumulator.itemsize)
    shape = fpu_shape(4 if size == 8 else 8 if size <= 12 else 16, sizes, device, False, products)
    return FPUOp(**shape, dtype=a, b_dtype=b, accumulator=accumulator)


def accumulator_for(a: np.dtype, b: np.dtype) -> np.dtype:
    """NumPy's result type of the operands; at least float32 for floats."""
    if a in EIGHT and b in EIGHT:
        return np.dtype(np.float32)
    try:
        common = np.result_type(a, b)
    except TypeError:
        raise TypeError(f"a is {a} and b is {b}: they have no common type; convert one of them") from None
    return np.dtype(np.float32) if common in SIXTEEN else common


def result_dtype(a: np.dtype, b: np.dtype, c: ArrayLayout | None, operator: Operator,
                 asked: np.dtype | None = None) -> np.dtype:
    """The dtype of a result that the call makes: what is ``asked`` for; else C's if there is one, else NumPy's result type
    of a and b, or the accumulator's where that type does not hold its sums."""
    if asked is not None:
        return asked
    if c is not None:
        sums = operator.fragment_c.dtype
        return sums if sums.kind == c.dtype.kind == "i" and narrows(sums, c.dtype) else c.dtype
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


def new_dtype(a: np.dtype, b: np.dtype, operator: Operator | None, device: DeviceInfo, asked: np.dtype | None = None,
              epilogue: Any = None, K: int = LARGE) -> np.dtype:
    """`result_dtype` of a call without C, out and layouts; ``asked`` is its ``dtype=``."""
    own = getattr(epilogue, "result_dtype", None) if asked is None else asked
    if own is not None:
        return np.dtype(own)
    sums = AccumulatorRule(a, b, is_seen=_sees(epilogue, {}, False), K=K)
    chosen = (operator_for(a, b, (1, 1, 1), device, sums=sums) if operator is None
              else sized(operator, a, b, None, device, sums=sums))
    return result_dtype(a, b, None, chosen)
