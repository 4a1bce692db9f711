"""tf32: float32 rounded to the 10 bits of the mantissa that tensor cores look at."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import ir, signature, types

_TF32_BITS, _TF32_HALF = np.uint32(0xFFFFE000), np.uint32(0x1000)


def tf32_from_f32(builder: Any, value: Any) -> Any:
    """float32 to a register of tf32, round to nearest, ties away from zero (sm_80+)."""
    return assembly(builder, "cvt.rna.tf32.f32 $0, $1;", [ir.IntType(32)], [value], pure=True)[0]


def rounded_to_tf32(values: Any) -> np.ndarray:
    """What `tf32_from_f32` gives, as float32. (Infinities stay; a carry out of the mantissa is one into the exponent.)"""
    given = np.asarray(values, np.float32)
    rounded = truncated_to_tf32((given.view(np.uint32) + _TF32_HALF).view(np.float32))
    return np.where(np.isfinite(given), rounded, given)


def truncated_to_tf32(values: Any) -> np.ndarray:
    """What tensor cores see of a float32 that nobody rounded."""
    return np.bitwise_and(np.asarray(values, np.float32).view(np.uint32), _TF32_BITS).view(np.float32)


def _type_round_word(context: Any, word: Any) -> Any:
    if word != types.uint32:
        return None
    return signature(types.uint32, word), lambda c, b, s, v: tf32_from_f32(b, b.bitcast(v[0], ir.FloatType()))


@atom(_type_round_word)
def round_word(word: Any) -> Any:
    """A float32 in a 32-bit word, rounded to nearest, ties away from zero (`tf32_from_f32`).

    >>> hex(round_word(np.float32(1 + 2**-11).view(np.uint32)))
    '0x3f802000'
    """
    return np.uint32(rounded_to_tf32(np.uint32(word).view(np.float32)).view(np.uint32))
