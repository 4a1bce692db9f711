"""On a GPU: kernels whose blocks wait are launched cooperatively, refused where they would hang, and share streams and graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import RowMajor
from gemmkit.operators import MMAOp
from gemmkit.runtime.device import attributes
from gemmkit.tiling import Tile

F16, F64 = np.dtype("f2"), np.dtype("f8")


def mapped(splits: int) -> Any:
    return gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), kernel="multistage", splits=splits, stages=3,
                         block_shape=Tile(M=64, N=64, K=64))


def operands(k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(k)
    return rng.integers(-2, 3, (64, k)).astype(F16), rng.integers(-2, 3, (k, 64)).astype(F16)


def test_the_attribute() -> None:
    assert [(x.id, x.dimensions[0]) for x in attributes(None, False, True)] == [(2, 1)]
    assert attributes(None, False) == []


@pytest.mark.gpu
def test_streams_at_a_time() -> None:
    """Many launches in several streams: each has its workspace, and none hangs."""
    import cupy

    a, b = operands(8192)
    x, y = cupy.asarray(a), cupy.asarray(b)
    expected = a.astype(F64) @ b.astype(F64)
    for splits in (3, 100):
        run = gk.plan(x, y, None, mapped(splits))
        streams, outs = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)], []
        cupy.cuda.Device().synchronize()
        outs = [cupy.full((64, 64), np.nan, np.float32) for _ in range(64)]
        cupy.cuda.Device().synchronize()
        for n, out in enumerate(outs):
            run(x, y, out=out, stream=streams[n % 4])
        cupy.cuda.Device().synchronize()
        assert all(np.array_equal(out.get(), expected) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [3, 100])
def test_graphs_beside_their_stream(splits: int) -> None:
    """A captured launch has a workspace of its own: it runs beside launches of the stream that it was captured from."""
    import cupy

    a, b = operands(8192)
    x, y = cupy.asarray(a), cupy.asarray(b)
    expected = a.astype(F64) @ b.astype(F64)
    run, stream, other = gk.plan(x, y, None, mapped(splits)), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    captured, eager = (cupy.full((64, 64), np.nan, np.float32) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(8):
            run(x, y, out=captured, stream=stream)
        graph = stream.end_capture()
    for _ in range(8):
        graph.launch(other)
        run(x, y, out=eager, stream=stream)
    cupy.cuda.Device().synchronize()
    assert np.array_equal(captured.get(), expected) and np.array_equal(eager.get(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [3, 100])
def test_captures_of_torch(splits: int) -> None:
    """They are made in the driver's strictest mode: no allocation may stand in them, nor a question for the stream's id."""
    torch = pytest.importorskip("torch")
    a, b = operands(8192)
    x, y = torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()
    out = torch.full((64, 64), float("nan"), device="cuda")
    run, graph = gk.plan(x, y, None, mapped(splits), out=out), torch.cuda.CUDAGraph()
    run(x, y, out=out)
    with torch.cuda.graph(graph):
        run(x, y, out=out)
        run(x, y, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert np.array_equal(out.cpu().numpy(), a.astype(F64) @ b.astype(F64))


@pytest.mark.gpu
def test_what_would_hang_is_refused() -> None:
    import cupy

    from gemmkit.runtime.launch import LaunchError, check_residency

    x, y = map(cupy.asarray, operands(8192))
    run = gk.plan(x, y, None, mapped(100))
    launchable = run._compiled.launchable
    bound = launchable.bind()
    with pytest.raises(LaunchError, match="wait for each other"):
        check_residency(bound.kernel, launchable.ordinal, 10**6, launchable.threads, launchable.shared_bytes)


@pytest.mark.gpu
def test_groups_in_streams_and_graphs() -> None:
    """Tables of other arrays in one stream, one after the other, and in a graph."""
    import cupy

    rng = np.random.default_rng(0)
    shapes, sets = [(64, 72, 80), (8, 200, 16), (0, 8, 8), (136, 24, 320)], []
    for _ in range(3):
        a = [rng.integers(-2, 3, (m, k)).astype(F16) for m, _, k in shapes]
        b = [rng.integers(-2, 3, (k, n)).astype(F16) for _, n, k in shapes]
        outs = [cupy.full((m, n), np.nan, F16) for m, n, _ in shapes]
        sets.append(([*map(cupy.asarray, a)], [*map(cupy.asarray, b)], outs, [x.astype(F64) @ y for x, y in zip(a, b)]))
    run, stream = gk.functions.plan_grouped(*sets[0][:2]), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        for a, b, outs, _ in sets:
            run(a, b, out=outs, stream=stream)
    stream.synchronize()
    for _, _, outs, expected in sets:
        assert all(np.array_equal(x.get(), y) for x, y in zip(outs, expected))
        for x in outs:
            x.fill(np.nan)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for a, b, outs, _ in sets:
            run(a, b, out=outs, stream=stream)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    for _, _, outs, expected in sets:
        assert all(np.array_equal(x.get(), y) for x, y in zip(outs, expected))
