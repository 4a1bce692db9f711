"""A launch without the objects that made it: a cubin, numbers, and which of them are addresses in which memory.

The process that measures gets nothing else. It has none of the caller's code or arrays: what a candidate does wrong, it
does there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.lang.members import PLACES
from gemmkit.problem import held_by
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, byte_range, whole

ALIGNMENT = 256                        # bytes: an address in the measuring process is the caller's modulo this


@dataclass(frozen=True)
class Buffer:
    """Memory of an array, or of several that overlap: ``nbytes`` from ``start`` on, which kernels read, write, or both."""

    start: int
    nbytes: int
    is_read: bool
    is_written: bool

    @property
    def shift(self) -> int:
        """Bytes that lie before it in a piece of memory whose address is a multiple of `ALIGNMENT`."""
        return self.start % ALIGNMENT


@dataclass(frozen=True)
class Pointer:
    """The address of a byte of a buffer."""

    buffer: int
    offset: int


class Memory:
    """The buffers of a product's arrays: operands, the result, and the arrays of components."""

    def __init__(self, read: Sequence[ArrayInfo], written: Sequence[ArrayInfo]):
        spans = [(*byte_range(whole(info)), info in read, info in written) for info in {*read, *written}]
        merged: list[list[Any]] = []
        for first, last, is_read, is_written in sorted(spans):
            if merged and first < merged[-1][1]:
                merged[-1][1:] = max(last, merged[-1][1]), merged[-1][2] or is_read, merged[-1][3] or is_written
            else:
                merged.append([first, last, is_read, is_written])
        self.buffers = [Buffer(first, last - first, is_read, is_written) for first, last, is_read, is_written in merged]

    def pointer(self, address: int) -> Pointer:
        """Where an address lies. Raises KeyError for one in none of the buffers."""
        for number, buffer in enumerate(self.buffers):
            if buffer.start <= address < buffer.start + max(1, buffer.nbytes):
                return Pointer(number, address - buffer.start)
        raise KeyError(address)


@dataclass(frozen=True)
class Table:
    """Bytes in device memory, whose address goes to ``slots``; at the offsets ``addresses`` stand those of arrays."""

    slots: tuple[int, ...]
    content: bytes
    addresses: tuple[tuple[int, Pointer], ...] = ()


@dataclass(frozen=True)
class Job:
    """A kernel's launch.

    ``values`` are its parameters, in the formats of `gemmkit.runtime.launch_config.PARAMETER_FORMATS`; at the slots of
    ``pointers`` go addresses, at those of ``maps`` the tensor maps that an encoder's arguments make of an address, at those
    of ``spaces`` workspaces, of ``tables`` these. ``varied`` are the buffers of which a timed launch takes the next copy.

    ``then`` are kernels that are launched behind it, in this order. One leaves numbers for the next in ``spare_bytes`` of
    memory: at the slots of ``spares`` go addresses, so many bytes behind where it begins.
    """

    cubin: bytes
    blocks: int
    threads: int
    shared_bytes: int
    formats: tuple[str, ...]
    values: tuple[Any, ...]
    cluster: int
    dependent: bool
    waits: bool
    pointers: tuple[tuple[int, Pointer], ...]
    maps: tuple[tuple[int, Pointer, tuple[Any, ...]], ...]
    spaces: tuple[tuple[int, str, int], ...]
    varied: tuple[int, ...]
    tables: tuple[Table, ...] = ()
    spares: tuple[tuple[int, int], ...] = ()
    spare_bytes: int = 0
    then: tuple[Job, ...] = ()


def memory_of(compiled: Any) -> Memory:
    """The buffers of a product (`gemmkit.compiled.Compiled`). An array that a component writes may be read, too."""
    problem = compiled.problem
    held = [x for _, x in held_by(problem.config)]
    read = [info for info in (problem.a, problem.b, problem.c) if info is not None]
    return Memory([*read, *(x.info for x in held)], [*(x.info for x in held if x.is_output), compiled.out])


def job_of(compiled: Any, memory: Memory, cubin: bytes) -> Job:
    """The launch of a product whose arrays lie in ``memory``."""
    kernel, problem = compiled.launchable, compiled.problem
    infos = compiled.out, problem.a, problem.b, problem.c              # as `OPERANDS` are
    at = [None if info is None else memory.pointer(info.pointer) for info in infos]
    pointers, maps = _of_components(compiled, memory), list[tuple[int, Pointer, tuple[Any, ...]]]()
    for slot, which, _, encoder in compiled.puts:
        pointer = at[which]
        assert pointer is not None
        if encoder is None:
            pointers[slot] = pointer
        else:
            maps.append((slot, pointer, encoder.arguments))
    maps += [(one.slot, pointers[one.which], one.encoder.arguments) for one in compiled.held_maps]
    values = list(kernel.values)
    for slot, _, _ in maps:
        values[slot] = bytes(128)
    varied = tuple(dict.fromkeys(pointer.buffer for pointer in at if pointer is not None))
    spaces = tuple((space.slot, space.role, space.nbytes) for space in compiled.spaces)
    return Job(cubin, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(kernel.formats), tuple(values),
               kernel.cluster, kernel.dependent, kernel.waits, tuple(pointers.items()), tuple(maps), spaces, varied)


def contents_of(memory: Memory, ordinal: int) -> list[bytes]:
    """The bytes of each buffer that kernels read, from the device."""
    from cuda.bindings import driver

    found = []
    with device.made_current(ordinal):
        device.ensure_context(ordinal)
        (status,) = driver.cuCtxSynchronize()
        for buffer in memory.buffers:
            held = np.empty(buffer.nbytes if buffer.is_read else 0, np.uint8)
            if held.nbytes and int(status) == 0:
                (status,) = driver.cuMemcpyDtoH(held.ctypes.data, buffer.start, held.nbytes)
            if int(status) != 0:
                raise RuntimeError(f"the CUDA driver answered {status.name} to a copy of the arrays")
            found.append(held.tobytes())
    return found


def group_memory_of(group: Any) -> Memory:
    """The buffers of a group's arrays (`gemmkit.groups.CompiledGroup`)."""
    held = [x for _, x in held_by(group.problem.config)]
    read = [info for of in group.infos for info in of[:3] if info is not None]
    return Memory([*read, *(x.info for x in held)], [*(x.info for x in held if x.is_output), *(of[3] for of in group.infos)])


def group_job_of(group: Any, memory: Memory, cubin: bytes) -> Job:
    """The launch of a group whose arrays lie in ``memory``. The table of addresses is made where it is launched."""
    kernel, made = group.launchable, group.tables
    places = made.places(group.infos)
    width = PLACES * places.itemsize
    addresses = tuple((row * places.shape[1] * places.itemsize + at * width, memory.pointer(info.pointer))
                      for row, of in enumerate(group.infos) for at, info in enumerate(of)
                      if info is not None and 0 not in info.shape)
    data = {"places": (places, addresses), "sizes": (made.sizes, ()), "products": (made.products, ())}
    tables = tuple(Table(tuple(space.slot for space in group.spaces if space.role == role), content.tobytes(), at)
                   for role, (content, at) in data.items())
    varied = tuple(dict.fromkeys(pointer.buffer for _, pointer in addresses))
    return Job(cubin, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(kernel.formats), tuple(kernel.values),
               kernel.cluster, kernel.dependent, kernel.waits, tuple(_of_components(group, memory).items()), (), (), varied,
               tables)


def _of_components(compiled: Any, memory: Memory) -> dict[int, Pointer]:
    """Where the addresses of components' arrays stand among a kernel's values."""
    arrays = [info for info in compiled.arguments[0].arrays if info.library != "workspace"]
    first = compiled.launchable.slot(0) or 0
    return {slot: memory.pointer(value) for slot, (code, value) in enumerate(compiled.arguments[0].leaves, first)
            if code == "u64" and any(value == info.pointer for info in arrays)}
