"""How one thread reads and writes a line or a block of elements, by the memory that it is in."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from functools import lru_cache
from math import gcd
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gemmkit import shapes
from gemmkit.components import Component, freeze
from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.aggregates import convert
from gemmkit.lang.components import dataclass
from gemmkit.lang.functions import DeviceFunctionType
from gemmkit.lang.memory import coordinates_of
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.registers import RegistersType, apply, each, generate, interleave, join, split
from gemmkit.lang.static import NotKnown, SplitType, known, traced
from gemmkit.ptx import wmma
from gemmkit.ptx.memory import load_global, load_shared, store_global, store_shared
from gemmkit.runtime.device import H100
from gemmkit.shapes import CHUNK, NONE, Shape, ShapeError, Step, Swizzle, local, shape, span
from gemmkit.specs import nodes
from gemmkit.specs import nodes as steps
from gemmkit.specs.nodes import HOME, LEVELS
from gemmkit.specs.tensors import (
    FR,
    GL,
    MMA,
    OF_QUADS,
    QP,
    QUADS,
    RF,
    SH,
    WMMA,
    WR,
    Form,
    FragmentRole,
    Line,
    Tensor,
    TensorError,
    Threads,
    line_of,
    sums_of_warpgroup,
)

i32 = ir.IntType(32)


# -- blocks of registers, as tuples -----------------------------------------------------------------------------------

def _steps(extents: tuple) -> list[tuple]:
    """The places in a block, the first dimension fastest."""
    return [tuple(reversed(at)) for at in itertools.product(*map(range, reversed(extents)))]


def _slots(c: Context, b: ir.IRBuilder, regs: Any, at: object, v: Values, extents: tuple) -> list:
    first = coordinates_of(c, b, at, v[1])
    out = []
    for step in _steps(extents):
        place = i32(0)
        for start, ahead, extent in zip(first, step, regs.shape):
            place = b.add(b.mul(place, i32(extent)), b.add(start, i32(ahead)))
        out.append(b.gep(v[0], [place]))
    return out


def _type_read(context: TypingContext, regs: types.Type, at: types.Type, extents: types.Type) -> Any:
    try:
        wanted = known(extents)
    except NotKnown:
        return None
    if not isinstance(regs, RegistersType) or regs.value.count != 1:
        return None
    result = types.UniTuple(regs.value.dtype, math.prod(wanted))
    return signature(result, regs, at, extents), lambda c, b, s, v: (
        c.make_tuple(b, result, [b.extract_value(b.load(slot), 0) for slot in _slots(c, b, regs, at, v, wanted)]))


@atom(_type_read)
def read_registers(regs: Any, at: tuple, extents: tuple) -> tuple:
    """A block of registers from ``at`` on, its first dimension fastest."""
    return tuple(regs[tuple(map(_add, at, step))][0] for step in _steps(extents))


def _type_write(context: TypingContext, regs: types.Type, at: types.Type, extents: types.Type, values: types.Type) -> Any:
    try:
        wanted = known(extents)
    except NotKnown:
        return None
    if not isinstance(regs, RegistersType) or regs.value.count != 1 or len(values.types) != math.prod(wanted):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        for n, slot in enumerate(_slots(c, b, regs, at, v, wanted)):
            value = c.cast(b, b.extract_value(v[3], n), values.types[n], regs.value.dtype)
            b.store(c.make_tuple(b, regs.value, [value]), slot)

    return signature(types.none, regs, at, extents, values), codegen


@atom(_type_write)
def write_registers(regs: Any, at: tuple, extents: tuple, values: tuple) -> None:
    """Set a block of registers: what `read_registers` reads."""
    for step, value in zip(_steps(extents), values, strict=True):
        regs[tuple(map(_add, at, step))] = (value,)


def _add(a: Any, b: int) -> int:
    return int(a) + b


# -- lines ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class InRegisters(Component):
    """A block of ``extents`` in a thread's registers."""

    extents: tuple

    def said(self, itemsize: int) -> str:
        """What `explain` says: registers need no instruction of their own."""
        return ""

    def load(self, tensor: Tensor) -> tuple:
        return read_registers(tensor.storage, tensor.at, self.extents)

    def store(self, tensor: Tensor, values: tuple) -> None:
        write_registers(tensor.storage, tensor.at, self.extents, values)


@dataclass(frozen=True)
class InGlobal(Component):
    """``count`` elements along ``axis``: as few instructions as the array's alignment allows."""

    axis: int
    count: int

    def said(self, itemsize: int) -> str:
        return f"{self.count * itemsize} bytes in GL"

    def load(self, tensor: Tensor) -> tuple:
        return load_global(tensor.storage, self.axis, tensor.base, tensor.offset, self.count)

    def store(self, tensor: Tensor, values: tuple) -> None:
        store_global(tensor.storage, self.axis, tensor.base, tensor.offset, values)


@dataclass(frozen=True)
class InPartial(InGlobal):
    """`InGlobal` of an array whose tiles may reach over its edge along the axes ``checked``: there are zeros, and nothing is
    written (section 3.4)."""

    dtype: Any
    checked: tuple = (0, 1)

    def load(self, tensor: Tensor) -> tuple:
        if is_inside(self, tensor):
            values = load_global(tensor.storage, self.axis, tensor.base, tensor.offset, self.count)
        else:
            values = self.load_what_is_there(tensor)
        return values

    def load_what_is_there(self, tensor: Tensor) -> tuple:
        """Element by element; zeros for those beyond the edge."""
        return generate(self.count, _element_or_zero, self, tensor.storage, tensor.at)

    def store(self, tensor: Tensor, values: tuple) -> None:
        if is_inside(self, tensor):
            store_global(tensor.storage, self.axis, tensor.base, tensor.offset, values)
        else:
            each(_store_if_there, values, self, tensor.storage, tensor.at)

    def said(self, itemsize: int) -> str:
        return f"{self.count * itemsize} bytes in GL, or what of them is there"


def is_inside(line: InPartial, tensor: Any) -> bool:
    """Whether all of a line is in the array."""
    return _are_inside(line, tensor.at, line.count, tensor.storage.shape)


def _are_inside(line: InPartial, at: tuple, count: int, extents: tuple) -> bool:
    return sum(apply(_fits, line.checked, line.axis, at, count, extents)) == len(line.checked)


def _fits(axis: int, n: int, along: int, at: tuple, count: int, extents: tuple) -> int:
    return 1 if at[axis] + (count if axis == along else 1) <= extents[axis] else 0


@traced
def _onward(line: Any, at: tuple, n: Any) -> tuple:
    """The place of a line's element ``n``."""
    return tuple(x + n if axis == line.axis else x for axis, x in enumerate(at))


def _element_or_zero(n: int, line: InPartial, view: Any, at: tuple) -> Any:
    place = _onward(line, at, n)
    value = convert(line.dtype, 0)
    if _are_inside(line, place, 1, view.shape):
        value = view[place]
    return value


def _store_if_there(value: Any, n: int, line: InPartial, view: Any, at: tuple) -> None:
    place = _onward(line, at, n)
    if _are_inside(line, place, 1, view.shape):
        view[place] = value


@dataclass(frozen=True)
class InScaled(InPartial):
    """What is stored is scaled, and added to C: of `gemmkit.specs.tensors.on_scaled`."""

    has_c: bool = False

    def store(self, tensor: Tensor, values: tuple) -> None:
        out, c, alpha, beta = tensor.storage
        if self.has_c:
            if _are_inside(self, tensor.at, self.count, out.shape):
                old = load_global(c, self.axis, tensor.base, tensor.offset, self.count)
            else:
                old = generate(self.count, _element_or_zero, self, c, tensor.at)
            pairs = split(interleave((apply(_as, values, alpha), apply(_as, old, alpha))), 2)
            values = apply(lambda pair, n: alpha * pair[0] + beta * pair[1], pairs)
        else:
            values = apply(lambda value, n: alpha * value, values)
        values = apply(lambda value, n: convert(self.dtype, value), values)
        if _are_inside(self, tensor.at, self.count, out.shape):
            store_global(out, self.axis, tensor.base, tensor.offset, values)
        else:
            each(_store_if_there, values, self, out, tensor.at)

    def said(self, itemsize: int) -> str:
        return f"{super().said(itemsize)}, of alpha x{' + beta c' if self.has_c else ''}"


def _as(value: Any, n: int, like: Any) -> Any:
    return like * 0 + value


@dataclass(frozen=True)
class InShared(Component):
    """``times`` accesses to ``width`` neighbours, ``step`` elements apart."""

    times: int
    width: int
    step: int

    def said(self, itemsize: int) -> str:
        return f"{f'{self.times} x ' if self.times > 1 else ''}{self.width * itemsize} bytes in SH"

    def load(self, tensor: Tensor) -> tuple:
        return join(generate(self.times, _read_shared, tensor, self.step, self.width))

    def store(self, tensor: Tensor, values: tuple) -> None:
        each(_write_shared, split(values, self.width), tensor, self.step)


def _read_shared(n: int, tensor: Tensor, step: int, width: int) -> tuple:
    base, offset = tensor.ahead(n * step)
    return load_shared(tensor.storage, base, offset, width)


def _write_shared(values: tuple, n: int, tensor: Tensor, step: int) -> None:
    base, offset = tensor.ahead(n * step)
    store_shared(tensor.storage, base, offset, values)


@lru_cache(maxsize=4096)
def access_of(form: Form) -> Any:
    """The access to a form that is a line (`line_of`). Raises ValueError for another."""
    line = line_of(form)
    if not isinstance(line, Line):
        raise ValueError(f"{form} {line}")
    if form.memory == GL:
        if form.scaling:
            return InScaled(line.axis, line.count, form.dtype, form.partial_axes, form.scaling > 1)
        if form.is_partial:
            return InPartial(line.axis, line.count, form.dtype, form.partial_axes)
        return InGlobal(line.axis, line.count)
    if form.memory == RF:
        return InRegisters(tuple(line.count if axis == line.axis else 1 for axis in range(form.rank)))
    return _shared_access(form, line)


def _shared_access(form: Form, line: Line) -> InShared:
    """Accesses are no wider than what divides the distance of lines, so that each is aligned wherever the line begins."""
    assert form.layout is not None
    (extent, stride), *more = form.layout.modes[line.axis]
    if line.count == 1:
        return InShared(1, 1, 1)
    if more and extent % line.count:
        raise ValueError(f"{form} is not evenly spaced in its layout {form.layout}")
    apart = [s for axis, dim in enumerate(form.layout.modes) if axis != line.axis for e, s in dim if e > 1]
    apart += [s for _, s in more]
    width = math.gcd(line.count, form.swizzle.run, *apart) if stride == 1 else 1
    return InShared(line.count // width, width, width if stride == 1 else stride)


# --------------------------------------------------------------------------------------------------
# Who has what of a matrix that all workers have together (Fireiron, section 3.1: distributed arrays).
#
# A block's sums in registers are allocated by each thread: how many is inferred by walking the decomposition (`owned`).
# Init, product and epilogue decompose them one by one, and must share them out alike; Fireiron leaves that to its users,
# here it is checked (`check`).

def tiler(step: steps.TileStep, size: Any, extent: int | None) -> tuple[Any, int]:
    """(the tile along a dimension, its extent): of a number, or of pieces of a width, a step apart."""
    if not isinstance(size, tuple):
        return size, size
    width, apart = size
    if extent is None or extent % apart:
        raise step.refuse(f"pieces {apart} apart do not divide {'what is known at run time' if extent is None else extent}")
    return shape((width, extent // apart), (1, apart)), width * (extent // apart)


def owned(at: steps.ScheduleStep, decomposition: tuple, extents: tuple, level: str, home: str) -> tuple:
    """The extents of the part that one worker of ``home`` has, by a decomposition that begins at ``level``: of tiles in turn
    above the workers it has its part of each."""
    times = [1] * len(extents)
    for step in decomposition:
        if level == home or not isinstance(step, steps.TileStep):
            break
        tile = tuple(tiler(step, size, extent)[1] for size, extent in zip((step.rows, step.columns), extents))
        if step.level is None:
            times = [n * (extent // size) for n, extent, size in zip(times, extents, tile)]
        extents, level = tile, step.level or level
    if level != home:
        raise at.refuse(f"how many elements each {home} has is not said: the decomposition of what is moved ends at "
                        f"{level}; add .tile(...).to({home})")
    return tuple(n * extent for n, extent in zip(times, extents))


def permuted(step: steps.TileStep, count: int) -> list[int]:
    """The numbers that ``count`` workers have behind a swizzle. Raises ScheduleError where it is no permutation."""
    numbers = [int((step.swizzle or nodes.same)(n)) for n in range(count)]
    if sorted(numbers) != list(range(count)):
        twice = next((n for n in numbers if numbers.count(n) > 1), max(numbers))
        raise step.refuse(f".swizzle is not a permutation of {count} workers: number {twice} is "
                          f"{'of several' if numbers.count(twice) > 1 else 'of none of them'}")
    return numbers


def shares(decomposition: tuple, extents: tuple, level: str, home: str) -> dict[tuple, list]:
    """{worker: the coordinates of its elements, in the order of its registers}."""
    part: Shape = local(*extents)
    at: dict[tuple, Any] = {(): Step((0, 0))}
    for step in decomposition:
        if level == home:
            break
        if not isinstance(step, steps.TileStep) or step.level is None:
            continue
        sizes = [tiler(step, size, extent)[0] for size, extent in zip((step.rows, step.columns), part.extents)]
        outer, part = part.tile(*sizes)
        m, n = outer.extents
        place = nodes.column_first if step.order == steps.COLUMN_MAJOR else nodes.row_first
        numbers = permuted(step, m * n)
        at = {(*who, worker): Step(outer(*place(number, m, n)) or (0, 0)) + origin
              for who, origin in at.items() for worker, number in enumerate(numbers)}
        level = step.level
    elements = [part(i, j) for i in range(part.extents[0]) for j in range(part.extents[1])]
    return {who: [origin + element for element in elements] for who, origin in at.items()}


def check(step: steps.Accumulate, product: tuple, extents: tuple, level: str) -> None:
    """Raise ScheduleError where a worker's registers are other elements in the epilogue than in the product."""
    home, end = steps.HOME[step.memory], step.end
    if home not in (level, *(s.level for s in product if isinstance(s, steps.TileStep))):
        return                                                # a product that is not whole is refused where it ends
    if end.steps and isinstance(end.steps[0], steps.Move):
        end = end.steps[0].implementation
    try:
        mine = shares(product, extents, level, home)
        held = owned(step, step.begin.steps, extents, level, home)
        theirs = None if end.micro is not None else shares(end.steps, extents, level, home)
    except ShapeError as error:
        raise step.refuse(str(error)) from None
    count = len(next(iter(mine.values())))
    if count != held[0] * held[1]:
        raise step.refuse(f"Init allocates {held[0]} x {held[1]} elements a {home}, and the product has {count} each")
    for who in mine if theirs is not None else ():
        other = theirs.get(who, [])                           # type: ignore[union-attr]
        if mine[who] != other:
            n = next((n for n, (x, y) in enumerate(zip(mine[who], other)) if x != y), len(other))
            there = f"C{tuple(other[n])}" if n < len(other) else "nothing"
            raise step.refuse(f"element {n} of {home} {who[-1]}'s registers is C{tuple(mine[who][n])} in the product and "
                              f"{there} in the epilogue; decompose both alike")


def form_in_registers(form: Form, memory: str, role: Any) -> Form:
    """A form of whole registers, with coordinates of their own."""
    return Form((local(*form.extents),), memory, form.dtype, role=role)


# --------------------------------------------------------------------------------------------------
# How a tile lies in shared memory: ``.storage``, ``.pad``, ``.layout`` and ``.swizzle`` of a move to SH, checked.
#
# A layout is dims:strides over a tile's coordinates, a swizzle a permutation of the elements' numbers behind it. `XOR` is
# the swizzle that a layout asks for: chunks of 16 bytes change places along a line, by the line's number, so that eight
# lines' chunks of one column lie in all 32 banks (they are what eight lanes of ldmatrix, or of 16-byte loads, read at
# once).

#: The swizzle by the numbers of lines.
XOR = "xor"
BANKS = 128                                                   # bytes that shared memory serves at a time


def layout_of(step: nodes.Move, extents: tuple[int, int], order: str) -> Shape:
    """The layout of a tile of these extents. Raises ScheduleError for one of other extents, or where elements meet."""
    rows, columns = extents
    if step.layout is None:
        return Shape(extents, (columns + step.pad, 1) if order == nodes.ROW_MAJOR else (1, rows + step.pad))
    if step.order is not None or step.pad:
        raise step.refuse(".layout says how all elements lie; leave out .storage and .pad")
    try:
        made = step.layout if isinstance(step.layout, Shape) else Shape.parse(step.layout)
    except ShapeError as error:
        raise step.refuse(f".layout: {error}") from None
    if made.extents != extents:
        raise step.refuse(f".layout {made} is of {' x '.join(map(str, made.extents))}, and the tile is {rows} x {columns}")
    offsets = made.offsets()
    if len(set(offsets)) < len(offsets) or min(offsets) < 0:
        raise step.refuse(f".layout {made} has two elements in one place, or one before the first")
    return made


def swizzle_of(step: nodes.Move, layout: Shape, dtype: np.dtype) -> Swizzle:
    """The swizzle of a tile with this layout. Raises ScheduleError where it is no permutation of the tile's elements, or
    takes 16 bytes apart."""
    if step.swizzle is None:
        return NONE
    if step.swizzle == XOR:
        return _by_lines(step, layout, dtype)
    count = 1 + sum(map(span, layout.modes))
    try:
        found = shapes.of_function(step.swizzle, count)
    except ShapeError as error:
        raise step.refuse(f".swizzle: {error}") from None
    if found.terms and found.run * dtype.itemsize < CHUNK:
        raise step.refuse(f".swizzle takes {CHUNK} bytes apart, {CHUNK // dtype.itemsize} elements that one access moves: "
                          f"from {found.run} on elements change places")
    return found


def _by_lines(step: nodes.Move, layout: Shape, dtype: np.dtype) -> Swizzle:
    lines = [dim[0] for dim in layout.modes if len(dim) == 1]
    along = next((extent for extent, stride in lines if stride == 1), 1)
    apart = next((stride for _, stride in lines if stride != 1), 0)
    chunk, size = max(1, CHUNK // dtype.itemsize), dtype.itemsize
    chunks = gcd(along // chunk, BANKS // CHUNK)
    if len(lines) < 2 or apart & (apart - 1) or along % chunk or chunks < 2:
        raise step.refuse(f".swizzle(XOR) is of lines of 32 bytes and more, a power of two apart; {layout} of {dtype} has "
                          "none; give a function of an element's number, or .pad")
    shift = max(apart * size, BANKS) // CHUNK
    return Swizzle((shift.bit_length() - 1, (chunks - 1) * chunk))


# --------------------------------------------------------------------------------------------------
# What the walk over a schedule allocates: operands on the way down, shared memory in use, and where an operand goes.

class OperandForm(NamedTuple):
    """An operand on the way down: its form, and the order in which its matrix lies."""

    form: Form
    order: str | None

    def seen_as(self, form: Form) -> OperandForm:
        return OperandForm(form, self.order)


@dataclasses.dataclass
class WalkState:
    """What the walk collects."""

    input: np.dtype
    accumulator: np.dtype
    threads: int | None = None
    tile: tuple[int, int] | None = None                       # of a block
    cursor: int = 0
    shared_bytes: int = 0
    depth: int | None = None                                  # of the steps whose number is known at run time
    in_shared: list[str] = field(default_factory=list)        # what touches shared memory: for messages
    is_ring: bool = False                                     # within a loop that TMA brings the tiles of
    is_ahead: bool = False                                    # within a move that is a step ahead
    is_through: bool = False                                  # within one by registers: a thread's part of tiles in turn
    fragments: str = WMMA                                     # whose the fragments are: mma.sync's where a tile is swizzled

    def allocate(self, step: nodes.ScheduleStep, nbytes: int, alignment: int = 128) -> int:
        at = -(-self.cursor // alignment) * alignment
        self.cursor = at + -(-nbytes // 128) * 128
        self.use(step, self.cursor)
        return at

    def use(self, step: nodes.ScheduleStep, nbytes: int) -> None:
        self.shared_bytes = max(self.shared_bytes, nbytes)
        if nbytes > H100.shared_memory_per_block:
            raise step.refuse(f"{nbytes} bytes of shared memory are needed, and a block has {H100.shared_memory_per_block}; "
                              "use smaller tiles")


class OperandPlace(NamedTuple):
    """Where an operand goes: as all see it, what one worker allocates of it, and from which byte of shared memory on."""

    operand: OperandForm
    allocated: Form
    offset: int
    said: str


def place_of(step: Any, operand: OperandForm, decomposition: tuple, level: str, state: WalkState,
             other: OperandForm) -> OperandPlace:
    """Where ``operand`` goes by a step of ``level``. Raises ScheduleError where that level cannot see the memory."""
    form, memory = operand.form, step.memory
    if LEVELS.index(HOME[memory]) < LEVELS.index(level):
        raise step.refuse(f"{memory} is a {HOME[memory]}'s, and this is a step of each {level}; move before .to({level})")
    if memory == SH:
        order = step.order or operand.order or other.order or nodes.ROW_MAJOR
        layout = layout_of(step, form.extents, order)
        swizzle = swizzle_of(step, layout, form.dtype)
        made = Form((local(*form.extents),), SH, form.dtype, layout, swizzle=swizzle)
        said = f"{made.element}.SH, {layout}{f', {swizzle}' if swizzle.terms else ''}"
        return OperandPlace(OperandForm(made, order), made, state.allocate(step, made.bytes), said)
    home = HOME[memory]
    extents = form.extents if level == home else owned(step, decomposition, form.extents, level, home)
    if memory == QP:
        return _place_of_quads(step, operand, extents, state)
    if memory == WR:
        return _place_of_sums(step, operand, extents, state)
    role = role_of(step, operand, extents, state) if memory == FR else None
    seen = form_in_registers(form, memory, role)
    allocated = seen.replaced(levels=(local(*extents),))
    return OperandPlace(OperandForm(seen, operand.order if memory == FR else None), allocated, 0,
                        f"{allocated} of each {home}")


def _place_of_sums(step: Any, operand: OperandForm, extents: tuple, state: WalkState) -> OperandPlace:
    """A warpgroup's: sums of floats are float32, whatever C is of, and those of integers int32."""
    dtype = np.dtype(np.int32 if state.input.kind in "iu" else np.float32)
    try:
        allocated = sums_of_warpgroup(extents, dtype)
    except TensorError as error:
        raise step.refuse(str(error)) from None
    seen = allocated.replaced(levels=(local(*operand.form.extents),))
    return OperandPlace(OperandForm(seen, None), allocated, 0, f"{allocated} of each {HOME[WR]}")


def _place_of_quads(step: Any, operand: OperandForm, extents: tuple, state: WalkState) -> OperandPlace:
    name = "c" if isinstance(step, nodes.Accumulate) else "ab"[step.operand]
    if state.input != np.float16 or state.accumulator != np.float32:
        raise step.refuse(f"mma.m8n8k4 multiplies float16 and adds up float32, not {state.input} and {state.accumulator}")
    if extents[0] % OF_QUADS[name][0] or extents[1] % OF_QUADS[name][1]:
        raise step.refuse(f"{extents[0]} x {extents[1]} elements of a quad-pair are not whole fragments of "
                          f"{' x '.join(map(str, OF_QUADS[name]))}")
    role = FragmentRole(name, None, state.input, state.accumulator, QUADS)
    seen = Form((local(*operand.form.extents),), QP, operand.form.dtype, role=role)
    allocated = seen.replaced(levels=(local(*extents),))
    return OperandPlace(OperandForm(seen, None), allocated, 0, f"{allocated} of each {HOME[QP]}")


def ring_stages(step: Any, operand: OperandForm, count: int, shared_by: int,
                state: WalkState) -> tuple[nodes.RingStages, str]:
    """An operand's place in a ring of ``count`` stages: panels whose lines are the swizzle's, 128 bytes in a tile as wide.
    Raises ScheduleError for a tile that TMA does not bring so."""
    form, axis = operand.form, 1 if operand.order == nodes.ROW_MAJOR else 0
    along, lines, size = form.extents[axis], form.extents[1 - axis], form.itemsize
    width = next((w // size for w in (128, 64, 32) if along * size % w == 0), 0)
    if not width:
        raise step.refuse(f"lines of {along} elements of {size} bytes are not a multiple of 32 bytes, which wgmma reads")
    if lines % (8 * shared_by) or lines // shared_by > 256:
        raise step.refuse(f"a tile of {lines} lines{f' for {shared_by} blocks' if shared_by > 1 else ''}: for wgmma TMA "
                          "brings multiples of 8 lines, 256 at most")
    made = Form((local(*form.extents),), SH, form.dtype).in_lines(width * size, "row" if axis else "col")
    nbytes = along * lines * size
    at = state.allocate(step, nbytes * count, 1024)
    said = (f"{step}.prefetch: {form} to {made.element}.SH, {made.layout}, {made.swizzle}, {count} stages, by "
            "cp.async.bulk.tensor")
    return nodes.RingStages(made, form.dtype, at, nbytes, axis, width, lines, along // width, shared_by), said


def role_of(step: Any, operand: OperandForm, extents: tuple, state: WalkState) -> FragmentRole:
    name = "c" if isinstance(step, nodes.Accumulate) else "ab"[step.operand]
    role = FragmentRole(name, operand.order, state.input, state.accumulator, state.fragments)
    key = (16, 16, 16), state.input, state.accumulator
    if key not in wmma.SPECS:
        raise step.refuse(f"no wmma instruction multiplies {state.input} and adds up {state.accumulator}; they take float16 "
                          "(sums of float32 or float16) and bfloat16 (float32)")
    if extents[0] % 16 or extents[1] % 16:
        raise step.refuse(f"{extents[0]} x {extents[1]} elements of a warp are not whole fragments of 16 x 16")
    return replace(role, order=None) if name == "c" else role


# --------------------------------------------------------------------------------------------------
# Atomic specs: a spec that is not decomposed is an instruction, or it is refused (Graphene, section 5.2 and Table 2).
#
# An `Instruction` is a component whose `run` is device code. Its class says what a spec would have to be for it:
# `differs` gives a sentence for each thing that is otherwise. The first instruction of a spec's kind from which nothing
# differs is taken. Is there none, `NoAtom` lists the nearest and what differs from each:
#
# >>> from gemmkit.specs import THREAD, T, instruction
# >>> instruction("Move", THREAD, T[8].fp16.GL, T[8].fp16.RF).__class__.__name__
# 'MoveLine'
# >>> instruction("MatMul", THREAD, T[()].fp16.RF, T[()].fp16.RF, T[()].fp32.RF)   # doctest: +ELLIPSIS
# Traceback (most recent call last):
# ...
# gemmkit.specs.accesses.NoAtom: MatMul <<<[].thread>>> ([].fp16.RF, [].fp16.RF) -> ([].fp32.RF) is no instruction...
#
# A spec is called with its parameters (an operator, a value), the threads that execute it, its inputs and outputs.

NEAREST = 3                                                   # instructions that an error lists


class NoAtom(ValueError):
    """A spec that no instruction executes, and that has no decomposition."""


class Instruction(Component):
    """An instruction as a spec: ``row`` is its line in Table 2."""

    row: ClassVar[str] = ""
    together: ClassVar[int | None] = None                     # how many threads execute it; None: see `differs`
    memories: ClassVar[tuple] = ()                            # of its last tensors each: one, or those that it may be in

    @property
    def becomes(self) -> str:
        """What is executed."""
        return self.row.rpartition(": ")[2]

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        """What a spec's parameters and forms have otherwise; nothing if this is the instruction."""
        raise NotImplementedError

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        """The instruction for them."""
        return cls()


_known: dict[str, list[type[Instruction]]] = {}


def atomic(kind: str, threads: int | None = None, *memories: Any) -> Callable[[type[Instruction]], type[Instruction]]:
    """Enter a class of instructions among those that execute a kind of spec, by ``threads`` together, with each tensor in a
    memory, or in one of several. `Instruction.differs` asks the rest."""
    def enter(cls: type[Instruction]) -> type[Instruction]:
        cls.together, cls.memories = threads, tuple((one,) if isinstance(one, str) else one for one in memories)
        _known.setdefault(kind, []).append(cls)
        return cls

    return enter


def _misplaced(kind: str, cls: type[Instruction], threads: Threads, forms: tuple) -> Iterator[str]:
    if cls.together is not None:
        yield from count_is(threads, cls.together)
    names = ("abc" if kind.startswith("MatMul") else ("the destination",) if len(cls.memories) == 1 else
             ("the source", "the destination", "the barrier"))
    for name, form, memories in zip(names, forms, cls.memories):
        yield from memory_is(name, form, *memories)


@lru_cache(maxsize=8192)
def instruction(kind: str, *given: Any) -> Instruction:
    """The instruction that a spec is. Raises NoAtom, with the nearest ones."""
    at = next(n for n, x in enumerate(given) if isinstance(x, Threads))
    parameters, threads, forms = given[:at], given[at], given[at + 1:]
    missed = []
    for number, cls in enumerate(_known[kind]):
        if cls.memories and len(forms) != len(cls.memories):
            wrong = [f"it takes {len(cls.memories)} tensors, not {len(forms)}"]
        else:
            wrong = [*_misplaced(kind, cls, threads, forms), *cls.differs(threads, *parameters, *forms)]
        if not wrong:
            found = cls.of(threads, *parameters, *forms)
            if freeze(found).leaves:                          # a kernel's arguments, of which a spec has none
                raise NoAtom(f"{kind}: a function among its parameters refers to NumPy's numbers or to arrays; write "
                             "Python's numbers, which take the type of what they are combined with")
            return found
        missed.append((len(wrong), number, cls, wrong))
    missed.sort(key=lambda m: m[:2])
    nearest = [f"  {cls.row}\n    but {'; '.join(wrong)}" for _, _, cls, wrong in missed[:NEAREST]]
    said = f"<{', '.join(map(str, parameters))}>" if parameters else ""
    inputs, output = ", ".join(map(str, forms[:-1])), str(forms[-1])
    raise NoAtom(f"{kind}{said} <<<{threads}>>> ({inputs}) -> ({output}) is no instruction. Decompose it further; the "
                 "nearest instructions are\n" + "\n".join(nearest))


# -- as device code ---------------------------------------------------------------------------------------------------

def _value_of(ty: object) -> Any:
    """What is matched of an argument: its compile-time value, its form; of a function itself."""
    if isinstance(ty, SplitType):
        return ty.static
    if isinstance(ty, DeviceFunctionType):
        return ty.function.function
    return known(ty)


def _constant(value: Any) -> Any:
    """A number of the emulator's as Python's, which an instruction is kept with."""
    return value if isinstance(value, bool) else next((of(value) for of in (int, float) if isinstance(value, of)), value)


def _arguments(kind: str, values: tuple) -> tuple:
    """The place of the threads among a spec's arguments."""
    at = [n for n, x in enumerate(values) if isinstance(x, Threads)]
    if len(at) != 1 or not all(isinstance(x, Form) for x in values[at[0] + 1:]) or len(values) == at[0] + 1:
        raise NoAtom(f"{kind}: give its parameters, the threads that execute it, and its tensors; got "
                     f"({', '.join(map(str, values))})")
    return at[0], values


def spec(kind: str, doc: str) -> nb.Atom:
    """A kind of spec as a function of device code, of (parameters..., threads, tensors...)."""
    def typer(context: TypingContext, *args: types.Type) -> Any:
        try:
            at, values = _arguments(kind, tuple(map(_value_of, args)))
            made = instruction(kind, *values)
        except (NoAtom, NotKnown) as error:
            raise nb.TypingError(str(error)) from None
        ty: Any = freeze(made).type
        run = ty.method("run")
        tensors = args[at + 1:]
        inner = signature(run.compile((ty, *tensors)).signature.return_type, ty, *tensors)

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            component = nb.cgutils.create_struct_proxy(ty)(c, b)._getvalue()
            c.get_function(DeviceFunctionType(run), inner)(b, (component, *v[at + 1:]))

        return signature(types.none, *args), codegen

    def emulate(*args: object) -> None:
        at, values = _arguments(kind, tuple(_constant(getattr(x, "form", x)) for x in args))
        run: Any = instruction(kind, *values)
        run.run(*args[at + 1:])

    emulate.__name__, emulate.__doc__ = kind, doc
    return nb.Atom(kind, typer, emulate)


# -- what rules say ---------------------------------------------------------------------------------------------------

def count_is(threads: Threads, count: int) -> Iterator[str]:
    if threads.size != count:
        yield f"{threads.size} threads execute it, not {count}"


def memory_is(name: str, form: Form, *memories: str) -> Iterator[str]:
    if form.memory not in memories:
        yield f"{name} is in {form.memory}, not in {' or '.join(memories)}"


def dtype_is(name: str, form: Form, *dtypes: object) -> Iterator[str]:
    if form.dtype not in dtypes:
        yield f"{name} is of {form.dtype}, not of {' or '.join(map(str, dtypes))}"


def levels_are(name: str, form: Form, *extents: tuple) -> Iterator[str]:
    if tuple(level.extents for level in form.levels) != extents:
        wanted = ".".join(f"[{','.join(map(str, e))}]" for e in extents)
        yield f"{name} is {form}, not {wanted}"


def fragment_of(name: str, form: Form, by: str) -> Iterator[str]:
    """Fragments of wmma's and of mma.sync's hold elements in other orders; ``by`` is `WMMA` or `MMA`."""
    if form.role is not None and form.role.by != by:
        yield f"{name} is a fragment of {'wmma' if by == MMA else 'mma.sync'}'s"


def is_line(name: str, form: Form) -> Iterator[str]:
    line = line_of(form)
    if not isinstance(line, Line):
        yield f"{name} {form} {line}"


def count_of(form: Form) -> int:
    """How many elements a line has; 0 of what is none."""
    line = line_of(form)
    return line.count if isinstance(line, Line) else 0


def alike(forms: tuple, what: str = "operands") -> Iterator[str]:
    if len({form.dtype for form in forms}) != 1:
        yield f"{what} are of {', '.join(str(form.dtype) for form in forms)}: all of one type are needed"
