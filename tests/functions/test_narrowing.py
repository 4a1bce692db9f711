"""Results that their array cannot hold are refused before anything is written, unless a function or `Saturate` narrows them
by name: in both kernels, emulated and compiled."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.epilogues.base import ELEMENT
from gemmkit.kernels.collectives.operand import OperandArrays, kept_in_shared, transform_tile, transform_within
from gemmkit.kernels.spec import ProblemShape
from gemmkit.lang.number_rules import narrows
from gemmkit.ptx.arithmetic import saturate
from gemmkit.runtime.compile import assemble
from gemmkit.runtime.device import H100
from gemmkit.tiling import translate
from tests.support.harness import Out, Runtime, compiled, emulated, on_device, same_bits
from tests.support.machines import on_machines

SENTINEL, U1 = 77, np.dtype("u1")


def tiny(dtype: str, accumulator: str, out: str, **components: Any) -> gk.Config:
    fields = dict(global_a_layout=layouts.RowMajor(dtype), global_d_layout=layouts.RowMajor(out)) | components
    return gk.get_config(operator=operators.FPUOp(M=16, N=16, dtype=dtype, accumulator=accumulator), device=H100,
                         block_shape=gk.Tile(M=16, N=16, K=4), compute_warp=gk.Tile(M=16, N=16, K=4), **fields)


def run(dtype: str, accumulator: str, out: str, **components: Any) -> np.ndarray:
    """2 x 1 x 3, of which every element of D is 6."""
    a, d = np.full((3, 2), 3, dtype), np.full((3, 5), SENTINEL).astype(out)
    with gk.emulate():
        try:
            gk.matmul(a, np.ones((2, 5), dtype), conf=tiny(dtype, accumulator, out, **components), out=d)
        except Exception:
            assert (d == np.full((), SENTINEL).astype(out)).all()
            raise
    return d


def compiles(*types: str, **components: Any) -> str:
    """The PTX of what becomes of one sum."""
    spec = tiny(*types, **components).spec(OperandArrays(None, None, None, 256, 256, 256))
    return compiled(finishing, Out((16, 16), types[2]), spec, np.dtype(types[1]).type(1), ProblemShape(16, 16, 8))


def finishing(out: Any, spec: Any, x: Any, shape: Any) -> None:
    """Steps 5 and 6 of the single-stage kernel, for one element."""
    tile = translate(ELEMENT, 0, 0)
    values = kept_in_shared(spec, transform_tile(spec.d.to_registers, (x,), tile))
    spec.epilogue.tile(spec, out, tile, transform_within(spec.d.to_shared, values, tile, shape.M, shape.N), shape)


# -- the rule ----------------------------------------------------------------------------------------------------------

FLOATS = tuple(map(np.dtype, ("f2", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "f4", "f8")))
INTEGERS = tuple(map(np.dtype, ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")))
BOOL = np.dtype(bool)


@pytest.mark.parametrize("given,wanted", [*itertools.product((*FLOATS, *INTEGERS, BOOL), repeat=2)], ids=str)
def test_the_rule(given: np.dtype, wanted: np.dtype) -> None:
    """Floats hold everything, integers what has room in them for every value."""
    if wanted in FLOATS:
        expected = False
    elif given in FLOATS or wanted == BOOL:
        expected = given != wanted
    elif given == BOOL:
        expected = False
    else:
        low, high = np.iinfo(given).min, np.iinfo(given).max
        expected = low < np.iinfo(wanted).min or high > np.iinfo(wanted).max
    assert narrows(given, wanted) is expected


# -- refused -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, Any] = {
    "float sums into an integer": (("f4", "f4", "i4"), {}),
    "wide sums into a narrow integer": (("i1", "i4", "i1"), {}),
    "signed into unsigned": (("i4", "i4", "u4"), {}),
    "unsigned into signed": (("u1", "u1", "i1"), {}),
    "sums into bool": (("i4", "i4", "?"), {}),
    "a float function of integers": (("i4", "i4", "i4"), dict(epilogue=epilogues.Elementwise(lambda x: x * np.float32(0.5)))),
    "a function that widens": (("i1", "i1", "i1"), dict(epilogue=epilogues.Elementwise(lambda x: np.int16(x)))),
    "a transform to global memory": (("i4", "i4", "i4"), dict(
        transform_shared_to_global_d=transforms.Map(lambda x: math.sqrt(x)))),
    "a transform to shared memory": (("i4", "i4", "f4"), dict(
        transform_regs_to_shared_d=transforms.Map(lambda x: x * np.float64(0.5)))),
    "a shipped epilogue": (("i4", "i4", "i4"), dict(epilogue=epilogues.Scale(0.5))),
    "an activation of floats": (("f4", "f4", "i4"), dict(epilogue=epilogues.ReLU())),
    "less than was asked for": (("f4", "f4", "i1"), dict(epilogue=epilogues.Saturate("int16"))),
    "widened again": (("i4", "i4", "i1"), dict(epilogue=epilogues.Saturate("int8") | epilogues.Elementwise(
        lambda x: np.int32(x)))),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("world", [run, compiles])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, world: Any) -> None:
    dtypes, components = REFUSED[name]
    with pytest.raises(gk.ConfigError) as caught:
        world(*dtypes, **components)
    told = str(caught.value)
    assert told.startswith(("out (global_d_layout", "shared_d_layout")) and "use epilogues.Saturate(" in told


def test_a_plain_product_is_refused_as_a_configuration() -> None:
    """Before any array is looked at."""
    with pytest.raises(gk.ConfigError, match=r"out \(global_d_layout=RowMajor\('int8'\)\) holds int8 and would get int32 values"):
        tiny("i1", "i4", "i1")
    a = np.ones((3, 3), np.float32)
    with gk.emulate(), pytest.raises(gk.ConfigError, match="holds int32 and would get float32 values"):
        gk.matmul(a, a, out=np.zeros((3, 3), np.int32))


def put(out: Any, given: Any) -> None:
    out[0] = given                        # STORED


def storing(out: Any, given: Any) -> None:
    put(out, given)


def storing_by_name(out: Any, given: Any) -> None:
    out[0] = np.int8(given)
    out[1] = 100
    out[2] = True


def test_a_store_of_the_users_is_refused_with_its_line() -> None:
    for given in (np.float32(1), np.int16(1), np.uint8(1), Runtime(0.5)):
        for world in (lambda *arguments: emulated(*arguments, threads=1), compiled):
            with pytest.raises(gk.ComponentError) as caught:
                world(storing, Out((3,), "i1"), given)
            lines = str(caught.value).splitlines()
            assert f'File "{__file__}"' in lines[1] and lines[2].endswith("# STORED")
            assert lines[-1].startswith("  this array holds int8 and would get ")
    assert emulated(storing_by_name, Out((3,), "i1"), np.float32(3), threads=1)[0].tolist() == [3, 100, 1]
    assert "st.global" in compiled(storing_by_name, Out((3,), "i1"), np.float32(3))


def test_a_second_output_is_refused_by_its_name() -> None:
    kept = np.zeros((3, 5), np.int8)
    for world in (run, compiles):
        with pytest.raises(gk.ConfigError, match="^array of Store holds int8 and would get float32"):
            world("f4", "f4", "f4", epilogue=epilogues.Store(kept))
    assert not kept.any()


def test_blas() -> None:
    a, c = np.ones((3, 3), np.int8), np.zeros((3, 3), np.int8)
    wide = operators.FPUOp(M=16, N=16, dtype="i1", accumulator="i4")
    with gk.emulate():
        with pytest.raises(gk.ConfigError, match="^c holds int8 and would get int32"):
            gk.blas.gemmEx("N", "N", 1, a, a, 0, c, operator=wide)
        with pytest.raises(ValueError, match="^alpha is 0.5 and c holds int8: a whole number"):
            gk.blas.gemmEx("N", "N", 0.5, a, a, 0, c)
        with pytest.raises(ValueError, match="^beta is 300 and c holds int8: a whole number from -128 to 127"):
            gk.blas.gemmEx("N", "N", 1.0, a, a, 300, c)
        with pytest.raises(ValueError, match="^alpha is nan"):
            gk.blas.gemmEx("N", "N", math.nan, a, a, 0, c)
        with pytest.raises(gk.ConfigError, match="^c holds int32 and would get float32"):
            gk.blas.gemmEx("N", "N", 1, a.astype(np.float32), a.astype(np.float32), 0, c.astype(np.int32))
        assert not c.any()
        assert (gk.blas.gemmEx("N", "N", 2.0, a, a, np.int64(-1), c) == 6).all()
    with pytest.raises(TypeError, match="LinearCombination.alpha=0.5.: C holds int8"):
        epilogues.LinearCombination(0.5, 0, c, layouts.RowMajor("int8"))


# -- taken -------------------------------------------------------------------------------------------------------------

def by_name(x: Any) -> Any:
    return np.int8(x)


TAKEN: dict[str, Any] = {
    "float16": (("f4", "f4", "f2"), {}),
    "float8": (("f4", "f4", "float8_e4m3fn"), {}),
    "integers into a float": (("i4", "i4", "f4"), {}),
    "into a wider integer": (("i1", "i1", "i4"), {}),
    "unsigned into a wider signed": (("u1", "u1", "i2"), {}),
    "by name in an epilogue": (("f4", "f4", "i1"), dict(epilogue=epilogues.Elementwise(by_name))),
    "by name on the way to shared memory": (("i4", "i4", "i1"), dict(
        transform_regs_to_shared_d=transforms.Map(by_name))),
    "by name on the way from there": (("f4", "f4", "i1"), dict(transform_shared_to_global_d=transforms.Map(by_name))),
    "a literal that fits": (("i4", "i4", "i1"), dict(epilogue=epilogues.Elementwise(lambda x: 6))),
    "saturated": (("f4", "f4", "i1"), dict(epilogue=epilogues.Saturate("int8"))),
    "saturated early": (("i4", "i4", "u2"), dict(transform_regs_to_shared_d=transforms.Map(
        lambda x: saturate(U1, x)))),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    dtypes, components = TAKEN[name]
    assert (run(*dtypes, **components) == 6).all()
    assert "st.global" in compiles(*dtypes, **components)


# -- Saturate ----------------------------------------------------------------------------------------------------------

def reference(values: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """What `Saturate` documents, by NumPy in long doubles."""
    given = values.astype(np.longdouble)
    if wanted in FLOATS:
        limit = np.longdouble(float(ml_dtypes.finfo(wanted).max))
        return np.clip(given, -limit, limit).astype(values.dtype if values.dtype in FLOATS else "f8").astype(wanted)
    limits = np.iinfo(wanted)
    clipped = np.clip(np.rint(given), np.longdouble(limits.min), np.longdouble(limits.max))
    return np.array([0 if np.isnan(x) else int(x) for x in clipped], wanted)


def samples(dtype: np.dtype) -> np.ndarray:
    """Values at the limits of all dtypes and half-way between integers, both infinities and NaN; 64 of them and more."""
    limits = [float(end) for of in INTEGERS for end in (np.iinfo(of).min, np.iinfo(of).max)]
    if dtype in FLOATS:
        near = [x + d for x in (-129, -128, 0, 127, 255, 256, 32767, 65535, 65504) for d in (-1, -0.5, 0, 0.5, 1)]
        with np.errstate(all="ignore"):
            return np.array([*limits, *near, 2.5, 3.5, -2.5, math.inf, -math.inf, math.nan]).astype(dtype)
    own = np.iinfo(dtype)
    whole = sorted({min(max(int(x) + d, own.min), own.max) for x in limits for d in (-1, 0, 1)})
    return np.array(whole, dtype)


def saturating(out: Any, given: Any, dtype: Any) -> None:
    for n in range(given.shape[0]):
        out[n] = saturate(dtype, given[n])


PAIRS = list(itertools.product((*(np.dtype(d) for d in ("f2", "f4", "f8")), *INTEGERS), (
    *INTEGERS, np.dtype("f2"), np.dtype(ml_dtypes.float8_e4m3fn))))


@pytest.mark.parametrize("given,wanted", PAIRS, ids=str)
def test_saturate_by_numpy(given: np.dtype, wanted: np.dtype) -> None:
    values = samples(given)
    found = np.array([saturate(wanted, x) for x in values], wanted)
    assert same_bits(found, reference(values, wanted)), (values, found)


@pytest.mark.gpu
@pytest.mark.sample(22)
@pytest.mark.parametrize("given,wanted", PAIRS, ids=str)
def test_saturate_on_the_device(given: np.dtype, wanted: np.dtype) -> None:
    values = samples(given)
    (found,) = on_device(saturating, Out(values.shape, wanted), values, wanted, threads=1)
    assert same_bits(found, reference(values, wanted)), (values, found)


def all_saturating(out: Any, single: Any, double: Any) -> None:
    out[0] = saturate(np.int8, single[0]) + np.int64(0)
    out[1] = saturate(np.uint8, single[1]) + np.int64(0)
    out[2] = saturate(np.int16, single[2]) + np.int64(0)
    out[3] = saturate(np.uint16, single[3]) + np.int64(0)
    out[4] = saturate(np.int32, single[4]) + np.int64(0)
    out[5] = saturate(np.uint32, single[5]) + np.int64(0)
    out[6] = saturate(np.int64, single[6])
    out[7] = saturate(np.int8, double[0]) + np.int64(0)
    out[8] = saturate(np.int64, double[1])
    out[9] = saturate(np.int8, saturate(np.int32, single[7])) + np.int64(0)


@pytest.mark.compile
def test_the_instructions() -> None:
    """One conversion each, which rounds and clamps; a NaN is looked at only where the instruction makes no 0 of it."""
    ptx = compiled(all_saturating, Out((10,), "i8"), np.zeros(10, "f4"), np.zeros(10, "f8"))
    for name in ("s8", "u8", "s16", "u16", "s32", "u32", "s64"):
        assert f"cvt.rni.sat.{name}.f32" in ptx
    assert ptx.count("cvt.rni.sat.s8.f64") == ptx.count("cvt.rni.sat.s64.f64") == 1
    assert ptx.count("nan.f") == 3
    assert assemble(ptx).usage.stack_bytes == 0


@pytest.mark.parametrize("dtype", ["?", "c8", "O", "U4", "int7", [("x", "f4")]], ids=str)
def test_what_saturate_does_not_take(dtype: Any) -> None:
    with pytest.raises(TypeError, match="^Saturate"):
        epilogues.Saturate(dtype)


QUANTISED = {
    "singlestage": dict(operator=operators.FPUOp(M=16, N=16, dtype="i1", accumulator="i4"), kernel="singlestage",
                        block_shape=gk.Tile(M=16, N=16, K=16), compute_warp=gk.Tile(M=16, N=16, K=16)),
    "warp_specialised": dict(operator=operators.WGMMAOp(32, dtype="int8"), kernel="warp_specialised"),
}


@on_machines
@pytest.mark.parametrize("kernel", QUANTISED)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_quantised_product(machine: Any, kernel: str, order: str, rng: np.random.Generator) -> None:
    """int8 by int8, sums of 32 bits, scaled, rounded and clamped: bit for bit what NumPy makes of it."""
    M, N, K = 13, 17, 16
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((M, K), (N, K)))
    scale = np.float32(1 / 256)                           # exact, so that ties are met
    sums = a.astype(np.int32) @ b.T.astype(np.int32)
    expected = np.clip(np.rint(sums * np.float64(scale)), -128, 127).astype(np.int8)
    assert (expected == 127).any() and (expected == -128).any() and (np.abs(expected) < 100).any()
    layout = (layouts.RowMajor if order == "C" else layouts.ColMajor)("int8")
    conf = gk.get_config(global_a_layout=layouts.RowMajor("int8"), global_b_layout=layouts.ColMajor("int8"), device=H100,
                         global_d_layout=layout, gemm_shape=dict(M=M, N=N, K=K),
                         epilogue=epilogues.Scale(scale) | epilogues.Saturate("int8"), **QUANTISED[kernel])
    out = machine.array(np.full((M, N), 55, np.int8, order=order))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b).T, conf=conf, out=out)
    assert np.array_equal(machine.numpy(out), expected)


@pytest.mark.parametrize("value,expected", [(math.nan, 0), (math.inf, 127), (-math.inf, -128), (2.5, 2), (3.5, 4)])
def test_what_is_not_finite(value: float, expected: int) -> None:
    found = run("f4", "f4", "i1", epilogue=epilogues.Elementwise(lambda x: x * 0 + np.float32(value))
                | epilogues.Saturate("int8"))
    assert (found == expected).all()


@pytest.mark.parametrize("dtype", [None, np.float32(2), "O", "c8", bool, "f4,f4"], ids=str)
def test_what_saturate_cannot_make(dtype: Any) -> None:
    """NumPy takes None for float64, and the dtype of any number."""
    with pytest.raises(TypeError, match=r"Saturate\(dtype=.*: an integer or a float that device code has is needed"):
        epilogues.Saturate(dtype)
