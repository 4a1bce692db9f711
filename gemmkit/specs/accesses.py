"""How one thread reads and writes a line or a block of elements, by the memory that it is in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, ClassVar

from gemmkit.components import Component, freeze
from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.aggregates import convert
from gemmkit.lang.components import dataclass
from gemmkit.lang.functions import DeviceFunctionType
from gemmkit.lang.memory import coordinates_of
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.registers import RegistersType, apply, each, generate, join, split
from gemmkit.lang.static import NotKnown, SplitType, known, traced
from gemmkit.ptx.memory import load_global, load_shared, store_global, store_shared
from gemmkit.shapes import Shape, ShapeError, Step, local, shape
from gemmkit.specs import nodes
from gemmkit.specs import nodes as steps
from gemmkit.specs.tensors import GL, MMA, RF, Form, Line, Tensor, Threads, line_of

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

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        return c.make_tuple(b, result, [b.extract_value(b.load(slot), 0) for slot in _slots(c, b, regs, at, v, wanted)])

    return signature(result, regs, at, extents), codegen


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

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        for n, slot in enumerate(_slots(c, b, regs, at, v, wanted)):
            value = c.cast(b, b.extract_value(v[3], n), values.types[n], regs.value.dtype)
            b.store(c.make_tuple(b, regs.value, [value]), slot)
        return c.get_dummy_value()

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
        if form.is_partial:
            return InPartial(line.axis, line.count, form.dtype, form.partial_axes)
        return InGlobal(line.axis, line.count)
    if form.memory == RF:
        return InRegisters(tuple(line.count if axis == line.axis else 1 for axis in range(form.rank)))
    return _shared_access(form, line)


def is_block(form: Form) -> bool:
    """Whether a form's elements are the storage's own, one beside the other."""
    plain = all(len(dim) == 1 for dim in form.shape.modes)
    return len(form.levels) == 1 and form.shape.rank == form.rank == 2 and plain and all(
        dim[0][0] == 1 or dim[0][1] == tuple(int(axis == n) for n in range(2)) for axis, dim in enumerate(form.shape.modes))


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
# A spec is called with its parameters (an operator, a value), the threads that execute it together, its inputs and
# outputs.

NEAREST = 3                                                   # instructions that an error lists


class NoAtom(ValueError):
    """A spec that no instruction executes, and that has no decomposition."""


class Instruction(Component):
    """An instruction as a spec: ``row`` is its line in Table 2."""

    row: ClassVar[str] = ""

    @property
    def becomes(self) -> str:
        """What is executed."""
        return self.row.rpartition(": ")[2]

    @staticmethod
    def differs(threads: Threads, *given: object) -> Iterator[str]:
        """What a spec's parameters and forms have otherwise; nothing if this is the instruction."""
        raise NotImplementedError

    @classmethod
    def of(cls, threads: Threads, *given: object) -> Instruction:
        """The instruction for them."""
        return cls()


_known: dict[str, list[type[Instruction]]] = {}


def atomic(kind: str) -> Callable[[type[Instruction]], type[Instruction]]:
    """Enter a class of instructions among those that execute a kind of spec."""
    def enter(cls: type[Instruction]) -> type[Instruction]:
        _known.setdefault(kind, []).append(cls)
        return cls

    return enter


@lru_cache(maxsize=8192)
def instruction(kind: str, *given: Any) -> Instruction:
    """The instruction that a spec is. Raises NoAtom, with the nearest ones."""
    at = next(n for n, x in enumerate(given) if isinstance(x, Threads))
    parameters, threads, forms = given[:at], given[at], given[at + 1:]
    missed = []
    for number, cls in enumerate(_known[kind]):
        wrong = list(cls.differs(threads, *parameters, *forms))
        if not wrong:
            return cls.of(threads, *parameters, *forms)
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

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            component = nb.cgutils.create_struct_proxy(ty)(c, b)._getvalue()
            c.get_function(DeviceFunctionType(run), inner)(b, (component, *v[at + 1:]))
            return c.get_dummy_value()

        return signature(types.none, *args), codegen

    def emulate(*args: object) -> None:
        at, values = _arguments(kind, tuple(getattr(x, "form", x) for x in args))
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
