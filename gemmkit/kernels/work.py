"""What travels together through the kernels, as named tuples: which part of D is computed, from where, to where."""

from __future__ import annotations

from typing import Any, NamedTuple


class Work(NamedTuple):
    """A block's tile of D: its first row and column, its share of K, and the block's rank in its cluster."""

    m: Any
    n: Any
    k_begin: Any
    k_tiles: Any
    rank: Any


class Slot(NamedTuple):
    """A stage of the ring, and the phase to wait for. (A tuple's ``index`` is a method of it, in device code too.)"""

    stage: Any
    phase: Any


class Barriers(NamedTuple):
    """The ring's barriers, one of each a stage: what fills a stage tells ``full``, what has read it ``empty``."""

    full: Any
    empty: Any


class Outputs(NamedTuple):
    """What the stores of D need of global memory."""

    c: Any
    d: Any
    map_d: Any
    shape: Any


__all__ = ["Barriers", "Outputs", "Slot", "Work"]
