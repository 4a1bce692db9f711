"""Bad input: the right exception, whose message names the argument, what it got and the remedy; `out` stays untouched.

Everything is checked before anything is launched, so most of it needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.operators import DUAL, FPUOp, MMAOp
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.machines import is_poison, poison
from tests.support.patches import Seeded, Set

F16, F32 = np.dtype("f2"), np.dtype("f4")


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def refused(error: type[Exception], a: Any, b: Any, c: Any = None, conf: Any = None, *, says: tuple[str, ...],
            out: Any = None, **keywords: Any) -> None:
    """matmul and plan both refuse, in these words, and leave out as it is."""
    out = poison((4, 5), F32) if out is None else out
    memory = np.array(out) if isinstance(out, np.ndarray) else None
    for call in (gk.matmul, gk.plan):
        with gk.emulate(), pytest.raises(error) as caught:
            call(a, b, c, conf, out=out, **keywords)
        message = str(caught.value)
        for words in says:
            assert words in message, message
    if memory is not None:
        assert np.array_equal(out, memory, equal_nan=memory.dtype.kind == "f")


# -- shapes -----------------------------------------------------------------------------------------------------------

@pytest.mark.sample(1)
@pytest.mark.parametrize("a,b,c,out,says", [
    ((4, 3), (6, 5), None, (4, 5), ("b has shape (6, 5)", "K=6 rows", "a says K=3")),
    ((4, 3), (3, 5), (5, 4), (4, 5), ("c has shape (5, 4)", "M=5 rows", "a says M=4")),
    ((4, 3), (3, 5), (4, 6), (4, 5), ("c has shape (4, 6)", "N=6 columns", "b says N=5")),
    ((4, 3), (3, 5), None, (5, 4), ("out has shape (5, 4)", "M=5", "a says M=4")),
    ((4, 3), (3, 5), None, (4, 1), ("out has shape (4, 1)", "N=1", "b says N=5")),
    ((4, 3), (3, 5), (4, 1), (4, 5), ("c has shape (4, 1)", "N=1", "b says N=5")),        # nothing is broadcast
])
def test_shapes_that_do_not_fit(a: Any, b: Any, c: Any, out: Any, says: tuple[str, ...]) -> None:
    refused(ValueError, ones(*a), ones(*b), None if c is None else ones(*c), out=poison(out, F32),
            says=(*says, "a is (M, K), b is (K, N), c and out are (M, N)"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name,shape,count", [("a", (), 0), ("b", (), 0), ("c", (5,), 1), ("out", (4, 5, 1), 3)])
def test_a_number_of_dimensions_other_than_two(name: str, shape: tuple[int, ...], count: int) -> None:
    arrays = {"a": ones(4, 3), "b": ones(3, 5), "c": ones(4, 5), "out": poison((4, 5), F32)}
    arrays[name] = poison(shape, F32)
    refused(ValueError, *(arrays[n] for n in "abc"), out=arrays["out"],
            says=(f"{name} has {count} dimensions", "a matrix of 2 is needed", "v[:, None]"))


def test_a_gemm_shape_that_is_none() -> None:
    a, b = ones(4, 3), ones(3, 5)
    refused(gk.ConfigError, a, b, gemm_shape=dict(M=4, N=5), says=("gemm_shape={'M': 4, 'N': 5}", "M, N and K are needed"))
    refused(gk.ConfigError, a, b, gemm_shape=dict(M=4, N=-5, K=3), says=("gemm_shape: N=-5", "0 or more"))
    refused(gk.ConfigError, a, b, gemm_shape=dict(M=4, N=5, K=3.0), says=("gemm_shape: K=3.0", "0 or more"))
    refused(ValueError, a, b, gemm_shape=dict(M=4, N=5, K=6), says=("a has shape (4, 3)", "gemm_shape says K=6"))


def test_sizes_that_the_layouts_leave_open() -> None:
    @dataclass(frozen=True)
    class Constant(layouts.Layout):
        def element(self, data, i, j, shape):
            return data[0]

    layout = Constant(F32)
    refused(gk.ConfigError, ones(1), ones(1), global_a_layout=layout, global_b_layout=layout,
            says=("gemm_shape=None: K cannot be told", "give gemm_shape=dict(M=..., N=..., K=...)"))


# -- types ------------------------------------------------------------------------------------------------------------

@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["M8[s]", "m8[s]"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_dtype_that_no_operator_takes(name: str, dtype: str) -> None:
    arrays = {"a": ones(4, 3), "b": ones(3, 5)}
    arrays[name] = arrays[name].astype(dtype)
    refused(TypeError, *arrays.values(), says=(f"{name} has dtype {np.dtype(dtype)}", "the operators take"))


def test_a_dtype_that_the_operator_does_not_take() -> None:
    refused(gk.ConfigError, ones(4, 3), ones(3, 5, dtype=F16), operator=MMAOp(),
            says=("global_a_layout=RowMajor('float32')", "the operator takes a as float16", "gemmkit converts nothing silently",
                  "choose an operator of dtype float32", "transform_global_to_shared_a"))
    refused(gk.ConfigError, ones(4, 3, dtype=F16), ones(3, 5), operator=MMAOp(),
            says=("global_b_layout=RowMajor('float32')", "the operator takes b as float16"))


def test_an_imaginary_part_is_not_dropped_silently() -> None:
    a, b = ones(4, 3, dtype="c8"), ones(3, 5)
    refused(gk.ConfigError, a, b, says=("global_d_layout=RowMajor('float32')", "accumulates complex64", "use a complex layout"))
    refused(gk.ConfigError, a, b, epilogue=epilogues.Bias(ones(5)), says=("global_d_layout=RowMajor('float32')", "an epilogue"))
    refused(gk.ConfigError, ones(4, 3), b, ones(4, 5, dtype="c8"),
            says=("global_c_layout=RowMajor('complex64')", "accumulates float32", "convert the array"))


def test_types_without_a_common_one() -> None:
    from tests.support.machines import BF16

    refused(TypeError, ones(4, 3, dtype=F16), ones(3, 5, dtype=BF16),
            says=("a is float16 and b is bfloat16", "no common type", "convert one of them"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [[[1.0]], 1.0, None, "x", np.ndarray, object()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("name", ["a", "b"])
def test_what_is_no_array(name: str, value: Any) -> None:
    arrays = {"a": ones(4, 3), "b": ones(3, 5)}
    refused(TypeError, *{**arrays, name: value}.values(), says=(f"{name} must be", "CuPy array", "got "))


def test_foreign_byte_order() -> None:
    refused(ValueError, ones(4, 3, dtype=">f4"), ones(3, 5), says=("a has dtype >f4", "another byte order", ".astype"))


def test_strides_that_are_no_whole_elements() -> None:
    a = np.zeros((4, 3), [("x", "i1"), ("y", "f4")])["y"]
    refused(ValueError, a, ones(3, 5), says=("a has strides (15, 5) bytes", "not multiples of its itemsize 4", "a.copy()"))


# -- out --------------------------------------------------------------------------------------------------------------

def test_a_read_only_out() -> None:
    out = poison((4, 5), F32)
    out.flags.writeable = False
    refused(ValueError, ones(4, 3), ones(3, 5), out=out, says=("out is read-only", "give a writable array"))


def test_an_out_that_overlaps() -> None:
    memory = ones(12, 4)
    a, b = memory[:4], memory[4:8]
    says = ("in memory", "while others write out")
    refused(ValueError, a, b, out=memory[3:7], says=("out overlaps a", *says))
    refused(ValueError, a, b, out=memory[7:11], says=("out overlaps b", *says))
    refused(ValueError, a, b, memory[8:], out=memory[8:].T, says=("out overlaps c", *says))
    refused(ValueError, a, a, out=a, says=("out overlaps a", *says))


def test_an_out_whose_elements_share_memory() -> None:
    out = np.lib.stride_tricks.as_strided(poison((5,), F32), (4, 5), (0, 4))
    refused(ValueError, ones(4, 3), ones(3, 5), out=out, says=("out has strides (0, 1)", "share memory"))


def test_an_out_of_another_dtype_than_its_layout() -> None:
    conf = gk.get_config(operator=FPUOp(), global_a_layout=layouts.RowMajor(F32))
    refused(ValueError, ones(4, 3), ones(3, 5), None, conf, out=poison((4, 5), "f8"),
            says=("out has dtype float64", "its layout is RowMajor('float32')", "convert the array", "a layout of dtype float64"))


# -- configurations ---------------------------------------------------------------------------------------------------

def configuration(**fields: Any) -> gk.Config:
    return gk.get_config(**{**dict(operator=FPUOp(), global_a_layout=layouts.RowMajor(F32)), **fields})


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["a", "b", "c", "out"])
def test_a_configuration_for_another_layout_than_the_arrays(name: str) -> None:
    conf = configuration(global_c_layout=layouts.RowMajor(F32))
    arrays = {"a": ones(4, 3), "b": ones(3, 5), "c": ones(4, 5), "out": poison((4, 5), F32)}
    arrays[name] = np.asfortranarray(arrays[name])
    refused(gk.ConfigError, *(arrays[n] for n in "abc"), conf, out=arrays["out"],
            says=(f"{name} is column-major", f"global_{'d' if name == 'out' else name}_layout=RowMajor('float32')", "use ColMajor"))
    conf = configuration(**{f"global_{n}_layout": layouts.ColMajor(F32) for n in "abcd"})
    arrays = {n: np.asfortranarray(x) if n != name else np.ascontiguousarray(x) for n, x in arrays.items()}
    refused(gk.ConfigError, *(arrays[n] for n in "abc"), conf, out=arrays["out"],
            says=(f"{name} is row-major", f"global_{'d' if name == 'out' else name}_layout=ColMajor('float32')", "use RowMajor"))


def test_a_configuration_of_another_dtype_than_the_arrays() -> None:
    refused(ValueError, ones(4, 3, dtype="f8"), ones(3, 5), None, configuration(),
            says=("a has dtype float64", "its layout is RowMajor('float32')", "convert the array"))


def test_shared_memory_over_the_devices_limit() -> None:
    large = dict(operator=FPUOp(dtype="f8"), global_a_layout=layouts.RowMajor("f8"), block_shape=Tile(M=256, N=256, K=64))
    with pytest.raises(gk.ConfigError) as caught:
        gk.get_config(**large, device=H100)
    needed = 8 * (256 + 2) * 256
    for words in ("block_shape=Tile(M=256, N=256, K=64)", f"needs {needed} bytes of shared memory",
                  f"has {H100.shared_memory_per_block} a block", "use smaller tiles"):
        assert words in str(caught.value)


def test_threads_over_the_devices_limit() -> None:
    with pytest.raises(gk.ConfigError) as caught:
        configuration(operator=FPUOp(M=8, N=8), block_shape=Tile(M=64, N=64, K=8), compute_warp=Tile(M=8, N=8, K=8),
                      device=H100)
    for words in ("warps_per_block=64", "2048 threads", "allows 1024 a block"):
        assert words in str(caught.value)


def test_a_configuration_of_another_device_is_checked_again_by_the_call(replaced: Seeded) -> None:
    """One that fits the H100 it was made for, and not what is here."""
    import dataclasses

    conf = configuration(block_shape=Tile(M=128, N=128, K=32), device=H100)
    tiny = dataclasses.replace(H100, name="a small GPU", shared_memory_per_block=16384)
    replaced("gemmkit.plans.problem.target", lambda *ordinal: tiny)
    refused(gk.ConfigError, ones(4, 3), ones(3, 5), None, conf,
            says=("block_shape=", "bytes of shared memory", "a small GPU has 16384 a block"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("fields,says", [
    (dict(block_shape=Tile(M=48, N=32, K=8), compute_warp=Tile(M=32, N=32, K=8)),
     ("compute_warp=Tile(M=32, N=32, K=8)", "block_shape=Tile(M=48, N=32, K=8) must be a multiple", "M=48", "of 32")),
    (dict(compute_warp=Tile(M=48, N=32, K=8)), ("operator=", "multiple of the operator's 32x32x1", "M=48")),
    (dict(mem_a_warp=Tile(M=8, K=8), mem_a_thread=Tile(M=1, K=3)),
     ("mem_a_thread=Tile(M=1, K=3)", "mem_a_warp=Tile(M=8, K=8) must be a multiple", "K=8", "of 3")),
])
def test_a_tile_that_is_no_multiple_of_its_parts(fields: dict[str, Any], says: tuple[str, ...]) -> None:
    with pytest.raises(gk.ConfigError) as caught:
        configuration(**fields)
    for words in says:
        assert words in str(caught.value)


# -- keywords ---------------------------------------------------------------------------------------------------------

def test_unknown_and_misplaced_keywords() -> None:
    a, b = ones(4, 3), ones(3, 5)
    refused(TypeError, a, b, epilog=epilogues.Default(), says=("unknown keywords epilog", "it takes out, stream", "epilogue"))
    refused(TypeError, a, b, bias=b[0], alpha=2.0, says=("bias (write epilogue=gemmkit.epilogues.Bias(bias))", "gemmEx(transa"))
    refused(TypeError, a, b, dtype="f16", says=("dtype='f16'", "'f2' is float16"))
    refused(ValueError, a, b, epilogue=epilogues.Bias(ones(1, 5)), says=("bias of Bias has shape (1, 5)", "the shape (5,)"))
    with gk.emulate(), pytest.raises(TypeError, match="stream must be a CUDA stream"):
        gk.matmul(a, b, stream="default")
    refused(TypeError, a, b, transform_regs_to_shared_d=abs,
            says=("transform_regs_to_shared_d=", "a Transform is needed", "transforms.Map"))
    refused(gk.ConfigError, a, b, epilogue=epilogues.Bias, says=("epilogue=", "an instance of Epilogue", "not the class"))
    for word, does in {"bias": "epilogues.Bias(bias)", "alpha": "gemmkit.blas.gemmEx", "transb": "b.T"}.items():
        refused(TypeError, a, b, says=(f"unknown keywords {word}", does), **{word: 2})
    listed = [epilogues.Bias(ones(99)), epilogues.ReLU()]
    refused(gk.ConfigError, a, b, epilogue=listed, says=("epilogue=<list>", "several with | between them"))
    refused(gk.ConfigError, a, b, operator="min_plus", says=("operator='min_plus'", "operators.MIN_PLUS"))
    refused(TypeError, a, b, dtype="bf16", says=("dtype='bf16'", "'bfloat16'"))
    refused(gk.ConfigError, a, b, operator=FPUOp, says=("operator=", "an instance of Operator", "not the class"))
    refused(gk.ConfigError, a, b, global_a_layout=layouts.RowMajor, says=("global_a_layout=", "a Layout is needed"))
    refused(TypeError, a, b, None, dict(block_shape=64), says=("conf={'block_shape': 64}", "gemmkit.get_config"))
    refused(gk.ConfigError, a, b, None, configuration(), operator=FPUOp(), says=("operator", "with conf", "get_config"))


def test_an_array_where_its_element_is_meant() -> None:
    a, captured = ones(4, 4), ones(4)
    for f in (lambda x: x + captured, lambda x: max(x, captured)):
        with gk.emulate(), pytest.raises(gk.ComponentError, match=r"has no device code; take an element of the array: x\[n\]"):
            gk.matmul(a, a, epilogue=epilogues.Elementwise(f))


def test_a_gated_unit_names_its_own_keywords() -> None:
    x, w = ones(4, 8), ones(8, 8)
    with gk.emulate(), pytest.raises(TypeError, match="unknown keywords act; it takes activation, conf, out, stream"):
        gk.glu(x, w, w, act=abs)
    with gk.emulate(), pytest.raises(TypeError, match=r"activation='gelu'.*such as gemmkit.epilogues.activations.gelu"):
        gk.glu(x, w, w, "gelu")


def test_a_bias_of_another_length() -> None:
    a, b = ones(4, 3), ones(3, 5)
    refused(ValueError, a, b, epilogue=epilogues.Bias(ones(4)), says=("bias has shape (4,)", "along='N'", "needs (5,)"))
    refused(ValueError, a, b, epilogue=epilogues.Bias(ones(5), "M"), says=("bias has shape (5,)", "needs (4,)"))
    refused(ValueError, a, b, epilogue=epilogues.Bias(ones(1, 5)), says=("has shape (1, 5)", "give it the shape (5,)"))
    refused(ValueError, a, b, epilogue=epilogues.Scale(ones(1)), says=("shape (1,)", "by.reshape(())"))


def test_an_array_is_not_written_into_an_error() -> None:
    """It may be long, and on a GPU its text waits for the GPU."""
    with pytest.raises(TypeError, match="spec is a ndarray; a string such as 'ij,jk->ik' is needed"):
        gk.einsum(ones(4, 3), [0, 1], ones(3, 5), [1, 2])
    with pytest.raises(TypeError, match="Diagonal.dtype=<ndarray>.: the dtype of a number is needed"):
        layouts.Diagonal(ones(4))                                                   # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"an Epilogue is needed; make an instance of the class: ReLU\(\.\.\.\)"):
        epilogues.Bias(ones(5)) | epilogues.ReLU                                    # type: ignore[operator]
    with pytest.raises(TypeError, match=r"Tile\(64, 32\) got no dimensions by name; write for example Tile\(M=64"):
        gk.Tile(64, 32)


def test_registers_of_unknown_places() -> None:
    """WMMAOp: no coordinates in registers, and no masking of them."""
    from gemmkit.operators import WMMAOp
    from gemmkit.transforms import Map

    a, b = ones(4, 3, dtype=F16), ones(3, 5, dtype=F16)
    refused(gk.ConfigError, a, b, operator=WMMAOp(), transform_shared_to_regs_a=Map(lambda x, i, j: x),
            says=("transform_shared_to_regs_a", "does not say which element a register holds", "MMAOp"))
    refused(gk.ConfigError, a, b, operator=WMMAOp(), transform_shared_to_regs_a=Map(lambda x: x + 1),
            says=("transform_shared_to_regs_a", "K=3 must be a multiple", "or use MMAOp"))


# -- places -----------------------------------------------------------------------------------------------------------

@pytest.mark.sample(1)
@pytest.mark.parametrize("call", [gk.matmul, gk.plan])
def test_a_host_array_without_emulation(call: Any) -> None:
    out = poison((4, 5), F32)
    with pytest.raises(TypeError) as caught:
        call(ones(4, 3), ones(3, 5), out=out)
    for words in ("a is a host array (NumPy)", "cupy.asarray", "with gemmkit.emulate()"):
        assert words in str(caught.value)
    assert is_poison(out)


def test_a_plan_of_the_emulator_outside_of_it() -> None:
    a, b, out = ones(4, 3), ones(3, 5), poison((4, 5), F32)
    with gk.emulate():
        run = gk.plan(a, b)
    with pytest.raises(TypeError, match=r"(?s)host array.*inside.*emulate"):
        run(a, b, out=out)
    assert is_poison(out)


def test_a_device_array_in_the_emulator() -> None:
    class Device:
        dtype = F32
        __cuda_array_interface__ = dict(version=3, shape=(4, 3), typestr="<f4", data=(4096, False), strides=None)

    refused(TypeError, Device(), ones(3, 5), says=("a is on GPU 0", "the emulator works on NumPy arrays"))


def test_arrays_of_two_devices() -> None:
    """Stand-ins: what `describe` says of arrays on two GPUs."""
    from gemmkit.plans.problem import check_places
    from gemmkit.runtime.arrays import ArrayInfo

    on = [ArrayInfo(4096, (4, 4), (4, 1), F32, device, False, "cupy") for device in (0, 1)]
    with pytest.raises(ValueError) as caught:
        check_places({"a": on[0], "b": on[0], "c": None, "out": on[1]})
    for words in ("out is on device 1", "a on device 0", "must be on one device"):
        assert words in str(caught.value)


def test_a_stream_of_another_device(gpus: Set, driver_calls: Set) -> None:
    """A stand-in for the driver, which says where a stream belongs. One that is being captured is not asked: the question would
    end the capture."""

    from gemmkit.runtime.device import check_stream

    gpus(count=2)
    driver_calls(cuStreamGetDevice=lambda handle: (0, 1))
    driver_calls(cuStreamIsCapturing=lambda handle: (0, 1))
    check_stream(0x7F00, 0)
    driver_calls(cuStreamIsCapturing=lambda handle: (0, 0))
    with pytest.raises(ValueError, match="stream is of device 1 and the arrays are on device 0"):
        check_stream(0x7F00, 0)
    check_stream(0x7F00, 1)


@pytest.mark.gpu
def test_on_the_gpu_nothing_is_written_either() -> None:
    import cupy

    out = cupy.full((4, 5), cupy.nan, F32)
    a, b = cupy.ones((4, 3), F32), cupy.ones((3, 5), F32)
    fixed = configuration()
    for error, words, arguments in (
        (ValueError, "a says K=3", dict(b=cupy.ones((4, 5), F32))),
        (TypeError, "b is a host array", dict(b=ones(3, 5))),
        (TypeError, "out is a host array", dict(out=poison((4, 5), F32))),
        (gk.ConfigError, "accumulates complex64", dict(a=a.astype("c8"))),
        (gk.ConfigError, "use ColMajor", dict(b=cupy.asfortranarray(b), conf=fixed)),
        (ValueError, "out overlaps c", dict(c=out.reshape(5, 4).T)),
        (TypeError, "stream must be a CUDA stream", dict(stream="default")),
        (ValueError, "stream must be a stream's handle", dict(stream=-1)),
    ):
        with pytest.raises(error, match=words):
            gk.matmul(**{**dict(a=a, b=b, out=out), **arguments})
        assert bool(cupy.isnan(out).all())


@pytest.mark.gpu
def test_a_stream_of_another_device_on_the_gpu(gpus: Set, driver_calls: Set) -> None:
    """With one GPU the driver's answers are stand-ins; a plan and a call refuse alike."""
    import cupy


    a, b, out = cupy.ones((4, 3), F32), cupy.ones((3, 5), F32), cupy.full((4, 5), cupy.nan, F32)
    run = gk.plan(a, b, out=out)
    driver_calls(cuStreamGetDevice=lambda handle: (0, 1))
    gpus(count=2)
    stream = cupy.cuda.Stream(non_blocking=True)
    for call in (run, gk.matmul):
        with pytest.raises(ValueError, match="stream is of device 1 and the arrays are on device 0"):
            call(a, b, out=out, stream=stream)
    assert bool(cupy.isnan(out).all())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["a", "b"])
def test_numbers_of_several_parts_beside_real_ones_are_refused_by_name(name: str) -> None:
    """No default operator multiplies them, and which operand it is is said."""
    several = np.zeros((4, 4), DUAL.number_dtype("f4"))
    operands = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32), name: several}
    with gk.emulate(), pytest.raises(TypeError, match=rf"^{name} has dtype .*; the operators take integers, floats"):
        gk.matmul(**operands)
