"""Operators: the arithmetic of a warp (or warpgroup) on tiles in shared memory."""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

__all__ = ["COMPLEX", "DUAL", "LOG_SUM_EXP", "MAX_PLUS", "MAX_TIMES", "MIN_PLUS", "OR_AND", "QUATERNION", "SPLIT_COMPLEX",
           "Algebra", "BlockScaledOp",
           "BoxMMAOp", "FPUOp", "MMAOp", "Operator", "QuantisedMMAOp", "Semiring", "WGMMAOp", "WMMAOp", "dual"]

if TYPE_CHECKING:
    from gemmkit.operators.algebra import (
        COMPLEX,
        DUAL,
        LOG_SUM_EXP,
        MAX_PLUS,
        MAX_TIMES,
        MIN_PLUS,
        OR_AND,
        QUATERNION,
        SPLIT_COMPLEX,
        Algebra,
        Semiring,
        dual,
    )
    from gemmkit.operators.base import Operator
    from gemmkit.operators.fpu import FPUOp
    from gemmkit.operators.mma import BoxMMAOp, MMAOp, QuantisedMMAOp, WMMAOp
    from gemmkit.operators.wgmma import BlockScaledOp, WGMMAOp
else:
    __getattr__, __dir__ = public_names(globals())
