"""Devices: names of GPUs that are not here, and arrays on a device that is not current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
import gemmkit.runtime
from gemmkit import epilogues
from gemmkit.runtime import device, launch
from gemmkit.runtime.device import A100, GPUS, H100, T4, DeviceInfo, assumed, assumed_device, gpu, target
from tests.support.checks import assert_close
from tests.support.patches import Seeded, Set


def test_importing_the_runtime_loads_no_driver():
    """Neither the bindings nor an array library is imported before something is asked for.

    The package around it is left out: what else it imports is not the runtime's affair.
    """
    folder = str(Path(gemmkit.runtime.__file__).parent.parent)
    code = (
        "import sys, types; package = sys.modules['gemmkit'] = types.ModuleType('gemmkit')\n"
        f"package.__path__ = [{folder!r}]\n"
        "from gemmkit.runtime import arrays, cache, compile, device, launch\n"
        "heavy = {'cuda.bindings.driver', 'cuda.core', 'numba', 'cupy', 'torch'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_available_answers_without_raising():
    assert device.available() in (True, False)
    assert device.available() is device.available()


@pytest.mark.parametrize(
    ("arch", "name"),
    [((7, 5), "sm_75"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")],
)
def test_arch_name(arch, name):
    assert DeviceInfo("x", arch, 1, 1, 1, 1, 1, 1).arch_name == name


def test_without_a_gpu_the_target_is_an_h100(replaced, gpus):
    gpus(absence="no driver, says the test")
    replaced(device, "count", device.count.__wrapped__)
    assert not device.available()
    assert device.count() == 0
    assert device.target() is H100
    assert (H100.sm_count, H100.shared_memory_per_block, H100.l2_bytes) == (132, 232448, 52428800)


@pytest.mark.parametrize("ask", [device.current, device.current_ordinal, device.ensure_context])
def test_without_a_gpu_asking_for_the_device_says_why_and_what_to_do(gpus, ask):
    gpus(absence="no driver, says the test")
    with pytest.raises(RuntimeError, match=r"no driver, says the test.*emulate"):
        ask()


@pytest.mark.gpu
def test_current_device_agrees_with_cupy():
    import cupy

    info, properties = device.current(), cupy.cuda.runtime.getDeviceProperties(device.current_ordinal())
    assert info.name == properties["name"].decode().split("\0")[0]
    assert info.arch == (properties["major"], properties["minor"])
    assert info.sm_count == properties["multiProcessorCount"]
    assert info.shared_memory_per_block == properties["sharedMemPerBlockOptin"]
    assert info.shared_memory_per_sm == properties["sharedMemPerMultiprocessor"]
    assert info.max_threads_per_block == properties["maxThreadsPerBlock"]
    assert info.registers_per_sm == properties["regsPerMultiprocessor"]
    assert info.l2_bytes == properties["l2CacheSize"]
    assert device.target() is info
    assert device.count() == cupy.cuda.runtime.getDeviceCount()


@pytest.mark.gpu
def test_the_context_is_the_one_cupy_made():
    import cupy
    from cuda.bindings import driver

    cupy.zeros(1)
    _, before = driver.cuCtxGetCurrent()
    ordinal = device.ensure_context()
    _, after = driver.cuCtxGetCurrent()
    assert int(before) == int(after) != 0
    assert ordinal == cupy.cuda.Device().id


# ==========================================================================================================================
# Arrays on a device that is not current: their kernel is loaded and launched there, and what was current stays so.
#
# The tests on a GPU go through the devices that there are: with one they show that nothing changes, with two the rest.

ORDINALS = range(max(1, device.count()))


class Driver:
    """A driver with two devices: which context is current, and what was done in it."""

    def __init__(self, current: int | None):
        self.current = current
        self.log: list[str] = []

    def install(self, driver_calls: Set, gpus: Set, count: int = 2) -> Driver:
        from cuda.bindings import driver

        def set_current(context: int) -> tuple[Any]:
            self.current = None if context == 0 else context - 100
            self.log.append(f"back to {self.current}")
            return (driver.CUresult.CUDA_SUCCESS,)

        def ensure(ordinal: int | None = None) -> int:
            wanted = ordinal if ordinal is not None else self.current or 0
            if wanted != self.current:
                self.log.append(f"to {wanted}")
            self.current = wanted
            return wanted

        success, invalid = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        driver_calls(cuCtxGetDevice=lambda: (invalid, None) if self.current is None else (success, self.current),
                     cuCtxGetCurrent=lambda: (success, 0 if self.current is None else 100 + self.current),
                     cuCtxSetCurrent=set_current)
        gpus(context=ensure, absence=None, count=count)
        return self


@pytest.mark.parametrize(("current", "log"), [(0, ["to 1", "back to 0"]), (1, []), (None, ["to 1", "back to None"])])
def test_another_device_is_current_for_as_long_as_it_takes(current: int | None, log: list[str],
                                                           driver_calls: Set, gpus: Set) -> None:
    driver = Driver(current).install(driver_calls, gpus)
    with device.made_current(1):
        assert driver.current == 1
    assert driver.current == current and driver.log == log


def test_what_was_current_is_so_again_after_an_error(driver_calls: Set, gpus: Set) -> None:
    driver = Driver(0).install(driver_calls, gpus)
    with pytest.raises(KeyError), device.made_current(1):
        raise KeyError
    assert driver.current == 0


def bound(entry: Any, ordinal: int, replaced: Seeded) -> launch.BoundLaunch:
    replaced(launch, "_entry", lambda: entry)
    kernel: Any = SimpleNamespace(name="k")
    return launch.BoundLaunch(kernel, ordinal, (1, 1, 1), (32, 1, 1), 0, ("u64",), None, 7)


@pytest.mark.parametrize("current", [0, 1, None])
def test_a_kernel_is_launched_on_its_device(current: int | None, driver_calls: Set, gpus: Set, replaced: Seeded) -> None:
    driver, launched = Driver(current).install(driver_calls, gpus), []

    def entry(config: Any, function: Any, values: Any, extra: Any) -> int:
        launched.append(driver.current)
        return 0

    made = bound(entry, 1, replaced)
    made.launch(0, (1,))
    made.prepare((0,), [0])(0, (1,))
    assert launched == [1, 1] and driver.current == current


def test_with_one_device_nobody_asks(driver_calls: Set, gpus: Set, replaced: Seeded) -> None:
    """The launch of a machine with one device is the driver's own entry."""
    Driver(0).install(driver_calls, gpus, count=1)
    entry = lambda *_: 0  # noqa: E731
    assert bound(entry, 0, replaced).entry is entry

    driver_calls(cuCtxGetCurrent=None)
    with device.made_current(0):
        pass


# -- on GPUs ----------------------------------------------------------------------------------------------------------

def operands() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(4)
    return tuple(rng.standard_normal(shape).astype(np.float16) for shape in ((65, 48), (48, 80), (80,)))


@pytest.mark.gpu
@pytest.mark.parametrize("ordinal", ORDINALS)
@pytest.mark.parametrize("size", [65, 1024], ids=["odd", "TMA"])
def test_cupy_arrays_on_any_device(ordinal: int, size: int) -> None:
    import cupy

    rng = np.random.default_rng(4)
    host = [rng.standard_normal(shape).astype(np.float16) for shape in ((size, 64), (64, size), (size,))]
    with cupy.cuda.Device(ordinal):
        a, b, bias = (cupy.asarray(x) for x in host)
    wanted = host[0].astype("f8") @ host[1].astype("f8")
    for current in ORDINALS:
        with cupy.cuda.Device(current):
            d = gk.matmul(a, b)
            e = gk.matmul(a, b, epilogue=epilogues.Bias(bias))
            with cupy.cuda.Device(ordinal):
                out = cupy.full(wanted.shape, cupy.nan, cupy.float16)
            run = gk.plan(a, b, out=out)
            run(a, b, out=out)
            assert cupy.cuda.runtime.getDevice() == current and device.current_ordinal() == current
        assert d.device.id == e.device.id == ordinal
        with cupy.cuda.Device(ordinal):
            cupy.cuda.Device(ordinal).synchronize()
            for got, expected in ((d, wanted), (out, wanted), (e, wanted + host[2].astype("f8"))):
                assert_close(cupy.asnumpy(got), expected, 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("ordinal", ORDINALS)
def test_torch_tensors_on_any_device(ordinal: int) -> None:
    import torch

    host = operands()
    a, b, bias = (torch.from_numpy(x).to(f"cuda:{ordinal}") for x in host)
    wanted = host[0].astype("f8") @ host[1].astype("f8")
    for current in ORDINALS:
        with torch.cuda.device(current):
            d, e = gk.matmul(a, b), gk.matmul(a, b, epilogue=epilogues.Bias(bias))
            assert torch.cuda.current_device() == current
        assert d.get_device() == e.get_device() == ordinal
        torch.cuda.synchronize(ordinal)
        assert_close(d.cpu().numpy(), wanted, 2e-3)
        assert_close(e.cpu().numpy(), wanted + host[2].astype("f8"), 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("ordinal", ORDINALS)
def test_a_stream_of_the_arrays_device(ordinal: int) -> None:
    import cupy

    host = operands()
    with cupy.cuda.Device(ordinal):
        a, b = (cupy.asarray(x) for x in host[:2])
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device(ordinal).synchronize()
    with cupy.cuda.Device(ORDINALS[0]):
        d = gk.matmul(a, b, stream=stream)
    stream.synchronize()
    with cupy.cuda.Device(ordinal):
        assert_close(cupy.asnumpy(d), host[0].astype("f8") @ host[1].astype("f8"), 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("ordinal", ORDINALS)
def test_operands_of_several_devices_are_refused(ordinal: int) -> None:
    import cupy

    arrays = []
    for where, x in zip((ORDINALS[0], ordinal, ORDINALS[0]), operands()):
        with cupy.cuda.Device(where):
            arrays.append(cupy.asarray(x))
    a, b, bias = arrays
    if ordinal == ORDINALS[0]:
        assert gk.matmul(a, b, epilogue=epilogues.Bias(bias)).device.id == ordinal
        return
    with pytest.raises(ValueError, match="all operands of a product must be on one device"):
        gk.matmul(a, b)
    with cupy.cuda.Device(ordinal), pytest.raises(ValueError, match="bias of Bias is on device"):
        gk.matmul(cupy.asarray(a), b, epilogue=epilogues.Bias(bias))


# ==========================================================================================================================
# GPUs that are not here, by name.


def test_by_architecture() -> None:
    assert gpu("sm_90a") is gpu("sm_90") is H100 and gpu("sm_75") is T4 and gpu("sm_80:108") is A100
    assert list(GPUS) == ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]


def test_with_other_multiprocessors() -> None:
    pcie = gpu("sm_90a:114")
    assert (pcie.arch_name, pcie.sm_count, pcie.shared_memory_per_block) == ("sm_90a", 114, H100.shared_memory_per_block)


@pytest.mark.parametrize("text", ["", "H100", "sm_70", "sm_90a:", "sm_90a:0", "sm_90a:x", "sm_80a", "SM_80", "sm_80:108 "])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a GPU that kernels can be compiled for: one of sm_75, .*sm_90a:114"):
        gpu(text)


def test_a_device_is_assumed_within() -> None:
    before = target()
    assert assumed_device() is None
    with assumed(A100):
        assert target() is target(-1) is assumed_device() is A100
        with assumed(T4):
            assert target() is T4
        assert target() is A100
    assert target() == before
