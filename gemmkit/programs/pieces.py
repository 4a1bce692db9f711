"""Tiles of rows and columns where rows are packed, as tokens are that are sorted by the expert that takes them.

| packed | tiles | rounds |
|---|---|---|
| a tile's rows, ``d[m, n]`` of ``x[m, k] @ w[i, k, n]`` | of each piece as many as it has rows for | of all tiles alike |
| rounds' rows, ``d[i, m, n]`` of ``x[k, m].T @ y[k, n]`` | of each piece as many as a matrix needs | a piece's |

Offsets are read on the GPU. Tiles of packed rows are counted piece by piece, so that no block has a tile without rows: a
block goes on from the piece of its last tile, and looks for the next one while the first product of a tile runs. A warpgroup
of whose 64 rows none is there multiplies nothing.

TMA brings blocks of the joined array, with rows of the next piece where one ends. A tile's rows that are another piece's are
not stored. Rounds would add them up: threads put zeros over them in both operands, because 0 times infinity is NaN.
"""

from __future__ import annotations

import dataclasses

from gemmkit.kernels.collectives.scheduler import Slot
from gemmkit.lang.aggregates import fill
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import View
from gemmkit.lang.registers import each
from gemmkit.programs.collectives import StagedTile, begin_of, blocks
from gemmkit.programs.mapping import KernelLimits
from gemmkit.programs.places import Await, Event, Places, Ring
from gemmkit.programs.sums import MEETING, number
from gemmkit.programs.text import IMPORTS, ElementFunction, Printer, of_blocks
from gemmkit.programs.values import Index
from gemmkit.ptx.memory import shared, store_shared
from gemmkit.ptx.wgmma import fence_async, named_barrier

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
# The kernel's text.

def supported(places: Places, kernel: KernelLimits) -> Places:
    """The places. Raises ConfigError where rows are packed and the kernel does not read offsets."""
    if places.in_pieces and not kernel.uses_tma:
        raise ConfigError("packed(...) in tiles of rows and columns: the kernel for TMA and wgmma (compute capability 9.0) "
                          "reads offsets; here use tiles of whole rows, parallel(x.count, x.rows)")
    return places


@dataclasses.dataclass
class PiecePrinter(Printer):
    """Of a warp-specialised kernel where rows are packed."""

    imports = sorted([*IMPORTS, ("gemmkit.programs.collectives", "begin_of", ()),
                      *(("gemmkit.programs.pieces", name, (name,)) for name in ("end_piece", "piece_of_tile"))],
                     key=lambda each: each[0])

    @property
    def uses(self) -> frozenset[str]:                  # type: ignore[override]
        return frozenset({"end_piece" if self.places.piece is None else "piece_of_tile"})

    @property
    def brought(self) -> tuple[str, ...]:              # type: ignore[override]
        return (self.offsets,)

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
        return maps, operands, names, list(dict.fromkeys([self.offsets, *arrays]))

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
        assert k is not None and piece is not None
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
            self.put(depth + 1, f"{k.name} = 0 * tile", f"while {k.name} < {self.end_of(k)}:", f"    {name}.wait({slot})",
                     f"    {name}.release({slot}.stage)", f"    {slot} = {name}.advance({slot})",
                     f"    {k.name} = rolled({k.name} + {self.memory.blocks[k.name]})")

    def events(self, depth: int, ring: Ring, events: tuple[Event, ...]) -> None:       # type: ignore[override]
        if self.places.piece is not None:
            super().events(depth, ring, events)
            if ring is self.memory.rings[0] and events is self.loops[0].before:
                self.put(depth, *self.next_lines(self.following))
            return
        for event in events:
            super().events(depth, ring, (event,))
            if isinstance(event, Await):
                self.end_rounds(depth, ring, "0" if events is self.loops[0].before else ring.rounds.index.name)

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
