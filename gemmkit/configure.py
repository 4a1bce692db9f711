"""`get_config`: a configuration from what is given of it, the rest by `gemmkit.tuning`."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.config import Config
from gemmkit.config_rules import check_fields
from gemmkit.kernels.common.rules import rule
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts import GlobalLayout
from gemmkit.operators import Operator
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.tiling import Tile
from gemmkit.tuning.choose import complete

__all__ = ["device_given", "get_config", "products_given", "sizes_given"]


def get_config(*, operator: Operator, global_a_layout: GlobalLayout, gemm_shape: Any = None,
               device: DeviceInfo | None = None, **fields: Any) -> Config:
    """A complete configuration from an operator, A's layout and whatever else is given.

    ``gemm_shape`` (a dict or Tile of M, N, K, or a tuple of the three; a dict may have ``batch``, the number of products of
    a stack) helps to choose tiles and decides nothing else. Every field of `Config` may be given; missing ones get: B's
    layout that of A, no C, D's layout that of A in the accumulator's dtype, a block shape by `gemmkit.tuning`, shared
    layouts in the order of the global ones, padded by 16 bytes.

    Raises ConfigError for a combination that no kernel can carry out, TypeError for an unknown field.

    >>> from gemmkit import layouts, operators
    >>> config = get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"))
    >>> config.block_shape, config.warps_per_block
    (Tile(M=128, N=256, K=128), 8)
    """
    known = {field.name for field in Config.fields()}
    unknown = set(fields) - known
    if unknown:
        raise TypeError(f"get_config() got unknown fields {', '.join(sorted(unknown))}; the fields are "
                        + ", ".join(sorted(known)))
    values = dict(fields, operator=operator, global_a_layout=global_a_layout)
    check_fields(values)
    return complete(values, sizes_given(gemm_shape), device_given(device), products_given(gemm_shape))


def device_given(device: Any) -> DeviceInfo:
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
