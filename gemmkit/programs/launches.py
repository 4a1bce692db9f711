"""How the kernels of a plan are launched: one after the other in one stream, with what a call brings among their values.

A call brings the addresses of the arrays that the caller gives (`ProgramPlan.given`), where the memory begins in which one
kernel leaves its cells for the next (`gemmkit.programs.launches`; 0 without any), its numbers, and what the functions have
captured that it calls (`gemmkit.programs.called`). All of a plan's arrays of that memory follow from this one address, so
that a call looks up as many addresses as it has arrays.

Launches are described here: a plan's run binds them, and the tuner makes of them what its process launches.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.components import Component, number
from gemmkit.kernels.collectives.pipeline import SharedMemory
from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.lang.errors import ConfigError
from gemmkit.plans.launch import Launch, Put, Start
from gemmkit.programs.collectives import BY_TMA, PATTERN, ROWS
from gemmkit.programs.mapping import MOST_BAND, REGISTERS, SHARED, KernelLimits, Mapping
from gemmkit.programs.places import LEAST_STAGES, Allocation, Out, Places, Ring, simplified, walked
from gemmkit.programs.text import BEFORE, OWN_STARTS, ElementFunction, function_of
from gemmkit.programs.trace import Loop, StoreStatement, Value
from gemmkit.programs.values import Index, ProgramAxis, refused
from gemmkit.runtime.array_info import ArrayInfo, overlaps_itself, shares_memory, unit_axis
from gemmkit.runtime.arrays import is_array
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launch import PLACES, Space, addresses
from gemmkit.runtime.tensor_maps import Encoder, why_not
from gemmkit.tuning.problems import Choice, MappingProblem

if TYPE_CHECKING:
    from gemmkit.programs.plan import ProgramPlan


# --------------------------------------------------------------------------------------------------
# Text becomes a module: its kernel, its sizes and its tiles are what they are called in it.

NEEDED = "kernel", "Sizes", "WARPGROUPS", "SHARED_BYTES", "tiles"
ROWS_NEEDED = "kernel", "Sizes", "ROWS", "SHARED_BYTES", "tiles"         # of a function of rows


@functools.lru_cache(maxsize=256)
def module_of(name: str, text: str, needed: tuple[str, ...] = NEEDED) -> ModuleType:
    """The module of a text, whose lines errors and debuggers find. Raises ValueError for a text that is no kernel's."""
    key = f"gemmkit_program_{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    file = f"<{key}>"
    try:
        code = compile(text, file, "exec")
    except SyntaxError as error:
        raise ValueError(f"text: line {error.lineno} is not valid Python: {error.msg}") from error
    module = ModuleType(key)
    module.__file__ = file
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[key] = module                          # dataclasses look their module up
    exec(code, vars(module))
    missing = next((name for name in needed if not hasattr(module, name)), None)
    if missing is not None:
        raise ValueError(f"text: it has no {missing}; a derived kernel's text has {', '.join(needed)}")
    return module


# --------------------------------------------------------------------------------------------------
# Arrays of a program's own, in memory of the stream's: what its first kernel leaves for the second.
#
# They are described by places from `BEGIN` on, which no array has (`gemmkit.runtime.launch`), and have addresses with a
# launch; in the emulator they are NumPy arrays of NaNs.

ROLE, COUNTS = "sums", "counts"        # of which a plan has one: numbers between kernels, or counters that stay at 0
BEGIN = PLACES[ROLE]
F32 = np.dtype(np.float32)


def spare(first: int, shape: tuple[int, ...]) -> ArrayInfo:
    """An array of float32, ``first`` bytes from the beginning.

    >>> spare(256, (4, 2)).strides
    (2, 1)
    """
    strides = tuple(math.prod(shape[n + 1:]) for n in range(len(shape)))
    return ArrayInfo(BEGIN + first, shape, strides, F32, -1, False, "workspace")


def stream_memory(ordinal: int, stream: int, nbytes: int, role: str = ROLE) -> int:
    """Where a stream has memory for so many bytes of such arrays."""
    (begin,) = addresses(ordinal, stream, [Space(0, role, nbytes)])
    return begin


def started(starts: Sequence[Start], spare: int, place: int, ordinal: int, role: str = ROLE) -> Start:
    """Starts one after the other, with ``spare`` bytes of the stream's memory, whose address stands at a ``place`` of what a
    call brings."""
    if len(starts) == 1 and not spare:
        return starts[0]

    def start(stream: int, values: tuple[Any, ...]) -> None:
        if spare:
            values = *values[:place], stream_memory(ordinal, stream, spare, role), *values[place + 1:]
        for one in starts:
            one(stream, values)

    return start


def host_arrays(infos: dict[str, ArrayInfo]) -> dict[str, np.ndarray]:
    """NumPy arrays in one memory, as they lie on the GPU."""
    memory = np.full(spare_bytes(list(infos.values())) // F32.itemsize, np.nan, F32)
    return {name: np.zeros(info.shape, info.dtype) if info.dtype != F32 else
            np.lib.stride_tricks.as_strided(memory[_first(info) // F32.itemsize:], info.shape,
                                            [F32.itemsize * stride for stride in info.strides])
            for name, info in infos.items()}


def _first(info: ArrayInfo) -> int:
    """Where an array begins in its memory."""
    return (info.pointer - BEGIN) % (PLACES[COUNTS] - BEGIN)


def spare_bytes(infos: list[ArrayInfo]) -> int:
    """From the beginning to the last array's end."""
    return max((_first(info) + F32.itemsize * math.prod(info.shape) for info in infos), default=0)


LARGEST = float(np.finfo(np.float32).max)
FLOATS = float, np.floating                    # arguments that a program's kernel has as run-time numbers


class CallArguments(NamedTuple):
    """A call's arguments that are no arrays: numbers, which a launch brings, and components, which a text is made of. A text
    also depends on which numbers are positive."""

    numbers: dict[str, float]
    components: dict[str, Any]

    def again(self, arguments: MappingABC[str, Any]) -> dict[str, float]:
        """The numbers of another call with this one's text. Raises ValueError and TypeError where it needs another one."""
        for name, x in self.components.items():
            other = arguments.get(name, x)
            if isinstance(x, Component) and isinstance(other, Component):
                continue                               # which is called: `ProgramPlan.called_with` looks at it
            if other is not x and not (isinstance(x, CONSTANTS) and isinstance(other, CONSTANTS) and other == x):
                raise ValueError(f"{name} is {other}, but the plan was made for {x}, which is part of its text; make "
                                 "another plan")
        numbers = {name: number_of(name, arguments.get(name, x)) for name, x in self.numbers.items()}
        for name, x in self.numbers.items():
            if x > 0 and not numbers[name] > 0:
                raise ValueError(f"{name} is {numbers[name]}, but the plan was made for a positive number ({x}), which its "
                                 "text depends on; make another plan")
        return numbers


CONSTANTS = bool, int, str, *FLOATS, np.integer, np.bool_


def given_by(arguments: MappingABC[str, Any], arrays: Container[str] | None = None) -> CallArguments:
    """``arrays``: the names of those that are arrays, where they are known. Raises ValueError for a number that is no
    float32."""
    others = {name: x for name, x in arguments.items() if not (is_array(x) if arrays is None else name in arrays)}
    numbers = {name: number_of(name, x) for name, x in others.items() if isinstance(x, FLOATS)}
    return CallArguments(numbers, {name: x for name, x in others.items() if name not in numbers})


def number_of(name: str, x: Any) -> float:
    """Raises TypeError for what is no number, ValueError for one that is finite and no float32 is."""
    if not isinstance(x, (int, np.integer, *FLOATS)) or isinstance(x, bool):
        raise TypeError(f"{name}={x!r}: a number is needed")
    found = float(x)
    if LARGEST < abs(found) < math.inf:
        raise ValueError(f"{name}={x!r}: numbers of a kernel are float32, up to {LARGEST:.3g}")
    return found


class Launches(NamedTuple):
    """``spare``: bytes of the memory between kernels, or of counters (``role``), 0 without any."""

    spare: int
    kernels: tuple[Launch, ...]
    role: str = ROLE


def launches_of(plans: tuple[ProgramPlan, ...]) -> Launches:
    """Of kernels in the order in which they run."""
    own = [plan.infos[name] for plan in plans for name in plan.spare]
    which = {name: n for n, name in enumerate(plans[0].given)}
    numbers = {name: n for n, name in enumerate(plans[0].call.numbers, len(which) + 1)}
    held = plans[0].callees.puts(len(which) + 1 + len(numbers))
    role = COUNTS if any(info.dtype != F32 for info in own) else ROLE
    return Launches(spare_bytes(own), tuple(_of_kernel(plan, which, numbers, held) for plan in plans), role)


def _of_kernel(plan: ProgramPlan, which: MappingABC[str, int], numbers: MappingABC[str, int],
               held: MappingABC[str, list[tuple[int, int, bool]]]) -> Launch:
    """``which``, ``numbers``: where a call brings arrays and numbers; ``held``: what called functions have (`Callees`)."""
    kernel, infos = plan.launchable, plan.infos
    puts = [Put(slot, numbers[name], 0, number) for slot, name in enumerate(plan.printed.scalars, len(plan.printed.sizes))]
    slots, taken = kernel.slots, (plan.like or plan).taken
    for (name, tensor_map), slot in zip(taken, slots[1:]):
        if slot is not None:
            encoder = None if tensor_map is None else Encoder.of(tensor_map.spec, infos[name], tensor_map.axis)
            puts.append(Put(slot, which[name], 0, encoder) if name in which else
                        Put(slot, len(which), _first(infos[name]), encoder))
    for callee, slot in zip(plan.printed.callees.all, slots[1 + len(taken):]):
        if slot is not None:
            puts += [Put(slot + own, brought, 0, None if is_address else number)
                     for own, brought, is_address in held[callee.name]]
    return Launch(kernel, puts)


# --------------------------------------------------------------------------------------------------
# What a mapping leaves open of the grid of tiles of rows and columns: how large tiles are, and in which order they come.
# Both follow from how many multiprocessors there are for how many tiles.
#
# | left open | chosen |
# |---|---|
# | warpgroups | 2; of multistage kernels 1 with twice 64 rows, so that what warps load of B serves both halves |
# | columns of a tile | those with which waves of tiles take the least time, ``waves * (columns + 64)`` |
# | band | as many tile rows as make what a wave reads of both operands alike, and so least |
#
# A tile takes time by its columns, and some for its beginning and end, as much as 64 columns take. 132 multiprocessors
# take 4096 x 4096 in four waves of 128 x 256, and 1024 x 1024 in one of 128 x 64 (0.49 of the time of 128 x 256, H100).
# In bands a product of 4096 x 14336 x 4096 takes 0.78 of the time, and a dual one of 8192 0.69: operands are read from
# the L2.

BEGINNING, WARPGROUPS = 64, 2
STEP = 64                              # of a tile's columns


def laid_out(places: Places, mapping: Mapping, kernel: KernelLimits, processors: int) -> Mapping:
    """The mapping with its warpgroups, its tiles' columns and rows, and its band."""
    m, n = places.indices
    found, warpgroups = dict(mapping.blocks), mapping.warpgroups
    if not warpgroups and m.name not in found and kernel.parts == 2 and _may_double(places, kernel):
        warpgroups, found[m.name] = 1, 2 * ROWS
    warpgroups = warpgroups or WARPGROUPS
    own = ROWS * warpgroups
    height = max(1, found.get(m.name, own))
    width, down = places.sizes[n.extent], places.down(height)
    if n.name not in found:
        room = kernel.usual_sums[warpgroups] if height <= own else kernel.most_sums[warpgroups] * own // height
        usual = max(STEP, room // places.accumulators(kernel) // STEP * STEP)
        widest = min(usual, max(STEP, -(-width // STEP) * STEP))

        def time(columns: int) -> int:
            tiles = down * max(1, -(-width // columns))
            return -(-tiles // processors) * (columns + BEGINNING)

        found[n.name] = min(range(widest, 0, -STEP), key=time)
    band = mapping.band or _band(places, height, max(1, found[n.name]), processors)
    return replace(mapping, blocks=found, warpgroups=warpgroups, band=band)


def _may_double(places: Places, kernel: KernelLimits) -> bool:
    """Whether there is room for the sums of twice the rows, and nothing takes registers beside them: sums of rows and
    columns, matrices that a tile's end reads."""
    if kernel.most_sums[1] // 2 // len(places.starts) < STEP:
        return False
    read = walked([store.value for store in places.stores])
    return not (places.row_starts or places.column_starts or any(x.op == "load" and len(x.dims) == 2 for x in read))


def _band(places: Places, height: int, columns: int, processors: int) -> int:
    """Tile rows of a wave of tiles that reads the least: as many bytes of A as of B."""
    m, n = places.indices
    taken = [tile for rounds in places.loops for tile in rounds.tiles]
    of_a, of_b = (max(1, sum(index in tile.dims for tile in taken)) for index in (m, n))
    return max(1, min(MOST_BAND, round(math.sqrt(processors * columns * of_b / (height * of_a)))))


# --------------------------------------------------------------------------------------------------
# Where everything lies in shared memory: stages of the rings, results on their way out, barriers; and how many stages.

MOST = 4                               # stages where the mapping does not say how many
COLUMN_BYTES = 4                       # of a column's value in shared memory


def sized(places: Places, mapping: Mapping, kernel: KernelLimits) -> dict[str, int]:
    """The length of every index's blocks: the mapping's, or defaults.

    Raises ConfigError for names that the program has not, and for lengths that no product has.
    """
    m, n = places.indices
    names = [index.name for index in (m, n, *(rounds.index for rounds in places.loops))]
    other = next((name for name in mapping.blocks if name not in names), None)
    if other is not None:
        raise ConfigError(f"Mapping(blocks={{{other!r}: {mapping.blocks[other]}}}): the program's indices are "
                          f"{', '.join(dict.fromkeys(names))}")
    rows = ROWS * mapping.warpgroups
    parts = 2 if kernel.parts == 2 and mapping.blocks.get(m.name) == 2 * rows else 1
    if parts == 2 and (places.row_starts or places.column_starts):
        raise ConfigError(f"Mapping(blocks={{{m.name!r}: {2 * rows}}}, warpgroups={mapping.warpgroups}): where rounds add "
                          f"up rows or columns, a warpgroup has {ROWS} rows; use {rows} rows along {m.name}")
    most = kernel.most_sums[mapping.warpgroups] // parts // places.accumulators(kernel) // 64 * 64
    if most == 0:
        raise ConfigError(f"{places.accumulators(kernel)} accumulators do not fit in the registers of {mapping.warpgroups} "
                          f"warpgroups; at most {kernel.most_sums[1] // 64} do")
    blocks = {m.name: rows, n.name: 64, **{r.index.name: 2 * kernel.depth // r.size for r in places.loops}}
    blocks.update(mapping.blocks)
    if blocks[m.name] != parts * rows:
        more = "" if kernel.parts == 1 else f", or {2 * rows}"
        raise ConfigError(f"Mapping(blocks={{{m.name!r}: {blocks[m.name]}}}, warpgroups={mapping.warpgroups}): a warpgroup "
                          f"has {ROWS} rows, so {rows} are needed{more}")
    steps = {rounds.index.name: {4: kernel.depths // 2, 2: kernel.depths, 1: STEP}[rounds.size] for rounds in places.loops}
    for name, whole in {n.name: STEP, **steps}.items():
        if blocks[name] % whole or blocks[name] > 256:
            raise ConfigError(f"Mapping(blocks={{{name!r}: {blocks[name]}}}): " + (
                "64, 128, 192 or 256 is needed" if whole == STEP else f"a multiple of {whole} up to 256 is needed"))
    if blocks[n.name] > max(64, most):
        raise ConfigError(f"Mapping(blocks={{{n.name!r}: {blocks[n.name]}}}, warpgroups={mapping.warpgroups}): with "
                          f"{places.accumulators(kernel)} accumulators, {most} columns fit in registers")
    return blocks


def allocated(places: Places, mapping: Mapping, outs: dict[str, int], device: DeviceInfo,
              kernel: KernelLimits) -> Allocation:
    """``outs``: the bytes that results need on their way out. Raises ConfigError for what does not fit."""
    blocks = sized(places, mapping, kernel)
    sizes = [[tile.dtype.itemsize * _length(tile.dims[0], blocks) * _length(tile.dims[1], blocks) for tile in rounds.tiles]
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
        raise ConfigError(f"{', '.join(map(str, stages))} stages of {sum(stage_bytes)} bytes and results of "
                          f"{sum(outs.values()) + of_columns} need {memory.nbytes} bytes of shared memory, but only {bound} "
                          "are available; use fewer stages or smaller blocks")
    return Allocation(blocks, tuple(rings), places_out, memory.nbytes, clustered(places, mapping), columns,
                      max(1, -(-mapping.band // mapping.cluster.get(places.indices[0].name, 1))), kernel, one_ring)


def _is_one_ring(places: Places, given: list[int], kernel: KernelLimits) -> bool:
    """Whether all loops go around one ring: then each has all of the stages. Those of a multistage kernel begin to fill
    theirs while the loop before is still read."""
    kinds = {(bool(rounds.row_sums), bool(rounds.column_sums)) for rounds in places.loops}
    return len(places.loops) == 1 or (kernel.uses_tma and len(set(given)) == 1 and len(kinds) == 1)


def clustered(places: Places, mapping: Mapping) -> Cluster:
    """Raises ConfigError for a cluster along other indices than a tile's rows and columns."""
    m, n = (index.name for index in places.indices)
    if places.looks_up and math.prod(mapping.cluster.values()) > 1:
        raise ConfigError(f"Mapping(cluster={dict(mapping.cluster)!r}): threads copy rows that an array names to their own "
                          "block alone; leave cluster out")
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


def out_bytes(places: Places, mapping: Mapping, dtype: np.dtype, kernel: KernelLimits) -> int:
    """Of a tile of a result in shared memory."""
    blocks = sized(places, mapping, kernel)
    m, n = places.indices
    return blocks[m.name] * blocks[n.name] * int(dtype.itemsize)


# --------------------------------------------------------------------------------------------------
# What the arrays of a launch have to be.

RESULTS = frozenset(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32)))
ROW_RESULTS = RESULTS | {np.dtype(np.float64)}         # and elements of functions of rows
Sizes = dict[ProgramAxis, int]         # how long the axes are that a program's indices go along


class NotByTma(ValueError):
    """TMA cannot bring an operand, which is a ``refusal`` unless threads can (`gemmkit.programs.plan.planned`)."""

    def __init__(self, refusal: ValueError):
        super().__init__(*refusal.args)
        self.refusal = refusal


def check_launch(infos: dict[str, ArrayInfo], sizes: Sizes, operands: dict[str, str], tile: tuple[Index, ...],
                  rounds: list[Index], lines: dict[str, str], stores: list[StoreStatement],
                  kernel: KernelLimits | None = None, integers: Container[str] = (),
                  results: Container[np.dtype] = RESULTS) -> None:
    """``integers``: results that may be int32; ``results``: what others may be. Raises ValueError where a kernel cannot
    bring an operand, a sum goes over nothing, or results share memory with others or within themselves."""
    for index in rounds:
        if sizes[index.extent] == 0:
            raise refused(ValueError, f"{index} is a block of {index.extent}; a kernel sums over at least one element",
                          lines[index.name])
    if 0 not in (sizes[index.extent] for index in tile):
        for name, line in operands.items():
            reason = None if kernel is None else kernel.why_not(infos[name])
            if kernel is not None and reason is not None:
                refusal = refused(ValueError, f"{name} is an operand of a product, and {reason}", line)
                raise NotByTma(refusal) if kernel.uses_tma else refusal
    stored = [store.parameter.name for store in stores]
    twice = next((name for name in stored if stored.count(name) > 1), None)
    if twice is not None:
        raise refused(ValueError, f"{twice} is stored twice; store each result once", stores[-1].line)
    for store in stores:
        info = infos[store.parameter.name]
        if info.readonly:
            raise refused(ValueError, f"{store.parameter.name} is a result, but it is read-only", store.line)
        if overlaps_itself(info):
            raise refused(ValueError, f"{store.parameter.name} is a result with strides {info.strides}: several of its "
                                      "elements share memory", store.line)
        if info.dtype not in results and not (info.dtype == np.int32 and store.parameter.name in integers):
            raise refused(TypeError, f"{store.parameter.name} has dtype {info.dtype}; a result must be float16, bfloat16 or "
                                     "float32; of a function of rows also float64; or int32, if it is a cell of products of "
                                     "integers as it is", store.line)
    for (one, x), (other, y) in combinations(infos.items(), 2):
        if (one in stored or other in stored) and shares_memory(x, y):
            raise shared(one, other)


def check_read(name: str, info: ArrayInfo, line: str) -> None:
    """Raises TypeError for elements that no float32 can meet."""
    if info.dtype.kind == "c" or info.dtype.names is not None:
        raise refused(TypeError, f"{name} has dtype {info.dtype}; an array "
                                 "that is read where a tile is stored must be real", line)


def leaves_by_tma(info: ArrayInfo) -> bool:
    """TMA clips rows at multiples of 16 bytes alone."""
    return info.dtype.itemsize == 2 and info.shape[-1] * 2 % 16 == 0 and why_not(info, len(info.shape) - 1) is None


def in_pairs(info: ArrayInfo) -> bool:
    """Whether two neighbours of a row are stored at once."""
    size = 2 * info.dtype.itemsize
    return (info.shape[-1] % 2 == 0 and info.strides[-1] == 1 and all(stride % 2 == 0 for stride in info.strides[:-1])
            and info.pointer % size == 0 and unit_axis(info) == len(info.shape) - 1)


def shared(one: str, other: str) -> ValueError:
    return ValueError(f"{one} and {other} share memory, and one of them is a result; a result needs its own memory")


def check_own_names(names: list[str], indices: list[str], own: Container[str]) -> None:
    """Raises ValueError for names that texts have for their ``own``."""
    check_indices(names, indices)
    for name in names:
        is_made = name.startswith(OWN_STARTS) or name.endswith("_tile") or "_by_" in name
        if name in own or is_made or (name == "i" and name not in indices):
            raise taken(name)


def check_indices(names: Iterable[str], indices: list[str]) -> None:
    """Raises ValueError for an index with the name of an array, a number or a cell."""
    others = list(names)
    for name in dict.fromkeys(indices):
        if others.count(name) > indices.count(name):
            raise taken(name)


def taken(name: str) -> ValueError:
    return ValueError(f"{name}: the derived kernel uses this name; rename the array, cell or index")


# --------------------------------------------------------------------------------------------------
# The mapping of tiles of rows and columns, chosen with what is made of it.

@dataclass(frozen=True)
class GridProblem(MappingProblem):
    """A program whose tiles have rows and columns: its mapping, how it lies in memory, and how results leave. Where the
    mapping does not say how wide tiles are, they are as wide as waves of them take the least time; where these do not fit
    in shared memory, they are narrower, or have half of A's rows."""

    loop: Loop
    places: Places
    infos: dict[str, ArrayInfo]
    mapping: Mapping
    kernel: KernelLimits
    known: dict[Mapping, Choice | ConfigError] = field(default_factory=dict)      # what sizes do not decide

    def candidates(self, device: DeviceInfo) -> Iterator[Mapping]:
        m, n = (index.name for index in self.places.indices)
        for given in (self.mapping, replace(self.mapping, warpgroups=1)):
            made = laid_out(self.places, given, self.kernel, device.sm_count)
            yield made
            while n not in given.blocks and made.blocks[n] > STEP:
                made = replace(made, blocks={**made.blocks, n: made.blocks[n] - STEP})
                yield made
            if given.warpgroups or m in given.blocks or made.warpgroups == 1:
                break
        results = [store.parameter.name for store in self.places.stores]
        if self.kernel.uses_tma and not self.mapping.places.keys() & {*results}:       # without memory on their way out
            by_registers = replace(self.mapping, places={**self.mapping.places, **dict.fromkeys(results, REGISTERS)})
            yield from replace(self, mapping=by_registers).candidates(device)

    def specialise(self, mapping: Mapping, device: DeviceInfo) -> Choice:
        """What is made for the first size is every size's. Raises ConfigError where it was raised then."""
        found = self.known.get(mapping)
        if found is None:
            try:
                found = self._specialised(mapping, device)
            except ConfigError as error:
                found = error
            self.known[mapping] = found
        if isinstance(found, ConfigError):
            raise found
        return found

    def _specialised(self, mapping: Mapping, device: DeviceInfo) -> Choice:
        places, stores, outs = self.places, self.places.stores, list[Out]()
        mapping.refuse_orders(places.names, sorted(places.arguments))
        stale = {c.init for held in self.loop.body if isinstance(held, Loop) for c in held.carried if c.init.op == "after"}
        for store, root in zip(stores, simplified([store.value for store in stores])):
            made = _element(store, root, places, mapping.warpgroups)
            if stale & set(made.uses):
                raise refused(ValueError, "an accumulator is read here, but a later loop adds to it; store it after the "
                                          "last loop", store.line)
            info = self.infos[store.parameter.name]
            for array in made.arrays:
                check_read(array, self.infos[array.removeprefix(BEFORE)], store.line)
            m, n = places.indices
            whole = self.kernel.whole_rows if m.piece is None else "PieceOut" if len(stores) == 1 else "OctetOut"
            ways = (whole, "DirectOut") if store.lookup is None else ("ScatteredOctets", "ScatteredPairs")
            if mapping.places.get(store.parameter.name) == REGISTERS and ways[0] in BY_TMA:
                ways = "OctetOut", ways[1]
            kind = {None: ways[not leaves_by_tma(info)], m: "ColumnsOut", n: "RowsOut"}[store.only]
            outs.append(Out(store, info.dtype, kind, kind == ways[1] and in_pairs(info),
                            None if root.op == "after" else made, made.sums[0]))
        check_places(places, mapping, outs)
        nbytes = {out.name: out_bytes(places, mapping, out.dtype, self.kernel) for out in outs if out.kind in BY_TMA}
        return Choice((mapping, allocated(places, mapping, nbytes, device, self.kernel), outs))


def check_places(places: Places, mapping: Mapping, outs: list[Out]) -> None:
    """Raises ConfigError, with the reason, for a place that a cell or an array does not have."""
    operands = {tile.parameter.name for rounds in places.loops for tile in rounds.tiles}
    kinds = {out.name: out.kind for out in outs}
    for name, place in mapping.places.items():
        reason = ""
        if name in places.column_starts:
            reason = "" if place == SHARED else "a thread has no registers for the sums of all its columns"
        elif name in places.names:
            reason = "" if place == REGISTERS else "tensor cores and threads add to it in registers"
        elif name in operands and name not in kinds:
            reason = "" if place == SHARED else "it is an operand, which instructions read in shared memory"
        elif name not in kinds:
            reason = "it is neither a cell, nor an operand, nor a result; threads read it in global memory"
        elif place == SHARED and kinds[name] not in BY_TMA:
            reason = ("it leaves from registers: TMA stores tiles of 16 bits, whose rows are multiples of 16 bytes, of the "
                      "warp-specialised kernel")
        if reason:
            raise ConfigError(f"Mapping(places={{{name!r}: {place!r}}}): {reason}")


def _element(store: StoreStatement, root: Value, places: Places, warpgroups: int) -> ElementFunction:
    """What becomes of the sums of a tile, or of its rows or columns alone."""
    name, (m, n) = f"element_of_{store.parameter.name}", places.indices
    if store.only is n:
        return function_of(name, root, (m,), places.rows, places.stacks)
    if store.only is m:
        return function_of(name, root, (n,), places.columns, places.stacks, place="column",
                           step=128 * warpgroups)
    return function_of(name, root, (m, n), places.cells, places.stacks, rows=places.rows, columns=places.columns,
                       updated=places.updated)


def device_of(infos: dict[str, ArrayInfo]) -> DeviceInfo:
    places = {info.device for info in infos.values()}
    if len(places) != 1:
        raise ValueError(f"{', '.join(infos)} are in different places; put them on one GPU")
    return target(places.pop())
