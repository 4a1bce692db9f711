"""Observers: what a product tells of its A beside D, such as the sums of its rows, without A being read again.

    sums = cupy.empty(M, cupy.float32)
    gemmkit.matmul(a, b, observe_a=gemmkit.epilogues.observers.OperandRowSum(sums))

Threads read A's tiles in shared memory, where the product needs them (`gemmkit.kernels.collectives.lanes`). To reduce
columns of B, observe A of the transposed product: ``matmul(b.T, a.T, observe_a=OperandRowSum(sums), out=d.T)``.
"""

from __future__ import annotations

from typing import Any

from gemmkit.components import Array
from gemmkit.epilogues.reductions import States
from gemmkit.lang.components import dataclass
from gemmkit.lang.deferred import by_old_name

__all__ = ["Observer", "OperandRowReduce", "OperandRowSum"]


def __getattr__(name: str) -> Any:
    return by_old_name(__name__, name)


@dataclass(frozen=True)
class Observer(States):
    """Base class of observers: reductions of A's rows."""

    def check(self, M: int, K: int) -> None:
        """Raise ValueError unless ``out`` has an element for each row of an A of M x K."""
        self.check_out(M, K, f"the rows of an A of {M} x {K}", "row")


@dataclass(frozen=True)
class OperandRowReduce(Observer):
    """Reduces every row of A into ``out[m]``: ``op`` is what `gemmkit.epilogues.RowReduce` takes, with ``of(x, m, k)``.

    A is a plain matrix without transforms, and the kernel ``warp_specialised`` or ``singlestage``, without split K.

    Raises TypeError for an ``op`` that is none, ValueError where ``out`` does not have M elements or shares memory with
    another array, ConfigError where the kernel cannot observe.

    How many elements of each row are not zero, beside the product:

    >>> import numpy as np, gemmkit as gk
    >>> a, filled = np.float32([[1, 0, 2], [0, 0, 5]]), np.empty(2, np.int32)
    >>> count = gk.epilogues.Combine(lambda x, y: x + y, 0, of=lambda x: 1 if x != 0 else 0, dtype="int32")
    >>> with gk.emulate():
    ...     gk.matmul(a, np.ones((3, 1), np.float32), observe_a=OperandRowReduce(filled, count)).tolist()
    [[3.0], [5.0]]
    >>> filled.tolist()
    [2, 1]
    """


@dataclass(frozen=True)
class OperandRowSum(Observer):
    """``out[m]`` is the sum of A's row m, in float32 of narrower elements: `OperandRowReduce` with "sum".

    >>> import numpy as np, gemmkit as gk
    >>> a, sums = np.float32([[1, 2], [3, 4]]), np.empty(2, np.float32)
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), observe_a=OperandRowSum(sums)).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    >>> sums.tolist()
    [3.0, 7.0]
    """

    out: Array
    op: Any = "sum"
