"""Tiles of rows and columns where rows are packed, as tokens are that are sorted by the expert that takes them, and where an
array names rows of operands and results.

| packed | tiles | rounds |
|---|---|---|
| a tile's rows, ``d[m, n]`` of ``x[m, k] @ w[i, k, n]`` | of each piece as many as it has rows for | of all tiles alike |
| rounds' rows, ``d[i, m, n]`` of ``x[k, m].T @ y[k, n]`` | of each piece as many as a matrix needs | a piece's |

Offsets are read on the GPU. Tiles of packed rows are counted piece by piece, so that no block has a tile without rows: a
block goes on from the piece of its last tile, and looks for the next one while the first product of a tile runs. A warpgroup
of whose 64 rows none is there multiplies nothing.

TMA brings blocks of the joined array, with rows of the next piece where one ends. A tile's rows that are another piece's are
not stored. Rounds would add them up: threads put zeros over them in both operands, because 0 times infinity is NaN.

Rows that an array names, ``x[index[m], k]``, lie anywhere, and Hopper's TMA has no copies of single rows: all threads of the
producer copy them (cp.async, 16 bytes at a time) into the lines that TMA would fill, and the hardware arrives for each
thread when its copies have come. They write as threads do, so that consumers fence before they multiply. A thread has the
same lines in each round, and looks up once a tile which rows they are; where rounds go along them, a round ahead. A number
of no row brings zeros, and stores nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.kernels.collectives.pipeline import Pipeline
from gemmkit.kernels.collectives.scheduler import Slot
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.aggregates import convert_all, fill
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import View
from gemmkit.lang.registers import each, generate, split
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.schedule import ScheduleChoice
from gemmkit.programs.collectives import (
    MEETING,
    ROWS,
    ROWS_OF,
    DirectOut,
    OctetOut,
    StagedTile,
    TmaOut,
    WarpgroupPart,
    begin_of,
    blocks,
    put_at,
    put_octet,
)
from gemmkit.programs.launches import NotByTma
from gemmkit.programs.mapping import MULTISTAGE, KernelLimits
from gemmkit.programs.places import FLOATS_8, Await, Event, Places, Ring, TilePlace
from gemmkit.programs.sums import TURNS, number
from gemmkit.programs.text import IMPORTS, REGISTERS, ElementFunction, Printer, count_of, of_blocks, parts_of_stacks
from gemmkit.programs.trace import Loop
from gemmkit.programs.values import Index, refused, shown
from gemmkit.ptx.copy_async import copies_arrive, copy_async, copy_async_clipped, offset_of
from gemmkit.ptx.memory import shared, store_shared
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.wgmma import fence_async, named_barrier
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.launch import described

OCTET = 8                              # elements of 16 bits that a thread puts down at once


def tiles_of(offsets: View, piece: int, pieces: int, rows: int, size: int, columns: int) -> int:
    """Of a piece, whose blocks of ``size`` rows have so many ``columns`` each; none behind the last piece."""
    if piece >= pieces:
        return piece * 0
    return blocks(max(begin_of(offsets, piece + 1, rows) - begin_of(offsets, piece, rows), 0), size) * columns


def piece_of_tile(offsets: View, piece: int, before: int, pieces: int, tile: int, rows: int, size: int,
                  columns: int) -> tuple[int, int]:
    """The piece that a tile is of, and how many tiles are in front of that piece: ``piece``, which has ``before``, or one
    behind. The number of pieces where there are not so many tiles."""
    own = tiles_of(offsets, piece, pieces, rows, size, columns)
    while piece < pieces and before + own <= tile:
        before, piece = before + own, piece + 1
        own = tiles_of(offsets, piece, pieces, rows, size, columns)
    return piece, before


def end_piece(tiles: tuple, slot: Slot, first: int, group: int, consumers: int) -> None:
    """Zeros over the lines of a stage's blocks from the ``first`` on, by all threads of the consumers, before any of them
    multiplies the stage."""
    each(put_zeros, tiles, slot.stage, first, number(group), 128 * consumers)
    fence_async()
    named_barrier(MEETING, 128 * consumers)


def put_zeros(tile: StagedTile, n: int, stage: int, first: int, thread: int, threads: int) -> None:
    """A swizzle moves elements within their line."""
    octets = tile.line // OCTET
    count = (tile.held - first) * octets
    at = stage * (tile.stage_bytes // 2) + first * tile.line
    for panel in range(tile.panels):
        octet = thread
        while octet < count:
            store_shared(shared(tile.dtype, tile.offset), at + octet * OCTET, panel * tile.held * tile.line,
                         fill(tile.dtype, OCTET, 0))
            octet += threads


# --------------------------------------------------------------------------------------------------
# Rows that an array names.

PRODUCERS = 128                        # threads


def named_row(n: int, rows: int, index: View, first: int, step: int, end: int) -> int:
    """The one of so many ``rows`` that stands in ``index`` at ``first + n * step``; -1 where it is none of them, and from
    the ``end`` on."""
    at = first + n * step
    row = int(index[at]) if at < end else -1
    return row if row < rows else -1


@dataclass(frozen=True)
class NamedTile(StagedTile):
    """Lines that are rows of an array, those that another one names. ``clipped``: rows end within 16 bytes."""

    clipped: bool = False

    @cached_property
    def octets(self) -> int:
        """Of a line."""
        return self.line // OCTET

    @cached_property
    def at_once(self) -> int:
        """Lines that the producer's threads copy at a time: whole patterns of the swizzle."""
        return PRODUCERS // self.octets

    def find(self, x: View, index: View, first: int, end: int) -> tuple:
        """The rows that are this thread's lines, of those that ``index`` names from ``first`` on, up to its ``end``."""
        return generate(self.held // self.at_once, named_row, x.shape[0], index, first + udiv(thread_index(), self.octets),
                        self.at_once, end)

    def copy(self, x: View, rows: tuple, column: int, ring: Pipeline, slot: Slot) -> None:
        """Start this thread's copies of its lines, from a column on; it arrives when they have come."""
        line = udiv(thread_index(), self.octets)
        octet = (thread_index() - line * self.octets) * OCTET
        to = self.layout.swizzle(line * self.line + octet) + slot.stage * (self.stage_bytes // 2)
        for panel in range(self.panels):
            each(copy_octet, rows, self, x, to, panel * self.held * self.line, column + panel * self.line + octet)
        copies_arrive(ring.full(), slot.stage)


def copy_octet(row: int, n: int, tile: NamedTile, x: View, to: int, panel: int, column: int) -> None:
    ahead, source = panel + n * tile.at_once * tile.line, offset_of(x, (row, column))
    if tile.clipped:
        there = max(min(x.shape[1] - column, OCTET), 0) if row >= 0 else 0
        copy_async_clipped(shared(tile.dtype, tile.offset), to, ahead, x, source, OCTET, there)
    else:
        copy_async(shared(tile.dtype, tile.offset), to, ahead, x, source, OCTET, row >= 0 and column < x.shape[1])


@dataclass(frozen=True)
class PieceOut(TmaOut):
    """A warpgroup's rows of a piece: by TMA, and where the piece ends within them by threads, since TMA would not end there.
    (Of 65536 rows in 128 ragged pieces it takes 0.79 of the time of threads alone, times 768 x 2048, and 0.93, times
    2048 x 768: 350 and 367 us on an H200; without any store 272 and 288.)"""

    @cached_property
    def octets(self) -> OctetOut:
        return OctetOut(self.dtype, clipped=True)

    def store(self, values: tuple, out: Any, part: WarpgroupPart, group: int, rows: View) -> None:     # type: ignore[override]
        if part.m + ROWS <= part.rows:
            self.put(values, out, part, group)
        else:
            self.octets.store(values, rows, part, group)


def destinations(out: View, to: View, part: WarpgroupPart) -> tuple:
    """Of a thread's two rows."""
    return generate(2, named_row, out.shape[0], to, part.m + own_row(), 8, part.rows)


@dataclass(frozen=True)
class ScatteredOctets(OctetOut):
    """Rows go to those that an array names."""

    def store(self, values: tuple, out: View, part: WarpgroupPart, group: int, to: View) -> None:       # type: ignore[override]
        each(put_named_row, destinations(out, to, part), self, part, out, self.words(values))


def put_named_row(row: int, n: int, store: ScatteredOctets, part: WarpgroupPart, out: View, words: tuple) -> None:
    if row >= 0:
        each(put_octet, words, n, store, part, out, (row, part.n + lane_index() % 4 * 8))


@dataclass(frozen=True)
class ScatteredPairs(DirectOut):
    """The same of elements, or pairs of them."""

    def store(self, values: tuple, out: View, part: WarpgroupPart, group: int, to: View) -> None:       # type: ignore[override]
        each(put_named_pair, split(convert_all(self.dtype, values), 2), self, part, out, destinations(out, to, part),
             part.n + own_column())


def put_named_pair(pair: tuple, n: int, store: ScatteredPairs, part: WarpgroupPart, out: View, rows: tuple,
                   column: int) -> None:
    if rows[n % 2] >= 0:
        put_at(pair, store, part, out, rows[n % 2], column + n // 2 * 8)


# --------------------------------------------------------------------------------------------------
# The kernel's text.

#: Of a thread that copies rows, and of one that consumes: a producer's 40 or 32 are too few.
COPYING = {1: (0, 0), 2: (56, 224), 3: (56, 152)}

def check_pieces(places: Places, loop: Loop) -> None:
    """Raises ValueError, with the user's line, for rows that are packed in other ways than as a tile's rows, or as the lines
    of both operands that rounds go along."""
    (m, n), such = places.indices, "only .reference(...) runs others"
    if n.extent.offsets is not None:
        raise refused(ValueError, f"packed(...): {n} are a tile's columns; a kernel has pieces of a tile's rows, or of "
                                  f"rounds ({such})", loop.line)
    if m.piece is not None and places.stacks != (m.piece,):
        raise refused(ValueError, f"parallel({shown(index.extent for index in loop.indices)}): rows of {m} are packed; "
                                  f"tiles of rows and columns then have no stacks but the pieces ({such})", loop.line)
    across = next((x for rounds in places.loops for x in rounds.products if m.piece is not None and x.a_transposed), None)
    if across is not None:                             # TMA's boxes begin at multiples of 16 bytes, and pieces anywhere
        raise refused(ValueError, f"{across.a.parameter.name}[{shown(across.a.dims)}].T: rows of {m} are packed, and lie "
                                  f"along this array's columns; a kernel takes a[m, k] ({such})", across.line)
    for rounds in [rounds for rounds in places.loops if rounds.piece is not None]:
        if m.piece is not None or len(places.loops) > 1:
            raise refused(ValueError, f"rounds along pieces of {rounds.index}: a kernel has one loop then, and tiles of "
                                      f"rows that are not packed ({such})", rounds.line)
        across = next((x for x in rounds.products if not x.a_transposed or x.b_transposed), None)
        if across is not None or rounds.is_read_by_threads:
            raise refused(ValueError, f"rounds along pieces of {rounds.index}: a kernel multiplies rows of both arrays, "
                                      f"a[k, m].T @ b[k, n], and adds up nothing else ({such})",
                          rounds.line if across is None else across.line)
    for rounds in places.loops:
        if rounds.looked_up == rounds.tiles:
            raise refused(ValueError, f"rounds along {rounds.index} take rows that arrays name of all their operands; a "
                                      f"kernel brings one at least with TMA ({such})", rounds.line)
    extreme = next((x for rounds in places.loops for x in rounds.folded if x.what), None)
    if extreme is not None and (places.in_pieces or places.looks_up):
        raise refused(ValueError, f"{extreme.what} of a block where rows are packed, or named by an array; a kernel adds up "
                                  f"their rows ({such})", extreme.line)
    for store in places.stores if places.in_pieces else []:
        if store.only is not None and (store.only is m or m.piece is None):
            raise refused(ValueError, f"once({store.only}): rows are packed, and a kernel stores tiles, or values of a "
                                      f"tile's packed rows ({such})", store.line)


def supported(places: Places, kernel: KernelLimits, device: DeviceInfo, loop: Loop) -> Places:
    """The places. Raises ConfigError where rows are packed, or named, and the kernel does not read which; `NotByTma` where
    wgmma does not take an operand as it lies; TypeError for 8-bit floats that the GPU does not multiply."""
    check_pieces(places, loop)
    for product in [product for rounds in places.loops for product in rounds.products]:
        for tile, is_across in ((product.a, product.a_transposed), (product.b, not product.b_transposed)):
            if is_across and kernel.uses_tma and tile.dtype.itemsize != 2:
                raise NotByTma(refused(ValueError, f"{tile.parameter.name} is an operand of a product, and wgmma reads "
                                       f"{tile.dtype} along K alone, a[m, k] @ b[n, k].T (Mapping(kernel={MULTISTAGE!r}) "
                                       "takes it)", product.line))
        if product.a.dtype in FLOATS_8 and device.arch < (8, 9):
            raise refused(TypeError, f"{product.a.parameter.name} has dtype {product.a.dtype}, whose products need compute "
                                     f"capability 8.9 or above, but {device.name} has {device.arch[0]}.{device.arch[1]}",
                          product.line)
    if places.in_pieces and not kernel.uses_tma:
        raise ConfigError("packed(...) in tiles of rows and columns: the kernel for TMA and wgmma (compute capability 9.0) "
                          "reads offsets; here use tiles of whole rows, parallel(x.count, x.rows)")
    if places.looks_up and not kernel.uses_tma:
        raise ConfigError("x[index[m], k] in tiles of rows and columns: the kernel for wgmma (compute capability 9.0) reads "
                          "which rows an array names; here index before the call, x[index]")
    return places


@dataclasses.dataclass
class PiecePrinter(Printer):
    """Of a warp-specialised kernel where rows are packed, or named."""

    imports = sorted([*IMPORTS, *(("gemmkit.programs.pieces", name, (name,)) for name in (
        "NamedTile", "PieceOut", "ScatteredOctets", "ScatteredPairs", "end_piece", "piece_of_tile")),
        ("gemmkit.programs.collectives", "begin_of", ("end_piece", "piece_of_tile")),
        ("gemmkit.ptx.wgmma", "fence_async", ("NamedTile",))],
        key=lambda each: each[0])

    @property
    def uses(self) -> frozenset[str]:                  # type: ignore[override]
        cut = ["piece_of_tile" if self.places.piece is not None else "end_piece"] if self.places.in_pieces else []
        return frozenset([*cut, *(["NamedTile"] if self.named else [])])

    @property
    def named(self) -> list[TilePlace]:
        """Blocks whose lines an array names."""
        return [tile for tile in self.tiles if tile.lookup is not None]

    @property
    def registers(self) -> dict[int, tuple[int, int]]:             # type: ignore[override]
        return COPYING if self.named else REGISTERS

    @property
    def offsets_read(self) -> list[str]:
        return [self.offsets] if self.places.in_pieces else []

    @property
    def brought(self) -> tuple[str, ...]:              # type: ignore[override]
        """What the producer's threads read."""
        return tuple(dict.fromkeys([*self.offsets_read, *(name for tile in self.named for name in self.source(tile))]))

    def source(self, tile: TilePlace) -> tuple[str, str]:
        """The array of a block, and the one that names its lines."""
        assert tile.lookup is not None
        return tile.parameter.name, tile.lookup.name

    @property
    def of_rounds(self) -> Index | None:
        """The rounds' index, where these go along pieces."""
        return next((rounds.index for rounds in self.places.loops if rounds.piece is not None), None)

    @property
    def offsets(self) -> str:
        index = self.places.indices[0] if self.of_rounds is None else self.of_rounds
        assert index.extent.offsets is not None
        return index.extent.offsets.name

    def arguments(self) -> tuple[list[tuple[str, str]], list[str], list[str], list[str]]:
        maps, operands, names, arrays = super().arguments()
        named, stores = {tile.name for tile in self.named}, [out.store.lookup for out in self.outs]
        to = [lookup.name for lookup in stores if lookup is not None]
        rows = [f"{ROWS_OF}{out.name}" for out in self.outs if out.kind == "PieceOut"]
        return ([each for each in maps if each[0] not in named], operands, names,
                list(dict.fromkeys([*self.brought, *to, *rows, *arrays])))         # arrays end with functions

    # -- rows that are named ------------------------------------------------------------------------------------------

    def staged(self, tile: TilePlace, ring: Ring) -> str:
        if tile.lookup is None:
            return super().staged(tile, ring)
        return self.tile_of("NamedTile", tile, ring, ", clipped=True)" if tile.parameter._shape[-1] % OCTET else ")")

    def by_producer(self, *lines: str) -> list[str]:
        return [*lines] if self.named else super().by_producer(*lines)

    def produce(self, tiles: list[TilePlace]) -> None:
        super().produce([tile for tile in tiles if tile.lookup is None])

    def found(self, ring: Ring, k: str | None) -> list[str]:
        """Of lines along the rounds those of the next round: the look-up is under way while this one's are copied."""
        lines = []
        for tile in ring.rounds.looked_up:
            along, (x, index) = tile.dims[0], self.source(tile)
            is_round, at = along is ring.rounds.index, f"at_{tile.name}"
            if k is not None and not is_round:
                continue
            ahead = "" if k is None else f"{k} + {self.memory.blocks[along.name]}"
            place = ahead if is_round else along.name
            first, end = place or "0", f"sizes.{along.name}"
            if along.piece is not None:
                first, end = (f"{along.name}_origin + {place}" if place else f"{along.name}_origin",
                              f"{along.name}_origin + {along.name}_count")
            rows = f"{tile.name}_tile.find({x}, {index}, {first}, {end})"
            lines.append(f"{at}_next = {rows}" if is_round and k is None else f"{at}, {at}_next = {at}_next, {rows}"
                         if is_round else f"{at} = {rows}")
        return lines

    def filled(self, ring: Ring) -> list[str]:
        asked = super().filled(ring)
        if not ring.rounds.looked_up:
            return asked
        copies = [f"{tile.name}_tile.copy({self.source(tile)[0]}, at_{tile.name}, {tile.dims[1].name}, {self.ring(ring)}, "
                  f"{self.slot(ring)})" for tile in ring.rounds.looked_up]
        return ["if thread_index() == 0:", *(f"    {line}" for line in asked), *copies]

    # -- where tiles are ----------------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        piece, (m, n) = self.places.piece, (index.name for index in self.places.indices)
        if piece is None:
            return super().place
        return f"{piece.name}, {m}, {n}, {m}_origin, {m}_count, {piece.name}_tiles"

    def placed(self, piece: str, before: str) -> str:
        """A tile's place, from a piece on and the tiles in front of it."""
        rank = "" if self.cluster.is_single else "rank, "
        return f"place(tile, {rank}{piece}, {before}, sizes, {self.offsets})"

    def begin(self) -> list[str]:
        piece = self.places.piece
        if piece is None:
            return [*super().begin(), *(f"    {line}" for line in self.bounds)]
        return [*self.rank, f"tile = {of_blocks('block_x()', self.cluster)}",
                f"{self.place} = {self.placed('zero', 'zero')}", f"while {piece.name} < sizes.{piece.name}:"]

    @property
    def bounds(self) -> list[str]:
        """Where a tile's rounds begin, and how many rows they go along: a round at least."""
        k, piece = self.of_rounds, None if self.of_rounds is None else self.of_rounds.piece
        if k is None or piece is None:
            return []
        begin = f"begin_of({self.offsets}, {{}}, sizes.{k.name})".format
        return [f"{k.name}_origin = {begin(piece.text())}",
                f"{k.name}_count = max({begin(f'{piece.text()} + 1')} - {k.name}_origin, 0)",
                f"{k.name}_end = max({k.name}_count, 1)"]

    def end_of(self, index: Index) -> str:
        return super().end_of(index) if index.piece is None else f"{index.name}_end"

    def grid(self) -> list[str]:
        piece, (m, n), memory = self.places.piece, (index.name for index in self.places.indices), self.memory
        if piece is None:
            return super().grid()
        i, rows, size = piece.name, memory.blocks[m] * memory.cluster.m, memory.blocks[n] * memory.cluster.n
        row, column = self.corners(memory.blocks)
        given = f"tile, {'' if memory.cluster.is_single else 'rank, '}{i}, {i}_tiles, sizes, {self.offsets}"
        begin = f"begin_of({self.offsets}, {{}}, sizes.{m})".format
        return ["def tiles(sizes):", '    """No fewer than there are, whatever the offsets are."""',
                f"    return (udiv(sizes.{m}, {rows}) + sizes.{i}) * blocks(sizes.{n}, {size})", "", "",
                f"def place({given}):",
                '    """Which piece, that of the block\'s last tile or one behind; the tile\'s first row and column; where',
                '    the piece begins, its rows, and the tiles in front of it."""',
                f"    columns = blocks(sizes.{n}, {size})",
                f"    {i}, {i}_tiles = piece_of_tile({self.offsets}, {i}, {i}_tiles, sizes.{i}, tile, sizes.{m}, {rows}, "
                "columns)",
                f"    {m}_origin = {begin(i)}", f"    {m}_count = {begin(f'min({i} + 1, sizes.{i})')} - {m}_origin",
                f"    inner = tile - {i}_tiles if {i} < sizes.{i} else 0 * tile          # of no piece there is none",
                f"    row, column = order.block(inner, max(blocks({m}_count, {rows}), 1), columns)",
                f"    return {i}, {row}, {column}, {m}_origin, {m}_count, {i}_tiles"]

    # -- rounds -------------------------------------------------------------------------------------------------------

    def next_lines(self, found: str) -> list[str]:
        piece = self.places.piece
        assert piece is not None
        return [f"tile = {self.next_tile}", f"{found} = {self.placed(piece.name, f'{piece.name}_tiles')}"]

    def go_on(self, depth: int, is_consumer: bool) -> None:
        if self.places.piece is None:
            super().go_on(depth, is_consumer)
        elif is_consumer:
            names = self.place.split(", ")
            self.put(depth, f"{self.place} = {', '.join(f'uniform(next_{name})' for name in names)}")
        else:
            self.put(depth, *self.next_lines(self.place))

    @property
    def following(self) -> str:
        return ", ".join(f"next_{name}" for name in self.place.split(", "))

    def multiply_tile(self, depth: int) -> None:
        """Both ways through a tile look for the next one. Sums of columns take all warps, whose rows there are or not."""
        if self.places.piece is None or self.places.column_starts:
            super().multiply_tile(depth)
            return
        m = self.places.indices[0].name
        self.put(depth, f"if {m} + group * 64 < {m}_count:")
        super().multiply_tile(depth + 1)
        self.put(depth, "else:")
        self.put(depth + 1, *self.next_lines(self.following))
        for ring in self.memory.rings:
            k, name, slot = ring.rounds.index, self.ring(ring), self.slot(ring)
            self.put(depth + 1, f"{k.name} = 0 * tile", f"while {k.name} < {self.end_of(k)}:",
                     f"    {name}.wait({slot})", "    named_barrier(group + 1, 128)",   # a warp a ring behind never wakes
                     f"    {name}.release({slot}.stage)", f"    {slot} = {name}.advance({slot})",
                     f"    {k.name} = rolled({k.name} + {self.memory.blocks[k.name]})")

    def events(self, depth: int, ring: Ring, events: tuple[Event, ...]) -> None:       # type: ignore[override]
        for event in events:
            super().events(depth, ring, (event,))
            if isinstance(event, Await):
                if ring.rounds.looked_up:
                    self.put(depth, "fence_async()")           # threads' copies, which tensor cores read
                if ring.rounds.piece is not None:
                    self.end_rounds(depth, ring, "0" if events is self.loops[0].before else ring.rounds.index.name)
        if self.places.piece is not None and ring is self.memory.rings[0] and events is self.loops[0].before:
            self.put(depth, *self.next_lines(self.following))

    def end_rounds(self, depth: int, ring: Ring, at: str) -> None:
        k, size = ring.rounds.index.name, self.memory.blocks[ring.rounds.index.name]
        tiles = ", ".join(f"{tile.name}_tile" for tile in ring.rounds.tiles)
        first = f"{k}_count" if at == "0" else f"{k}_count - {at}"
        self.put(depth, f"if {first} < {size}:",
                 f"    end_piece(({tiles}{',' if len(ring.rounds.tiles) == 1 else ''}), {self.slot(ring)}, {first}, group, "
                 f"{self.warpgroups})")

    # -- results ------------------------------------------------------------------------------------------------------

    @property
    def part(self) -> str:
        m, n = (index.name for index in self.places.indices)
        if self.places.piece is None:
            return super().part
        return f"WarpgroupPart({m}_origin + {m} + group * 64, {n}, {m}_origin + {m}_count, sizes.{n}, ())"

    def given(self, made: ElementFunction, kind: str) -> list[str]:
        m = self.places.indices[0].name
        last = f"sizes.{m} - 1"
        return [f"{m}_count - 1" if x == last and self.places.piece is not None else x for x in super().given(made, kind)]


# --------------------------------------------------------------------------------------------------
# Tiles of whole rows, of packed ones too: how many there are, and which are a block's.

def there_and_back(choice: ScheduleChoice) -> list[str]:
    if choice.cluster.is_single:
        return ["    return (udiv(tile, grid_x()) + 1) * 2 * grid_x() - 1 - tile"]
    count = of_blocks("grid_x()", choice.cluster)
    return [f"    count = {count}", "    return (udiv(tile, count) + 1) * 2 * count - 1 - tile"]


def places_of_rows(chain: Chain, choice: ScheduleChoice) -> list[str]:
    """A cluster's tiles are neighbours: they count as one."""
    m, size = chain.rows.name, choice.rows * choice.cluster.m
    given, own = ("tile, sizes", "") if choice.cluster.is_single else ("tile, rank, sizes", f" + rank * {choice.rows}")
    place, count = f"def place({given}):", count_of(chain.stacks)
    if chain.splits > 1:
        return ["def tiles(sizes):", f"    return {count}sizes.{chain.share} * blocks(sizes.{m}, {size})", "", "", place,
                '    """Which of the stack, which of its shares, and the tile\'s first row."""',
                f"    inner = blocks(sizes.{m}, {size})", "    outer = udiv(tile, inner)",
                f"    return outer, (tile - outer * inner) * {size}{own}"]
    if not chain.stacks:
        n = f"(blocks(sizes.{m}, {size}) - 1 - tile)" if choice.longest_first and chain.grows else "tile"
        return ["def tiles(sizes):", f"    return blocks(sizes.{m}, {size})", "", "", place,
                '    """The tile\'s first row."""', f"    return {n} * {size}{own}"]
    head = ["def tiles(sizes):", f"    return {count}blocks(sizes.{m}, {size})", "", "", place]
    if not choice.longest_first:
        return [*head, '    """Which of the stack, and the tile\'s first row."""', f"    inner = blocks(sizes.{m}, {size})",
                "    outer = udiv(tile, inner)",
                f"    return {', '.join(parts_of_stacks(chain.stacks, 'outer'))}, (tile - outer * inner) * {size}{own}"]
    row = "(rows - 1 - inner)" if chain.grows else "inner"
    return [*head, '    """Which of the stack, and the tile\'s first row: the longest tiles of a section first."""',
            f"    rows = blocks(sizes.{m}, {size})", "    outer = udiv(tile, sizes.section * rows)",
            "    first = outer * sizes.section", f"    count = min(sizes.section, {count.removesuffix(' * ')} - first)",
            "    rest = tile - first * rows", "    inner = udiv(rest, count)", "    which = first + rest - inner * count",
            f"    return {', '.join(parts_of_stacks(chain.stacks, 'which'))}, {row} * {size}{own}"]


def has_sections(chain: Chain, choice: ScheduleChoice) -> bool:
    """Whether so many of the stack are taken side by side (`section_of`)."""
    return choice.longest_first and bool(chain.stacks) and chain.piece is None


def places_of_pieces(chain: Chain, choice: ScheduleChoice, names: list[str], following: str) -> list[str]:
    """Tiles of rows that are packed. Lengths of pieces are read on the GPU: each has a tile for every block of rows that it
    begins, and one more, so that piece i's are from offsets[i] // rows + i on. Some have no rows. ``names``: what `place`
    returns; ``following``: the next tile of the block, if it has more than one."""
    assert chain.piece is not None
    offsets, (piece,) = chain.piece.data
    i, m, size, heads = piece.name, chain.rows.name, choice.rows, count_of(chain.own_stacks)
    place, given = ", ".join(names), f"tile, {i}, sizes, {offsets.name}"
    parts = dict(zip((stack.name for stack in chain.own_stacks), parts_of_stacks(chain.own_stacks, "which")))
    first = f"(slot - udiv({m}_origin, {size}) - {i}) * {size}"
    lines = ["def tiles(sizes):", f"    return {heads}(udiv(sizes.{m}, {size}) + sizes.{i})", "", "", f"def place({given}):",
             '    """Which piece, which of the stack, and the first row; where the piece begins, and its rows."""',
             f"    slot = udiv(tile, {heads.removesuffix(' * ') or 1})"]
    if heads:
        lines += [f"    which = tile - slot * {heads.removesuffix(' * ')}"]
    lines += [f"    {i} = piece_at({offsets.name}, {i}, sizes.{i}, slot, {size}, sizes.{m})",
              f"    {m}_origin = begin_of({offsets.name}, {i}, sizes.{m})",
              f"    {m}_count = begin_of({offsets.name}, {i} + 1, sizes.{m}) - {m}_origin"]
    if choice.longest_first and chain.grows:
        first = f"(blocks(max({m}_count, 0), {size}) - 1) * {size} - {first}"
    lines += [f"    {m} = {first}", f"    return {', '.join(parts.get(name, name) for name in names)}"]
    if following:
        lines += ["", "", f"def with_rows({given}):",
                  '    """The tile, or the next one of the block that has rows, and its place."""',
                  f"    {place} = place({given})", f"    while tile < tiles(sizes) and ({m} < 0 or {m} >= {m}_count):",
                  f"        tile = {following}", f"        {place} = place({given})", f"    return tile, {place}"]
    return lines


# --------------------------------------------------------------------------------------------------
# The order of tiles that get longer with their rows: a section's longest first, and blocks take them there and back.
#
# A block's n-th tile is in the n-th row of tiles as blocks take them; every other row is taken from its end. So a block
# that had the longest tile of one row has the shortest of the next. A section is as many of a stack as are taken side by
# side: few share the L2 cache, many are balanced. Of 64 causal heads of 4096 rows on 132 multiprocessors the block that
# takes longest takes, of the mean:
#
# | section | fixed stride | there and back |
# |---|---|---|
# | head after head | 1.12 | 1.03 |
# | 12 heads, whose K and V are 24 MB | 1.18 | 1.20 |
# | **11 heads** | 1.10 | **1.014** |
# | 22 heads | 1.04 | 1.007 |
# | all | 1.06 | 1.001 |
#
# Operands that L2 has no room for come from memory again for every row of tiles, but for blocks that take the same matrix
# at once. So a section takes longer by how many of its matrices, beyond those that fit, blocks read at once; longer tiles
# read them less often. Of 10 causal shapes by 13 sections (H200) a time over its imbalance was the same within 2 % where
# few blocks read beyond L2 (16 heads of 16384 rows: 1570 us as one section, 1779 as sections of the 3 heads that fit),
# and 20 % longer for 64 heads of 4096 rows as one section. A section whose tiles fill there and back is a candidate: 66
# heads of 4 tiles on 132 blocks.

OVERHEAD = 0.5                         # of a tile, in blocks of keys
L2 = 24 << 20                          # bytes of operands that a section may have
CROWDED = 0.5                          # time more where all blocks read tiles of 128 rows from memory
MOST_SECTIONS = 8                      # of which all lengths are candidates


def section_of(count: int, tiles: int, nbytes: int, blocks: int, rows: int) -> int:
    """How many of a stack of ``count``, of so many ``tiles`` of ``rows`` and ``nbytes`` of operands each, are a section on
    ``blocks``.

    >>> section_of(64, 32, 2 << 20, 132, 128), section_of(2, 32, 2 << 20, 132, 128), section_of(512, 4, 2 << 17, 132, 128)
    (11, 2, 66)
    """
    fits = max(1.0, L2 / max(1, nbytes))
    most = max(1, min(count, int(count / fits) + 1, MOST_SECTIONS))
    even = 2 * blocks // math.gcd(2 * blocks, tiles)
    fitting = -(-count // max(1, int(fits)))           # sections
    sizes = {-(-count // sections) for sections in (*range(1, most + 1), fitting)} | {even * max(1, int(fits) // even)}

    def time(size: int) -> float:
        crowded = CROWDED * 128 / rows * max(0.0, min(size, blocks) - fits) / blocks
        return imbalance(count, tiles, size, blocks) * (1 + crowded)

    sizes = {size for size in sizes if size <= count}
    return max(sizes) if len(sizes) == 1 else min(sorted(sizes, reverse=True), key=time)


@functools.lru_cache(maxsize=4096)
def imbalance(count: int, rows: int, section: int, blocks: int) -> float:
    """The time of the block that takes longest, of the mean."""
    parts = [min(section, count - first) for first in range(0, count, section)]
    lengths = np.concatenate([np.repeat(np.arange(rows, 0, -1), part) for part in parts]) + OVERHEAD
    table = np.zeros((-(-len(lengths) // blocks), blocks))
    table.flat[:len(lengths)] = lengths
    table[1::2] = table[1::2, ::-1]
    times = table.sum(0)
    return float(times.max() / times.mean())


def staggered(chain: Chain, choice: ScheduleChoice) -> list[str]:
    """Functions that say where tiles begin that add in an order, and how many add to a block before a tile: none before the
    one that comes there first."""
    m, n, step = chain.rows.name, chain.index.name, choice.blocks[chain.index.name]
    counts = f"    rows, count = blocks(sizes.{m}, {choice.rows}), blocks(sizes.{n}, {step})"
    return [f"def first_round({m}, sizes):",
            '    """Where the rounds of a tile begin: apart, if all tiles of a stack run at once."""',
            counts, f"    own = udiv({m}, {choice.rows}) if rows <= grid_x() else 0",
            f"    return (count - 1 - udiv(own * count, rows)) * {step}", "", "",
            f"def turn_at({m}, {n}, sizes):",
            '    """How many tiles add to the block before, and what the tile then adds to the count."""', counts,
            f"    own = udiv({m}, {choice.rows})",
            f"    ahead = udiv((count - udiv({n}, {step})) * rows - 1, count) - own if rows <= grid_x() else own",
            "    turn = ahead if ahead >= 0 else ahead + rows", "    return turn, -turn if turn == rows - 1 else 1"]


def counts_of(chain: Chain, choice: ScheduleChoice) -> dict[str, ArrayInfo]:
    """A counter for each block of rows that tiles add to in order, in memory of the stream's."""
    if not choice.ordered:
        return {}
    length, rows = choice.blocks[chain.index.name], chain.sizes[chain.index.extent]
    blocks, stacks = -(-rows // length), chain.count
    if chain.index.piece is not None:
        pieces = chain.sizes[chain.index.piece.of_loop.extent]
        blocks, stacks = rows // length + pieces, stacks // max(1, pieces)
    return {TURNS: described("counts", max(1, stacks * blocks), np.dtype(np.uint32))}
