from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest

from gemmkit.runtime import device, launch
from gemmkit.runtime import device as launch_config
from gemmkit.runtime.device import H100, DeviceInfo
from gemmkit.runtime.launch import PARAMETER_FORMATS, BoundLaunch, LaunchError, load, validate

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


def test_loading_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(device, "_absence", lambda: "no driver")
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
    assert ctypes.sizeof(launch_config.Config) == 56
    assert (launch_config.Config.stream.offset, launch_config.Config.attributes.offset) == (32, 40)
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
    for stream, addresses in ((1, (10, 20)), (2, (10, 20)), (3, (10, 30)), (4, (10, 20))):
        launch(stream, addresses)
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


def test_a_thread_without_a_context_gets_one_and_the_launch_is_made(monkeypatch):
    driver, asked = Driver(["i32"], statuses=[201, 0]), []
    monkeypatch.setattr(device, "ensure_context", asked.append)
    bound_to(driver, monkeypatch).launch(3, (8,))
    assert asked == [0]
    assert [(seen[3], seen[5]) for seen in driver.seen] == [(3, (8,))] * 2
