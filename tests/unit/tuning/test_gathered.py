"""Which small products whose rows TMA cannot take go to which kernel; the others stay where they are."""

from __future__ import annotations

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.operators import MMAOp
from gemmkit.runtime.device import A100, H100, assumed
from gemmkit.transforms import Elementwise
from gemmkit.tuning import candidates


def kernel_of(sizes: tuple[int, int, int], orders: str = "nn", dtype: str = "f2", **keywords: object) -> str:
    M, N, K = sizes
    a, b = (np.empty(shape if order == "n" else shape[::-1], dtype) for shape, order in zip(((M, K), (K, N)), orders))
    with gk.emulate(mapping="device"):
        plan = gk.plan(a if orders[0] == "n" else a.T, b if orders[1] == "n" else b.T, **keywords)
    return str(plan.config.kernel)


@pytest.mark.parametrize(("sizes", "orders", "kernel"), [
    ((14, 1447, 55), "tt", "singlestage"), ((648, 5649, 11), "nn", "singlestage"), ((1, 1, 3), "nn", "singlestage"),
    ((500, 500, 500), "nn", "multistage"), ((480, 1344, 356), "nt", "multistage"),
    ((501, 501, 501), "nn", "warp_specialised"), ((64, 51, 289), "tn", "warp_specialised"),       # at 2 bytes
    ((40, 1000, 333), "nn", "warp_specialised"), ((3001, 201, 6001), "nt", "multistage"), ((201, 3001, 6001), "nn", "multistage"),
    ((36, 256, 389), "nn", "multistage"), ((3, 64, 524), "tt", "multistage"), ((1695, 3023, 376), "tn", "warp_specialised"),
    ((8192, 8192, 2050), "nt", "warp_specialised"), ((4098, 4098, 4098), "nt", "multistage"),         # rows at 4 bytes, large
    ((8192, 8192, 33), "nn", "warp_specialised"), ((4101, 4101, 4101), "nn", "warp_specialised"),     # large
    ((4299, 64, 3328), "tn", "multistage"), ((2964, 64, 3167), "nt", "multistage"), ((64, 2964, 3167), "nt", "multistage"),
    ((192, 18, 256), "nn", "multistage"), ((160, 384, 1542), "nt", "multistage"), ((218, 1088, 64), "tt", "multistage"),
    ((11898, 683, 514), "tt", "multistage"), ((36, 5952, 2304), "tn", "multistage"),                  # at 4 and 8
    ((3840, 6088, 78), "nt", "warp_specialised"), ((384, 6496, 742), "nn", "warp_specialised"),       # D by TMA
    ((320, 11264, 1258), "nt", "multistage"), ((8192, 8190, 766), "nt", "multistage"),                # but K is long, or not
    ((270, 8, 3584), "tt", "multistage"), ((2964, 65, 3167), "nt", "warp_specialised"),         # few tiles, and wide
    ((64, 64, 64), "nn", "warp_specialised"), ((512, 512, 512), "nn", "warp_specialised"),            # TMA takes them
    ((0, 5, 3), "nn", "warp_specialised"),
])
def test_on_hopper(sizes: tuple[int, int, int], orders: str, kernel: str) -> None:
    with assumed(H100), candidates.without():
        assert kernel_of(sizes, orders) == kernel


def test_what_the_caller_says_stands() -> None:
    with assumed(H100):
        assert kernel_of((14, 1447, 55), operator=gk.operators.WGMMAOp(64)) == "warp_specialised"
        assert kernel_of((14, 1447, 55), transform_global_to_shared_a=Elementwise(abs)) == "warp_specialised"
        assert kernel_of((500, 500, 500), operator=MMAOp()) == "singlestage"
        assert kernel_of((14, 1447, 55), dtype="f4") == "multistage"
        assert kernel_of((14, 1447, 55), epilogue=gk.epilogues.ReLU()) == "singlestage"
    with assumed(A100):
        assert kernel_of((14, 1447, 55)) == "multistage"
