"""Configurations that the kernels refuse: the error names the field, its value and what to do instead."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import ConfigError, epilogues, operators
from gemmkit.epilogues import ReLU
from gemmkit.kernels.spec import Condition
from gemmkit.lang.errors import ConfigError as ConfigError_of_swizzled_tiles_refused
from gemmkit.layouts import ColMajor, Padded, RowMajor, Swizzled
from gemmkit.operators import MIN_PLUS, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import A10, GPUS, H100, T4, assumed
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from gemmkit.tuning.choose import _tiles_of_group
from gemmkit.tuning.operators import operator_for
from tests.support.machines import BF16, E4M3, is_poison, poison
from tests.support.sm80 import F16, F32, mapping
from tests.support.sm90 import F16 as F16_OF_SM90_RULES
from tests.support.sm90 import F32 as F32_OF_SM90_RULES
from tests.support.sm90 import mapping as mapping_of_sm90_rules

# ==========================================================================================================================
# Which configurations the multistage kernel refuses, and what it says to do instead.

VOLTA = dataclasses.replace(H100, name="a V100", arch=(7, 0), shared_memory_per_block=98304)
KEPLER = dataclasses.replace(H100, name="a K80", arch=(3, 7), shared_memory_per_block=49152)


@dataclasses.dataclass(frozen=True)
class Largest(FPUOp):
    identity = start = float("-inf")

    def multiply(self, a, b):
        return a + b

    def combine(self, c, product):
        return max(c, product)


# a configuration's fields, and words of the refusal
RULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one stage": (dict(stages=1), ("stages=1", "2 to 8 stages")),
    "no stage": (dict(stages=0), ("stages=0",)),
    "nine stages": (dict(stages=9), ("stages=9", "2 to 8 stages")),
    "producer warps": (dict(producer_warps=4), ("producer_warps=4", "kernel='multistage' it must be 0")),
    "schedule": (dict(schedule="pingpong"), ("schedule='pingpong'", "it must be 'cooperative'")),
    "cluster": (dict(cluster=Tile(M=2, N=1)), ("cluster=Tile(M=2, N=1)", "kernel='multistage'")),
    "splits": (dict(splits=0), ("splits=0",)),
    "splits that cannot merge": (dict(operator=Largest(16, 16), steps=16, splits=2), ("splits=2", "merges = True", "splits=1")),
    "tiles": (dict(compute_warp=Tile(M=24, N=8, K=32)), ("operator=", "multiple of the operator's 16x8x16")),
    "warps": (dict(warps_per_block=3), ("warps_per_block=3", "among 2 warps")),
    "moves": (dict(mem_a_thread=Tile(M=1, K=3)), ("mem_a_thread=Tile(M=1, K=3)",)),
    "lines": (dict(shared_a_layout=Padded(RowMajor(F16), 4)), ("shared_a_layout", "pad by a multiple of 8 elements")),
    "8 bits across": (dict(operator=MMAOp(dtype="i1"), shared_a_layout=Padded(ColMajor("i1"), 16)), ("contiguous along K only",)),
    "opaque registers": (dict(operator=WMMAOp(), transform_shared_to_regs_a=Map(lambda x, i, j: x + i)),
                         ("transform_shared_to_regs_a", "use MMAOp")),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RULES)
def test_refusals(name: str) -> None:
    fields, words = RULES[name]
    with pytest.raises(gk.ConfigError) as caught:
        mapping(**{**dict(operator=MMAOp()), **fields})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_warpgroups_have_a_kernel_of_their_own() -> None:
    with pytest.raises(gk.ConfigError, match="operator=WGMMAOp.*kernel='warp_specialised'"):
        gk.get_config(operator=WGMMAOp(64), global_a_layout=RowMajor(F16), kernel="multistage")


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", range(2, 9))
def test_stages_that_there_are(stages: int) -> None:
    assert mapping(MMAOp(), stages=stages).stages == stages


# -- devices --------------------------------------------------------------------------------------------------------------

def test_gpus_before_the_kernel() -> None:
    """The single-stage kernel is on older GPUs, too."""
    conf = mapping(FPUOp(16, 16), steps=16)
    for refused in (lambda: mapping(FPUOp(16, 16), steps=16, device=VOLTA), lambda: conf.check_device(VOLTA), lambda: compile_config(conf, device=VOLTA)):
        with pytest.raises(gk.ConfigError, match=r"kernel='multistage': it needs compute capability 7.5, and a V100 has 7.0; use kernel='singlestage'"):
            refused()
    for device in (T4, A10):
        conf.check_device(device)
    assert gk.get_config(operator=FPUOp(16, 16), global_a_layout=RowMajor(F32), device=VOLTA).kernel == "singlestage"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernel", ["singlestage", "multistage"])
def test_gpus_before_every_kernel(kernel: str) -> None:
    with pytest.raises(gk.ConfigError, match=r"device='a K80': every kernel needs compute capability 5.0, and a K80 has 3.7"):
        gk.get_config(operator=FPUOp(16, 16), global_a_layout=RowMajor(F32), device=KEPLER, kernel=kernel)


@pytest.mark.sample(1)
@pytest.mark.parametrize("operator, instead", [(MMAOp(), r"MMAOp\(K=8\) or FPUOp"), (MMAOp(N=16), r"MMAOp\(N=16, K=8\) or FPUOp"),
                                               (MMAOp(dtype="i1"), r"MMAOp\(M=8, K=16, dtype='int8'\) or FPUOp"), (MMAOp(dtype="f8"), "FPUOp"),
                                               (operators.COMPLEX.with_base(MMAOp(dtype="f8", K=4)), "FPUOp")], ids=repr)
def test_operators_that_a_t4_lacks(operator: Any, instead: str) -> None:
    """The refusal names a shape of the same dtypes that the GPU has."""
    with pytest.raises(gk.ConfigError, match=rf"operator=.*its instructions need compute capability \d.0, and a T4 has 7.5; use {instead}$"):
        mapping(operator, device=T4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("operator", [MMAOp(K=8), MMAOp(M=8, K=16, dtype="i1"), FPUOp(16, 16), WMMAOp()], ids=repr)
def test_operators_that_a_t4_has(operator: Any) -> None:
    conf = gk.get_config(operator=operator, global_a_layout=RowMajor(operator.fragment_a.dtype), kernel="multistage", device=T4)
    assert conf.stages == 2 and conf.spec().shared_bytes <= T4.shared_memory_per_block


DTYPES = [np.dtype(code) for code in ("f2", "f4", "f8", "c8", "c16", "i1", "i4")] + [BF16]
SIZES = [(1, 1, 1), (128, 128, 128), (512, 512, 512), (4096, 4096, 4096), (8, 4096, 4096)]
ORDERS = list(itertools.product((RowMajor, ColMajor), repeat=2))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernel", ["singlestage", "multistage"])
@pytest.mark.parametrize("name", GPUS)
def test_default_mappings_fit(name: str, kernel: str) -> None:
    """Of every dtype, size and order, on every GPU, also where the kernel is named: `get_config` checks that they do."""
    for dtype, size, (a, b) in itertools.product(DTYPES, SIZES, ORDERS):
        operator = operator_for(dtype, dtype, size, GPUS[name])
        for shape in (dict(zip("MNK", size)), None):
            conf = gk.get_config(operator=operator, global_a_layout=a(dtype), global_b_layout=b(dtype), device=GPUS[name], kernel=kernel, gemm_shape=shape)
            assert conf.kernel == kernel


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", GPUS)
def test_what_matmul_chooses_fits(name: str) -> None:
    chosen = set()
    for dtype, (M, N, K), (a, b) in itertools.product(DTYPES, SIZES, ORDERS):
        left, right = (np.zeros(shape, dtype, order="CF"[order is ColMajor]) for shape, order in (((M, K), a), ((K, N), b)))
        with assumed(GPUS[name]), gk.emulate(mapping="device"):
            chosen.add(gk.plan(left, right).config.kernel)
    assert "multistage" in chosen


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", GPUS)
def test_tiles_of_groups_fit(name: str) -> None:
    """Where there are enough products for large tiles, and these do not fit, they are smaller."""
    matrix = np.zeros((128, 128))
    for dtype, (a, b) in itertools.product(DTYPES, ORDERS):
        operator = operator_for(dtype, dtype, (128, 128, 128), GPUS[name], 400)
        fields = next(_tiles_of_group(operator, [(matrix, matrix, None, None)] * 400, GPUS[name]))
        conf = gk.get_config(operator=operator, global_a_layout=a(dtype), global_b_layout=b(dtype), device=GPUS[name], **fields)
        assert conf.kernel == "multistage"


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

@pytest.mark.sample(1)
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
        gk.matmul(a, a, None, mapping(WMMAOp()), out=out, transform_shared_to_regs_a=Map(lambda x, i, j: x + i))
    assert (out == 7).all()


# ==========================================================================================================================
# Configurations that the warp-specialised kernel cannot carry out: the error names the field, its value and what would do.


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
                  "256 registers of accumulators, but 192 is the limit"),
    "registers of four warpgroups": ("three", dict(operator=WGMMAOp(256), stages=2), "operator=WGMMAOp(",
                                     "use a smaller N, or fewer warps"),
    "plain shared": ("one", dict(shared_a_layout=Padded(RowMajor(F16_OF_SM90_RULES), 8)), "shared_a_layout=Padded", "layouts.Swizzled"),
    "panels": ("one", dict(shared_a_layout=Swizzled(RowMajor(F16_OF_SM90_RULES), 128), depth=32), "shared_a_layout=Swizzled",
               "panels are 64 elements wide"),
    "parts of panels": ("one-2x1", dict(shared_b_layout=Swizzled(RowMajor(F16_OF_SM90_RULES), 64)), "cluster=Tile(M=2, N=1)",
                        "cannot be divided in 2"),
    "parts of lines": ("one-2x1", dict(operator=WGMMAOp(8), b=ColMajor), "cluster=Tile(M=2, N=1)", "cannot be divided in 2"),
    "thread of a": ("one", dict(mem_a_thread=T(M=2, K=4)), "mem_a_thread=Tile(M=2, K=4)", "2, 4, 8 or a multiple of 16 bytes"),
    "odd thread of b": ("one", dict(mem_b_thread=T(K=1, N=12)), "mem_b_thread=Tile(K=1, N=12)", "2, 4, 8 or a multiple of 16 bytes"),
    "plain d": ("one", dict(shared_d_layout=RowMajor(F32_OF_SM90_RULES)), "shared_d_layout=RowMajor", "Swizzled(RowMajor"),
    "columns of d": ("one", dict(shared_d_layout=Swizzled(ColMajor(F32_OF_SM90_RULES), 128)), "shared_d_layout=Swizzled", "Swizzled(RowMajor"),
    "type of d": ("one", dict(shared_d_layout=Swizzled(RowMajor(F16_OF_SM90_RULES), 64)), "shared_d_layout=Swizzled", "D is float32"),
    "panels of d": ("one", dict(operator=WGMMAOp(8), shared_d_layout=Swizzled(RowMajor(F32_OF_SM90_RULES), 64)), "shared_d_layout=Swizzled",
                    "panels are 16 elements wide"),
    "narrow panels of d": ("one", dict(d=RowMajor("f8"), shared_d_layout=Swizzled(RowMajor("f8"), 32)), "shared_d_layout=Swizzled",
                           "use a wider one"),
    "epilogue": ("one", dict(epilogue=OwnBlocks()), "epilogue=OwnBlocks()", "override finish or tile, or use MMAOp"),
    "condition": ("one-2x1", dict(condition=Sometimes()), "cluster=Tile(M=2, N=1)", "use Tile(M=1, N=1)"),
    "types": ("one", dict(global_a_layout=RowMajor(F32_OF_SM90_RULES)), "global_a_layout=RowMajor('float32')", "transform_global_to_shared_a"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_rule(name: str) -> None:
    schedule, fields, field, remedy = CASES[name]
    with pytest.raises(ConfigError) as caught:
        mapping_of_sm90_rules(schedule, **fields)
    message = str(caught.value)
    assert message.startswith(field) and remedy in message, message


def test_another_operator() -> None:
    with pytest.raises(ConfigError, match=r"^operator=MMAOp\(.*multiplies with WGMMAOp; use it, or kernel='singlestage'"):
        dataclasses.replace(mapping_of_sm90_rules("one"), operator=MMAOp())


def test_another_schedule() -> None:
    with pytest.raises(ConfigError, match="^schedule='ping-pong': the schedules are cooperative, pingpong"):
        dataclasses.replace(mapping_of_sm90_rules("one"), schedule="ping-pong")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["a", "b"])
def test_the_operator_and_the_shared_layouts_agree(name: str) -> None:
    """`get_config` sets one after the other; by hand they can differ."""
    conf = mapping_of_sm90_rules("one")
    major = "MN" if getattr(conf.operator, f"{name}_major") == "K" else "K"
    with pytest.raises(ConfigError, match=rf"^shared_{name}_layout=Swizzled.*the operator reads {name} {major}-major"):
        dataclasses.replace(conf, operator=dataclasses.replace(conf.operator, **{f"{name}_major": major}))


def test_shared_memory_is_counted() -> None:
    with pytest.raises(ConfigError, match=r"block_shape=.* needs \d+ bytes of shared memory .*use smaller tiles"):
        mapping_of_sm90_rules("one", stages=32)
    most = mapping_of_sm90_rules("one")
    assert most.spec().shared_bytes <= H100.shared_memory_per_block and most.stages > 2


def test_other_machines_are_refused() -> None:
    older = dataclasses.replace(H100, arch=(8, 0), name="an A100")
    with pytest.raises(ConfigError, match="operator=WGMMAOp.* need compute capability 9.0, and an A100 has 8.0"):
        gk.get_config(operator=WGMMAOp(64), global_a_layout=RowMajor(F16_OF_SM90_RULES), device=older)


def test_nothing_is_written() -> None:
    """An error leaves D as it was."""
    a, b, out = np.ones((64, 64), F16_OF_SM90_RULES), np.ones((64, 32), F16_OF_SM90_RULES), poison((64, 32), F32_OF_SM90_RULES)
    with gk.emulate():
        for fields in (dict(global_a_layout=RowMajor(F32_OF_SM90_RULES)), dict(epilogue=OwnBlocks()), dict(operator=MMAOp())):
            with pytest.raises(ConfigError):
                gk.matmul(a, b, None, mapping_of_sm90_rules("one"), out=out, **fields)
        with pytest.raises(ConfigError, match="condition"):
            gk.matmul(a, b, None, mapping_of_sm90_rules("one-2x1"), out=out, condition=Sometimes())
    assert is_poison(out)


def test_what_is_legal_is_legal() -> None:
    """The nearest that each rule allows."""
    for schedule, fields in [("one", dict(stages=2)), ("one", dict(producer_warps=8)), ("two", dict(producer_warps=8)),
                             ("one-2x1", dict(shared_b_layout=Swizzled(RowMajor(F16_OF_SM90_RULES), 32))),
                             ("one", dict(operator=WGMMAOp(32, E4M3, promote=256))), ("one", dict(condition=Sometimes())),
                             ("one", dict(mem_a_thread=T(M=1, K=1))), ("one", dict(operator=WGMMAOp(256))),
                             ("one", dict(operator=WGMMAOp(8), shared_d_layout=Swizzled(RowMajor(F32_OF_SM90_RULES), 32)))]:
        assert mapping_of_sm90_rules(schedule, **fields).is_pipeline                # type: ignore[arg-type]


# ==========================================================================================================================
# Kernels of mma.sync and of the ordinary units add the place of an element to that of its tile. A swizzle is no sum: with a
# swizzled shared layout they read other elements, and wrote wrong results where nothing lay beyond the tile.

OPERATORS = (operators.MMAOp(), "float16"), (operators.WMMAOp(), "float16"), (operators.FPUOp(), "float32")


def conf(kernel: str, operator: Any, dtype: str, **shared: Any) -> gk.Config:
    return gk.get_config(kernel=kernel, operator=operator, global_a_layout=RowMajor(dtype), global_b_layout=RowMajor(dtype),
                         global_c_layout=RowMajor("float32"), global_d_layout=RowMajor("float32"),
                         block_shape=Tile(M=64, N=64, K=32), warps_per_block=4, **shared)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernel", ["singlestage", "multistage"])
@pytest.mark.parametrize("operator, dtype", OPERATORS, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_swizzled_tiles(kernel: str, operator: Any, dtype: str) -> None:
    for name in "abcd":
        for order in (RowMajor, ColMajor):
            for width in (32, 64, 128):
                layout = Swizzled(order(dtype if name in "ab" else "float32"), width)
                named = "[cd]" if name == "d" else name       # (where C's is not given, it is D's)
                with pytest.raises(ConfigError_of_swizzled_tiles_refused, match=rf"shared_{named}_layout=Swizzled\(.*layouts.Padded"):
                    conf(kernel, operator, dtype, **{f"shared_{name}_layout": layout})
    assert conf(kernel, operator, dtype, shared_c_layout=Padded(RowMajor("float32"), 4)).kernel == kernel
