"""``wmma``: a warp's matrix multiply with loads and stores of its own (PTX ISA).

| inputs | M x N x K | sums | from |
|---|---|---|---|
| float16; bfloat16 | 16 x 16 x 16, 8 x 32 x 16, 32 x 8 x 16 | float32 (of float16 also float16) | sm_70; sm_80 |
| int8, uint8 | the same | int32, which wrap | sm_75 |
| float32, as tf32 | 16 x 16 x 8 | float32 | sm_80 |
| float64 | 8 x 8 x 4 | float64 | sm_80 |

The fragments are opaque: which thread holds what is not specified, so transforms on them may not look at coordinates.
The emulation deals the elements in turn; only load -> mma -> store as a whole means the same as on hardware.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit import emulator
from gemmkit.lang.host import current
from gemmkit.lang.memory import SharedType, coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import Atom, Context, Signature, TypingContext, Values, ir, signature, types
from gemmkit.lang.scalars import assembly, braces, numba_type
from gemmkit.ptx.memory import is_position
from gemmkit.ptx.mma import (
    BF16,
    F16,
    F32,
    F64,
    INPUT_NAME,
    S8,
    S32,
    SUM_NAME,
    U8,
    input_registers,
    register_of,
    rounded_to_tf32,
    shared_address,
    truncated_to_tf32,
)
from gemmkit.ptx.registers import elements, from_registers, to_registers

i32 = ir.IntType(32)
SHAPES = ((16, 16, 16), (8, 32, 16), (32, 8, 16))


@dataclass(frozen=True)
class WmmaSpec:
    """The instructions of one shape and type: ``wmma.load.{a,b,c}``, ``wmma.mma``, ``wmma.store.d``."""

    M: int
    N: int
    K: int
    input: np.dtype
    accumulator: np.dtype

    @property
    def shape(self) -> str:
        return f"m{self.M}n{self.N}k{self.K}"

    @property
    def name(self) -> str:
        """Part of the atoms' names: two atoms of one name would be one compile-time value."""
        return f"{self.shape}_{self.kind('a')}_{self.kind('c')}"

    def kind(self, operand: str) -> str:
        """The type's name in PTX."""
        return SUM_NAME[self.accumulator] if operand == "c" else INPUT_NAME[self.input]

    @property
    def is_tf32(self) -> bool:
        return self.input == F32

    @property
    def minimum_arch(self) -> tuple[int, int]:
        """The least compute capability that has it."""
        return (7, 0) if self.input == F16 else (7, 5) if self.accumulator == S32 else (8, 0)

    def extents(self, operand: str) -> tuple[int, int]:
        return {"a": (self.M, self.K), "b": (self.K, self.N), "c": (self.M, self.N)}[operand]

    def dtype(self, operand: str) -> np.dtype:
        return self.accumulator if operand == "c" else self.input

    def count(self, operand: str) -> int:
        """Elements a thread holds: 16 of an f16 input whatever the shape (some twice), else each once."""
        if operand != "c" and self.input == F16:
            return 16
        rows, columns = self.extents(operand)
        return rows * columns // 32

    def registers(self, operand: str) -> int:
        return self.count(operand) * min(4, self.dtype(operand).itemsize) // 4

    def register(self, operand: str) -> ir.Type:
        """Their LLVM type."""
        return register_of(self.accumulator if operand == "c" or self.input == F64 else S32)

    def load_text(self, operand: str, layout: str, space: str = "shared") -> str:
        n = self.registers(operand)
        return (f"wmma.load.{operand}.sync.aligned.{layout}.{self.shape}.{space}.{self.kind(operand)} "
                f"{braces(0, n)}, [${n}], ${n + 1};")

    def store_text(self, layout: str, space: str = "shared") -> str:
        n = self.registers("c")
        return (f"wmma.store.d.sync.aligned.{layout}.{self.shape}.{space}.{self.kind('c')} "
                f"[$0], {braces(1, n)}, ${n + 1};")

    def mma_text(self, a_layout: str, b_layout: str) -> str:
        acc, kind = self.kind("c"), self.kind("a")
        suffix = f"{acc}.{acc}" if self.input == F16 else f"{acc}.{kind}.{kind}.{acc}"
        a, b, c = self.registers("a"), self.registers("b"), self.registers("c")
        return (f"wmma.mma.sync.aligned.{a_layout}.{b_layout}.{self.shape}.{suffix} {braces(0, c)}, {braces(c, a)}, "
                f"{braces(c + a, b)}, {braces(c + a + b, c)};")

    # -- emulation ------------------------------------------------------------------------------------------------

    def deal(self, operand: str, matrix: np.ndarray) -> list[tuple]:
        flat, n = matrix.reshape(-1), self.count(operand)
        return [tuple(flat[(lane + 32 * v) % flat.size] for v in range(n)) for lane in range(32)]

    def collect(self, operand: str, fragments: list) -> np.ndarray:
        rows, columns = self.extents(operand)
        values = np.array([[f[v] for f in fragments] for v in range(rows * columns // 32)])
        return values.reshape(rows, columns)

    def deal_lines(self, operand: str, layout: str, parts: list) -> list:
        """Fragments of what the lanes read, a piece of a row (or column) each."""
        rows, columns = self.extents(operand)
        flat = np.array([x for part in parts for x in part], self.dtype(operand))
        return self.deal(operand, flat.reshape(rows, columns) if layout == "row" else flat.reshape(columns, rows).T)

    def collect_lines(self, layout: str, fragments: list) -> list:
        """What the lanes write of C's fragments."""
        matrix = self.collect("c", fragments)
        return list((matrix if layout == "row" else matrix.T).reshape(32, -1))

    def compute(self, operands: list) -> list:
        """What the warp computes: from 32 (a, b, c) to 32 fragments of D. Integers wrap, float32 is cut to tf32."""
        wide = {S32: "i8", F64: "f8"}.get(self.accumulator, "f4")
        a, b, c = (self.collect(name, [o[n] for o in operands]).astype(wide) for n, name in enumerate("abc"))
        if self.is_tf32:
            a, b = truncated_to_tf32(a), truncated_to_tf32(b)
        with np.errstate(all="ignore"):
            return self.deal("c", (a @ b + c).astype(self.accumulator))

    def multiply(self, operands: list) -> list:
        """What the atom computes: float32 is rounded to tf32."""
        if not self.is_tf32:
            return self.compute(operands)
        return self.compute([(rounded_to_tf32(a), rounded_to_tf32(b), c) for a, b, c in operands])


def _wide(spec: WmmaSpec, operand: str) -> Any:
    return types.UniTuple(numba_type(spec.dtype(operand)), spec.count(operand))


def _lane_share(spec: WmmaSpec, operand: str, layout: str, lane: int, stride: int) -> tuple[int, int]:
    """(first element, count) of what one lane reads or writes in the emulator: a piece of a row (or column)."""
    rows, columns = spec.extents(operand)
    line = columns if layout == "row" else rows
    share = rows * columns // 32
    first = lane * share
    return first // line * stride + first % line, share


def load_atom(spec: WmmaSpec, operand: str, layout: str) -> Atom:
    """``load(pointer, base, offset, stride) -> fragment``; ``layout`` is "row" or "col", stride in elements."""
    def typer(context: TypingContext, pointer: types.Type, base: types.Type, offset: types.Type, stride: types.Type) -> Any:
        if not isinstance(pointer, SharedType) or pointer.dtype != spec.dtype(operand):
            return None
        result = _wide(spec, operand)
        register = spec.register(operand)

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
            operands = [shared_address(b, pointer, v[0], terms), *coordinates_of(c, b, stride, v[3])]
            out = assembly(b, spec.load_text(operand, layout), [register] * spec.registers(operand), operands,
                           memory=True)
            return c.make_tuple(b, result, from_registers(b, out, c.get_value_type(result.dtype)))

        return signature(result, pointer, base, offset, stride), codegen

    def emulate(pointer: Any, base: int, offset: int, stride: int) -> tuple:
        thread = current()
        first, share = _lane_share(spec, operand, layout, thread.lane, stride)
        values = pointer.load(int(base) + int(offset) + first, share)
        return thread.collective(f"wmma.load.{operand}", values, functools.partial(spec.deal_lines, operand, layout),
                                 sync=False)

    return Atom(f"wmma_load_{operand}_{layout}_{spec.name}", typer, emulate)


def _line_address(c: Context, b: ir.IRBuilder, view: Any, v: Values, given: tuple, unit: int) -> tuple[Any, Any]:
    """(the address of a tile in global memory, the distance of its lines in elements)."""
    (base, offset), fields = given, proxy(c, b, view, v[0])
    terms = [coordinates_of(c, b, base, v[1], view.coordinate), coordinates_of(c, b, offset, v[2], view.coordinate)]
    address = b.ptrtoint(global_pointer(b, view, fields, terms, ir.IntType(8)), ir.IntType(64))
    apart = getattr(fields, f"stride{1 - unit}")
    return address, b.trunc(apart, i32) if apart.type != i32 else apart


def _check_lines(view: Any, base: tuple, offset: tuple, unit: int, what: str) -> tuple[int, int]:
    """In the emulator: the place of a tile, of whose lines each begins at a multiple of 16 bytes."""
    thread = current()
    i, j = (int(x) + int(y) for x, y in zip(base, offset))
    for line, at in ([(view.steps[1 - unit], view.locate((i, j)))] if thread.lane == 0 else []):
        if at % 16 or line % 16:
            raise emulator.barriers.fault(
                thread, f"{what} at {at:#x}, of lines {line} bytes apart: multiples of 16 are needed")
    return i, j


def load_global_atom(spec: WmmaSpec, operand: str, layout: str) -> Atom:
    """``load(view, base, offset) -> fragment``: from a matrix in global memory, as `store_global_atom` stores."""
    unit = 1 if layout == "row" else 0

    def typer(context: TypingContext, view: types.Type, base: types.Type, offset: types.Type) -> Any:
        if not is_position(view, base, offset) or view.dtype != spec.dtype(operand) or view.unit != unit:
            return None
        result = _wide(spec, operand)
        register = spec.register(operand)

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            operands = list(_line_address(c, b, view, v, (base, offset), unit))
            out = assembly(b, spec.load_text(operand, layout, "global"), [register] * spec.registers(operand), operands,
                           memory=True)
            return c.make_tuple(b, result, from_registers(b, out, c.get_value_type(result.dtype)))

        return signature(result, view, base, offset), codegen

    def emulate(view: Any, base: tuple, offset: tuple) -> tuple:
        rows, columns = spec.extents(operand)
        i, j = _check_lines(view, base, offset, unit, f"wmma.load.{operand}")
        share = rows * columns // 32
        line, along = divmod(current().lane * share, columns if unit else rows)
        values = view.load(unit, (i + line, j + along) if unit else (i + along, j + line), share)
        return current().collective(f"wmma.load.{operand}.global", values,
                                    functools.partial(spec.deal_lines, operand, layout), sync=False)

    return Atom(f"wmma_load_global_{operand}_{layout}_{spec.name}", typer, emulate)


def store_atom(spec: WmmaSpec, layout: str) -> Atom:
    """``store(pointer, base, offset, stride, fragment)``."""
    def typer(context: TypingContext, pointer: types.Type, base: types.Type, offset: types.Type, stride: types.Type,
              fragment: types.Type) -> Any:
        if not isinstance(pointer, SharedType) or pointer.dtype != spec.accumulator or fragment != _wide(spec, "c"):
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
            values = to_registers(b, elements(b, v[4], spec.count("c")))
            operands = [shared_address(b, pointer, v[0], terms), *values, *coordinates_of(c, b, stride, v[3])]
            assembly(b, spec.store_text(layout), [], operands, memory=True)

        return signature(types.none, pointer, base, offset, stride, fragment), codegen

    def emulate(pointer: Any, base: int, offset: int, stride: int, fragment: tuple) -> None:
        thread = current()
        mine = thread.collective("wmma.store.d", fragment, functools.partial(spec.collect_lines, layout), sync=False)
        first, _ = _lane_share(spec, "c", layout, thread.lane, stride)
        pointer.store(int(base) + int(offset) + first, tuple(mine))

    return Atom(f"wmma_store_{layout}_{spec.name}", typer, emulate)


def store_global_atom(spec: WmmaSpec, layout: str) -> Atom:
    """``store(view, base, offset, fragment)``: to a matrix in global memory, from ``base + offset`` on, at a multiple of 16
    bytes. Its rows ("row") or columns ("col") are contiguous, and a multiple of 16 bytes apart."""
    unit = 1 if layout == "row" else 0

    def typer(context: TypingContext, view: types.Type, base: types.Type, offset: types.Type, fragment: types.Type) -> Any:
        if (not is_position(view, base, offset) or view.dtype != spec.accumulator or view.unit != unit or view.readonly
                or fragment != _wide(spec, "c")):
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            address, apart = _line_address(c, b, view, v, (base, offset), unit)
            operands = [address, *to_registers(b, elements(b, v[3], spec.count("c"))), apart]
            assembly(b, spec.store_text(layout, "global"), [], operands, memory=True)

        return signature(types.none, view, base, offset, fragment), codegen

    def emulate(view: Any, base: tuple, offset: tuple, fragment: tuple) -> None:
        thread = current()
        mine = thread.collective("wmma.store.d.global", fragment, functools.partial(spec.collect_lines, layout), sync=False)
        i, j = _check_lines(view, base, offset, unit, "wmma.store.d")
        line, along = divmod(thread.lane * len(mine), spec.extents("c")[unit])
        view.store(unit, (i + line, j + along) if unit else (i + along, j + line), tuple(mine))

    return Atom(f"wmma_store_global_{layout}_{spec.name}", typer, emulate)


def mma_atom(spec: WmmaSpec, a_layout: str, b_layout: str) -> Atom:
    """``mma(a, b, c) -> d`` for fragments loaded with these layouts."""
    def typer(context: TypingContext, a: types.Type, b: types.Type, c: types.Type) -> Any:
        if (a, b, c) != tuple(_wide(spec, name) for name in "abc"):
            return None

        def codegen(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            operands = [*input_registers(builder, v[0], spec.count("a"), spec.is_tf32),
                        *input_registers(builder, v[1], spec.count("b"), spec.is_tf32),
                        *to_registers(builder, elements(builder, v[2], spec.count("c")))]
            out = assembly(builder, spec.mma_text(a_layout, b_layout), [spec.register("c")] * spec.registers("c"), operands)
            return ctx.make_tuple(builder, c, from_registers(builder, out, ctx.get_value_type(c.dtype)))

        return signature(c, a, b, c), codegen

    def emulate(a: tuple, b: tuple, c: tuple) -> tuple:
        return current().collective("wmma.mma", (a, b, c), spec.multiply, sync=False)

    return Atom(f"wmma_mma_{a_layout}_{b_layout}_{spec.name}", typer, emulate)


KINDS = (*((shape, *kinds) for shape in SHAPES for kinds in ((F16, F32), (F16, F16), (BF16, F32), (S8, S32), (U8, S32))),
         ((16, 16, 8), F32, F32), ((8, 8, 4), F64, F64))
SPECS = MappingProxyType({key: WmmaSpec(*key[0], *key[1:]) for key in KINDS})
LOAD = MappingProxyType({(key, operand, layout): load_atom(spec, operand, layout)
                         for key, spec in SPECS.items() for operand in "abc" for layout in ("row", "col")})
LOAD_GLOBAL = MappingProxyType({(key, operand, layout): load_global_atom(spec, operand, layout)
                                for key, spec in SPECS.items() for operand in "abc" for layout in ("row", "col")})
STORE = MappingProxyType({(key, layout): store_atom(spec, layout)
                          for key, spec in SPECS.items() for layout in ("row", "col")})
STORE_GLOBAL = MappingProxyType({(key, layout): store_global_atom(spec, layout)
                                 for key, spec in SPECS.items() for layout in ("row", "col")})
MMA = MappingProxyType({(key, a, b): mma_atom(spec, a, b)
                        for key, spec in SPECS.items() for a in ("row", "col") for b in ("row", "col")})
