"""What a schedule says of itself: its tree, and the Config that does the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.specs.products import cuda_wmma_sample, maxwell_optimized
from tests.support.schedules import maxwell

WMMA = (("f2", "row"), ("f2", "col"), ("f4", "row"))
MAXWELL = (("f4", "col"),) * 3


def test_explain() -> None:
    text = cuda_wmma_sample.explain(*WMMA).splitlines()
    assert text[0] == "MatMul ([?,?].fp16.GL, [?,?].fp16.GL) -> ([?,?].fp32.GL) of a Kernel"
    assert "      .split(16): 8 steps, unrolled" in text
    assert "          MatMul ([16,16].fp16.FR, [16,16].fp16.FR) -> ([16,16].fp32.FR) of a Warp: wmma.mma.sync.aligned.m16n16k16" in text
    assert "            Move ([1,8].fp16.GL) -> ([1,8].fp16.SH) of a Thread: ld 16 bytes in GL, st 16 bytes in SH" in text
    assert text[-1] == "256 threads a block, 69632 bytes of shared memory"


def test_explain_a_micro_kernel_and_a_swizzle() -> None:
    text = maxwell_optimized.explain(*MAXWELL)
    assert "one for each Thread, column by column, renumbered by swizz" in text
    assert "([128,128].fp32.RF) -> ([128,128].fp32.GL) of a Block: store_cuda, a micro-kernel" in text
    assert "of a Thread: 64 fmaf" in text


def test_memory_is_used_again_behind_a_barrier() -> None:
    """A's and B's tiles are dead behind the loop's last barrier: the epilogue's 128 x 128 sums lie there."""
    assert "69632 bytes" in cuda_wmma_sample.explain(*WMMA) and 69632 == 2 * 128 * 136 * 2
    assert 128 * 128 * 4 < 69632


@pytest.mark.parametrize(("given", "words"), [((("f2", "rows"), *WMMA[1:]), "a=.*the order is 'row' or 'col'"),
                                              ((np.zeros((4, 4), "f2")[::2, ::2], *WMMA[1:]), "neighbours")])
def test_no_matrix(given: tuple, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        cuda_wmma_sample.explain(*given)


# -- as a Config ------------------------------------------------------------------------------------------------------

def test_the_config_of_the_wmma_listing() -> None:
    conf = cuda_wmma_sample.config(*WMMA)
    assert conf.kernel == "singlestage" and conf.warps_per_block == 8
    assert isinstance(conf.operator, operators.WMMAOp)
    assert (conf.block_shape, conf.compute_warp) == (gk.Tile(M=128, N=128, K=128), gk.Tile(M=64, N=32, K=16))
    assert conf.shared_a_layout == layouts.Padded(layouts.RowMajor("float16"), 8)
    assert (conf.mem_b_warp, conf.mem_b_thread) == (gk.Tile(K=128, N=2), gk.Tile(K=8, N=1))


@pytest.mark.parametrize(("schedule", "kinds", "words"), [
    (maxwell_optimized, MAXWELL, ["lie in pieces apart", "not renumbered", "the micro-kernel store_cuda", "products.py:"]),
    (maxwell(), MAXWELL, ["goes by shared memory"]),
    (maxwell(split_sync=False), MAXWELL, ["loop ends with a barrier"]),
    (maxwell(prefetch=True), MAXWELL, ["has one stage"]),
])
def test_what_does_not_fit(schedule: Any, kinds: tuple, words: list) -> None:
    with pytest.raises(gk.ConfigError) as caught:
        schedule.config(*kinds)
    assert all(word in str(caught.value) for word in words), caught.value
