"""Named tuples of run-time values that travel together through the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple


class Work(NamedTuple):
    """A thread block's tile of D: its first row and column, in which product of a stack (0 without one), its share of K,
    and the block's rank in its cluster."""

    m: Any
    n: Any
    batch: Any
    k_begin: Any
    k_tiles: Any
    rank: Any


class Slot(NamedTuple):
    """A stage of a pipeline, and the phase of its barriers. (``index`` would hide a method of tuples.)"""

    stage: Any
    phase: Any


class KTile(NamedTuple):
    """Where the tiles of A and B of one stage begin, in which product, the block's rank in its cluster, and the problem's
    sizes."""

    m: Any
    n: Any
    k: Any
    batch: Any
    rank: Any
    shape: Any


class Place(NamedTuple):
    """Where a tile of a matrix begins (row ``i``, column ``j``), and where the matrix ends."""

    i: Any
    j: Any
    rows: Any
    columns: Any


class Input(NamedTuple):
    """An operand in global memory: a view of its array, and its tensor map (`Nothing` where TMA does not load it)."""

    data: Any
    map: Any


class Inputs(NamedTuple):
    """Both operands in global memory."""

    a: Any
    b: Any


class Outputs(NamedTuple):
    """What stores of D need of global memory. ``map_c`` is the tensor map of C, or of what an epilogue reads beside D
    (`gemmkit.kernels.sm90.ahead`)."""

    c: Any
    d: Any
    map_c: Any
    map_d: Any
    batch: Any
    shape: Any
