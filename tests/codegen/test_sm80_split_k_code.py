"""Shares of K in the multistage kernel's mappings, compiled without a GPU: where they are chosen, nothing spills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import H100
from gemmkit.tuning import sm80

pytestmark = pytest.mark.compile

STREAMING = [(code, n) for code in ("f4", "f8")
             for n, one in enumerate(sm80.TABLES[np.dtype(code)]) if one.merges and one.streams]
MERGING = [(code, n) for code in ("f4", "f8", "c8", "c16")
           for n, one in enumerate(sm80.TABLES[np.dtype(code)]) if one.merges]


@pytest.mark.thorough
@pytest.mark.sample(120)
@pytest.mark.parametrize("shape", [(64, 64, 8192), (67, 63, 8191)], ids=str)
@pytest.mark.parametrize("splits", [2, 40])
@pytest.mark.parametrize("order", ["nn", "nt"])
@pytest.mark.parametrize("code, n", MERGING)
def test_nothing_spills(code: str, n: int, order: str, splits: int, shape: tuple[int, int, int]) -> None:
    check_spills(code, n, order, splits, shape)


@pytest.mark.thorough
@pytest.mark.sample(72)
@pytest.mark.parametrize("shape", [(1536, 1536, 1536), (1531, 1533, 1537)], ids=str)
@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("code, n", STREAMING)
def test_nothing_spills_where_k_is_streamed(code: str, n: int, order: str, shape: tuple[int, int, int]) -> None:
    check_spills(code, n, order, gk.StreamK(), shape)


def check_spills(code: str, n: int, order: str, splits: Any, shape: tuple[int, int, int]) -> None:
    dtype, sizes = np.dtype(code), dict(zip("MNK", shape))
    one: Any = sm80.TABLES[dtype][n]
    a, b = (RowMajor(dtype) if o == "n" else ColMajor(dtype) for o in order)
    conf = gk.get_config(operator=sm80.operator(dtype, one, H100), global_a_layout=a, global_b_layout=b,
                         global_d_layout=RowMajor(dtype), device=H100, gemm_shape=sizes, splits=splits, **one.fields)
    usage = compile_config(conf, device=H100, gemm_shape=sizes).usage
    assert (usage.spill_stores, usage.spill_loads, usage.stack_bytes) == (0, 0, 0)


def test_a_mapping_without_registers_for_it_is_not_shared() -> None:
    for table in sm80.TABLES.values():
        for one in table:
            if not one.merges:
                assert one.splits((64, 64, 65536), 1, 0, H100.sm_count) == 1
