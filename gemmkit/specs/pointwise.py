"""The other specs as instructions: Init, UnaryPointwise, BinaryPointwise, Reduction and Shfl (Table 1).

BinaryPointwise takes an operator's name, ``"+"``, ``"-"``, ``"*"``, ``"max"`` or ``"min"``; Reduction one of these but
``"-"``; UnaryPointwise a function of one number; Shfl how lanes exchange (`gemmkit.ptx.special`) and with which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar

import numpy as np

from gemmkit.lang.aggregates import convert, fill
from gemmkit.lang.components import dataclass
from gemmkit.lang.registers import Fragment, apply, fold, generate, join
from gemmkit.ptx.arithmetic import hadd, hadd2, hmul, hmul2
from gemmkit.ptx.special import SHUFFLE, lane_index, udiv
from gemmkit.specs.accesses import (
    Instruction,
    access_of,
    alike,
    atomic,
    count_is,
    count_of,
    dtype_is,
    is_line,
    levels_are,
    memory_is,
    write_registers,
)
from gemmkit.specs.moves import SIDE, of_quads
from gemmkit.specs.tensors import FR, GL, QP, RF, SH, WR, Form, Tensor, Threads, fragments_of, is_block

F16 = np.dtype(np.float16)


def _sum(a: Any, b: Any) -> Any:
    return a + b


def _difference(a: Any, b: Any) -> Any:
    return a - b


def _product(a: Any, b: Any) -> Any:
    return a * b


def _larger(a: Any, b: Any) -> Any:
    return max(a, b)


def _smaller(a: Any, b: Any) -> Any:
    return min(a, b)


#: The operators of BinaryPointwise and Reduction.
OPERATORS = MappingProxyType({"+": _sum, "-": _difference, "*": _product, "max": _larger, "min": _smaller})
_OF_HALVES = MappingProxyType({("+", 1): hadd, ("*", 1): hmul, ("+", 2): hadd2, ("*", 2): hmul2})


def _one_thread(threads: Threads, forms: tuple) -> Iterator[str]:
    """Lines of one length, and of one type, of one thread."""
    yield from count_is(threads, 1)
    for name, form in zip(("the first", "the second", "the third"), forms):
        yield from memory_is(name, form, RF, GL, SH)
        yield from is_line(name, form)
    yield from alike(forms, "they")


def _operator(name: object) -> Iterator[str]:
    if name not in OPERATORS:
        yield f"{name!r} is no operator: {', '.join(OPERATORS)}"


# -- Init -------------------------------------------------------------------------------------------------------------

@atomic("Init")
@dataclass(frozen=True)
class InitLine(Instruction):
    """A thread's elements."""

    row: ClassVar[str] = "Init<value> [1].thread -> [n].RF, SH or GL: mov, st"
    target: Any
    value: Any
    dtype: np.dtype
    count: int

    @staticmethod
    def differs(threads: Threads, *given: object) -> Iterator[str]:
        yield from _one_thread(threads, given[-1:])

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        dst = given[-1]
        return cls(access_of(dst), given[0] if len(given) > 1 else 0, dst.dtype, count_of(dst))

    @property
    def becomes(self) -> str:
        stored = self.target.said(self.dtype.itemsize)
        return f"st {stored}" if stored else "mov"

    def run(self, dst: Tensor) -> None:
        self.target.store(dst, fill(self.dtype, self.count, self.value))


@atomic("Init", 1, RF)
@dataclass(frozen=True)
class InitBlock(Instruction):
    """A block of a thread's registers."""

    row: ClassVar[str] = "Init<value> [1].thread -> [m,n].RF: mov"
    extents: tuple
    value: Any
    dtype: np.dtype

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        if not is_block(given[-1]):
            yield f"the destination is {given[-1]}, not a block of registers"

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        return cls(given[-1].extents, given[0] if len(given) > 1 else 0, given[-1].dtype)

    @property
    def count(self) -> int:
        return math.prod(self.extents)

    def run(self, dst: Tensor) -> None:
        write_registers(dst.storage, dst.at, self.extents, fill(self.dtype, self.count, self.value))


@atomic("Init", 32, FR)
@dataclass(frozen=True)
class InitFragment(Instruction):
    """A warp's fragment of sums."""

    row: ClassVar[str] = "Init<value> [32].thread -> [16,16].FR: mov"
    fragment: Fragment
    value: Any

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        yield from levels_are("the destination", given[-1], (SIDE, SIDE))

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        return cls(fragments_of(given[-1])[0], given[0] if len(given) > 1 else 0)

    def run(self, dst: Tensor) -> None:
        i, j = dst.at
        dst.storage[udiv(i, SIDE), udiv(j, SIDE)] = fill(self.fragment.dtype, self.fragment.count, self.value)


def of_warpgroup(form: Form) -> Iterator[str]:
    """What a form would have to be for a warpgroup's fragment of sums."""
    if form.role is not None and form.extents != (64, form.role.columns):
        yield f"the sums are {form}, not one fragment of 64 x {form.role.columns}"


@atomic("Init")
@dataclass(frozen=True)
class InitSums(Instruction):
    """Sums of a warpgroup, or of a quad-pair."""

    row: ClassVar[str] = "Init<value> [128].thread -> [64,n].WR; [(4,2):(1,16)].thread -> [8,8].QP: mov"
    value: Any
    dtype: np.dtype
    rows: int
    columns: int
    threads: int

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        is_quads = given[-1].memory == QP
        yield from count_is(threads, 8 if is_quads else 128)
        yield from memory_is("the destination", given[-1], QP, WR)
        yield from of_quads("the sums", given[-1], "c") if is_quads else of_warpgroup(given[-1])

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        dst = given[-1]
        rows, columns = dst.extents
        return cls(given[0] if len(given) > 1 else 0, dst.dtype, rows, columns, threads.size)

    @property
    def count(self) -> int:
        return self.rows * self.columns // self.threads

    def run(self, dst: Tensor) -> None:
        i, j = dst.at
        dst.storage[udiv(i, self.rows), udiv(j, self.columns)] = fill(self.dtype, self.count, self.value)


@atomic("Move", 128, (GL, SH), WR)
@dataclass(frozen=True)
class BroadcastRow(Instruction):
    """A row to all rows of a warpgroup's sums, which begin so with a bias."""

    row: ClassVar[str] = "Move [128].thread [1,n].GL or SH -> [64,n].WR: ld of two neighbours of each 8 columns a thread"
    source: Any
    columns: int
    dtype: np.dtype

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        yield from of_warpgroup(dst)
        if dst.role is not None:
            yield from levels_are("the source", src, (1, dst.role.columns))

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        return cls(access_of(src.tile(1, 2).inner), dst.role.columns, dst.dtype)

    @property
    def count(self) -> int:
        return self.columns // 8

    def run(self, src: Tensor, dst: Tensor) -> None:
        i, j = dst.at
        own = src.window(1, 2, (0, (lane_index() & 3) * 2), "base")
        dst.storage[udiv(i, 64), udiv(j, self.columns)] = join(generate(self.count, _of_both_rows, self, own))


def _of_both_rows(n: int, of: Any, own: Any) -> tuple:
    first, second = of.source.load(own.window(1, 2, (0, 8 * n), "offset"))
    x, y = convert(of.dtype, first), convert(of.dtype, second)
    return x, y, x, y


# -- pointwise --------------------------------------------------------------------------------------------------------

@atomic("UnaryPointwise")
@dataclass(frozen=True)
class Apply(Instruction):
    """A function of each element; what it returns is of the output's type."""

    row: ClassVar[str] = "UnaryPointwise<function> [1].thread [n] -> [n]: what the function is compiled to"
    function: Any
    source: Any
    target: Any

    @staticmethod
    def differs(threads: Threads, *given: object) -> Iterator[str]:
        function, *forms = given
        if not isinstance(function, FunctionType):
            yield f"{function!r} is no function of one number"
        for form in forms:                                    # which may be of two types: the function converts
            yield from _one_thread(threads, (form,))
        yield from _same_length(tuple(forms))

    @classmethod
    def of(cls, threads: Threads, *given: object) -> Instruction:
        function, src, dst = given
        return cls(function, access_of(src), access_of(dst))

    def run(self, src: Tensor, dst: Tensor) -> None:
        self.target.store(dst, apply(_applied, self.source.load(src), self))


def _applied(value: Any, number: int, of: Any) -> Any:
    return of.function(value)


@atomic("UnaryPointwise", 128, WR, WR)
@dataclass(frozen=True)
class ApplyToSums(Instruction):
    """A function of each of a warpgroup's sums."""

    row: ClassVar[str] = "UnaryPointwise<function> [128].thread [64,n].WR -> [64,n].WR: what the function is compiled to"
    function: Any
    columns: int

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        function, src, dst = given
        if not isinstance(function, FunctionType):
            yield f"{function!r} is no function of one number"
        yield from of_warpgroup(src)
        yield from of_warpgroup(dst)
        if src.levels != dst.levels or src.dtype != dst.dtype:
            yield f"{src} goes to {dst}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        return cls(given[0], given[1].role.columns)

    def run(self, src: Tensor, dst: Tensor) -> None:
        (i, j), (y, x) = src.at, dst.at
        given = src.storage[udiv(i, 64), udiv(j, self.columns)]
        dst.storage[udiv(y, 64), udiv(x, self.columns)] = apply(_applied, given, self)


def _same_length(forms: tuple) -> Iterator[str]:
    if len({count_of(form) for form in forms}) != 1:
        yield f"they have {', '.join(str(count_of(form)) for form in forms)} elements"


@atomic("BinaryPointwise")
@dataclass(frozen=True)
class CombineHalves(Instruction):
    """Elements of fp16 in registers, one or two."""

    row: ClassVar[str] = "BinaryPW<+ or *> [1].thread [].fp16.RF, [].fp16.RF -> [].fp16.RF: hadd, hmul; [2]: hadd2, hmul2"
    name: str
    access: tuple
    count: int

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        name, *forms = given
        if name not in ("+", "*"):
            yield f"the operator is {name}, not + or *"
        yield from _one_thread(threads, tuple(forms))
        yield from _same_length(tuple(forms))
        for form in forms:
            yield from memory_is(str(form), form, RF)
            yield from dtype_is(str(form), form, F16)
            if count_of(form) not in (1, 2):
                yield f"{form} has {count_of(form)} elements, not 1 or 2"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        name, *forms = given
        return cls(name, tuple(map(access_of, forms)), count_of(forms[0]))

    @property
    def is_pair(self) -> bool:
        return self.count == 2

    @property
    def combine(self) -> Any:
        return _OF_HALVES[self.name, self.count]

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        x, y = self.access[0].load(a), self.access[1].load(b)
        if self.is_pair:
            self.access[2].store(c, self.combine(x, y))
        else:
            self.access[2].store(c, (self.combine(x[0], y[0]),))


@atomic("BinaryPointwise")
@dataclass(frozen=True)
class CombineElements(Instruction):
    """Elements of any type, wherever they are; the second operand may be one element, for all."""

    row: ClassVar[str] = "BinaryPW<+, -, *, max or min> [1].thread [n], [n] or [] -> [n]: an instruction for each element"
    combine: Any
    access: tuple
    step: int                                                 # from one element of the second to the next

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        name, a, b, c = given
        yield from _operator(name)
        yield from _one_thread(threads, given[1:])
        yield from _same_length((a, c) if count_of(b) == 1 else (a, b, c))

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        name, *forms = given
        return cls(OPERATORS[name], tuple(map(access_of, forms)), 0 if count_of(forms[1]) == 1 else 1)

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        x, y = self.access[0].load(a), self.access[1].load(b)
        self.access[2].store(c, apply(_combined, x, self, y))


def _combined(value: Any, number: int, of: Any, others: tuple) -> Any:
    return of.combine(value, others[number * of.step])


# -- Reduction, Shfl --------------------------------------------------------------------------------------------------

@atomic("Reduction")
@dataclass(frozen=True)
class ReduceLine(Instruction):
    """A thread's elements to one, in order."""

    row: ClassVar[str] = "Reduction<+, *, max or min> [1].thread [n] -> []: an instruction for each element but one"
    combine: Any
    source: Any
    target: Any
    count: int

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        name, *forms = given
        yield from _operator(name)
        if name == "-":
            yield "a difference of several depends on their order"
        yield from _one_thread(threads, tuple(forms))
        if count_of(forms[-1]) != 1:
            yield f"the result is {forms[-1]}, not one element"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        name, src, dst = given
        return cls(OPERATORS[name], access_of(src), access_of(dst), count_of(src))

    @property
    def rest(self) -> int:
        return self.count - 1

    def run(self, src: Tensor, dst: Tensor) -> None:
        values = self.source.load(src)
        self.target.store(dst, (fold(self.rest, lambda total, number: self.combine(total, values[number + 1]), values[0]),))


@atomic("Shfl", 32, RF, RF)
@dataclass(frozen=True)
class ShuffleElements(Instruction):
    """Registers of other lanes."""

    row: ClassVar[str] = "Shfl<bfly, idx, up or down; lane> [32].thread [n].RF -> [n].RF, 16, 32 or 64 bits: shfl.sync"
    mode: str
    lane: int
    source: Any
    target: Any

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        mode, lane, *forms = given
        if mode not in SHUFFLE:
            yield f"{mode!r} is none of {', '.join(SHUFFLE)}"
        if not isinstance(lane, int) or not 0 <= lane < 32:
            yield f"the lane is {lane!r}, not a number from 0 to 31"
        for name, form in zip(("the source", "the destination"), forms):
            yield from is_line(name, form)
            if form.itemsize not in (2, 4, 8):
                yield f"{name} is of {form.dtype}, not of 16, 32 or 64 bits"
        yield from alike(tuple(forms), "they")
        yield from _same_length(tuple(forms))

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        mode, lane, src, dst = given
        return cls(mode, lane, access_of(src), access_of(dst))

    @property
    def shuffle(self) -> Any:
        return SHUFFLE[self.mode]

    def run(self, src: Tensor, dst: Tensor) -> None:
        self.target.store(dst, apply(lambda value, number: self.shuffle(value, self.lane), self.source.load(src)))
