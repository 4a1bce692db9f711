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
from collections.abc import Container, Sequence
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, replace
from itertools import combinations
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.components import Component, number
from gemmkit.plans.launch import Launch, Put, Start
from gemmkit.programs.called import Callees
from gemmkit.programs.collectives import ROWS
from gemmkit.programs.mapping import MOST_BAND, KernelLimits, Mapping
from gemmkit.programs.places import STEP, Places, walked
from gemmkit.programs.trace import StoreStatement
from gemmkit.programs.values import Index, ProgramAxis, refused
from gemmkit.runtime.array_info import ArrayInfo, shares_memory, unit_axis
from gemmkit.runtime.arrays import is_array
from gemmkit.runtime.launch import PLACES, Space, addresses
from gemmkit.runtime.tensor_maps import Encoder, why_not

if TYPE_CHECKING:
    from gemmkit.programs.plan import ProgramPlan


# --------------------------------------------------------------------------------------------------
# Text becomes a module: its kernel, its sizes and its tiles are what they are called in it.

@dataclass(frozen=True)
class Printed:
    """The text; its kernel's arguments behind the sizes: tensor maps, each of a staged block and of the array that the
    block is of, or operands that threads copy, results, arrays that threads read, functions that they call."""

    text: str
    maps: tuple[tuple[str, str], ...]
    outs: tuple[str, ...]
    arrays: tuple[str, ...]
    sizes: tuple[str, ...]
    tile: tuple[str, ...]              # those of the sizes that tiles go along
    scalars: tuple[str, ...]
    threads: int
    operands: tuple[str, ...] = ()
    callees: Callees = Callees()
    updated: tuple[str, ...] = ()      # results that threads read first


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
        usual = max(STEP, room // len(places.starts) // STEP * STEP)
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
# What the arrays of a launch have to be.

RESULTS = frozenset(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32)))
Sizes = dict[ProgramAxis, int]         # how long the axes are that a program's indices go along


class NotByTma(ValueError):
    """TMA cannot bring an operand, which is a ``refusal`` unless threads can (`gemmkit.programs.plan.planned`)."""

    def __init__(self, refusal: ValueError):
        super().__init__(*refusal.args)
        self.refusal = refusal


def check_launch(infos: dict[str, ArrayInfo], sizes: Sizes, operands: dict[str, str], tile: tuple[Index, ...],
                  rounds: list[Index], lines: dict[str, str], stores: list[StoreStatement],
                  kernel: KernelLimits | None = None) -> None:
    """Raises ValueError where a kernel cannot bring an operand, a sum goes over nothing, or results share memory."""
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
    results = [store.parameter.name for store in stores]
    twice = next((name for name in results if results.count(name) > 1), None)
    if twice is not None:
        raise refused(ValueError, f"{twice} is stored twice; store each result once", stores[-1].line)
    for store in stores:
        info = infos[store.parameter.name]
        if info.readonly:
            raise refused(ValueError, f"{store.parameter.name} is a result, but it is read-only", store.line)
        if info.dtype not in RESULTS:
            raise refused(TypeError, f"{store.parameter.name} has dtype {info.dtype}; a result must be float16, bfloat16 or "
                                     "float32", store.line)
    for (one, x), (other, y) in combinations(infos.items(), 2):
        if (one in results or other in results) and shares_memory(x, y):
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
