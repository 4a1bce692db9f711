"""Configurations: what a kernel computes, and how it is mapped onto the machine.

A `Config` has two parts. The `Problem` (layouts, operator, transforms, epilogue, condition) decides the result; the
`Mapping` (tile shapes, warps, shared layouts, order, kernel) only the speed: any legal mapping gives the same result up
to rounding. `gemmkit.configure.get_config` fills in what is not given; what is not legal raises `ConfigError`.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from gemmkit.component_arrays import arrays_of
from gemmkit.components import Component, field_values
from gemmkit.config_rules import TRANSFORMS, validate
from gemmkit.epilogues import Default, Epilogue, result_layout
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.batched import Batched
from gemmkit.kernels.common.operand import Operand, is_whole
from gemmkit.kernels.common.rules import rule
from gemmkit.kernels.family import KernelFamily
from gemmkit.kernels.rasterisation import Grouped, Order
from gemmkit.kernels.select import FAMILIES
from gemmkit.kernels.spec import Condition, Spec
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.given import check_methods
from gemmkit.layouts import GlobalLayout, ResultLayout, Zero
from gemmkit.operators import Operator
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.transforms import Identity, Staged, Transform

__all__ = ["TRANSFORMS", "Config", "ConfigError", "Mapping", "Problem", "with_swap_ab"]

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
class Mapping(Component):
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
class Config(Problem, Mapping):
    """All that specialises a kernel: a problem and a mapping. Make one with `get_config`; ``repr(config)`` can be pasted
    back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validate(self)

    @classmethod
    def of(cls, problem: Problem, mapping: Mapping) -> Config:
        """A problem on a mapping, which may be another's; raises ConfigError where they do not fit."""
        return cls(**{field.name: getattr(part, field.name) for part, kind in ((problem, Problem), (mapping, Mapping))
                      for field in dataclasses.fields(kind)})

    @property
    def problem(self) -> Problem:
        return Problem(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Problem)})

    @property
    def mapping(self) -> Mapping:
        return Mapping(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Mapping)})

    @staticmethod
    def fields() -> list[dataclasses.Field]:
        """In the order in which errors and ``repr`` name them: the problem's functions come last."""
        problem = dataclasses.fields(Problem)
        return [*(field for field in problem if field.default is dataclasses.MISSING), *dataclasses.fields(Mapping),
                *(field for field in problem if field.default is not dataclasses.MISSING)]

    def __repr__(self) -> str:
        parts = []
        for field in self.fields():
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or repr(value) != repr(field.default):
                parts.append(f"    {field.name}={value!r},")
        return "get_config(\n" + "\n".join(parts) + "\n)"

    def transforms_of(self, name: str) -> tuple[Transform, Transform]:
        """What A ("a") or B passes on the way to shared memory, and from there. The warp-specialised kernel has no registers
        behind shared memory but those of the tensor cores: there both stand before it, one after the other."""
        first, second = (getattr(self, f"transform_{way}_{name}") for way in ("global_to_shared", "shared_to_regs"))
        if not self.family.joins_transforms or second.is_identity:
            return first, second
        dtype = getattr(self, f"shared_{name}_layout").dtype
        if first.is_identity and getattr(self, f"global_{name}_layout").dtype == dtype:
            return second, first
        return Staged(first, second, dtype), Identity()

    def spec(self, arrays: Arrays | None = None) -> Spec:
        """The kernel's specialisation for a class of problems, by their arrays' extents and places. Without arrays no extent
        is a multiple of anything and all suit TMA, so that shared memory is the most that any problem needs."""
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
        """Raise ConfigError when the kernel does not fit the device. ``needed`` bytes of shared memory are the most that any
        problem takes; None: the kernel is asked."""
        has = f"{device.name} has {device.arch[0]}.{device.arch[1]}"
        if device.arch < self.family.minimum_arch:
            least = min(family.minimum_arch for family in FAMILIES.values())
            rule(device.arch >= least, "device", device.name, f"every kernel needs compute capability {least[0]}."
                 f"{least[1]}, and {has}")
        least = self.operator.minimum_arch
        rule(device.arch >= least, "operator", self.operator, f"its instructions need compute capability {least[0]}."
              f"{least[1]}, and {has}; take {self.operator.instead(device.arch)}")
        least = self.family.minimum_arch
        rule(device.arch >= least, "kernel", self.kernel, f"it needs compute capability {least[0]}.{least[1]}, and {has}; "
              "take kernel='singlestage'")
        rule(self.family.in_cluster(self.splits, self.cluster) == 1 or device.arch >= (9, 0), "splits", self.splits,
              f"blocks share K in a cluster, which needs compute capability 9.0, and {has}; take splits=1, or "
              "kernel='multistage'")
        needed = self.spec().shared_bytes if needed is None else needed
        if needed > device.shared_memory_per_block:
            raise ConfigError(f"block_shape={self.block_shape!r} needs {needed} bytes of shared memory with these "
                              f"layouts, and {device.name} has {device.shared_memory_per_block} a block; take smaller tiles")
        if self.threads > device.max_threads_per_block:
            raise ConfigError(f"warps_per_block={self.warps_per_block} is {self.threads} threads, and {device.name} allows "
                              f"{device.max_threads_per_block} a block")
