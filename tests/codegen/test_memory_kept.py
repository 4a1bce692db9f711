"""What a process keeps of a kernel that it compiled.

Here kernels of a few lines are compiled. ``python -m tests.support.memory_kept 20`` compiles so many whole ones (2 s of CPU each)
and says how many megabytes the process has grown by.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gemmkit.components import Component, freeze
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100


@dataclass(frozen=True)
class Of(Component):
    function: Any

    def __call__(self, x: Any) -> Any:
        return self.function(x)


def tiny(of: Any, out: Any) -> None:
    for i in range(4):
        out[i] = of(out[i] + 1)


def compile_tiny(number: int) -> None:
    scope: dict[str, Any] = {}
    exec(f"def inner(x): return max(x, {number})\ndef outer(x): return inner(x) * {number}.5 + inner(x + 1)", scope)
    arguments = [freeze(Of(scope["outer"])), freeze(np.zeros(16, "f4"))]
    assert ".visible .entry" in to_ptx(tiny, tuple(a.type for a in arguments), 32, H100)


@pytest.mark.compile
def test_little_is_kept_of_a_device_function() -> None:
    """Objects that the garbage collector walks through: signatures and tables, not LLVM's instructions."""
    for number in range(2):
        compile_tiny(number)
    gc.collect()
    before, kernels = len(gc.get_objects()), 4
    for number in range(2, 2 + kernels):
        compile_tiny(number)
    gc.collect()
    assert (len(gc.get_objects()) - before) / kernels < 500

