"""`get_config`: legal defaults for everything, every field overridable, every rule with its own words, a paste-able repr."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.components import freeze
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.collectives.scheduler import Columns, Grouped
from gemmkit.kernels.config import TRANSFORMS, Config
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, Padded, RowMajor, Zero
from gemmkit.operators import FPUOp, MMAOp, WMMAOp
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.tuning.operators import operator_for
from tests.support.machines import BF16

OPERATORS = [MMAOp(), MMAOp(accumulator="f2"), MMAOp(dtype=BF16), WMMAOp(), WMMAOp(8, 32), WMMAOp(32, 8, accumulator="f2"),
             WMMAOp(dtype=BF16), FPUOp(), FPUOp(64, 32), FPUOp(M=16, N=16, dtype="f2", accumulator="f4"),
             FPUOp(M=16, N=16, dtype="f8"), FPUOp(16, 16, 4, 2, 16, dtype="i1", accumulator="i4"), FPUOp(dtype="i8")]
SIZES = [None, (1, 1, 1), (10, 1000, 17), (64, 64, 64), (512, 512, 512), (16, 4096, 4096), (8192, 8192, 8192)]

# Everything that a configuration's repr may name.
NAMES = {**{name: getattr(module, name) for module in (layouts, operators, transforms, epilogues) for name in module.__all__},
         "Tile": Tile, "Columns": Columns, "Grouped": Grouped, "Condition": Condition, "get_config": gk.get_config}


def make(**fields: Any) -> gk.Config:
    return gk.get_config(**{**dict(operator=MMAOp(), global_a_layout=RowMajor("f2"), device=H100), **fields})


# -- defaults ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
@pytest.mark.parametrize("kinds", list(itertools.product((RowMajor, ColMajor), repeat=3)),
                         ids=lambda kinds: "".join(k.__name__[0] for k in kinds))
def test_defaults_are_legal_for_every_operator_order_and_size(operator: Any, kinds: Any) -> None:
    a, b, d = kinds
    for size in SIZES:
        conf = make(operator=operator, global_a_layout=a(operator.fragment_a.dtype),
                    global_b_layout=b(operator.fragment_b.dtype), global_d_layout=d(operator.accumulator),
                    gemm_shape=None if size is None else dict(zip("MNK", size)))
        conf.check_device(H100)
        assert conf.threads == 32 * conf.warps_per_block <= 1024
        assert conf.global_c_layout == Zero(operator.accumulator) and not conf.has_c


@pytest.mark.parametrize("dtypes", list(itertools.product(["f2", BF16, "f4", "f8", "i1", "u1", "i2", "i4", "i8", "u4"], repeat=2)),
                         ids=str)
def test_an_operator_is_found_for_every_pair_of_types(dtypes: Any) -> None:
    a, b = map(np.dtype, dtypes)
    for size in SIZES[1:]:
        try:
            operator = operator_for(a, b, size, H100)
        except TypeError as error:                                 # float16 and bfloat16 have no common type
            assert "no common type" in str(error) and {a, b} & {BF16}
            continue
        make(operator=operator, global_a_layout=RowMajor(a), global_b_layout=ColMajor(b), gemm_shape=dict(zip("MNK", size)))
        assert isinstance(operator, MMAOp) == (a == b and a in (np.dtype("f2"), BF16, np.dtype("f8")))


def test_defaults_follow_what_is_given() -> None:
    conf = make(global_a_layout=ColMajor("f2"))
    assert (conf.global_b_layout, conf.global_d_layout) == (ColMajor("f2"), ColMajor("f4"))
    assert conf.shared_a_layout == Padded(ColMajor("f2"), 8) and conf.shared_d_layout == Padded(ColMajor("f4"), 4)
    conf = make(operator=WMMAOp(), global_a_layout=RowMajor("f2"), global_b_layout=ColMajor("f2"))
    assert (conf.operator.a_order, conf.operator.b_order) == ("row", "col")
    conf = make(block_shape=Tile(M=64, N=32, K=32), warps_per_block=2)
    assert conf.compute_warp.MN == Tile(M=32, N=32) and conf.threads == 64
    few, many = (make(gemm_shape=dict(M=size, N=size, K=size)).block_shape.count for size in (64, 8192))
    assert few < many


# -- every field ------------------------------------------------------------------------------------------------------

OVERRIDES: dict[str, Any] = dict(
    global_a_layout=ColMajor("f2"), global_b_layout=ColMajor("f2"), global_c_layout=RowMajor("f4"),
    global_d_layout=ColMajor("f2"), operator=MMAOp(accumulator="f2"), block_shape=Tile(M=32, N=32, K=16), warps_per_block=4,
    compute_warp=Tile(M=32, N=64, K=64), shared_a_layout=Padded(ColMajor("f2"), 16), shared_b_layout=RowMajor("f2"),
    shared_c_layout=ColMajor("f4"), shared_d_layout=Padded(RowMajor("f4"), 8), mem_a_warp=Tile(M=32, K=8),
    mem_a_thread=Tile(M=1, K=4), mem_b_warp=Tile(K=8, N=32), mem_b_thread=Tile(K=1, N=2), mem_cd_warp=Tile(M=8, N=16),
    mem_cd_thread=Tile(M=1, N=2), order=Columns(), kernel="singlestage", blocks_per_sm=2,
    stages=1, schedule="cooperative", cluster=Tile(M=1, N=1), splits=1,
    producer_warps=0, observe_a=None, epilogue=epilogues.Epilogue(),
    condition=Condition(), **{name: transforms.Map(abs_ := (lambda x: x)) for name in TRANSFORMS})


def test_the_overrides_are_all_fields() -> None:
    assert set(OVERRIDES) == {field.name for field in dataclasses.fields(gk.Config)}


@pytest.mark.parametrize("name", OVERRIDES)
def test_every_field_can_be_given(name: str) -> None:
    assert getattr(make(**{name: OVERRIDES[name]}), name) == OVERRIDES[name]


def test_unknown_fields() -> None:
    with pytest.raises(TypeError) as caught:
        make(block_size=64, depth=2)
    assert "unknown fields block_size, depth" in str(caught.value) and "block_shape" in str(caught.value)


# -- repr -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields", [
    {}, dict(operator=WMMAOp(8, 32)), dict(operator=MMAOp(dtype=BF16), global_a_layout=ColMajor(BF16)),
    dict(operator=FPUOp(16, 32, 2, 2, 16, dtype="i1", accumulator="i4", b_dtype="u1"), global_a_layout=RowMajor("i1"),
         global_b_layout=ColMajor("u1")),
    dict(block_shape=Tile(M=64, N=64, K=32), order=Columns(), shared_a_layout=RowMajor("f2")),
    dict(order=Grouped(3), blocks_per_sm=2, global_c_layout=RowMajor("f4"), mem_cd_thread=Tile(M=1, N=2)),
    dict(gemm_shape=dict(M=100, N=10, K=1)),
], ids=str)
def test_a_repr_can_be_pasted_back(fields: dict[str, Any]) -> None:
    conf = make(**fields)
    again = eval(repr(conf), {}, NAMES)
    assert again == conf and repr(again) == repr(conf)
    assert freeze(again.spec()).fingerprint == freeze(conf.spec()).fingerprint


# -- rules ------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Unreadable(layouts.Layout):
    def store_element(self, data, i, j, value, shape):
        data[i, j] = value


@dataclasses.dataclass(frozen=True)
class Unwritable(layouts.Layout):
    def element(self, data, i, j, shape):
        return data[i, j]


BLOCK = Tile(M=64, N=64, K=32)
WHOLE = transforms.Map(lambda x, i, j: x + i)
RULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "operator class": (dict(operator=MMAOp), ("operator=<class", "an instance of Operator", "not the class itself")),
    "epilogue class": (dict(epilogue=epilogues.GELU), ("epilogue=<class", "an instance of Epilogue", "GELU(...)")),
    "epilogue list": (dict(epilogue=[epilogues.GELU()]), ("epilogue=[GELU()]", "several with | between")),
    "order": (dict(order="columns"), ("order='columns'", "an instance of Order is needed")),
    "condition": (dict(condition=max), ("condition=<built-in", "an instance of Condition is needed")),
    "kernel": (dict(kernel="fastest"), ("kernel='fastest'", "the kernels are singlestage, multistage, warp_specialised")),
    "transform": (dict(transform_regs_to_shared_d=abs), ("transform_regs_to_shared_d=", "transforms.Map")),
    "a tile": (dict(mem_a_thread=(1, 8)), ("mem_a_thread=(1, 8)", "a Tile is needed")),
    "global a": (dict(global_a_layout="row"), ("global_a_layout='row'", "a Layout is needed", "RowMajor('float16')")),
    "global b": (dict(global_b_layout=RowMajor), ("global_b_layout=<class", "a Layout is needed")),
    "unreadable": (dict(global_b_layout=Unreadable("f2")), ("global_b_layout=Unreadable('float16')", "neither element nor load")),
    "unwritable": (dict(global_d_layout=Unwritable("f4")), ("global_d_layout=Unwritable('float32')", "neither store_element nor")),
    "shared": (dict(shared_a_layout=Zero("f2")), ("shared_a_layout=Zero('float16')", "RowMajor, ColMajor or Padded")),
    "warps": (dict(warps_per_block=0), ("warps_per_block=0", "positive")),
    "warps bool": (dict(warps_per_block=True), ("warps_per_block=True", "positive")),
    "blocks per sm": (dict(blocks_per_sm=0), ("blocks_per_sm=0", "1 to 32")),
    "dimensions": (dict(block_shape=Tile(N=64, M=64, K=32)), ("block_shape=Tile(N=64, M=64, K=32)", "must be M, N, K")),
    "dimensions of a": (dict(mem_a_warp=Tile(K=64, M=4)), ("mem_a_warp=Tile(K=64, M=4)", "must be M, K")),
    "operator's shape": (dict(compute_warp=Tile(M=64, N=36, K=16)),
                         ("operator=MMAOp()", "compute_warp=Tile(M=64, N=36, K=16)", "16x8x16", "N=36 is not a multiple of 8")),
    "block": (dict(block_shape=BLOCK, compute_warp=Tile(M=48, N=32, K=16)),
              ("compute_warp=Tile(M=48, N=32, K=16)", "block_shape=Tile(M=64, N=64, K=32)", "M=64 is not a multiple of 48")),
    "number of warps": (dict(block_shape=BLOCK, compute_warp=Tile(M=32, N=32, K=16), warps_per_block=8),
                        ("warps_per_block=8", "among 4 warps")),
    "mem warp": (dict(mem_b_warp=Tile(K=3, N=128)), ("mem_b_warp=Tile(K=3, N=128)", "K=64 is not a multiple of 3")),
    "mem thread": (dict(mem_cd_warp=Tile(M=1, N=128), mem_cd_thread=Tile(M=1, N=3)),
                   ("mem_cd_thread=Tile(M=1, N=3)", "mem_cd_warp=Tile(M=1, N=128)", "N=128 is not a multiple of 3")),
    "dtype of a": (dict(global_a_layout=RowMajor("f4")), ("global_a_layout=RowMajor('float32')", "takes a as float16",
                                                          "gemmkit converts nothing silently", "transform_global_to_shared_a")),
    "shared dtype": (dict(shared_b_layout=Padded(RowMajor("f4"), 4)),
                     ("shared_b_layout=Padded(RowMajor('float32'), 4)", "MMAOp() loads float16")),
    "wmma accumulators": (dict(operator=WMMAOp(), shared_d_layout=Padded(RowMajor("f2"), 8)),
                          ("shared_c_layout=Padded(RowMajor('float16'), 8)", "accumulates in float32")),
    "complex d": (dict(operator=FPUOp(16, 16, dtype="c8"), global_a_layout=RowMajor("c8"), global_d_layout=RowMajor("f4")),
                  ("global_d_layout=RowMajor('float32')", "accumulates complex64", "imaginary part would be lost")),
    "complex c": (dict(global_c_layout=RowMajor("c8")),
                  ("global_c_layout=RowMajor('complex64')", "accumulates float32", "transform_global_to_shared_c")),
    "lines for ldmatrix": (dict(shared_a_layout=Padded(RowMajor("f2"), 4), mem_a_thread=Tile(M=1, K=4)),
                           ("shared_a_layout=Padded(RowMajor('float16'), 4)", "136 bytes long", "multiples of 16")),
    "lines for threads": (dict(operator=FPUOp(), global_a_layout=RowMajor("f4"), shared_d_layout=Padded(RowMajor("f4"), 1)),
                          ("shared_c_layout=Padded(RowMajor('float32'), 1)", "multiples of 16", "pad by a multiple of 4")),
    "lines for vectors": (dict(operator=FPUOp(), global_a_layout=ColMajor("f4"), mem_a_thread=Tile(M=1, K=1),
                               shared_a_layout=Padded(ColMajor("f4"), 3)),
                          ("shared_a_layout=Padded(ColMajor('float32'), 3)", "multiples of 16")),
    "opaque registers": (dict(operator=WMMAOp(), transform_shared_to_regs_c=WHOLE),
                         ("transform_shared_to_regs_c=", "does not say which element a register holds", "or use MMAOp")),
    "opaque results": (dict(operator=WMMAOp(), transform_regs_to_shared_d=WHOLE),
                       ("transform_regs_to_shared_d=", "does not say which element a register holds")),
    "shared memory": (dict(block_shape=Tile(M=256, N=256, K=256)),
                      ("block_shape=Tile(M=256, N=256, K=256)", "bytes of shared memory", "232448 a block", "smaller tiles")),
    "threads": (dict(block_shape=Tile(M=256, N=128, K=16), compute_warp=Tile(M=16, N=16, K=16)),
                ("warps_per_block=128", "4096 threads", "allows 1024")),
    "gemm_shape": (dict(gemm_shape=dict(M=1, N=2)), ("gemm_shape={'M': 1, 'N': 2}", "M, N and K are needed")),
    "a size": (dict(gemm_shape=dict(M=1, N=-2, K=3)), ("gemm_shape", "N=-2", "0 or more")),
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_names_field_value_and_rule(name: str) -> None:
    fields, says = RULES[name]
    tiles = dict(block_shape=Tile(M=128, N=128, K=64), compute_warp=Tile(M=64, N=32, K=16))
    with pytest.raises(gk.ConfigError) as caught:
        make(**{**tiles, **fields})
    for words in says:
        assert words in str(caught.value)


def test_orders_that_wmma_would_misread() -> None:
    """get_config sets the operator's orders; who replaces a shared layout afterwards has to replace them too."""
    conf = make(operator=WMMAOp())
    with pytest.raises(gk.ConfigError) as caught:
        dataclasses.replace(conf, shared_a_layout=Padded(ColMajor("f2"), 8))
    for words in ("shared_a_layout=Padded(ColMajor('float16'), 8)", "tiles of a in row order", "a_order='col'"):
        assert words in str(caught.value)


@pytest.mark.parametrize("make_it,says", [
    (lambda: FPUOp(MB=4, NB=4), ("FPUOp(MB=4, NB=4)", "MB * NB = 32")),
    (lambda: FPUOp(M=30), ("FPUOp(M=30, N=32)", "multiples of MB=4 and NB=8")),
    (lambda: FPUOp(K=0), ("FPUOp(K=0)", "1 or more")),
    (lambda: MMAOp(M=8), ("MMAOp(M=8, N=8, K=16)", "M=16, N=8 or 16, K=16")),
    (lambda: MMAOp(dtype="i2"), ("MMAOp(dtype=int16, accumulator=int32)", "float16 -> float32")),
    (lambda: MMAOp(dtype=BF16, accumulator="f2"), ("dtype=bfloat16, accumulator=float16", "bfloat16 -> float32")),
    (lambda: WMMAOp(M=8), ("WMMAOp(M=8, N=16, K=16)", "8x32x16")),
    (lambda: WMMAOp(dtype=BF16, accumulator="f2"), ("dtype=bfloat16, accumulator=float16", "bfloat16 -> float32")),
    (lambda: WMMAOp(a_order="rows"), ("a_order='rows'", '"row" or "col"')),
    (lambda: Padded(Zero("f2"), 8), ("Padded(layout=Zero('float16'))", "RowMajor or ColMajor")),
    (lambda: Padded(RowMajor("f2"), -1), ("Padded(padding=-1)", "0 or more")),
    (lambda: Grouped(0), ("Grouped(group=0)", "positive")),
    (lambda: epilogues.Bias(np.zeros(3), "K"), ("Bias(along='K')", '"M"')),
    (lambda: transforms.Map(3), ("Map(f=3)", "a function of x or of x, i, j")),
    (lambda: transforms.Map(lambda x, i: x), ("takes 2 arguments", "a function of x or of x, i, j")),
])
def test_parts_that_cannot_be(make_it: Any, says: tuple[str, ...]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make_it()
    for words in says:
        assert words in str(caught.value)


def test_a_mapping_goes_with_another_problem() -> None:
    """The two parts of a configuration are objects of their own."""
    config = gk.get_config(operator=operators.FPUOp(), global_a_layout=RowMajor("f4"))
    other = dataclasses.replace(config, epilogue=epilogues.ReLU())
    assert config.mapping == other.mapping and config.problem != other.problem
    assert Config.of(other.problem, config.mapping) == other
    assert repr(Config.of(config.problem, config.mapping)) == repr(config)
    wider = dataclasses.replace(config.mapping, blocks_per_sm=2)
    assert Config.of(config.problem, wider) == dataclasses.replace(config, blocks_per_sm=2)
    with pytest.raises(gk.ConfigError, match="blocks_per_sm"):
        Config.of(config.problem, dataclasses.replace(config.mapping, blocks_per_sm=0))


def test_repr_names_fields_in_one_order() -> None:
    config = gk.get_config(operator=operators.FPUOp(), global_a_layout=RowMajor("f4"), epilogue=epilogues.ReLU())
    names = re.findall(r"^    (\w+)=", repr(config), re.M)
    assert names[:6] == ["global_a_layout", "global_b_layout", "global_c_layout", "global_d_layout", "operator", "block_shape"]
    assert names[-1] == "epilogue"


@pytest.mark.parametrize("fields", [
    dict(), dict(splits=2), dict(splits=8), dict(stages=3), dict(global_b_layout=ColMajor("float16")),
    dict(global_a_layout=ColMajor("float16"), global_d_layout=RowMajor("float32")),
    dict(operator=operators.WGMMAOp(128, dtype="float32"), global_a_layout=RowMajor("float32"), global_b_layout=ColMajor("float32")),
    dict(operator=operators.WGMMAOp(64, dtype="int8"), global_a_layout=RowMajor("int8"), global_b_layout=ColMajor("int8")),
    dict(global_c_layout=RowMajor("float16")), dict(epilogue=epilogues.ReLU()), dict(splits=gk.kernels.StreamK())],
    ids=lambda fields: ",".join(fields) or "plain")
def test_a_specialisation_of_another_problem_is_taken_where_it_is_the_same(fields: dict[str, Any]) -> None:
    """Drawn arrays, of which many have the class of others: each gets what a fresh configuration makes for it."""
    conf = gk.get_config(**{**dict(operator=operators.WGMMAOp(), global_a_layout=RowMajor("float16"), device=H100), **fields})
    rng = np.random.default_rng(42)
    found = []
    for _ in range(60):
        M, N, K = (int(rng.integers(1, 40)) * int(rng.choice([1, 8, 8, 64, 64, 64])) for _ in range(3))

        def drawn(layout: Any, rows: int, columns: int) -> ArrayInfo:
            pad, shift = int(rng.choice([0, 0, 0, 1, 16])), int(rng.choice([0] * 9 + [2, 8]))
            strides = (columns + pad, 1) if layout.axis == 1 else (1, rows + pad)
            return ArrayInfo(4096 + shift * layout.dtype.itemsize, (rows, columns), strides, layout.dtype, 0, False, "cupy")

        c = drawn(conf.global_c_layout, M, N) if conf.has_c else None
        arrays = OperandArrays(drawn(conf.global_a_layout, M, K), drawn(conf.global_b_layout, K, N),
                        drawn(conf.global_d_layout, M, N), M, N, K, c, None, H100)
        fresh = dataclasses.replace(conf).spec(arrays)
        found.append(conf.spec(arrays))
        assert found[-1] == fresh and freeze(found[-1]).fingerprint == freeze(fresh).fingerprint
    shares = len(set(map(id, found))) < 60
    assert shares or not (set(fields) <= {"operator", "stages", *(f"global_{name}_layout" for name in "abd")})
