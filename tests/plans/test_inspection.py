"""Configurations compiled with no arrays: the kernel that a call would run, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.plans import ahead
from gemmkit.plans.ahead import Occupancy, compile_config, occupancy
from gemmkit.runtime.device import H100
from tests.support.user_layouts import Toeplitz

pytestmark = pytest.mark.compile

SMALL = dict(block_shape=gk.Tile(M=32, N=32, K=32), compute_warp=gk.Tile(M=16, N=16, K=16))


def configuration(**fields: Any) -> gk.Config:
    return gk.get_config(**{**dict(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"), device=H100),
                            **SMALL, **fields})


@pytest.mark.kin(3)
def test_a_kernel_and_what_it_takes() -> None:
    kernel = compile_config(configuration(), device=H100)
    assert ".target sm_90a" in kernel.ptx and "mma.sync" in kernel.ptx
    assert 16 <= kernel.usage.registers <= 255 and kernel.usage.stack_bytes == 0
    assert kernel.instructions["HMMA"] > 0 and kernel.instructions["BAR"] >= 3
    assert kernel.occupancy.blocks == min(kernel.occupancy.by_registers, kernel.occupancy.by_threads,
                                          kernel.occupancy.by_shared_memory, 32) >= 1


@pytest.mark.thorough
def test_sizes_decide_the_class_alone() -> None:
    """Odd sizes: loads are narrow. Other even ones: the same kernel."""
    conf = configuration()
    whole, other, odd = (compile_config(conf, device=H100, gemm_shape=dict(M=n, N=n, K=n)) for n in (64, 4096, 77))
    assert whole.instructions == other.instructions != odd.instructions
    assert "ld.global.v4" in whole.ptx and "ld.global.v4" not in odd.ptx


@pytest.mark.kin(3)
def test_a_c_and_components_with_arrays() -> None:
    conf = replace(configuration(), global_c_layout=layouts.RowMajor("float32"),
                   epilogue=gk.epilogues.Bias(np.zeros(4096, np.float32)))
    assert compile_config(conf, device=H100).ptx.count("ld.global") > compile_config(configuration(), device=H100).ptx.count(
        "ld.global")


@pytest.mark.kin(3)
def test_layouts_that_are_not_plain_need_an_array() -> None:
    conf = configuration(global_a_layout=Toeplitz("float16"), global_b_layout=layouts.RowMajor("float16"),
                         global_d_layout=layouts.RowMajor("float32"))
    with pytest.raises(ValueError, match=r"a: Toeplitz\('float16'\) does not say .* operands=\{'a': array\}"):
        compile_config(conf, device=H100)
    kernel = compile_config(conf, device=H100, gemm_shape=dict(M=64, N=64, K=64),
                            operands={"a": np.zeros(127, np.float16)})
    assert kernel.instructions["HMMA"] > 0


def test_unknown_operands_are_refused() -> None:
    with pytest.raises(ValueError, match="operands: got d; the operands are a, b, c and out"):
        compile_config(configuration(), device=H100, operands={"d": np.zeros((4, 4))})


def test_a_device_that_lacks_the_instructions() -> None:
    turing = replace(H100, name="a Turing", arch=(7, 5))
    with pytest.raises(gk.ConfigError, match=r"operator=MMAOp\(\): its instructions need compute capability 8.0, and a "
                                             r"Turing has 7.5; use MMAOp\(K=8\) or FPUOp"):
        compile_config(configuration(), device=turing)


@pytest.mark.parametrize(("registers", "threads", "shared", "blocks"), [
    (32, 1024, 0, (2, 2, 228, 32)),                  # all of the registers
    (33, 1024, 0, (1, 2, 228, 32)),                  # 40 after rounding
    (255, 128, 0, (2, 16, 228, 32)),
    (128, 256, 232448, (2, 8, 1, 32)),               # the most that a block may have
    (16, 32, 1024, (128, 64, 114, 32)),
])
def test_occupancy(registers: int, threads: int, shared: int, blocks: tuple[int, ...]) -> None:
    """By hand from the H100's limits: 65,536 registers, 2048 threads, 228 KiB of which each block costs 1 KiB more."""
    assert occupancy(registers, threads, shared, H100) == Occupancy(*blocks)
    assert occupancy(registers, threads, shared, H100).blocks == min(blocks)


@pytest.mark.gpu
def test_occupancy_is_the_drivers() -> None:
    """What the driver says of the same kernel on this device."""
    from cuda.bindings import driver

    from gemmkit.runtime import device

    device.ensure_context()
    kernel = ahead.compile_config(configuration(device=None))
    status, module = driver.cuModuleLoadData(kernel.assembled.cubin)
    assert int(status) == 0
    status, function = driver.cuModuleGetFunction(module, b"gemmkit_kernel")
    assert int(status) == 0
    status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        function, kernel.config.threads, kernel.config.spec().shared_bytes)
    assert int(status) == 0 and blocks == kernel.occupancy.blocks
