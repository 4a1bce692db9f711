"""What `get_config` takes for Hopper's kernel where little is given: the routes and the room are the kernel's own answers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, operators, transforms
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.tuning import mappings
from gemmkit.tuning.hopper import MOST_STAGES, _table
from tests.support.machines import E4M3, whole
from tests.support.user_layouts import Packed

F16 = np.dtype("f2")
ORDERS = {"row": layouts.RowMajor, "column": layouts.ColMajor}
DOUBLED = transforms.Elementwise(lambda x: x * 2)
OPERATORS = {"f16": operators.WGMMAOp, "tf32": lambda N: operators.WGMMAOp(N, "float32"),
             "int8": lambda N: operators.WGMMAOp(N, "int8"), "e4m3": lambda N: operators.WGMMAOp(N, E4M3)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("a,b", [(a, b) for a in ORDERS for b in ORDERS])
def test_stages_fill_shared_memory(kind: str, a: str, b: str) -> None:
    """D, like A, may lie along its columns, in the accumulator's dtype: its subtiles then take twice the room. (Counted by
    a rule of the tuner's own, they did not fit: every default for such an A was refused.)"""
    for N, given in itertools.product((48, 64, 128, 256), ({}, dict(splits=2), dict(transform_global_to_shared_b=DOUBLED))):
        operator = OPERATORS[kind](N)
        if given.get("splits") and N == 48:
            continue
        config = gk.get_config(operator=operator, global_a_layout=ORDERS[a](operator.dtype), device=H100,
                               global_b_layout=ORDERS[b](operator.dtype), **given)
        spec: Any = config.spec()
        left = H100.shared_memory_per_block - spec.shared_bytes
        assert left >= 0
        assert config.stages == MOST_STAGES or left < spec.bytes_per_stage


def test_a_config_with_little_given_computes(rng: np.random.Generator) -> None:
    a, b = whole(rng, (70, 33), F16), whole(rng, (33, 130), F16)
    conf = gk.get_config(operator=operators.WGMMAOp(64), global_a_layout=layouts.ColMajor(F16), device=H100,
                         global_b_layout=layouts.RowMajor(F16), block_shape=Tile(M=64, N=64, K=64))
    out = np.full((130, 70), np.nan, np.float32).T
    with gk.emulate():
        gk.matmul(np.asfortranarray(a), b, conf=conf, out=out)
    assert np.array_equal(out, a.astype(np.float64) @ b)


ROW, COLUMN = layouts.RowMajor(F16), layouts.ColMajor(F16)
TRANSFORM_A, TRANSFORM_B = dict(transform_global_to_shared_a=DOUBLED), dict(transform_global_to_shared_b=DOUBLED)


E4M3_ROW, E4M3_COLUMN = layouts.RowMajor(E4M3), layouts.ColMajor(E4M3)
ROUTES: dict[str, tuple[str, Any, Any, dict[str, Any], mappings.Table]] = {
    "as they lie": ("f16", ROW, ROW, {}, mappings.BY_TMA),
    "A along M": ("f16", COLUMN, ROW, {}, mappings.BY_TMA),
    "A transformed": ("f16", ROW, ROW, TRANSFORM_A, mappings.BY_REGISTERS),
    "A transformed in clusters": ("f16", ROW, ROW, dict(TRANSFORM_A, cluster=Tile(M=2, N=1)), mappings.BY_REGISTERS),
    "A transformed and shared": ("f16", ROW, ROW, dict(TRANSFORM_A, cluster=Tile(M=1, N=2)), mappings.BY_REWRITES),
    "B transformed": ("f16", ROW, ROW, TRANSFORM_B, mappings.BY_REWRITES),
    "both transformed": ("f16", ROW, ROW, TRANSFORM_A | TRANSFORM_B, mappings.BY_REWRITES),
    "a layout of the user's": ("f16", Packed(F16), ROW, {}, mappings.BY_THREADS),
    "a triangle": ("f16", layouts.Triangular(ROW), ROW, {}, mappings.BY_THREADS),
    "bytes along K": ("e4m3", E4M3_ROW, E4M3_COLUMN, {}, mappings.BY_TMA),
    "bytes across K": ("e4m3", E4M3_ROW, E4M3_ROW, {}, mappings.BY_TRANSPOSES),
    # A would be transformed in registers, were B not transposed in place.
    "bytes across K, A transformed": ("e4m3", E4M3_ROW, E4M3_ROW, TRANSFORM_A, mappings.BY_REWRITES),
}


@pytest.mark.parametrize("name", ROUTES)
def test_mappings_are_those_of_the_routes(name: str) -> None:
    operator, a, b, fields, table = ROUTES[name]
    values = dict(fields, operator=OPERATORS[operator](128), global_a_layout=a, global_b_layout=b)
    assert _table(values) is table
