"""``.prefetch``: what a step of a loop over K multiplies is brought during the step before (double buffering).

Each of A and B has two stages in shared memory. The copies of a step are started by cp.async, behind the barrier that says
that all have read the stage; the next step waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmkit.components import Component
from gemmkit.ptx.memory import repoint, shared
from gemmkit.ptx.special import barrier
from gemmkit.shapes import ALL
from gemmkit.specs.moves import wait
from gemmkit.specs.nodes import over
from gemmkit.specs.repeat import repeat
from gemmkit.specs.tensors import on


@dataclass(frozen=True)
class Brought(Component):
    """An operand's two stages, ``nbytes`` each from ``offset`` on, and how one is filled."""

    form: Any
    dtype: Any
    offset: int
    nbytes: int
    implementation: Any


@dataclass(frozen=True)
class LoopedAhead(Component):
    """``.split(k)`` with both moves ``.prefetch``; ``count`` 0 is known at run time."""

    k: int
    count: int
    is_unrolled: bool
    a: Brought
    b: Brought
    inner: Any

    def run(self, operands: tuple) -> None:
        bring(self, operands, 0)
        if self.is_unrolled:
            repeat(self.count, one_step, self, operands, self.count)
        elif self.count > 0:
            for i in range(self.count):
                one_step(i, self, operands, self.count)
        else:
            count = over(operands[0].storage.shape[1], self.k)
            for i in range(count):
                one_step(i, self, operands, count)
        barrier()                                             # who comes after may use the memory


def one_step(i: int, node: LoopedAhead, operands: tuple, count: int) -> None:
    wait()                                                    # this thread's part of the step is there
    barrier()                                                 # all of it is, and the other stage has been read
    if i + 1 < count:
        bring(node, operands, i + 1)
    node.inner.run((on(stage(node.a, i), node.a.form), on(stage(node.b, i), node.b.form), operands[2]))


def bring(node: LoopedAhead, operands: tuple, i: int) -> None:
    """Start the copies of step ``i``."""
    a, b = operands[0].part(ALL, node.k, 0, i, "base"), operands[1].part(node.k, ALL, i, 0, "base")
    node.a.implementation.run((a, on(stage(node.a, i), node.a.form)))
    node.b.implementation.run((b, on(stage(node.b, i), node.b.form)))


def stage(brought: Brought, i: int) -> Any:
    """Where step ``i`` lies."""
    return repoint(shared(brought.dtype, brought.offset), brought.dtype, (i & 1) * brought.nbytes)
