"""Streams and graphs: whose current one is used, which can be given, and what is captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.operators import MMAOp
from tests.kernels.common.test_plan import operands

F16, F32 = np.dtype("f2"), np.dtype("f4")


M, N, K = 17, 18, 9


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
