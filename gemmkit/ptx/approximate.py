"""Functions of a float32 in one instruction of the special function units, and the maximum that skips NaN.

| atom | instruction | error (PTX ISA) | instead of |
|---|---|---|---|
| `exp2` | ex2.approx.ftz.f32 | 2 ulp; denormals are 0 | libdevice's, three instructions longer |
| `log2` | lg2.approx.ftz.f32 | 2^-22 absolute near 1, else 2^-22 relative | libdevice's, some twenty instructions |
| `reciprocal` | rcp.approx.ftz.f32 | 1 ulp | a division, some eight |
| `tanh` | tanh.approx.f32 | 2^-11 relative | libdevice's, some twenty with a branch |
| `maximum` | max.f32 | none; of a number and a NaN the number | Python's ``max``: a comparison and a select |

The arguments may be any real numbers; they are converted to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import Atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import kind_of_type

F32 = np.float32


def _of_floats(name: str, text: str, count: int, compute: Callable[..., Any], doc: str, low: float = 1.0,
               high: float = 100.0, also: float = 1.0) -> Atom:
    """``low``, ``high``: from one to the other, and at ``also``, float32 arguments set off no warning, and NumPy need not be
    told to be silent. That takes longer than to compute, and attention has this for every score."""

    def typer(context: Any, *args: Any) -> Any:
        if len(args) != count or any(kind_of_type(t) is None or isinstance(t, types.Complex) for t in args):
            return None

        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            given = [c.cast(b, x, t, types.float32) for x, t in zip(v, args)]
            return assembly(b, text, [ir.FloatType()], given, pure=True)[0]

        return signature(types.float32, *args), codegen

    def emulate(*given: Any) -> Any:
        for x in given:
            if type(x) is not F32 or not (low <= x <= high or x == also):
                break
        else:
            return compute(*given)
        with np.errstate(all="ignore"):
            return F32(compute(*[F32(x) for x in given]))

    return Atom(name, typer, emulate, doc)


exp2 = _of_floats("exp2", "ex2.approx.ftz.f32 $0, $1;", 1, np.exp2, "2 to the power of x.", low=-100.0,
                  also=-np.inf)                                # a score that a mask hides
log2 = _of_floats("log2", "lg2.approx.ftz.f32 $0, $1;", 1, np.log2, "The logarithm to the base 2; of 0 it is -inf.")
reciprocal = _of_floats("reciprocal", "rcp.approx.ftz.f32 $0, $1;", 1, np.reciprocal, "1 / x.")
tanh = _of_floats("tanh", "tanh.approx.f32 $0, $1;", 1, np.tanh, "The hyperbolic tangent.", low=-100.0)
maximum = _of_floats("maximum", "max.f32 $0, $1, $2;", 2, np.fmax, "The larger of two; of a number and a NaN the number.",
                     low=-np.inf, high=np.inf)
