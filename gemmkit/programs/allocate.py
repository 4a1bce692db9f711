"""Where everything lies in shared memory: stages of the rings, results on their way out, barriers; and how many stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.shared_memory import SharedMemory
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.collectives import PATTERN, ROWS
from gemmkit.programs.kernels import Kernel
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.order import LEAST_STAGES
from gemmkit.programs.places import Places, Rounds
from gemmkit.programs.values import Index
from gemmkit.runtime.device import DeviceInfo

MOST = 4                               # stages where the mapping does not say how many
STEP = 64                              # of a tile's columns
COLUMN_BYTES = 4                       # of a column's value in shared memory


@dataclass(frozen=True)
class Ring:
    """``offsets``: of the blocks, within the memory of the first stage; ``filled``: bytes of a stage that they take."""

    rounds: Rounds
    stages: int
    stage_bytes: int
    filled: int
    offsets: dict[str, int]
    barriers: int


@dataclass(frozen=True)
class Allocation:
    """``outs``: of results that leave by shared memory, where they lie in it; ``columns``: the same of cells that have a
    value for each column; ``cluster``: blocks that share operands; ``kernel``: what they lie in. With ``one_ring`` all
    loops go around the same stages."""

    blocks: dict[str, int]
    rings: tuple[Ring, ...]
    outs: dict[str, int]
    nbytes: int
    cluster: Cluster
    columns: dict[str, int]
    band: int                          # tile rows
    kernel: Kernel
    one_ring: bool


def sized(places: Places, mapping: Mapping, kernel: Kernel) -> dict[str, int]:
    """The length of every index's blocks: the mapping's, or defaults.

    Raises ConfigError for names that the program has not, and for lengths that no product has.
    """
    m, n = places.indices
    mapping.refuse_orders(places.names)
    names = [index.name for index in (m, n, *(rounds.index for rounds in places.loops))]
    other = next((name for name in mapping.blocks if name not in names), None)
    if other is not None:
        raise ConfigError(f"Mapping(blocks={{{other!r}: {mapping.blocks[other]}}}): the program's indices are "
                          f"{', '.join(dict.fromkeys(names))}")
    rows = ROWS * mapping.warpgroups
    parts = 2 if kernel.parts == 2 and mapping.blocks.get(m.name) == 2 * rows else 1
    if parts == 2 and (places.row_starts or places.column_starts):
        raise ConfigError(f"Mapping(blocks={{{m.name!r}: {2 * rows}}}, warpgroups={mapping.warpgroups}): where rounds add "
                          f"up rows or columns, a warpgroup has {ROWS}; {rows} are needed")
    most = kernel.most_sums[mapping.warpgroups] // parts // len(places.starts) // 64 * 64
    if most == 0:
        raise ConfigError(f"{len(places.starts)} cells of sums do not fit in the registers of {mapping.warpgroups} "
                          f"warpgroups; {kernel.most_sums[1] // 64} do at most")
    blocks = {m.name: rows, n.name: 64, **{r.index.name: kernel.depth for r in places.loops}}
    blocks.update(mapping.blocks)
    if blocks[m.name] != parts * rows:
        more = "" if kernel.parts == 1 else f", or {2 * rows}"
        raise ConfigError(f"Mapping(blocks={{{m.name!r}: {blocks[m.name]}}}, warpgroups={mapping.warpgroups}): a warpgroup "
                          f"has {ROWS} rows, so {rows} are needed{more}")
    for name in (n.name, *(rounds.index.name for rounds in places.loops)):
        whole = 64 if name == n.name else kernel.depths
        if blocks[name] % whole or blocks[name] > 256:
            raise ConfigError(f"Mapping(blocks={{{name!r}: {blocks[name]}}}): " + (
                "64, 128, 192 or 256 is needed" if whole == 64 else f"a multiple of {whole} up to 256 is needed"))
    if blocks[n.name] > max(64, most):
        raise ConfigError(f"Mapping(blocks={{{n.name!r}: {blocks[n.name]}}}, warpgroups={mapping.warpgroups}): with "
                          f"{len(places.starts)} cells of sums, {most} columns fit in registers")
    return blocks


def allocated(places: Places, mapping: Mapping, outs: dict[str, int], device: DeviceInfo,
              kernel: Kernel) -> Allocation:
    """``outs``: the bytes that results need on their way out. Raises ConfigError for what does not fit."""
    blocks = sized(places, mapping, kernel)
    sizes = [[2 * _length(tile.dims[0], blocks) * _length(tile.dims[1], blocks) for tile in rounds.tiles]
             for rounds in places.loops]
    limit = device.shared_memory_per_block
    bound = min(limit, mapping.shared_bytes or limit)
    of_columns = COLUMN_BYTES * blocks[places.indices[1].name] * len(places.column_starts)
    room = (mapping.shared_bytes or kernel.share(device)) - sum(outs.values()) - of_columns
    mapping.check_arrays([tile.name for rounds in places.loops for tile in rounds.tiles])
    given = [mapping.stages_of([tile.name for tile in rounds.tiles]) for rounds in places.loops]
    one_ring = _is_one_ring(places, given, kernel)
    filled = [sum(of_one) for of_one in sizes]
    stage_bytes = [max(filled)] if one_ring else filled            # of each ring
    fits = max(LEAST_STAGES, min(MOST, room // sum(nbytes + kernel.barriers for nbytes in stage_bytes)))
    stages = [said or fits for said in given[:len(stage_bytes)]]
    if min(stages) < LEAST_STAGES:
        raise ConfigError(f"Mapping(stages={min(stages)}): " + (
            "products are waited for one round later" if kernel.uses_tma else "a stage is filled while another is read")
            + f", so {LEAST_STAGES} are needed")
    memory = SharedMemory()
    firsts = [memory.take(n * nbytes, PATTERN) for n, nbytes in zip(stages, stage_bytes)]
    places_out = {name: memory.take(nbytes, PATTERN) for name, nbytes in outs.items()}
    columns = {name: memory.take(COLUMN_BYTES * blocks[places.indices[1].name], PATTERN) for name in places.column_starts}
    barriers = [memory.take(kernel.barriers * n) for n in stages]
    rings = []
    for loop, (rounds, of_one) in enumerate(zip(places.loops, sizes)):
        ring = 0 if one_ring else loop                 # loops come one after the other
        offsets, at = {}, firsts[ring]
        for tile, size in zip(rounds.tiles, of_one):
            offsets[tile.name], at = at, at + size
        rings.append(Ring(rounds, stages[ring], stage_bytes[ring], filled[loop], offsets, barriers[ring]))
    if memory.nbytes > bound:
        raise ConfigError(f"{', '.join(map(str, stages))} stages of {sum(stage_bytes)} bytes and "
                          f"results of {sum(outs.values()) + of_columns} need "
                          f"{memory.nbytes} bytes of shared memory, and {bound} are there; "
                          "take fewer stages or smaller blocks")
    return Allocation(blocks, tuple(rings), places_out, memory.nbytes, clustered(places, mapping), columns,
                      max(1, -(-mapping.band // mapping.cluster.get(places.indices[0].name, 1))), kernel, one_ring)


def _is_one_ring(places: Places, given: list[int], kernel: Kernel) -> bool:
    """Whether all loops go around one ring: then each has all of the stages. Those of a multistage kernel begin to fill
    theirs while the loop before is still read."""
    kinds = {(bool(rounds.row_sums), bool(rounds.column_sums)) for rounds in places.loops}
    return len(places.loops) == 1 or (kernel.uses_tma and len(set(given)) == 1 and len(kinds) == 1)


def clustered(places: Places, mapping: Mapping) -> Cluster:
    """Raises ConfigError for a cluster along other indices than a tile's rows and columns."""
    m, n = (index.name for index in places.indices)
    other = next((name for name in mapping.cluster if name not in (m, n)), None)
    if other is not None:
        raise ConfigError(f"Mapping(cluster={{{other!r}: {mapping.cluster[other]}}}): blocks share operands along a tile's "
                          f"rows and columns, {m} and {n}")
    return Cluster(mapping.cluster.get(m, 1), mapping.cluster.get(n, 1))


def said(memory: Allocation, mapping: Mapping) -> Mapping:
    """The mapping with all that was left open said: it derives the same text."""
    stages = {ring.rounds.tiles[0].name: ring.stages for ring in memory.rings}
    same = len(set(stages.values())) == 1
    return replace(mapping, blocks=memory.blocks, stages=memory.rings[0].stages if same else stages,
                   kernel=memory.kernel.said)


def _length(index: Index, blocks: dict[str, int]) -> int:
    return blocks[index.name]


def out_bytes(places: Places, mapping: Mapping, dtype: np.dtype, kernel: Kernel) -> int:
    """Of a tile of a result in shared memory."""
    blocks = sized(places, mapping, kernel)
    m, n = places.indices
    return blocks[m.name] * blocks[n.name] * int(dtype.itemsize)
