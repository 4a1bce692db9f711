"""Which configurations the multistage kernel refuses, and what it says to do instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import operators
from gemmkit.epilogues import ReLU
from gemmkit.inspection import compile_config
from gemmkit.layouts import ColMajor, Padded, RowMajor
from gemmkit.operators import MIN_PLUS, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Elementwise
from tests.multistage import F16, F32, mapping

T4 = dataclasses.replace(H100, name="a T4", arch=(7, 5), shared_memory_per_block=65536)
A10 = dataclasses.replace(H100, name="an A10", arch=(8, 6), shared_memory_per_block=101376)


@dataclasses.dataclass(frozen=True)
class Largest(FPUOp):
    identity = start = float("-inf")

    def combine(self, c, product):
        return max(c, product)


# a configuration's fields, and words of the refusal
RULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one stage": (dict(stages=1), ("stages=1", "2 to 8 stages")),
    "no stage": (dict(stages=0), ("stages=0",)),
    "nine stages": (dict(stages=9), ("stages=9", "2 to 8 stages")),
    "producer warps": (dict(producer_warps=4), ("producer_warps=4", "kernel='multistage' it is 0")),
    "schedule": (dict(schedule="pingpong"), ("schedule='pingpong'", "it is 'cooperative'")),
    "cluster": (dict(cluster=Tile(M=2, N=1)), ("cluster=Tile(M=2, N=1)", "kernel='multistage'")),
    "splits": (dict(splits=0), ("splits=0",)),
    "splits that cannot merge": (dict(operator=Largest(16, 16), steps=16, splits=2), ("splits=2", "merges = True", "splits=1")),
    "tiles": (dict(compute_warp=Tile(M=24, N=8, K=32)), ("operator=", "multiple of the operator's 16x8x16")),
    "warps": (dict(warps_per_block=3), ("warps_per_block=3", "among 2 warps")),
    "moves": (dict(mem_a_thread=Tile(M=1, K=3)), ("mem_a_thread=Tile(M=1, K=3)",)),
    "lines": (dict(shared_a_layout=Padded(RowMajor(F16), 4)), ("shared_a_layout", "pad by a multiple of 8 elements")),
    "8 bits across": (dict(operator=MMAOp(dtype="i1"), shared_a_layout=Padded(ColMajor("i1"), 16)), ("contiguous along K only",)),
    "opaque registers": (dict(operator=WMMAOp(), transform_shared_to_regs_a=Elementwise(lambda x, i, j: x + i)),
                         ("transform_shared_to_regs_a", "use MMAOp")),
}


@pytest.mark.parametrize("name", RULES)
def test_refusals(name: str) -> None:
    fields, words = RULES[name]
    with pytest.raises(gk.ConfigError) as caught:
        mapping(**{**dict(operator=MMAOp()), **fields})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_warpgroups_have_a_kernel_of_their_own() -> None:
    with pytest.raises(gk.ConfigError, match="operator=WGMMAOp.*kernel='warp_specialised'"):
        gk.get_config(operator=WGMMAOp(64), global_a_layout=RowMajor(F16), kernel="multistage")


@pytest.mark.parametrize("stages", range(2, 9))
def test_stages_that_there_are(stages: int) -> None:
    assert mapping(MMAOp(), stages=stages).stages == stages


# -- devices --------------------------------------------------------------------------------------------------------------

def test_gpus_before_cp_async() -> None:
    """The ordinary units are on every GPU; the ring's copies are not."""
    conf = mapping(FPUOp(16, 16), steps=16)
    for refused in (lambda: mapping(FPUOp(16, 16), steps=16, device=T4), lambda: conf.check_device(T4), lambda: compile_config(conf, device=T4)):
        with pytest.raises(gk.ConfigError, match=r"kernel='multistage': it needs compute capability 8.0, and a T4 has 7.5; take kernel='singlestage'"):
            refused()
    conf.check_device(A10)
    assert gk.get_config(operator=FPUOp(16, 16), global_a_layout=RowMajor(F32), device=T4).kernel == "singlestage"


def test_operators_that_need_more_than_the_kernel() -> None:
    for operator in (MMAOp(dtype="f8"), MMAOp(dtype="float8_e4m3fn")):
        with pytest.raises(gk.ConfigError, match="operator=.*its instructions need compute capability"):
            mapping(operator, device=A10)


def test_a_ring_that_does_not_fit() -> None:
    fields: Any = dict(block_shape=Tile(M=128, N=128, K=64), compute_warp=Tile(M=64, N=64, K=64))
    with pytest.raises(gk.ConfigError, match=r"block_shape=.* needs \d+ bytes of shared memory .* and an A10 has 101376"):
        mapping(MMAOp(), stages=4, device=A10, **fields)
    assert mapping(MMAOp(), stages=2, device=A10, **fields).spec().shared_bytes <= A10.shared_memory_per_block


def test_splits_of_any_number_on_any_gpu() -> None:
    """Blocks share K by a workspace, and need no cluster."""
    assert mapping(MMAOp(), splits=3, device=A10).splits == 3


# -- what is filled in, and what may be replaced ------------------------------------------------------------------------------

@pytest.mark.parametrize("operator", [MMAOp(), MMAOp(dtype="f8"), MMAOp(dtype="i1"), FPUOp(32, 32), operators.FPUOp(16, 16, dtype="c8"), WMMAOp(),
                                      MIN_PLUS], ids=repr)
@pytest.mark.parametrize("order", [RowMajor, ColMajor])
def test_an_operator_and_a_layout_are_enough(operator: Any, order: Any) -> None:
    dtype = operator.fragment_a.dtype if operator is not MIN_PLUS else F32
    conf = gk.get_config(operator=operator, global_a_layout=order(dtype), kernel="multistage", gemm_shape=dict(M=512, N=512, K=512))
    assert conf.kernel == "multistage" and conf.stages > 1 and conf.compute_warp.size.K == conf.block_shape.size.K
    assert eval(repr(conf.block_shape), {"Tile": Tile}) == conf.block_shape


def test_it_takes_its_place_among_the_kernels() -> None:
    with pytest.raises(gk.ConfigError, match="the kernels are singlestage, multistage, warp_specialised"):
        gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), kernel="twostage")
    conf = mapping(MMAOp())
    assert dataclasses.replace(conf, epilogue=ReLU(), stages=4).stages == 4
    with pytest.raises(gk.ConfigError, match="stages=3"):
        dataclasses.replace(conf, kernel="singlestage")


def test_a_warp_multiplies_all_of_a_k_tile() -> None:
    """`get_config` makes it so of what is given; a configuration that says otherwise is refused."""
    conf = mapping(MMAOp(), compute_warp=Tile(M=16, N=8, K=16))
    assert conf.compute_warp.size.K == 32
    with pytest.raises(gk.ConfigError, match="compute_warp=.*K must be that of block_shape"):
        dataclasses.replace(conf, compute_warp=Tile(M=16, N=8, K=16))


def test_a_refused_product_writes_nothing() -> None:
    a, out = np.ones((8, 8), F16), np.full((8, 8), 7, F32)
    with gk.emulate(), pytest.raises(gk.ConfigError, match="transform_shared_to_regs_a.*use MMAOp"):
        gk.matmul(a, a, None, mapping(WMMAOp()), out=out, transform_shared_to_regs_a=Elementwise(lambda x, i, j: x + i))
    assert (out == 7).all()
