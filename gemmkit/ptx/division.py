"""Division by a number that stays the same through a kernel: a multiplication and a shift.

For 0 <= n < 2**31 and d >= 1, with l = ceil(log2 d) and m = ceil(2**(31 + l) / d): n // d == (n * m) >> (31 + l). (m d
exceeds 2**(31 + l) by less than d <= 2**l, so the quotient's error is below n / 2**31 / d < 1 / d.) m fits into 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.scalars import index

i32, i64 = ir.IntType(32), ir.IntType(64)


def reciprocal(d: int) -> tuple[np.uint32, int]:
    """The multiplier and the shift of a divisor from 1 to 2**31 - 1.

    >>> [int(divided(n, *reciprocal(7))) for n in (0, 6, 7, 2**31 - 1)] == [0, 0, 1, (2**31 - 1) // 7]
    True
    """
    shift = 31 + (d - 1).bit_length()
    return np.uint32(-(-(1 << shift) // d)), shift


def _type_divided(context: Any, n: Any, multiplier: Any, shift: Any) -> Any:
    if not all(isinstance(t, types.Integer) for t in (n, multiplier, shift)):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        product = b.mul(b.zext(c.cast(b, v[0], n, index), i64), b.zext(c.cast(b, v[1], multiplier, types.uint32), i64))
        return b.trunc(b.lshr(product, b.zext(c.cast(b, v[2], shift, index), i64)), i32)

    return signature(index, n, multiplier, shift), codegen


@atom(_type_divided)
def divided(n: int, multiplier: int, shift: int) -> int:
    """n // d of a coordinate n, by d's `reciprocal`."""
    return (int(n) * int(multiplier)) >> int(shift)
