"""The rules that every configuration must keep: of single fields, and of dtypes. Each kernel family has its own besides
(`gemmkit.kernels.simt.rules`, `gemmkit.kernels.sm90.rules`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from gemmkit.components import Component
from gemmkit.epilogues import Bias, Default, Epilogue, Fold, LinearCombination, Residual, Scale, Store, parts
from gemmkit.epilogues.pairs import Pack
from gemmkit.kernels.common.rules import rule
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.rasterisation import Order
from gemmkit.kernels.select import FAMILIES
from gemmkit.kernels.spec import Condition
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.given import check_methods
from gemmkit.lang.narrowing import narrows, refusal
from gemmkit.lang.records import part_dtypes
from gemmkit.layouts import ArrayLayout, Braided, Plain
from gemmkit.layouts.braided import OCTET
from gemmkit.observers import Observer
from gemmkit.operators import Operator
from gemmkit.operators.algebra import Algebra, units
from gemmkit.tiling import Tile
from gemmkit.transforms import Transform

if TYPE_CHECKING:
    from gemmkit.config import Config

__all__ = ["TRANSFORMS", "check_fields", "check_stream_k", "rule", "validate"]

TRANSFORMS = (
    "transform_global_to_shared_a", "transform_global_to_shared_b", "transform_global_to_shared_c",
    "transform_shared_to_regs_a", "transform_shared_to_regs_b", "transform_shared_to_regs_c",
    "transform_regs_to_shared_d", "transform_shared_to_global_d",
)


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration breaks."""
    check_fields({field.name: getattr(config, field.name) for field in config.fields()})
    check_stream_k(config.kernel, config.splits)
    _validate_fold(config)
    _validate_packed(config)
    if config.observe_a is not None:
        _validate_observer(config)
    config.condition.check_tiles(config.block_shape)
    config.family.validate(config)
    _validate_dtypes(config)


def check_stream_k(kernel: str, splits: Any) -> None:
    """Raise ConfigError where a kernel whose blocks do not stay is to stream K."""
    def said() -> str:
        named = " and ".join(f"{name!r}" for name, family in FAMILIES.items() if family.streams_k)
        return f"blocks of the kernels {named} stream K; with kernel={kernel!r} it is a number"

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
            rule(isinstance(value, Tile), name, value, "a Tile is needed")
            rule(value.names == TILES[name], name, value, f"its dimensions must be {', '.join(TILES[name])}")
        elif name in TRANSFORMS:
            rule(isinstance(value, Transform), name, value, "a Transform is needed; wrap a function in "
                  "transforms.Elementwise")
            rule(callable(value), name, value, "it has no __call__(self, x) or __call__(self, x, i, j)")
        elif name == "observe_a":
            rule(value is None or isinstance(value, Observer), name, value, "an observer is needed, such as "
                 "gemmkit.observers.RowSum(sums)")
        elif name in KINDS:
            rule(isinstance(value, KINDS[name]), name, value, f"an instance of {KINDS[name].__name__} is needed (not the "
                  "class itself)" + ("; wrap a function of the result's elements: epilogues.Elementwise(f)"
                                     if name == "epilogue" and callable(value) and not isinstance(value, type) else ""))
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


def _check_global_layout(name: str, layout: Any) -> None:
    rule(isinstance(layout, ArrayLayout), name, layout, "a Layout is needed, for example RowMajor('float16')")
    if name == "global_d_layout":
        rule(layout.writable, name, layout, "it has neither store_element nor store, so D cannot be written with it")
    else:
        rule(layout.readable, name, layout, "it has neither element nor load, so it cannot be read")


def _validate_packed(config: Config) -> None:
    """Of a D with half the columns the epilogue makes one value of two."""
    layout = config.global_d_layout
    rule(layout.packed == 1 or isinstance(config.epilogue.ending(), Pack), "global_d_layout", layout, "it is what "
         f"epilogues.Pack stores into, and epilogue={config.epilogue!r} packs nothing; give a RowMajor or ColMajor layout")


def _validate_fold(config: Config) -> None:
    """A braid's products are had by a fold alone, and a fold is of a braid's."""
    b: Any = config.global_b_layout
    fold = config.epilogue
    if not isinstance(fold, Fold):
        rule(not isinstance(b, Braided), "epilogue", fold, lambda: f"B is a braid of {b.parts} matrices, whose columns are "
             "interleaved; give epilogues.Fold(f), or Concat(..., axis=1) as B for all products side by side")
        return
    rule(isinstance(b, Braided), "epilogue", fold, "it folds the products of a braid; give gemmkit.Braid(...) as B, of as "
         "many matrices as it has arguments")
    rule(fold.arguments in (b.parts, b.parts + 2), "epilogue", fold, f"its function takes {fold.arguments} arguments, and B "
         f"is a braid of {b.parts} matrices; a function of {b.parts} values is needed, or of {b.parts} values and m, n")
    rule(not config.has_c, "global_c_layout", config.global_c_layout, "a folded product has no C; add it behind the fold, "
         "by Fold(f) | Residual(c)")
    for name in ("transform_regs_to_shared_d", "transform_shared_to_global_d"):
        rule(getattr(config, name).is_identity, name, getattr(config, name), "it would act on the parts before they are "
             "folded; make it part of the fold's function")
    least = OCTET * b.slots
    rule(config.block_shape.size.N % least == 0, "block_shape", config.block_shape, f"N must be a multiple of {least}, "
         f"{OCTET} columns of each of a braid's {b.slots} slots")


def _validate_observer(config: Config) -> None:
    """Who looks at A's elements in shared memory must find there what they are in memory, each once."""
    def refuse(holds: Any, why: str) -> None:
        rule(holds, "observe_a", config.observe_a, why)

    layout, operator = config.global_a_layout, config.operator
    refuse(config.kernel in OBSERVING, f"the kernels that observe are {', '.join(OBSERVING)}; this is {config.kernel!r}")
    refuse(config.splits == 1, f"blocks that share K see shares of A; take splits=1 (it is {config.splits!r})")
    refuse(config.condition.is_always, "a condition leaves out k-tiles that no block would then look at; reduce A by itself")
    refuse(isinstance(layout, Plain) and layout.is_plain and not isinstance(operator, Algebra), f"A is {layout!r}; a plain "
           "matrix of real numbers is needed")
    refuse(all(getattr(config, f"transform_{way}_a").is_identity for way in ("global_to_shared", "shared_to_regs")),
           "A is transformed on its way, and what is observed is A itself; transform in the observer's own of(x, m, k)")
    if config.kernel == "warp_specialised":
        refuse(units(operator).promote == 0, f"{operator!r} adds up sums in portions; take promote=0")
        refuse(config.compute_warp.size.M in (64, 128), f"compute_warp={config.compute_warp!r}: 128 threads look at 64 or "
               "128 rows")
    else:
        rows = config.block_shape.size.M
        refuse(config.threads >= rows, f"a thread looks at one row, and {config.threads} threads have {rows}; take more "
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
            rule(not to_shared.is_identity, f"global_{name}_layout", layout, f"the operator takes {name} as {shared.dtype}; "
                 f"nothing is converted silently: choose an operator of dtype {layout.dtype}, convert the array, or give "
                 f"transform_global_to_shared_{name}")
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
          f"the operator's numbers have {count} parts ({', '.join(accumulator.names or ())}), which would be lost; take "
          f"operator.number_dtype({part_dtypes(d.dtype)[0].name!r}), or give an epilogue that says what becomes of them")
    rule(accumulator.kind != "c" or d.dtype.kind in "cV" or not unchanged, "global_d_layout", d, lambda:
          f"the operator accumulates {accumulator}, whose imaginary part would be lost; take a complex layout, or give "
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
