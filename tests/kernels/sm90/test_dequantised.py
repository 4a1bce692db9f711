"""Weights of 4 bits that Hopper's kernel dequantises on the way to wgmma (`gemmkit.kernels.sm90.dequantised`). Elements of x are
small whole numbers and scales powers of two, so that every result is exactly right or wrong; D is poisoned before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.sm90.dequantised import DequantisingMainloop
from gemmkit.lang.functions import freeze_array
from gemmkit.layouts import ColMajor, GroupQuantised, InterleavedColumns
from gemmkit.layouts.matrices import Matrix
from gemmkit.layouts.quantised import QuantisedTranspose, dequantise
from gemmkit.operators import WGMMAOp
from gemmkit.plans.ahead import compiled_kernel, recorded
from gemmkit.ptx.registers import as_float8, as_float16, dequantise_bytes, float8_table, zero_words
from gemmkit.ptx.special import thread_index
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.tuning import sm90
from tests.kernels.test_quantised_kernel import BF16, F16, F32, at, expected, weights
from tests.ptx_machine.launch import run_ptx
from tests.support.harness import Out, aligned, compiled, emulated, on_device
from tests.support.machines import E4M3, E5M2, MACHINES, on_machines, poison, whole

EMULATOR = MACHINES["emulator"]
TILES: dict[str, dict[str, Any]] = {
    "one": dict(block_shape=Tile(M=64, N=16, K=64), warps_per_block=4),
    "two": dict(block_shape=Tile(M=128, N=64, K=64), warps_per_block=8),
    "two fragments": dict(block_shape=Tile(M=256, N=32, K=64), warps_per_block=8),
    "three": dict(block_shape=Tile(M=192, N=16, K=64), warps_per_block=12, stages=2),
    "deep": dict(block_shape=Tile(M=64, N=128, K=128), warps_per_block=4),
    "split": dict(block_shape=Tile(M=128, N=32, K=64), warps_per_block=8, splits=2),
    "shared": dict(block_shape=Tile(M=64, N=32, K=64), warps_per_block=4, cluster=Tile(M=2, N=1)),
    "shared workspace": dict(block_shape=Tile(M=64, N=32, K=64), warps_per_block=4, cluster=Tile(M=2, N=1), splits=2),
    "workspace": dict(block_shape=Tile(M=64, N=32, K=64), warps_per_block=4, splits=3),
    "stream": dict(block_shape=Tile(M=64, N=32, K=64), warps_per_block=4, splits=StreamK(2)),
    "ping-pong": dict(block_shape=Tile(M=64, N=32, K=64), warps_per_block=8, schedule="pingpong")}


def transposed(machine: Any, x: np.ndarray, b: Matrix, **mapping: Any) -> np.ndarray:
    """x W as W^T x^T on a mapping of Hopper's kernel."""
    of_b: Any = at(machine, b)
    layout, dtype = QuantisedTranspose(of_b.layout), x.dtype
    out = machine.array(poison((x.shape[0], b.shape[1]), F32))
    operator = WGMMAOp(mapping["block_shape"].size.N, dtype=dtype, promote=128 if dtype == E4M3 else 0)
    conf = gk.get_config(operator=operator, global_a_layout=layout,
                         global_b_layout=ColMajor(dtype), global_d_layout=ColMajor(F32), device=H100, **mapping)
    with machine.session():
        a, d = machine.array(x), out.T
        plan = gk.plan(of_b.array.T, a.T, out=d, conf=conf)
        assert isinstance(plan._compiled.spec.mainloop, DequantisingMainloop)
        plan(of_b.array.T, a.T, out=d)
    return np.asarray(machine.numpy(out))


def check(machine: Any, rng: np.random.Generator, sizes: tuple[int, int, int], group: int, symmetric: bool, dtype: Any = F16,
          **mapping: Any) -> None:
    m, n, k = sizes
    b, x = weights(rng, k, n, 4, group, symmetric, dtype), whole(rng, (m, k), dtype, 2)
    assert np.array_equal(transposed(machine, x, b, **mapping), expected(x, b)), sizes


# -- by mappings ----------------------------------------------------------------------------------------------------------

@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tile", TILES)
def test_mappings(machine: Any, tile: str, symmetric: bool, rng: np.random.Generator) -> None:
    """Rows, columns and K that end within a tile; groups of more and of fewer than a stage."""
    small = [((21, 144, 160), 32) if symmetric else ((19, 80, 128), 64)]
    large = (33, 1040, 4096) if "workspace" in tile else (257, 4112, 4096)      # blocks that wait for each other are few
    for sizes, group in small if machine.emulated else [*small, (large, 128)]:
        check(machine, rng, sizes, group, symmetric, **TILES[tile])


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("group", [16, 32, 64, 128, 320])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_groups(machine: Any, group: int, dtype: Any, rng: np.random.Generator) -> None:
    """Several groups in a stage, several stages in a group, and one scale for a column."""
    k = 320 if group == 320 else 2 * max(group, 64)
    check(machine, rng, (5, 64, k), group, False, dtype, **TILES["one"])


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tile", [*TILES])
def test_float8(machine: Any, tile: str, symmetric: bool, rng: np.random.Generator) -> None:
    """A stage is 128 elements along K, and its sums are scaled: K of one group, of several, and of stages in a group."""
    mapping = {**TILES[tile], "block_shape": Tile(M=TILES[tile]["block_shape"].size.M, N=TILES[tile]["block_shape"].size.N, K=128)}
    large = (33, 1040, 4096) if "workspace" in tile else (257, 4112, 4096)
    for sizes, group in [((21, 144, 384), 128)] if machine.emulated else [((5, 64, 128), 128), ((19, 80, 768), 384), (large, 128)]:
        check(machine, rng, sizes, group, symmetric, E4M3, **mapping)


@on_machines
@pytest.mark.parametrize("m", [5, 16, 24])
def test_float8_scales_sums_in_float32(machine: Any, m: int, rng: np.random.Generator) -> None:
    """Numbers that are not whole, by both kernels: as close to float64 as sums of 128 in tensor cores are."""
    n, k = 64, 1024
    b, x = weights(rng, k, n, 4, 128, False, E4M3), rng.standard_normal((m, k)).astype(E4M3)
    layout: Any = b.layout
    layout.scales[:] = (rng.standard_normal(layout.scales.shape) * 3).astype(F16)
    out = machine.array(poison((m, n), F32))
    with machine.session():
        gk.matmul(machine.array(x), at(machine, b), out=out)
    wide, exact = x.astype("f8"), dequantise(b).astype("f8")
    assert (np.abs(machine.numpy(out) - wide @ exact) <= 2.0**-12 * (np.abs(wide) @ np.abs(exact))).all()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_weight_is_the_one_of_the_other_kernel(dtype: Any, rng: np.random.Generator) -> None:
    """Rounded to float16, and then to bfloat16."""
    b = weights(rng, 64, 64, 4, 32, False, dtype)
    layout: Any = b.layout
    layout.scales[:] = (rng.random((2, 64)) * 3).astype(F16)
    wanted = dequantise(b).astype(F16).astype(F32).astype(dtype).astype(F32)
    assert np.array_equal(transposed(EMULATOR, np.eye(64, dtype=dtype), b, **TILES["one"]), wanted)


# -- as a call chooses ----------------------------------------------------------------------------------------------------

def plan_of(x: np.ndarray, b: Matrix, **keywords: Any) -> Any:
    with gk.emulate():
        return gk.plan(x, b, **keywords)


def dequantises(plan: Any) -> bool:
    return isinstance(getattr(plan._compiled.spec, "mainloop", None), DequantisingMainloop)


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize(("m", "n", "k", "group", "dtype"), [
    (33, 64, 128, 128, F16), (65, 136, 64, 32, F16), (257, 48, 192, 64, F16), (17, 64, 128, 128, E4M3), (70, 48, 256, 256, E4M3)])
def test_a_call_takes_it(machine: Any, m: int, n: int, k: int, group: int, dtype: Any, rng: np.random.Generator) -> None:
    """With an epilogue that sees columns, a result of another type, and other weights by the same plan."""
    b, other = (weights(rng, k, n, 4, group, True, dtype) for _ in "ab")
    x, bias = whole(rng, (m, k), dtype, 2), whole(rng, (n,), F32)
    out = machine.array(poison((m, n), F16))
    with machine.session():
        given, first, second = machine.array(x), at(machine, b), at(machine, other)
        plan = gk.plan(given, first, out=out, epilogue=epilogues.Bias(machine.array(bias)) | epilogues.ReLU())
        assert dequantises(plan) and plan.swap_ab
        for of, matrix in ((first, b), (second, other)):
            plan(given, of, out=out)
            wanted = np.maximum(expected(x, matrix) + bias, 0)
            assert np.array_equal(machine.numpy(out), wanted.astype(F16))
        for of, matrix in () if machine.emulated else ((first, b), (second, other)) * 2:       # the later ones are known
            gk.matmul(given, of, out=out)
            assert np.array_equal(machine.numpy(out), expected(x, matrix).astype(F16))


@pytest.mark.parametrize("case", ["few rows", "columns", "group", "2 bits", "C", "a transform", "rows of x by columns"])
def test_what_it_does_not_take_is_right(case: str, rng: np.random.Generator) -> None:
    m, n, k = (8 if case == "few rows" else 64), (36 if case == "columns" else 64), 192
    b = weights(rng, k, n, 2 if case == "2 bits" else 4, 96 if case == "group" else 64, True)
    x, c = whole(rng, (m, k), F16, 2), whole(rng, (m, n), F32) if case == "C" else None
    more = dict(transform_global_to_shared_a=gk.transforms.Map(lambda x: x + x)) if case == "a transform" else {}
    x = np.asfortranarray(x) if case == "rows of x by columns" else x
    out = poison((m, n), F32)
    assert not dequantises(plan_of(x, b, c=c, out=out, **more))
    with gk.emulate():
        gk.matmul(x, b, c, out=out, **more)
    assert np.array_equal(out, expected(x, b) * (2 if more else 1) + (0 if c is None else c))


@pytest.mark.parametrize("case", ["columns", "zero points", "C", "a transform", "rows of x by columns", "a stack", "fast", "FPU",
                                  "left", "x of 16 bits", "an interleaved one"])
def test_float8_is_refused_where_no_kernel_scales_sums(case: str, rng: np.random.Generator) -> None:
    """Any other kernel would round (q - zero) * scale to 8 bits."""
    n = 36 if case == "columns" else 40 if case == "zero points" else 64
    b, x = weights(rng, 256, n, 4, 128, case != "zero points", E4M3), whole(rng, (64, 256), E4M3, 2)
    c = whole(rng, (64, n), F32) if case == "C" else None
    more: dict[str, Any] = {"a transform": dict(transform_global_to_shared_a=gk.transforms.Map(lambda x: x + x)),
                            "fast": dict(precision="fast"), "FPU": dict(operator=gk.operators.FPUOp())}.get(case, {})
    x = {"rows of x by columns": np.asfortranarray(x), "a stack": np.stack((x, x)), "x of 16 bits": x.astype(F16)}.get(case, x)
    said = {"an interleaved one": "packed integers for products of float8", "x of 16 bits": "b has dtype float8"}
    with gk.emulate(), pytest.raises((gk.ConfigError, TypeError), match=said.get(case, r"8-bit floats by integers of 4 bits are")):
        if case == "left":
            gk.matmul(b, whole(rng, (64, 8), E4M3), dtype=F32)
        else:
            gk.matmul(x, InterleavedColumns(b, b) if case == "an interleaved one" else b, c, dtype=F32, **more)


@pytest.mark.parametrize("fields", [dict(group=64), dict(bits=2), dict(dtype=E5M2)], ids=repr)
def test_weights_that_float8_does_not_hold(fields: dict[str, Any]) -> None:
    given = {**dict(dtype=E4M3, bits=4, group=128), **fields}
    with pytest.raises(gk.ConfigError, match="with 8-bit floats go float8_e4m3fn, 4 bits and a group that is a multiple of 128"):
        GroupQuantised(given["dtype"], np.ones((1, 64), F16), given["bits"], given["group"])


def test_views(rng: np.random.Generator) -> None:
    """Rows of x and of D that begin at any 16 bytes, and scales in a larger array."""
    b, wide = weights(rng, 128, 64, 4, 64, False), whole(rng, (64, 136), F16, 2)
    held = np.full((2, 80), np.nan, F16)
    layout: Any = b.layout
    held[:, :64] = layout.scales
    b = Matrix(b.array, replace(layout, scales=held[:, :64]))
    x, out = wide[:, :128], poison((64, 72), F32)[:, :64]
    assert dequantises(plan_of(x, b, out=out))
    with gk.emulate():
        gk.matmul(x, b, out=out)
    assert np.array_equal(out, expected(x, b))


@pytest.mark.parametrize(("changed", "error", "said"), [
    (dict(scales=np.ones((2, 64), F32)), TypeError, "scales has dtype float32; float16 is needed"),
    (dict(scales=np.ones((1, 64), F16)), ValueError, r"scales has shape \(1, 64\); \(2, 64\) is needed for b"),
    (dict(zeros=np.ones((2, 64), np.int32)), TypeError, "zeros has dtype int32; uint8 is needed")])
def test_arrays_that_do_not_fit(changed: dict[str, Any], error: Any, said: str, rng: np.random.Generator) -> None:
    b, x = weights(rng, 128, 64, 4, 64, False), whole(rng, (64, 128), F16, 2)
    with gk.emulate(), pytest.raises(error, match=said):
        gk.matmul(x, Matrix(b.array, replace(b.layout, **changed)))


def test_another_kind_of_weights_is_refused_by_the_plan(rng: np.random.Generator) -> None:
    b, other = weights(rng, 128, 64, 4, 64, True), weights(rng, 128, 64, 4, 64, False)
    x, out = whole(rng, (64, 128), F16, 2), poison((64, 64), F32)
    plan = plan_of(x, b, out=out)
    with gk.emulate(), pytest.raises(ValueError, match="b differs from the plan's"):
        plan(x, other, out=out)


def test_out_shares_no_memory_with_scales(rng: np.random.Generator) -> None:
    b, x = weights(rng, 128, 64, 4, 64, True), whole(rng, (64, 128), F16, 2)
    held = np.zeros((64, 64), F32)
    scales = held.view(F16)[:2, :64]
    with gk.emulate(), pytest.raises(ValueError, match=r"scales of GroupQuantised \(b\) overlaps out"):
        gk.matmul(x, Matrix(b.array, replace(b.layout, scales=scales)), out=held)


# -- the instruction ------------------------------------------------------------------------------------------------------

def dequantised_bytes(out: Any, words: Any, scales: Any, zeros: Any) -> None:
    """A thread's words, of which it takes byte t % 4, by two scales in turn."""
    t = thread_index()
    found = dequantise_bytes((words[t, 0], words[t, 1], words[t, 2], words[t, 3]), t % 4,
                             (zero_words(4, zeros[t, 0]), zero_words(4, zeros[t, 1])), (scales[t, 0], scales[t, 1]))
    out[t, 0], out[t, 1], out[t, 2], out[t, 3] = found[0], found[1], found[2], found[3]


def interpreted(kernel: Any, out: Out, *arrays: np.ndarray, threads: int) -> list[np.ndarray]:
    """By the compiled kernel's PTX."""
    found, given = out.empty(), [aligned(array) for array in arrays]
    held = [found, *given]
    leaves = [list(freeze_array(describe(array)).leaves) for array in held]
    parameters = [value for array, own in zip(held, leaves) for value in (array, *(value for _, value in own[1:]))]
    run_ptx(compiled(kernel, out, *arrays, threads=threads), threads, 1, parameters, held)
    return [found]


@pytest.mark.sample(3)
@pytest.mark.parametrize("run", [emulated, pytest.param(interpreted, marks=pytest.mark.compile),
                                 pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "ptx", "gpu"])
def test_dequantise_bytes(run: Any, rng: np.random.Generator) -> None:
    """All 256 bytes in all four places, with all zero points and signs of scales, among them subnormal and infinite ones."""
    threads = 256
    t = np.arange(threads)
    bytes_of = np.stack([(64 * n + t // 4) % 256 for n in range(4)], 1).astype(np.uint32)
    place = (8 * (t % 4)).astype(np.uint32)[:, None]
    words = rng.integers(0, 2**32, (threads, 4), np.uint32) & ~(np.uint32(0xFF) << place) | bytes_of << place
    zeros = np.stack([t // 16, t % 16], 1).astype(np.uint32)
    scales = rng.standard_normal((threads, 2)).astype(F16)
    scales[:3, 0], scales[5, 1] = (np.inf, 6e-8, -65504), np.nan
    pairs = np.stack([bytes_of & 15, bytes_of >> 4], 2).astype(F32) - np.tile(zeros, 2)[..., None]
    with np.errstate(all="ignore"):
        wanted = (pairs * np.tile(scales.astype(F32), 2)[..., None]).astype(F16)
    (out,) = run(dequantised_bytes, Out((threads, 4), np.uint32), words, scales.view(np.uint16) * np.uint32(0x10001), zeros,
                 threads=threads)
    assert np.array_equal(out.view(F16).reshape(wanted.shape), wanted, equal_nan=True)


def as_floats(out: Any, words: Any, zeros: Any) -> None:
    """A thread's words, of which it takes half t % 2, by two zero points in turn."""
    t = thread_index()
    found = as_float8((words[t, 0], words[t, 1], words[t, 2], words[t, 3]), t % 2, (float8_table(zeros[t, 0]), float8_table(zeros[t, 1])))
    out[t, 0], out[t, 1], out[t, 2], out[t, 3] = found[0], found[1], found[2], found[3]


@pytest.mark.sample(3)
@pytest.mark.parametrize("run", [emulated, pytest.param(interpreted, marks=pytest.mark.compile),
                                 pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "ptx", "gpu"])
def test_as_float8(run: Any, rng: np.random.Generator) -> None:
    """All integers in all eight places, with all zero points."""
    threads = 256
    t = np.arange(threads)
    words = np.stack([np.uint32(0x76543210) + np.uint32(0x11111111) * np.uint32(n) for n in range(4)])[None] ^ (
        rng.integers(0, 2**32, (threads, 4), np.uint32) & np.where(t % 4 < 2, 0, 0xFFFFFFFF).astype(np.uint32)[:, None])
    zeros = np.stack([t // 16, t % 16], 1).astype(np.uint32)
    places = 4 * np.arange(4, dtype=np.uint32) + (16 * (t % 2)).astype(np.uint32)[:, None, None]
    wanted = (words[..., None] >> places & 15).astype(int) - np.tile(zeros.astype(int), 2)[..., None]
    (out,) = run(as_floats, Out((threads, 4), np.uint32), words, zeros, threads=threads)
    assert np.array_equal(out.view(E4M3).reshape(wanted.shape).astype(int), wanted)


def as_halves(out: Any, words: Any) -> None:
    t = thread_index()
    out[t, 0], out[t, 1] = as_float16((words[t],))


@pytest.mark.sample(3)
@pytest.mark.parametrize("run", [emulated, pytest.param(interpreted, marks=pytest.mark.compile),
                                 pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "ptx", "gpu"])
def test_as_float16(run: Any) -> None:
    """All 256 floats, NaN among them, in all four places."""
    given = np.arange(256, dtype=np.uint8)[:, None] + np.array([0, 1, 100, 200], np.uint8)
    (out,) = run(as_halves, Out((256, 2), np.uint32), given.view(np.uint32)[:, 0], threads=256)
    assert np.array_equal(out.view(F16), given.view(E4M3).astype(F16), equal_nan=True)


# -- machine code ---------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.parametrize(("rows", "symmetric", "dtype"), [
    (64, True, F16), pytest.param(128, False, F16, marks=pytest.mark.thorough), (64, False, BF16)])
def test_its_code(rows: int, symmetric: bool, dtype: Any, rng: np.random.Generator) -> None:
    """Nothing is spilled, no wgmma waits for another, and two weights take four instructions."""
    b, x = weights(rng, 4096, 4096, 4, 128, symmetric, dtype), np.ones((rows, 4096), dtype)
    (found,) = recorded(lambda: gk.matmul(x, b, out=np.empty((rows, 4096), dtype)), H100)
    made = compiled_kernel(found, H100)
    assert made.usage.spill_stores == made.usage.spill_loads == made.usage.stack_bytes == 0
    assert not made.assembled.warnings
    # The loop has a stage's pairs; in front of it stand those of the first portion.
    loop, counts = made.config.block_shape.size.K // 16, made.instructions
    first = found.spec.mainloop.steps
    assert counts["HGMMA"] == loop
    for name in ("HFMA2", "HMUL2"):
        ours = sum(count for of, count in counts.items() if of.startswith(name))
        assert 4 * (loop + first) <= ours <= 4 * (loop + first) + 4, counts


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.parametrize("one", [one for one in sm90.DEQUANTISED.mappings + sm90.DEQUANTISED.workspace if one.splits == 1], ids=lambda one: f"{one.M}x{one.N}")
def test_code_of_all_tiles(one: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Of weights that take the most registers: with zero points, as bfloat16, and with two groups in a stage."""
    monkeypatch.setattr(sm90, "DEQUANTISED", sm90.MappingTable((one,)))
    b, x = weights(rng, 1024, 512, 4, one.depth // 4, False, BF16), np.ones((one.N, 1024), BF16)
    (found,) = recorded(lambda: gk.matmul(x, b, out=np.empty((one.N, 512), BF16)), H100)
    made = compiled_kernel(found, H100)
    assert found.problem.config.block_shape.size.M == one.M
    assert made.usage.spill_stores == made.usage.spill_loads == made.usage.stack_bytes == 0
    assert not made.assembled.warnings


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(3)
@pytest.mark.parametrize("one", [one for one in sm90.DEQUANTISED_FLOAT8.mappings + sm90.DEQUANTISED_FLOAT8.workspace if one.splits == 1], ids=lambda one: f"{one.M}x{one.N}")
def test_code_of_float8(one: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Nothing is spilled, no wgmma waits for another, and eight weights take fifteen instructions at most."""
    monkeypatch.setattr(sm90, "DEQUANTISED_FLOAT8", sm90.MappingTable((one,)))
    b, x = weights(rng, 1024, 512, 4, 128, True, E4M3), np.ones((one.N + 1, 1024), E4M3)       # of fewer rows it takes 16
    (found,) = recorded(lambda: gk.matmul(x, b, out=np.empty((one.N + 1, 512), BF16)), H100)
    made = compiled_kernel(found, H100)
    assert found.problem.config.block_shape.size.M == one.M
    assert made.usage.spill_stores == made.usage.spill_loads == made.usage.stack_bytes == 0
    assert not made.assembled.warnings
    counts, words = made.instructions, 16 * 2                  # pairs of words of a stage: in the loop, and half before it
    assert made.instructions["QGMMA"] == 4
    assert sum(count for of, count in counts.items() if of.split(".")[0] == "PRMT") <= 7 * words + 10
