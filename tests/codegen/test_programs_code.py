"""The machine code of derived kernels, without a GPU: nothing spills, a round's products are one group, the rounds are short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import H100
from tests.support import programs as listing
from tests.support.sass import instructions, loops

pytestmark = [pytest.mark.compile, pytest.mark.sample(9)]
F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
TILE = gk.Mapping({"m": 128, "n": 256, "k": 64}, stages=3)


def half(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.zeros(shape, dtype)


# (program, its arrays, mapping, components, groups, products, most instructions of a round, whether TMA stores)
CASES: dict[str, tuple[Any, list[Any], gk.Mapping, dict[str, Any], int, int, int, bool]] = {
    "gemm": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], TILE, {}, 2, 8, 56, True),
    "gemm of bfloat16": (listing.gemm, [half(256, 512, dtype=BF16), half(512, 512, dtype=BF16), half(256, 512, dtype=BF16)],
                         TILE, {}, 2, 8, 56, True),
    "gemm by three": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], gk.Mapping(warpgroups=3), {}, 2, 8, 56,
                      True),
    "transposed": (listing.transposed, [half(512, 256), half(512, 512), half(256, 512)], TILE, {}, 2, 8, 56, True),
    "dual": (listing.dual, [half(256, 512), half(512, 512), half(512, 512), half(256, 512)], gk.Mapping(stages=3),
             dict(gate=listing.silu_times), 2, 16, 72, True),
    "biased": (listing.biased, [half(256, 512), half(512, 512), half(512), half(256, dtype=F32), half(256, 512)],
               gk.Mapping({"n": 128}), dict(alpha=0.5), 2, 8, 56, True),
    "lstm": (listing.lstm, [half(256, 512), half(512, 512), half(256, 128), half(128, 512), half(512), half(256, 512)],
             gk.Mapping({"n": 128}), {}, 4, 16, 56, True),
    "sums of rows": (listing.product_and_sums, [half(256, 512), half(512, 512), half(256, 512), half(256, dtype=F32)], TILE, {}, 2,
                     8, 124, True),
    "clusters along m": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], replace(TILE, cluster={"m": 2}), {}, 2, 8,
                         60, True),
    "clusters along n": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], replace(TILE, cluster={"n": 2}), {}, 2, 8,
                         60, True),
    "clusters of 2 x 2": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], replace(TILE, cluster={"m": 2, "n": 2}), {},
                          2, 8, 72, True),
    "dual in clusters": (listing.dual, [half(256, 512), half(512, 512), half(512, 512), half(256, 512)],
                         gk.Mapping(stages=3, cluster={"m": 2}), dict(gate=listing.silu_times), 2, 16, 76, True),
    "sums of rows in clusters": (listing.product_and_sums, [half(256, 512), half(512, 512), half(256, 512), half(256, dtype=F32)],
                                 replace(TILE, cluster={"m": 2}), {}, 2, 8, 128, True),
    "sums of columns": (listing.product_and_columns, [half(256, 512), half(512, 512), half(256, 512), half(512, dtype=F32)], TILE,
                        {}, 2, 8, 204, True),
    "sums of columns by three": (listing.product_and_columns, [half(256, 512), half(512, 512), half(256, 512),
                                                               half(512, dtype=F32)], gk.Mapping(warpgroups=3), {}, 2, 8, 132, True),
    "sums of columns in clusters": (listing.product_and_columns, [half(256, 512), half(512, 512), half(256, 512),
                                                                  half(512, dtype=F32)], replace(TILE, cluster={"m": 2}), {}, 2, 8,
                                    206, True),
    "zero points": (listing.zero_points, [half(256, 512), half(512, 512), half(256, dtype=F32), half(512, dtype=F32),
                                          half(512, dtype=F32), half(256, 512)], TILE, {}, 2, 8, 288, True),
    "zero points of bfloat16": (listing.zero_points, [half(256, 512, dtype=BF16), half(512, 512, dtype=BF16), half(256, dtype=F32),
                                                      half(512, dtype=F32), half(512, dtype=F32), half(256, 512, dtype=BF16)],
                                TILE, {}, 2, 8, 342, True),
    "zero points of weights": (listing.zero_points_of_weights, [half(2, 256, 512), half(2, 512, 512), half(2, 256, dtype=F32),
                                                                half(2, 256, 512), half(2, 512, dtype=F32)], TILE,
                               dict(of_all=0.5), 2, 8, 200, True),
    "float32 out": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512, dtype=F32)], TILE, {}, 2, 8, 64, False),
}


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str) -> None:
    program, arrays, mapping, components, groups, products, most, by_tma = CASES[name]
    (plan,) = recorded(lambda: program(*arrays, mapping=mapping, **components), H100, zeros=False)
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert plan.launchable.shared_bytes <= H100.shared_memory_per_block
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert not any(line.startswith(("LDL", "STL")) for line in lines)
    multiplied = [line for line in lines if line.startswith("HGMMA")]
    assert len(multiplied) == products and sum("gsb0" in line for line in multiplied) == groups
    assert any(line.startswith("UTMASTG") for line in lines) == by_tma
    rounds = loops(sass)
    assert len(rounds) == groups // 2 and all(len(one) <= most for one in rounds)
    assert all(sum("gsb0" in line and line.startswith("HGMMA") for line in one) == 1 for one in rounds)


def test_sizes_compile_nothing_anew() -> None:
    """Extents and scalars are arguments."""
    def plan(m: int, n: int, k: int, alpha: float) -> Any:
        return listing.biased.plan(half(m, k), half(k, n), half(n), half(m), half(m, n), alpha=alpha,
                                   mapping=gk.Mapping({"n": 64}))

    one, other = plan(256, 512, 512, 0.5), plan(128, 1024, 64, 2.0)
    assert one.text == other.text and one.launchable.kernel is other.launchable.kernel
    assert [x.fingerprint for x in one.arguments] == [x.fingerprint for x in other.arguments]
    assert one.launchable.values != other.launchable.values
