"""How one thread reads and writes a line or a block of elements, by the memory that it is in."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

from gemmkit.components import Component
from gemmkit.lang.atoms import atom
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, join, split
from gemmkit.lang.memory import coordinates_of
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.registers import RegistersType, generate
from gemmkit.lang.static import NotKnown, known
from gemmkit.lang.values import convert
from gemmkit.ptx.memory import load_global, load_shared, store_global, store_shared
from gemmkit.specs.forms import GL, RF, Form, Line, line_of

i32 = ir.IntType(32)


# -- blocks of registers, as tuples -----------------------------------------------------------------------------------

def _steps(extents: tuple) -> list[tuple]:
    """The places in a block, the first dimension fastest."""
    return [tuple(reversed(at)) for at in itertools.product(*map(range, reversed(extents)))]


def _slots(c: Any, b: Any, regs: Any, at: Any, v: Any, extents: tuple) -> list:
    first = coordinates_of(c, b, at, v[1])
    out = []
    for step in _steps(extents):
        place = i32(0)
        for start, ahead, extent in zip(first, step, regs.shape):
            place = b.add(b.mul(place, i32(extent)), b.add(start, i32(ahead)))
        out.append(b.gep(v[0], [place]))
    return out


def _type_read(context: Any, regs: Any, at: Any, extents: Any) -> Any:
    try:
        wanted = known(extents)
    except NotKnown:
        return None
    if not isinstance(regs, RegistersType) or regs.value.count != 1:
        return None
    result = types.UniTuple(regs.value.dtype, math.prod(wanted))

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return c.make_tuple(b, result, [b.extract_value(b.load(slot), 0) for slot in _slots(c, b, regs, at, v, wanted)])

    return signature(result, regs, at, extents), codegen


@atom(_type_read)
def read_registers(regs: Any, at: tuple, extents: tuple) -> tuple:
    """A block of registers from ``at`` on, its first dimension fastest."""
    return tuple(regs[tuple(map(_add, at, step))][0] for step in _steps(extents))


def _type_write(context: Any, regs: Any, at: Any, extents: Any, values: Any) -> Any:
    try:
        wanted = known(extents)
    except NotKnown:
        return None
    if not isinstance(regs, RegistersType) or regs.value.count != 1 or len(values.types) != math.prod(wanted):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
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

    def load(self, tensor: Any) -> tuple:
        return read_registers(tensor.storage, tensor.at, self.extents)

    def store(self, tensor: Any, values: tuple) -> None:
        write_registers(tensor.storage, tensor.at, self.extents, values)


@dataclass(frozen=True)
class InGlobal(Component):
    """``count`` elements along ``axis``: as few instructions as the array's alignment allows."""

    axis: int
    count: int

    def said(self, itemsize: int) -> str:
        return f"{self.count * itemsize} bytes in GL"

    def load(self, tensor: Any) -> tuple:
        return load_global(tensor.storage, self.axis, tensor.base, tensor.offset, self.count)

    def store(self, tensor: Any, values: tuple) -> None:
        store_global(tensor.storage, self.axis, tensor.base, tensor.offset, values)


@dataclass(frozen=True)
class InPartial(InGlobal):
    """`InGlobal` of a matrix whose tiles may reach over its edge: there are zeros, and nothing is written (section 3.4)."""

    dtype: Any

    def load(self, tensor: Any) -> tuple:
        if is_inside(self, tensor):
            values = load_global(tensor.storage, self.axis, tensor.base, tensor.offset, self.count)
        else:
            values = self.load_what_is_there(tensor)
        return values

    def load_what_is_there(self, tensor: Any) -> tuple:
        """Element by element; zeros for those beyond the edge."""
        return generate(self.count, _element_or_zero, self, tensor.storage, tensor.at)

    def store(self, tensor: Any, values: tuple) -> None:
        if is_inside(self, tensor):
            store_global(tensor.storage, self.axis, tensor.base, tensor.offset, values)
        else:
            each(_store_if_there, values, self, tensor.storage, tensor.at)

    def said(self, itemsize: int) -> str:
        return f"{self.count * itemsize} bytes in GL, or what of them is there"


def is_inside(line: InPartial, tensor: Any) -> bool:
    """Whether all of a line is in the matrix."""
    i, j = tensor.at
    rows, columns = tensor.storage.shape
    down, across = line.count * (1 - line.axis) + line.axis, line.count * line.axis + 1 - line.axis
    return i + down <= rows and j + across <= columns


def _element_or_zero(n: int, line: InPartial, view: Any, at: tuple) -> Any:
    i, j = at[0] + n * (1 - line.axis), at[1] + n * line.axis
    rows, columns = view.shape
    value = convert(line.dtype, 0)
    if i < rows and j < columns:
        value = view[i, j]
    return value


def _store_if_there(value: Any, n: int, line: InPartial, view: Any, at: tuple) -> None:
    i, j = at[0] + n * (1 - line.axis), at[1] + n * line.axis
    rows, columns = view.shape
    if i < rows and j < columns:
        view[i, j] = value


@dataclass(frozen=True)
class InShared(Component):
    """``times`` accesses to ``width`` neighbours, ``step`` elements apart."""

    times: int
    width: int
    step: int

    def said(self, itemsize: int) -> str:
        return f"{f'{self.times} x ' if self.times > 1 else ''}{self.width * itemsize} bytes in SH"

    def load(self, tensor: Any) -> tuple:
        return join(generate(self.times, _read_shared, tensor, self.step, self.width))

    def store(self, tensor: Any, values: tuple) -> None:
        each(_write_shared, split(values, self.width), tensor, self.step)


def _read_shared(n: int, tensor: Any, step: int, width: int) -> tuple:
    base, offset = tensor.ahead(n * step)
    return load_shared(tensor.storage, base, offset, width)


def _write_shared(values: tuple, n: int, tensor: Any, step: int) -> None:
    base, offset = tensor.ahead(n * step)
    store_shared(tensor.storage, base, offset, values)


@lru_cache(maxsize=4096)
def access_of(form: Form) -> Any:
    """The access to a form that is a line (`line_of`). Raises ValueError for another."""
    line = line_of(form)
    if not isinstance(line, Line):
        raise ValueError(f"{form} {line}")
    if form.memory == GL:
        return InPartial(line.axis, line.count, form.dtype) if form.is_partial else InGlobal(line.axis, line.count)
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
