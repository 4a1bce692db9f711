"""Configurations: what a kernel computes, and how it is mapped onto the machine.

A `Config` has two parts. The *problem* (layouts, operator, transforms, epilogue, condition) decides the result; the
*mapping* (tile shapes, warps, shared layouts, order, kernel) only the speed: any legal mapping gives the same result up
to rounding. `get_config` fills in what is not given; what is not legal raises `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.epilogues import Bias, Default, Epilogue, LinearCombination, Residual, Scale, Store, parts
from gemmkit.kernels.pipeline import PipelineSpec
from gemmkit.kernels.rasterisation import Grouped, Order
from gemmkit.kernels.spec import Condition, Operand, Spec
from gemmkit.kernels.weave import with_a_by_registers
from gemmkit.lang.given import check_methods
from gemmkit.lang.records import part_dtypes
from gemmkit.layouts import Layout, Zero
from gemmkit.operators import Operator
from gemmkit.pipeline_rules import check_splits, validate_pipeline
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.tiling import Tile
from gemmkit.transforms import Identity, Staged, Transform

__all__ = ["Config", "ConfigError", "get_config"]


class ConfigError(ValueError):
    """A configuration that no kernel can carry out; the message names the field, its value and the rule."""


TRANSFORMS = (
    "transform_global_to_shared_a", "transform_global_to_shared_b", "transform_global_to_shared_c",
    "transform_shared_to_regs_a", "transform_shared_to_regs_b", "transform_shared_to_regs_c",
    "transform_regs_to_shared_d", "transform_shared_to_global_d",
)


@dataclass(frozen=True)
class Config(Component):
    """All that specialises a kernel. Make one with `get_config`; ``repr(config)`` can be pasted back."""

    # the problem
    global_a_layout: Layout
    global_b_layout: Layout
    global_c_layout: Layout
    global_d_layout: Layout
    operator: Operator
    # the mapping
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
    # the mapping of the warp-specialised kernel (`warps_per_block` are those that multiply)
    stages: int = 1                     # of the ring in shared memory
    schedule: str = "cooperative"       # or "pingpong"
    cluster: Tile = Tile(M=1, N=1)      # blocks that share operands
    producer_warps: int = 0
    # the mapping of either kernel
    splits: int = 1                     # blocks that share the K of a tile, and add up their sums in a cluster
    # the problem's functions
    transform_global_to_shared_a: Transform = Identity()
    transform_global_to_shared_b: Transform = Identity()
    transform_global_to_shared_c: Transform = Identity()
    transform_shared_to_regs_a: Transform = Identity()
    transform_shared_to_regs_b: Transform = Identity()
    transform_shared_to_regs_c: Transform = Identity()
    transform_regs_to_shared_d: Transform = Identity()
    transform_shared_to_global_d: Transform = Identity()
    epilogue: Epilogue = Default()
    condition: Condition = Condition()

    def __post_init__(self) -> None:
        for name in "ab":
            layout = getattr(self, f"global_{name}_layout")
            ways = (getattr(self, f"transform_{way}_{name}") for way in ("global_to_shared", "shared_to_regs"))
            if isinstance(layout, Layout):
                transformed = any(not getattr(way, "is_identity", False) for way in ways)
                check_methods(layout, f"global_{name}_layout")
                seen = layout.as_operand(name, transformed)
                _rule(isinstance(seen, Layout), f"global_{name}_layout", layout, f"its as_operand returned {seen!r}; a "
                      "Layout is needed")
                object.__setattr__(self, f"global_{name}_layout", seen)
        validate(self)

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or repr(value) != repr(field.default):
                parts.append(f"    {field.name}={value!r},")
        return "get_config(\n" + "\n".join(parts) + "\n)"

    @property
    def threads(self) -> int:
        return 32 * (self.warps_per_block + self.producer_warps)

    @property
    def is_pipeline(self) -> bool:
        """Whether it is one for the warp-specialised kernel."""
        return self.kernel == "warp_specialised"

    @property
    def peers(self) -> int:
        """Blocks of a cluster."""
        return self.cluster.count * self.splits

    @property
    def has_c(self) -> bool:
        """Whether there is a C to load: a zero C that no transform changes is not."""
        return not (isinstance(self.global_c_layout, Zero) and self.transform_global_to_shared_c.is_identity
                    and self.transform_shared_to_regs_c.is_identity)

    def transforms_of(self, name: str) -> tuple[Transform, Transform]:
        """What A ("a") or B passes on the way to shared memory, and from there. The warp-specialised kernel has no registers
        behind shared memory but those of the tensor cores: there both stand before it, one after the other."""
        first, second = (getattr(self, f"transform_{way}_{name}") for way in ("global_to_shared", "shared_to_regs"))
        if not self.is_pipeline or second.is_identity:
            return first, second
        dtype = getattr(self, f"shared_{name}_layout").dtype
        if first.is_identity and getattr(self, f"global_{name}_layout").dtype == dtype:
            return second, first
        return Staged(first, second, dtype), Identity()

    def spec(self, whole_a: bool = False, whole_b: bool = False, whole_c: bool = False, whole_d: bool = False,
             engines: tuple[int, ...] = (True, True, True)) -> Spec:
        """The kernel's specialisation; the flags are the divisibility class (see `kernels.spec.Operand`), and which of A,
        B and D the copy engine moves."""
        operands = (
            Operand(self.global_a_layout, self.shared_a_layout, *self.transforms_of("a"), self.mem_a_warp, self.mem_a_thread,
                    whole_a),
            Operand(self.global_b_layout, self.shared_b_layout, *self.transforms_of("b"), self.mem_b_warp, self.mem_b_thread,
                    whole_b),
            Operand(self.global_c_layout, self.shared_c_layout, self.transform_global_to_shared_c,
                    self.transform_shared_to_regs_c, self.mem_cd_warp, self.mem_cd_thread, whole_c),
            Operand(self.global_d_layout, self.shared_d_layout, self.transform_shared_to_global_d,
                    self.transform_regs_to_shared_d, self.mem_cd_warp, self.mem_cd_thread, whole_d))
        fields: tuple[Any, ...] = (
            self.block_shape, self.compute_warp, self.warps_per_block, self.operator, *operands, self.epilogue,
            self.condition, self.order, self.has_c, self.splits)
        if not self.is_pipeline:
            return Spec(*fields)
        m, n = self.cluster.extents
        more: tuple[Any, ...] = (self.stages, self.schedule, m, n, self.producer_warps, *engines)
        return with_a_by_registers(PipelineSpec(*fields, *more))

    def check_device(self, device: DeviceInfo) -> None:
        """Raise ConfigError when the kernel does not fit the device."""
        least = self.operator.minimum_arch
        _rule(device.arch >= least, "operator", self.operator, f"its instructions need compute capability {least[0]}."
              f"{least[1]}, and {device.name} has {device.arch[0]}.{device.arch[1]}; take FPUOp")
        _rule(self.splits == 1 or device.arch >= (9, 0), "splits", self.splits, "blocks share K in a cluster, which needs "
              f"compute capability 9.0, and {device.name} has {device.arch[0]}.{device.arch[1]}; take splits=1")
        needed = self.spec().shared_bytes
        if needed > device.shared_memory_per_block:
            raise ConfigError(f"block_shape={self.block_shape!r} needs {needed} bytes of shared memory with these "
                              f"layouts, and {device.name} has {device.shared_memory_per_block} a block; take smaller tiles")
        if self.threads > device.max_threads_per_block:
            raise ConfigError(f"warps_per_block={self.warps_per_block} is {self.threads} threads, and {device.name} allows "
                              f"{device.max_threads_per_block} a block")


# -- rules ------------------------------------------------------------------------------------------------------------

def _rule(condition: bool, field: str, value: Any, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{field}={value!r}: {rule}")


def _divides(small: Tile, large: Tile, field: str, rule: str, value: Any = None) -> None:
    for name in small.names:
        part, whole = getattr(small.size, name), getattr(large.size, name)
        _rule(whole % part == 0, field, small if value is None else value,
              f"{rule} ({name}={whole} is not a multiple of {part})")


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration breaks."""
    _check_fields({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    if config.is_pipeline:
        validate_pipeline(config)
        _validate_dtypes(config)
        return
    _validate_one_stage(config)
    _validate_tiles(config)
    _validate_dtypes(config)
    _validate_lines(config)
    _validate_transforms(config)


def _validate_one_stage(config: Config) -> None:
    operator = config.operator
    _rule(operator.threads == 32, "operator", operator, "it acts in warpgroups; take kernel='warp_specialised'")
    for field, only in (("stages", 1), ("producer_warps", 0), ("schedule", "cooperative"), ("cluster", Tile(M=1, N=1))):
        _rule(getattr(config, field) == only, field, getattr(config, field), "it is a mapping of the warp-specialised "
              f"kernel; with kernel={config.kernel!r} it is {only!r}")
    if config.splits > 1:
        check_splits(config.splits, _rule)
        refusal = operator.refuses_to_merge
        _rule(refusal is None, "splits", config.splits, f"with {operator!r}: {refusal}")


TILES = {"block_shape": ("M", "N", "K"), "compute_warp": ("M", "N", "K"), "mem_a_warp": ("M", "K"),
         "mem_a_thread": ("M", "K"), "mem_b_warp": ("K", "N"), "mem_b_thread": ("K", "N"), "mem_cd_warp": ("M", "N"),
         "mem_cd_thread": ("M", "N"), "cluster": ("M", "N")}
KINDS = {"operator": Operator, "epilogue": Epilogue, "order": Order, "condition": Condition}


def _check_fields(fields: dict[str, Any]) -> None:
    """The rules of single fields, of those that are given: what the defaults may then build upon."""
    from gemmkit.kernels.select import KERNELS

    for name, value in fields.items():
        if isinstance(value, Component):
            check_methods(value, name)
        if name in TILES:
            _rule(isinstance(value, Tile), name, value, "a Tile is needed")
            _rule(value.names == TILES[name], name, value, f"its dimensions must be {', '.join(TILES[name])}")
        elif name in TRANSFORMS:
            _rule(isinstance(value, Transform), name, value, "a Transform is needed; wrap a function in "
                  "transforms.Elementwise")
            _rule(callable(value), name, value, "it has no __call__(self, x) or __call__(self, x, i, j)")
        elif name in KINDS:
            _rule(isinstance(value, KINDS[name]), name, value, f"an instance of {KINDS[name].__name__} is needed (not the "
                  "class itself)")
        elif name.startswith("global_"):
            _check_global_layout(name, value)
        elif name.startswith("shared_"):
            _rule(hasattr(value, "physical_size") and not isinstance(value, type), name, value, "a shared layout is needed: "
                  "RowMajor, ColMajor or Padded")
        elif name == "kernel":
            _rule(isinstance(value, str) and value in KERNELS, name, value, f"the kernels are {', '.join(KERNELS)}")
        elif name in ("warps_per_block", "splits"):
            _rule(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, value,
                  "a positive number is needed")
        elif name in ("stages", "producer_warps"):
            _rule(isinstance(value, int) and not isinstance(value, bool) and value >= 0, name, value, "a number is needed")
        elif name == "schedule":
            _rule(isinstance(value, str), name, value, "'cooperative' or 'pingpong' is needed")
        elif name == "blocks_per_sm":
            _rule(isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 32, name, value,
                  "a number from 1 to 32 is needed")


def _check_global_layout(name: str, layout: Any) -> None:
    _rule(isinstance(layout, Layout), name, layout, "a Layout is needed, for example RowMajor('float16')")
    if name == "global_d_layout":
        _rule(layout.writable, name, layout, "it has neither store_element nor store, so D cannot be written with it")
    else:
        _rule(layout.readable, name, layout, "it has neither element nor load, so it cannot be read")


def _validate_tiles(config: Config) -> None:
    block, warp, warps = config.block_shape, config.compute_warp, config.warps_per_block
    m, n, k = config.operator.shape
    operation = Tile(M=m, N=n, K=k)
    _divides(operation, warp, "operator", f"compute_warp={warp!r} must be a multiple of the operator's {m}x{n}x{k}",
             config.operator)
    _divides(warp, block, "compute_warp", f"block_shape={block!r} must be a multiple of it")
    tiles = block.size.M // warp.size.M * (block.size.N // warp.size.N)
    _rule(tiles == warps, "warps_per_block", warps, f"block_shape and compute_warp divide the block among {tiles} warps")
    for name, projected in (("a", block.MK), ("b", block.KN), ("cd", block.MN)):
        mem_warp, mem_thread = getattr(config, f"mem_{name}_warp"), getattr(config, f"mem_{name}_thread")
        _divides(mem_warp, projected, f"mem_{name}_warp", f"the block's {projected!r} must be a multiple of it")
        _divides(mem_thread, mem_warp, f"mem_{name}_thread", f"mem_{name}_warp={mem_warp!r} must be a multiple of it")


def _validate_dtypes(config: Config) -> None:
    operator = config.operator
    for name, fragment in (("a", operator.fragment_a), ("b", operator.fragment_b)):
        layout, shared = getattr(config, f"global_{name}_layout"), getattr(config, f"shared_{name}_layout")
        to_shared, to_regs = (getattr(config, f"transform_{way}_{name}") for way in ("global_to_shared", "shared_to_regs"))
        loaded = getattr(operator, "shared_dtypes", {}).get(name, fragment.dtype)
        _rule(shared.dtype == loaded or not (to_regs.is_identity or operator.is_mapped is False), f"shared_{name}_layout",
              shared, f"{operator!r} loads {loaded}")
        _rule(shared.dtype == loaded, f"shared_{name}_layout", shared, f"{operator!r} loads {loaded}")
        _rule(layout.dtype == shared.dtype or not to_shared.is_identity, f"global_{name}_layout", layout,
              f"the operator takes {name} as {shared.dtype}; nothing is converted silently: choose an operator of dtype "
              f"{layout.dtype}, convert the array, or give transform_global_to_shared_{name}")
    _validate_complex(config)
    for name in ("c", "d"):
        shared = getattr(config, f"shared_{name}_layout")
        _rule(shared.dtype == operator.fragment_c.dtype or not _strict(operator), f"shared_{name}_layout", shared,
              f"{operator!r} accumulates in {operator.fragment_c.dtype}")


def _validate_complex(config: Config) -> None:
    """An imaginary part is dropped only where a function of the user's says how."""
    accumulator = config.operator.fragment_c.dtype
    c, d = config.global_c_layout, config.global_d_layout
    unchanged = config.transform_global_to_shared_c.is_identity and config.transform_shared_to_regs_c.is_identity
    _rule(c.dtype.kind != "c" or accumulator.kind in "cV" or not unchanged, "global_c_layout", c,
          f"the operator accumulates {accumulator}, which has no imaginary part; convert the array, or give "
          "transform_global_to_shared_c")
    unchanged = (config.transform_regs_to_shared_d.is_identity and config.transform_shared_to_global_d.is_identity
                 and all(type(part) in (Default, Bias, LinearCombination, Residual, Scale, Store)
                         for part in parts(config.epilogue)))
    count = len(part_dtypes(accumulator))
    _rule(accumulator.names is None or len(part_dtypes(d.dtype)) == count or not unchanged, "global_d_layout", d,
          f"the operator's numbers have {count} parts ({', '.join(accumulator.names or ())}), which would be lost; take "
          f"operator.number_dtype({part_dtypes(d.dtype)[0].name!r}), or give an epilogue that says what becomes of them")
    _rule(accumulator.kind != "c" or d.dtype.kind in "cV" or not unchanged, "global_d_layout", d,
          f"the operator accumulates {accumulator}, whose imaginary part would be lost; take a complex layout, or give "
          "transform_shared_to_global_d or an epilogue that says what becomes of it")


def _validate_lines(config: Config) -> None:
    """Lines of shared tiles start where the widest access to them may."""
    block = config.block_shape
    for name, tile, thread in (("a", block.MK, config.mem_a_thread), ("b", block.KN, config.mem_b_thread),
                               ("c", block.MN, config.mem_cd_thread), ("d", block.MN, config.mem_cd_thread)):
        layout = getattr(config, f"shared_{name}_layout")
        refusal = config.operator.refuses(name, layout)
        _rule(refusal is None, f"shared_{name}_layout", layout, refusal or "")
        layout = getattr(layout, "plane", layout)              # of numbers in planes, one plane is loaded at a time
        size = layout.dtype.itemsize
        moved = thread.count if thread.extents[layout.axis] == thread.count else 1
        needed = max(math.gcd(16, moved * size), config.operator.line_alignment(name, layout))
        line = layout.leading(tile.size) * size
        _rule(line % needed == 0, f"shared_{name}_layout", layout, f"its lines are {line} bytes long in the block's "
              f"{tile!r}, and must be multiples of {needed}: threads move that much at a time; pad by a multiple of "
              f"{needed // size or 1} elements")


def _strict(operator: Operator) -> bool:
    """Whether the operator's loads and stores of C and D convert nothing."""
    return not operator.is_mapped


def _validate_transforms(config: Config) -> None:
    if config.operator.is_mapped:
        return
    for field in TRANSFORMS[3:7]:
        transform = getattr(config, field)
        _rule(transform.is_identity or not transform.with_coordinates, field, transform,
              f"{config.operator!r} does not say which element a register holds, so a transform on registers cannot have "
              "coordinates; transform between global and shared memory, or use MMAOp")


# -- defaults ---------------------------------------------------------------------------------------------------------

def get_config(*, operator: Operator, global_a_layout: Layout, gemm_shape: Any = None, device: DeviceInfo | None = None,
               **fields: Any) -> Config:
    """A complete configuration from an operator, A's layout and whatever else is given.

    ``gemm_shape`` (a dict or Tile of M, N, K) helps to choose tiles and decides nothing else. Every field of `Config` may
    be given; missing ones get: B's layout that of A, no C, D's layout that of A in the accumulator's dtype, a block shape
    by `gemmkit.tuning.defaults`, shared layouts in the order of the global ones, padded by 16 bytes.

    Raises ConfigError for a combination that no kernel can carry out, TypeError for an unknown field.

    >>> from gemmkit import layouts, operators
    >>> config = get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"))
    >>> config.block_shape, config.warps_per_block
    (Tile(M=128, N=256, K=128), 8)
    """
    from gemmkit.tuning import defaults

    known = {field.name for field in dataclasses.fields(Config)}
    unknown = set(fields) - known
    if unknown:
        raise TypeError(f"get_config() got unknown fields {', '.join(sorted(unknown))}; the fields are "
                        + ", ".join(sorted(known)))
    values = dict(fields, operator=operator, global_a_layout=global_a_layout)
    _check_fields(values)
    device = device_given(device)
    defaults.fill(values, _sizes(gemm_shape), device)
    config = Config(**values)
    config.check_device(device)
    return config


def device_given(device: Any) -> DeviceInfo:
    """What to compile for: a description of a device, or for None the GPU that is here."""
    if device is None:
        return target()
    _rule(isinstance(device, DeviceInfo), "device", device, "a gemmkit.runtime.device.DeviceInfo is needed, for example "
          "gemmkit.runtime.device.H100, or None for the GPU that is here")
    return device


def _sizes(gemm_shape: Any) -> tuple[int, int, int] | None:
    if gemm_shape is None:
        return None
    if isinstance(gemm_shape, Tile):
        gemm_shape = dict(zip(gemm_shape.names, gemm_shape.extents))
    if not isinstance(gemm_shape, dict) or set(gemm_shape) != {"M", "N", "K"}:
        raise ConfigError(f"gemm_shape={gemm_shape!r}: M, N and K are needed, for example dict(M=512, N=512, K=64)")
    for name, size in gemm_shape.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ConfigError(f"gemm_shape: {name}={size!r}: a size is 0 or more")
    return int(gemm_shape["M"]), int(gemm_shape["N"]), int(gemm_shape["K"])
