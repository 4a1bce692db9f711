"""The sizes of a launch, and run-time values that travel together through the kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component, Scalar
from gemmkit.lang.component_class import dataclass

F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Sizes(Component):
    """The run-time part: rows of x, columns of the result, and layers."""

    rows: Scalar
    columns: Scalar
    layers: Scalar


class Tables(NamedTuple):
    """What the host has written of each layer: the maps of its weights (and, behind those of all layers, of its biases), and
    its extents (`gemmkit.lang.members`)."""

    maps: Any
    shapes: Any


class Rows(NamedTuple):
    """A consumer's 64 rows: the first of them, the stage that x came in, and which consumer it is."""

    first: Any
    stage: Any
    group: Any


class Outputs(NamedTuple):
    """The result in global memory: a view, or a tensor map."""

    out: Any
    map: Any
