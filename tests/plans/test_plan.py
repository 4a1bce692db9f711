"""Plans and repeated calls: what is accepted, what compiles, on which stream, under graph capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.operators import FPUOp, MMAOp
from gemmkit.transforms import Map
from tests.support.machines import MACHINES, is_poison, on_machines, poison, whole

# ==========================================================================================================================
# Plans and repeated calls: what is accepted, what compiles, on which stream, under graph capture, of which kind.

F16, F32 = np.dtype("f2"), np.dtype("f4")
M, N, K = 17, 18, 9


def operands(rng: np.random.Generator, dtype: Any = F16) -> list[np.ndarray]:
    return [whole(rng, (M, K), dtype), whole(rng, (K, N), dtype), whole(rng, (M, N), F32)]


# -- what a plan accepts ----------------------------------------------------------------------------------------------

@pytest.mark.kin(3)
@on_machines
def test_a_plan_computes_with_all_arrays_of_its_kind(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng)
    with machine.session():
        run = gk.plan(*map(machine.array, (a, b, c)))
        for _ in range(3):
            a, b, c = operands(rng)
            out = machine.array(poison((M, N), F32))
            given = [machine.array(x) for x in (a, b, c)]
            assert run(*given, out=out) is out
            assert np.array_equal(machine.numpy(out), a.astype("f4") @ b + c)
            assert np.array_equal(machine.numpy(run(*given)), a.astype("f4") @ b + c)      # out is made
    assert repr(run) == "<plan of a 17 x 18 x 9 product>" and run.shape == (M, N, K)


@on_machines
def test_a_plan_refuses_other_arrays_and_says_why(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = (machine.array(x) for x in operands(rng))
    memory = machine.array(poison((2 * M * N,), F32))
    out, across = memory[:M * N].reshape(M, N), memory[4:M * N + 4].reshape(M, N)          # 16 bytes on: as aligned
    with machine.session():
        run = gk.plan(a, b, c, out=out)
        for arguments, words in (
            (dict(a=machine.array(np.ones((M + 1, K), F16))), r"a differs from the plan's: shape=\(18, 9\) \(planned \(17, 9\)\)"),
            (dict(b=machine.array(np.ones((K, N), F32))), r"b differs from the plan's: dtype=float32 \(planned float16\)"),
            (dict(c=machine.array(np.ones((N, M), F32)).T), r"c differs from the plan's: strides=\(1, 17\) \(planned \(18, 1\)\)"),
            (dict(c=None), "c is missing, and the plan was made with it"),
            (dict(out=machine.array(poison((M, N), "f8"))), r"out differs from the plan's: dtype=float64"),
        ):
            with pytest.raises(ValueError, match=words):
                run(**{**dict(a=a, b=b, c=c, out=out), **arguments})
        with pytest.raises(ValueError, match="out overlaps c"):
            run(a, b, across, out=out)
        with pytest.raises(TypeError, match="a must be"):
            run([[1.0]], b, c, out=out)
        with pytest.raises(ValueError, match="c is given, and the plan was made without it"):
            gk.plan(a, b)(a, b, c)
    assert is_poison(machine.numpy(memory))


@on_machines
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("which", ["a", "b", "c", "out"])
def test_a_plan_refuses_a_lower_alignment(machine: Any, which: str, dtype: Any) -> None:
    memory, tensors = machine.array(poison((24 * 24 + 1,), dtype)), {}
    for name in ("a", "b", "c"):
        tensors[name] = machine.array(np.zeros((24, 24), dtype))
    tensors["out"] = machine.array(poison((24, 24), dtype))
    with machine.session():
        run = gk.plan(**tensors)
        tensors[which] = memory[1:].reshape(24, 24)
        with pytest.raises(ValueError, match=f"{which} begins at an address that is not a multiple of 16 bytes.*call matmul"):
            run(**tensors)
    assert is_poison(machine.numpy(memory))


@on_machines
def test_an_out_among_the_elements_of_an_operand(machine: Any, rng: np.random.Generator) -> None:
    """Which share memory's pages and no element: the even columns, the odd ones; and rows likewise."""
    x, b = rng.integers(-3, 4, (12, 12)).astype(F32), rng.integers(-3, 4, (6, 6)).astype(F32)
    for even, odd in (((slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2))),
                      ((slice(0, None, 2), slice(6)), (slice(1, None, 2), slice(6)))):
        memory, right = machine.array(x), machine.array(b)
        with machine.session():
            run = gk.plan(memory[even], right, out=memory[odd])
            run(memory[even], right, out=memory[odd])
            expected = x.copy()
            expected[odd] = x[even] @ b
            np.testing.assert_array_equal(machine.numpy(memory), expected)
            with pytest.raises(ValueError, match="out overlaps a in memory"):
                gk.matmul(memory[even], right, out=memory[even])
            gk.blas.gemmEx("N", "N", 2.0, memory[even], right, 1.0, memory[odd])
            expected[odd] += 2 * (x[even] @ b)
            np.testing.assert_array_equal(machine.numpy(memory), expected)


@pytest.mark.gpu
def test_a_plan_refuses_another_library() -> None:
    import cupy
    import torch

    b = cupy.zeros((64, 64), F16)
    run = gk.plan(b, b)
    with pytest.raises(ValueError, match="another library"):
        run(torch.zeros((64, 64), dtype=torch.float16, device="cuda"), b)


@on_machines
def test_c_can_be_the_planned_out(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng)
    a_, b_, c_ = (machine.array(x) for x in (a, b, c))
    with machine.session():
        run = gk.plan(a_, b_, c_, out=c_)
        run(a_, b_, c_, out=c_)
        run(a_, b_, c_, out=c_)
    assert np.array_equal(machine.numpy(c_), 2 * (a.astype("f4") @ b) + c)


@on_machines
def test_components_of_a_plan(machine: Any, rng: np.random.Generator) -> None:
    """The runtime values of its components are those of its making."""
    a, b, c = operands(rng)
    bias = whole(rng, (N,), F32)
    given = [machine.array(x) for x in (a, b, c)]
    conf = gk.get_config(operator=MMAOp(), global_a_layout=layouts.RowMajor(F16), block_shape=gk.Tile(M=16, N=16, K=16),
                         global_c_layout=layouts.RowMajor(F32))
    with machine.session():
        run = gk.plan(*given, conf, epilogue=epilogues.Bias(machine.array(bias)),
                      transform_global_to_shared_a=Map(lambda x: x + 1))
        d = machine.numpy(run(*given))
    assert np.array_equal(d, (a.astype("f4") + 1) @ b + c + bias)
    assert run.config.block_shape == conf.block_shape and run.config.epilogue.along == "N"


# -- what compiles ----------------------------------------------------------------------------------------------------

def same_class(rng: np.random.Generator, sizes: list[tuple[int, int, int]], call: Callable[..., Any],
               expected: Callable[..., np.ndarray], machine: Any) -> None:
    """The first size may compile a kernel, the others nothing."""
    from contextlib import nullcontext

    for n, (m, k, columns) in enumerate(sizes):
        a, b = whole(rng, (m, k), F16), whole(rng, (k, columns), F16)
        with machine.compiles_nothing() if n else nullcontext():
            d = call(machine.array(a), machine.array(b))
        assert np.array_equal(machine.numpy(d), expected(a, b))


@pytest.mark.gpu
def test_a_new_size_compiles_nothing() -> None:
    """As long as alignment and divisibility stay what they are, and the mapping does."""
    machine, rng = MACHINES["gpu"], np.random.default_rng(0)
    conf = gk.get_config(operator=MMAOp(), global_a_layout=layouts.RowMajor(F16))
    product = lambda a, b: a.astype("f4") @ b  # noqa: E731
    for sizes in ([(64, 64, 64), (128, 32, 8), (8, 8, 8), (256, 512, 1024), (16, 8, 80)],       # multiples of 8
                  [(63, 65, 67), (3, 5, 7), (101, 33, 9), (7, 77, 777)]):       # odd; a single row would be of a better alignment
        same_class(rng, sizes, lambda a, b: gk.matmul(a, b, conf=conf), product, machine)
        same_class(rng, sizes, lambda a, b: gk.plan(a, b, conf=conf)(a, b), product, machine)


@pytest.mark.gpu
def test_another_alpha_bias_or_captured_array_compiles_nothing() -> None:
    import cupy

    machine, rng = MACHINES["gpu"], np.random.default_rng(1)
    a, b, c = (cupy.asarray(x) for x in operands(rng))

    def scaled_by(values: Any) -> Any:
        return Map(lambda x, i, j: x * values[j])

    def calls(factor: float) -> list[np.ndarray]:
        bias, table = cupy.full(N, factor, F32), cupy.full(N, factor + 1, F32)
        out = c.copy()
        gk.blas.gemmEx("N", "N", factor, a, b, -factor, out)
        return [machine.numpy(x) for x in (
            out, gk.matmul(a, b, c, epilogue=epilogues.Bias(bias)),
            gk.matmul(a, b, c, transform_shared_to_global_d=scaled_by(table)))]

    product, c_ = machine.numpy(a).astype("f4") @ machine.numpy(b), machine.numpy(c)
    calls(1.0)
    with machine.compiles_nothing():
        for factor in (2.0, -3.5):
            scaled, biased, tabled = calls(factor)
            assert np.array_equal(scaled, factor * product - factor * c_)
            assert np.array_equal(biased, product + c_ + factor)
            assert np.array_equal(tabled, (product + c_) * (factor + 1))


@pytest.mark.gpu
def test_a_remembered_plan_keeps_no_array_alive() -> None:
    """Neither gemmEx's C, nor a bias, nor an array that a function captured."""
    import gc
    import weakref

    import torch

    def alive() -> list[Any]:
        a, bias, table = (torch.ones(shape, device="cuda") for shape in ((24, 24), (24,), (24,)))
        c = torch.ones((24, 24), device="cuda")
        gk.blas.gemmEx("N", "N", 2.0, a, a, 1.0, c)
        gk.matmul(a, a, epilogue=epilogues.Bias(bias),
                  transform_shared_to_global_d=Map(lambda x, i, j: x * table[j]))
        assert float(c[0, 0]) == 49
        return [weakref.ref(x) for x in (a, bias, table, c)]

    for _ in range(2):
        references = alive()
        gc.collect()
        assert [reference() for reference in references] == [None] * 4


@pytest.mark.kin(3)
@pytest.mark.usefixtures("quick_collections")
def test_a_plan_that_forgets_arrays_keeps_none_alive() -> None:
    """What a remembered plan of device arrays does, on one that was made for host arrays."""
    import gc
    import weakref

    bias, residual = np.ones(N, F32), np.ones((M, N), F32)
    fields = dict(epilogue=epilogues.Bias(bias) | epilogues.Residual(residual))
    with gk.emulate():
        made = gk.plan(np.ones((M, K), F16), np.ones((K, N), F16), **fields)
    made.forget_arrays(tuple(fields))
    references = [weakref.ref(x) for x in (bias, residual)]
    del bias, residual, fields
    gc.collect()
    assert all(reference() is None for reference in references)


@pytest.mark.kin(3)
@on_machines
def test_values_of_a_call_are_those_of_the_call(machine: Any, rng: np.random.Generator) -> None:
    """A remembered plan takes this call's bias, alpha and captured arrays, not the first call's."""
    a, b, c = operands(rng)
    given = [machine.array(x) for x in (a, b, c)]
    product = a.astype("f4") @ b
    for value in (1, 2, 3):
        bias, table = whole(rng, (N,), F32), whole(rng, (M,), F32)
        table_ = machine.array(table)
        with machine.session():
            biased = gk.matmul(*given, epilogue=epilogues.Bias(machine.array(bias)))
            scaled = gk.matmul(*given, transform_shared_to_global_d=Map(lambda x, i, j: x * table_[i]))
            out = machine.array(c)
            gk.blas.gemmEx("N", "N", value, *given[:2], value, out)
        assert np.array_equal(machine.numpy(biased), product + c + bias)
        assert np.array_equal(machine.numpy(scaled), (product + c) * table[:, None])
        assert np.array_equal(machine.numpy(out), value * product + value * c)


@on_machines
def test_a_bias_of_another_kind_makes_another_plan(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng)
    given = [machine.array(x) for x in (a, b, c)]
    for bias in (np.arange(N, dtype="f4"), np.arange(N, dtype="i4"), np.arange(2 * N, dtype="f4")[::2]):
        on = machine.array(bias) if bias.base is None else machine.array(np.arange(2 * N, dtype="f4"))[::2]
        with machine.session():
            d = gk.matmul(*given, epilogue=epilogues.Bias(on))
        assert np.array_equal(machine.numpy(d), a.astype("f4") @ b + c + bias)
    with machine.session(), pytest.raises(ValueError, match="bias has shape"):
        gk.matmul(*given, epilogue=epilogues.Bias(machine.array(np.ones(N + 1, F32))))


# -- kinds of arrays --------------------------------------------------------------------------------------------------

class OnlyInterface:
    def __init__(self, array: Any):
        self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__


class OnlyDlpack:
    def __init__(self, array: Any):
        self.array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cupy", "torch", "numba", "interface", "dlpack"])
def test_the_result_is_of_the_callers_kind(kind: str, rng: np.random.Generator) -> None:
    import cupy
    import torch
    from numba import cuda

    make: Any = {"cupy": cupy.asarray, "torch": lambda x: torch.from_numpy(x).cuda(), "numba": cuda.to_device,
                 "interface": lambda x: OnlyInterface(cupy.asarray(x)), "dlpack": lambda x: OnlyDlpack(cupy.asarray(x))}[kind]
    a, b, c = operands(rng)
    a_, b_, c_ = make(a), make(b), make(c)
    d = gk.matmul(a_, b_, c_)
    wanted = cupy.ndarray if kind in ("interface", "dlpack") else type(a_)
    assert type(d) is wanted
    host = d.copy_to_host() if kind == "numba" else d.cpu().numpy() if kind == "torch" else d.get()
    assert np.array_equal(host, a.astype("f4") @ b + c)
    out = make(poison((M, N), F32))
    assert gk.matmul(a_, b_, c_, out=out) is out
    run = gk.plan(a_, b_, c_)
    assert type(run(a_, b_, c_)) is wanted
    assert gk.blas.gemmEx("N", "N", 1, a_, b_, 1, c_) is c_


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["interface", "dlpack"])
def test_transposes_of_arrays_that_have_none(kind: str, rng: np.random.Generator) -> None:
    """gemmEx makes the view itself."""
    import cupy

    wrap = OnlyInterface if kind == "interface" else OnlyDlpack
    a, b, c = operands(rng)
    out = cupy.asarray(c)
    gk.blas.gemmEx("T", "T", 1, wrap(cupy.asarray(a.T.copy())), wrap(cupy.asarray(b.T.copy())), 1, wrap(out))
    assert np.array_equal(out.get(), a.astype("f4") @ b + c)


@pytest.mark.gpu
def test_libraries_can_be_mixed(rng: np.random.Generator) -> None:
    import cupy
    import torch

    a, b, c = operands(rng)
    d = gk.matmul(torch.from_numpy(a).cuda(), cupy.asarray(b), torch.from_numpy(c).cuda())
    assert isinstance(d, torch.Tensor) and np.array_equal(d.cpu().numpy(), a.astype("f4") @ b + c)


@pytest.mark.gpu
def test_a_leading_dimension_beyond_32_bits() -> None:
    """Rows 2**31 elements apart: addresses are 64 bits wide, coordinates 32."""
    import cupy

    rows = cupy.zeros((2, 2**31), "i1")
    rows[0, :3], rows[1, :3] = 1, 2
    a = rows[:, :3]
    d = gk.matmul(a, cupy.ones((3, 4), "i1"), operator=FPUOp(M=16, N=16, dtype="i1"))
    assert d.get().tolist() == [[3] * 4, [6] * 4]


# ==========================================================================================================================
# Streams and graphs: whose current one is used, which can be given, and what is captured.

SLOW = 4096                                         # a product that takes long enough to be overtaken


@pytest.mark.gpu
def test_cupys_current_stream_is_used() -> None:
    import cupy

    a = cupy.random.standard_normal((SLOW, SLOW), np.float32).astype(F16)
    conf = gk.get_config(operator=MMAOp(), global_a_layout=layouts.RowMajor(F16))
    run, out = gk.plan(a, a, conf=conf), cupy.zeros((SLOW, SLOW), F32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert stream.done
        run(a, a, out=out)
        assert not stream.done                      # the product is on this stream ...
        assert cupy.cuda.Stream.null.done           # ... and on no other
        stream.synchronize()
        gk.matmul(a, a, conf=conf, out=out)
        assert not stream.done
        stream.synchronize()
    assert float(abs(out[:64] - a[:64].astype(F32) @ a.astype(F32)).max()) < 1


@pytest.mark.gpu
def test_pytorchs_current_stream_is_used() -> None:
    import torch

    a = torch.randn((SLOW, SLOW), device="cuda").half()
    conf = gk.get_config(operator=MMAOp(), global_a_layout=layouts.RowMajor(F16))
    gk.matmul(a, a, conf=conf)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gk.matmul(a, a, conf=conf)
    assert not stream.query() and torch.cuda.default_stream().query()
    stream.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cupy", "torch", "numba", "cuda.core", "handle"])
def test_a_stream_can_be_given(kind: str) -> None:
    import cupy

    a = cupy.random.standard_normal((SLOW, SLOW), np.float32).astype(F16)
    conf = gk.get_config(operator=MMAOp(), global_a_layout=layouts.RowMajor(F16))
    stream: Any
    if kind == "torch":
        import torch

        stream = torch.cuda.Stream()
        done = stream.query
    elif kind == "numba":
        from numba import cuda

        stream = cuda.stream()
        done = lambda: cupy.cuda.ExternalStream(int(stream)).done  # noqa: E731
    elif kind == "cuda.core":
        from cuda.core import Device

        Device().set_current()
        stream = Device().create_stream()
        done = lambda: cupy.cuda.ExternalStream(int(stream.handle)).done  # noqa: E731
    else:
        own = cupy.cuda.Stream(non_blocking=True)
        stream, done = (own, lambda: own.done) if kind == "cupy" else (own.ptr, lambda: own.done)
    run = gk.plan(a, a, conf=conf)
    for call in (run, lambda a, b, **kw: gk.matmul(a, b, conf=conf, **kw)):
        out = cupy.zeros((SLOW, SLOW), F32)
        cupy.cuda.Device().synchronize()
        call(a, a, out=out, stream=stream)
        assert not done()
        # A stream of Numba's is ordered with the default stream, which therefore waits for it.
        assert kind == "numba" or cupy.cuda.Stream.null.done
        cupy.cuda.Device().synchronize()
        assert done() and float(abs(out).max()) > 0


@pytest.mark.gpu
def test_capture_in_a_cupy_graph() -> None:
    import cupy

    rng = np.random.default_rng(2)
    a, b, c = (cupy.asarray(x) for x in operands(rng))
    out, half = cupy.zeros((M, N), F32), cupy.zeros((M, N), F32)
    gk.matmul(a, b, c, out=out)                    # compiled and loaded before the capture
    gk.blas.gemmEx("N", "N", 0.5, a, b, 0.0, half)
    out.fill(0), half.fill(0)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        gk.matmul(a, b, c, out=out)
        gk.blas.gemmEx("N", "N", 0.5, a, b, 0.0, half)
        graph = stream.end_capture()
    assert not out.any() and not half.any()
    for _ in range(2):
        a[:] = cupy.asarray(operands(rng)[0])      # the graph computes with what the arrays hold now
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        product = a.astype(F32).get() @ b.get()
        assert np.array_equal(out.get(), product + c.get()) and np.array_equal(half.get(), product / 2)


@pytest.mark.gpu
def test_capture_in_a_torch_graph() -> None:
    import torch

    a, b = torch.ones((64, 32), device="cuda").half(), torch.ones((32, 48), device="cuda").half()
    gk.matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = gk.matmul(a, b)                     # its result comes from the graph's own memory
    for value in (2, 3):
        a.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((made == 32 * value).all())
