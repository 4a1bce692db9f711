"""What the emulator's tests share: launching small kernels, bytes to store, numbers of marked lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.emulator import machine
from gemmkit.emulator.user_code import arguments


def run(kernel: Callable[..., None], *args: Any, threads: int = 32, blocks: int = 1, shared: int = 1024,
        **options: Any) -> None:
    """Launches a one-dimensional grid."""
    machine.launch(kernel, arguments(args), grid=(blocks, 1, 1), block=(threads, 1, 1), shared_memory=shared, **options)


def as_bytes(*values: Any, dtype: Any = np.float32) -> np.ndarray:
    """Values as the bytes that they have in memory."""
    return np.array(values, dtype).view(np.uint8)


def line_of(kernel: Callable[..., None], mark: str) -> int:
    """The number of the one line in `kernel`'s source that ends with the comment `mark`."""
    lines, first = inspect.getsourcelines(kernel)
    (number,) = (first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))
    return number
