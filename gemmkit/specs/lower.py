"""From a schedule to its tree of nodes: sizes, levels and memories are checked, places allocated, leaves matched.

Nothing is compiled here. The forms that tensors have on the device are computed on the way down, by the same algebra, so
that an instruction is found, or missed, with the schedule's line.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from gemmkit.components import Component, freeze
from gemmkit.emulator import current_mode
from gemmkit.kernels.collectives.pipeline import CLUSTER as PER_CLUSTER
from gemmkit.kernels.collectives.pipeline import THREAD as PER_THREAD
from gemmkit.kernels.collectives.pipeline import Pipeline
from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.kernels.sm90.family import TensorMapSlot
from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.components import dataclass
from gemmkit.lang.functions import Frozen, Kind, freeze_array, freeze_scalar
from gemmkit.lang.functions import kind as kind_of
from gemmkit.lang.registers import apply
from gemmkit.lang.static import traced
from gemmkit.plans.launch import Launch, Put, launch_of
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import as_stream_handle, current_stream
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.shapes import ALL, Shape, ShapeError, local
from gemmkit.specs import accesses, nodes
from gemmkit.specs import nodes as steps
from gemmkit.specs.accesses import NoAtom, OperandForm, OperandPlace, WalkState, instruction, place_of, ring_stages
from gemmkit.specs.nodes import BLOCK, HOME, KERNEL, LEVELS, CopiedStages, LoopedAhead, RegisterStages, ScheduleError, over
from gemmkit.specs.tensors import (
    FR,
    GL,
    MMA,
    QP,
    QUADPAIR,
    RF,
    SH,
    THREAD,
    WARP,
    WARPGROUP,
    WR,
    Blocks,
    Form,
    Grid,
    GridAxis,
    TensorError,
    Threads,
    on_storage,
)

if TYPE_CHECKING:
    from gemmkit.emulator.launch import Arena
    from gemmkit.specs.schedule import Finished

__all__ = ["ALL", "SpecKernel", "kernel"]


# --------------------------------------------------------------------------------------------------
# Kernels of tensors and specs on arrays: emulated, launched on a GPU, or compiled without one.

class ArrayParameter(NamedTuple):
    """An array argument: what it is called, whether the kernel only reads it, or fills it before it reads it."""

    value: Any
    name: str
    is_readonly: bool = False
    is_filled: bool = False


class Code(NamedTuple):
    """A compiled kernel; ``usage`` has registers, spills and stack."""

    ptx: str
    cubin: bytes
    usage: Any


@dataclasses.dataclass(frozen=True)
class BlockKernel:
    """``function(component, *arrays)`` on blocks of ``threads`` threads, compiled so that at least ``blocks_per_sm`` fit on
    a multiprocessor by their registers."""

    function: Any
    component: Any
    threads: int
    blocks: int
    shared_bytes: int
    blocks_per_sm: int = 1
    takes_one: bool = False                                   # the function takes the arrays as one tuple
    maps: tuple = ()                                          # (which array, `nodes.RingStages` or `Box`) of tensor maps
    scalars: tuple = ()                                       # NumPy's, behind the arrays
    cluster: int = 1

    def run(self, arrays: Sequence[ArrayParameter], stream: object = None) -> None:
        """Emulate NumPy arrays, which needs ``with gemmkit.emulate():``; launch for arrays of one GPU.

        Raises TypeError for NumPy arrays elsewhere, ValueError for arrays in different places.
        """
        infos = [describe(array.value, array.name) for array in arrays]
        places = {info.device for info in infos}
        if len(places) != 1:
            raise ValueError(f"{', '.join(array.name for array in arrays)} are in different places; put them on one GPU")
        if infos[0].device < 0:
            mode = current_mode()
            if mode is None:
                raise TypeError(f"{arrays[0].name} is a host array; emulate its kernel: with gemmkit.emulate(): ...")
            mode.run(Emulated(self, infos, tuple(array.is_readonly for array in arrays)), arrays)
        else:
            self._launch(arrays, infos, stream)

    def launchable(self, readonly: Sequence[bool], infos: Sequence[ArrayInfo], target: Any, ordinal: int = 0) -> Launchable:
        """The kernel with its arguments, to be compiled and launched."""
        frozen = [freeze_array(info, readonly=only) for info, only in zip(infos, readonly)]
        frozen += [freeze_scalar(x) for x in self.scalars]
        frozen += [slot.frozen for slot in self.map_slots(infos)]
        given = [in_one(frozen)] if self.takes_one else frozen
        return Launchable(self.function, [freeze(self.component), *given], self.threads, self.blocks, target, ordinal,
                          self.shared_bytes, self.cluster, blocks_per_sm=self.blocks_per_sm)

    def map_slots(self, infos: Sequence[ArrayInfo]) -> list[Any]:
        """Its tensor maps, of arrays like these."""
        return [TensorMapSlot(which, n, infos[which], stages.axis, stages.map_spec)
                for n, (which, stages) in enumerate(self.maps)]

    def compile(self, readonly: Sequence[bool], infos: Sequence[ArrayInfo]) -> Code:
        """PTX and machine code for an H100, without a GPU."""
        from gemmkit.runtime.compile import assemble, to_ptx

        made = self.launchable(readonly, infos, device.H100)
        ptx = to_ptx(self.function, tuple(x.type for x in made.arguments), self.threads, device.H100,
                     self.blocks_per_sm)
        assembled = assemble(ptx, device.H100.arch_name)
        return Code(ptx, assembled.cubin, assembled.usage)

    def _launch(self, arrays: Sequence[ArrayParameter], infos: Sequence[ArrayInfo], stream: object) -> None:
        ordinal = infos[0].device
        readonly = tuple(array.is_readonly for array in arrays)

        def made(_current: object) -> Launch:
            with device.made_current(ordinal):
                kernel = self.launchable(readonly, infos, device.current(), ordinal)
            counts = [len(freeze_array(info).leaves) for info in infos]
            first: Any = kernel.slot(1)
            maps = self.map_slots(infos)
            places = range(len(kernel.values) - len(maps), len(kernel.values))
            return Launch(kernel, [*(Put(slot, n) for n, slot in enumerate(accumulate(counts[:-1], initial=first))),
                                   *(Put(slot, one.which, encoder=one.encoder) for slot, one in zip(places, maps))])

        key = self, ordinal, readonly, tuple((info.shape, info.strides, info.dtype, alignment(info)) for info in infos)
        where = current_stream(infos[0].library, ordinal, infos[0].stream) if stream is None else as_stream_handle(stream)
        launch_of(key, made, self.function.__qualname__).start(where, tuple(info.pointer for info in infos))


class Emulated(NamedTuple):
    """A call on NumPy arrays (`gemmkit.emulator`)."""

    kernel: BlockKernel
    infos: Sequence[ArrayInfo]
    readonly: tuple[bool, ...]

    @property
    def spec(self) -> Any:
        return self.kernel.component

    @property
    def launchable(self) -> Launchable:
        return self.kernel.launchable(self.readonly, self.infos, device.target())

    def filled(self, arrays: Sequence[ArrayParameter]) -> list[Any]:
        return [array.value for array in arrays if array.is_filled]

    def emulated(self, arrays: Sequence[ArrayParameter], arena: Arena) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = [arena.view(x.value, x.name, unit_axis(info), alignment(info), readonly=x.is_readonly,
                            written=not x.is_filled) for x, info in zip(arrays, self.infos)]
        maps = [arena.map(slot, views[slot.which]) for slot in self.kernel.map_slots(self.infos)]
        given = (*views, *self.kernel.scalars, *maps)
        yield self.launchable, (self.spec, given) if self.kernel.takes_one else (self.spec, *given)


def in_one(arrays: Sequence[Frozen]) -> Frozen:
    """Arrays as one argument, a tuple."""
    text = ", ".join(str(array.kind) for array in arrays)
    make = lambda: nb.types.BaseTuple.from_types([array.type for array in arrays])  # noqa: E731
    made = kind_of(("tuple", text), lambda: Kind(f"({text})", make))
    return Frozen(made, str(made), [leaf for array in arrays for leaf in array.leaves],
                  [info for array in arrays for info in array.arrays])


def example(shape: Sequence[int], dtype: np.dtype, order: str = "row") -> ArrayInfo:
    """An array that is not there, the last dimension ("row") or the first fastest: what is compiled for without arrays."""
    ahead = [math.prod(shape[n + 1:] if order == "row" else shape[:n]) for n in range(len(shape))]
    return ArrayInfo(2**20, tuple(shape), tuple(ahead), np.dtype(dtype), 0, False, "cupy")


# --------------------------------------------------------------------------------------------------
# Kernels in Graphene's way: a function of blocks, threads and tensors (Fig. 8).
#
# >>> from gemmkit import specs
# >>> from gemmkit.specs import T
# >>> @specs.kernel(grid=(2, 2), block=(4, 4))
# ... def product(blocks, threads, A: T[8, 8].fp32.GL, B: T[8, 8].fp32.GL, C: T[8, 8].fp32.GL):
# ...     i, j = blocks.indices()
# ...     m, n = threads.indices()
# ...     a, b = A.tile(4, ALL)[i, 0], B.tile(ALL, 4)[0, j]
# ...     c = C.tile(4, 4)[i, j][m, n]
# ...     specs.Init(threads.scalar(), c)
# ...     for k in range(8):
# ...         specs.MatMul(threads.scalar(), a[m, k], b[k, n], c)      # [].fp32.GL, [].fp32.GL -> [].fp32.GL: fmaf
# >>> import gemmkit, numpy as np
# >>> x, out = np.eye(8, dtype=np.float32), np.zeros((8, 8), np.float32)
# >>> with gemmkit.emulate():
# ...     product(x, x * 3, out)
# >>> float(out.sum())
# 24.0
#
# What a parameter is annotated with is its tensor's type. The body is device code: compiled for a GPU, Python in the
# emulator.

@dataclass(frozen=True)
class Decomposition(Component):
    """What the kernel is specialised by: the function, with the shapes that it is given. ``along`` has, for each dimension
    of a grid that is known at run time, (array, axis, step), or (count, 0, 0)."""

    without_value: ClassVar[tuple[str, ...]] = ("function",)
    function: Any
    blocks: Any
    along: tuple
    threads: Threads
    forms: tuple


def decomposed(spec: Any, arrays: tuple) -> None:
    """A kernel whose grid is known."""
    spec.function(spec.blocks, spec.threads, *tensors_on(arrays, spec.forms))


def decomposed_at_run_time(spec: Any, arrays: tuple) -> None:
    spec.function(grid_of(arrays[0], apply(_count, spec.along[1:], arrays)), spec.threads, *tensors_on(arrays, spec.forms))


def _count(along: tuple, n: int, arrays: tuple) -> int:
    which, axis, step = along
    return over(arrays[which].shape[axis], step) if step > 0 else which


@traced
def grid_of(storage: Any, counts: tuple) -> Grid:
    return Grid(storage, counts)


@traced
def tensors_on(arrays: tuple, forms: tuple) -> tuple:
    return tuple(map(on_storage, arrays, forms))


#: Of an extent along which a kernel loops what is known is that this many, or a part of them, divide it.
DIVISOR = 256
MOST_BLOCKS = 2**31 - 1


class SpecKernel:
    """A decorated function; called with arrays, it runs."""

    def __init__(self, function: Any, grid: tuple, block: tuple, shared_bytes: int):
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self._function, self._threads, self._shared_bytes = function, Threads((Shape(block),)), shared_bytes
        notes = inspect.get_annotations(function, eval_str=True)
        self.names = tuple(inspect.signature(function).parameters)[2:]            # behind blocks and threads
        self.grid = tuple(GridAxis(x, 1) if isinstance(x, str) else x for x in grid)
        steps = {x.name: x.step for x in self.grid if isinstance(x, GridAxis)}
        self.forms: tuple[Any, ...] = tuple(self._form(name, notes.get(name), steps) for name in self.names)
        if not self.forms:
            raise TensorError(f"{self.__name__}: give at least one tensor, for example A: T[64, 64].fp16.GL")
        known = {of.name for form in self.forms for of in form.names if of is not None}
        for x in self.grid:
            if isinstance(x, GridAxis) and (x.name not in known or x.step != steps[x.name]):
                why = f"goes along it in steps of {steps[x.name]} too" if x.name in known else (
                    f"no tensor has an extent of that name (they have {', '.join(sorted(known)) or 'none'})")
                raise TensorError(f"{self.__name__}: grid={grid}: {x.name}: {why}")
        boxed = [n for n, form in enumerate(self.forms) if form.box]
        self._maps = tuple((n, self.forms[n].box._replace(number=i)) for i, n in enumerate(boxed))
        self.forms = tuple(form.replaced(box=dict(self._maps).get(n)) for n, form in enumerate(self.forms))
        self._kernels: dict[tuple, Any] = {}

    def _form(self, parameter: str, form: Any, steps: dict[str, int]) -> Form:
        if not isinstance(form, Form) or form.memory != GL:
            raise TensorError(f"{self.__name__}({parameter}): annotate each tensor with its type, for example "
                              "T[64, 64].fp16.GL")
        unnamed = any(extent is None and not (form.names and form.names[n]) for n, extent in enumerate(form.extents))
        if unnamed:
            raise TensorError(f"{self.__name__}({parameter}): {form} has an extent that is known at run time and has no "
                              'name; write it, T["M", 64], and let the grid go along it: grid=(cdiv("M", 64),)')
        return form.replaced(names=tuple(of and of._replace(step=steps.get(of.name)) for of in form.names))

    def __call__(self, *arrays: object, stream: object = None) -> None:
        """Run it on arrays, in the order of the tensors. Raises ValueError and TypeError for arrays that are not of their
        types, or whose extents of one name differ, before anything is compiled."""
        if len(arrays) != len(self.forms):
            raise TypeError(f"{self.__name__} takes {len(self.forms)} arrays, not {len(arrays)}")
        sizes: dict[str, tuple[int, str]] = {}
        infos = [describe(array, name) for array, name in zip(arrays, self.names)]
        for name, form, info in zip(self.names, self.forms, infos):
            if len(info.shape) != form.rank or any(e not in (None, size) for e, size in zip(form.extents, info.shape)):
                raise ValueError(f"{name} has shape {info.shape}, and its type is {form}")
            if info.dtype != form.dtype:
                raise TypeError(f"{name} has dtype {info.dtype}, and its type is {form}")
            for of, size in zip(form.names, info.shape):
                if of is not None and sizes.setdefault(of.name, (size, name))[0] != size:
                    raise ValueError(f"{name} has shape {info.shape}, and {of.name} is {sizes[of.name][0]} in "
                                     f"{sizes[of.name][1]}; extents of one name must be equal")
                if size >= 2**31:
                    raise ValueError(f"{name} has shape {info.shape}; extents that are known at run time are below 2**31")
        kernel = self._kernel({name: size for name, (size, _) in sizes.items()})
        if kernel.blocks:                                     # no block has nothing to do
            self._check_maps(infos)
            kernel.run([ArrayParameter(array, name) for array, name in zip(arrays, self.names)], stream)

    def _check_maps(self, infos: Sequence[ArrayInfo]) -> None:
        for which, box in self._maps:
            target = device.target(infos[which].device)
            reason = f"{target.name} has no TMA" if target.arch[0] < 9 else why_not(infos[which], box.axis)
            if reason is not None:
                raise ValueError(f"{self.names[which]}: TMA copies its boxes, and cannot: {reason}; move it otherwise")

    def _kernel(self, sizes: dict[str, int]) -> BlockKernel:
        """The kernel for these sizes, and all that have as much in common with the tiles' steps."""
        counts = tuple(-(-sizes[x.name] // x.step) if isinstance(x, GridAxis) else x for x in self.grid)
        if (blocks := math.prod(counts)) > MOST_BLOCKS:
            raise ValueError(f"{self.__name__}: {' x '.join(map(str, counts))} blocks are needed; a grid has {MOST_BLOCKS} "
                             "at most")
        divisors = {of.name: math.gcd(sizes[of.name], of.step or DIVISOR) for form in self.forms for of in form.names if of}
        forms = tuple(form.replaced(names=tuple(of and of._replace(divisor=divisors[of.name]) for of in form.names))
                      for form in self.forms)
        if forms not in self._kernels:
            at_run_time = any(isinstance(x, GridAxis) for x in self.grid)
            own, along = (None, tuple(map(self._along, self.grid))) if at_run_time else (Blocks((Shape(self.grid),)), ())
            made = Decomposition(self._function, own, along, self._threads, forms)
            self._kernels[forms] = BlockKernel(decomposed_at_run_time if at_run_time else decomposed, made,
                                               self._threads.size, 0, self._shared_bytes, takes_one=True, maps=self._maps)
        return dataclasses.replace(self._kernels[forms], blocks=blocks)

    def _along(self, dimension: Any) -> tuple[int, int, int]:
        if not isinstance(dimension, GridAxis):
            return dimension, 0, 0
        return *next((n, axis) for n, form in enumerate(self.forms) for axis, of in enumerate(form.names)
                     if of is not None and of.name == dimension.name), dimension.step

    def compile(self, *orders: str, **sizes: int) -> Code:
        """PTX and machine code for an H100, without a GPU; each array is row-major (column-major if lines of its boxes are
        columns), or as ``orders`` ("row", "col") say, and extents with names are ``sizes`` (4096 if they are not given)."""
        orders = orders or tuple("col" if x.box and x.box.axis < x.rank - 1 else "row" for x in self.forms)
        sizes = {of.name: sizes.get(of.name, 4096) for form in self.forms for of in form.names if of is not None}
        infos = [example([sizes[of.name] if of is not None else extent
                          for of, extent in zip(form.names or (None,) * form.rank, form.extents)], form.dtype, order)
                 for form, order in zip(self.forms, orders)]
        return self._kernel(sizes).compile((False,) * len(infos), infos)


def kernel(grid: tuple, block: tuple, shared_bytes: int = 0) -> Any:
    """Decorate a function of (blocks, threads, tensors...): ``grid`` and ``block`` are the shapes of its blocks and threads.

    A dimension of the grid is a number, an extent's name (a block for each element), or ``cdiv("M", 64)``: a block for each
    64 of M. Tiles that reach over an array's edge are predicated: reads give zeros there, and nothing is written.

    Raises TensorError if a tensor is not annotated with its type, an extent that is known at run time has no name, or the
    grid names an extent that no tensor has.

    >>> import gemmkit, numpy as np
    >>> from gemmkit import specs
    >>> from gemmkit.specs import T, cdiv
    >>> @specs.kernel(grid=(cdiv("M", 8),), block=(4,))
    ... def double(blocks, threads, X: T["M"].fp32.GL, Y: T["M"].fp32.GL):
    ...     (m,), (lane,) = blocks.indices(), threads.indices()
    ...     x, y = X.tile(8)[m].tile(2)[lane], Y.tile(8)[m].tile(2)[lane]
    ...     specs.BinaryPointwise("+", threads.scalar(), x, x, y)
    >>> x, y = np.arange(9, dtype=np.float32), np.zeros(9, np.float32)
    >>> with gemmkit.emulate():
    ...     double(x, y)                                          # the second block has one element
    >>> float(y[8])
    16.0
    """
    return lambda function: SpecKernel(function, grid, block, shared_bytes)


NAMES = {"MatMul": ("a", "b", "c"), "Move": ("the source", "the target"), "Init": ("the target",)}
WORKERS = {(KERNEL, BLOCK): nodes.block_number, (BLOCK, steps.WARP): nodes.warp_number,
           (steps.WARP, steps.THREAD): nodes.lane_number, (BLOCK, steps.THREAD): nodes.thread_number,
           (BLOCK, steps.WARPGROUP): nodes.warpgroup_number,
           (steps.WARPGROUP, steps.WARP): nodes.warp_of_group, (steps.WARPGROUP, steps.THREAD): nodes.thread_of_group,
           (steps.WARP, steps.QUADPAIR): nodes.quad_pair_number}
SIZES = {steps.WARPGROUP: 128, steps.WARP: 32, steps.QUADPAIR: 8, steps.THREAD: 1}        # threads of a worker
MOST_THREADS = 1024


class KnownMatrix(NamedTuple):
    """What is known of a matrix: dtype, order ("row" or "col": which dimension has neighbours), alignment in bytes,
    whether the kernel's tiles reach over its edge, and how it is scaled."""

    dtype: np.dtype
    order: str
    alignment: int = 16
    is_partial: bool = False
    scaling: int = 0                                          # of C: 1 if it is scaled by alpha, 2 if a C is added


class LoweredPart(NamedTuple):
    """A lowered part: its node, and what `explain` says of it."""

    node: Any
    text: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A kernel: ``root`` is its tree, ``text`` says what it does."""

    root: Any
    threads: int
    tile: tuple[int, int]
    depth: int
    shared_bytes: int
    text: tuple[str, ...]
    in_shared: tuple[str, ...]
    blocks_per_sm: int = 1
    maps: tuple = ()                                          # of A and B, if TMA brings them
    cluster: int = 1


def lower(schedule: Finished, a: KnownMatrix, b: KnownMatrix, c: KnownMatrix) -> Lowered:
    """The kernel of a finished schedule for matrices of these kinds.

    Raises ScheduleError, with the schedule's line, where a step does not fit: a size that does not divide, a level out of
    order, a memory that the level cannot see, a spec that no instruction executes, too many threads or too much shared
    memory.
    """
    m, n, k = schedule.sizes
    state = WalkState(a.dtype, c.dtype)
    if any(isinstance(step, steps.Move) and step.swizzle is not None for step in schedule.steps):
        state.fragments = MMA
    forms = [Form((local(*extents),), GL, x.dtype, unit=1 if x.order == steps.ROW_MAJOR else 0, alignment=x.alignment,
                  is_partial=x.is_partial, scaling=x.scaling)
             for extents, x in zip(((m, k), (k, n), (m, n)), (a, b, c))]
    first = schedule.steps[0] if schedule.steps else None
    if schedule.kind != "MatMul" or not isinstance(first, steps.TileStep) or first.level != BLOCK:
        raise ScheduleError(f"a kernel is a MatMul that begins with .tile(rows, columns).to(Block), not with {first}"
                            + (f"\n  at {first.line}" if first is not None else ""))
    operands = [OperandForm(form, x.order) for form, x in zip(forms, (a, b, c))]
    if any(isinstance(step, steps.SplitStep) and step.stages for step in schedule.steps):
        return _in_ring(schedule, forms, operands, state)
    if first.cluster > 1:
        raise first.refuse(".cluster is of a kernel whose .split has .stages: blocks share what TMA brings")
    part = _lower(schedule, schedule.steps, operands, KERNEL, state)
    if state.threads is None:
        raise first.refuse("no step goes .to(Warp) or .to(Thread): how many threads a block has is not said")
    assert state.tile is not None
    head = _spec("MatMul", operands, KERNEL)
    size = f"{state.threads} threads a block, {state.shared_bytes} bytes of shared memory"
    return Lowered(nodes.Root(part.node, *forms), state.threads, state.tile, state.depth or 1, state.shared_bytes,
                   (head, *part.text, size), tuple(state.in_shared), first.blocks_per_sm)


def _in_ring(schedule: Finished, forms: list[Form], operands: list[OperandForm], state: WalkState) -> Lowered:
    """A kernel whose tiles TMA brings, and wgmma multiplies: `nodes.Pipelined`."""
    block, sums, split, *moves = schedule.steps[:5]
    at = next(step for step in schedule.steps if isinstance(step, steps.SplitStep) and step.stages)
    if at is not split or not isinstance(sums, steps.Accumulate) or sums.memory != WR:
        raise at.refuse(".stages is of the .split behind .tile(...).to(Block) and .accumulate_in(WR, ...)")
    if [getattr(move, "operand", None) for move in moves] not in ([0, 1], [1, 0]) or not all(
            move.memory == SH and move.prefetch for move in moves):
        raise at.refuse("the moves of A and B to SH follow a .split with .stages, both of them .prefetch")
    for move in moves:
        how = move.implementation
        if any((how.steps, how.micro, move.through, move.pad, move.layout, move.swizzle, move.order, move.no_sync)):
            raise move.refuse("TMA brings a tile in swizzled lines, without threads: .move(A, SH, Move.done).prefetch")
    if at.sync or at.unroll:
        raise at.refuse("barriers of the stages order the steps; leave out .sync and .unroll")
    rows, columns, k = block.rows, block.columns, split.k
    if isinstance(rows, tuple) or isinstance(columns, tuple):
        raise block.refuse("TMA brings whole tiles; give numbers, not pieces apart")
    if block.cluster > 1 and (block.order == steps.ROW_MAJOR or (isinstance(block.order, steps.Bands)
                                                                  and block.order.rows % block.cluster)):
        raise block.refuse(f".cluster({block.cluster}): blocks that follow each other need tiles of neighbouring rows; add "
                           f".layout(ColMajor), or Bands of a multiple of {block.cluster} rows")
    if block.swizzle is not None:
        raise block.refuse(".swizzle: a permutation of tiles whose number is known at run time is not checked; use "
                           ".layout(ColMajor) or .layout(Bands(16))")
    state.tile, state.depth = (rows, columns), k
    tiles = [x.seen_as(x.form.tile(*tiler).inner) for x, tiler in zip(operands, ((rows, k), (k, columns), (rows, columns)))]
    found: dict[int, Any] = {}
    text: list[str] = []
    for move in moves:
        shared_by = block.cluster if move.operand else 1
        found[move.operand], said = ring_stages(move, tiles[move.operand], split.stages, shared_by, state)
        text.append(said)
    place = place_of(sums, tiles[2], sums.begin.steps, BLOCK, state, tiles[2])
    accesses.check(sums, schedule.steps[5:], (rows, columns), BLOCK)
    state.is_ring = place.allocated.extents[0] == 64          # one fragment a warpgroup, whose products may be under way
    parts = [OperandForm(found[0].form, None), OperandForm(found[1].form, None), place.operand]
    inner = _lower(schedule, schedule.steps[5:], parts, BLOCK, state)
    state.is_ring = False
    before = len(state.in_shared)
    begin = _lower(sums.begin, sums.begin.steps, [place.operand], BLOCK, state)
    end = _lower(sums.end, sums.end.steps, [place.operand, tiles[2]], BLOCK, state)
    if len(state.in_shared) > before or sums.end.micro is not None:
        raise sums.refuse("the sums of a kernel with .stages go straight to GL: the warp that asks for copies meets no "
                          "barrier")
    assert state.threads is not None
    if state.threads + 32 > MOST_THREADS:
        raise block.refuse(f"{state.threads} threads and a warp that asks for copies; a block has {MOST_THREADS} at most")
    consumers = state.threads // 128
    cluster = Cluster(m=block.cluster)
    offset = state.allocate(at, 16 * split.stages)
    readers = PER_CLUSTER if block.cluster > 1 else PER_THREAD
    ring = Pipeline(split.stages, offset, 1, consumers * block.cluster, readers=readers, cluster=cluster)
    order = block.order if isinstance(block.order, steps.Bands) else (
        nodes.column_first if block.order == steps.COLUMN_MAJOR else nodes.row_first)
    tree = nodes.Pipelined(nodes.TileGrid(rows, columns, 0, 0, ()), k, ring, found[0], found[1],
                           place.operand.form, place.allocated, begin.node, inner.node, end.node, state.threads // 32, order,
                           nodes.same, block.cluster)
    lines = (_spec("MatMul", operands, KERNEL), f"{block}: a tile after the other for each {BLOCK}, a multiprocessor's",
            *_under(f"{sums}: sums in {place.said}", begin),
            *_under(f"{split}.stages({split.stages}), awaited and released by mbarriers", LoweredPart(None, tuple(text)),
                    inner),
            *_under("at the end", end),
            f"{state.threads} threads a block and a warp that asks for copies, {state.shared_bytes} bytes of shared memory")
    return Lowered(nodes.RingRoot(tree, *forms), state.threads + 32, (rows, columns), k, state.shared_bytes, lines,
                   tuple(state.in_shared), block.blocks_per_sm, ((0, found[0]), (1, found[1])), block.cluster)


def _lower(schedule: Finished, rest: tuple, operands: list[OperandForm], level: str, state: WalkState) -> LoweredPart:
    if not rest:
        return _leaf(schedule, operands, level, state)
    how: Any = {steps.TileStep: _tile, steps.SplitStep: _split, steps.Move: _move,
                steps.Accumulate: _accumulate}[type(rest[0])]
    try:
        made: LoweredPart = how(schedule, rest[0], rest[1:], operands, level, state)
        return made
    except ShapeError as error:
        raise rest[0].refuse(f"{schedule.kind}: {error}") from None


def _spec(kind: str, operands: list[OperandForm], level: str) -> str:
    *inputs, out = (str(operand.form) for operand in operands)
    return f"{kind} ({', '.join(inputs)}) -> ({out}) of a {level}" if inputs else f"{kind} ({out}) of a {level}"


def _under(head: str, *parts: LoweredPart) -> tuple[str, ...]:
    return (head, *(f"  {line}" for part in parts for line in part.text))


# -- leaves -----------------------------------------------------------------------------------------------------------

def _leaf(schedule: Finished, operands: list[OperandForm], level: str, state: WalkState) -> LoweredPart:
    kind, said = schedule.kind, _spec(schedule.kind, operands, level)
    line = schedule.steps[-1].line if schedule.steps else ""
    if schedule.micro is not None:
        if kind == "Init":
            raise ScheduleError(f"{said}: an Init has no micro-kernel")
        if any(operand.form.scaling for operand in operands):
            raise ScheduleError(f"{said} is executed by the micro-kernel {schedule.micro.__name__}, which stores sums as "
                                f"they are; alpha, beta and c need a Move that ends with an instruction\n  at {line}")
        if any(operand.form.is_partial for operand in operands):
            raise ScheduleError(f"{said} is executed by the micro-kernel {schedule.micro.__name__}, which knows nothing of "
                                f"tiles that reach over a matrix's edge; pad the matrices with zeros\n  at {line}")
        return LoweredPart(nodes.DoneBy(schedule.micro), (f"{said}: {schedule.micro.__name__}, a micro-kernel",))
    threads = {steps.THREAD: THREAD, steps.WARP: WARP, steps.WARPGROUP: WARPGROUP, steps.QUADPAIR: QUADPAIR}.get(level)
    if threads is None:
        raise ScheduleError(f"{said} is where the schedule ends, and no instruction is a {level}'s; tile it .to(Warp) or "
                            f".to(Thread)\n  at {line}")
    try:
        found = instruction("CopyAsync" if state.is_ahead else kind, threads, *(operand.form for operand in operands))
    except NoAtom as error:
        further = "\n(By registers anything goes a step ahead: .prefetch.through(RF).)" if state.is_ahead else ""
        raise ScheduleError(f"{error}{further}\n  at {line}") from None
    if state.is_ring and kind == "MatMul":
        found = found.one_behind                              # type: ignore[attr-defined]
    return LoweredPart(nodes.Done(found), (f"{said}: {found.becomes}",))


# -- tiles ------------------------------------------------------------------------------------------------------------

def _tile(schedule: Finished, step: steps.TileStep, rest: tuple, operands: list[OperandForm], level: str,
          state: WalkState) -> LoweredPart:
    kind, target = schedule.kind, operands[-1].form
    (rows, r), (columns, c) = (accesses.tiler(step, size, extent)
                               for size, extent in zip((step.rows, step.columns), target.extents))
    for what, size, extent in zip(("rows", "columns"), (r, c), target.extents):
        if extent is not None and extent % size:
            raise step.refuse(f"tiles of {size} {what} do not divide the {extent} of {kind}'s {target}")
    grid = tuple(0 if extent is None else extent // size for extent, size in zip(target.extents, (r, c)))
    if step.level is None and 0 in grid:
        raise step.refuse(f"how many tiles there are is known at run time; a kernel's tiles go .to({BLOCK})")
    if step.level is not None:
        _check_workers(step, level, grid[0] * grid[1], (r, c), state)
    tilers = [(rows, ALL), (ALL, columns), (rows, columns)] if kind == "MatMul" else [(rows, columns)] * len(operands)
    hows = [_how(step, name, operand.form, level, (r, c), rest, state) for name, operand in zip(NAMES[kind], operands)]
    parts = [operand.seen_as(operand.form.part(tiler) if how not in ("base", "offset") else operand.form.tile(*tiler).inner)
             for operand, tiler, how in zip(operands, tilers, hows)]
    in_registers = any(operand.form.memory in (RF, FR, WR, QP) for operand in operands)
    if not rest and _is_block(schedule, step, operands, level):
        return _leaf(schedule, operands, level, state)
    inner = _lower(schedule, rest, parts, step.level or level, state)
    tiles = nodes.TileGrid(rows, columns, grid[0], grid[1], tuple(hows))
    count = "? x ?" if 0 in grid else f"{grid[0]} x {grid[1]}"
    if step.level is None:
        # An array of registers is indexed by constants, or it is none.
        unrolled = step.unroll or in_registers
        said = f"{step}: {count} in turn{', unrolled' if unrolled else ''}"
        return LoweredPart(nodes.InTurn(tiles, inner.node, unrolled), _under(said, inner))
    by_column = step.order == steps.COLUMN_MAJOR
    said = (f"{step}: {count}, one for each {step.level}, {'column by column' if by_column else 'row by row'}"
            + (f", renumbered by {step.swizzle.__name__}" if step.swizzle else ""))
    place = nodes.column_first if by_column else nodes.row_first
    node = nodes.SideBySide(tiles, inner.node, WORKERS[level, step.level], step.swizzle or nodes.same, place)
    return LoweredPart(node, _under(said, inner))


def _is_block(schedule: Finished, step: steps.TileStep, operands: list[OperandForm], level: str) -> bool:
    """Whether the rest, single elements of registers one by one, unrolled, is one leaf: the same instructions, and much less
    for LLVM to inline."""
    single = step.level is None and step.unroll and (step.rows, step.columns) == (1, 1)
    forms = [operand.form for operand in operands]
    return bool(single and level == steps.THREAD and schedule.micro is None and schedule.kind != "Move"
                and all(form.memory == RF and len(form.levels) == 1 for form in forms))


def _check_workers(step: steps.TileStep, level: str, count: int, tile: tuple[int, int], state: WalkState) -> None:
    """Whether there are as many workers as tiles: the first steps say how many there are."""
    at = step.level
    if (level, at) not in WORKERS:
        raise step.refuse(f"from {level} there is no way to {at}; levels go from Kernel to Block, to Warpgroup, to Warp, "
                          "to QuadPair or Thread")
    if at == BLOCK:
        state.tile = tile
        return
    there = state.threads if level == BLOCK else SIZES[level]
    each = SIZES[at]                                          # type: ignore[index]
    if there is None:
        state.threads = there = count * each
        if there > MOST_THREADS:
            raise step.refuse(f"{there} threads are needed, and a block has {MOST_THREADS} at most; use larger tiles")
    workers = there // each
    if count != workers:
        raise step.refuse(f"{count} tiles for {workers} of {at}; give tiles so that each has one")
    if step.swizzle is not None:
        accesses.permuted(step, count)


def _how(step: steps.TileStep, name: str, form: Form, level: str, tile: tuple[int, int], rest: tuple,
         state: WalkState) -> Any:
    """How an operand's tiles are found: `gemmkit.specs.tensors.Tensor.part`."""
    home = LEVELS.index(HOME[form.memory])
    if step.level is None:
        if home > LEVELS.index(level):
            if state.is_through:
                return accesses.owned(step, rest, tile, level, HOME[form.memory])
            owner = HOME[form.memory]
            raise step.refuse(f"{name} is divided in {form.memory}, with a part for each {owner}; its tiles come after "
                              f".to({owner})")
        return "offset"
    if form.memory == FR and step.level == steps.THREAD:
        raise step.refuse(f"{name} is in fragments, which are a warp's; its tiles end .to(Warp)")
    return "own" if home >= LEVELS.index(step.level) else "base"


def _split(schedule: Finished, step: steps.SplitStep, rest: tuple, operands: list[OperandForm], level: str,
           state: WalkState) -> LoweredPart:
    a, b, c = operands
    depth = a.form.extents[1]
    if depth is not None and depth % step.k:
        raise step.refuse(f"steps of {step.k} do not divide the {depth} columns of {a.form}")
    if depth is None:
        state.depth = step.k
    count = 0 if depth is None else depth // step.k
    unrolled = step.unroll and count > 0                      # a number of steps that is not known is a loop
    parts = [a.seen_as(a.form.tile(ALL, step.k).inner), b.seen_as(b.form.tile(step.k, ALL).inner), c]
    if any(isinstance(later, steps.Move) and later.prefetch for later in rest[:2]):
        return _ahead(schedule, step, rest, parts, level, state, count)
    if not step.sync and any(isinstance(later, steps.Move) and later.memory == SH for later in rest):
        state.in_shared.append(f"{step} without .sync at {step.line}")
    inner = _lower(schedule, rest, parts, level, state)
    barrier = ", a barrier behind each" if step.sync else ""
    said = f"{step}: {count or '?'} steps{', unrolled' if unrolled else ''}{barrier}"
    node = nodes.Looped(step.k, count, "offset" if unrolled else "base", step.sync, unrolled, inner.node)
    return LoweredPart(node, _under(said, inner))


def _ahead(schedule: Finished, step: steps.SplitStep, rest: tuple, operands: list[OperandForm], level: str, state: WalkState,
           count: int) -> LoweredPart:
    """A loop with both moves a step ahead."""
    moves = [move for move in rest[:2] if isinstance(move, steps.Move) and move.prefetch]
    if {move.operand for move in moves} != {0, 1}:
        raise moves[0].refuse(".prefetch is for the moves of A and B right behind a .split, both of them")
    if all(move.no_sync for move in moves):
        raise moves[1].refuse(".no_sync of both leaves out the barrier that what comes a step ahead (.prefetch) needs")
    state.in_shared += [f"{move}.prefetch at {move.line}" for move in moves]
    changed, brought = list(operands), {}
    text: list[str] = []
    for move in moves:
        operand, before = operands[move.operand], state.cursor
        place = place_of(move, operand, move.implementation.steps, level, state, operands[-1])
        nbytes = state.cursor - before
        state.allocate(move, nbytes)                          # the second stage
        changed[move.operand] = place.operand
        brought[move.operand], said = (_through if move.through else _copied)(move, nbytes, operand, place, level, state)
        text += said
    inner = _lower(schedule, rest[2:], changed, level, state)
    unrolled = step.unroll and count > 0
    node = LoopedAhead(step.k, count, unrolled, brought[0], brought[1], inner.node)
    said = f"{step}: {count or '?'} steps{', unrolled' if unrolled else ''}, each begins with a wait and a barrier"
    return LoweredPart(node, _under(said, LoweredPart(None, tuple(text)), inner))


def _copied(move: steps.Move, nbytes: int, operand: OperandForm, place: OperandPlace, level: str, state: WalkState) -> tuple:
    """By cp.async: (the node, what `explain` says)."""
    state.is_ahead = True
    how = _lower(move.implementation, move.implementation.steps, [operand, place.operand], level, state)
    state.is_ahead = False
    return (CopiedStages(place.operand.form, operand.form.dtype, place.offset, nbytes, how.node),
            _under(f"{move}.prefetch: {operand.form} to {place.said}, two stages, a step ahead", how))


def _through(move: steps.Move, nbytes: int, operand: OperandForm, place: OperandPlace, level: str,
             state: WalkState) -> tuple:
    """By registers: the move's decomposition twice, to them and from them."""
    implementation = move.implementation
    if implementation.micro is not None or any(isinstance(step, steps.Move) for step in implementation.steps):
        raise move.refuse(".through(RF) is of moves that are tiled down to Thread, without a move or micro-kernel in them")
    held = accesses.owned(move, implementation.steps, operand.form.extents, level, steps.THREAD)
    seen = OperandForm(accesses.form_in_registers(operand.form, RF, None), None)
    state.is_through = True
    parts = [_lower(implementation, implementation.steps, between, level, state)
             for between in ([operand, seen], [seen, place.operand])]
    state.is_through = False
    allocated = seen.form.replaced(levels=(local(*held),))
    said = f"{move}.prefetch.through(RF): {operand.form} to {allocated} of each {steps.THREAD}, a step ahead"
    load, store = (part.node for part in parts)
    return (RegisterStages(place.operand.form, operand.form.dtype, place.offset, nbytes, allocated, seen.form, load, store),
            (*_under(said, parts[0]), *_under(f"behind the step to {place.said}, two stages", parts[1])))


# -- moves ------------------------------------------------------------------------------------------------------------

def _move(schedule: Finished, step: steps.Move, rest: tuple, operands: list[OperandForm], level: str,
          state: WalkState) -> LoweredPart:
    operand = operands[step.operand]
    if step.prefetch:
        raise step.refuse(".prefetch is for the moves of A and B right behind a .split, both of them")
    if level == KERNEL:
        raise step.refuse(f"{step.memory} is not memory of a {level}; move after .to(Block)")
    place = place_of(step, operand, step.implementation.steps, level, state, operands[-1])
    how = _lower(step.implementation, step.implementation.steps, [operand, place.operand], level, state)
    changed = [place.operand if n == step.operand else x for n, x in enumerate(operands)]
    is_shared = step.memory == SH
    if is_shared:
        state.in_shared.append(f"{step}{' without a barrier' if step.no_sync else ''} at {step.line}")
    inner = _lower(schedule, rest, changed, level, state)
    synced = is_shared and not step.no_sync
    node = nodes.MovedNode(step.operand, place.operand.form, place.allocated, place.offset, is_shared, synced, how.node,
                           inner.node)
    said = f"{step}: {operand.form} to {place.said}{', then a barrier' if synced else ''}"
    return LoweredPart(node, (*_under(said, how), *inner.text))


def _accumulate(schedule: Finished, step: steps.Accumulate, rest: tuple, operands: list[OperandForm], level: str,
                state: WalkState) -> LoweredPart:
    a, b, c = operands
    if level == KERNEL:
        raise step.refuse(f"{step.memory} is not memory of a {level}; accumulate after .to(Block)")
    place = place_of(step, c, step.begin.steps, level, state, c)
    accesses.check(step, rest, c.form.extents, level)
    before = state.cursor
    inner = _lower(schedule, rest, [a, b, place.operand], level, state)
    if rest and isinstance(rest[0],
                           steps.SplitStep) and (rest[0].sync or any(getattr(x, "prefetch", False) for x in rest[1:3])):
        state.cursor = before                                 # what the loop had is read by nobody behind its last barrier
    begin = _lower(step.begin, step.begin.steps, [place.operand], level, state)
    end = _lower(step.end, step.end.steps, [place.operand, c], level, state)
    if step.end.micro is not None:
        state.use(step, getattr(step.end.micro, "shared_bytes", 0))
    said = f"{step}: sums in {place.said}"
    node = nodes.Accumulated(place.operand.form, place.allocated, begin.node, inner.node, end.node)
    return LoweredPart(node, (*_under(said, begin), *inner.text, *_under("at the end", end)))
