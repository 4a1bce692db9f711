"""What the ranks of a group push into each other's memory: two slots, used in turn, and flags behind the data.

Call number e (the *epoch*) uses slot e % 2 on every rank. ``arrived[slot, i, r]`` = e, written by rank r's push stream
behind its copy, means that chunk i of rank r's part of call e lies in the slot.

No barrier stands between calls, since each waits for a part from every rank. Rank r pushes call e behind its kernel of call
e - 1, on the same stream; that kernel has waited for what rank p pushed in call e - 1; and that stood behind p's kernel of
call e - 2, the last to read the slot in p's memory that call e goes to. So two slots are enough, and one is not.

Copies are the copy engines', and flags are stream commands: neither needs a multiprocessor, which a persistent kernel that
waits for them would not give away.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmkit.distributed.peers import Peers
from gemmkit.distributed.ranks import Ranks
from gemmkit.runtime.stream_values import wait_value, write_value

__all__ = ["CHUNKS", "SLOTS", "Inbox", "size_class"]

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
    """The slots of ``slot_bytes`` bytes and the flags of all ranks, in memory of `total` bytes each."""

    def __init__(self, ranks: Ranks, peers: Peers, slot_bytes: int):
        self.ranks, self.peers, self.slot_bytes = ranks, peers, slot_bytes
        self.device = peers.buffers[0].device
        self.epoch = 0
        self.stream = torch.cuda.Stream(self.device, priority=-1)           # of the pushes
        self._pushed: list[Any] = [None] * SLOTS                            # events: this rank's pushes from a slot are done
        self._ended: Any = None                                             # event: the last call's kernel
        self._flags = [buffer.data_ptr() for buffer in peers.buffers]
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
    def arrived(self) -> Any:
        """This call's flags of this rank, uint32: those of the ranks' first chunks, then of their second ones, ..."""
        return self._arrived[self.epoch % SLOTS]

    def slot(self, rank: int) -> Any:
        """This call's slot of a rank, as bytes."""
        first = self.flag_bytes(self.ranks.size) + self.epoch % SLOTS * self.slot_bytes
        return self.peers.buffers[rank][first:first + self.slot_bytes]

    def parts(self, rows: int, columns: int, dtype: Any) -> Any:
        """This rank's slot as a matrix from each rank, (ranks, rows, columns)."""
        nbytes = self.ranks.size * rows * columns * dtype.itemsize
        return self.slot(self.ranks.rank)[:nbytes].view(dtype).view(self.ranks.size, rows, columns)

    # -- a call, in this order ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The next call begins on the current stream, behind the one before and behind what was pushed from its slot."""
        self.epoch += 1
        current = torch.cuda.current_stream(self.device)
        for event in (self._ended, self._pushed[self.epoch % SLOTS]):
            if event is not None:
                current.wait_event(event)

    def push(self, to: int, source: Any, first_byte: int, chunk: int = 0) -> None:
        """Copy a dense tensor that the current stream has made into rank ``to``'s slot, and set this rank's flag there."""
        rank, main = self.ranks.rank, torch.cuda.current_stream(self.device)
        self.stream.wait_stream(main)
        handle = self.stream.cuda_stream
        if source.numel():
            nbytes = source.numel() * source.element_size()
            target = self.slot(to)[first_byte:first_byte + nbytes]
            with torch.cuda.stream(self.stream):
                target.copy_(source.view(-1).view(torch.uint8), non_blocking=True)
        write_value(handle, self._flag(to, self._row(chunk), rank), self.epoch)

    def pushed(self) -> None:
        """All pushes of the call have been asked for."""
        self._pushed[self.epoch % SLOTS] = self.stream.record_event()

    def own(self, chunks: int = 1) -> None:
        """This rank's own part, of so many chunks, lies in its slot, once the current stream has come here."""
        rank = self.ranks.rank
        for chunk in range(chunks):
            write_value(self._current(), self._flag(rank, self._row(chunk), rank), self.epoch)

    def await_all(self, chunks: int = 1) -> None:
        """Have the current stream wait for all ranks' parts: what a kernel without a gate needs."""
        for rank in range(self.ranks.size):
            for chunk in range(chunks):
                wait_value(self._current(), self._flag(self.ranks.rank, self._row(chunk), rank), self.epoch)

    def end(self) -> None:
        """The current stream has waited for every rank's part, and read the slot."""
        self._ended = torch.cuda.current_stream(self.device).record_event()

    def _current(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _row(self, chunk: int) -> int:
        return self.epoch % SLOTS * CHUNKS + chunk

    def _flag(self, of: int, row: int, column: int) -> int:
        """The address of a flag in rank ``of``'s memory: a row for each slot and chunk."""
        return int(self._flags[of] + _FLAG * (row * self.ranks.size + column))
