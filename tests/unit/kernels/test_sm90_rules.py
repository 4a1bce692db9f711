"""Configurations that the warp-specialised kernel cannot carry out: the error names the field, its value and what would do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import ConfigError, epilogues
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, Padded, RowMajor, Swizzled
from gemmkit.operators import MMAOp, WGMMAOp
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.machines import E4M3, is_poison, poison
from tests.support.sm90 import F16, F32, mapping


@dataclass(frozen=True)
class Sometimes(Condition):
    def __call__(self, m: int, n: int, k: int) -> bool:
        return m < k


@dataclass(frozen=True)
class OwnBlocks(epilogues.Epilogue):
    def store(self, spec: Any, d: Any, pointer: Any, block_m: int, block_n: int, warp: int, shape: Any) -> None:
        pass


T = Tile
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {       # name: (schedule, fields, field of the error, remedy)
    "kernel": ("one", dict(kernel="singlestage"), "operator=", "kernel='warp_specialised'"),
    "warps": ("one", dict(warps_per_block=6), "warps_per_block=6", "warpgroups of 4"),
    "too many warps": ("one", dict(warps_per_block=16, block_shape=T(M=256, N=32, K=64)), "warps_per_block=16", "one to three"),
    "ping-pong of one": ("pingpong", dict(warps_per_block=4), "warps_per_block=4", "8 warps"),
    "producers": ("one", dict(producer_warps=2), "producer_warps=2", "4 or 8 warps"),
    "no producers": ("one", dict(producer_warps=0), "producer_warps=0", "4 or 8 warps"),
    "three and two": ("three", dict(producer_warps=8), "producer_warps=8", "4 warps"),
    "one stage": ("one", dict(stages=1), "stages=1", "2 to 32 stages"),
    "many stages": ("one", dict(stages=33), "stages=33", "2 to 32 stages"),
    "cluster": ("one", dict(cluster=T(M=4, N=1)), "cluster=Tile(M=4, N=1)", "Tile(M=2, N=1)"),
    "rows": ("one", dict(block_shape=T(M=96, N=32, K=64), compute_warp=T(M=96, N=32, K=64)), "compute_warp=Tile(M=96",
             "multiple of 64"),
    "shares": ("two", dict(compute_warp=T(M=128, N=32, K=64)), "compute_warp=Tile(M=128", "2 warpgroups of M=128 rows"),
    "columns": ("one", dict(block_shape=T(M=64, N=64, K=64)), "operator=WGMMAOp(32", "its N must be that of block_shape"),
    "depth": ("one", dict(block_shape=T(M=64, N=32, K=24)), "block_shape=Tile(M=64, N=32, K=24)", "operator's 16"),
    "promotion": ("one", dict(operator=WGMMAOp(32, E4M3, promote=96)), "operator=WGMMAOp(32", "multiple of the block's K=128"),
    "registers": ("one", dict(operator=WGMMAOp(256), block_shape=T(M=128, N=256, K=64)), "compute_warp=Tile(M=128",
                  "256 registers of sums, and 192 is the limit"),
    "registers of four warpgroups": ("three", dict(operator=WGMMAOp(256), stages=2), "operator=WGMMAOp(",
                                     "take a smaller N, or fewer warps"),
    "plain shared": ("one", dict(shared_a_layout=Padded(RowMajor(F16), 8)), "shared_a_layout=Padded", "layouts.Swizzled"),
    "panels": ("one", dict(shared_a_layout=Swizzled(RowMajor(F16), 128), depth=32), "shared_a_layout=Swizzled",
               "panels are 64 elements wide"),
    "parts of panels": ("one-2x1", dict(shared_b_layout=Swizzled(RowMajor(F16), 64)), "cluster=Tile(M=2, N=1)",
                        "cannot be divided in 2"),
    "parts of lines": ("one-2x1", dict(operator=WGMMAOp(8), b=ColMajor), "cluster=Tile(M=2, N=1)", "cannot be divided in 2"),
    "thread of a": ("one", dict(mem_a_thread=T(M=2, K=4)), "mem_a_thread=Tile(M=2, K=4)", "2, 4, 8 or a multiple of 16 bytes"),
    "odd thread of b": ("one", dict(mem_b_thread=T(K=1, N=12)), "mem_b_thread=Tile(K=1, N=12)", "2, 4, 8 or a multiple of 16 bytes"),
    "plain d": ("one", dict(shared_d_layout=RowMajor(F32)), "shared_d_layout=RowMajor", "Swizzled(RowMajor"),
    "columns of d": ("one", dict(shared_d_layout=Swizzled(ColMajor(F32), 128)), "shared_d_layout=Swizzled", "Swizzled(RowMajor"),
    "type of d": ("one", dict(shared_d_layout=Swizzled(RowMajor(F16), 64)), "shared_d_layout=Swizzled", "D is float32"),
    "panels of d": ("one", dict(operator=WGMMAOp(8), shared_d_layout=Swizzled(RowMajor(F32), 64)), "shared_d_layout=Swizzled",
                    "panels are 16 elements wide"),
    "narrow panels of d": ("one", dict(d=RowMajor("f8"), shared_d_layout=Swizzled(RowMajor("f8"), 32)), "shared_d_layout=Swizzled",
                           "take a wider one"),
    "epilogue": ("one", dict(epilogue=OwnBlocks()), "epilogue=OwnBlocks()", "override finish or tile, or use MMAOp"),
    "condition": ("one-2x1", dict(condition=Sometimes()), "cluster=Tile(M=2, N=1)", "take Tile(M=1, N=1)"),
    "types": ("one", dict(global_a_layout=RowMajor(F32)), "global_a_layout=RowMajor('float32')", "transform_global_to_shared_a"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule(name: str) -> None:
    schedule, fields, field, remedy = CASES[name]
    with pytest.raises(ConfigError) as caught:
        mapping(schedule, **fields)
    message = str(caught.value)
    assert message.startswith(field) and remedy in message, message


def test_another_operator() -> None:
    with pytest.raises(ConfigError, match=r"^operator=MMAOp\(.*multiplies with WGMMAOp; take it, or kernel='singlestage'"):
        dataclasses.replace(mapping("one"), operator=MMAOp())


def test_another_schedule() -> None:
    with pytest.raises(ConfigError, match="^schedule='ping-pong': the schedules are cooperative, pingpong"):
        dataclasses.replace(mapping("one"), schedule="ping-pong")


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_operator_and_the_shared_layouts_agree(name: str) -> None:
    """`get_config` sets one after the other; by hand they can differ."""
    conf = mapping("one")
    major = "MN" if getattr(conf.operator, f"{name}_major") == "K" else "K"
    with pytest.raises(ConfigError, match=rf"^shared_{name}_layout=Swizzled.*the operator reads {name} {major}-major"):
        dataclasses.replace(conf, operator=dataclasses.replace(conf.operator, **{f"{name}_major": major}))


def test_shared_memory_is_counted() -> None:
    with pytest.raises(ConfigError, match=r"block_shape=.* needs \d+ bytes of shared memory .*take smaller tiles"):
        mapping("one", stages=32)
    most = mapping("one")
    assert most.spec().shared_bytes <= H100.shared_memory_per_block and most.stages > 2


def test_other_machines_are_refused() -> None:
    older = dataclasses.replace(H100, arch=(8, 0), name="an A100")
    with pytest.raises(ConfigError, match="operator=WGMMAOp.* need compute capability 9.0, and an A100 has 8.0"):
        gk.get_config(operator=WGMMAOp(64), global_a_layout=RowMajor(F16), device=older)


def test_nothing_is_written() -> None:
    """An error leaves D as it was."""
    a, b, out = np.ones((64, 64), F16), np.ones((64, 32), F16), poison((64, 32), F32)
    with gk.emulate():
        for fields in (dict(global_a_layout=RowMajor(F32)), dict(epilogue=OwnBlocks()), dict(operator=MMAOp())):
            with pytest.raises(ConfigError):
                gk.matmul(a, b, None, mapping("one"), out=out, **fields)
        with pytest.raises(ConfigError, match="condition"):
            gk.matmul(a, b, None, mapping("one-2x1"), out=out, condition=Sometimes())
    assert is_poison(out)


def test_what_is_legal_is_legal() -> None:
    """The nearest that each rule allows."""
    for schedule, fields in [("one", dict(stages=2)), ("one", dict(producer_warps=8)), ("two", dict(producer_warps=8)),
                             ("one-2x1", dict(shared_b_layout=Swizzled(RowMajor(F16), 32))),
                             ("one", dict(operator=WGMMAOp(32, E4M3, promote=256))), ("one", dict(condition=Sometimes())),
                             ("one", dict(mem_a_thread=T(M=1, K=1))), ("one", dict(operator=WGMMAOp(256))),
                             ("one", dict(operator=WGMMAOp(8), shared_d_layout=Swizzled(RowMajor(F32), 32)))]:
        assert mapping(schedule, **fields).is_pipeline                # type: ignore[arg-type]
