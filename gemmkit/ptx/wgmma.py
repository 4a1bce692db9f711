"""``wgmma``: a warpgroup multiplies matrices in shared memory (sm_90a). Its descriptors, fences, waits and setmaxnreg."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit import emulator, shapes
from gemmkit.lang.host import current
from gemmkit.lang.memory import SharedType, coordinates_of
from gemmkit.lang.numba_hooks import Atom, Context, Signature, TypingContext, TypingError, Values, atom, ir, signature, types
from gemmkit.lang.registers import Fragment
from gemmkit.lang.scalars import assembly, braces, index, numba_type, plain
from gemmkit.ptx.memory import pack_words
from gemmkit.ptx.mma import FragmentMap, places, shared_address
from gemmkit.ptx.registers import elements, from_registers, to_registers
from gemmkit.shapes import CHUNK, Shape

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread

#: The bits of a NaN that no arithmetic gives: results that are none are 0x7fffffff.
NEVER = 0x7fbadbad


def _type_anchor(context: TypingContext, pointer: types.Type, value: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or value != types.float32:
        return None
    text = (f"{{ .reg .pred never; .reg .b32 bits; mov.b32 bits, $1; setp.eq.b32 never, bits, {NEVER:#x}; "
            "@never mbarrier.arrive.shared::cta.b64 _, [$0]; }")

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        assembly(b, text, [], [shared_address(b, pointer, v[0], []), v[1]], memory=True)

    return signature(types.none, pointer, value), codegen


@atom(_type_anchor)
def anchor(barriers: Any, value: float) -> None:
    """Nothing, when ``value`` (a float32) is computed: two instructions of which the second is never executed.

    ptxas moves the wait for a group of wgmma over arithmetic that does not need its results, so that what is to run under
    the products comes behind them. It does not move it over an arrival at a barrier, and one that needs a value keeps what
    the value is made of before it. ``barriers`` is any pointer to barriers of the block's.
    """


# --------------------------------------------------------------------------------------------------
# Matrix descriptors: how ``wgmma`` is told where an operand lies in shared memory (PTX ISA, "Matrix-descriptor format").
#
# 64 bits: where the operand starts, how it is swizzled, and two distances. The instruction reads its operand in blocks of
# 8 lines (of rows of A or columns of B, when the operand is K-major) by one swizzle width:
#
# * K-major: the next 8 lines are ``stride_bytes`` on. Along K an instruction stays within the width, except without a
# swizzle:
#   there the width is 16 bytes, and the second half of K is ``leading_bytes`` on.
# * MN-major: lines run along M or N, and 8 of them are 8 steps of K. The next 8 steps of K are ``stride_bytes`` on, the next
#   swizzle width along M or N is ``leading_bytes`` on. (Without a swizzle the two change places.)

i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FIELD = 0x3FFF
_SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}


class Descriptor(NamedTuple):
    """What a descriptor says, in bytes; ``swizzle`` is its width (0: none)."""

    address: int
    leading_bytes: int
    stride_bytes: int
    swizzle: int

    def addresses(self, lines: int, major: str) -> np.ndarray:
        """Where the hardware looks for the chunks of ``lines`` lines by 32 bytes of K.

        K-major: of line i the chunks [i, 0] and [i, 1]. MN-major: [i, k] are 8 lines from 8 i on, at k (0 to 15).
        """
        logical = self.address + _offsets(lines, major, self.leading_bytes, self.stride_bytes, self.swizzle)
        return np.asarray(shapes.lines(self.swizzle)(logical))


@lru_cache
def _offsets(lines: int, major: str, leading: int, stride: int, width: int) -> np.ndarray:
    """The addresses without a swizzle, from the start of the operand on (the canonical layouts of the PTX ISA)."""
    first, second = (lines, 2) if major == "K" else (lines // 8, 16)
    offsets = _blocks(lines, major, leading, stride, width)(np.arange(first)[:, None], np.arange(second))
    return np.zeros((first, second), int) + offsets


def _blocks(lines: int, major: str, leading: int, stride: int, width: int) -> Shape:
    """From (line, chunk) of a K-major operand, or (chunk of 8 lines, k) of an MN-major one, to bytes."""
    if major == "K":
        return Shape(((8, lines // 8), 2), ((width or CHUNK, stride), CHUNK if width else leading))
    if not width:
        return Shape((lines // 8, (8, 2)), (stride, (CHUNK, leading)))
    across = width // CHUNK
    return Shape(((across, -(-lines // 8 // across)), (8, 2)), ((CHUNK, leading), (width, stride)))


def constant_bits(leading_bytes: int, stride_bytes: int, swizzle: int) -> int:
    """A descriptor without its address.

    Raises ValueError for a distance that is no multiple of 16 from 0 to 262128, and for an unknown swizzle.
    """
    for name, value in (("leading_bytes", leading_bytes), ("stride_bytes", stride_bytes)):
        if value % CHUNK or not 0 <= value // CHUNK <= _FIELD:
            raise ValueError(f"matrix_descriptor: {name} is {value}; a multiple of {CHUNK} from 0 to {_FIELD * CHUNK} is "
                             "needed")
    if swizzle not in _SWIZZLES:
        raise ValueError(f"matrix_descriptor: swizzle is {swizzle}; 0, 32, 64 and 128 bytes are known")
    return leading_bytes // CHUNK << 16 | stride_bytes // CHUNK << 32 | _SWIZZLES[swizzle] << 62


def decode(descriptor: int) -> Descriptor:
    """What the bits of a descriptor say.

    >>> decode(1 << 62 | 64 << 32 | 1 << 16 | 128)
    Descriptor(address=2048, leading_bytes=16, stride_bytes=1024, swizzle=128)
    """
    address, leading, stride = ((int(descriptor) >> at & _FIELD) * CHUNK for at in (0, 16, 32))
    code = int(descriptor) >> 62 & 3
    return Descriptor(address, leading, stride, next(width for width, c in _SWIZZLES.items() if c == code))


def _type_descriptor(context: TypingContext, pointer: types.Type, position: types.Type, leading: types.Type,
                     stride: types.Type, swizzle: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(position, types.Integer):
        return None
    for name, ty in (("leading_bytes", leading), ("stride_bytes", stride), ("swizzle", swizzle)):
        if not isinstance(ty, types.IntegerLiteral):
            raise TypingError(f"matrix_descriptor: {name} must be a compile-time number in device code")
    try:
        bits = constant_bits(leading.literal_value, stride.literal_value, swizzle.literal_value)
    except ValueError as error:
        raise TypingError(str(error)) from None
    bits -= bits >> 63 << 64                   # as a signed number

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        address = shared_address(b, pointer, v[0], coordinates_of(c, b, position, v[1]))
        chunk = b.and_(b.lshr(address, i32(4)), i32(_FIELD))
        return b.or_(b.zext(chunk, i64), i64(bits))

    return signature(types.int64, pointer, position, leading, stride, swizzle), codegen


@atom(_type_descriptor)
def matrix_descriptor(pointer: Any, position: int, leading_bytes: int, stride_bytes: int, swizzle: int) -> int:
    """The descriptor of an operand that starts at element ``position`` of ``pointer``; the rest are constants.

    Raises ValueError for distances that are no multiples of 16, an unknown swizzle, or a start between chunks of 16 bytes.
    """
    address = pointer.offset + int(position) * pointer.dtype.itemsize
    if address % CHUNK:
        raise ValueError(f"matrix_descriptor: the operand starts at byte {address} of shared memory; it must be at a "
                         f"multiple of {CHUNK}")
    return constant_bits(leading_bytes, stride_bytes, swizzle) | (address // CHUNK & _FIELD)


def _type_advance(context: TypingContext, descriptor: types.Type, nbytes: types.Type) -> Any:
    if not (isinstance(descriptor, types.Integer) and isinstance(nbytes, types.Integer)):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        if isinstance(nbytes, types.IntegerLiteral):
            chunks = i64(nbytes.literal_value >> 4)
        else:
            chunks = b.sext(b.ashr(c.cast(b, v[1], nbytes, index), i32(4)), i64)
        return b.add(c.cast(b, v[0], descriptor, types.int64), chunks)

    return signature(types.int64, descriptor, nbytes), codegen


@atom(_type_advance)
def advance(descriptor: int, nbytes: int) -> int:
    """The descriptor of what lies ``nbytes`` (a multiple of 16) further on in shared memory."""
    return descriptor + (int(nbytes) >> 4)


# --------------------------------------------------------------------------------------------------
# What the warpgroups (128 threads) of a kernel with roles tell the hardware and each other (sm_90).

def _set_registers(action: str) -> Any:
    def typer(context: TypingContext, n: types.Type) -> Any:
        if not isinstance(n, types.IntegerLiteral) or n.literal_value % 8 or not 24 <= n.literal_value <= 256:
            return None
        text = f"setmaxnreg.{action}.sync.aligned.u32 {n.literal_value};"

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            assembly(b, text, [], [], memory=True, convergent=True)

        return signature(types.none, n), codegen

    return typer


@atom(_set_registers("dec"))
def release_registers(n: int) -> None:
    """Keep ``n`` registers a thread (a constant, a multiple of 8 from 24 to 256) of this warpgroup and release the rest."""
    thread = current()
    thread.block.registers.give(thread, n)


@atom(_set_registers("inc"))
def claim_registers(n: int) -> None:
    """Wait until the block has registers to spare for ``n`` a thread of this warpgroup, and take them."""
    thread = current()
    thread.block.registers.take(thread, n)


def _at_barrier(instruction: str) -> Any:
    def typer(context: TypingContext, number: types.Type, threads: types.Type) -> Any:
        if not (isinstance(number, types.Integer) and isinstance(threads, types.Integer)):
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            texts: list[str] = []
            operands: list[Any] = []
            for ty, value in zip((number, threads), v):
                if isinstance(ty, types.IntegerLiteral):     # with a number in a register, ptxas assumes all 16 barriers
                    texts.append(str(ty.literal_value))
                else:
                    texts.append(f"${len(operands)}")
                    operands.append(c.cast(b, value, ty, index))
            assembly(b, f"{instruction} {', '.join(texts)};", [], operands, memory=True, convergent=True)

        return signature(types.none, number, threads), codegen

    return typer


@atom(_at_barrier("bar.sync"))
def named_barrier(number: int, threads: int) -> None:
    """Meet at barrier ``number`` (1 to 15; 0 is the whole block's) until ``threads`` of the block have come."""
    current().barrier(int(number), int(threads))


@atom(_at_barrier("bar.arrive"))
def named_arrive(number: int, threads: int) -> None:
    """Be counted at barrier ``number`` and go on: threads that wait there see what was written before."""
    current().arrive(int(number), int(threads))


# Not the unqualified fence.proxy.async: it orders global memory as well, and waits for it.
@atom(plain("fence.proxy.async.shared::cta;"))
def fence_async() -> None:
    """Let copies and wgmma, which reach shared memory by another way than threads, see what this thread wrote there."""
    current().fence_proxy()


@atom(plain("griddepcontrol.wait;"))
def grid_wait() -> None:
    """Wait until the kernels before in the stream have ended, if this one was launched early; nothing otherwise."""
    emulator.agents.wait(current())


@atom(plain("griddepcontrol.launch_dependents;"))
def grid_launch_dependents() -> None:
    """Let the next kernel in the stream start, if it is one that may start early (it calls `grid_wait` first)."""


# --------------------------------------------------------------------------------------------------
# ``wgmma``: a warpgroup (128 threads) multiplies matrices that lie in shared memory (PTX ISA, wgmma.mma_async; sm_90a).
#
# The instruction is asynchronous. It begins to read shared memory, and to change its accumulators, and the threads go on:
#
#     wgmma_fence()                                        # the accumulators are as other instructions left them
#     sums = wgmma(sums, a, b, 1)                          # a, b: descriptors (`gemmkit.ptx.wgmma`)
#     sums = wgmma(sums, advance(a, 32), advance(b, 32), 1)
#     wgmma_commit()                                       # these two are a group
#     (sums,) = wgmma_wait(0, (sums,))                     # until no group is pending: only now the sums are there, and
#                                                          # only now may anyone write to what the group has read

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
S8, U8, S32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)

_OPERAND_NAME = {F16: "f16", BF16: "bf16", F32: "tf32", E4M3: "e4m3", E5M2: "e5m2", S8: "s8", U8: "u8"}
_ACCUMULATOR_NAME = {F16: "f16", F32: "f32", S32: "s32"}
_TF32_BITS = np.uint32(0xFFFFE000)             # sign, 8 bits of exponent, 10 of mantissa
_FP8, _INT8 = (E4M3, E5M2), (S8, U8)
_KINDS = (((F16,), (F32, F16)), ((BF16,), (F32,)), ((F32,), (F32,)), (_FP8, (F32, F16)), (_INT8, (S32,)))


def _threads(columns: int) -> Shape:
    """Where the values of a warpgroup's threads begin, of 64 rows: ``columns`` each."""
    return places((4, (0, columns)), (8, (1, 0)), (4, (16, 0)))


@dataclass(frozen=True)
class WgmmaSpec:
    """One wgmma instruction: D = A B or D += A B, with A 64 x K, B K x N, and 32 bytes of K.

    ``a`` and ``b`` are dtypes of the operands: float16 or bfloat16 (both the same); float32, of which the tensor cores take
    the first 19 bits (tf32); 8-bit floats; 8-bit integers. ``a_major`` and ``b_major`` say along which axis they are
    contiguous in shared memory: "K", or "MN" (16-bit types). With ``a_registers`` A is a fragment (`a_map`); with
    ``negates`` the product is subtracted (floats).

    Raises ValueError for what the instruction set does not have.
    """

    N: int
    a: np.dtype
    b: np.dtype
    accumulator: np.dtype
    a_major: str = "K"
    b_major: str = "K"
    a_registers: bool = False
    negates: bool = False

    M = 64

    def __post_init__(self) -> None:
        for name in ("a", "b", "accumulator"):
            object.__setattr__(self, name, np.dtype(getattr(self, name)))
        kind = next((kind for kind in _KINDS if self.a in kind[0]), None)
        if kind is None:
            raise ValueError(f"wgmma: dtype of a is {self.a}; it can be float16, bfloat16, float32 (tf32), float8_e4m3fn, "
                             "float8_e5m2, int8 or uint8")
        if self.b not in kind[0]:
            raise ValueError(f"wgmma: dtype of b is {self.b}; with {self.a} goes {_listed(kind[0])}")
        if self.accumulator not in kind[1]:
            raise ValueError(f"wgmma: accumulator is {self.accumulator}; products of {self.a} are added up in "
                             f"{_listed(kind[1])}")
        if isinstance(self.N, bool) or not isinstance(self.N, int) or self.N % 8 or not 8 <= self.N <= 256:
            raise ValueError(f"wgmma: N is {self.N!r}; a multiple of 8 from 8 to 256 is needed")
        if self.a in _INT8 and self.N % 16 and self.N > 24:
            raise ValueError(f"wgmma: N is {self.N}; for integers it must be 8, 24 or a multiple of 16 up to 256")
        for name, major in (("a_major", self.a_major), ("b_major", self.b_major)):
            if major not in ("K", "MN"):
                raise ValueError(f'wgmma: {name} is {major!r}; "K" or "MN" is needed')
            if major == "MN" and self.a.itemsize != 2:
                raise ValueError(f'wgmma: {name} is "MN"; {self.a} is read K-major only (16-bit types either way)')
        if self.a_registers and self.a_major != "K":
            raise ValueError('wgmma: a_major is "MN"; a fragment in registers has no order in memory: leave it "K"')
        if self.negates and self.a in _INT8:
            raise ValueError(f"wgmma: negates is True; products of {self.a} are added only")

    @cached_property
    def K(self) -> int:
        return 32 // int(self.a.itemsize)

    @cached_property
    def c(self) -> FragmentMap:
        """Who holds which accumulator: 64 x N over 128 threads."""
        return FragmentMap(64, self.N, _threads(2), places((2, (0, 1)), (2, (8, 0)), (self.N // 8, (0, 8))))

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, self.N // 2)

    @cached_property
    def a_map(self) -> FragmentMap:
        """Who holds what of an A in registers: 64 x K over 128 threads."""
        n = 4 // int(self.a.itemsize)                                     # elements of a register
        return FragmentMap(64, self.K, _threads(n), places((n, (0, 1)), (2, (8, 0)), (2, (0, 4 * n))))

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.a, self.a_map.values)

    @cached_property
    def name(self) -> str:
        """The instruction's; two atoms of one name would be one compile-time value."""
        a, b, acc = _OPERAND_NAME[self.a], _OPERAND_NAME[self.b], _ACCUMULATOR_NAME[self.accumulator]
        return f"m64n{self.N}k{self.K}.{acc}.{a}.{b}"

    @cached_property
    def registers(self) -> int:
        """32-bit registers of the accumulators, a thread."""
        return self.N // 2 * int(self.accumulator.itemsize) // 4

    @cached_property
    def text(self) -> str:
        """The instruction with ``$`` operands: the accumulators, the same again (tied), A, B, whether to accumulate."""
        n = self.registers
        a = braces(2 * n, 4) if self.a_registers else f"${2 * n}"
        b = 2 * n + (4 if self.a_registers else 1)
        options = "" if self.a in _INT8 else f", {-1 if self.negates else 1}, 1"
        if self.a.itemsize == 2:
            if not self.a_registers:
                options += f", {int(self.a_major == 'MN')}"
            options += f", {int(self.b_major == 'MN')}"
        return (f"{{ .reg .pred accumulate; setp.ne.b32 accumulate, ${b + 1}, 0; "
                f"wgmma.mma_async.sync.aligned.{self.name} {braces(0, n)}, {a}, ${b}, accumulate{options}; }}")


    def compute(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
        """C + A B^T (C - A B^T with ``negates``) of a 64 x K ``a``, an N x K ``b`` and a 64 x N ``c`` (None: zeros), in the
        accumulator's type.

        Products of floats are added up in float64 and rounded to float32 once, so that a row has the same bits wherever it
        lies (float32 products of NumPy's depend on that); sums of integers wrap.
        """
        if self.a == F32:
            a, b = (np.bitwise_and(x.view(np.uint32), _TF32_BITS).view(F32) for x in (a, b))
        with np.errstate(all="ignore"):
            exact = a.astype(np.float64) @ b.astype(np.float64).T
            if self.accumulator == S32:
                return (exact.astype(np.int64) if c is None else exact.astype(np.int64) + c).astype(S32)
            product = exact.astype(F32)
            if self.negates:
                product = -product
            return (product if c is None else product + c.astype(F32)).astype(self.accumulator)


def _listed(dtypes: tuple[np.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _register(accumulator: types.Type) -> Any:
    """The LLVM type of an accumulator's registers; pairs of float16 are words."""
    return ir.FloatType() if accumulator == types.float32 else i32


def _fragment_words(builder: ir.IRBuilder, ty: types.BaseTuple, value: ir.Value) -> list:
    """A fragment of A as four 32-bit registers."""
    return [builder.bitcast(word, i32) for word in to_registers(builder, elements(builder, value, ty.count))]


def _is_fragment(ty: types.Type, spec: WgmmaSpec) -> bool:
    """Whether a type is a fragment of A: its elements, or 32-bit words of them (`gemmkit.ptx.memory.pack_words`)."""
    if ty == types.UniTuple(types.uint32, 4):
        return True
    return spec.a.itemsize > 1 and ty == types.UniTuple(numba_type(spec.a), spec.a_map.values)


def _accumulates(ty: types.Type, spec: WgmmaSpec) -> bool:
    """Whether a type is the accumulators: their numbers, or 32-bit words of two float16 each."""
    if spec.accumulator == F16 and ty == types.UniTuple(types.uint32, spec.N // 4):
        return True
    return ty == types.UniTuple(numba_type(spec.accumulator), spec.N // 2)


def _typer(spec: WgmmaSpec) -> Any:
    def typer(context: TypingContext, acc: types.Type, a: types.Type, b: types.Type, accumulate: types.Type) -> Any:
        if not _accumulates(acc, spec) or not isinstance(b, types.Integer) or not isinstance(accumulate, types.Integer):
            return None
        if not (_is_fragment(a, spec) if spec.a_registers else isinstance(a, types.Integer)):
            return None
        register = _register(numba_type(spec.accumulator))

        def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            old = to_registers(builder, elements(builder, v[0], acc.count))
            left = _fragment_words(builder, a, v[1]) if spec.a_registers else [c.cast(builder, v[1], a, types.int64)]
            operands = [*old, *left, c.cast(builder, v[2], b, types.int64), c.cast(builder, v[3], accumulate, index)]
            new = assembly(builder, spec.text, [register] * spec.registers, operands, convergent=True, tied=True)
            return c.make_tuple(builder, acc, from_registers(builder, new, c.get_value_type(acc.dtype)))

        return signature(acc, acc, a, b, accumulate), codegen

    return typer


def _emulation(spec: WgmmaSpec) -> Any:
    def wgmma(acc: tuple, a: Any, b: int, accumulate: int) -> tuple:
        thread = current()
        values = emulator.barriers.given(thread, acc, spec.name)
        if spec.a_registers:
            emulator.barriers.check_fragment(thread, a)
        operands = (thread, values, a if spec.a_registers else int(a), int(b), bool(accumulate))
        return thread.collective(spec.name, operands, multiply, emulator.barriers.WARPGROUP, sync=False)

    def multiply(operands: list) -> list:
        threads, accs, a, b, accumulate = zip(*operands)
        thread = threads[0]
        unit = emulator.barriers.of(thread)
        unit.starts_for_all(threads)
        if spec.a_registers and isinstance(a[0], emulator.barriers.Settled):
            unit.readings[a[0].registers] = unit.clock
        left = (_from_registers(spec, list(a)) if spec.a_registers
                else _from_shared(thread, "a", a, 64, spec.a, spec.a_major))
        right = _from_shared(thread, "b", b, spec.N, spec.b, spec.b_major)
        packed = isinstance(accs[0][0], np.uint32)
        old = None
        if emulator.barriers.same(thread, "accumulate", accumulate):
            old = spec.c.gather([halves(words) for words in accs] if packed else list(accs))
        new = spec.c.scatter(spec.compute(left, right, old))
        if packed:
            new = [tuple(np.array(values, F16).view(np.uint32)) for values in new]
        return [emulator.barriers.Accumulators(thread, values, unit.clock, spec.name)
                for thread, values in zip(threads, new)]

    return wgmma


def _from_shared(thread: Thread, name: str, descriptors: tuple, lines: int, dtype: np.dtype, major: str) -> np.ndarray:
    """The operand, lines by K, that the threads' descriptors say."""
    where = decode(emulator.barriers.same(thread, f"the descriptor {name}", descriptors)).addresses(lines, major)
    chunks = emulator.barriers.of(thread).gather(thread, where)
    if major == "K":
        return chunks.reshape(lines, -1).view(dtype)
    return chunks.view(dtype).transpose(0, 2, 1).reshape(lines, -1)


def _from_registers(spec: WgmmaSpec, fragments: list) -> np.ndarray:
    if isinstance(fragments[0][0], np.uint32):
        fragments = [np.array(words, np.uint32).view(spec.a) for words in fragments]
    return spec.a_map.gather(fragments).astype(spec.a)


@cache
def instruction(spec: WgmmaSpec) -> Atom:
    """``wgmma(accumulators, a, b, accumulate) -> accumulators``: the instruction as device code and emulation.

    ``accumulators`` is what a thread holds by ``spec.c``; ``a`` and ``b`` are descriptors (``a`` a fragment with
    ``a_registers``, or its 32-bit words); with ``accumulate`` 0 the old accumulators do not matter.

    Accumulators of float16 may be given as 32-bit words of two each, and are then returned so (`halves` takes them apart). A
    loop with a group pending from one round to the next must do so: where it carries them one by one, the assembler sees
    words put together while the hardware writes to them, and makes all wgmmas wait for each other.
    """
    majors = "" if spec.a.itemsize != 2 else f"_{spec.a_major}_{spec.b_major}"
    name = (f"wgmma_{spec.name.replace('.', '_')}{majors}{'_registers' if spec.a_registers else ''}"
            f"{'_negated' if spec.negates else ''}")
    return Atom(name, _typer(spec), _emulation(spec), f"{name}(accumulators, a, b, accumulate): {WgmmaSpec.__doc__}")


def _type_halves(context: TypingContext, words: types.Type) -> Any:
    if not isinstance(words, types.UniTuple) or words.dtype != types.uint32:
        return None
    result = types.UniTuple(numba_type(F16), 2 * words.count)
    return signature(result, words), lambda c, b, s, v: (
        c.make_tuple(b, result, from_registers(b, elements(b, v[0], words.count), ir.IntType(16))))


@atom(_type_halves)
def halves(words: tuple) -> tuple:
    """The float16 accumulators in 32-bit words."""
    return tuple(np.array(words, np.uint32).view(F16))


def _type_settle(context: TypingContext, fragment: types.Type) -> Any:
    if not isinstance(fragment, types.UniTuple) or fragment.count % 2:
        return None
    if fragment.dtype == types.uint32:
        return signature(fragment, fragment), lambda c, b, s, v: c.make_tuple(
            b, fragment, [assembly(b, "mov.b32 $0, $1;", [i32], [word])[0] for word in elements(b, v[0], fragment.count)])
    result = types.UniTuple(types.uint32, fragment.count // 2)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given = elements(b, v[0], fragment.count)
        if given[0].type != i16:
            raise TypingError(f"settle: a fragment of 16-bit elements is needed, not of {fragment.dtype}")
        words = [assembly(b, "mov.b32 $0, {$1, $2};", [i32], list(pair))[0] for pair in zip(given[::2], given[1::2])]
        return c.make_tuple(b, result, words)

    return signature(result, fragment), codegen


@atom(_type_settle)
def settle(fragment: tuple) -> tuple:
    """A's fragment, of 16-bit elements or 32-bit words, as the registers of the instruction: made here, and no later.

    To be called before `wgmma_fence`: where the compiler makes a register between the fence and its wgmma, ptxas puts a
    fence of its own there, and ends the group.
    """
    return emulator.barriers.settled(current(), pack_words(fragment))


# -- groups -----------------------------------------------------------------------------------------------------------

@atom(plain("wgmma.fence.sync.aligned;", convergent=True))
def wgmma_fence() -> None:
    """Before the first wgmma, and before any that uses registers which other instructions have written since."""
    emulator.barriers.fence_registers(current())


@atom(plain("wgmma.commit_group.sync.aligned;", convergent=True))
def wgmma_commit() -> None:
    """Close the group of the wgmmas so far."""
    thread = current()
    emulator.barriers.committed(thread)
    thread.collective("wgmma.commit_group", thread, _commit, emulator.barriers.WARPGROUP, sync=False)


def _commit(threads: list) -> list:
    emulator.barriers.of(threads[0]).commit()
    return [None] * len(threads)


def _is_accumulators(ty: types.Type) -> bool:
    return isinstance(ty, types.BaseTuple) and all(isinstance(t, types.UniTuple) for t in ty.types)


def _type_wait(context: TypingContext, pending: types.Type, accs: types.Type) -> Any:
    if not isinstance(pending, types.IntegerLiteral) or not 0 <= pending.literal_value <= 7 or not _is_accumulators(accs):
        return None
    wait = f"wgmma.wait_group.sync.aligned {pending.literal_value};"

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        assembly(b, wait, [], [], memory=True, convergent=True)
        out = []
        for n, ty in enumerate(accs.types):
            # No instruction: it keeps the compiler from reading, or moving, a register before the wait.
            old = to_registers(b, elements(b, b.extract_value(v[1], n), ty.count))
            register = _register(ty.dtype)
            new = assembly(b, "", [register] * len(old), old, memory=True, convergent=True, tied=True)
            out.append(c.make_tuple(b, ty, from_registers(b, new, c.get_value_type(ty.dtype))))
        return c.make_tuple(b, accs, out)

    return signature(accs, pending, accs), codegen


@atom(_type_wait)
def wgmma_wait(pending: int, accs: tuple) -> tuple:
    """Wait until all but the last ``pending`` (a constant from 0 to 7) groups are done; returns the accumulators ``accs``.

    ``accs`` is a tuple of accumulators, of which each is a tuple. All whose groups are pending must be in it: what is not
    might be moved to other registers while the hardware still writes to it.
    """
    return emulator.barriers.wait_for_groups(current(), pending, accs)
