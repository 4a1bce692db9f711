"""Small kernels in PTX, for whatever has to be assembled, kept or launched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gemmkit.runtime import device

Compile = Callable[..., tuple[str, str]]


@pytest.fixture(scope="session")
def compile_ptx() -> Compile:
    """compile_ptx(function, *argument types) -> PTX and the kernel's name, for the device or an H100."""

    def compile_ptx(function: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
        from numba import cuda, types

        major, minor = device.target().arch
        cc = (major, minor, "a") if major >= 9 else (major, minor)
        ptx, _ = cuda.compile(
            function, types.void(*arguments), cc=cc, device=False, abi="numba", output="ptx"
        )
        text = ptx if isinstance(ptx, str) else ptx.decode()
        match = re.search(r"\.visible \.entry (\w+)\(", text)
        assert match is not None
        return text, match.group(1)

    return compile_ptx


@pytest.fixture(scope="session")
def reverse(compile_ptx: Compile) -> tuple[str, str]:
    """A kernel with 256 bytes of static shared memory and one barrier."""
    from numba import cuda, float32, int32

    def reverse(out, n, scale):
        tile = cuda.shared.array(64, float32)
        i = cuda.threadIdx.x
        tile[i] = scale * i
        cuda.syncthreads()
        if i < n:
            out[i] = tile[63 - i]

    return compile_ptx(reverse, float32[::1], int32, float32)
