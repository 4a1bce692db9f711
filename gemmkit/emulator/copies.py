"""What TMA (boxes of a tensor) and the copies of threads (cp.async) move between global and shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.emulator.agents import AsyncUnit, Bytes
from gemmkit.emulator.barriers import Mbarrier, accumulate, fault, find
from gemmkit.emulator.errors import ProtocolError
from gemmkit.lang.host import Site, here
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.tensor_maps import TensorMapSpec, dimensions, why_not
from gemmkit.shapes import CHUNK, lines

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread
    from gemmkit.emulator.memory import Memory
    from gemmkit.lang.host import View


_SHARED_ALIGNMENT = 128


class EmulatedTensorMap:
    """A tensor map in the emulator.

    Args:
        memory: of the tensor; address: of its first element.
        dims, strides: elements, and bytes of all dimensions but the first; the fastest first.
        spec: a `gemmkit.runtime.tensor_maps.TensorMapSpec`.

    Raises:
        ValueError: what `gemmkit.runtime.tensor_maps.encode` would not take.
    """

    def __init__(self, memory: Memory, address: int, dims: Sequence[int], strides: Sequence[int], spec: Any) -> None:
        self.memory, self.address, self.spec = memory, address, spec
        self.dims, self.strides = tuple(map(int, dims)), tuple(map(int, strides))
        if len(self.dims) != spec.rank or len(self.strides) != spec.rank - 1:
            raise ValueError(f"dims={self.dims} and strides={self.strides} do not go with box={spec.box}")
        if address % CHUNK:
            raise ValueError(f"{memory.name} begins at {address:#x}; TMA takes multiples of {CHUNK}")
        if min(self.dims) < 1:
            raise ValueError(f"dims={self.dims}: TMA takes no empty tensor")
        for extent, step in zip(self.dims[1:], self.strides):
            if extent > 1 and (step <= 0 or step % CHUNK):
                raise ValueError(f"strides={self.strides}: TMA takes positive multiples of {CHUNK} bytes")

    @classmethod
    def of(cls, view: View, spec: TensorMapSpec, axis: int | None = None) -> EmulatedTensorMap:
        """The tensor map of a view; ``axis`` is the contiguous one (the view's own, if it has one).

        Raises ValueError where `gemmkit.runtime.tensor_maps.why_not` has an objection, or the elements differ in size.
        """
        size = view.dtype.itemsize
        strides = tuple(step // size for step in view.steps)
        along = view.unit if axis is None else axis
        info = ArrayInfo(view.address, view.shape, strides, view.dtype, -1, view.memory.readonly, "numpy")
        reason = "no axis is contiguous" if along is None else why_not(info, along)
        if along is None or reason is not None:
            raise ValueError(f"{view.memory.name} cannot be moved by TMA: {reason}")
        if size != spec.dtype.itemsize:
            raise ValueError(f"{view.memory.name} has elements of {view.dtype}, which does not go with {spec!r}")
        dims, steps = dimensions(view.shape, view.steps, along)
        return cls(view.memory, view.address, dims, steps, spec)

    def rows(self, coordinates: Sequence[int], offsets: Sequence[int] = ()) -> Iterator[tuple[int, int, int]]:
        """(address, first byte in the box, bytes) of each row of the box at `coordinates`, as far as the tensor reaches; in
        im2col mode of the box whose elements lie `offsets` from there."""
        size, box = self.spec.dtype.itemsize, self.spec.box
        first, *others = coordinates
        low, high = max(0, -first), min(box[0], self.dims[0] - first)
        if high <= low:
            return
        lines: Iterator[tuple[int, ...]] = product(*(range(c, c + extent) for c, extent in zip(reversed(others),
                                                                                              reversed(box[1:]))))
        if self.spec.window is not None:
            lines = self._walk(others, offsets)
        for number, line in enumerate(lines):
            at = line[::-1]
            if all(0 <= i < extent for i, extent in zip(at, self.dims[1:])):
                start = self.address + (first + low) * size + sum(i * step for i, step in zip(at, self.strides))
                yield start, (number * box[0] + low) * size, (high - low) * size

    def _walk(self, first: Sequence[int], offsets: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Where the elements of a box lie in im2col mode, the slowest dimension first."""
        window, at = self.spec.window, list(first)
        last = [extent - 1 + upper for extent, upper in zip(self.dims[1:], window.upper)]
        for _ in range(self.spec.box[1]):
            yield at[-1], *(i + offset for i, offset in zip(at[-2::-1], reversed(offsets)))
            for n, (lower, step) in enumerate(zip(window.lower, window.steps)):
                at[n] += step
                if at[n] <= last[n]:
                    break
                at[n] = lower
            else:
                at[-1] += 1

    def __repr__(self) -> str:
        return f"<tensor map of {self.memory.name!r}: {self.dims} in boxes of {self.spec.box}>"


@lru_cache
def _places(phase: int, chunks: int, swizzle: int) -> np.ndarray:
    """Where the n-th chunk of a box goes that begins `phase` bytes into the swizzle's pattern."""
    at = phase + CHUNK * np.arange(chunks)
    return np.asarray((lines(swizzle)(at) - phase) // CHUNK)


def places(tensor_map: EmulatedTensorMap, offset: int) -> np.ndarray:
    """Of each 16-byte chunk of a box, in order, which chunk of shared memory from `offset` on it is."""
    spec = tensor_map.spec
    return _places(offset % 1024 if spec.swizzle else 0, spec.box_bytes // CHUNK, spec.swizzle)


def load(thread: Thread, tensor_map: EmulatedTensorMap, coordinates: Sequence[int], offset: int, barrier: int,
         mask: int | None, offsets: Sequence[int] = ()) -> None:
    """A box to `offset` of shared memory of the thread's block, or of those of its cluster in `mask`; the bytes are given to
    the mbarrier at `barrier` of each. `offsets` are those of im2col mode."""
    coordinates = _checked(thread, tensor_map, coordinates)
    window = tensor_map.spec.window
    if len(offsets) != (0 if window is None else len(window.lower)):
        raise fault(thread, f"{len(offsets)} offsets are given for {tensor_map!r}; im2col mode takes one for each spatial "
                            "dimension, and no other mode any")
    if not all(0 <= int(n) < 2**16 // (256 if len(offsets) == 2 else 2048 if len(offsets) == 3 else 1) for n in offsets):
        raise fault(thread, f"a copy at the offsets {tuple(map(int, offsets))} of {tensor_map!r}: they have 16, 8 or 5 bits "
                            "each, with 1, 2 or 3 spatial dimensions")
    if mask is not None and mask <= 0:
        raise fault(thread, f"mask is {mask}; it names no block of the cluster")
    ranks = [None] if mask is None else [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    data: Bytes | None = None
    for rank in ranks:
        end = _end(thread, barrier, rank, "copy")
        unit = end.unit
        if data is None:
            data = _read_box(unit, tensor_map, coordinates, offset, tuple(map(int, offsets)))
        _put(thread, end, offset, data, _SHARED_ALIGNMENT)


def send(thread: Thread, offset: int, data: Bytes, barrier: int, rank: int) -> None:
    """Bytes to `offset` of the shared memory of block `rank` of the cluster; they are given to its mbarrier at `barrier`."""
    end = _end(thread, barrier, rank, "store")
    _put(thread, end, offset, data, len(data), is_sent=True)


def _put(thread: Thread, end: Mbarrier, offset: int, data: Bytes, alignment: int, is_sent: bool = False) -> None:
    copy = end.unit.copy(thread, is_sent)
    copy.write(end.block.shared, offset, data, alignment)
    end.touched[end.unit] = copy, copy.clock, here()
    end.complete(end.unit, len(data))


def _end(thread: Thread, barrier: int, rank: int | None, what: str) -> Mbarrier:
    """The mbarrier that is given the bytes, whose copies the thread starts."""
    end = find(thread, barrier, rank)
    if not end.fenced:
        raise fault(thread, f"a {what} is to end at {end}, and mbarrier_fence_init has not followed its mbarrier_init")
    end.unit.starts_for(thread)
    return end


def _read_box(unit: AsyncUnit, tensor_map: EmulatedTensorMap, coordinates: tuple[int, ...], offset: int,
              offsets: tuple[int, ...]) -> Bytes:
    spec = tensor_map.spec
    box = np.zeros(spec.box_bytes, np.uint8)
    for address, at, nbytes in tensor_map.rows(coordinates, offsets):
        box[at:at + nbytes] = unit.read(tensor_map.memory, address, nbytes, spec.dtype.itemsize)
    out = np.empty_like(box)
    out.reshape(-1, CHUNK)[places(tensor_map, offset)] = box.reshape(-1, CHUNK)
    return out


class Stores:
    """The stores that a thread has asked for, in groups: their time is the number of the group, from 1."""

    def __init__(self, thread: Thread) -> None:
        self._reader = AsyncUnit(thread.block, thread.pages)  # of shared memory
        self._writer = AsyncUnit(thread.block, thread.pages)  # of the tensor
        self._last = 0  # the group of the last store, and its place
        self._site: Site | None = None

    def store(self, thread: Thread, tensor_map: EmulatedTensorMap, coordinates: Sequence[int], offset: int,
              adds: bool = False) -> None:
        """A box from `offset` of shared memory; what is out of the tensor is left out. What `adds` is of float32."""
        coordinates = _checked(thread, tensor_map, coordinates)
        if min(coordinates) < 0:
            raise fault(thread, f"a store to {coordinates} of {tensor_map!r}: coordinates of a store must not be negative")
        if adds and tensor_map.spec.dtype != np.float32:
            raise fault(thread, f"tma_add to {tensor_map!r} of {tensor_map.spec.dtype}; it adds float32")
        row = tensor_map.dims[0] * tensor_map.spec.dtype.itemsize
        if row % CHUNK:
            raise fault(thread, f"a store to {tensor_map!r}, whose rows have {row} bytes: TMA would write up to the "
                                f"next multiple of {CHUNK}")
        reader, writer, shared = self._reader, self._writer, thread.block.shared
        reader.starts_for(thread)
        writer.starts_for(thread)
        self._last, self._site = reader.clock, here()
        spec, where = tensor_map.spec, places(tensor_map, offset)
        nbytes, size = spec.box_bytes, spec.dtype.itemsize
        reader._locate("read", shared, offset, nbytes, _SHARED_ALIGNMENT)
        rows = list(tensor_map.rows(coordinates))
        if sum(part for _, _, part in rows) == nbytes:
            data = reader.read(shared, offset, nbytes, _SHARED_ALIGNMENT)
            box = data.reshape(-1, CHUNK)[where].reshape(-1)
        else:
            box = np.empty(nbytes, np.uint8)
            for _, at, part in rows:
                for low in range(at // CHUNK * CHUNK, at + part, CHUNK):
                    first, last = max(low, at), min(low + CHUNK, at + part)
                    source = offset + CHUNK * int(where[low // CHUNK]) + first - low
                    box[first:last] = reader.read(shared, source, last - first, size)
        for address, at, part in rows:
            if adds:
                accumulate(tensor_map.memory, address, box[at:at + part].view(np.float32))
            else:
                writer.write(tensor_map.memory, address, box[at:at + part], size)

    def commit(self) -> None:
        """Closes a group."""
        self._reader.clock += 1
        self._writer.clock += 1

    def wait(self, thread: Thread, pending: int, done: bool) -> None:
        """All groups but the last `pending` have read shared memory, and with `done` written the tensor too."""
        if pending < 0:
            raise fault(thread, f"a wait for all groups of stores but {pending}; 0 or more may be pending")
        group = self._reader.clock - 1 - pending
        self._reader.awaited_by(thread, group)
        if done:
            self._writer.awaited_by(thread, group)

    def leave(self, thread: Thread) -> None:
        """The thread ends. Raises ProtocolError when a store may still read the shared memory that ends with the block."""
        if self._reader.known_to(thread) < self._last:
            raise ProtocolError("a thread has ended whose store may still read shared memory; it must call tma_commit and "
                                "tma_wait_read(0), or tma_wait(0), before", site=self._site, thread=thread.id)


def stores(thread: Thread) -> Stores:
    """Those of `thread`."""
    if thread.stores is None:
        thread.stores = thread.block.kinds.stores(thread)
    return thread.stores


def _checked(thread: Thread, tensor_map: Any, coordinates: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(tensor_map, EmulatedTensorMap):
        raise TypeError(f"map is {tensor_map!r}; in the emulator it is made by EmulatedTensorMap.of")
    if len(coordinates) != tensor_map.spec.rank:
        raise fault(thread, f"{len(coordinates)} coordinates are given for {tensor_map!r}")
    if int(coordinates[0]) * tensor_map.spec.dtype.itemsize % CHUNK:
        raise fault(thread, f"a copy at {tuple(map(int, coordinates))} of {tensor_map!r}: the first coordinate must be a "
                            f"multiple of {CHUNK} bytes")
    return tuple(map(int, coordinates))


# --------------------------------------------------------------------------------------------------
# Copies that threads start and do not wait for (``cp.async``).
#
# A copy may write from its start to the wait for its group, and its bytes are there after that wait alone. So in the
# emulator it counts as a write of the thread's at both times, and an access in between, by any thread, is a fault.

class PendingCopy(NamedTuple):
    """A copy on its way: to ``offset`` of shared memory."""

    offset: int
    data: Bytes


class PendingCopies:
    """A thread's copies: those since its last commit, and the groups before, the oldest first."""

    __slots__ = ("groups", "started")

    def __init__(self) -> None:
        self.started: list[PendingCopy] = []
        self.groups: list[list[PendingCopy]] = []


def start(thread: Thread, offset: int, memory: Memory, address: int | None, nbytes: int, there: int | None = None) -> None:
    """Starts a copy to `offset` of shared memory; zeros where there is no `address`, and behind the first bytes that are
    `there` (None: all are)."""
    if address is not None and there is None:
        data = thread.read(memory, address, nbytes)
    else:
        data = np.zeros(nbytes, np.uint8)
        if address is not None and there is not None:
            data[:there] = thread.read(memory, address, there, nbytes)
    shared = thread.block.shared
    thread.write(shared, offset, b"\xff" * nbytes)
    if shared.valid is None:
        shared.valid = bytearray(b"\x01") * shared.size
    shared.valid[offset:offset + nbytes] = bytes(nbytes)
    if thread.copies is None:
        thread.copies = PendingCopies()
    thread.copies.started.append(PendingCopy(offset, data))


def commit(thread: Thread) -> None:
    """The copies since the last commit are a group, which may be an empty one."""
    if thread.copies is None:
        thread.copies = PendingCopies()
    thread.copies.groups.append(thread.copies.started)
    thread.copies.started = []


def wait(thread: Thread, pending: int) -> None:
    """All groups but the newest `pending` are done."""
    if thread.copies is not None:
        groups = thread.copies.groups
        done = len(groups) - pending
        if done > 0:
            _finish(thread, [copy for group in groups[:done] for copy in group])
            thread.copies.groups = groups[done:]


def arrive(thread: Thread, barrier: Mbarrier) -> None:
    """The thread's arrival follows when its copies are done."""
    if thread.copies is not None:
        _finish(thread, [copy for group in (*thread.copies.groups, thread.copies.started) for copy in group])
        thread.copies = None
    barrier.arrive(thread)


def check_arrival(thread: Thread) -> None:
    """Raises ProtocolError where the thread would tell others of copies that may still be on their way. (For a group that it
    has committed it waits by itself.)"""
    if thread.copies is not None and thread.copies.started:
        raise fault(thread, "a thread arrives while copies that it has started are on their way; call copies_arrive")


def _finish(thread: Thread, copies: list[PendingCopy]) -> None:
    shared = thread.block.shared
    assert shared.valid is not None or not copies
    for offset, data in copies:
        shared.valid[offset:offset + len(data)] = b"\x01" * len(data)         # type: ignore[index]
        thread.write(shared, offset, data)
