"""e^x as a softmax needs it: to the last bits where its result has them, else in one instruction beside a multiplication."""

from __future__ import annotations

import math
from typing import Any

from gemmkit.lang.values import convert
from gemmkit.ptx.approximate import exp2

LOG2E = math.log2(math.e)


def power(of: Any, x: Any) -> Any:
    """e^x, in the type ``of.dtype``; by the special function unit's power of two where ``of.is_narrow``: what is computed in
    float32 is stored in 16 bits."""
    if of.is_narrow:
        return exp2(x * convert(of.dtype, LOG2E))
    return math.exp(x)
