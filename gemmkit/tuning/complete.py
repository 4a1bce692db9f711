"""What a configuration is given, completed: the operator, layouts of B, C and D, and the mapping of its kernel."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np

from gemmkit.config import Config
from gemmkit.config_rules import check_stream_k
from gemmkit.epilogues import result_layout
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.rasterisation import Grouped, Hilbert
from gemmkit.lang.fingerprint import when_forgetting
from gemmkit.layouts import ArrayLayout, ColMajor, RowMajor, Zero
from gemmkit.operators import FPUOp, MMAOp, Semiring, WGMMAOp, WMMAOp
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.transforms import Elementwise
from gemmkit.tuning import algebras, defaults, hopper
from gemmkit.tuning.mappings import LIKELY
from gemmkit.tuning.operators import LARGE, Sums, sized


def _itself(x: Any) -> Any:
    return x


AS_IT_IS = Elementwise(_itself)


def complete(values: dict[str, Any], sizes: tuple[int, int, int] | None, device: DeviceInfo, products: int = 1) -> Config:
    """The configuration of these fields, completed for ``products`` of these sizes, on a device.

    Raises ConfigError for a combination that no kernel can carry out, or that does not fit the device.
    """
    tiles = LIKELY.fields.keys() if type(values["operator"]) is WGMMAOp else TILES
    if values.keys() >= tiles and all(map(_is_constant, values.values())):
        return _of_tiles(frozenset(values.items()), device)
    return _complete(dict(values), sizes, device, products)


#: With these fields given (of Hopper's kernel with all of a mapping), sizes decide nothing more. Constants of these types
#: are gemmkit's own, and hold no array. (NumPy's equality of dtypes leaves out an algebra's table.)
TILES = {"block_shape", "warps_per_block"}
CONSTANT = {RowMajor, ColMajor, Zero, WGMMAOp, MMAOp, FPUOp, Tile, Grouped, Hilbert, StreamK, int, str}


def _is_constant(value: Any) -> bool:
    return type(value) in CONSTANT and getattr(getattr(value, "dtype", None), "names", None) is None


@lru_cache(maxsize=1024)
def _of_tiles(values: frozenset[tuple[str, Any]], device: DeviceInfo) -> Config:
    """The configuration of plain operands on tiles that a table chose: products of other sizes have the same one."""
    return _complete(dict(values), None, device, 1)


when_forgetting(_of_tiles.cache_clear)


def _complete(values: dict[str, Any], sizes: tuple[int, int, int] | None, device: DeviceInfo, products: int) -> Config:
    a_layout = values["global_a_layout"]
    b_layout = values.get("global_b_layout", a_layout)
    algebras.take(values, a_layout, b_layout, sizes, device, products)
    layouts = {"a": a_layout, "b": b_layout, **{name: values.get(f"global_{name}_layout") for name in "cd"}}
    sums = Sums.of(layouts, values, sizes[2] if sizes else LARGE)
    operator = values["operator"] = sized(values["operator"], a_layout.dtype, b_layout.dtype, sizes, device, products, sums)
    if isinstance(operator, Semiring):                 # what its zero is not a number of is converted on the way
        for name, layout, fragment in (("a", a_layout, operator.fragment_a), ("b", b_layout, operator.fragment_b)):
            if fragment.dtype != layout.dtype and np.can_cast(layout.dtype, fragment.dtype, "safe"):
                values.setdefault(f"transform_global_to_shared_{name}", AS_IT_IS)
    is_wgmma = operator.threads == 128
    check_stream_k(values.get("kernel", "warp_specialised" if is_wgmma else "singlestage"), values.get("splits"))
    accumulator = operator.fragment_c.dtype
    values.setdefault("global_b_layout", a_layout)
    values.setdefault("global_d_layout", _plain_like(a_layout, accumulator))
    values["global_d_layout"] = result_layout(values["global_b_layout"], values.get("epilogue"), values["global_d_layout"])
    values.setdefault("global_c_layout", Zero(accumulator))
    made: tuple[Config | None, int | None] = (None, None)
    if is_wgmma:
        made = hopper.fill(values, sizes, device, products) or made
    elif values.get("kernel") == "multistage":
        from gemmkit.tuning import multistage

        multistage.fill(values, sizes, device, products)
    else:
        defaults.fill(values, operator, sizes, device, products)
    if isinstance(operator, WMMAOp):
        orders: dict[str, Any] = {f"{name}_order": ("col", "row")[values[f"shared_{name}_layout"].axis] for name in "ab"}
        values["operator"] = dataclasses.replace(operator, **orders)
    config, needed = made
    config = config or Config(**values)
    config.check_device(device, needed)
    return config


def _plain_like(layout: ArrayLayout, dtype: np.dtype) -> ArrayLayout:
    return ColMajor(dtype) if layout.vector_axis == 0 else RowMajor(dtype)
