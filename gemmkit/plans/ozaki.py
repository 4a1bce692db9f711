"""A product by int8 products (`gemmkit.kernels.ozaki`): its launches, and where their arguments lie.

The result is a block of D at a time: two splits, a stack of int8 products, and a recombination. Remainders lie in the
stream's workspaces, at most `LIMIT` bytes for those of A, of B and of D each; larger products take several blocks, and
small products of a stack are blocks together. All launches are one `Launch`, so a call, a plan and a captured graph have
them as any product's.

int32 holds sums of `MOST_K` int8 products. A longer K comes in pieces: each piece's products add the remainders that the
piece before left, and leave remainders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component, freeze, number, without_arrays
from gemmkit.emulator import takes_small_mappings
from gemmkit.epilogues import Epilogue
from gemmkit.kernels.collectives.scheduler import StackSteps
from gemmkit.kernels.ozaki import (
    ELEMENTS,
    I8,
    LANES,
    MOST_K,
    PIECE,
    THREADS,
    U8,
    Recombination,
    Residues,
    RowSplit,
    recombine,
    split,
)
from gemmkit.kernels.spec import Spec
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.functions import Frozen, freeze_array, freeze_scalar
from gemmkit.layouts import ColMajor, Matricised, Plain, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.plans.compiled import OPERANDS, Compiled
from gemmkit.plans.launch import Launch, Put
from gemmkit.plans.problem import Call, resolve
from gemmkit.ptx.special import udiv
from gemmkit.runtime.arrays import ArrayInfo, flipped, unit_axis
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launch import Launchable, Space
from gemmkit.tiling import Tile
from gemmkit.tuning.choose import get_config
from gemmkit.tuning.problems import Choice, MappingProblem, choose

LIMIT = 2**31                          # bytes of a workspace
ROLES = "remainders of a", "remainders of b", "remainders of d"
POISON = 0xA5                          # bytes of workspaces in the emulator
ADDRESSES = {role: 2**40 * n for n, role in enumerate(ROLES, 1)}                  # until a launch puts theirs in
I32 = np.dtype(np.int32)
TOP: Any = np.uint32(2**31)
LARGE = 1024                           # rows and columns of products that take a mapping of `ResidueProblem`'s
RESIDENT = 1024                        # threads of a multiprocessor that split rows of neighbours: 64 registers each
ALIGNED = 16                           # elements that rows of remainders are multiples of: TMA's and stores' 16 bytes
ALONG = 32                             # warps of a block, at most, where a row's elements are neighbours in memory
ACROSS, WARPS = 8, 16                  # rows and warps of a block where rows are neighbours in memory: 64 bytes of rows


def why_plain(call: Call) -> str | None:
    """Why ``precision="auto"`` takes the product that int8 products would stand for; None where it takes them. It looks at
    sizes, dtypes and the device alone: the scale of each row makes the bound of the error one of rows' norms, whatever
    numbers they have, and rows that are not finite are computed by themselves."""
    error = refusal(call)
    if error is not None:
        return str(error)
    if call.device.arch != (9, 0) or call.device.sm_count < MEASURED:
        return "no times of this device are known"
    taken, plain = microseconds(call)
    return f"it is modelled to take {plain:.0f} us, and int8 products {taken:.0f}" if plain <= taken else None


#: Multiprocessors of the devices that `microseconds` was fitted to: H100 and H200 SXM.
MEASURED = 132


def microseconds(call: Call) -> tuple[float, float]:
    """What int8 products take, and the product that they stand for, by rates that an H200 had. int8 products reach theirs if
    tiles are many; planes are written and read at ``MEMORY``. Within 8 % of what squares of 2048, 4096 and 8192 took, of
    float32, float64 and their complex numbers (2026-11-28)."""
    M, N, K, count = call.M, call.N, call.K, call.products
    of = Residues.of(call.a.dtype, call.moduli)
    work, numbers = 2e-6 * M * N * K * count, call.a.dtype.itemsize
    moved = count * ((M + N) * padded(K) * (numbers + of.planes) + M * N * (2 * of.planes + numbers)) * 1e-6
    tiles = -(-M // 128) * -(-N // 256) * of.planes * count
    waves = -(-tiles // MEASURED) * MEASURED / tiles
    return (of.planes * work / INT8 * waves + moved / MEMORY + LAUNCHES, of.parts**2 * work / RATES[call.a.dtype] + 5)


INT8, MEMORY, LAUNCHES = 1500.0, 3.0, 15.0             # Top/s, MB/us, us
#: Of what is multiplied so, Tflop/s of the products that they stand for.
RATES = {np.dtype(name): rate for name, rate in (
    ("float32", 50.0), ("float64", 58.0), ("complex64", 50.0), ("complex128", 58.0))}


def refusal(call: Call) -> ConfigError | ValueError | None:
    """Why a product cannot be computed so: a ConfigError, or a ValueError for dtypes; None where it can."""
    conf = call.config
    for name, info in (("a", call.a), ("b", call.b)):
        if info.dtype not in RATES:
            return ValueError(f"precision='ozaki': {', '.join(map(str, RATES))} operands are needed; {name} is {info.dtype}")
    if call.a.dtype != call.b.dtype:
        return ValueError(f"precision='ozaki': a is {call.a.dtype} and b {call.b.dtype}; operands of one dtype are needed: "
                          "convert one of them")
    for field in ("global_a_layout", "global_b_layout", "global_c_layout", "global_d_layout"):
        layout = getattr(conf, field)
        if not isinstance(layout, (Plain, Matricised)) and (field != "global_c_layout" or conf.has_c):
            return ConfigError(f"precision='ozaki': {call.given_as(field)} is {layout!r}; plain matrices, or tensors of a "
                               "contraction, are needed")
    for field in TRANSFORMS:
        if not getattr(conf, field).is_identity:
            return ConfigError(f"precision='ozaki': {call.given_as(field)} is given; transform_global_to_shared_a and _b "
                               "alone are taken. Transform arrays first, or leave precision out")
    for field in OF_OPERANDS:
        transform = getattr(conf, field)
        if not transform.is_identity and transform.with_batch:
            return ConfigError(f"precision='ozaki': {call.given_as(field)} asks for a product's number; a function of x, or "
                               "of x, i and j, is needed")
        if freeze(transform).leaves:
            return ConfigError(f"precision='ozaki': {call.given_as(field)} holds arrays or numbers; a function that "
                               "captures none is needed. Transform arrays first, or leave precision out")
    if conf.epilogue.finishes_blocks or conf.epilogue.stores_itself or conf.observe_a is not None:
        name = "epilogue" if conf.observe_a is None else "observe_a"
        return ConfigError(f"precision='ozaki': {name}={getattr(conf, name)!r} sees more than an element; an element-wise "
                           "epilogue is needed")
    if not conf.condition.is_always:
        return ConfigError(f"precision='ozaki': condition={conf.condition!r} leaves out k-tiles; leave it or precision out")
    return None


OF_OPERANDS = "transform_global_to_shared_a", "transform_global_to_shared_b"
TRANSFORMS = tuple(f"transform_{way}" for way in (
    "global_to_shared_c", "shared_to_regs_a", "shared_to_regs_b", "shared_to_regs_c", "regs_to_shared_d",
    "shared_to_global_d"))


class ResultBlock(NamedTuple):
    """Lines and places of D: from ``i`` on ``rows`` along the axis in which D is not contiguous, from ``j`` on ``columns``
    along the other; of ``products`` products, from ``product`` on."""

    product: int
    i: int
    j: int
    rows: int
    columns: int
    products: int


def blocks_of(planes: int, rows: int, columns: int, K: int) -> tuple[int, int]:
    """Rows and columns of a block whose remainders keep to `LIMIT`.

    >>> blocks_of(14, 8192, 8192, 8192), blocks_of(14, 16384, 16384, 16384)
    ((8192, 8192), (8192, 8192))
    """
    most = max(1, LIMIT // (planes * padded(K)))
    rows, columns = shared_out(rows, most), shared_out(columns, most)
    while planes * rows * padded(columns) > LIMIT and max(rows, columns) > 1:
        if rows >= columns:
            rows = shared_out(rows, -(-rows // 2))
        else:
            columns = shared_out(columns, -(-columns // 2))
    return rows, columns


def shared_out(extent: int, most: int) -> int:
    """``extent`` in as few equal parts of ``most`` at most as there can be, multiples of 256 where these are small."""
    part = -(-extent // -(-extent // most))
    return min(extent, -(-part // 256) * 256) if part * 16 > most * 15 or part + 256 <= most else part


def warps_for(K: int, share: int, most: int) -> int:
    """A power of two, as many warps of which each has ``share`` elements of a row as have all of it, ``most`` at most."""
    return int(min(most, 1 << (-(-K // share) - 1).bit_length()))


def padded(extent: int) -> int:
    return -(-extent // ALIGNED) * ALIGNED


class OperandSlot(NamedTuple):
    """An argument of a kernel: the float64 kernel's operand ``n``, of a, b, c and d."""

    n: int
    frozen: Frozen


class WorkspacePart(NamedTuple):
    """An argument of a kernel: an array ``offset`` bytes behind the beginning of a workspace."""

    role: str
    offset: int
    info: ArrayInfo
    readonly: bool = False

    def one(self) -> WorkspacePart:
        """The part of the first product, or of all where they share it."""
        return self._replace(info=self.info._replace(shape=self.info.shape[1:], strides=self.info.strides[1:]))

    def on_host(self, spaces: dict[str, np.ndarray]) -> np.ndarray:
        strides = [stride * self.info.dtype.itemsize for stride in self.info.strides]
        return np.ndarray(self.info.shape, self.info.dtype, spaces[self.role].data, self.offset, strides)


class OzakiStep:
    """A launch of ``kernel``, whose arguments are ``given``: components, numbers, `OperandSlot`s and `WorkspacePart`s. The
    last one of a block writes D."""

    def __init__(self, call: Call, kernel: Callable[..., None], given: Sequence[Any], threads: int, blocks: int,
                 shared_bytes: int = 0, resident: int = 1, is_last: bool = False):
        self.given, self.is_last = given, is_last
        self.launchable = Launchable(kernel, [_frozen(x) for x in given], threads, blocks, call.device, call.a.device,
                                     shared_bytes, blocks_per_sm=resident)

    def launch(self, places: dict[Any, int], more: Sequence[Put], spaces: list[Space]) -> Launch:
        """With the addresses that stand at ``places`` among what a call brings, by operand and workspace, and ``more``."""
        found = [*more] if any(isinstance(x, Spec) for x in self.given) else []
        for slot, x in zip(self.launchable.slots, self.given):
            if slot is not None and isinstance(x, WorkspacePart):
                found.append(Put(slot, places[x.role], x.offset))
            elif slot is not None and isinstance(x, OperandSlot):
                found.append(Put(slot, places[x.n]))
        return Launch(self.launchable, found)

    def emulated(self, arena: Any, spec: Any, operands: Sequence[Any], spaces: dict[str, np.ndarray]) -> Iterator[Any]:
        """The launch as the emulator takes it, with views of the float64 kernel's operands."""
        def argument(x: Any) -> Any:
            if isinstance(x, WorkspacePart):
                return arena.view(x.on_host(spaces), x.role, len(x.info.shape) - 1, ALIGNED, readonly=x.readonly)
            return operands[x.n] if isinstance(x, OperandSlot) else spec if isinstance(x, Spec) else x

        yield self.launchable, tuple(map(argument, self.given))

    def forget_arrays(self) -> None:
        """Keep no array of a component alive."""
        self.given = tuple(without_arrays(x) if isinstance(x, Component) else x for x in self.given)


def _frozen(x: Any) -> Frozen:
    if isinstance(x, OperandSlot):
        return x.frozen
    if isinstance(x, WorkspacePart):
        return freeze_array(x.info, len(x.info.shape) - 1, readonly=x.readonly)
    return freeze(x) if isinstance(x, Component) else freeze_scalar(x)


@dataclass(frozen=True)
class Remainder(Epilogue):
    """The remainder of a sum by the modulus p of its product in the stack, as a byte.

    A sum s, from -2^31 up to 2^31, becomes n = s + offset of 32 bits without a sign, with a multiple of p near 2^31. Its
    quotient is exact: 2^39 = m p + e, and n / p is (n + 1) m >> 39 if e is below 128, n (m + 1) >> 39 if p - e is. One of
    them is, for p is below 256. (Both products have 64 bits, and the first one adds m in the same instruction. m has 32
    bits, so of p below 128 all powers of two are half as large. By 256, low bytes are the remainder whatever the quotient.)

    What depends on p is computed, in 32 bits: a look-up by a run-time number would be a branch for each element.
    """

    residues: Residues
    is_stack: bool = False             # of several products' planes, one product after the other

    @property
    def result_dtype(self) -> Any:
        return U8

    def __call__(self, x: Any, m: int, n: int, batch: int) -> Any:      # type: ignore[override]
        first, second = self.residues.packed
        plane = batch - udiv(batch, self.residues.planes) * self.residues.planes if self.is_stack else batch
        t = plane >> self.residues.parts - 1
        p: Any = np.uint32(256 - int((first if t < 8 else second) >> np.uint64(8 * (t & 7)) & np.uint64(255)))
        unit = np.uint32(256) if p >= np.uint32(128) else np.uint32(128)
        share: Any = np.uint32(udiv(TOP, p))
        rest: Any = TOP - share * p
        more: Any = np.uint32(udiv(rest * unit, p))
        multiplier, left = share * unit + more, rest * unit - more * p
        addend, negative = multiplier, np.uint32(0) - p
        if left + left > p:
            multiplier, addend = multiplier + np.uint32(1), np.uint32(0)
        offset = TOP + (p - rest if rest > np.uint32(0) else np.uint32(0))
        shifted: Any = np.uint32(x) + offset
        high: Any = np.uint32((np.uint64(shifted) * np.uint64(multiplier) + np.uint64(addend)) >> np.uint64(32))
        return np.uint8(shifted + (high >> (np.uint32(7) if p >= np.uint32(128) else np.uint32(6))) * negative)


class ResidueProblem(MappingProblem):
    """int8 products of so many rows and columns. Mappings are the columns of a tile: of large ones on Hopper those that cost
    least; else None, the tables'. Those choose tiles of 128 columns where these fill waves, but a stack has many waves, and
    loads from the L2 limit such tiles.

    Tera operations a second of 30 products of 4096^3 on an H200 (2026-11-28): 128x192 in turns 1463, by pairs of blocks
    1587; 256x128 1570, by pairs 1597; 128x256 1597, by pairs 1625. What tiles compute beyond D's edges counts, too.
    """

    def __init__(self, rows: int, columns: int, epilogue: Remainder):
        self.rows, self.columns, self.epilogue = rows, columns, epilogue

    def candidates(self, device: DeviceInfo) -> Iterator[int | None]:
        if device.arch == (9, 0) and min(self.rows, self.columns) >= LARGE and not takes_small_mappings():
            tiles = ((256, 256, 1625), (128, 192, 1463))
            yield from [N for _, N, _ in sorted(tiles, key=lambda of: (
                -(-self.rows // of[0]) * of[0] * -(-self.columns // of[1]) * of[1] / of[2]))]
        yield None

    def specialise(self, mapping: int | None, device: DeviceInfo) -> Choice:
        if mapping is None:
            return Choice(None)
        fields: dict[str, Any] = {} if mapping < 256 else dict(
            block_shape=Tile(M=128, N=256, K=128), warps_per_block=8, schedule="cooperative", cluster=Tile(M=2, N=1))
        return Choice(get_config(operator=WGMMAOp(mapping, dtype="int8"), global_a_layout=RowMajor(I8),
                                 global_b_layout=ColMajor(I8), global_d_layout=RowMajor(U8), epilogue=self.epilogue,
                                 device=device, **fields))


class ResidueProducts:
    """The launch of a block's int8 products: a stack, of parts of workspaces. With ``adds`` they are added to what is in
    D's."""

    def __init__(self, residues: Residues, a: WorkspacePart, b: WorkspacePart, d: WorkspacePart, columns: int, adds: bool):
        is_stack = d.info.shape[0] > 1
        a, b, d = self.parts = tuple(part if part.info.shape[0] > 1 else part.one() for part in (a, b, d))
        self.columns, self.adds = columns, adds
        by_columns = b.info._replace(shape=(*b.info.shape[:-2], *b.info.shape[:-3:-1]),
                                     strides=(*b.info.strides[:-2], *b.info.strides[:-3:-1]))
        out = d.info._replace(shape=(*d.info.shape[:-1], columns))
        epilogue = Remainder(residues, is_stack)
        conf = choose(ResidueProblem(a.info.shape[-2], columns, epilogue), target(a.info.device)).spec
        call = resolve(a.info, by_columns, out if adds else None, out, conf, {} if conf else {"epilogue": epilogue})
        self.compiled = Compiled(call, call.seen_out(out))
        self.launchable = self.compiled.launchable

    def forget_arrays(self) -> None:
        """They have none."""

    def launch(self, places: dict[Any, int], more: Sequence[Put], spaces: list[Space]) -> Launch:
        made = self.compiled.launch()
        own = [places[self.parts[n].role] for n in (2, 0, 1, 2)]
        own += range(places["next"] + len(spaces), places["next"] + len(spaces) + len(made.spaces))
        offsets = [self.parts[n].offset for n in (2, 0, 1, 2)]
        spaces += made.spaces
        return Launch(made.kernel, [put._replace(which=own[put.which], offset=put.offset + offsets[put.which])
                                    if put.which < len(offsets) else put._replace(which=own[put.which])
                                    for put in made.puts])

    def emulated(self, arena: Any, spec: Any, operands: Sequence[Any], spaces: dict[str, np.ndarray]) -> Iterator[Any]:
        a, b, d = (part.on_host(spaces) for part in self.parts)
        d = d[..., :self.columns]
        yield from self.compiled.emulated((a, b.swapaxes(-2, -1), d if self.adds else None, d), arena)


class OzakiProduct(Compiled):
    """The kernels of a product, or of a stack. What the base class makes is the product that it stands for: its
    specialisation has the epilogue, C's and D's layouts, and the values of components that calls bring.

    Lines of the planes of remainders are rows of D, or columns of a D that is contiguous along these. An operand ``moves``
    where products of the stack have matrices of their own; else its planes serve all.
    """

    def __init__(self, call: Call, given: ArrayInfo):
        error = refusal(call)
        if error is not None:
            raise error
        super().__init__(call, given)
        self.spec = replace(self.spec, d=replace(self.spec.d, whole=False))
        problem, self.residues = self.computed, Residues.of(call.a.dtype, call.moduli)
        out = flipped(given) if call.swap_ab else given
        layout = self.config.global_d_layout
        self.axis = (0 if layout.vector_axis == 0 else 1) if isinstance(layout, Matricised) else (
            0 if unit_axis(out) == 0 and min(out.shape) > 1 else 1)
        self.sides = (0, 1) if self.axis == 1 else (1, 0)              # of a and b: whose rows are lines, and places in them
        self.steps_of = [(problem.a, problem.b)[n].steps for n in self.sides]
        self.moves = [any(stride for _, stride in steps) for steps in self.steps_of]
        self.extents = (problem.M, problem.N) if self.axis == 1 else (problem.N, problem.M)
        self.block = blocks_of(self.residues.planes, *self.extents, problem.K)
        self.together = self._together() if self.block == self.extents else 1
        self.steps = self._steps()
        self.launchable, self.behind = self.steps[0].launchable, self.steps[1:]       # type: ignore[assignment]

    @property
    def products(self) -> Compiled:
        """The int8 products of the first block."""
        return next(step.compiled for step in self.steps if isinstance(step, ResidueProducts))

    @property
    def description(self) -> str:
        """How the product is computed, in a line."""
        found, blocks = self.residues, sum(isinstance(step, OzakiStep) and step.is_last for step in self.steps)
        parts = "" if found.parts == 1 else ", two for each modulus"
        return (f"Ozaki scheme II: {found.planes} int8 products{parts}, modulo {', '.join(map(str, found.moduli))}; rows of "
                f"A and columns of B have {found.bits} bits" + (f"; {blocks} blocks of D" if blocks > 1 else ""))

    # -- workspaces ---------------------------------------------------------------------------------------------------

    def _together(self) -> int:
        """How many products of a stack are one block: as many as keep to `LIMIT`."""
        planes, K = self.residues.planes, padded(self.computed.K)
        largest = max(*(extent * K for extent in self.extents), self.extents[0] * padded(self.extents[1]))
        return max(1, min(self.computed.products, LIMIT // (planes * largest + 4 * max(self.extents))))

    def _planes(self, role: str, lines: int, columns: int, dtype: np.dtype, products: int, readonly: bool = False,
                first: int = 0, count: int | None = None) -> WorkspacePart:
        """Of so many products; ``count`` columns of them, from ``first`` on."""
        width = padded(columns)
        shape = products, self.residues.planes, lines, width - first if count is None else count
        strides = self.residues.planes * lines * width, lines * width, width, 1
        return WorkspacePart(role, first, self._described(role, shape, strides, dtype), readonly)

    def _scales(self, role: str, extent: int, products: int, readonly: bool = False) -> WorkspacePart:
        """Behind the planes."""
        offset = -(-products * self.residues.planes * extent * padded(self.computed.K) // 256) * 256
        return WorkspacePart(role, offset, self._described(role, (products, extent), (extent, 1), I32), readonly)

    def _described(self, role: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> ArrayInfo:
        return ArrayInfo(ADDRESSES[role], shape, strides, dtype, self.computed.a.device, False, self.computed.a.library)

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """Of each workspace."""
        found = {}
        for side, (role, extent) in enumerate(zip(ROLES, self.block)):
            products = self.together if self.moves[side] else 1
            found[role] = self._scales(role, extent, products).offset + 4 * extent * products
        return {**found, ROLES[2]: self.together * self.residues.planes * self.block[0] * padded(self.block[1])}

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _steps(self) -> list[OzakiStep | ResidueProducts]:
        """All launches, in their order. Lines are split for a row of blocks, places once if they all fit."""
        found: list[OzakiStep | ResidueProducts] = []
        (rows, columns), (lines, places) = self.block, self.extents
        for product in range(0, self.computed.products, self.together):
            is_new = [product == 0 or moves for moves in self.moves]
            for i in range(0, lines, rows):
                for j in range(0, places, columns):
                    block = ResultBlock(product, i, j, min(rows, lines - i), min(columns, places - j),
                                        min(self.together, self.computed.products - product))
                    if j == 0 and (is_new[0] or rows < lines):
                        found.append(self._split(0, i, block.rows, block))
                    if columns < places or (i == 0 and is_new[1]):
                        found.append(self._split(1, j, block.columns, block))
                    found += [*self._products(block), self._recombined(block)]
        return found

    def _of(self, side: int, block: ResultBlock) -> int:
        """How many products have planes of their own."""
        return block.products if self.moves[side] else 1

    def _split(self, side: int, first: int, extent: int, block: ResultBlock) -> OzakiStep:
        """Of ``extent`` lines (side 0) or places in them (side 1), from ``first`` on."""
        call, n, role, products = self.computed, self.sides[side], ROLES[side], self._of(side, block)
        axis, K, frozen = 1 - n, call.K, self.operands[n]
        transform, layout = (getattr(self.config, field) for field in (OF_OPERANDS[n], f"global_{'ab'[n]}_layout"))
        piece = PIECE // self.residues.parts
        if layout.vector_axis == axis or extent < ACROSS:
            warps = warps_for(K, LANES * piece, ALONG)
            how = RowSplit(self.residues, axis, warps, 1, K <= warps * LANES * piece, transform, layout, self.shape)
        else:
            warps = warps_for(K, LANES // ACROSS * piece, WARPS)
            how = RowSplit(self.residues, axis, warps, ACROSS, False, transform, layout, self.shape)
        steps = StackSteps.of(self.steps_of[side])
        given = (how, steps, OperandSlot(n, frozen), self._planes(role, extent, K, I8, products),
                 self._scales(role, extent, products), block.product if self.moves[side] else 0, first, extent, K,
                 np.float64(self.residues.norm(K)**2))
        resident = max(1, RESIDENT // how.threads) if how.rows == 1 else 1
        return OzakiStep(call, split, given, how.threads, products * -(-extent // how.rows), how.shared_bytes, resident)

    def _products(self, block: ResultBlock) -> Iterator[ResidueProducts]:
        """A launch for each piece of K."""
        K = self.computed.K
        for first in range(0, padded(K), MOST_K):
            count = min(MOST_K, padded(K) - first)
            a, b = (self._planes(ROLES[side], extent, K, I8, self._of(side, block), first=first, count=count)
                    for side, extent in enumerate((block.rows, block.columns)))
            d = self._planes(ROLES[2], block.rows, block.columns, U8, block.products)
            yield ResidueProducts(self.residues, a, b, d, block.columns, first > 0)

    def _recombined(self, block: ResultBlock) -> OzakiStep:
        operands = [OperandSlot(n, frozen) for n, frozen in enumerate(self.operands)]
        scales = [self._scales(role, extent, self._of(side, block), True)
                  for side, (role, extent) in enumerate(zip(ROLES, (block.rows, block.columns)))]
        steps = [StackSteps(not moves) for moves in self.moves]
        scales = [part if moves else part.one() for part, moves in zip(scales, self.moves)]
        planes = self._planes(ROLES[2], block.rows, block.columns, U8, block.products, True)
        given = (self.spec, *operands, self.shape, Recombination(self.residues, self.axis), planes, *scales, *steps,
                 *block[:5])
        pieces = block.products * block.rows * -(-block.columns // ELEMENTS)
        return OzakiStep(self.computed, recombine, given, THREADS, -(-pieces // THREADS), is_last=True)

    def launch(self, slots: tuple[int, ...] = ()) -> Launch:
        """All launches, as a call brings `OPERANDS` and values of components at these ``slots``."""
        names = [("a", "b", "c", "out")[n] for n in self.order]
        places: dict[Any, int] = {n: OPERANDS.index(name) for n, name in enumerate(names)}
        own = [Put(slot, n, encoder=number) for n, slot in enumerate(slots, len(OPERANDS))]
        places["next"] = len(OPERANDS) + len(slots)
        places.update((role, places["next"] + n) for n, role in enumerate(ROLES))
        spaces = [Space(-1, role, self.nbytes[role]) for role in ROLES]
        first, *behind = (step.launch(places, own, spaces) for step in self.steps)
        first.spaces, first.behind = spaces, behind
        return first

    # -- without a GPU (`gemmkit.emulator`) ----------------------------------------------------------------------------

    def emulated(self, arrays: tuple[Any, Any, Any, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = self.views(arrays, arena)
        spec, operands = arena.component(self.spec), [views[name] for name in ("a", "b", "c", "out")]
        spaces = {role: np.full(nbytes + ALIGNED, POISON, np.uint8) for role, nbytes in self.nbytes.items()}
        spaces = {role: x[-x.ctypes.data % ALIGNED:] for role, x in spaces.items()}
        for step in self.steps:
            yield from step.emulated(arena, spec, operands, spaces)
