"""Groups on the host: the arrays of products of different sizes as one class of problems, and the tables that tell them
apart."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.adapters import for_products
from gemmkit.compiled import Nothing
from gemmkit.component_arrays import check_held
from gemmkit.components import freeze, with_fields
from gemmkit.config import Config, ConfigError
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.grouped import Group, Grouped, GroupShape, Member
from gemmkit.kernels.spec import Spec, StackShape
from gemmkit.lang.freezing import Frozen, freeze_array
from gemmkit.lang.kinds import ViewKind
from gemmkit.lang.members import EXTENTS, PLACES, PLACES_DTYPE, SIZES_DTYPE
from gemmkit.launch import Launch, Put
from gemmkit.layouts import Plain
from gemmkit.problem import Call, check_out, held_by
from gemmkit.runtime.arrays import ArrayInfo, alignment, byte_range, overlaps, shares_memory, unit_axis
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.workspace import described, spaces_of

OPERANDS = ("a", "b", "c", "out")
Infos = tuple[ArrayInfo, ArrayInfo, "ArrayInfo | None", ArrayInfo]


@dataclass(frozen=True)
class Tables:
    """What a kernel reads of a group: see `gemmkit.kernels.common.grouped`. Addresses change from call to call."""

    sizes: np.ndarray
    products: np.ndarray

    @classmethod
    def of(cls, problems: Sequence[Call], outs: Sequence[ArrayInfo], grids: Sequence[tuple[int, int]]) -> Tables:
        """Of products of so many tiles along M and N."""
        sizes = np.zeros((len(problems), EXTENTS + 2 * len(OPERANDS)), SIZES_DTYPE)
        counts = [rows * columns for rows, columns in grids]
        order = sorted(range(len(problems)), key=lambda n: -problems[n].K)
        first = 0
        for n in order:
            problem = problems[n]
            sizes[n, :EXTENTS] = first, problem.M, problem.N, problem.K
            for at, info in enumerate((problem.a, problem.b, problem.c, outs[n])):
                sizes[n, EXTENTS + 2 * at:EXTENTS + 2 * at + 2] = (0, 0) if info is None else info.shape
            first += counts[n]
        products = np.repeat(np.array(order, SIZES_DTYPE), [counts[n] for n in order])
        return cls(sizes, products)

    @staticmethod
    def places(infos: Sequence[Infos]) -> np.ndarray:
        """Addresses and strides."""
        out = np.zeros((len(infos), PLACES * len(OPERANDS)), PLACES_DTYPE)
        for row, of_product in zip(out, infos):
            for at, info in enumerate(of_product):
                if info is not None:
                    row[PLACES * at:PLACES * at + PLACES] = info.pointer, *info.strides
        return out

    def packed(self, places: np.ndarray) -> np.ndarray:
        """The tables as bytes, with the ``places`` of arrays, each where `starts` says."""
        starts, total = self.starts
        packed = np.zeros(total, np.uint8)
        for role, part in (("places", places), ("sizes", self.sizes), ("products", self.products)):
            packed[starts[role]:starts[role] + part.nbytes] = part.reshape(-1).view(np.uint8)
        return packed

    @property
    def starts(self) -> tuple[dict[str, int], int]:
        """Where each begins among these bytes, by the role of its workspace; and how many there are."""
        found, at = {}, 0
        places = len(self.sizes) * PLACES * len(OPERANDS) * PLACES_DTYPE.itemsize
        for role, nbytes in (("places", places), ("sizes", self.sizes.nbytes), ("products", self.products.nbytes)):
            found[role], at = at, at + -(-nbytes // 256) * 256
        return found, max(at, 1)


def typical(infos: Sequence[ArrayInfo | None]) -> ArrayInfo | None:
    """One array for a class: what holds of its alignment, contiguous axis and extents holds of all."""
    there = [info for info in infos if info is not None and 0 not in info.shape] or [i for i in infos if i is not None]
    if not there:
        return None
    axes = {unit_axis(info) for info in there if min(info.shape) > 1} or {unit_axis(info) for info in there}
    axis = axes.pop() if len(axes) == 1 else None
    rows, columns = (math.gcd(*(info.shape[n] for info in there)) for n in (0, 1))
    if axis is not None and any(info.strides[axis] != 1 and info.shape[axis] > 1 for info in there):
        axis = None
    strides = (4096, 1) if axis == 1 else (1, 4096) if axis == 0 else (4096 * 4096, 4096)
    return there[0]._replace(pointer=functools.reduce(min, (alignment(info, axis) for info in there)), shape=(rows, columns),
                             strides=strides)


class CompiledGroup:
    """The kernel of a group: its specialisation, and where its arguments lie."""

    def __init__(self, problems: Sequence[Call], outs: Sequence[ArrayInfo]):
        conf = problems[0].config
        _check(conf, problems)
        conf = self.config = for_products(conf, (len(problems),))
        for name, held in held_by(conf):
            if held.info.device != problems[0].a.device:
                raise ValueError(f"{name}={type(getattr(conf, name)).__qualname__}(...): {held.name} is on device "
                                 f"{held.info.device} and a_list[0] on device {problems[0].a.device}")
        M, N, K = (math.gcd(*(getattr(problem, name) for problem in problems)) for name in "MNK")
        infos = [(p.a, p.b, p.c if conf.has_c else None, out) for p, out in zip(problems, outs)]
        a, b, c, out = (typical(column) for column in zip(*infos))
        self.infos = infos
        spec = conf.spec(Arrays(a, b, out, M, N, K, c, None, problems[0].device))
        self.tables = Tables.of(problems, outs, [spec.scheduler.grid(p.M, p.N) for p in problems])
        self.blocks = len(self.tables.products)
        if self.blocks >= 2**31:
            raise ValueError(f"the products have {self.blocks} tiles; a launch has less than 2**31")
        rows = len(problems)
        sizes = described("sizes", rows, SIZES_DTYPE, self.tables.sizes.shape[1])
        places = described("places", rows, PLACES_DTYPE, PLACES * len(OPERANDS))
        self.spec = with_tables(spec, sizes, places, described("products", self.blocks, SIZES_DTYPE))
        self.shape = GroupShape(StackShape(M, N, K, 0), sizes)
        self.operands = [_frozen(info, name != "out") for name, info in zip(OPERANDS, (a, b, c, out))]
        self.problem, self.arguments = problems[0], [freeze(self.spec), *self.operands, freeze(self.shape)]
        self.launchable = Launchable(conf.family.kernel, self.arguments, conf.threads, max(1, self.blocks),
                                     problems[0].device, problems[0].a.device, self.spec.shared_bytes, 1, conf.blocks_per_sm)
        self.spaces = spaces_of(self.launchable.values, self.arguments[0].arrays + self.arguments[-1].arrays)

    @property
    def launch(self) -> Launch:
        """What a call brings is the address of its table alone."""
        starts, _ = self.tables.starts
        return Launch(self.launchable, [Put(space.slot, 0, starts[space.role]) for space in self.spaces])

    # -- without a GPU (`gemmkit.emulator.mode`) -----------------------------------------------------------------------

    def filled(self, arrays: tuple[list[tuple[Any, ...]], np.ndarray]) -> list[Any]:
        return [out for *_, out in arrays[0]]

    def emulated(self, arrays: tuple[list[tuple[Any, ...]], np.ndarray],
                 arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        """Of each product (a, b, c, out), and the table of their places."""
        products, places = arrays
        seen: dict[str, Any] = {}
        for at in (3, 0, 1, 2):                            # outputs first: they say what has been written
            name, kind = OPERANDS[at], self.operands[at].kind
            how = dict(written=products[0][2] is not None) if name == "out" else dict(readonly=True)
            views = [arena.view(of[at], f"{name}[{n}]", kind.unit, kind.alignment, **how)
                     for n, of in enumerate(products)] if isinstance(kind, ViewKind) else []
            seen[name] = arena.members(views, products[0][at], getattr(kind, "alignment", 0))
        spec = arena.component(with_tables(self.spec, self.tables.sizes, places, self.tables.products))
        shape = arena.component(with_fields(self.shape, {"sizes": self.tables.sizes}))
        yield self.launchable, (spec, *(seen[name] for name in OPERANDS), shape)


def _frozen(info: ArrayInfo | None, readonly: bool) -> Frozen:
    if info is None:
        return freeze(Nothing())
    unit = unit_of(info)
    return freeze_array(info, unit, alignment(info, unit), readonly=readonly)


def unit_of(info: ArrayInfo) -> int | None:
    return next((axis for axis in (1, 0) if info.strides[axis] == 1), None)


def with_tables(spec: Spec, sizes: Any, places: Any, products: Any) -> Spec:
    """The specialisation for a group, with its tables or descriptions of them."""
    one = getattr(spec.scheduler, "one", spec.scheduler)
    group = Group(*(Member(n, sizes, places) for n in range(len(OPERANDS))))
    return dataclasses.replace(spec, scheduler=Grouped(one, group, sizes, products))          # type: ignore[arg-type]


def _check(conf: Config, problems: Sequence[Call]) -> None:
    if conf.kernel not in ("multistage", "singlestage"):
        raise ConfigError(f"kernel={conf.kernel!r}: groups are computed by 'multistage' and 'singlestage'")
    if conf.splits != 1:
        raise ConfigError(f"splits={conf.splits!r}: the tiles of a group fill the device together; take splits=1")
    if conf.epilogue.reduces or conf.observe_a is not None:
        field = "epilogue" if conf.epilogue.reduces else "observe_a"
        raise ConfigError(f"{field}={getattr(conf, field)!r}: the products of a group have rows of their own each, and "
                          "partial states of a reduction lie where one size says; reduce each product by a matmul of its "
                          "own, or a stack")
    for name in "abcd":
        layout = getattr(conf, f"global_{name}_layout")
        if not isinstance(layout, Plain) and (name != "c" or conf.has_c):
            raise ConfigError(f"global_{name}_layout={layout!r}: groups are of plain matrices (RowMajor, ColMajor)")
    for n, problem in enumerate(problems):
        for info in (problem.a, problem.b, problem.c):
            if info is not None and math.prod(info.shape) >= 2**31:
                raise ValueError(f"product {n} has an operand of {math.prod(info.shape)} elements; those of groups have "
                                 "less than 2**31")


def check_outputs(infos: Sequence[Infos], conf: Config) -> None:
    """Raise ValueError unless each result can be written, and shares memory with no operand and no result of the group (but
    with the c of its own product), and with no array of a component."""
    held = held_by(conf)
    for n, (a, b, c, out) in enumerate(infos):
        try:
            operands = {"a": a, "b": b, "c": c}
            check_out(out, operands)
            check_held(held, operands, (out,))
        except ValueError as error:
            raise ValueError(f"product {n}: {error}") from None
    spans = sorted(((*byte_range(info), name, n, info) for n, of in enumerate(infos) for name, info in zip(OPERANDS, of)
                    if info is not None and 0 not in info.shape), key=lambda span: span[:2])
    active: list[Any] = []
    for low, high, name, n, info in spans:
        active = [other for other in active if other[1] > low]
        for _, _, other_name, m, other in active:
            if n == m or "out" not in (name, other_name) or not overlaps(info, other) or not shares_memory(info, other):
                continue
            written, read = ((n, name), (m, other_name)) if name == "out" else ((m, other_name), (n, name))
            raise ValueError(f"out[{written[0]}] shares memory with {read[1]}[{read[0]}]: the products of a group are "
                             "computed side by side")
        active.append((low, high, name, n, info))
