from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gemmkit.runtime
from gemmkit.runtime import device
from gemmkit.runtime.device import H100, DeviceInfo


def test_importing_the_runtime_loads_no_driver():
    """Neither the bindings nor an array library is imported before something is asked for.

    The package around it is left out: what else it imports is not the runtime's affair.
    """
    folder = str(Path(gemmkit.runtime.__file__).parent.parent)
    code = (
        "import sys, types; package = sys.modules['gemmkit'] = types.ModuleType('gemmkit')\n"
        f"package.__path__ = [{folder!r}]\n"
        "from gemmkit.runtime import arrays, cache, compile, device, launch, streams\n"
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


def test_without_a_gpu_the_target_is_an_h100(monkeypatch):
    monkeypatch.setattr(device, "_absence", lambda: "no driver, says the test")
    monkeypatch.setattr(device, "count", device.count.__wrapped__)
    assert not device.available()
    assert device.count() == 0
    assert device.target() is H100
    assert (H100.sm_count, H100.shared_memory_per_block, H100.l2_bytes) == (132, 232448, 52428800)


@pytest.mark.parametrize("ask", [device.current, device.current_ordinal, device.ensure_context])
def test_without_a_gpu_asking_for_the_device_says_why_and_what_to_do(monkeypatch, ask):
    monkeypatch.setattr(device, "_absence", lambda: "no driver, says the test")
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
