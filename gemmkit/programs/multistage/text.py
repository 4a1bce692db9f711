"""Tiles of rows and columns as the text of a multistage kernel: a block has a tile, and all threads do all of it.

A round waits for its stage, starts the copies of the round that is ``stages - 1`` ahead, into the stage that the round
before has read, and multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gemmkit.programs.allocate import Ring
from gemmkit.programs.collectives import ROWS
from gemmkit.programs.order import Read
from gemmkit.programs.own_names import IMPORTS
from gemmkit.programs.places import TilePlace
from gemmkit.programs.rows.form import walked
from gemmkit.programs.text import Printer

HOPPERS = ("gemmkit.kernels.common.cluster", "gemmkit.kernels.common.pipeline", "gemmkit.ptx.cluster",
           "gemmkit.ptx.mbarrier", "gemmkit.ptx.warpgroup", "gemmkit.ptx.wgmma")       # modules
#: Of a multiprocessor; of a thread beside its sums: of rounds, of each product more, of an end that reads matrices.
REGISTERS, OTHERS, EACH, READING = 65536, 64, 8, 96
#: What a text calls its own things, beside `gemmkit.programs.own_names.OWN_NAMES`.
OWN_NAMES = frozenset({"Copied", "CopyRing", "MmaProduct", "OctetOut", "RESIDENT", "copy_blocks", "finish", "stage"})


class Copies(NamedTuple):
    """How threads copy an operand: elements at a time, and whether rows may end within them."""

    vector: int
    clipped: bool

    @property
    def said(self) -> str:
        """As fields of the collective, where they are not its defaults."""
        return (f", vector={self.vector}" if self.vector != 8 else "") + (", clipped=True" if self.clipped else "")


@dataclass
class MultistagePrinter(Printer):
    """``copies``: by the names of the operands."""

    copies: dict[str, Copies] = field(default_factory=dict)

    product_class, met = "MmaProduct", ""
    imports = sorted([*(each for each in IMPORTS if each[0] not in HOPPERS
                        and each[1] not in ("Product", "Staged", "TmaOut", "grid_x")),
                      ("gemmkit.programs.chains.collectives", "OctetOut", ("OctetOut",)),
                      *(("gemmkit.programs.multistage.collectives", name, ())
                        for name in ("Copied", "CopyRing", "MmaProduct"))],
                     key=lambda each: each[0])

    @property
    def row_parts(self) -> int:
        """Of 64 rows each, that a warpgroup has."""
        return self.memory.blocks[self.places.indices[0].name] // (ROWS * self.warpgroups)

    @property
    def product_fields(self) -> str:
        return "" if self.row_parts == 1 else f", parts={self.row_parts}"

    # -- constants ----------------------------------------------------------------------------------------------------

    def roles(self) -> list[str]:
        columns = self.memory.blocks[self.places.indices[1].name]
        need = OTHERS + len(self.places.starts) * self.row_parts * columns // 2
        need += EACH * (max(len(ring.rounds.products) for ring in self.memory.rings) - 1)
        if any(x.op == "load" and len(x.dims) == 2 for x in walked([out.store.value for out in self.outs])):
            need += READING
        resident = max(1, REGISTERS // (self.threads * need))
        return [f"WARPGROUPS = Warpgroups(0, {self.warpgroups})", f"SHARED_BYTES = {self.memory.nbytes}",
                f"RESIDENT = {resident}          # blocks of a multiprocessor that there are to be registers for"]

    def staged(self, tile: TilePlace, ring: Ring) -> str:
        return self.tile_of("Copied", tile, ring,
                            f", threads={self.threads}{self.copies[tile.parameter.name].said}") + ")"

    def pipeline(self, ring: Ring) -> str:
        return f"{self.ring(ring)} = CopyRing(stages={ring.stages})"

    # -- the kernel ---------------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    def arguments(self) -> tuple[list[tuple[str, str]], list[str], list[str], list[str]]:
        blocks, _, names, arrays = super().arguments()
        operands = list(dict.fromkeys(array for _, array in blocks))
        return [], operands, names, [name for name in arrays if name not in operands]

    def copy_blocks(self, ring: Ring) -> str:
        return "copy_blocks" if len(self.memory.rings) == 1 else f"copy_blocks_{ring.rounds.index.name}"

    def operands(self, ring: Ring) -> list[str]:
        return list(dict.fromkeys(tile.parameter.name for tile in ring.rounds.tiles))

    def kernel(self) -> None:
        _, operands, names, arrays = self.arguments()
        self.put(0, "", "", f"def kernel({', '.join(['sizes', *operands, *names, *arrays])}):")
        self.put(1, '"""1. Blocks of the operands: global -> shared, ahead of the round. 2. Products of stages, added up.',
                 '3. What becomes of the sums: registers -> global."""',
                 "group, zero = uniform(udiv(thread_index(), 128)), thread_index() * 0",
                 f"{self.place} = place(block_x(), sizes)")
        self.begin_cells(1)
        for ring in self.memory.rings:
            self.rounds(ring)
        if self.row_parts == 1:
            self.finish(1)
            return
        for n in range(self.row_parts):
            sums = [f"{self.product_of(cell)}.part({cell}, {n})" for cell in self.places.starts]
            *stack, m, column = self.place.split(", ")
            tile = *stack, f"{m} + {n * ROWS * self.warpgroups}" if n else m, column
            self.put(1, f"finish({', '.join(['sizes', *names, *self.read_by_threads, *tile, 'group', *sums])})")

    @property
    def read_by_threads(self) -> list[str]:
        """At a tile's end: operands among them."""
        return super().arguments()[3]

    def product_of(self, cell: str) -> str:
        """One that adds to a cell."""
        return next(self.product(p) for ring in self.memory.rings for p in ring.rounds.products
                    if self.places.cells[p.carried.after] == cell)

    def rounds(self, ring: Ring) -> None:
        """A loop, behind the copies of its first rounds."""
        k, name, slot, ahead = ring.rounds.index.name, self.ring(ring), self.slot(ring), ring.stages - 1
        step = self.memory.blocks[k]
        self.put(1, f"for stage in range({ahead}):")
        self.copy(2, ring, f"stage * {step}", "Slot(zero + stage, zero)")
        self.put(1, f"{k}, before, {slot} = zero, Slot(zero + {ahead}, zero), Slot(zero, zero)", f"while {k} < sizes.{k}:",
                 f"    {name}.wait()")
        self.copy(2, ring, f"{k} + {ahead * step}", "before")
        for product in ring.rounds.products:
            cell = self.places.cells[product.carried.after]
            self.put(2, f"{cell} = {self.product(product)}.multiply({cell}, {slot}, group)")
        self.read(2, ring, Read(tuple(ring.rounds.row_sums), tuple(ring.rounds.column_sums)))
        self.put(2, f"before, {slot} = {slot}, {name}.advance({slot})", f"{k} = rolled({k} + {step})")

    def copy(self, depth: int, ring: Ring, at: str, slot: str) -> None:
        """The copies of a round, if there is one, are a group."""
        tile = self.place.replace(" ", "").split(",")
        given = ", ".join(["sizes", *self.operands(ring), *tile, at, slot])
        self.put(depth, f"if {at} < sizes.{ring.rounds.index.name}:", f"    {self.copy_blocks(ring)}({given})",
                 f"{self.ring(ring)}.commit()")

    def parts(self) -> None:
        if self.row_parts > 1:
            names = [out.name for out in self.outs]
            given = ", ".join(["sizes", *names, *self.read_by_threads, self.place, "group", *self.places.starts])
            self.put(0, f"def finish({given}):",
                     '    """What becomes of the sums of 64 rows of each warpgroup: registers -> global."""')
            self.finish(1)
            self.put(0, "", "")
        for n, ring in enumerate(self.memory.rings):
            k = ring.rounds.index.name
            given = ", ".join(["sizes", *self.operands(ring), self.place, k, "slot"])
            self.put(0, *(["", ""] if n else []), f"def {self.copy_blocks(ring)}({given}):",
                     f'    """Blocks of a round {"along " + k + " " if len(self.memory.rings) > 1 else ""}on their way: '
                     'global -> shared."""')
            for tile in ring.rounds.tiles:
                where = [index.name for index in tile.dims]
                stack = [] if tile.stack is None else [tile.stack.name]
                self.put(1, f"{tile.name}_tile.copy({tile.parameter.name}, ({', '.join([*stack, *where])}), "
                            f"({', '.join(f'sizes.{x}' for x in where)}), slot)")
