"""What travels together through the kernels, as named tuples."""

from __future__ import annotations

from typing import Any, NamedTuple


class Outputs(NamedTuple):
    """What the stores of D need of global memory."""

    c: Any
    d: Any
    map_d: Any
    shape: Any


__all__ = ["Outputs"]
