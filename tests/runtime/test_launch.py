"""Launches: their values, early launches, any kernel with any arguments, and workspaces."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import Component, freeze
from gemmkit.emulator.errors import ProtocolError
from gemmkit.kernels import rows as of_rows
from gemmkit.lang.functions import freeze_array
from gemmkit.plans.ahead import recorded
from gemmkit.ptx.special import block_x, thread_index
from gemmkit.runtime import cache, device, launch
from gemmkit.runtime import compile as compiling
from gemmkit.runtime import device as launch_config
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import cubin_of, key_of
from gemmkit.runtime.device import A100, B200, H100, DeviceInfo, current, gpu
from gemmkit.runtime.launch import PARAMETER_FORMATS, BoundLaunch, Launchable, LaunchError, Space, addresses, load, validate
from gemmkit.tools.cli import wanted
from tests.support import programs as listing
from tests.support import row_programs
from tests.support.patches import Seeded, Set
from tools import cubins

TURING = DeviceInfo("a Turing", (7, 5), 40, 65536, 65536, 1024, 65536, 4 * 2**20)


# -- limits --------------------------------------------------------------------------------------------------


def test_what_the_device_can_do_is_accepted():
    validate(H100, (2**31 - 1, 65535, 65535), (1024, 1, 1), 232448)
    validate(H100, (4, 2, 1), (128, 2, 4), 0, (2, 2, 1), static_shared_memory=232448)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 1, 1), (32, 1, 1), 0), r"grid=\(0, 1, 1\) must be at least 1"),
        (((1, 65536, 1), (32, 1, 1), 0), r"grid=\(1, 65536, 1\) .*65535"),
        (((1, 1, 1), (1, 1, 65), 0), r"block=\(1, 1, 65\) .*64"),
        (((1, 1, 1), (1024, 2, 1), 0), r"2048 threads, but NVIDIA H100.* at most 1024"),
        (((1, 1, 1), (32, 1, 1), 232449), r"shared_memory=232449 bytes.*232448.*fewer stages"),
        (((1, 1, 1), (32, 1, 1), -1), r"shared_memory=-1 bytes"),
        (((1, 1, 1), (32, 1, 1), 232448, None, 1), r"with 1 static bytes.*232448"),
        (((16, 1, 1), (32, 1, 1), 0, (16, 1, 1)), r"cluster=\(16, 1, 1\) must hold 1 to 8 blocks"),
        (((16, 1, 1), (32, 1, 1), 0, (0, 1, 1)), r"cluster=\(0, 1, 1\) must hold"),
        (
            ((3, 4, 1), (32, 1, 1), 0, (2, 1, 1)),
            r"grid=\(3, 4, 1\) must be a multiple of cluster=\(2, 1, 1\)",
        ),
    ],
)
def test_what_the_device_cannot_do_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        validate(H100, *arguments)


def test_clusters_need_hopper():
    with pytest.raises(ValueError, match=r"capability 9\.0 or later; a Turing has 7\.5"):
        validate(TURING, (2, 1, 1), (32, 1, 1), 0, (2, 1, 1))


@pytest.mark.parametrize("extents", [(), (1, 1, 1, 1)])
def test_one_to_three_extents(extents):
    with pytest.raises(ValueError, match=r"block=.*one to three extents"):
        launch_config.dim3(extents, "block")


def test_loading_without_a_gpu_says_so(gpus):
    gpus(absence="no driver")
    with pytest.raises(RuntimeError, match="no GPU can be used here"):
        load(b"\x7fELF", "k")


# -- what reaches the driver, with a driver of our own -------------------------------------------------------


class Driver:
    """Stands for cuLaunchKernelEx: notes grid, block, shared memory, stream, cluster and values."""

    def __init__(self, parameters, statuses=(), before=lambda: None):
        self.parameters, self.statuses, self.before, self.seen = parameters, list(statuses), before, []

    def __call__(self, config_pointer, function, pointers, extra):
        assert extra is None
        assert function.value == 77
        self.before()
        config = config_pointer._obj
        values = []
        for pointer, code in zip(pointers, self.parameters, strict=False):
            if code == "tensor_map":
                values.append(ctypes.string_at(pointer, 128))
            else:
                kind = launch_config.CTYPES[PARAMETER_FORMATS[code][0]]
                values.append(kind.from_address(pointer).value)
            assert pointer % min(PARAMETER_FORMATS[code][1], 8) == 0
        given = [config.attributes[n] for n in range(config.attribute_count)]
        self.attributes = {attribute.id: tuple(attribute.dimensions) for attribute in given}
        assert len(self.attributes) == len(given)
        cluster = self.attributes.get(4)
        grid, block = tuple(config.grid), tuple(config.block)
        self.seen.append((grid, block, config.shared_memory, config.stream, cluster, tuple(values)))
        return self.statuses.pop(0) if self.statuses else 0


def bound_to(driver, monkeypatch, cluster=None, dependent=False):
    monkeypatch.setattr(launch, "_entry", lambda: driver)
    kernel = SimpleNamespace(name="k")
    return BoundLaunch(kernel, 0, (5, 6, 7), (128, 2, 1), 98304, tuple(driver.parameters), cluster, 77, dependent)


def test_the_launch_structures_are_the_drivers():
    """Sizes and offsets of CUlaunchConfig and CUlaunchAttribute in cuda.h."""
    assert ctypes.sizeof(launch_config.DriverLaunchConfig) == 56
    assert (launch_config.DriverLaunchConfig.stream.offset, launch_config.DriverLaunchConfig.attributes.offset) == (32, 40)
    assert ctypes.sizeof(launch_config.Attribute) == 72
    assert launch_config.Attribute.dimensions.offset == 8


def test_every_value_arrives_whatever_its_neighbours(monkeypatch):
    values = {
        "bool": 1, "i8": -128, "u8": 255, "i16": -32768, "u16": 65535, "f16": 0x3C00, "bf16": 0x3F80,
        "i32": -(2**31), "u32": 2**32 - 1, "i64": -(2**63), "u64": 2**64 - 1, "f32": 0.5, "f64": 0.1,
        "tensor_map": bytes(range(128)),
    }  # fmt: skip
    assert values.keys() == PARAMETER_FORMATS.keys()
    codes = list(values) + list(reversed(values))
    driver = Driver(codes)
    bound_to(driver, monkeypatch)(0xABC, [values[code] for code in codes])
    assert driver.seen == [
        ((5, 6, 7), (128, 2, 1), 98304, 0xABC, None, tuple(values[code] for code in codes))
    ]


def test_a_cluster_is_passed_as_an_attribute(monkeypatch):
    driver = Driver(["i32"])
    bound = bound_to(driver, monkeypatch, cluster=(2, 1, 1))
    bound.launch(0, (1,))
    bound.launch(9, (2,))
    assert [(seen[3], seen[4], seen[5]) for seen in driver.seen] == [
        (0, (2, 1, 1), (1,)),
        (9, (2, 1, 1), (2,)),
    ]


@pytest.mark.parametrize("cluster", [None, (2, 1, 1)])
@pytest.mark.parametrize("dependent", [False, True])
def test_an_early_start_is_an_attribute_too(monkeypatch, cluster, dependent):
    driver = Driver([])
    bound_to(driver, monkeypatch, cluster, dependent).launch(0, ())
    wanted = {} if cluster is None else {4: cluster}
    assert driver.attributes == (wanted | {6: (1, 0, 0)} if dependent else wanted)


def test_tensor_maps_are_put_in_like_addresses(monkeypatch):
    codes = ["u64", "tensor_map", "i32", "tensor_map"]
    driver = Driver(codes)
    first, second = bytes(range(128)), bytes(reversed(range(128)))
    nothing = bytes(128)
    launch = bound_to(driver, monkeypatch).prepare((0, nothing, 7, nothing), [0, 1, 3])
    launch(1, (11, first, second))
    launch(2, (12, second, nothing))
    assert [seen[5] for seen in driver.seen] == [(11, first, 7, second), (12, second, 7, nothing)]


def test_a_prepared_launch_expands_addresses_once(monkeypatch):
    driver, expanded = Driver(["i32", "u64", "u64"]), []

    def expand(addresses):
        expanded.append(addresses)
        return addresses[0], addresses[1] + 1

    launch = bound_to(driver, monkeypatch).prepare((7, 0, 0), [1, 2], expand)
    for stream, places in ((1, (10, 20)), (2, (10, 20)), (3, (10, 30)), (4, (10, 20))):
        launch(stream, places)
    assert [(seen[3], seen[5]) for seen in driver.seen] == [
        (1, (7, 10, 21)), (2, (7, 10, 21)), (3, (7, 10, 31)), (4, (7, 10, 21))]  # fmt: skip
    assert expanded == [(10, 20), (10, 30)]
    for n in range(200):
        launch(0, (n, n))
        assert driver.seen[-1][5] == (7, n, n + 1)


def test_addresses_that_cannot_be_expanded_leave_nothing_behind(monkeypatch):
    driver = Driver(["u64"])

    def expand(addresses):
        if addresses[0] % 16:
            raise ValueError("odd")
        return addresses

    launch = bound_to(driver, monkeypatch).prepare((0,), [0], expand)
    launch(0, (16,))
    with pytest.raises(ValueError, match="odd"):
        launch(0, (17,))
    launch(0, (16,))
    assert [seen[5] for seen in driver.seen] == [(16,), (16,)]


def test_threads_of_a_prepared_launch_do_not_mix_their_addresses(monkeypatch):
    driver = Driver(["u64", "i32", "u64"], before=lambda: time.sleep(1e-4))
    launch, start = bound_to(driver, monkeypatch).prepare((0, 5, 0), [0, 2]), threading.Barrier(8)

    def work(number):
        start.wait()
        for i in range(100):
            launch(number, (number, i // 3))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sorted((entry[3], entry[5]) for entry in driver.seen)
    assert seen == [(number, (number, 5, i // 3)) for number in range(8) for i in range(100)]


def test_grids_of_a_kernel_share_buffers_and_no_values(monkeypatch):
    """Launches in turn: each has its own grid and constants, of equal addresses, too."""
    driver = Driver(["u64", "i32"])
    first = bound_to(driver, monkeypatch)
    bounds = [first, first.in_grid(9), first.in_grid(2)]
    launches = [bound.prepare((0, n), [0]) for n, bound in enumerate(bounds)]
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, at, general = int(rng.integers(3)), int(rng.integers(3)), rng.integers(4) == 0
        if general:
            bounds[n].launch(1, (at, 7))
        else:
            launches[n](1, (at,))
        grid, *_, values = driver.seen[-1]
        assert grid == ((5, 6, 7), (9, 1, 1), (2, 1, 1))[n] and values == (at, 7 if general else n)
    assert len(first.frames) == 1
    with pytest.raises(ValueError, match=r"grid=\(0, 1, 1\) must be at least 1"):
        first.in_grid(0)


def test_values_that_do_not_fit_are_named_before_a_prepared_launch(monkeypatch):
    bound = bound_to(Driver(["i32", "u64"]), monkeypatch)
    with pytest.raises(ValueError, match=r"(?s)values=.*parameters \['i32', 'u64'\] of kernel 'k'"):
        bound.prepare((2**31, 0), [1])


def test_a_kernel_without_parameters(monkeypatch):
    driver = Driver([])
    bound_to(driver, monkeypatch).launch(1, ())
    assert driver.seen[0][5] == ()


def test_numpy_scalars_are_taken_as_values(monkeypatch):
    import numpy as np

    driver = Driver(["i32", "f32", "f64"])
    bound_to(driver, monkeypatch).launch(0, (np.int64(3), np.float16(0.5), np.float32(2.0)))
    assert driver.seen[0][5] == (3, 0.5, 2.0)


@pytest.mark.parametrize(
    ("values", "why"),
    [((1,), "expected"), ((1, 2.0, 3), "expected"), ((2**31, 1.0), ""), (("x", 1.0), ""), ((1.5, 1.0), "")],
)
def test_values_that_do_not_fit_are_named_and_launch_nothing(monkeypatch, values, why):
    driver = Driver(["i32", "f32"])
    bound = bound_to(driver, monkeypatch)
    with pytest.raises(ValueError, match=rf"(?s)values=.*parameters \['i32', 'f32'\] of kernel 'k'.*{why}"):
        bound.launch(0, values)
    assert driver.seen == []
    bound.launch(0, (1, 1.0))
    assert len(driver.seen) == 1


def test_threads_do_not_mix_their_values(monkeypatch):
    """Each launch is interrupted between the packing of its values and the driver's reading of them."""
    codes = ["u64", "i32", "f64"]
    driver = Driver(codes, before=lambda: time.sleep(1e-4))
    bound, start = bound_to(driver, monkeypatch), threading.Barrier(8)

    def work(number):
        start.wait()
        for i in range(100):
            bound.launch(number, (number, i, number + 0.5))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sorted((entry[3], entry[5]) for entry in driver.seen)
    assert seen == [(number, (number, i, number + 0.5)) for number in range(8) for i in range(100)]


def test_a_launch_inside_a_launch_has_a_buffer_of_its_own(monkeypatch):
    driver = Driver(["i32"])
    bound = bound_to(driver, monkeypatch)

    def again():
        driver.before = lambda: None
        bound.launch(2, (2,))

    driver.before = again
    bound.launch(1, (1,))
    assert [(seen[3], seen[5]) for seen in driver.seen] == [(2, (2,)), (1, (1,))]


def test_an_error_of_the_driver_names_everything(monkeypatch):
    bound = bound_to(Driver(["i32"], statuses=[701]), monkeypatch, cluster=(1, 1, 1))
    message = (
        r"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES at .*'k' on device 0 .*grid=\(5, 6, 7\), block=\(128, 2, 1\), "
    )
    with pytest.raises(LaunchError, match=message + r"cluster=\(1, 1, 1\), shared_memory=98304"):
        bound.launch(0, (1,))
    bound.launch(0, (1,))


def test_an_error_of_an_earlier_kernel_is_said_to_be_one(monkeypatch):
    with pytest.raises(LaunchError, match=r"ILLEGAL_ADDRESS \(a kernel launched earlier went wrong\)"):
        bound_to(Driver(["i32"], statuses=[700]), monkeypatch).launch(0, (1,))


def test_a_status_nobody_knows_is_given_as_its_number(monkeypatch):
    with pytest.raises(LaunchError, match="CUDA error 123456"):
        bound_to(Driver(["i32"], statuses=[123456]), monkeypatch).launch(0, (1,))


def test_a_thread_without_a_context_gets_one_and_the_launch_is_made(monkeypatch, replaced):
    driver, asked = Driver(["i32"], statuses=[201, 0]), []
    replaced(device, "ensure_context", asked.append)
    bound_to(driver, monkeypatch).launch(3, (8,))
    assert asked == [0]
    assert [(seen[3], seen[5]) for seen in driver.seen] == [(3, (8,))] * 2


# ==========================================================================================================================
# Launches that begin before the kernel before them has ended: on GPUs that have them, and behind a wait for what they read.


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def attention() -> None:
    gk.attention(*(half(1, 2, 64, 64) for _ in range(3)))


def mlp() -> None:
    gk.mlp(half(64, 64), [half(64, 64), half(64, 64)])


def rows() -> None:
    gk.softmax(half(3, 64))


CALLS: dict[str, Callable[[], Any]] = {
    "attention": attention, "MLP": mlp, "rows": rows, "matmul": lambda: gk.matmul(half(64, 64), half(64, 64)),
    "program": lambda: listing.gemm(half(64, 64), half(64, 64), half(64, 64)),
    "program of rows": lambda: row_programs.softmax(half(3, 64), half(3, 64), scale=1.0),
    "shares": lambda: listing.attention(*(half(1, extent, 64) for extent in (16, 4096, 4096, 16)), 0.125)}


def launches(name: str, device: DeviceInfo) -> list[Any]:
    return [found.launchable for found in recorded(CALLS[name], device, zeros=False)]


@pytest.mark.parametrize("name", CALLS)
def test_they_begin_early_where_they_may(name: str) -> None:
    """On Hopper all; elsewhere the kernels of other GPUs: of those, functions of rows begin early where launches may."""
    found = launches(name, H100)
    assert len(found) == (2 if name == "shares" else 1) and all(launch.dependent for launch in found)
    assert not any(launch.dependent for launch in launches(name, A100))
    of_rows_alone = [launch.dependent for launch in launches(name, B200)]
    assert of_rows_alone == {"rows": [True], "program of rows": [True], "shares": [False, True]}.get(name, [False])


def test_what_does_not_wait_is_found(replaced: Seeded) -> None:
    with gk.emulate():
        rows()
        replaced(of_rows, "grid_wait", lambda: None)
        with pytest.raises(ProtocolError, match="call grid_wait first"):
            rows()


# ==========================================================================================================================
# `Launchable`: any kernel with any arguments.


@dataclass(frozen=True)
class Line(Component):
    """y = slope x + 1."""

    slope: gk.Scalar

    def __call__(self, x: Any) -> Any:
        return self.slope * x + 1


@dataclass(frozen=True)
class Quiet(Component):
    """No number of it is an argument."""


def apply_line(line: Any, quiet: Any, x: Any, y: Any) -> None:
    i = block_x() * 32 + thread_index()
    y[i] = line(x[i])


def launchable(x: Any, y: Any, target: Any, ordinal: int) -> Launchable:
    arguments = [freeze(Line(np.float32(3))), freeze(Quiet()), freeze_array(describe(x, "x"), readonly=True),
                 freeze_array(describe(y, "y"))]
    return Launchable(apply_line, arguments, threads=32, blocks=2, target=target, ordinal=ordinal)


def test_its_numbers_stand_in_the_order_of_its_arguments() -> None:
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    made = launchable(x, y, H100, -1)
    assert [made.slot(n) for n in range(4)] == [0, None, 1, 1 + len(made.arguments[2].leaves)]
    assert made.values[0] == 3 and made.values[made.slot(2)] == x.ctypes.data and made.values[made.slot(3)] == y.ctypes.data
    assert len(made.formats) == len(made.values)


def test_it_is_compiled_as_any_kernel() -> None:
    made = launchable(np.ones(64, np.float32), np.zeros(64, np.float32), H100, -1)
    entry = cubin_of(made.kernel, made.arguments, made.threads, made.target)
    assert entry.cubin and entry.meta["usage"]["spill_stores"] == 0
    made.forget_code()
    assert not any(argument.guards or argument.captures for argument in made.arguments)


def test_a_kernel_that_came_with_gemmkit_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         replaced: Seeded, environment: Set) -> None:
    """Unless its file is damaged, or it is for another GPU."""
    made = launchable(np.ones(64, np.float32), np.zeros(64, np.float32), H100, -1)
    given = made.kernel, made.arguments, made.threads
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "cubins")
    replaced(compiling, "to_ptx", lambda *given: pytest.fail("it was compiled"))
    environment(GEMMKIT_CACHE="0")
    cache.default_cache.cache_clear()
    came = cache.Entry(b"machine code", {"usage": {"spill_stores": 0}}, True)
    cache.ship(key_of(*given, H100), came, cache.SHIPPED)
    try:
        for _ in range(2):
            cache.shipped.cache_clear()
            assert cubin_of(*given, H100) == came
        (file,) = cache.SHIPPED.iterdir()
        whole = file.read_bytes()
        for target, content in ((H100, whole[:-1]), (H100, whole[:-1] + b"!"), (H100, b""), (A100, whole)):
            file.write_bytes(content)
            cache.shipped.cache_clear()
            with pytest.raises(pytest.fail.Exception, match="it was compiled"):
                cubin_of(*given, target)
    finally:
        cache.shipped.cache_clear()
        cache.default_cache.cache_clear()


def test_every_call_of_the_wheels_kernels_is_planned() -> None:
    """For each GPU that the wheel has kernels for."""
    some = cubins.calls()[::40]
    found = list(wanted(some, [gpu(name) for name in cubins.ARCHITECTURES], False))
    assert {kernel.launchable.target.arch_name for kernel in found} >= {"sm_80", "sm_89", "sm_90a"}
    assert {name for kernel in found for name in kernel.products} == {name for name, _ in some}


@pytest.mark.gpu
def test_it_runs() -> None:
    import cupy

    x, y = cupy.arange(64, dtype=cupy.float32), cupy.full(64, cupy.nan, cupy.float32)
    made = launchable(x, y, current(), x.device.id)
    made.bind().launch(cupy.cuda.get_current_stream().ptr, made.values)
    assert np.array_equal(cupy.asnumpy(y), 3 * np.arange(64, dtype=np.float32) + 1)


# ==========================================================================================================================
# `gemmkit.runtime.launch`: which streams share memory, and how often the driver is asked.

SPACES = [Space(0, "sums", 1 << 17), Space(1, "counts", 64)]


class Streams:
    """Stands for what the driver says of streams: 5 and 6 are, 7 is captured."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def capturing(self, handle: int) -> tuple[int, int]:
        self.asked.append(handle)
        return 0, int(handle == 7)

    def identity(self, handle: int) -> tuple[int, int]:
        self.asked.append(handle)
        return 0, 100 + handle


@pytest.fixture
def streams(replaced: Seeded, gpus: Set, driver_calls: Set) -> Streams:
    made = Streams()
    places = iter(range(1 << 20, 1 << 30, 1 << 20))

    def allocated(size: int, data: Any) -> int:
        return next(places)

    replaced(launch, "_kept", {})
    replaced(launch, "_allocated", allocated)
    gpus(count=1)
    driver_calls(cuStreamIsCapturing=made.capturing)
    driver_calls(cuStreamGetId=made.identity)
    driver_calls(cuStreamGetCaptureInfo=lambda handle: (0, 1, 12, 0, 0, 0))
    return made


def test_each_stream_and_each_capture_has_its_own(streams: Streams) -> None:
    found = [tuple(addresses(0, stream, SPACES)) for stream in (0, 5, 6, 7)]
    assert len({address for of_stream in found for address in of_stream}) == 8
    assert [tuple(addresses(0, stream, SPACES)) for stream in (0, 5, 6, 7)] == found


def test_of_the_default_stream_nobody_asks(streams: Streams) -> None:
    """No capture can begin on it, and its handle is always its own."""
    for _ in range(2):
        addresses(0, 0, SPACES)
    assert streams.asked == []
    addresses(0, 5, SPACES)
    assert streams.asked == [5, 5]


def test_a_kernel_without_workspaces_asks_nothing(streams: Streams) -> None:
    assert addresses(0, 5, []) == [] and streams.asked == []
