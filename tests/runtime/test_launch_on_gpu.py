"""Launching on a GPU: scalars, shared memory, clusters, threads, graphs."""

from __future__ import annotations

import threading

import pytest

from gemmkit.runtime import device
from gemmkit.runtime.compile import assemble
from gemmkit.runtime.launch import LaunchError, load


@pytest.fixture(scope="module")
def scalars(compile_ptx):
    """A kernel that writes each of its scalars to an array of float64, and the codes of its parameters."""
    from numba import float32, float64, int8, int16, int32, int64, types, uint64

    def scalars(out, a, b, c, d, e, f, g, h):
        out[0], out[1], out[2], out[3] = a, b, c, d
        out[4], out[5], out[6], out[7] = e, f, g, float64(h)

    kinds = (int8, int16, int32, int64, uint64, float32, float64, types.float16)
    ptx, name = compile_ptx(scalars, float64[::1], *kinds)
    kernel = load(assemble(ptx, device.target().arch_name).cubin, name)
    return kernel, [*ARRAY, "i8", "i16", "i32", "i64", "u64", "f32", "f64", "f16"]


ARRAY = ["u64", "u64", "i64", "i64", "u64", "i64", "i64"]  # a one-dimensional array, as Numba flattens it


def flat(array):
    return (0, 0, array.size, array.dtype.itemsize, array.data.ptr, array.size, array.dtype.itemsize)


SCALARS = (-8, -1600, 32, -(2**40), 2**50, 0.5, 0.1, 0x3C00)


EXPECTED = [-8, -1600, 32, -(2**40), 2**50, 0.5, 0.1, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["launch", "reference"])
def test_both_routes_pass_every_kind_of_scalar(scalars, route):
    import cupy

    kernel, codes = scalars
    out = cupy.full(8, cupy.nan)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    getattr(kernel.bind((1,), (1,), 0, codes), route)(stream.ptr, (*flat(out), *SCALARS))
    stream.synchronize()
    assert out.get().tolist() == EXPECTED


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [[*ARRAY], [*ARRAY, *["i32"] * 8], ["q"]])
def test_parameters_of_another_kernel_are_refused(scalars, codes):
    with pytest.raises(ValueError, match=r"parameters"):
        scalars[0].bind((1,), (1,), 0, codes)


@pytest.fixture(scope="module")
def shared(compile_ptx):
    """A kernel that passes its block's number through the last word of its dynamic shared memory."""
    from numba import cuda, int32, int64

    def shared(out, words):
        buffer = cuda.shared.array(0, int32)
        if cuda.threadIdx.x == 0:
            buffer[words - 1] = cuda.blockIdx.x + 1
        cuda.syncthreads()
        if cuda.threadIdx.x == 1:
            out[cuda.blockIdx.x] = buffer[words - 1]

    ptx, name = compile_ptx(shared, int64[::1], int32)
    return load(assemble(ptx, device.target().arch_name).cubin, name)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["launch", "reference"])
@pytest.mark.parametrize("cluster", [None, (2,)])
def test_all_the_shared_memory_of_the_device_and_clusters(shared, route, cluster):
    import cupy

    most = device.current().shared_memory_per_block
    out = cupy.zeros(6, cupy.int64)
    for size in (most, 4096):  # a smaller one afterwards must not lower the limit of the first
        bound = shared.bind((6,), (32,), size, [*ARRAY, "i32"], cluster)
        out.fill(0)
        getattr(bound, route)(cupy.cuda.get_current_stream().ptr, (*flat(out), size // 4))
        assert out.get().tolist() == [1, 2, 3, 4, 5, 6]
    first = shared.bind((6,), (32,), most, [*ARRAY, "i32"], cluster)
    first.launch(cupy.cuda.get_current_stream().ptr, (*flat(out), most // 4))
    cupy.cuda.Device().synchronize()
    with pytest.raises(ValueError, match=rf"shared_memory={most + 1}"):
        shared.bind((6,), (32,), most + 1, [*ARRAY, "i32"])


@pytest.mark.gpu
def test_more_threads_than_the_kernels_registers_allow(compile_ptx):
    from numba import float32

    def plain(out):
        out[0] = 1.0

    ptx, name = compile_ptx(plain, float32[::1])
    limited = ptx.replace(")\n{", ")\n.maxntid 64, 1, 1\n{", 1)
    assert limited != ptx
    kernel = load(assemble(limited, device.target().arch_name).cubin, name)
    with pytest.raises(ValueError, match=r"128 threads, but kernel .* at most 64 a block"):
        kernel.bind((1,), (128,), 0, ARRAY)


@pytest.mark.gpu
def test_a_kernel_that_is_not_in_the_cubin(reverse):
    cubin = assemble(reverse[0], device.target().arch_name).cubin
    with pytest.raises(LaunchError, match="'absent' could not be loaded on"):
        load(cubin, "absent")
    with pytest.raises(LaunchError, match="could not be loaded"):
        load(b"\x7fELF" + bytes(100), "k")


@pytest.mark.gpu
def test_threads_launch_one_kernel_at_once(scalars):
    """Threads that never used the GPU before, each with its own stream and values, in one bound launch."""
    import cupy

    kernel, codes = scalars
    bound = kernel.bind((1,), (1,), 0, codes)
    outs = cupy.full((8, 50, 8), cupy.nan)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]
    cupy.cuda.Device().synchronize()
    pointers = [[flat(outs[number, i]) for i in range(50)] for number in range(8)]

    def work(number):
        for i in range(50):
            bound.launch(streams[number].ptr, (*pointers[number][i], number, i, 0, 0, 0, 0.0, 0.0, 0))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cupy.cuda.Device().synchronize()
    expected = [[[number, i] for i in range(50)] for number in range(8)]
    assert outs.get()[:, :, :2].tolist() == expected


@pytest.mark.gpu
def test_a_launch_is_captured_into_a_graph_of_pytorch(scalars):
    import torch

    kernel, codes = scalars
    bound = kernel.bind((1,), (1,), 0, codes)
    out = torch.full((8,), torch.nan, dtype=torch.float64, device="cuda")
    values = (0, 0, 8, 8, out.data_ptr(), 8, 8, *SCALARS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.launch(torch.cuda.current_stream().cuda_stream, values)
    torch.cuda.synchronize()
    assert out.isnan().all()  # captured, not run
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == EXPECTED


@pytest.mark.gpu
def test_a_launch_is_captured_into_a_graph_of_cupy(scalars):
    import cupy

    kernel, codes = scalars
    bound = kernel.bind((1,), (1,), 0, codes)
    out = cupy.full(8, cupy.nan)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        bound.launch(stream.ptr, (*flat(out), *SCALARS))
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert out.get().tolist() == EXPECTED
