"""Kernels of mma.sync and of the ordinary units add the place of an element to that of its tile. A swizzle is no sum: with a
swizzled shared layout they read other elements, and wrote wrong results where nothing lay beyond the tile."""

from __future__ import annotations

from typing import Any

import pytest

import gemmkit as gk
from gemmkit import operators
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts import ColMajor, Padded, RowMajor, Swizzled
from gemmkit.tiling import Tile

OPERATORS = (operators.MMAOp(), "float16"), (operators.WMMAOp(), "float16"), (operators.FPUOp(), "float32")


def conf(kernel: str, operator: Any, dtype: str, **shared: Any) -> gk.Config:
    return gk.get_config(kernel=kernel, operator=operator, global_a_layout=RowMajor(dtype), global_b_layout=RowMajor(dtype),
                         global_c_layout=RowMajor("float32"), global_d_layout=RowMajor("float32"),
                         block_shape=Tile(M=64, N=64, K=32), warps_per_block=4, **shared)


@pytest.mark.parametrize("kernel", ["singlestage", "multistage"])
@pytest.mark.parametrize("operator, dtype", OPERATORS, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_swizzled_tiles(kernel: str, operator: Any, dtype: str) -> None:
    for name in "abcd":
        for order in (RowMajor, ColMajor):
            for width in (32, 64, 128):
                layout = Swizzled(order(dtype if name in "ab" else "float32"), width)
                named = "[cd]" if name == "d" else name       # (where C's is not given, it is D's)
                with pytest.raises(ConfigError, match=rf"shared_{named}_layout=Swizzled\(.*layouts.Padded"):
                    conf(kernel, operator, dtype, **{f"shared_{name}_layout": layout})
    assert conf(kernel, operator, dtype, shared_c_layout=Padded(RowMajor("float32"), 4)).kernel == kernel
