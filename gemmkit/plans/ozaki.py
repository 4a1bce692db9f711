"""A float64 product by int8 products (`gemmkit.kernels.ozaki`): its launches, and where their arguments lie.

The result is a block of D at a time: two splits, a stack of int8 products, and a recombination. Remainders lie in the
stream's workspaces, at most `LIMIT` bytes for those of A, of B and of D each; larger products take several blocks. All
launches are one `Launch`, so a call, a plan and a captured graph have them as any product's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component, freeze, number, without_arrays
from gemmkit.emulator.mode import takes_small_mappings
from gemmkit.epilogues import Epilogue
from gemmkit.kernels.ozaki import (
    ELEMENTS,
    F64,
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
from gemmkit.layouts import Plain
from gemmkit.operators import Operator, WGMMAOp
from gemmkit.plans.compiled import OPERANDS, Compiled
from gemmkit.plans.launch import Launch, Put
from gemmkit.plans.problem import Call, resolve
from gemmkit.ptx.arithmetic import divided
from gemmkit.ptx.special import udiv
from gemmkit.runtime.arrays import ArrayInfo, flipped, unit_axis
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launch import Launchable, Space

LIMIT = 2**31                          # bytes of a workspace
ROLES = "remainders of a", "remainders of b", "remainders of d"
POISON = 0xA5                          # bytes of workspaces in the emulator
ADDRESSES = {role: 2**40 * n for n, role in enumerate(ROLES, 1)}                  # until a launch puts theirs in
I32 = np.dtype(np.int32)
TOP: Any = np.uint32(2**31)
LARGE = 1024                           # rows and columns of products that take `by_wgmma`'s operator
RESIDENT = 1024                        # threads of a multiprocessor that split rows of neighbours: 64 registers each
ALIGNED = 16                           # elements that rows of remainders are multiples of: TMA's and stores' 16 bytes
ALONG = 32                             # warps of a block, at most, where a row's elements are neighbours in memory
ACROSS, WARPS = 8, 16                  # rows and warps of a block where rows are neighbours in memory: 64 bytes of rows


def compiled_of(call: Call, given: ArrayInfo) -> Compiled:
    """The kernels of a call whose result is the array ``given``."""
    return OzakiProduct(call, given) if call.moduli and call.K and 0 not in (call.M, call.N) else Compiled(call, given)


def check(call: Call) -> None:
    """Raise ConfigError, or ValueError for dtypes and sizes, where a product cannot be computed so."""
    conf = call.config
    for name, info in (("a", call.a), ("b", call.b)):
        if info.dtype != F64:
            raise ValueError(f"precision='ozaki': float64 operands are needed; {name} is {info.dtype}")
    if call.K > MOST_K:
        raise ValueError(f"precision='ozaki': a has K={call.K} columns; sums of int8 products are exact up to K={MOST_K}. "
                         "Add up products of parts of K (gemmkit.blas.gemmEx with beta=1), or leave precision out")
    if call.stack is not None:
        raise ValueError(f"precision='ozaki': a and b are a stack of {call.products} products; multiply its matrices one "
                         "by one, or leave precision out")
    for field in ("global_a_layout", "global_b_layout", "global_c_layout", "global_d_layout"):
        layout = getattr(conf, field)
        if not isinstance(layout, Plain) and (field != "global_c_layout" or conf.has_c):
            raise ConfigError(f"precision='ozaki': {call.given_as(field)} is {layout!r}; plain matrices are needed "
                              "(RowMajor, ColMajor)")
    for field in TRANSFORMS:
        if not getattr(conf, field).is_identity:
            raise ConfigError(f"precision='ozaki': {call.given_as(field)} is given, and operands are taken as they are; "
                              "transform arrays first, or leave precision out")
    if conf.epilogue.finishes_blocks or conf.epilogue.stores_itself or conf.observe_a is not None:
        name = "epilogue" if conf.observe_a is None else "observe_a"
        raise ConfigError(f"precision='ozaki': {name}={getattr(conf, name)!r} sees more than an element; an element-wise "
                          "epilogue is needed")
    if not conf.condition.is_always:
        raise ConfigError(f"precision='ozaki': condition={conf.condition!r} leaves out k-tiles; leave it or precision out")


TRANSFORMS = tuple(f"transform_{way}" for way in (
    "global_to_shared_a", "global_to_shared_b", "global_to_shared_c", "shared_to_regs_a", "shared_to_regs_b",
    "shared_to_regs_c", "regs_to_shared_d", "shared_to_global_d"))


class ResultBlock(NamedTuple):
    """Lines and places of D: from ``i`` on ``rows`` along the axis in which D is not contiguous, from ``j`` on ``columns``
    along the other."""

    i: int
    j: int
    rows: int
    columns: int


def blocks_of(moduli: int, rows: int, columns: int, K: int) -> tuple[int, int]:
    """Rows and columns of a block whose remainders keep to `LIMIT`.

    >>> blocks_of(14, 8192, 8192, 8192), blocks_of(14, 16384, 16384, 16384)
    ((8192, 8192), (8192, 8192))
    """
    most = max(1, LIMIT // (moduli * padded(K)))
    rows, columns = shared_out(rows, most), shared_out(columns, most)
    while moduli * rows * padded(columns) > LIMIT and max(rows, columns) > 1:
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

    def on_host(self, spaces: dict[str, np.ndarray]) -> np.ndarray:
        strides = [stride * self.info.dtype.itemsize for stride in self.info.strides]
        return np.ndarray(self.info.shape, self.info.dtype, spaces[self.role].data, self.offset, strides)


class OzakiStep:
    """A launch of ``kernel``, whose arguments are ``given``: components, numbers, `OperandSlot`s and `WorkspacePart`s."""

    def __init__(self, call: Call, kernel: Callable[..., None], given: Sequence[Any], threads: int, blocks: int,
                 shared_bytes: int = 0, resident: int = 1):
        self.given = given
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

    A sum s, from -2^31 up to 2^31, becomes n = s + offset of 32 bits without a sign, with a multiple of p near 2^31.
    floor(n / p) is n ceil(2^39 / p) >> 39, or one more where n mod p is p - 1 (`divisor_reciprocal` has n < 2^31). What is
    left is then from -1 to p - 1, and with 1 added a byte. (By 256 all of it is exact.)

    What depends on p is computed, in 32 bits: a look-up by a run-time number would be a branch for each element.
    """

    residues: Residues

    @property
    def result_dtype(self) -> Any:
        return U8

    def __call__(self, x: Any, m: int, n: int, batch: int) -> Any:      # type: ignore[override]
        first, second = self.residues.packed
        p: Any = 256 - int((first if batch < 8 else second) >> np.uint64(8 * (batch & 7)) & np.uint64(255))
        share: Any = udiv(TOP, p)
        rest: Any = TOP - np.uint32(share * p)
        multiplier: Any = np.uint32(share) * np.uint32(256) + np.uint32(udiv(rest * np.uint32(256) + np.uint32(p - 1), p))
        shifted: Any = np.uint32(x) + TOP + (np.uint32(p) - rest if rest > 0 else np.uint32(0))
        return np.uint8(shifted - np.uint32(divided(shifted, multiplier, 39)) * np.uint32(p) + np.uint32(p & 1))


def by_wgmma(device: DeviceInfo) -> Operator | None:
    """The operator of large int8 products on Hopper, None elsewhere. The tables choose tiles of 128 columns where these fill
    waves, but loads from the L2 limit such tiles: 4096^3 runs at 1140 Top/s by them, 8192^3 at 1555 by 192 ones (H100)."""
    return WGMMAOp(192, dtype="int8") if device.arch == (9, 0) else None


class ResidueProducts:
    """The launch of a block's int8 products: a stack, of parts of workspaces."""

    def __init__(self, residues: Residues, a: WorkspacePart, b: WorkspacePart, d: WorkspacePart, columns: int):
        self.parts = a, b, d
        self.columns = columns
        by_columns = b.info._replace(shape=(residues.count, *b.info.shape[:0:-1]),
                                     strides=(b.info.strides[0], *b.info.strides[:0:-1]))
        out = d.info._replace(shape=(*d.info.shape[:2], columns))
        keywords: dict[str, Any] = {"epilogue": Remainder(residues)}
        if a.info.shape[1] >= LARGE <= columns and not takes_small_mappings():
            keywords["operator"] = by_wgmma(target(a.info.device))
        call = resolve(a.info, by_columns, None, out, None, keywords)
        self.compiled = Compiled(call, call.seen_out(out))
        self.launchable = self.compiled.launchable

    def forget_arrays(self) -> None:
        """They have none."""

    def launch(self, places: dict[Any, int], more: Sequence[Put], spaces: list[Space]) -> Launch:
        made = self.compiled.launch()
        own = [places[self.parts[n].role] for n in (2, 0, 1)]
        own += [0, *range(places["next"] + len(spaces), places["next"] + len(spaces) + len(made.spaces))]
        spaces += made.spaces
        return Launch(made.kernel, [put._replace(which=own[put.which]) for put in made.puts])

    def emulated(self, arena: Any, spec: Any, operands: Sequence[Any], spaces: dict[str, np.ndarray]) -> Iterator[Any]:
        a, b, d = (part.on_host(spaces) for part in self.parts)
        yield from self.compiled.emulated((a, b.swapaxes(1, 2), None, d[:, :, :self.columns]), arena)


class OzakiProduct(Compiled):
    """The kernels of a product. What the base class makes is the float64 product that it stands for: its specialisation has
    the epilogue, C's and D's layouts, and the values of components that calls bring.

    Lines of the planes of remainders are rows of D, or columns of a D that is contiguous along these.
    """

    def __init__(self, call: Call, given: ArrayInfo):
        check(call)
        super().__init__(call, given)
        self.spec = replace(self.spec, d=replace(self.spec.d, whole=False))
        self.residues = Residues(call.moduli)
        out = flipped(given) if call.swap_ab else given
        self.axis = 0 if unit_axis(out) == 0 and min(out.shape) > 1 else 1
        self.sides = (0, 1) if self.axis == 1 else (1, 0)              # of a and b: whose rows are lines, and places in them
        M, N = self.computed.M, self.computed.N
        self.extents = (M, N) if self.axis == 1 else (N, M)
        self.block = blocks_of(call.moduli, *self.extents, self.computed.K)
        self.steps = self._steps()
        self.launchable, self.behind = self.steps[0].launchable, self.steps[1:]       # type: ignore[assignment]

    @property
    def products(self) -> Compiled:
        """The int8 products of the first block."""
        return next(step.compiled for step in self.steps if isinstance(step, ResidueProducts))

    @property
    def description(self) -> str:
        """How the product is computed, in a line."""
        found, blocks = self.residues, sum(isinstance(step, ResidueProducts) for step in self.steps)
        return (f"Ozaki scheme II: {found.count} int8 products, modulo {', '.join(map(str, found.moduli))}; rows of A and "
                f"columns of B have {found.bits} bits" + (f"; {blocks} blocks of D" if blocks > 1 else ""))

    # -- workspaces ---------------------------------------------------------------------------------------------------

    def _planes(self, role: str, lines: int, columns: int, dtype: np.dtype, readonly: bool = False) -> WorkspacePart:
        width = padded(columns)
        shape = self.residues.count, lines, width
        return WorkspacePart(role, 0, self._described(role, shape, (lines * width, width, 1), dtype), readonly)

    def _scales(self, role: str, extent: int, readonly: bool = False) -> WorkspacePart:
        """Behind the planes."""
        offset = -(-self.residues.count * extent * padded(self.computed.K) // 256) * 256
        return WorkspacePart(role, offset, self._described(role, (extent,), (1,), I32), readonly)

    def _described(self, role: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> ArrayInfo:
        return ArrayInfo(ADDRESSES[role], shape, strides, dtype, self.computed.a.device, False, self.computed.a.library)

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """Of each workspace."""
        found = {}
        for role, extent in zip(ROLES, self.block):
            scales = self._scales(role, extent)
            found[role] = scales.offset + 4 * extent
        return {**found, ROLES[2]: self.residues.count * self.block[0] * padded(self.block[1])}

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _steps(self) -> list[OzakiStep | ResidueProducts]:
        """All launches, in their order."""
        found: list[OzakiStep | ResidueProducts] = []
        (rows, columns), (lines, places) = self.block, self.extents
        for i in range(0, lines, rows):
            for j in range(0, places, columns):
                block = ResultBlock(i, j, min(rows, lines - i), min(columns, places - j))
                if j == 0:
                    found.append(self._split(0, i, block.rows))
                if i == 0 or columns < places:
                    found.append(self._split(1, j, block.columns))
                found += [self._products(block), self._recombined(block)]
        return found

    def _split(self, side: int, first: int, extent: int) -> OzakiStep:
        """Of ``extent`` lines (side 0) or places in them (side 1), from ``first`` on."""
        call, n, role = self.computed, self.sides[side], ROLES[side]
        axis, K, kind = 1 - n, call.K, self.operands[n].kind
        if kind.unit == axis or extent < ACROSS:
            warps = warps_for(K, LANES * PIECE, ALONG)
            how = RowSplit(self.residues, axis, warps, 1, K <= warps * LANES * PIECE)
        else:
            how = RowSplit(self.residues, axis, warps_for(K, LANES // ACROSS * PIECE, WARPS), ACROSS, False)
        given = (how, OperandSlot(n, self.operands[n]), self._planes(role, extent, K, I8), self._scales(role, extent), first,
                 extent, K, np.float64(self.residues.norm(K)**2))
        resident = max(1, RESIDENT // how.threads) if how.rows == 1 else 1
        return OzakiStep(call, split, given, how.threads, -(-extent // how.rows), how.shared_bytes, resident)

    def _products(self, block: ResultBlock) -> ResidueProducts:
        K = self.computed.K
        a, b = (self._planes(role, extent, K, I8) for role, extent in zip(ROLES, (block.rows, block.columns)))
        return ResidueProducts(self.residues, a, b, self._planes(ROLES[2], block.rows, block.columns, U8), block.columns)

    def _recombined(self, block: ResultBlock) -> OzakiStep:
        operands = [OperandSlot(n, frozen) for n, frozen in enumerate(self.operands)]
        scales = [self._scales(role, extent, True) for role, extent in zip(ROLES, (block.rows, block.columns))]
        planes = self._planes(ROLES[2], block.rows, block.columns, U8, True)
        given = (self.spec, *operands, self.shape, Recombination(self.residues, self.axis), planes, *scales, *block)
        pieces = block.rows * -(-block.columns // ELEMENTS)
        return OzakiStep(self.computed, recombine, given, THREADS, -(-pieces // THREADS))

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

    # -- without a GPU (`gemmkit.emulator.mode`) -----------------------------------------------------------------------

    def emulated(self, arrays: tuple[Any, Any, Any, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = self.views(arrays, arena)
        spec, operands = arena.component(self.spec), [views[name] for name in ("a", "b", "c", "out")]
        spaces = {role: np.full(nbytes + ALIGNED, POISON, np.uint8) for role, nbytes in self.nbytes.items()}
        spaces = {role: x[-x.ctypes.data % ALIGNED:] for role, x in spaces.items()}
        for step in self.steps:
            yield from step.emulated(arena, spec, operands, spaces)
