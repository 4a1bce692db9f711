"""Conflicts of shared memory's banks, counted from the addresses of a recorded launch of `multistage` or `warp_specialised`.

Shared memory has 32 banks of 4 bytes and serves 128 bytes of a warp at a time: accesses of 4 bytes all lanes together, of 8
bytes half a warp, of 16 bytes (and each matrix of ``ldmatrix``) eight lanes. Lanes that read one word share it. What falls
on a bank twice takes another pass. The tensor cores' reads (wgmma) are counted by core matrices: 8 lines of 16 bytes each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from gemmkit.emulator.memory import BANKS, WORD
from gemmkit.emulator.recording import Event

WARP, SERVED = 32, 128


class Lane(NamedTuple):
    """What a lane addresses."""

    lane: int
    address: int
    nbytes: int


class Row(NamedTuple):
    """An operand's accesses of one ``kind`` (read, write, copy: a warp's; wgmma: a core matrix): how many, and how many
    passes too many they take: ``extra`` in the kernel's shared layout, ``without`` in the plain layout."""

    operand: str
    kind: str
    accesses: int
    extra: int
    without: int


def extra_passes(lanes: Iterable[Lane]) -> int:
    """How many passes more than needed one access of a warp takes.

    >>> extra_passes(Lane(n, 16 * n, 16) for n in range(32)), extra_passes(Lane(n, 128 * n, 4) for n in range(32))
    (0, 31)
    """
    given = list(lanes)
    together = WARP if max(one.nbytes for one in given) <= WORD else SERVED // max(one.nbytes for one in given)
    passes = 0
    for first in range(0, WARP, together):
        words: dict[int, set[int]] = defaultdict(set)
        for lane, at, width in given:
            if first <= lane < first + together:
                for word in range(at // WORD, -(-(at + width) // WORD)):
                    words[word % BANKS].add(word)
        passes += max((len(rows) for rows in words.values()), default=1) - 1
    return passes


def count(events: list[Event], spec: Any) -> list[Row]:
    """The accesses of A's and B's stages, in the order A, B. (TMA writes whole lines, and is left out.)"""
    groups: dict[Any, list[Lane]] = defaultdict(list)
    numbers: dict[Any, int] = defaultdict(int)
    for number, event in enumerate(events):
        name = _operand(event, spec)
        if name and event.kind == "operand":
            for n, matrix in enumerate(core_matrices(event.place)):
                lanes = [Lane(lane, int(address), event.size) for lane, address in enumerate(matrix)]
                groups[event.block, 0, "wgmma", number, name, n] = lanes
        elif name:
            key = event.block, event.thread // WARP, event.kind, event.site, name
            numbers[key, event.thread] += 1
            groups[(*key, numbers[key, event.thread])].append(Lane(event.thread % WARP, int(event.place), event.size))
    tables = {name: _without(getattr(spec, name)) for name in "ab"}
    found: dict[tuple[str, str], list[int]] = {}
    for (_, _, kind, _, name, _), lanes in groups.items():
        row = found.setdefault((name, kind), [0, 0, 0])
        row[0] += 1
        row[1] += extra_passes(lanes)
        row[2] += extra_passes(Lane(one.lane, _moved(one.address, getattr(spec, name), tables[name], spec), one.nbytes)
                               for one in lanes)
    return [Row(name.upper(), kind, *numbers) for (name, kind), numbers in sorted(found.items())]


def core_matrices(addresses: np.ndarray) -> np.ndarray:
    """The addresses of an operand of wgmma (`Descriptor.addresses`), by core matrices: [n, line]."""
    if addresses.shape[1] == 2:                        # K-major: [line, chunk]
        return addresses.reshape(-1, 8, 2).transpose(0, 2, 1).reshape(-1, 8)
    return addresses.reshape(-1, 8)                    # MN-major: [chunk, k]


def _operand(event: Event, spec: Any) -> str:
    """Whose stage an event is in: "a", "b", or "" where it is neither's."""
    if event.kind not in ("read", "copy", "write", "operand") or "run" not in event.way:
        return ""
    address = int(np.min(event.place))
    if "warp_specialised" in event.way and address >= spec.stages * spec.stage_bytes:      # D's, behind the ring
        return ""
    at = address % spec.stage_bytes
    return next((name for name in "ab" if 0 <= at - getattr(spec, name).offset < getattr(spec, name).nbytes), "")


def _without(operand: Any) -> dict[int, int]:
    """From where an element lies in a tile to where it would lie in the plain layout, in elements."""
    layout, plain, size = operand.shared, getattr(operand.shared, "layout", operand.shared), operand.tile.size
    rows, columns = (part.ravel() for part in np.indices(operand.tile.extents))
    places = layout.position((rows, columns), layout.leading(size)), plain.position((rows, columns), plain.leading(size))
    return dict(zip(*(np.asarray(place).tolist() for place in places)))


def _moved(address: int, operand: Any, table: dict[int, int], spec: Any) -> int:
    stage, at = divmod(address, spec.stage_bytes)
    element, rest = divmod(at - operand.offset, operand.shared.dtype.itemsize)
    return int(stage * spec.stage_bytes + operand.offset + table[element] * operand.shared.dtype.itemsize + rest)
