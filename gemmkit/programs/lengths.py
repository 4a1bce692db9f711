"""What bounds the rounds of a tile: an element of an array of whole numbers, ``sequential(k.rows, stop=lengths[h])``.

Of a stack of matrices each then has a length of its own, as sequences of a batch have. A length beyond the axis is the axis;
of one of 0 or less there are no rounds. Blocks beyond a tile's length are not loaded.

>>> import numpy as np
>>> import gemmkit as gk
>>> from gemmkit import programs as gp
>>> @gk.program
... def summed(x, y, lengths, d):
...     for h, m in gp.parallel(x.count, x.rows):
...         sums = gp.zeros(m, y.columns)
...         for n in gp.sequential(y.rows, stop=lengths[h]):
...             sums += x[h, m, n] @ y[h, n]
...         d[h, m] = sums
>>> x, y, d = np.ones((2, 1, 5)), np.ones((2, 5, 1)), np.empty((2, 1, 1))
>>> summed.reference(x, y, np.array([3, 9]), d).ravel()
array([3., 5.])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.programs.lines import refused
from gemmkit.programs.values import Extent, Parameter, shown

if TYPE_CHECKING:
    from gemmkit.programs.trace import Value

COUNTED = np.dtype(np.int32), np.dtype(np.int64)
SUCH = "an element of an array of int32 or int64 is needed, such as stop=lengths[h]"


def check_length(stop: Any, extent: Extent) -> Value:
    """The load that a loop's ``stop`` is. Raises TypeError and ValueError, with the user's line, for what is no length of
    all rows of a tile."""
    if isinstance(stop, Parameter):
        raise refused(TypeError, f"sequential(stop={stop.name}): {stop.name} is of shape {stop.shape}, and a tile has one "
                                 f"length; {SUCH}")
    found: Any = getattr(stop, "value", None)
    if getattr(found, "op", "") != "load":
        raise refused(TypeError, f"sequential(stop={stop!r}): {SUCH}")
    parameter, key = found.data
    said = f"sequential(stop={parameter.name}[{shown(key)}])"
    if found.dims:
        raise refused(ValueError, f"{said} has the dimensions ({shown(found.dims)}): rounds are a whole tile's, so that a "
                                  "length is one number; what each row sees is a condition of where(...)")
    if np.dtype(parameter.dtype) not in COUNTED:
        raise refused(TypeError, f"{said} is of {parameter.dtype}: lengths of int32 or int64 are counted")
    if extent.stack:
        raise refused(ValueError, f"{said}: the loop goes along {extent}, one by one; rows and columns have lengths")
    return cast("Value", found)
