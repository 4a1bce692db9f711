"""What is known of the copies of a round, when the kernel is compiled: whether they may reach beyond an edge."""

from __future__ import annotations

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass


@dataclass(frozen=True)
class Reach(Component):
    """``inside``: all are in range. ``asks``: a branch finds out, once for an operand's tile. Else each piece has a
    predicate."""

    inside: bool = False
    asks: bool = False


INSIDE, AT_EDGES, ANYWHERE = Reach(inside=True), Reach(), Reach(asks=True)
