"""``wmma``: a warp's matrix multiply with loads and stores of its own (PTX ISA; sm_70+, bfloat16 sm_80+).

The fragments are opaque: which thread holds what is not specified, so transforms on them may not look at coordinates.
The emulation deals the elements in turn; only load -> mma -> store as a whole means the same as on hardware.
"""

from __future__ import annotations

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
from gemmkit.ptx.mma import BF16, F16, F32, PTX_NAME, shared_address
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
        return f"{self.shape}_{PTX_NAME[self.input]}_{PTX_NAME[self.accumulator]}"

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
        return self.count(operand) // (1 if self.dtype(operand) == F32 else 2)

    def load_text(self, operand: str, layout: str, space: str = "shared") -> str:
        n = self.registers(operand)
        return (f"wmma.load.{operand}.sync.aligned.{layout}.{self.shape}.{space}.{PTX_NAME[self.dtype(operand)]} "
                f"{braces(0, n)}, [${n}], ${n + 1};")

    def store_text(self, layout: str, space: str = "shared") -> str:
        n = self.registers("c")
        return (f"wmma.store.d.sync.aligned.{layout}.{self.shape}.{space}.{PTX_NAME[self.accumulator]} "
                f"[$0], {braces(1, n)}, ${n + 1};")

    def mma_text(self, a_layout: str, b_layout: str) -> str:
        acc, kind = PTX_NAME[self.accumulator], PTX_NAME[self.input]
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

    def compute(self, operands: list) -> list:
        a, b, c = (self.collect(name, [o[n] for o in operands]).astype(np.float32) for n, name in enumerate("abc"))
        with np.errstate(all="ignore"):
            return self.deal("c", (a @ b + c).astype(self.accumulator))


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
        register = ir.FloatType() if spec.dtype(operand) == F32 else i32

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
        rows, columns = spec.extents(operand)

        def meet(parts: list) -> list:
            flat = np.array([x for part in parts for x in part], pointer.dtype)
            matrix = flat.reshape(rows, columns) if layout == "row" else flat.reshape(columns, rows).T
            return spec.deal(operand, np.ascontiguousarray(matrix))

        return thread.collective(f"wmma.load.{operand}", values, meet, sync=False)

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
        register = ir.FloatType() if spec.dtype(operand) == F32 else i32

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

        def meet(parts: list) -> list:
            flat = np.array([x for part in parts for x in part], view.dtype)
            matrix = flat.reshape(rows, columns) if unit else flat.reshape(columns, rows).T
            return spec.deal(operand, np.ascontiguousarray(matrix))

        return current().collective(f"wmma.load.{operand}.global", values, meet, sync=False)

    return Atom(f"wmma_load_global_{operand}_{layout}_{spec.name}", typer, emulate)


def store_atom(spec: WmmaSpec, layout: str) -> Atom:
    """``store(pointer, base, offset, stride, fragment)``."""
    def typer(context: TypingContext, pointer: types.Type, base: types.Type, offset: types.Type, stride: types.Type,
              fragment: types.Type) -> Any:
        if not isinstance(pointer, SharedType) or pointer.dtype != spec.accumulator or fragment != _wide(spec, "c"):
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
            values = to_registers(b, elements(b, v[4], spec.count("c")))
            operands = [shared_address(b, pointer, v[0], terms), *values, *coordinates_of(c, b, stride, v[3])]
            assembly(b, spec.store_text(layout), [], operands, memory=True)
            return c.get_dummy_value()

        return signature(types.none, pointer, base, offset, stride, fragment), codegen

    def emulate(pointer: Any, base: int, offset: int, stride: int, fragment: tuple) -> None:
        thread = current()

        def meet(fragments: list) -> list:
            matrix = spec.collect("c", fragments)
            return list((matrix if layout == "row" else matrix.T).reshape(32, -1))

        mine = thread.collective("wmma.store.d", fragment, meet, sync=False)
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

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            address, apart = _line_address(c, b, view, v, (base, offset), unit)
            operands = [address, *to_registers(b, elements(b, v[3], spec.count("c"))), apart]
            assembly(b, spec.store_text(layout, "global"), [], operands, memory=True)
            return c.get_dummy_value()

        return signature(types.none, view, base, offset, fragment), codegen

    def emulate(view: Any, base: tuple, offset: tuple, fragment: tuple) -> None:
        thread = current()

        def meet(fragments: list) -> list:
            matrix = spec.collect("c", fragments)
            return list((matrix if layout == "row" else matrix.T).reshape(32, -1))

        mine = thread.collective("wmma.store.d.global", fragment, meet, sync=False)
        i, j = _check_lines(view, base, offset, unit, "wmma.store.d")
        line, along = divmod(thread.lane * len(mine), spec.extents("c")[unit])
        view.store(unit, (i + line, j + along) if unit else (i + along, j + line), tuple(mine))

    return Atom(f"wmma_store_global_{layout}_{spec.name}", typer, emulate)


def mma_atom(spec: WmmaSpec, a_layout: str, b_layout: str) -> Atom:
    """``mma(a, b, c) -> d`` for fragments loaded with these layouts."""
    def typer(context: TypingContext, a: types.Type, b: types.Type, c: types.Type) -> Any:
        if (a, b, c) != tuple(_wide(spec, name) for name in "abc"):
            return None
        register = ir.FloatType() if spec.accumulator == F32 else i32

        def codegen(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            operands: list = []
            for value, name in zip(v, "abc"):
                operands += to_registers(builder, elements(builder, value, spec.count(name)))
            out = assembly(builder, spec.mma_text(a_layout, b_layout), [register] * spec.registers("c"), operands)
            return ctx.make_tuple(builder, c, from_registers(builder, out, ctx.get_value_type(c.dtype)))

        return signature(c, a, b, c), codegen

    def emulate(a: tuple, b: tuple, c: tuple) -> tuple:
        return current().collective("wmma.mma", (a, b, c), spec.compute, sync=False)

    return Atom(f"wmma_mma_{a_layout}_{b_layout}_{spec.name}", typer, emulate)


SPECS = MappingProxyType({(shape, kind, acc): WmmaSpec(*shape, kind, acc)
                          for shape in SHAPES for kind, acc in ((F16, F32), (F16, F16), (BF16, F32))})
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
