"""`Softmax` of D's rows, as the last epilogue of a product."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmkit.epilogues.normalise import Normalise
from gemmkit.kernels.common.exponential import power
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert
from gemmkit.ptx.arithmetic import difference

__all__ = ["Softmax"]


@dataclass(frozen=True)
class Softmax(Normalise):
    """exp(x - largest) over its sum, of each row of D: the last epilogue of a chain.

    ``Scale(0.125) | Causal() | Softmax()`` is that of masked scores: a masked value is 0. Of a stack rows are those of each
    product. A row of -inf alone, or with a NaN or inf, is NaN, as in NumPy. D is of float16, bfloat16, float32 or float64.
    Results of 16 bits are computed in float32, and are within two units in the last place.

    Where a tile of D has all columns, or the tiles of a cluster (Hopper), rows are finished in registers; else in a second
    pass over D, by a kernel behind the product (`Plan.row_passes` says which). Results have the same bits every time.

    Raises TypeError for an epilogue behind it, ValueError for another axis, ConfigError for a D of other numbers and for
    two passes over a D that is not plain.

    >>> import numpy as np, gemmkit as gk
    >>> a = np.float32([[0, 0], [3, 3]])
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), epilogue=Softmax()).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    row_words = 2

    axis: str = "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axis != "rows":
            raise ValueError(f"Softmax(axis={self.axis!r}): rows alone; of columns compute the transpose, "
                             "gk.matmul(b.T, a.T, out=d.T, epilogue=Softmax())")

    def standard(self, values: tuple, group: Any, at: Any) -> tuple:
        tops = group.row_states(self.largest, values, at)
        raised = apply(raised_value, values, self, group, tops)
        return raised, apply(softmax_state, tops, self, group.row_states(self.total, raised, at))

    def nothing(self) -> Any:
        return convert(self.state, (-math.inf, 0.0))

    def combine(self, a: Any, b: Any) -> Any:
        top = max(a.largest, b.largest)
        low = self.finite(top)
        return convert(self.state, (top, a.total * power(self, a.largest - low) + b.total * power(self, b.largest - low)))

    def factor(self, own: Any, whole: Any, shape: Any) -> Any:
        return power(self, own.largest - whole.largest) / whole.total

    def finite(self, top: Any) -> Any:
        """A part of -inf alone has values 0, not NaN."""
        return top if top != -math.inf else convert(self.dtype, 0)

    @property
    def state(self) -> Any:
        return np.dtype([("largest", self.dtype), ("total", self.dtype)])

    @property
    def is_narrow(self) -> bool:
        return self.dtype == np.float32 and self.stored.itemsize == 2


def raised_value(x: Any, n: int, softmax: Any, group: Any, tops: tuple) -> Any:
    return power(softmax, difference(x, softmax.finite(tops[group.row(n)])))


def softmax_state(top: Any, r: int, softmax: Any, totals: tuple) -> Any:
    return convert(softmax.state, (top, totals[r]))
