"""``.prefetch``: what a step of a loop over K multiplies is brought during the step before (double buffering).

Each of A and B has two stages in shared memory. A step begins with a barrier: its stage is full, and the other one has been
read. Then the next step's elements are asked for: by cp.async (`Copied`), which is waited for before the next barrier, or by
loads to each thread's registers (`Held`), which are stored behind the step's products.
"""

from __future__ import annotations

from typing import Any

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.memory import repoint, shared
from gemmkit.ptx.special import barrier
from gemmkit.shapes import ALL, local
from gemmkit.specs.forms import RF, Form
from gemmkit.specs.moves import wait
from gemmkit.specs.nodes import over
from gemmkit.specs.repeat import repeat
from gemmkit.specs.tensors import allocate, on


@dataclass(frozen=True)
class Brought(Component):
    """An operand's two stages, ``nbytes`` each from ``offset`` on."""

    form: Any
    dtype: Any
    offset: int
    nbytes: int

    def stage(self, i: int) -> Any:
        """Where step ``i`` lies."""
        return repoint(shared(self.dtype, self.offset), self.dtype, (i & 1) * self.nbytes)


@dataclass(frozen=True)
class Copied(Brought):
    """By cp.async: ``implementation`` starts the copies of a thread."""

    implementation: Any

    is_copied = True

    def begin(self, i: int, source: Any, held: Any) -> None:
        self.implementation.run((source, on(self.stage(i), self.form)))

    def end(self, i: int, held: Any) -> None:
        pass

    @property
    def registers(self) -> Any:
        """Of which nothing is used."""
        return Form((local(1, 1),), RF, self.dtype)


@dataclass(frozen=True)
class Held(Brought):
    """By registers: ``load`` fills them, ``store`` empties them. Of ``allocated`` each thread has its own; all together they
    are ``seen``."""

    allocated: Any
    seen: Any
    load: Any
    store: Any

    is_copied = False

    def begin(self, i: int, source: Any, held: Any) -> None:
        self.load.run((source, held.seen_as(self.seen)))

    def end(self, i: int, held: Any) -> None:
        self.store.run((held.seen_as(self.seen), on(self.stage(i), self.form)))

    @property
    def registers(self) -> Any:
        return self.allocated


@dataclass(frozen=True)
class LoopedAhead(Component):
    """``.split(k)`` with both moves ``.prefetch``; ``count`` 0 is known at run time."""

    k: int
    count: int
    is_unrolled: bool
    a: Any
    b: Any
    inner: Any

    def run(self, operands: tuple) -> None:
        a_held, b_held = allocate(self.a.registers), allocate(self.b.registers)
        begin(self, operands, 0, a_held, b_held)
        end(self, 0, a_held, b_held)
        if self.is_unrolled:
            repeat(self.count, one_step, self, operands, self.count, a_held, b_held)
        elif self.count > 0:
            for i in range(self.count):
                one_step(i, self, operands, self.count, a_held, b_held)
        else:
            count = over(operands[0].storage.shape[1], self.k)
            for i in range(count):
                one_step(i, self, operands, count, a_held, b_held)
        barrier()                                             # who comes after may use the memory

    @property
    def has_copies(self) -> bool:
        return self.a.is_copied or self.b.is_copied


def one_step(i: int, node: LoopedAhead, operands: tuple, count: int, a_held: Any, b_held: Any) -> None:
    # 1. The step is there: this thread's copies, then all threads'; and the other stage has been read.
    if node.has_copies:
        wait()
    barrier()
    # 2. The next one is asked for.
    if i + 1 < count:
        begin(node, operands, i + 1, a_held, b_held)
    # 3. Products.
    node.inner.run((on(node.a.stage(i), node.a.form), on(node.b.stage(i), node.b.form), operands[2]))
    # 4. What has come to registers goes to the other stage.
    if i + 1 < count:
        end(node, i + 1, a_held, b_held)


def begin(node: LoopedAhead, operands: tuple, i: int, a_held: Any, b_held: Any) -> None:
    """Ask for step ``i``."""
    node.a.begin(i, operands[0].part(ALL, node.k, 0, i, "base"), a_held)
    node.b.begin(i, operands[1].part(node.k, ALL, i, 0, "base"), b_held)


def end(node: LoopedAhead, i: int, a_held: Any, b_held: Any) -> None:
    """What of step ``i`` is in registers goes to its stage."""
    node.a.end(i, a_held)
    node.b.end(i, b_held)
