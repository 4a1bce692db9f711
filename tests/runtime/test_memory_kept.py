"""What a process keeps of a kernel that it compiled.

The default run compiles kernels of a few lines. Real ones: ``GEMMKIT_KERNELS_KEPT=12 pytest tests/runtime/test_memory_kept.py``
compiles so many and asserts half a megabyte each (2 s of CPU a kernel).
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmkit.components import Component, freeze
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100

ROOT = Path(__file__).resolve().parent.parent.parent


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


REAL = """
    import ctypes, gc, json, sys
    import gemmkit as gk
    from gemmkit import Tile, layouts, operators, transforms
    from tests.compiling import entry

    def kernel(number):
        conf = gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("f4"),
                             block_shape=Tile(M=16, N=16, K=8),
                             transform_regs_to_shared_d=transforms.Elementwise(eval(f"lambda x: x * {number}.5 + {number}")))
        entry(conf)

    def megabytes():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        (line,) = [line for line in open("/proc/self/smaps_rollup") if line.startswith("Private_Dirty:")]
        return int(line.split()[1]) / 1024

    for number in range(2):
        kernel(number)
    before, count = megabytes(), int(sys.argv[1])
    for number in range(2, 2 + count):
        kernel(number)
    print(json.dumps((megabytes() - before) / count))
"""


@pytest.mark.compile
@pytest.mark.skipif(not os.environ.get("GEMMKIT_KERNELS_KEPT"), reason="2 s a kernel: GEMMKIT_KERNELS_KEPT says how many")
def test_half_a_megabyte_is_kept_of_a_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(REAL), os.environ["GEMMKIT_KERNELS_KEPT"]], cwd=ROOT,
                          capture_output=True, text=True, env={**os.environ, "GEMMKIT_CACHE": "0"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 0.5
