"""Kernels of ``numba.cuda.jit`` on tiles and instructions: as the first thing that a process does, in the emulator, on a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numba import cuda

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.ptx.barriers import mbarrier_expect, mbarrier_fence_init, mbarrier_init, mbarrier_wait
from gemmkit.ptx.copy_async import commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.own_kernels import apply, device, each, fill, launch, tensor_maps, view
from gemmkit.ptx.special import barrier, block_x, block_y, thread_index
from gemmkit.ptx.tma import acquire_map, map_at, tma_load
from gemmkit.tiling import Tile, linearise, parallelise, project, translate
from tests.support.harness import aligned
from tests.support.markdown import ROOT

BLOCK, PART = Tile(M=64, N=8), Tile(M=2, N=4)

# -- the first thing that a process does ------------------------------------------------------------------------------

BEGIN = r"""
import re
import warnings
warnings.simplefilter("ignore")
from numba import cuda
from numba.cuda import types

ARRAY = types.Array(types.float32, 2, "C"),

def ptx(kernel):
    return re.sub(r"\b_Z\w+", "name", cuda.compile_ptx(kernel, ARRAY, cc=(9, 0))[0]).partition("{")[2]

def plain(out):
    x = out[0, 1] * 2.5 + 7
    out[0, 0] = x if x > 0 else 0
    for i in range(out.shape[0] // 3):
        out[i, min(i, 4)] = float(i + 1) / 2

before = ptx(plain)
"""
FIRST = {
    "a function of tiles": """
from gemmkit.tiling import Tile, linearise, parallelise
BLOCK, PART = Tile(M=16, N=8), Tile(M=2, N=4)

def kernel(out):
    tiles = parallelise(BLOCK, PART, cuda.threadIdx.x, 8)
    for i in range(len(tiles)):
        here = tiles[i]
        out[here.index.M, here.index.N] = linearise(here.index, (16, 8))
""",
    "a tile": """
from gemmkit.tiling import Tile, translate
BLOCK = Tile(M=16, N=8)

def kernel(out):
    tile = BLOCK
    out[tile.size.M, tile.N.count] = translate(tile, M=cuda.threadIdx.x).index.M
""",
    "an instruction": """
from gemmkit.ptx.special import barrier, thread_index

def kernel(out):
    i = thread_index()
    barrier()
    out[i, 0] = i
""",
    "an array": """
import numpy as np
from gemmkit.ptx.memory import load_global, shared, store_shared
from gemmkit.ptx.own_kernels import view

def kernel(out):
    store_shared(shared(np.float32, 64), 4 * cuda.threadIdx.x, 0, load_global(view(out, 16), 1, (0, 4 * cuda.threadIdx.x), (0, 0), 4))
""",
}


@pytest.mark.kin(1)
@pytest.mark.parametrize("first", FIRST)
def test_a_process_may_begin_with_a_kernel_of_its_own(first: str) -> None:
    """Nothing of gemmkit's was called before; and a kernel that uses nothing of it is the same before and after."""
    script = f"{BEGIN}{FIRST[first]}\nprint(ptx(kernel))\nassert ptx(plain) == before"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "%tid.x" in done.stdout and ("st.shared.v4" in done.stdout or "st.global" in done.stdout)


# -- what a kernel computes -------------------------------------------------------------------------------------------

@cuda.jit
def copied(out: Any, a: Any, factor: Any) -> None:
    """Two ways from A to out: by tiles, through shared memory, by a helper; sums of what a thread has."""
    x, y = view(a, 16), view(out, 16)
    memory, row = shared(np.float32, 0), 64 * block_x()
    tiles = parallelise(BLOCK, PART, thread_index(), 32)
    for i in range(len(tiles)):
        tile = tiles[i]
        for r in range(2):
            here = translate(tile, M=r)
            values = load_global(x, 1, translate(here, M=row, N=8 * block_y()).index, (0, 0), 4)
            store_shared(memory, linearise(project(here, "N", "M").index, (8, 64)), 0, values)
    barrier()
    for i in range(len(tiles)):
        at = translate(tiles[i], M=1)
        total = fill(np.float32, 4, 1)
        for r in range(2):
            total = apply(plus, total, load_shared(memory, linearise((at.index.N, at.index.M - r), (8, 64)), 0, 4))
        store_global(y, 1, translate(at, M=row, N=8 * block_y()).index, (0, 0), apply(scaled, total, factor))
        each(noted, (1, 2), y, row + at.index.M - 1, 8 * block_y() + at.index.N)


@device
def plus(value: Any, i: int, other: tuple) -> Any:
    return value + other[i]


@device
def scaled(value: Any, i: int, factor: Any) -> Any:
    return value * factor


@device
def noted(value: Any, i: int, out: Any, row: int, column: int) -> None:
    out[row, column + i] = value * 0.5


def wanted(a: np.ndarray, factor: float) -> np.ndarray:
    out = np.full(a.shape, -1, np.float64)
    out[1::2] = (1 + a[::2].astype(np.float64) + a[1::2]) * factor
    out[::2, ::4], out[::2, 1::4] = 0.5, 1
    return out


@pytest.mark.parametrize("seed", [None, 3])
def test_tiles_and_instructions_in_the_emulator(seed: int | None, rng: np.random.Generator) -> None:
    a = aligned(rng.standard_normal((192, 16)).astype(np.float32))
    out = aligned(np.full_like(a, -1))
    with gk.emulate(seed=seed):
        launch(copied, out, a, 3, grid=(3, 2), block=32, shared_memory=2048)
    assert np.allclose(out, wanted(a, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_tiles_and_instructions_on_the_gpu(rng: np.random.Generator) -> None:
    """By `launch`, as any kernel of Numba, and with more shared memory than any kernel of Numba may have."""
    import cupy

    a = rng.standard_normal((192, 16)).astype(np.float32)
    for run in (lambda *args: launch(copied, *args, grid=(3, 2), block=32, shared_memory=2048), copied[(3, 2), 32, 0, 2048],
                lambda *args: launch(copied, *args, grid=(3, 2), block=32, shared_memory=100_000)):
        out = cupy.full(a.shape, -1, np.float32)
        run(out, cupy.asarray(a), 3)
        assert np.allclose(cupy.asnumpy(out), wanted(a, 3), rtol=1e-5, atol=1e-5)


@cuda.jit
def views(out: Any, a: Any, b: Any) -> None:
    """Arrays of any strides: extents, elements in float16, and a copy that threads do not wait for."""
    x, y, z = view(a), view(b, 16), view(out)
    i, memory = thread_index(), shared(np.float16, 0)
    copy_async(memory, 8 * i, 0, y, offset_of(y, (i, 0)), 8, True)
    commit_copies()
    wait_copies(0)
    z[i, 0] = x[i, 1] + load_shared(memory, 8 * i + 2, 0, 1)[0]
    z[i, 1] = x.shape[0] * 100 + x.shape[1]


def strided(numbers: Any) -> tuple[Any, Any]:
    """A transposed view with a step, and a contiguous array, of 32 rows."""
    return numbers(6, 64).T[::2, 1:], numbers(32, 8)


def test_views_of_any_strides_in_the_emulator(rng: np.random.Generator) -> None:
    a, b = strided(lambda *shape: aligned(rng.standard_normal(shape).astype(np.float16)))
    out = np.zeros((32, 2), np.float16)
    with gk.emulate():
        launch(views, out, a, b, grid=1, block=32, shared_memory=512)
    assert (out[:, 0] == a[:, 1] + b[:, 2]).all() and (out[:, 1] == 3205).all()


@pytest.mark.gpu
def test_views_of_any_strides_on_the_gpu(rng: np.random.Generator) -> None:
    import cupy

    a, b = strided(lambda *shape: cupy.asarray(rng.standard_normal(shape).astype(np.float16)))
    out = cupy.zeros((32, 2), np.float16)
    launch(views, out, a, b, grid=1, block=32, shared_memory=512)
    assert (out[:, 0] == a[:, 1] + b[:, 2]).all() and (out[:, 1] == 3205).all()


@cuda.jit
def boxes(out: Any, maps: Any, depth: int) -> None:
    """Boxes of two arrays, by TMA: 8 x 4 of each beyond an edge, where there are zeros."""
    table, memory, full = view(maps), shared(np.float32, 0), shared(np.uint64, 256)
    i = thread_index()
    if i == 0:
        mbarrier_init(full, 0, 1)
        mbarrier_fence_init()
        acquire_map(table, 0)
        acquire_map(table, 1)
    barrier()
    if i == 0:
        mbarrier_expect(full, 0, 256)
        tma_load(map_at(table, 0), (4, depth), memory, 0, full, 0)
        tma_load(map_at(table, 1), (0, 0, 1), memory, 32, full, 0)
    mbarrier_wait(full, 0, 0)
    view(out)[i, 0], view(out)[i, 1] = memory[i], memory[32 + i]


def of_boxes(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    clipped = np.zeros((8, 4), np.float32)
    clipped[:4] = one[6:10, 4:8]
    return np.stack([clipped.ravel(), other[1:2, :2, :].ravel()[:32]], axis=1)


def test_boxes_by_tma_in_the_emulator(rng: np.random.Generator) -> None:
    one, other = (aligned(rng.standard_normal(shape).astype(np.float32)) for shape in ((10, 8), (3, 2, 16)))
    out = np.full((32, 2), np.nan, np.float32)
    with gk.emulate():
        launch(boxes, out, tensor_maps((one, (4, 8), 0), (other, (16, 2, 1), 0)), 6, grid=1, block=32, shared_memory=264)
    assert (out == of_boxes(one, other)).all()


@pytest.mark.gpu
def test_boxes_by_tma_on_the_gpu(rng: np.random.Generator) -> None:
    import cupy

    one, other = (rng.standard_normal(shape).astype(np.float32) for shape in ((10, 8), (3, 2, 16)))
    out, on_device = cupy.full((32, 2), np.nan, np.float32), [cupy.asarray(x) for x in (one, other)]
    launch(boxes, out, tensor_maps((on_device[0], (4, 8), 0), (on_device[1], (16, 2, 1), 0)), 6, grid=1, block=32, shared_memory=264)
    assert (cupy.asnumpy(out) == of_boxes(one, other)).all()


# -- what is refused --------------------------------------------------------------------------------------------------

@cuda.jit
def misaligned(out: Any) -> None:
    view(out, 16)[0, 0] = 1


@cuda.jit
def beyond(out: Any) -> None:
    view(out)[thread_index(), 0] = 1


def test_faults_in_the_emulator() -> None:
    rows = aligned(np.zeros((32, 9), np.float32))
    with gk.emulate():
        with pytest.raises(ValueError, match="view: alignment is 16, and out begins at .* with strides of .*36, 4.* bytes"):
            launch(misaligned, rows, grid=1, block=32)
        with pytest.raises(EmulatorError, match="out.*index|outside|bounds"):
            launch(beyond, rows[:31], grid=1, block=32)


def _alignment_of_three(out: Any) -> None:
    view(out, 3)[0, 0] = 1


def _alignment_at_run_time(out: Any) -> None:
    view(out, out.shape[0])[0, 0] = 1


@pytest.mark.parametrize("kernel, message", [(_alignment_of_three, "view: alignment is 3; 1, 2, 4, 8 or 16 bytes are needed"),
                                             (_alignment_at_run_time, "view")])
def test_bad_views_are_refused_when_a_kernel_is_compiled(kernel: Any, message: str) -> None:
    from numba.cuda import types

    with pytest.raises(Exception, match=message):
        cuda.compile_ptx(kernel, (types.Array(types.float32, 2, "C"),), cc=(9, 0))


def test_bad_calls() -> None:
    a = aligned(np.zeros((16, 16), np.float32))
    with gk.emulate():
        with pytest.raises(TypeError, match=r"launch: kernel is .*; a function that numba\.cuda\.jit returned is needed"):
            launch(plus, a, grid=1, block=32)
        with pytest.raises(TypeError, match=r"launch: 2 arguments; copied\(out, a, factor\) takes 3"):
            launch(copied, a, a, grid=1, block=32)
        for maps, message in (((a[:, 1:], (4, 4), 0), "multiple of 16"), ((a.T, (4, 4), 0), "stride along axis 0 is 4 bytes"),
                              ((a, (3, 4), 0), "12 bytes; a multiple of 16"), ((a, (16, 4), 128), "rows of 128 bytes")):
            with pytest.raises(ValueError, match=message):
                tensor_maps(maps)
