"""``mma.sync``: a warp multiplies small matrices held in registers (PTX ISA, mma; sm_75+).

| inputs | M x N x K | sums | from |
|---|---|---|---|
| float16 | 16 x 8 x 8 | float32, float16 | sm_75 |
| float16; bfloat16 | 16 x 8 x 16 | float32 (of float16 also float16) | sm_80 |
| float32, as tf32 | 16 x 8 x 4, 16 x 8 x 8 | float32 | sm_80 |
| int8, uint8, mixed at will | 8 x 8 x 16; 16 x 8 x 32 | int32, which wrap | sm_75; sm_80 |
| float8_e4m3fn, float8_e5m2, mixed at will | 16 x 8 x 32 | float32 | sm_89 |
| float64 | 8 x 8 x 4 | float64 | sm_80 |
| float64 | 16 x 8 x 4, 16 x 8 x 8, 16 x 8 x 16 | float64 | sm_90 |

With ``w`` elements in a 32-bit register (1 of float32 and float64) and g = lane / 4, t = lane % 4, a lane holds of A rows g
and g + 8 at columns t w ..., of B the same places of its transpose, of C columns 2 t and 2 t + 1.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit import emulator
from gemmkit.components import Component
from gemmkit.lang.aggregates import Number
from gemmkit.lang.components import ComponentType, dataclass
from gemmkit.lang.host import current
from gemmkit.lang.memory import SharedType, coordinates_of
from gemmkit.lang.numba_hooks import Atom, Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.scalars import DTypeType, assembly, braces, i32, index, numba_type, numpy_dtype
from gemmkit.lang.static import traced
from gemmkit.ptx.registers import elements, from_registers, pointer_at, to_registers
from gemmkit.shapes import Modes, Shape, Step, shape, walk

# --------------------------------------------------------------------------------------------------
# Fragment maps: which element of a matrix a thread's n-th value is.
#
# A map is two `Shape`s, one of the thread's number and one of the value's, each stride a `Step` of (row, column)
# (Graphene's atomic specs; Hagedorn et al., ASPLOS 2023, table 2). From it come the emulation of an instruction, the
# coordinates that transforms see, and a picture:
#
# >>> print(FragmentMap(8, 8, places((4, (0, 2)), (8, (1, 0))), places((2, (0, 1)))).table(rows=2))
#          0    1    2    3    4    5    6    7
#    0  T0.0 T0.1 T1.0 T1.1 T2.0 T2.1 T3.0 T3.1
#    1  T4.0 T4.1 T5.0 T5.1 T6.0 T6.1 T7.0 T7.1

def places(*modes: tuple[int, tuple[int, int]]) -> Shape:
    """A number's place in a matrix: (extent, (rows, columns)) of its digits, the fastest first.

    >>> places((4, (0, 2)), (8, (1, 0)))(5)                       # a lane of mma's
    (1, 2)
    """
    return Shape.of_modes([[(extent, Step(step)) for extent, step in modes]])


def in_threads(values: np.ndarray, count: int) -> list[tuple]:
    """Values in threads' fragments of ``count``, one thread's behind another's."""
    return list(zip(*[iter(values)] * count))


@dataclass(frozen=True)
class FragmentMap(Component):
    """(thread, value) -> (row, column) of a ``rows`` x ``columns`` operand: the sum of two `places`."""

    rows: int
    columns: int
    thread_shape: Shape
    value_shape: Shape

    @cached_property
    def threads(self) -> int:
        return self.thread_shape.size

    @cached_property
    def values(self) -> int:
        return self.value_shape.size

    def beside(self, count: int) -> FragmentMap:
        """Of ``count`` instructions side by side along the columns, a thread's values of one behind those of another."""
        further = count, Step((0, self.columns))
        return FragmentMap(self.rows, self.columns * count, self.thread_shape,
                           Shape.of_modes([(*self.value_shape.modes[0], further)]))

    def row(self, thread: int, value: int) -> int:
        """The row of a thread's value."""
        return self._of_threads[0][thread] + self._of_values[0][value]

    def column(self, thread: int, value: int) -> int:
        return self._of_threads[1][thread] + self._of_values[1][value]

    @cached_property
    def _of_threads(self) -> tuple[list[int], list[int]]:
        return _table(self.thread_shape)

    @cached_property
    def _of_values(self) -> tuple[list[int], list[int]]:
        return _table(self.value_shape)

    @cached_property
    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of all values, as arrays of shape (threads, values)."""
        rows, columns = (np.add.outer(*parts) for parts in zip(self._of_threads, self._of_values))
        return rows, columns

    @cached_property
    def _places(self) -> np.ndarray:
        """Of all threads' values, one thread's behind another's, the places in the matrix, which has a value at each."""
        rows, columns = self.indices
        return (rows * self.columns + columns).reshape(-1)

    @cached_property
    def _holders(self) -> np.ndarray:
        """Of each place in the matrix, which of all threads' values lies there."""
        return np.argsort(self._places)

    def gather(self, fragments: list) -> np.ndarray:
        """The matrix that the threads' fragments make up, in float64 (or the integers' own type)."""
        return np.asarray(fragments).reshape(-1)[self._holders].reshape(self.rows, self.columns)

    def scatter(self, matrix: np.ndarray) -> list[tuple]:
        """The threads' fragments of a matrix."""
        return in_threads(matrix.reshape(-1)[self._places], self.values)

    def table(self, rows: int | None = None) -> str:
        """Who holds each element, as text: ``T5.1`` is value 1 of thread 5."""
        cells = [["" for _ in range(self.columns)] for _ in range(self.rows)]
        for t in range(self.threads):
            for v in range(self.values):
                cells[self.row(t, v)][self.column(t, v)] = f"T{t}.{v}"
        shown = cells[:rows]
        width = max(len(c) for row in shown for c in row) + 1
        head = " " * 5 + "".join(f"{c:>{width}}" for c in range(self.columns))
        return "\n".join([head] + [f"{r:>4} " + "".join(f"{c:>{width}}" for c in cells[r])
                                   for r in range(len(shown))])


def _table(shape: Shape) -> tuple[list[int], list[int]]:
    """Rows and columns of all numbers."""
    rows, columns = (Shape.of_modes([_along(shape, axis)]).offsets() for axis in (0, 1))
    return rows, columns


def _along(shape: Shape, axis: int) -> Modes:
    """One axis of its places."""
    return tuple((extent, step[axis] if isinstance(step, Step) else step) for extent, step in shape.modes[0])


def _type_coordinate(context: TypingContext, fragment_map: types.Type, thread: types.Type, value: types.Type,
                     axis: types.Type) -> Any:
    if not isinstance(fragment_map, ComponentType) or not isinstance(axis, types.IntegerLiteral):
        return None
    of, which = fragment_map.skeleton, int(axis.literal_value)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        numbers = (Number(b, c.cast(b, v[1], thread, index)), Number(b, c.cast(b, v[2], value, index)))
        parts = [walk(_along(shape, which), number) for shape, number in zip((of.thread_shape, of.value_shape), numbers)]
        found = parts[0] + parts[1]
        return found.value if isinstance(found, Number) else i32(found)

    return signature(index, fragment_map, thread, value, axis), codegen


@atom(_type_coordinate)
def fragment_coordinate(fragment_map: FragmentMap, thread: int, value: int, axis: int) -> int:
    """The row (axis 0) or column (axis 1) of a thread's value."""
    return fragment_map._of_threads[axis][thread] + fragment_map._of_values[axis][value]


# --------------------------------------------------------------------------------------------------
# Pairs of float32 as words of 16-bit floats, in the registers that a wgmma reads as A.
#
# An accumulator's pairs lie where those of an A fragment do, so that the result of one product becomes an operand of the
# next without leaving the registers. `settle` of converted elements takes three instructions a pair, this one.

NAMES = {np.dtype(np.float16): "f16x2", np.dtype(ml_dtypes.bfloat16): "bf16x2"}


def _packing(suffix: str) -> Any:
    return lambda context, dtype, values: _typed(suffix, dtype, values)


def _typed(suffix: str, dtype: types.Type, values: types.Type) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(values, types.UniTuple) or values.dtype != types.float32:
        return None
    name = NAMES.get(numpy_dtype(dtype.target))
    if name is None or values.count % 2:
        return None
    result = types.UniTuple(types.uint32, values.count // 2)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given = [b.extract_value(v[1], n) for n in range(values.count)]
        # "memory": registers that a wgmma reads must not be written before the wait for it.
        return c.make_tuple(b, result, [assembly(b, f"cvt.rn{suffix}.{name}.f32 $0, $2, $1;", [ir.IntType(32)], list(pair),
                                                 memory=True)[0] for pair in zip(given[::2], given[1::2])])

    return signature(result, dtype, values), codegen


@atom(_packing(""))
def pack_fragment(dtype: np.dtype, values: tuple) -> tuple:
    """Pairs of float32 as float16 or bfloat16 (``dtype``) in 32-bit words, the first in the lower half: made here, neither
    earlier nor later, as `gemmkit.ptx.wgmma.settle` makes them."""
    with np.errstate(all="ignore"):
        words = np.array(values, np.float32).astype(dtype).view(np.uint32)
    return emulator.barriers.settled(current(), tuple(words))


@atom(_packing(".relu"))
def pack_relu(dtype: np.dtype, values: tuple) -> tuple:
    """`pack_fragment` of max(x, 0) of each: in the same instruction. NaN stays NaN."""
    given = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        words = np.where(given < 0, np.float32(0), given).astype(dtype).view(np.uint32)
    return emulator.barriers.settled(current(), tuple(words))


# --------------------------------------------------------------------------------------------------
# tf32: float32 rounded to the 10 bits of the mantissa that tensor cores look at.

_TF32_BITS, _TF32_HALF = np.uint32(0xFFFFE000), np.uint32(0x1000)


def tf32_from_f32(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """float32 to a register of tf32, round to nearest, ties away from zero (sm_80+)."""
    return assembly(builder, "cvt.rna.tf32.f32 $0, $1;", [ir.IntType(32)], [value], pure=True)[0]


def rounded_to_tf32(values: np.ndarray | np.floating) -> np.ndarray:
    """What `tf32_from_f32` gives, as float32. (Infinities stay; a carry out of the mantissa is one into the exponent.)"""
    given = np.asarray(values, np.float32)
    rounded = truncated_to_tf32((given.view(np.uint32) + _TF32_HALF).view(np.float32))
    return np.where(np.isfinite(given), rounded, given)


def truncated_to_tf32(values: np.ndarray) -> np.ndarray:
    """What tensor cores see of a float32 that nobody rounded."""
    return np.bitwise_and(np.asarray(values, np.float32).view(np.uint32), _TF32_BITS).view(np.float32)


def _type_round_word(context: TypingContext, word: types.Type) -> Any:
    if word != types.uint32:
        return None
    return signature(types.uint32, word), lambda c, b, s, v: tf32_from_f32(b, b.bitcast(v[0], ir.FloatType()))


@atom(_type_round_word)
def round_word(word: Any) -> Any:
    """A float32 in a 32-bit word, rounded to nearest, ties away from zero (`tf32_from_f32`).

    >>> hex(round_word(np.float32(1 + 2**-11).view(np.uint32)))
    '0x3f802000'
    """
    return np.uint32(rounded_to_tf32(np.uint32(word).view(np.float32)).view(np.uint32))


F16, BF16, F32, F64 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
S8, U8, S32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
INPUT_NAME = {F16: "f16", BF16: "bf16", F32: "tf32", F64: "f64", E4M3: "e4m3", E5M2: "e5m2", S8: "s8", U8: "u8"}
SUM_NAME = {F16: "f16", F32: "f32", F64: "f64", S32: "s32"}


def map_a(M: int, K: int, size: int) -> FragmentMap:
    """Of A, M x K elements of ``size`` bytes."""
    w = max(1, 4 // size)
    return FragmentMap(M, K, places((4, (0, w)), (8, (1, 0))),
                       places((w, (0, 1)), (M // 8, (8, 0)), (K // (4 * w), (0, 4 * w))))


def map_b(K: int, N: int, size: int) -> FragmentMap:
    """Of B, K x N elements of ``size`` bytes; 8 columns behind each other."""
    w = max(1, 4 // size)
    return FragmentMap(K, N, places((4, (w, 0)), (8, (0, 1))),
                       places((w, (1, 0)), (K // (4 * w), (4 * w, 0)), (N // 8, (0, 8))))


def map_c(M: int, N: int) -> FragmentMap:
    """Of C, M x N; 8 columns behind each other."""
    return FragmentMap(M, N, places((4, (0, 2)), (8, (1, 0))), places((2, (0, 1)), (M // 8, (8, 0)), (N // 8, (0, 8))))


A_16X16, B_16X8, C_16X8 = map_a(16, 16, 2), map_b(16, 8, 2), map_c(16, 8)


@dataclasses.dataclass(frozen=True)
class MmaSpec:
    """One mma.sync instruction: D = A B + C with all four in registers of a warp.

    An atom of it takes the B of several instructions behind each other, and their C, and issues one after the other.
    """

    M: int
    K: int
    a_dtype: np.dtype
    b_dtype: np.dtype
    accumulator: np.dtype

    N = 8

    @cached_property
    def a(self) -> FragmentMap:
        return map_a(self.M, self.K, self.a_dtype.itemsize)

    @cached_property
    def b(self) -> FragmentMap:
        return map_b(self.K, self.N, self.b_dtype.itemsize)

    @cached_property
    def c(self) -> FragmentMap:
        return map_c(self.M, self.N)

    @cached_property
    def name(self) -> str:
        kinds = "_".join((INPUT_NAME[self.a_dtype], INPUT_NAME[self.b_dtype], SUM_NAME[self.accumulator]))
        return f"mma_m{self.M}n8k{self.K}_{kinds}"

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        """The least compute capability that has it."""
        if self.a_dtype in (E4M3, E5M2):
            return 8, 9
        if (self.a_dtype, self.K) == (F16, 8) or (self.a_dtype in (S8, U8) and self.M == 8):
            return 7, 5
        return (9, 0) if self.a_dtype == F64 and self.M == 16 else (8, 0)

    @cached_property
    def is_tf32(self) -> bool:
        return self.a_dtype == F32

    def registers(self, operand: str) -> int:
        """How many registers a thread gives of an operand: of 32 bits, of float64 of 64."""
        dtype = {"a": self.a_dtype, "b": self.b_dtype, "c": self.accumulator}[operand]
        return max(1, int(getattr(self, operand).values) * min(4, dtype.itemsize) // 4)

    @cached_property
    def text(self) -> str:
        """The instruction, with ``$`` operands: D, A, B, C."""
        a, b, acc = INPUT_NAME[self.a_dtype], INPUT_NAME[self.b_dtype], SUM_NAME[self.accumulator]
        x, y, z = (self.registers(operand) for operand in "abc")
        return (f"mma.sync.aligned.m{self.M}n8k{self.K}.row.col.{acc}.{a}.{b}.{acc} "
                f"{braces(0, z)}, {braces(z, x)}, {braces(z + x, y)}, {braces(z + x + y, z)};")

    def compute(self, operands: list) -> list:
        """What the warp computes: from 32 (a, b, c) to 32 fragments of D.

        Products and sums in float32, or float64; of integers exact, then wrapped; of float32 what tf32 leaves of it.
        """
        a, b, c = (m.gather([o[n] for o in operands]) for n, m in enumerate((self.a, self.b, self.c)))
        if self.accumulator == S32:
            return self.c.scatter((a.astype(np.int64) @ b.astype(np.int64) + c).astype(S32))
        if self.is_tf32:
            a, b = truncated_to_tf32(a), truncated_to_tf32(b)
        wide = F64 if self.accumulator == F64 else F32
        with np.errstate(all="ignore"):
            return self.c.scatter((a.astype(wide) @ b.astype(wide) + c.astype(wide)).astype(self.accumulator))

    def multiply(self, operands: list) -> list:
        """What the atom computes: inputs of tf32 are rounded, and B and C may be several."""
        rounded = rounded_to_tf32 if self.is_tf32 else np.asarray
        left = [rounded(a) for a, _, _ in operands]
        n, m = self.b.values, self.c.values
        parts = [self.compute([(a, rounded(b[i * n:(i + 1) * n]), c[i * m:(i + 1) * m])
                               for a, (_, b, c) in zip(left, operands)]) for i in range(len(operands[0][1]) // n)]
        return [sum(lanes, ()) for lanes in zip(*parts)]


def _all_specs() -> list[MmaSpec]:
    shapes: dict[np.dtype, Any] = {F16: ((16, 16), (16, 8)), F32: ((16, 4), (16, 8)), S8: ((16, 32), (8, 16)),
                                   U8: ((16, 32), (8, 16)), F64: ((8, 4), (16, 4), (16, 8), (16, 16))}
    listed: list[tuple[np.dtype, np.dtype, np.dtype]] = [(F16, F16, F32), (F16, F16, F16), (BF16, BF16, F32)]
    listed += [(F32, F32, F32), (F64, F64, F64)]
    listed += [(a, b, S32) for a in (S8, U8) for b in (S8, U8)]
    listed += [(a, b, F32) for a in (E4M3, E5M2) for b in (E4M3, E5M2)]
    return [MmaSpec(M, K, a, b, acc) for a, b, acc in listed for M, K in shapes.get(a, ((16, 32 // a.itemsize),))]


SPECS = MappingProxyType({(s.M, s.K, s.a_dtype, s.b_dtype, s.accumulator): s for s in _all_specs()})


def input_registers(builder: ir.IRBuilder, value: ir.Value, count: int, is_tf32: bool) -> list:
    """A fragment of A or B in registers; as tf32, float32 is rounded."""
    values = elements(builder, value, count)
    return [tf32_from_f32(builder, x) for x in values] if is_tf32 else to_registers(builder, values)


def register_of(accumulator: np.dtype) -> Any:
    """The LLVM type of a register with sums."""
    return {F32: ir.FloatType(), F64: ir.DoubleType()}.get(accumulator, ir.IntType(32))


def _typer(spec: MmaSpec) -> Any:
    def typer(context: TypingContext, a: types.Type, b: types.Type, c: types.Type) -> Any:
        of_a, of_b, acc = (numba_type(dtype) for dtype in (spec.a_dtype, spec.b_dtype, spec.accumulator))
        if not isinstance(b, types.UniTuple) or b.count % spec.b.values:
            return None
        times = b.count // spec.b.values
        if (a, b, c) != (types.UniTuple(of_a, spec.a.values), types.UniTuple(of_b, b.count),
                         types.UniTuple(acc, times * spec.c.values)):
            return None

        def codegen(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            register, y, z = register_of(spec.accumulator), spec.registers("b"), spec.registers("c")
            x = input_registers(builder, v[0], a.count, spec.is_tf32)
            ys = input_registers(builder, v[1], b.count, spec.is_tf32)
            zs = to_registers(builder, elements(builder, v[2], c.count))
            out: list = []
            for n in range(times):
                out += assembly(builder, spec.text, [register] * z, [*x, *ys[n * y:(n + 1) * y], *zs[n * z:(n + 1) * z]])
            return ctx.make_tuple(builder, c, from_registers(builder, out, ctx.get_value_type(acc)))

        return signature(c, a, b, c), codegen

    return typer


def _emulation(spec: MmaSpec) -> Any:
    def mma(a: tuple, b: tuple, c: tuple) -> tuple:
        return current().collective("mma", (a, b, c), spec.multiply, sync=False)

    return mma


MMA = MappingProxyType({key: Atom(spec.name, _typer(spec), _emulation(spec), f"{spec.name}(a, b, c) -> d: {MmaSpec.__doc__}")
                        for key, spec in SPECS.items()})


# --------------------------------------------------------------------------------------------------
# ``ldmatrix``: a warp loads matrices of 8 rows of 16 bytes from shared memory into mma fragments (sm_75+).
#
# Each lane gives the address of one row: lanes 0-7 those of the first matrix, 8-15 of the second, and so on. Lane t receives
# of each matrix 32 bits of row t // 4, the (t % 4)-th: a float32, two elements of 16 bits, four of 8 bits. With
# ``trans``, for 16-bit elements alone, it receives those of the transpose.

ROWS_8X8 = FragmentMap(8, 8, places((4, (0, 2)), (8, (1, 0))), places((2, (0, 1))))


def _by_rows(count: int, apart: int) -> Shape:
    """Where the row of a lane's address begins: of ``count`` rows, then of as many ``apart`` columns on."""
    return places((count, (1, 0)), (32 // count, (0, apart)))


def _by_columns(matrices: int, down: int, apart: int) -> Shape:
    """The same of 8 columns: of ``matrices`` that are ``down`` rows apart, then of 8 more columns, ``apart`` on."""
    return places((8, (0, 1)), (matrices, (down, 0)), (4 // matrices, (0, apart)))


by_rows, by_columns = traced(_by_rows), traced(_by_columns)


def shared_address(builder: ir.IRBuilder, pointer: SharedType, value: ir.Value, terms: list) -> Any:
    """A 32-bit address in the shared window, as instructions that LLVM does not know take it."""
    return builder.ptrtoint(pointer_at(builder, pointer, value, terms, ir.IntType(8)), i32)


def _ldmatrix_typer(context: TypingContext, pointer: types.Type, base: types.Type, offset: types.Type, matrices: types.Type,
                    trans: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or pointer.dtype.itemsize not in (1, 2, 4) or pointer.dtype.names is not None:
        return None
    n, transposed = int(matrices.literal_value), bool(trans.literal_value)
    if transposed and pointer.dtype.itemsize != 2:
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        text = f"ldmatrix.sync.aligned.m8n8.x{n}{'.trans' if transposed else ''}.shared.b16 {braces(0, n)}, [${n}];"
        registers = assembly(b, text, [i32] * n, [shared_address(b, pointer, v[0], terms)], memory=True)
        return c.make_tuple(b, s.return_type, from_registers(b, registers, c.get_value_type(pointer.element)))

    count = n * (4 // pointer.dtype.itemsize)
    return signature(types.UniTuple(pointer.element, count), pointer, base, offset, matrices, trans), codegen


def distribute(rows: list[np.ndarray], matrices: int, trans: bool) -> list[tuple]:
    """From the rows that the 32 lanes addressed to the 32 fragments."""
    there = np.stack(rows[:8 * matrices]).reshape(matrices, 8, -1)
    if trans:
        there = there.swapaxes(1, 2)
    parts = there.reshape(matrices, 32, -1).swapaxes(0, 1)             # lane t has a quarter of row t // 4
    return in_threads(parts.reshape(-1), matrices * parts.shape[2])


@atom(_ldmatrix_typer)
def ldmatrix(pointer: Any, base: int, offset: int, matrices: int, trans: bool) -> tuple:
    """Load 1, 2 or 4 matrices; ``base + offset`` is where this lane's row of 16 bytes begins, in elements."""
    if trans and pointer.dtype.itemsize != 2:
        raise TypeError(f"ldmatrix: trans is for elements of 16 bits, and the pointer's are {pointer.dtype}")
    thread = current()
    mine = None
    if thread.lane < 8 * matrices:
        at = pointer.from_base(int(base)).offset + (int(base) + int(offset)) * pointer.dtype.itemsize
        mine = thread.shared_read(at, 16).view(pointer.dtype)
    return thread.collective(f"ldmatrix.x{matrices}{trans}", mine, lambda rows: distribute(rows, matrices, trans),
                             sync=False)


# --------------------------------------------------------------------------------------------------
# ``stmatrix``: a warp stores 8 x 8 matrices of 16-bit elements, held as mma fragments, to shared memory (sm_90+).
#
# The inverse of `ldmatrix`: each lane gives the address of one row of 8 elements, lanes 0-7 those of the first matrix,
# 8-15 of the second, and so on. Lane t holds of each matrix the elements (t // 4, 2 (t % 4)) and the one beside it, or
# with ``trans`` of the transpose.

def _stmatrix_typer(context: TypingContext, pointer: types.Type, base: types.Type, offset: types.Type, values: types.Type,
                    trans: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or pointer.dtype.itemsize != 2 or not isinstance(values, types.UniTuple):
        return None
    if values.dtype != pointer.element or values.count not in (2, 4, 8) or not isinstance(trans, types.Literal):
        return None
    n, transposed = values.count // 2, bool(trans.literal_value)
    text = f"stmatrix.sync.aligned.m8n8.x{n}{'.trans' if transposed else ''}.shared.b16 [$0], {braces(1, n)};"

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        given = [b.bitcast(x, ir.IntType(16)) for x in elements(b, v[3], values.count)]
        assembly(b, text, [], [shared_address(b, pointer, v[0], terms), *to_registers(b, given)], memory=True,
                 convergent=True)

    return signature(types.none, pointer, base, offset, values, trans), codegen


def collect(fragments: list[tuple], trans: bool) -> list[np.ndarray | None]:
    """From the 32 lanes' fragments to the row that each lane stores; None for lanes that give no address."""
    rows: list[np.ndarray | None] = []
    for m in range(len(fragments[0]) // 2):
        matrix = ROWS_8X8.gather([f[2 * m:2 * m + 2] for f in fragments])
        rows += list(matrix.T if trans else matrix)
    return rows + [None] * (32 - len(rows))


@atom(_stmatrix_typer)
def stmatrix(pointer: Any, base: int, offset: int, values: tuple, trans: bool) -> None:
    """Store 1, 2 or 4 matrices of 8 x 8: 2, 4 or 8 ``values`` of the pointer's 16-bit type.

    ``base + offset`` is where this lane's row begins, in elements, at a multiple of 16 bytes; ``trans`` is a constant.
    """
    thread = current()
    row = thread.collective(f"stmatrix.x{len(values) // 2}{trans}", values, lambda parts: collect(parts, trans), sync=False)
    if row is not None:
        data = np.ascontiguousarray(row, pointer.dtype).view(np.uint8)
        thread.shared_write(pointer.offset + (int(base) + int(offset)) * 2, data)


# --------------------------------------------------------------------------------------------------
# mma.m8n8k4: a product of 8 x 8 x 4 by each quad-pair of a warp, Volta's tensor-core instruction.
#
# A quad-pair is threads 4 q to 4 q + 3 and 16 more of each. It is slow on GPUs after Volta, and computes the same.

TEXT = (f"mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {braces(0, 8)}, {braces(8, 2)}, {braces(10, 2)}, "
        f"{braces(12, 8)};")


#: Quad-pairs, and the lanes of one, in the order of their rows of A and columns of B (Graphene, Fig. 6).
PAIRS, LANES = shape(32).tile(shape((4, 2), (1, 16)))
#: Where a lane's values of C are (PTX ISA, "Matrix fragments for mma.m8n8k4"); all quad-pairs have the same places.
C_8X8 = FragmentMap(8, 8, places((2, (1, 0)), (2, (0, 2)), (4, (0, 0)), (2, (4, 0))),
                    places((2, (0, 1)), (2, (2, 0)), (2, (0, 4))))


def _products(operands: list) -> list:
    out: list[tuple] = [()] * 32
    for pair in PAIRS.offsets():
        lanes = [pair + lane for lane in LANES.offsets()]
        a, b = (np.array([operands[lane][n] for lane in lanes], np.float32) for n in (0, 1))
        with np.errstate(all="ignore"):
            product = a @ b.T
        for lane in lanes:
            out[lane] = tuple(np.float32(c + product[C_8X8.row(lane, n), C_8X8.column(lane, n)])
                              for n, c in enumerate(operands[lane][2]))
    return out


def _quad_pair_typer(context: TypingContext, a: types.Type, b: types.Type, c: types.Type) -> Any:
    half, single = numba_type(np.dtype(np.float16)), numba_type(np.dtype(np.float32))
    if (a, b, c) != (types.UniTuple(half, 4), types.UniTuple(half, 4), types.UniTuple(single, 8)):
        return None

    def codegen(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given = [r for value, t in zip(v, (a, b, c)) for r in to_registers(builder, elements(builder, value, t.count))]
        return ctx.make_tuple(builder, c, assembly(builder, TEXT, [ir.FloatType()] * 8, given))

    return signature(c, a, b, c), codegen


@atom(_quad_pair_typer)
def mma_quad_pair(a: tuple, b: tuple, c: tuple) -> tuple:
    """``a b + c``: a lane has a row of A and a column of B (4 float16 each), and 8 elements of C (float32, `C_8X8`)."""
    return current().collective("mma.m8n8k4", (a, b, c), _products, sync=False)
