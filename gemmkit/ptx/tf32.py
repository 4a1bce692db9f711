"""Words of tf32: float32 rounded to the 10 bits of the mantissa that tensor cores look at."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.ptx.convert import rounded_to_tf32, tf32_from_f32


def _type_round_word(context: Any, word: Any) -> Any:
    if word != types.uint32:
        return None
    return signature(types.uint32, word), lambda c, b, s, v: tf32_from_f32(b, b.bitcast(v[0], ir.FloatType()))


@atom(_type_round_word)
def round_word(word: Any) -> Any:
    """A float32 in a 32-bit word, rounded to nearest, ties away from zero (`gemmkit.ptx.convert.tf32_from_f32`).

    >>> hex(round_word(np.float32(1 + 2**-11).view(np.uint32)))
    '0x3f802000'
    """
    return np.uint32(rounded_to_tf32(np.uint32(word).view(np.float32)).view(np.uint32))


__all__ = ["round_word"]
