"""Pairs of float32 as words of 16-bit floats, in the registers that a wgmma reads as A.

An accumulator's pairs lie where those of an A fragment do, so that the result of one product becomes an operand of the next
without leaving the registers. `settle` of converted elements takes three instructions a pair, this one.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmkit import emulator
from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.dtypes import DTypeType
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import numpy_dtype
from gemmkit.lang.sites import current

NAMES = {np.dtype(np.float16): "f16x2", np.dtype(ml_dtypes.bfloat16): "bf16x2"}


def _packing(suffix: str) -> Any:
    return lambda context, dtype, values: _typed(suffix, dtype, values)


def _typed(suffix: str, dtype: Any, values: Any) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(values, types.UniTuple) or values.dtype != types.float32:
        return None
    name = NAMES.get(numpy_dtype(dtype.target))
    if name is None or values.count % 2:
        return None
    result = types.UniTuple(types.uint32, values.count // 2)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        given = [b.extract_value(v[1], n) for n in range(values.count)]
        # "memory": registers that a wgmma reads must not be written before the wait for it.
        return c.make_tuple(b, result, [assembly(b, f"cvt.rn{suffix}.{name}.f32 $0, $2, $1;", [ir.IntType(32)], list(pair),
                                                 memory=True)[0] for pair in zip(given[::2], given[1::2])])

    return signature(result, dtype, values), codegen


@atom(_packing(""))
def pack_fragment(dtype: np.dtype, values: tuple) -> tuple:
    """Pairs of float32 as float16 or bfloat16 (``dtype``) in 32-bit words, the first in the lower half: made here, neither
    earlier nor later, as `gemmkit.ptx.wgmma.settle` makes them."""
    with np.errstate(all="ignore"):
        words = np.array(values, np.float32).astype(dtype).view(np.uint32)
    return emulator.in_flight.settled(current(), tuple(words))


@atom(_packing(".relu"))
def pack_relu(dtype: np.dtype, values: tuple) -> tuple:
    """`pack_fragment` of max(x, 0) of each: in the same instruction. NaN stays NaN."""
    given = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        words = np.where(given < 0, np.float32(0), given).astype(dtype).view(np.uint32)
    return emulator.in_flight.settled(current(), tuple(words))
