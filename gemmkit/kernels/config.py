"""Configurations: what a kernel computes, and how it is mapped onto the machine.

A `Config` has two parts. The `Problem` (layouts, operator, transforms, epilogue, condition) decides the result; the
`ProductMapping` (tile shapes, warps, shared layouts, order, kernel) only the speed: any legal mapping gives the same result
up to rounding. `gemmkit.get_config` fills in what is not given; what is not legal raises `ConfigError`.

Rules of single fields, and of dtypes, are here. Each kernel family has its own besides (`gemmkit.kernels.simt`,
`gemmkit.kernels.sm90.family`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np

from gemmkit.components import Component, arrays_of, field_values
from gemmkit.epilogues import Bias, Default, Epilogue, Fold, LinearCombination, Residual, Scale, Store, parts, result_layout
from gemmkit.epilogues.observers import Observer
from gemmkit.epilogues.pairs import Pack
from gemmkit.kernels.collectives.batched import Batched
from gemmkit.kernels.collectives.operand import Operand, OperandArrays, is_whole
from gemmkit.kernels.collectives.scheduler import Grouped, Order
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.spec import FAMILIES, Condition, KernelFamily, Spec, rule
from gemmkit.lang.checks import check_methods
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import refusal
from gemmkit.lang.number_rules import narrows, part_dtypes
from gemmkit.layouts import ArrayLayout, ColumnInterleaved, GlobalLayout, GroupQuantised, Plain, ResultLayout, Zero
from gemmkit.layouts.joined import OCTET
from gemmkit.layouts.quantised import FLOAT8_WEIGHTS, QuantisedTranspose
from gemmkit.operators import Operator
from gemmkit.operators.algebra import Algebra
from gemmkit.operators.base import units
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.tiling import Tile
from gemmkit.transforms import Identity, Staged, Transform

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from gemmkit.layouts import SharedLayout

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "KEYWORDS", "TRANSFORMS", "ChosenFields", "Config", "ConfigError", "Keywords", "Problem", "ProductMapping",
    "check_fields", "check_stream_k", "device_given", "names_keywords", "products_given", "sizes_given", "with_swap_ab",
]

TRANSFORMS = (
    "transform_global_to_shared_a", "transform_global_to_shared_b", "transform_global_to_shared_c",
    "transform_shared_to_regs_a", "transform_shared_to_regs_b", "transform_shared_to_regs_c",
    "transform_regs_to_shared_d", "transform_shared_to_global_d",
)
_A_AND_B = {"a": "b", "b": "a"}


def with_swap_ab(field: str) -> str:
    """The field in which D^T = B^T A^T has what a product has in ``field``.

    >>> with_swap_ab("transform_global_to_shared_b"), with_swap_ab("global_a_layout"), with_swap_ab("epilogue")
    ('transform_global_to_shared_a', 'global_b_layout', 'epilogue')
    """
    return "_".join(_A_AND_B.get(part, part) for part in field.split("_"))


@dataclass(frozen=True, kw_only=True)
class Problem(Component):
    """What decides the result."""

    global_a_layout: GlobalLayout
    global_b_layout: GlobalLayout
    global_c_layout: GlobalLayout
    global_d_layout: ResultLayout
    operator: Operator
    transform_global_to_shared_a: Transform = Identity()
    transform_global_to_shared_b: Transform = Identity()
    transform_global_to_shared_c: Transform = Identity()
    transform_shared_to_regs_a: Transform = Identity()
    transform_shared_to_regs_b: Transform = Identity()
    transform_shared_to_regs_c: Transform = Identity()
    transform_regs_to_shared_d: Transform = Identity()
    transform_shared_to_global_d: Transform = Identity()
    observe_a: Any = None
    epilogue: Epilogue = Default()
    condition: Condition = Condition()

    def __post_init__(self) -> None:
        for name in "ab":
            layout = getattr(self, f"global_{name}_layout")
            ways = (getattr(self, f"transform_{way}_{name}") for way in ("global_to_shared", "shared_to_regs"))
            if isinstance(layout, GlobalLayout):
                transformed = any(not getattr(way, "is_identity", False) for way in ways)
                check_methods(layout, f"global_{name}_layout")
                seen = layout.as_operand(name, transformed)
                rule(isinstance(seen, GlobalLayout), f"global_{name}_layout", layout, f"its as_operand returned {seen!r}; a "
                      "Layout is needed")
                object.__setattr__(self, f"global_{name}_layout", seen)
        if isinstance(self.global_b_layout, GlobalLayout) and isinstance(self.global_d_layout, ResultLayout):
            stored = result_layout(self.global_b_layout, self.epilogue, self.global_d_layout)
            object.__setattr__(self, "global_d_layout", stored)

    @property
    def has_c(self) -> bool:
        """Whether there is a C to load: a zero C that no transform changes is not."""
        return not (isinstance(self.global_c_layout, Zero) and self.transform_global_to_shared_c.is_identity
                    and self.transform_shared_to_regs_c.is_identity)


@dataclass(frozen=True, kw_only=True)
class ProductMapping(Component):
    """What decides the speed alone."""

    block_shape: Tile
    warps_per_block: int
    compute_warp: Tile
    shared_a_layout: Any
    shared_b_layout: Any
    shared_c_layout: Any
    shared_d_layout: Any
    mem_a_warp: Tile
    mem_a_thread: Tile
    mem_b_warp: Tile
    mem_b_thread: Tile
    mem_cd_warp: Tile
    mem_cd_thread: Tile
    order: Order = Grouped(8)
    kernel: str = "singlestage"
    blocks_per_sm: int = 1              # how many blocks a multiprocessor must be able to hold: bounds the registers
    # of the warp-specialised kernel (`warps_per_block` are those that multiply)
    stages: int = 1                     # of the ring in shared memory
    schedule: str = "cooperative"       # or "pingpong"
    cluster: Tile = Tile(M=1, N=1)      # blocks that share operands
    producer_warps: int = 0
    # of either kernel
    splits: Any = 1                     # blocks that share the K of a tile, and add up their sums; or a StreamK

    @property
    def threads(self) -> int:
        return 32 * (self.warps_per_block + self.producer_warps)

    @property
    def family(self) -> KernelFamily:
        """The kernel and what is decided of it."""
        return FAMILIES[self.kernel]

    @property
    def is_pipeline(self) -> bool:
        """Whether it is one for the warp-specialised kernel."""
        return self.kernel == "warp_specialised"

    @property
    def peers(self) -> int:
        """Blocks of a cluster."""
        return self.cluster.count * self.family.in_cluster(self.splits, self.cluster)


@dataclass(frozen=True, kw_only=True)
class Config(Problem, ProductMapping):
    """All that specialises a kernel: a problem and a mapping. Make one with `get_config`; ``repr(config)`` can be pasted
    back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validate(self)

    @classmethod
    def of(cls, problem: Problem, mapping: ProductMapping) -> Config:
        """A problem on a mapping, which may be another's; raises ConfigError where they do not fit."""
        return cls(**{field.name: getattr(part, field.name) for part, kind in ((problem, Problem), (mapping, ProductMapping))
                      for field in dataclasses.fields(kind)})

    @property
    def problem(self) -> Problem:
        return Problem(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Problem)})

    @property
    def mapping(self) -> ProductMapping:
        return ProductMapping(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ProductMapping)})

    @staticmethod
    def fields() -> list[dataclasses.Field[Any]]:
        """In the order in which errors and ``repr`` name them: the problem's functions come last."""
        problem = dataclasses.fields(Problem)
        return [*(field for field in problem if field.default is dataclasses.MISSING), *dataclasses.fields(ProductMapping),
                *(field for field in problem if field.default is not dataclasses.MISSING)]

    def __repr__(self) -> str:
        parts = []
        for field in self.fields():
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or repr(value) != repr(field.default):
                parts.append(f"    {field.name}={value!r},")
        return "get_config(\n" + "\n".join(parts) + "\n)"

    def transforms_of(self, name: str) -> tuple[Transform, Transform]:
        """The two transforms of A ("a") or B: on the way to shared memory, and from there. The warp-specialised kernel
        applies both before shared memory, one after the other, because only the tensor cores read from there."""
        first, second = (getattr(self, f"transform_{way}_{name}") for way in ("global_to_shared", "shared_to_regs"))
        if not self.family.joins_transforms or second.is_identity:
            return first, second
        dtype = getattr(self, f"shared_{name}_layout").dtype
        if first.is_identity and getattr(self, f"global_{name}_layout").dtype == dtype:
            return second, first
        return Staged(first, second, dtype), Identity()

    def spec(self, arrays: OperandArrays | None = None) -> Spec:
        """The kernel's specialisation for a class of problems with the arrays' extents and addresses. Without arrays, no
        extent has a known divisor and TMA can load all operands, so shared memory is the most that any problem needs."""
        block = self.block_shape
        warps = self.warps_per_block
        operands = {
            "a": (self.global_a_layout, self.shared_a_layout, *self.transforms_of("a"), self.mem_a_warp, self.mem_a_thread),
            "b": (self.global_b_layout, self.shared_b_layout, *self.transforms_of("b"), self.mem_b_warp, self.mem_b_thread),
            "c": (self.global_c_layout, self.shared_c_layout, self.transform_global_to_shared_c,
                  self.transform_shared_to_regs_c, self.mem_cd_warp, self.mem_cd_thread),
            "out": (self.global_d_layout, self.shared_d_layout, self.transform_shared_to_global_d,
                    self.transform_regs_to_shared_d, self.mem_cd_warp, self.mem_cd_thread)}
        tiles = {"a": block.MK, "b": block.KN, "c": block.MN, "out": block.MN}
        extents = {} if arrays is None else {name: arrays.extents(name) for name in operands}
        if arrays is not None:
            extents["out"] = extents["out"][0], self.global_d_layout.finished_columns(extents["out"][1])
        whole = tuple(name in extents and is_whole(extents[name], fields[-1]) for name, fields in operands.items())
        known = self._by_class.get(whole)
        if known is not None and arrays is not None and self.family.is_specialised(known, self, arrays):
            return known
        a, b, c, d = (Operand(*fields, is_whole, tiles[name], warps, observer=self.observe_a if name == "a" else None)
                      for is_whole, (name, fields) in zip(whole, operands.items()))
        spec = self.family.specialise(self, (a, b, c, d), arrays)
        if arrays is None:
            return spec
        if self.family.is_specialised(spec, self, arrays):
            self._by_class[whole] = spec
        if arrays.products is None:
            return spec
        return dataclasses.replace(spec, scheduler=Batched.of(spec.scheduler, arrays))      # type: ignore[arg-type]

    @cached_property
    def holds_nothing(self) -> bool:
        """Whether no component has an array."""
        return not any(arrays_of(value) for value in field_values(self).values() if isinstance(value, Component))

    @cached_property
    def _by_class(self) -> dict[tuple[bool, ...], Spec]:
        """A specialisation for each class of problems (by which operands are whole) that others of the class may have."""
        return {}

    def check_device(self, device: DeviceInfo, needed: int | None = None) -> None:
        """Raise ConfigError if the kernel does not fit the device. ``needed`` is the most shared memory, in bytes, that any
        problem takes; None asks the kernel."""
        has = f"{device.name} has {device.arch[0]}.{device.arch[1]}"
        if device.arch < self.family.minimum_arch:
            least = min(family.minimum_arch for family in FAMILIES.values())
            rule(device.arch >= least, "device", device.name, f"every kernel needs compute capability {least[0]}."
                 f"{least[1]}, and {has}")
        least = self.operator.minimum_arch
        rule(device.arch >= least, "operator", self.operator, "its instructions need compute capability "
                                                              f"{least[0]}.{least[1]}, and {has}; use "
                                                              f"{self.operator.instead(device.arch)}")
        least = self.family.minimum_arch
        rule(device.arch >= least, "kernel", self.kernel, f"it needs compute capability {least[0]}.{least[1]}, and {has}; "
                                                          "use kernel='singlestage'")
        rule(self.family.in_cluster(self.splits, self.cluster) == 1 or device.arch >= (9, 0), "splits", self.splits,
              f"blocks share K in a cluster, which needs compute capability 9.0, and {has}; use splits=1, or "
              "kernel='multistage'")
        needed = self.spec().shared_bytes if needed is None else needed
        if needed > device.shared_memory_per_block:
            raise ConfigError(f"block_shape={self.block_shape!r} needs {needed} bytes of shared memory with these layouts, "
                              f"and {device.name} has {device.shared_memory_per_block} a block; use smaller tiles")
        if self.threads > device.max_threads_per_block:
            raise ConfigError(f"warps_per_block={self.warps_per_block} is {self.threads} threads, and {device.name} allows "
                              f"{device.max_threads_per_block} a block")


# -- rules ------------------------------------------------------------------------------------------------------------

def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration breaks."""
    check_fields({field.name: getattr(config, field.name) for field in config.fields()})
    check_stream_k(config.kernel, config.splits)
    _validate_fold(config)
    _validate_packed(config)
    _validate_quantised(config)
    if config.global_d_layout.is_discarded:
        _validate_discarded(config)
    if config.global_d_layout.is_half:
        _validate_half(config)
    if config.observe_a is not None:
        _validate_observer(config)
    config.condition.check_tiles(config.block_shape)
    config.family.validate(config)
    _validate_dtypes(config)


def check_stream_k(kernel: str, splits: Any) -> None:
    """Raise ConfigError where a kernel whose blocks do not stay is to stream K."""
    def said() -> str:
        named = " and ".join(f"{name!r}" for name, family in FAMILIES.items() if family.streams_k)
        return f"only the kernels {named} stream K; with kernel={kernel!r} it is a number"

    rule(not isinstance(splits, StreamK) or FAMILIES[kernel].streams_k, "splits", splits, said)


#: Kernels with an observer of A, in the order in which they are preferred.
OBSERVING = "warp_specialised", "singlestage"
TILES = {"block_shape": ("M", "N", "K"), "compute_warp": ("M", "N", "K"), "mem_a_warp": ("M", "K"),
         "mem_a_thread": ("M", "K"), "mem_b_warp": ("K", "N"), "mem_b_thread": ("K", "N"), "mem_cd_warp": ("M", "N"),
         "mem_cd_thread": ("M", "N"), "cluster": ("M", "N")}
KINDS = {"operator": Operator, "epilogue": Epilogue, "order": Order, "condition": Condition}


def check_fields(fields: dict[str, Any]) -> None:
    """The rules of single fields, of those that are given: what the defaults may then build upon."""
    for name, value in fields.items():
        if isinstance(value, Component):
            check_methods(value, name)
        if name in TILES:
            rule(isinstance(value, Tile), name, value, "a Tile is needed: Tile(" + ", ".join(
                f"{dimension}=..." for dimension in TILES[name]) + ")")
            rule(value.names == TILES[name], name, value, f"its dimensions must be {', '.join(TILES[name])}")
        elif name in TRANSFORMS:
            rule(isinstance(value, Transform), name, value, "a Transform is needed; wrap a function in "
                  "transforms.Map")
            rule(callable(value), name, value, "it has no __call__(self, x) or __call__(self, x, i, j)")
        elif name == "observe_a":
            rule(value is None or isinstance(value, Observer), name, value, "an observer is needed, such as "
                 "gemmkit.epilogues.observers.OperandRowSum(sums)")
        elif name in KINDS:
            rule(isinstance(value, KINDS[name]), name, value, f"an instance of {KINDS[name].__name__} is needed" + (
                f" (not the class itself): {value.__name__}(...)" if isinstance(value, type) else
                 ", such as gemmkit.operators.MIN_PLUS" if name == "operator" else "" if name != "epilogue"
                else "; wrap a function of the result's elements: epilogues.Elementwise(f)" if callable(value) else
                ", or several with | between them: Bias(x) | GELU()"))
        elif name.startswith("global_"):
            _check_global_layout(name, value)
        elif name.startswith("shared_"):
            rule(hasattr(value, "physical_size") and not isinstance(value, type), name, value, "a shared layout is needed: "
                  "RowMajor, ColMajor or Padded")
        elif name == "kernel":
            rule(isinstance(value, str) and value in FAMILIES, name, value, f"the kernels are {', '.join(FAMILIES)}")
        elif name == "splits" and isinstance(value, StreamK):
            pass                                       # it has checked itself
        elif name in ("warps_per_block", "splits"):
            rule(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, value,
                  "a positive number is needed")
        elif name in ("stages", "producer_warps"):
            rule(isinstance(value, int) and not isinstance(value, bool) and value >= 0, name, value, "a number is needed")
        elif name == "schedule":
            rule(isinstance(value, str), name, value, "'cooperative' or 'pingpong' is needed")
        elif name == "blocks_per_sm":
            rule(isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 32, name, value,
                  "a number from 1 to 32 is needed")


def _check_global_layout(name: str, layout: ArrayLayout) -> None:
    rule(isinstance(layout, ArrayLayout), name, layout, "a Layout is needed, for example RowMajor('float16')")
    if name == "global_d_layout":
        rule(isinstance(layout, ResultLayout) or not hasattr(layout, "store_element"), name, layout,
             "it has store_element but is not a ResultLayout; make layouts.ResultLayout a base of its class")
        rule(layout.writable, name, layout, "it has neither store_element nor store, so D cannot be written with it")
    else:
        rule(layout.readable, name, layout, "it has neither element nor load, so it cannot be read")


def _validate_quantised(config: Config) -> None:
    """Integers of 4 bits beside 8-bit floats: two kernels scale sums (`gemmkit.kernels.sm90.dequantised`, `.quantised`)."""
    for layout, takers in ((config.global_a_layout, {"warp_specialised": QuantisedTranspose}),
                           (config.global_b_layout, {"quantised": GroupQuantised})):
        if isinstance(layout, (GroupQuantised, QuantisedTranspose)) and layout.dtype.itemsize == 1:
            rule(type(layout) is takers.get(config.kernel), "dtype", str(layout.dtype), FLOAT8_WEIGHTS)


def _validate_packed(config: Config) -> None:
    """Of a D with half the columns the epilogue makes one value of two."""
    layout = config.global_d_layout
    rule(layout.packed == 1 or isinstance(config.epilogue.ending(), Pack), "global_d_layout", layout,
         f"only epilogues.Pack stores into it, but epilogue={config.epilogue!r} does not pack; give a RowMajor or ColMajor "
         "layout")


def _validate_discarded(config: Config) -> None:
    """Of a D that is not stored something else must be left."""
    epilogue = config.epilogue
    rule(not (epilogue.is_last or epilogue.stores_itself), "epilogue", epilogue,
         "it finishes D, which a Discard as out does not store; give an array as out, or a reduction as the epilogue")
    rule(epilogue.reduces or epilogue.writes or config.observe_a is not None, "epilogue", epilogue,
         "it writes nothing beside D, and a Discard as out does not store D: nothing would be computed; give an array as "
         "out, or a reduction (epilogues.RowReduce, ColumnReduce), an epilogues.Store or an observer")


def _validate_half(config: Config) -> None:
    """Of a symmetric D half of the elements are not there: what asks for whole rows, or writes beside D, would miss them."""
    epilogue = config.epilogue
    rule(not (epilogue.finishes_blocks or epilogue.writes or epilogue.stores_itself), "epilogue", epilogue,
         "with a SymmetricMatrix as out one half of D is computed, and what an epilogue reduces, normalises or writes "
         "beside D would lack the other; give an array as out, or an epilogue of single elements")
    rule(config.observe_a is None, "observe_a", config.observe_a, "with a SymmetricMatrix as out one half of the tiles is "
         "computed, and A is not looked at in the others; give an array as out")


def _validate_fold(config: Config) -> None:
    """Only a fold takes interleaved columns, and a fold takes nothing else."""
    b: Any = config.global_b_layout
    fold = config.epilogue
    if not isinstance(fold, Fold):
        rule(not isinstance(b, ColumnInterleaved), "epilogue", fold,
             lambda: f"B interleaves the columns of {b.parts} matrices, "
             "which only a fold takes; give epilogues.Fold(f), or Concat(..., axis=1) as B for all products side by side")
        return
    rule(isinstance(b, ColumnInterleaved), "epilogue", fold,
         "it folds interleaved columns; give gemmkit.layouts.InterleavedColumns(...) as B, of as "
         "many matrices as it has arguments")
    rule(fold.arguments in (b.parts, b.parts + 2), "epilogue", fold, f"its function takes {fold.arguments} arguments, and B "
         f"interleaves {b.parts} matrices; a function of {b.parts} values is needed, or of {b.parts} values and m, n")
    rule(not config.has_c, "global_c_layout", config.global_c_layout,
         "a folded product has no C; add it after the fold: Fold(f) | Residual(c)")
    for name in ("transform_regs_to_shared_d", "transform_shared_to_global_d"):
        rule(getattr(config, name).is_identity, name, getattr(config, name),
             "it would act on the parts before the fold; put it into the fold's function")
    least = OCTET * b.slots
    rule(config.block_shape.size.N % least == 0, "block_shape", config.block_shape, f"N must be a multiple of {least}, "
         f"{OCTET} columns of each of the {b.slots} interleaved slots")


def _validate_observer(config: Config) -> None:
    """Who looks at A's elements in shared memory must find there what they are in memory, each once."""
    def refuse(holds: Any, why: str) -> None:
        rule(holds, "observe_a", config.observe_a, why)

    layout, operator = config.global_a_layout, config.operator
    refuse(config.kernel in OBSERVING, f"the kernels that observe are {', '.join(OBSERVING)}; this is {config.kernel!r}")
    refuse(config.splits == 1, f"blocks that share K see shares of A; use splits=1 (it is {config.splits!r})")
    refuse(config.condition.is_always, "a condition skips k-tiles, which no block would then observe; reduce A in a call "
                                       "of its own")
    refuse(isinstance(layout, Plain) and layout.is_plain and not isinstance(operator, Algebra), f"A is {layout!r}; a plain "
           "matrix of real numbers is needed")
    refuse(all(getattr(config, f"transform_{way}_a").is_identity for way in ("global_to_shared", "shared_to_regs")),
           "A is transformed, but the observer sees A itself; transform in the observer's own of(x, m, k)")
    if config.kernel == "warp_specialised":
        refuse(units(operator).promote == 0, f"{operator!r} adds up accumulators in portions; use promote=0")
        refuse(config.compute_warp.size.M in (64, 128), f"compute_warp={config.compute_warp!r}: 128 threads look at 64 or "
               "128 rows")
    else:
        rows = config.block_shape.size.M
        refuse(config.threads >= rows, f"a thread observes one row, but {config.threads} threads have {rows} rows; use more "
                                       "warps_per_block or a smaller block_shape")


def _validate_dtypes(config: Config) -> None:
    operator = config.operator
    for name, fragment in (("a", operator.fragment_a), ("b", operator.fragment_b)):
        layout, shared = getattr(config, f"global_{name}_layout"), getattr(config, f"shared_{name}_layout")
        to_shared, to_regs = (getattr(config, f"transform_{way}_{name}") for way in ("global_to_shared", "shared_to_regs"))
        loaded = getattr(operator, "shared_dtypes", {}).get(name, fragment.dtype)
        says = functools.partial("{!r} loads {}".format, operator, loaded)
        rule(shared.dtype == loaded or not (to_regs.is_identity or operator.is_mapped is False), f"shared_{name}_layout",
              shared, says)
        rule(shared.dtype == loaded, f"shared_{name}_layout", shared, says)
        if layout.dtype != shared.dtype:
            rule(not to_shared.is_identity, f"global_{name}_layout", layout,
                 f"the operator takes {name} as {shared.dtype}; gemmkit converts nothing silently: choose an operator of "
                 f"dtype {layout.dtype}, convert the array, or give transform_global_to_shared_{name}")
    _validate_complex(config)
    _validate_result(config)
    for name in ("c", "d"):
        shared = getattr(config, f"shared_{name}_layout")
        rule(shared.dtype == operator.fragment_c.dtype or not _strict(operator), f"shared_{name}_layout", shared,
              functools.partial("{!r} accumulates in {}".format, operator, operator.fragment_c.dtype))


def _validate_complex(config: Config) -> None:
    """An imaginary part is dropped only where a function of the user's says how."""
    accumulator = config.operator.fragment_c.dtype
    c, d = config.global_c_layout, config.global_d_layout
    unchanged = config.transform_global_to_shared_c.is_identity and config.transform_shared_to_regs_c.is_identity
    rule(c.dtype.kind != "c" or accumulator.kind in "cV" or not unchanged, "global_c_layout", c, lambda:
          f"the operator accumulates {accumulator}, which has no imaginary part; convert the array, or give "
          "transform_global_to_shared_c")
    unchanged = (config.transform_regs_to_shared_d.is_identity and config.transform_shared_to_global_d.is_identity
                 and all(type(part) in (Default, Bias, LinearCombination, Residual, Scale, Store)
                         for part in parts(config.epilogue)))
    count = len(part_dtypes(accumulator))
    rule(accumulator.names is None or len(part_dtypes(d.dtype)) == count or not unchanged, "global_d_layout", d, lambda:
          f"the operator's numbers have {count} parts ({', '.join(accumulator.names or ())}), which would be lost; use "
          f"operator.number_dtype({part_dtypes(d.dtype)[0].name!r}), or give an epilogue that says what becomes of them")
    rule(accumulator.kind != "c" or d.dtype.kind in "cV" or not unchanged, "global_d_layout", d, lambda:
          f"the operator accumulates {accumulator}, whose imaginary part would be lost; use a complex layout, or give "
          "transform_shared_to_global_d or an epilogue that says what becomes of it")


def _validate_result(config: Config) -> None:
    """Sums that nothing changes go into D as they are. What functions make of them is known when they are compiled."""
    accumulator, d = config.operator.fragment_c.dtype, config.global_d_layout.dtype
    unchanged = config.transform_regs_to_shared_d.is_identity and config.transform_shared_to_global_d.is_identity
    if unchanged and config.epilogue.passes_on and narrows(accumulator, d):
        as_c = ", of the dtype of c where no other is given" if config.has_c and config.global_c_layout.dtype == d else ""
        raise ConfigError(refusal(f"out (global_d_layout={config.global_d_layout!r}{as_c})", str(accumulator), d))


def _strict(operator: Operator) -> bool:
    """Whether the operator's loads and stores of C and D convert nothing."""
    return not operator.is_mapped


# -- what is given ----------------------------------------------------------------------------------------------------

def device_given(device: DeviceInfo | None) -> DeviceInfo:
    """What to compile for: a description of a device, or for None the GPU that is here."""
    if device is None:
        return target()
    rule(isinstance(device, DeviceInfo), "device", device, "a gemmkit.runtime.device.DeviceInfo is needed, for example "
          "gemmkit.runtime.device.H100, or None for the GPU that is here")
    return device


def sizes_given(gemm_shape: Any) -> tuple[int, int, int] | None:
    """M, N and K of ``gemm_shape`` (a dict, a Tile, or a tuple of the three); None for None. ConfigError for what is no
    shape."""
    if gemm_shape is None:
        return None
    if isinstance(gemm_shape, tuple) and len(gemm_shape) == 3:
        gemm_shape = dict(zip("MNK", gemm_shape))
    if isinstance(gemm_shape, Tile):
        gemm_shape = dict(zip(gemm_shape.names, gemm_shape.extents))
    if not isinstance(gemm_shape, dict) or set(gemm_shape) - {"batch"} != {"M", "N", "K"}:
        raise ConfigError(f"gemm_shape={gemm_shape!r}: M, N and K are needed, for example dict(M=512, N=512, K=64)")
    for name, size in gemm_shape.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ConfigError(f"gemm_shape: {name}={size!r}: a size is 0 or more")
    return int(gemm_shape["M"]), int(gemm_shape["N"]), int(gemm_shape["K"])


def products_given(gemm_shape: Any) -> int:
    """How many products of these sizes there are."""
    return max(1, int(gemm_shape.get("batch", 1))) if isinstance(gemm_shape, dict) else 1

# -- keywords of public functions ---------------------------------------------------------------------------------------

class Components(TypedDict, total=False):
    """What products and configurations name alike.

    Args:
        epilogue: what D's elements become; coordinates are those of D.
        condition: which products of tiles are left out, and which part of K each tile multiplies.
        transform_global_to_shared_a: a function of A's elements, on their way from global to shared memory.
        transform_global_to_shared_b: a function of B's elements, on their way from global to shared memory.
        transform_global_to_shared_c: a function of C's elements, on their way from global to shared memory.
        transform_shared_to_regs_a: a function of A's elements, on their way from shared memory to registers.
        transform_shared_to_regs_b: a function of B's elements, on their way from shared memory to registers.
        transform_shared_to_regs_c: a function of C's elements, on their way from shared memory to registers.
        transform_regs_to_shared_d: a function of the sums, on their way from registers to shared memory.
        transform_shared_to_global_d: a function of D's elements, on their way to global memory.
        observe_a: a `gemmkit.epilogues.observers.Observer`, which reduces A while the product reads it.
        global_b_layout: how B's elements lie in its array.
        global_c_layout: how C's elements lie in its array.
        global_d_layout: how D's elements are stored in ``out``.
        order: the order in which blocks take tiles. It is part of a mapping: a product takes it with ``conf`` alone.
    """

    epilogue: Epilogue | None
    condition: Condition | None
    transform_global_to_shared_a: Transform | None
    transform_global_to_shared_b: Transform | None
    transform_global_to_shared_c: Transform | None
    transform_shared_to_regs_a: Transform | None
    transform_shared_to_regs_b: Transform | None
    transform_shared_to_regs_c: Transform | None
    transform_regs_to_shared_d: Transform | None
    transform_shared_to_global_d: Transform | None
    observe_a: Observer | None
    global_b_layout: GlobalLayout | None
    global_c_layout: GlobalLayout | None
    global_d_layout: ResultLayout | None
    order: Order | None


class Keywords(Components, total=False):
    """What a product takes besides operands, ``conf``, ``out`` and ``stream``.

    Args:
        dtype: the dtype of a new D, which the sums hold; None is NumPy's result type of a and b, or c's.
        operator: what multiplies and sums; None chooses one by dtypes, sizes and device.
        precision: "tf32" multiplies float32 on tensor cores, with 10 bits of mantissas; "fast" sums float8 operands with the
            14 bits that Hopper's tensor cores keep; "ozaki" computes from exact int8 products modulo coprime numbers: 7 for
            float32 and complex64, 14 for float64, 15 for complex128 ("ozaki7" to "ozaki16": so many). A result is off by
            sqrt(K) 2^-53.5 times the 2-norms of A's row and B's column at most with 14 (2^-26.3 with 7, 2^-57.3 with 15).
            "auto" does so where it is faster. None is exact float32, float8 summed in float32, and float64.
        mapping: "batch_invariant" gives a row of D the same bits whatever other rows A has, and however many; None takes the
            fastest mapping.
        global_a_layout: how A's elements lie in its array; None for a plain matrix.
        gemm_shape: M, N and K, ``dict(M=, N=, K=)``, if the layouts leave them open.
    """

    dtype: DTypeLike | None
    operator: Operator | None
    precision: str | None
    mapping: str | None
    global_a_layout: GlobalLayout | None
    gemm_shape: Mapping[str, int] | Tile | tuple[int, int, int] | None


class ChosenFields(Components, total=False):
    """The fields of a configuration that `gemmkit.get_config` chooses where they are not given.

    Args:
        kernel: "warp_specialised" (Hopper), "multistage" or "singlestage", or a family of your own.
        block_shape: M, N and K of a block's tile, in elements.
        warps_per_block: how many warps of a block multiply.
        compute_warp: M, N and K of a warp's tile.
        stages: tiles of A and B that shared memory holds at a time.
        splits: blocks that share the K of a tile and add up their sums, or a `StreamK`.
        schedule: "cooperative" or "pingpong": whether a tile's warpgroups share it, or take turns (warp_specialised).
        cluster: M and N of a cluster, in blocks, which share what TMA loads (warp_specialised).
        producer_warps: warps that load and do not multiply (warp_specialised).
        blocks_per_sm: blocks that a multiprocessor must be able to hold, which bounds their registers.
        shared_a_layout: how A's tile lies in shared memory: RowMajor, ColMajor or Padded.
        shared_b_layout: how B's tile lies in shared memory.
        shared_c_layout: how C's tile lies in shared memory.
        shared_d_layout: how D's tile lies in shared memory.
        mem_a_warp: M and K of the part of A's tile that a warp loads at a time.
        mem_a_thread: M and K of the part of it that a thread loads.
        mem_b_warp: K and N of the part of B's tile that a warp loads at a time.
        mem_b_thread: K and N of the part of it that a thread loads.
        mem_cd_warp: M and N of the part of C's and D's tile that a warp moves at a time.
        mem_cd_thread: M and N of the part of it that a thread moves.
    """

    kernel: str | None
    block_shape: Tile | None
    warps_per_block: int | None
    compute_warp: Tile | None
    stages: int | None
    splits: int | StreamK | None
    schedule: str | None
    cluster: Tile | None
    producer_warps: int | None
    blocks_per_sm: int | None
    shared_a_layout: SharedLayout | None
    shared_b_layout: SharedLayout | None
    shared_c_layout: SharedLayout | None
    shared_d_layout: SharedLayout | None
    mem_a_warp: Tile | None
    mem_a_thread: Tile | None
    mem_b_warp: Tile | None
    mem_b_thread: Tile | None
    mem_cd_warp: Tile | None
    mem_cd_thread: Tile | None


KEYWORDS = tuple(Keywords.__annotations__)


def given(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None, which are not given."""
    return {name: value for name, value in keywords.items() if value is not None or name not in KEYWORDS}


def names_keywords(function: F) -> F:
    """Name the keywords of a function's ``**keywords: Unpack[T]``, T a `TypedDict` such as `Keywords`, in its signature and
    in its docstring's rows: for ``help``, and editors that ask `inspect`. ``**others: NoReturn`` names none."""
    own = inspect.signature(function)
    *first, rest = own.parameters.values()
    kinds = _kinds_of(function.__globals__[rest.annotation[7:-1]]) if rest.annotation != "NoReturn" else {}
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
             for name, (kind, _) in kinds.items()]
    function.__signature__ = own.replace(parameters=[*first, *named])      # type: ignore[attr-defined]
    rows = "\n".join(f"        {name}: {text}" for name, (_, text) in kinds.items())
    function.__doc__ = re.sub(rf"\n {{8}}{rest.name}: .*?(?=\n {{8}}\w|\n\n)", lambda found: f"{found[0]}\n{rows}",
                              function.__doc__ or "", count=1, flags=re.DOTALL)
    return function


@functools.cache
def _kinds_of(keywords: Any) -> dict[str, tuple[str, str]]:
    """The type and the row of each keyword."""
    row = re.compile(r"^ {8}(\w+): (.*?)\n(?= {8}\w| {4}\Z)", re.MULTILINE | re.DOTALL)
    rows = dict(found for cls in (Components, Keywords, keywords) for found in row.findall(cls.__doc__ or ""))
    return {name: (kind.__forward_arg__, rows.get(name, "")) for name, kind in keywords.__annotations__.items()}
