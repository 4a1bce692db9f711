"""What the ranks of a group put into each other's memory: two slots, used in turn, and flags behind the data.

Call number e (the *epoch*) uses slot e % 2 on every rank. ``arrived[slot, i, r]`` = e, which rank r writes behind its data,
means that chunk i of rank r's part of call e lies in the slot. The data are copied on a stream of the inbox's own
(`Inbox.push`), or a kernel of the call's stream has stored them there itself (`Inbox.stored`).

No barrier stands between calls, since each waits for a part from every rank. What rank r sends in call e stands behind its
kernel of call e - 1 (`Inbox.made`); that kernel has waited for what rank p sent in call e - 1; and that stood behind p's
kernel of call e - 2, the last to read the slot in p's memory that call e goes to. So two slots are enough, and one is not.

Copies are the copy engines', and flags are stream commands: neither needs a multiprocessor, which a persistent kernel that
waits for them would not give away.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmkit.distributed.peers import Peers
from gemmkit.distributed.ranks import Ranks
from gemmkit.runtime.stream_commands import copy, new_event, record, wait_event, wait_value, write_value
from gemmkit.runtime.streams import stream_finder

_FLAG = 4
_ALIGNED = 1024                        # bytes: where slots begin
CHUNKS = 4                             # of a rank's part, at most
SLOTS = 2


def size_class(nbytes: int) -> int:
    """Slots are powers of two, from 1 MiB on, so that calls of many sizes share few inboxes.

    >>> size_class(3) == 1 << 20, size_class((1 << 20) + 1) == 1 << 21
    (True, True)
    """
    return max(1 << 20, 1 << (nbytes - 1).bit_length()) if nbytes > 0 else 1 << 20


class Inbox:
    """The slots of ``slot_bytes`` bytes and the flags of all ranks, in memory of `total` bytes each.

    A call is `begin`, then what is sent, products of what has arrived, and `end`. Its commands go to the stream that is
    current when it begins, and to the inbox's own, which pushes.
    """

    def __init__(self, ranks: Ranks, peers: Peers, slot_bytes: int):
        self.ranks, self.peers, self.slot_bytes = ranks, peers, slot_bytes
        self.device = peers.buffers[0].device
        self.epoch = 0
        self.stream = torch.cuda.Stream(self.device, priority=-1)           # kept, since the commands have its handle alone
        self._pushes = int(self.stream.cuda_stream)
        self._find_stream: Any = stream_finder("torch", self.device.index)
        self.main, self._last = 0, -1                                       # streams: of this call, and of the last one
        self._made, self._sent, self._ended = new_event(), new_event(), new_event()
        self._is_pushing = False
        self._memory = [int(buffer.data_ptr()) for buffer in peers.buffers]
        count = _FLAG * CHUNKS * ranks.size
        self._arrived = [peers.buffers[ranks.rank][slot * count:(slot + 1) * count].view(torch.uint32)
                         for slot in range(SLOTS)]

    @staticmethod
    def flag_bytes(ranks: int) -> int:
        return -(-SLOTS * CHUNKS * ranks * _FLAG // _ALIGNED) * _ALIGNED

    @classmethod
    def total(cls, ranks: int, slot_bytes: int) -> int:
        return cls.flag_bytes(ranks) + SLOTS * slot_bytes

    @property
    def turn(self) -> int:
        """Which slot is this call's."""
        return self.epoch % SLOTS

    @property
    def arrived(self) -> Any:
        """This call's flags of this rank, uint32: those of the ranks' first chunks, then of their second ones, ..."""
        return self._arrived[self.turn]

    def slot(self, of: int | None = None) -> Any:
        """This call's slot of this rank, or of another, as bytes."""
        first = self._slot_begin()
        return self.peers.buffers[self.ranks.rank if of is None else of][first:first + self.slot_bytes]

    def matrix(self, rows: int, columns: int, dtype: Any) -> Any:
        """This rank's slot as a matrix."""
        return self.slot()[:rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    def parts(self, rows: int, columns: int, dtype: Any) -> Any:
        """This rank's slot as a matrix from each rank, (ranks, rows, columns)."""
        return self.matrix(self.ranks.size * rows, columns, dtype).view(self.ranks.size, rows, columns)

    def part_of(self, to: int, rows: int, columns: int, dtype: Any) -> Any:
        """This rank's matrix among those in rank ``to``'s slot, which a kernel of this rank's may write."""
        nbytes = rows * columns * dtype.itemsize
        return self.slot(to)[self.ranks.rank * nbytes:(self.ranks.rank + 1) * nbytes].view(dtype).view(rows, columns)

    # -- a call, in this order ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The next call begins on the current stream, behind the one before."""
        self.epoch += 1
        self.main = self._find_stream()
        if self._last not in (-1, self.main):
            wait_event(self.main, self._ended)

    def made(self) -> None:
        """What is pushed from here on is there when the current stream has come here."""
        record(self._made, self.main)
        wait_event(self._pushes, self._made)
        self._is_pushing = True

    def push(self, to: int, source: int, nbytes: int, first_byte: int, chunk: int = 0) -> None:
        """Copy bytes from an address to rank ``to``'s slot, and set this rank's flag there."""
        if nbytes:
            copy(self._pushes, self._memory[to] + self._slot_begin() + first_byte, source, nbytes)
        write_value(self._pushes, self._flag(to, self._row(chunk), self.ranks.rank), self.epoch)

    def stored(self, to: int, chunk: int = 0) -> None:
        """Set this rank's flag in rank ``to``'s memory, where a kernel has stored this rank's part (`part_of`), once the
        current stream has come here. (The command is ordered behind the kernel's stores, at system scope.)"""
        write_value(self.main, self._flag(to, self._row(chunk), self.ranks.rank), self.epoch)

    def own(self, chunks: int = 1) -> None:
        """This rank's own part, of so many chunks, is there, once the current stream has come here."""
        for chunk in range(chunks):
            self.stored(self.ranks.rank, chunk)

    def await_all(self, chunks: int = 1) -> None:
        """Have the current stream wait for all ranks' parts: what a kernel without a gate needs."""
        for rank in range(self.ranks.size):
            for chunk in range(chunks):
                wait_value(self.main, self._flag(self.ranks.rank, self._row(chunk), rank), self.epoch)

    def end(self) -> None:
        """The current stream has waited for every rank's part, and read the slot. It waits for the pushes, so that what was
        pushed may be written over behind the call."""
        if self._is_pushing:
            record(self._sent, self._pushes)
            wait_event(self.main, self._sent)
            self._is_pushing = False
        record(self._ended, self.main)
        self._last = self.main

    def _slot_begin(self) -> int:
        return self.flag_bytes(self.ranks.size) + self.turn * self.slot_bytes

    def _row(self, chunk: int) -> int:
        return self.turn * CHUNKS + chunk

    def _flag(self, of: int, row: int, column: int) -> int:
        """The address of a flag in rank ``of``'s memory: a row for each slot and chunk."""
        return self._memory[of] + _FLAG * (row * self.ranks.size + column)
