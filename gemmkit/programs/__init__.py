"""Programs: the mathematics of a kernel, in order, with no word of synchronisation (docs/programs.md).

>>> import numpy as np
>>> import gemmkit as gk
>>> from gemmkit import programs as gp
>>> @gk.program
... def product(a, b, d):
...     for m, n in gp.parallel(a.rows, b.columns):
...         sums = gp.zeros(m, n)
...         for k in gp.sequential(a.columns):
...             sums += a[m, k] @ b[k, n]
...         d[m, n] = sums
>>> a, b = np.ones((3, 4), np.float16), np.ones((4, 5), np.float16)
>>> product.reference(a, b, np.empty((3, 5), np.float16))[0]
array([4., 4., 4., 4., 4.])
"""

from typing import Any

from gemmkit.programs.decorated import (
    Program,
    block_diagonal,
    call,
    copy,
    cumsum,
    erf,
    exp,
    finite,
    full,
    log,
    maximum,
    minimum,
    once,
    packed,
    paged,
    parallel,
    place,
    program,
    rsqrt,
    sequential,
    sqrt,
    tanh,
    unit_lower_inverse,
    where,
    zeros,
)
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.values import refused

__all__ = ["Mapping", "Program", "block_diagonal", "call", "copy", "cumsum", "erf", "exp", "finite", "full", "log",
           "maximum", "minimum", "once", "packed", "paged", "parallel", "place", "program", "rsqrt", "sequential", "sqrt",
           "tanh", "unit_lower_inverse", "where", "zeros"]


def __getattr__(name: str) -> Any:
    """Raises AttributeError, with the line that asks for it, for a word that programs have not."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    words = ", ".join(word for word in __all__ if word.islower())
    raise refused(AttributeError, f"gemmkit.programs has no word {name!r}: the words are {words}; and abs(x), x ** y, x @ "
                                  "y, x.T, x.max(axis=1), min, sum, mean and astype; gp.call(f, x) calls any function of "
                                  "numbers, such as gemmkit.epilogues.activations.gelu")
