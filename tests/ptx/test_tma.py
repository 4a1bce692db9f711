"""TMA: what boxes bring where, on the emulator and on hardware, and the faults of kernels that use it."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemmkit.emulator import errors
from gemmkit.emulator.copies import EmulatedTensorMap
from gemmkit.ptx.barriers import (
    cluster_barrier,
    cluster_rank,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_fence_init,
    mbarrier_init,
    mbarrier_wait,
)
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, block_x, thread_index
from gemmkit.ptx.tma import (
    tma_add,
    tma_commit,
    tma_load,
    tma_load_multicast,
    tma_prefetch,
    tma_store,
    tma_wait,
    tma_wait_read,
)
from gemmkit.ptx.wgmma import fence_async
from gemmkit.runtime.compile import assemble, disassemble, instruction_counts
from gemmkit.runtime.tensor_maps import TensorMapSpec
from tests.support.harness import Out, Runtime, instructions, leaves_nothing, lines_with, same_bits
from tests.support.launching import POISON, Tensor, compiled, emulated, on_device

# ==========================================================================================================================
# TMA: what boxes bring where, on the emulator and on hardware, and the faults of kernels that use it.

F16, F32, U32, U64 = np.dtype("f2"), np.dtype("f4"), np.dtype("u4"), np.dtype("u8")
BARRIERS = 32768                                  # where the barriers lie, behind the data
SHARED = BARRIERS + 64


# -- round trips ------------------------------------------------------------------------------------------------------

def begin(arrivals: int) -> None:
    """One barrier, seen by all threads and by TMA."""
    if thread_index() == 0:
        mbarrier_init(shared(U64, BARRIERS), 0, arrivals)
        mbarrier_fence_init()
    barrier()


def dump(out: Any, data: Any, words: int) -> None:
    i = thread_index()
    while i < words:
        out[i] = data[i]
        i += 128


def round_trip_2d(source: Any, target: Any, out: Any, nbytes: int, x: int, y: int, tx: int, ty: int) -> None:
    """A box from (x, y) to shared memory, which is shown in ``out``, and from there to (tx, ty)."""
    data, full = shared(U32, 1024), shared(U64, BARRIERS)
    tma_prefetch(source)
    begin(1)
    if thread_index() == 0:
        mbarrier_expect(full, 0, nbytes)
        tma_load(source, (x, y), data, 0, full, 0)
    mbarrier_wait(full, 0, 0)
    dump(out, data, nbytes // 4)
    if thread_index() == 0:
        tma_store(target, (tx, ty), data, 0)
        tma_commit()
        tma_wait(0)


def round_trip_3d(source: Any, target: Any, out: Any, nbytes: int, x: int, y: int, z: int, tx: int, ty: int,
                  tz: int) -> None:
    data, full = shared(U32, 1024), shared(U64, BARRIERS)
    begin(1)
    if thread_index() == 0:
        mbarrier_expect(full, 0, nbytes)
        tma_load(source, (x, y, z), data, 0, full, 0)
    mbarrier_wait(full, 0, 0)
    dump(out, data, nbytes // 4)
    if thread_index() == 0:
        tma_store(target, (tx, ty, tz), data, 0)
        tma_commit()
        tma_wait(0)


def arguments_of(spec: TensorMapSpec, shape: tuple, source_at: tuple, target_at: tuple) -> tuple:
    values = np.random.default_rng(3).integers(0, 256, (*shape[:-1], shape[-1] * spec.dtype.itemsize), np.uint8)
    return (Tensor(values.view(spec.dtype), spec), Tensor(Out(shape, spec.dtype), spec), Out((spec.box_bytes // 4,), U32),
            spec.box_bytes, *map(Runtime, (*source_at, *target_at)))


def expected(arguments: tuple) -> tuple[np.ndarray, np.ndarray]:
    """The target and shared memory, byte by byte from the definitions."""
    source, target, _, _, *places = arguments
    spec, values = source.spec, source.array
    numbers = [place.value for place in places]
    rank, size = spec.rank, spec.dtype.itemsize
    out = np.full(target.array.shape, POISON, np.uint8).repeat(size, axis=-1).view(spec.dtype)
    linear = np.zeros(spec.box_bytes, np.uint8)
    for n, at in enumerate(product(*map(range, reversed(spec.box)))):
        inner = at[::-1]
        source_at = tuple(i + c for i, c in zip(inner, numbers[:rank]))[::-1]
        target_at = tuple(i + c for i, c in zip(inner, numbers[rank:]))[::-1]
        element = np.zeros(1, spec.dtype)
        if all(0 <= i < extent for i, extent in zip(source_at, values.shape)):
            element[0] = values[source_at]
        linear[n * size:(n + 1) * size] = element.view(np.uint8)
        if all(0 <= i < extent for i, extent in zip(target_at, out.shape)):
            out[target_at] = element[0]
    bits = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[spec.swizzle]
    memory = np.empty_like(linear)
    for a, byte in enumerate(linear):
        memory[a ^ ((a >> 3) & bits)] = byte
    return out, memory.view(U32)


# As the hardware takes them: the first coordinate in multiples of 16 bytes, none of a store negative.
CASES_2D = [
    (TensorMapSpec("f2", (64, 16), 128), (40, 72), (0, 0), (0, 8)),
    (TensorMapSpec("f2", (64, 16), 128), (40, 72), (-8, 30), (24, 31)),            # over three edges
    (TensorMapSpec("f2", (32, 16), 64), (40, 72), (64, -5), (48, 35)),
    (TensorMapSpec("f2", (16, 24), 32), (40, 72), (64, 37), (64, 0)),
    (TensorMapSpec("f2", (40, 16), 0), (40, 72), (40, 20), (56, 30)),
    (TensorMapSpec("f4", (32, 16), 128), (40, 36), (8, 30), (12, 1)),
    (TensorMapSpec(ml_dtypes.bfloat16, (64, 8), 128), (40, 72), (-16, 33), (8, 3)),
    (TensorMapSpec("i1", (128, 8), 128), (24, 144), (112, 3), (32, 20)),
    (TensorMapSpec("f8", (16, 8), 128), (24, 18), (4, 17), (6, 0)),
    (TensorMapSpec("f2", (64, 16), 128), (40, 72), (104, 0), (0, 50)),             # out of the tensor altogether
]
CASES_3D = [
    (TensorMapSpec("f2", (64, 4, 3), 128), (5, 10, 72), (16, 8, 3), (16, 7, 4)),
    (TensorMapSpec("f4", (8, 4, 4), 32), (5, 10, 12), (4, 2, -1), (8, 9, 0)),
]


@pytest.mark.parametrize("case", CASES_2D + CASES_3D, ids=str)
def test_a_box_goes_where_the_definition_says(case: tuple) -> None:
    given = arguments_of(*case)
    kernel = round_trip_2d if case[0].rank == 2 else round_trip_3d
    for got, wanted in zip(emulated(kernel, *given, shared=SHARED), expected(given)):
        assert same_bits(got, wanted)


@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES_2D + CASES_3D, ids=str)
def test_hardware_does_as_the_emulation(case: tuple) -> None:
    given = arguments_of(*case)
    kernel = round_trip_2d if case[0].rank == 2 else round_trip_3d
    for got, wanted in zip(on_device(kernel, *given, shared=SHARED), emulated(kernel, *given, shared=SHARED)):
        assert same_bits(got, wanted)


def stored_and_added(source: Any, target: Any, nbytes: int, x: int, y: int) -> None:
    """A box is stored, and then added twice."""
    data, full = shared(U32, 1024), shared(U64, BARRIERS)
    begin(1)
    if thread_index() == 0:
        mbarrier_expect(full, 0, nbytes)
        tma_load(source, (0, 0), data, 0, full, 0)
    mbarrier_wait(full, 0, 0)
    if thread_index() == 0:
        tma_store(target, (x, y), data, 0)
        tma_commit()
        tma_wait(0)
        for _ in range(2):
            tma_add(target, (x, y), data, 0)
        tma_commit()
        tma_wait(0)


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulated", "on a GPU"])
@pytest.mark.parametrize("swizzle", [0, 64, 128])
def test_a_box_is_added(run: Any, swizzle: int) -> None:
    spec, shape, (x, y) = TensorMapSpec("f4", (swizzle // 4 or 24, 16), swizzle), (20, 40), (16, 8)
    values = np.random.default_rng(3).standard_normal(shape, np.float32)
    wanted = np.full((*shape[:1], 4 * shape[1]), POISON, np.uint8).view(np.float32)
    columns = min(spec.box[0], shape[1] - x)
    wanted[y:y + 16, x:x + columns] = 3 * values[:12, :columns]
    (found,) = run(stored_and_added, Tensor(values, spec), Tensor(Out(shape, F32), spec), spec.box_bytes, Runtime(x), Runtime(y), shared=SHARED)
    assert np.allclose(found.view(np.float32), wanted, 1e-6, 0, equal_nan=True)


def test_what_is_added_is_float32() -> None:
    def kernel(target: Any) -> None:
        if thread_index() == 0:
            tma_add(target, (0, 0), shared(U32, 0), 0)

    with pytest.raises(errors.ProtocolError, match="of float16; it adds float32"):
        emulated(kernel, Tensor(Out((16, 64), F16), SPEC), shared=SHARED)
    ptx = compiled(kernel, Tensor(Out((16, 32), F32), TensorMapSpec("f4", (32, 16), 128)))
    assert instructions(ptx)["cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"] == 1
    assert instruction_counts(disassemble(assemble(ptx).cubin))["UTMAREDG"] == 1


def test_the_map_is_a_parameter_and_nothing_is_copied() -> None:
    ptx = compiled(round_trip_2d, *arguments_of(*CASES_2D[0]))
    assert leaves_nothing(ptx)
    assert "GEMMKIT" not in ptx
    assert len(lines_with(ptx, ".param .align 64 .b8 gemmkit_kernel_param_")) == 2
    assert not lines_with(ptx, "ld.param.v") and not lines_with(ptx, "ld.param.b64")
    found = instructions(ptx)
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    assert found[load] == found["cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"] == 1
    assembled = assemble(ptx)
    assert assembled.usage.stack_bytes == assembled.usage.spill_stores == 0
    sass = instruction_counts(disassemble(assembled.cubin))
    assert sass["UTMALDG"] == sass["UTMASTG"] == 1


# -- clusters ---------------------------------------------------------------------------------------------------------

SPEC = TensorMapSpec("f2", (64, 8), 128)


def shared_out(source: Any, out: Any) -> None:
    """Two blocks each load half of a tile for both; out[block] is the whole tile."""
    data, full = shared(U32, 0), shared(U64, BARRIERS)
    begin(1)
    cluster_barrier()
    if thread_index() == 0:
        mbarrier_expect(full, 0, 2048)
        tma_load_multicast(source, (0, 8 * cluster_rank()), data, 256 * cluster_rank(), full, 0, 3)
    mbarrier_wait(full, 0, 0)
    i = thread_index()
    while i < 512:
        out[block_x(), i] = data[i]
        i += 128
    cluster_barrier()


def multicast_arguments() -> tuple:
    return Tensor(np.random.default_rng(4).standard_normal((16, 64)).astype(F16), SPEC), Out((2, 512), U32)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_multicast_reaches_every_block(seed: int | None) -> None:
    given = multicast_arguments()
    (out,) = emulated(shared_out, *given, shared=SHARED, blocks=2, cluster=2, seed=seed)
    rows = given[0].array.view(np.uint8).reshape(16, 8, 16)
    wanted = np.stack([row[np.arange(8) ^ (n % 8)] for n, row in enumerate(rows)]).view(U32).reshape(-1)
    assert same_bits(out[0], wanted) and same_bits(out[1], wanted)


@pytest.mark.gpu
def test_a_multicast_on_hardware() -> None:
    given = multicast_arguments()
    (wanted,) = emulated(shared_out, *given, shared=SHARED, blocks=2, cluster=2)
    (got,) = on_device(shared_out, *given, shared=SHARED, blocks=2, cluster=2)
    assert same_bits(got, wanted)


def test_a_multicast_before_the_other_block_is_ready_is_a_fault() -> None:
    def kernel(source: Any) -> None:
        data, full = shared(U32, 0), shared(U64, BARRIERS)
        begin(1)
        if thread_index() == 0:
            mbarrier_expect(full, 0, 2048)
            tma_load_multicast(source, (0, 0), data, 256 * cluster_rank(), full, 0, 3)
        mbarrier_wait(full, 0, 0)
        cluster_barrier()

    with pytest.raises(errors.ProtocolError, match="no mbarrier at offset|nothing orders the mbarrier_init"):
        emulated(kernel, multicast_arguments()[0], shared=SHARED, blocks=2, cluster=2)


# -- faults -----------------------------------------------------------------------------------------------------------

def source(rows: int = 16) -> Tensor:
    return Tensor(np.ones((rows, 64), F16), SPEC)


def at(position: int) -> Any:
    def kernel(source: Any) -> None:
        data, full = shared(U32, 0), shared(U64, BARRIERS)
        begin(1)
        if thread_index() == 0:
            mbarrier_expect(full, 0, 1024)
            tma_load(source, (0, 0), data, position, full, 0)
        mbarrier_wait(full, 0, 0)

    return kernel


# -- specifications ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("arguments", "error", "message"), [
    (("f2", (), 0), ValueError, "1 to 5 extents"),
    (("f2", (257, 8), 0), ValueError, "from 1 to 256"),
    (("f2", (4, 8), 0), ValueError, "rows have 8 bytes; a multiple of 16"),
    (("f2", (64, 8), 16), ValueError, "0 .none., 32, 64 or 128"),
    (("f2", (32, 8), 128), ValueError, "rows of 128 bytes are needed; these have 64"),
    (("c16", (8, 8), 0), TypeError, "1, 2, 4 or 8 bytes"),
])
def test_boxes_that_cannot_be_moved(arguments: tuple, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        TensorMapSpec(*arguments)


def test_a_view_that_cannot_be_moved() -> None:
    from gemmkit.emulator.memory import Memory
    from gemmkit.lang.host import View

    array = np.zeros((8, 9), F16)
    with pytest.raises(ValueError, match="operand cannot be moved by TMA: its stride along axis 0 is 18 bytes"):
        EmulatedTensorMap.of(View(array, Memory.for_array(array, "operand"), 1, 2), SPEC)


# ==========================================================================================================================
# The faults of kernels that use TMA: reads without waiting, stages given back early, stores without a fence, counts that differ.


def load_and_read(source: Any, nbytes: int, waits: bool) -> None:
    data, full = shared(U32, 0), shared(U64, BARRIERS)
    data[thread_index()] = np.uint32(0)
    begin(1)
    if thread_index() == 0:
        mbarrier_expect(full, 0, nbytes)
        tma_load(source, (0, 0), data, 0, full, 0)
    if waits:
        mbarrier_wait(full, 0, 0)
    data[thread_index()]


def test_the_kernel_of_these_faults_is_right_without_them() -> None:
    emulated(load_and_read, source(), 1024, True, shared=SHARED)


def test_a_read_without_waiting_is_a_race() -> None:
    for seed in (None, 0, 1):
        with pytest.raises(errors.RaceError, match=r"by TMA of block \(0, 0, 0\)"):
            emulated(load_and_read, source(), 1024, False, shared=SHARED, seed=seed)


def test_waiting_for_one_stage_says_nothing_of_another() -> None:
    def kernel(source: Any) -> None:
        data, full = shared(U32, 0), shared(U64, BARRIERS)
        if thread_index() == 0:
            mbarrier_init(full, 1, 1)
        begin(1)
        if thread_index() == 0:
            for stage in range(2):
                mbarrier_expect(full, stage, 1024)
                tma_load(source, (0, 0), data, 256 * stage, full, stage)
        mbarrier_wait(full, 1, 0)
        data[thread_index()]

    with pytest.raises(errors.RaceError, match="first a write by TMA"):
        emulated(kernel, source(), shared=SHARED)


@pytest.mark.parametrize("nbytes", [1040, 2048])
def test_expecting_too_many_bytes_is_a_deadlock(nbytes: int) -> None:
    with pytest.raises(errors.DeadlockError, match=rf"phase 0 of the mbarrier at offset {BARRIERS}, which lacks 0 of 1 "
                                                   rf"arrivals and {nbytes - 1024} bytes"):
        emulated(load_and_read, source(), nbytes, True, shared=SHARED)


def test_expecting_too_few_bytes_is_a_deadlock() -> None:
    with pytest.raises(errors.DeadlockError, match="-512 bytes"):
        emulated(load_and_read, source(), 512, True, shared=SHARED)


@pytest.mark.parametrize("at, said", [((8, -1), "must not be negative"), ((-8, 0), "must not be negative"),
                                      ((4, 0), "multiple of 16 bytes")])
def test_the_places_that_no_store_can_go_to(at: tuple, said: str) -> None:
    """Illegal instructions on an H100."""
    def kernel(target: Any, x: int, y: int) -> None:
        if thread_index() == 0:
            tma_store(target, (x, y), shared(U32, 0), 0)

    with pytest.raises(errors.ProtocolError, match=said):
        emulated(kernel, Tensor(Out((16, 64), F16), SPEC), *map(Runtime, at), shared=SHARED)


def test_a_store_to_rows_that_end_between_chunks() -> None:
    """On an H100 it writes the rest of the last 16 bytes as well."""
    def kernel(target: Any) -> None:
        if thread_index() == 0:
            tma_store(target, (0, 0), shared(U32, 0), 0)

    narrow = Tensor(Out((1, 60), F16), SPEC)
    with pytest.raises(errors.ProtocolError, match="whose rows have 120 bytes"):
        emulated(kernel, narrow, shared=SHARED)


def test_a_load_from_between_chunks() -> None:
    def kernel(source: Any) -> None:
        begin(1)
        if thread_index() == 0:
            tma_load(source, (1, 0), shared(U32, 0), 0, shared(U64, BARRIERS), 0)

    with pytest.raises(errors.ProtocolError, match="multiple of 16 bytes"):
        emulated(kernel, source(), shared=SHARED)


def ring(source: Any, out: Any, early: bool) -> None:
    """One stage, filled twice; consumers give it back after (or before) they have read it."""
    data, full, empty = shared(U32, 0), shared(U64, BARRIERS), shared(U64, BARRIERS + 8)
    if thread_index() == 0:
        mbarrier_init(empty, 0, 96)
    begin(1)
    for n in range(2):
        if thread_index() < 32:
            if thread_index() == 0:
                mbarrier_wait(empty, 0, 1 - n)
                mbarrier_expect(full, 0, 1024)
                tma_load(source, (0, 8 * n), data, 0, full, 0)
        else:
            mbarrier_wait(full, 0, n)
            if early:
                mbarrier_arrive(empty, 0)
            out[n, thread_index() - 32] = data[thread_index()]
            if not early:
                mbarrier_arrive(empty, 0)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_stage_given_back_too_early_is_a_race(seed: int | None) -> None:
    emulated(ring, source(), Out((2, 96), U32), False, shared=SHARED, seed=seed)
    with pytest.raises(errors.RaceError) as caught:
        emulated(ring, source(), Out((2, 96), U32), True, shared=SHARED, seed=seed)
    assert {access.kind for access in caught.value.accesses} == {"read", "write"}
    assert any("TMA" in str(access.thread) for access in caught.value.accesses)


def write_and_store(target: Any, waits: Any, fenced: bool) -> None:
    """Two tiles from one buffer."""
    data = shared(U32, 0)
    for n in range(2):
        for i in range(2):
            data[thread_index() + 128 * i] = np.uint32(n)
        if fenced:
            fence_async()
        barrier()
        if thread_index() == 0:
            tma_store(target, (0, 8 * n), data, 0)
            tma_commit()
            waits()
        barrier()


def wait_read() -> None:
    tma_wait_read(0)


def wait_too_little() -> None:
    tma_wait_read(1)


def wait_for_all() -> None:
    tma_wait(0)


TARGET = Tensor(Out((16, 64), F16), SPEC)


@pytest.mark.parametrize("waits", [wait_read, wait_for_all])
def test_stores_that_are_awaited(waits: Any) -> None:
    (out,) = emulated(write_and_store, TARGET, waits, True, shared=1024)
    assert same_bits(out.view(U32), np.repeat(np.arange(2, dtype=U32), 8)[:, None] * np.ones(32, U32))


def test_a_buffer_that_is_used_again_before_it_was_read_is_a_race() -> None:
    with pytest.raises(errors.RaceError, match="first a read by TMA"):
        emulated(write_and_store, TARGET, wait_too_little, True, shared=1024)


def test_a_store_without_fence_is_a_fault() -> None:
    with pytest.raises(errors.ProxyError, match="fence_async"):
        emulated(write_and_store, TARGET, wait_read, False, shared=1024)


@pytest.mark.parametrize("commits", [False, True])
def test_a_thread_does_not_end_before_its_stores_have_read(commits: bool) -> None:
    def kernel(target: Any) -> None:
        data = shared(U32, 0)
        for i in range(2):
            data[thread_index() + 128 * i] = np.uint32(1)
        fence_async()
        barrier()
        if thread_index() == 0:
            tma_store(target, (0, 0), data, 0)
            if commits:
                tma_commit()
            else:
                tma_wait_read(0)

    with pytest.raises(errors.ProtocolError, match="may still read shared memory") as caught:
        emulated(kernel, TARGET, shared=1024)
    assert "tma_store(target" in caught.value.kernel_line.text


def store_and_load(target: Any, out: Any, done: bool) -> None:
    """A box goes to the tensor and comes back to another place."""
    data, back, full = shared(U32, 0), shared(U32, 1024), shared(U64, BARRIERS)
    begin(1)
    for i in range(2):
        data[thread_index() + 128 * i] = np.uint32(7)
    fence_async()
    barrier()
    if thread_index() == 0:
        tma_store(target, (0, 0), data, 0)
        tma_commit()
        if done:
            tma_wait(0)
        else:
            tma_wait_read(0)
        mbarrier_expect(full, 0, 1024)
        tma_load(target, (0, 0), back, 0, full, 0)
    mbarrier_wait(full, 0, 0)
    out[thread_index()] = back[thread_index()]


def test_to_have_read_is_not_to_have_written() -> None:
    _, out = emulated(store_and_load, TARGET, Out((128,), U32), True, shared=SHARED)
    assert (out == 7).all()
    with pytest.raises(errors.RaceError, match="first a write by TMA"):
        emulated(store_and_load, TARGET, Out((128,), U32), False, shared=SHARED)


def test_a_box_that_does_not_fit() -> None:
    with pytest.raises(errors.BoundsError, match="1024 bytes at offset 32256"):
        emulated(at(32256 // 4), source(), shared=SHARED)


def test_a_box_begins_at_a_multiple_of_128_bytes() -> None:
    with pytest.raises(errors.AlignmentError, match="64 past a multiple of 128"):
        emulated(at(16), source(), shared=SHARED)


def test_a_copy_to_a_barrier_that_is_not_fenced() -> None:
    def kernel(source: Any) -> None:
        full = shared(U64, BARRIERS)
        if thread_index() == 0:
            mbarrier_init(full, 0, 1)
            tma_load(source, (0, 0), shared(U32, 0), 0, full, 0)

    with pytest.raises(errors.ProtocolError, match="mbarrier_fence_init has not followed"):
        emulated(kernel, source(), shared=SHARED)
