"""Allocators of what a block has once: bytes of shared memory, and named barriers."""

from __future__ import annotations

ALIGNMENT = 128                        # bytes: where the next operand may start in the singlestage kernel's shared memory
NAMED = 16                             # barriers of a block; 0 is that of `barrier()`


class SharedMemory:
    """Regions of a block's shared memory, one behind the other.

    >>> memory = SharedMemory()
    >>> memory.take(20), memory.take(8, alignment=16), memory.nbytes
    (0, 32, 40)
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int, alignment: int = 8) -> int:
        """The first byte of a new region."""
        first = -(-self.nbytes // alignment) * alignment
        self.nbytes = first + nbytes
        return first


class NamedBarriers:
    """Numbers of named barriers.

    >>> barriers = NamedBarriers()
    >>> barriers.take(3), barriers.take(2)
    (1, 4)
    """

    def __init__(self) -> None:
        self.next = 1

    def take(self, count: int) -> int:
        """The first of ``count`` barriers; raises ValueError where a block has not as many."""
        first, self.next = self.next, self.next + count
        if self.next > NAMED:
            raise ValueError(f"{self.next - 1} named barriers are asked for, and a block has {NAMED - 1}")
        return first
