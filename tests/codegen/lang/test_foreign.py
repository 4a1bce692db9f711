"""Other people's numba-cuda kernels are typed just as they were, gemmkit imported or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

#: Run in a process of its own: prints the types that numba-cuda gives to plain functions.
PROGRAM = """
import json, math, sys
if sys.argv[1] == "with":
    import gemmkit
    from gemmkit import operators, layouts
    from gemmkit.lang.functions import device
    from numba.cuda import types
    device(lambda x: x * 2 + 1.0 if x > 0 else 0).compile((types.float32,))       # and its machinery used
import numpy as np
from numba import cuda
from numba.cuda import types

def loop(x):
    total = 0
    for i in range(x):
        total += i
    return total

def accumulate(x):
    total = 0
    for i in range(4):
        total += x * 2
    return total

FUNCTIONS = {
    "x + 1.0": lambda x: x + 1.0, "x * 2": lambda x: x * 2, "x - 1": lambda x: x - 1, "-x": lambda x: -x,
    "x // 3": lambda x: x // 3, "x % 4": lambda x: x % 4, "x / 2": lambda x: x / 2, "x ** 2": lambda x: x ** 2,
    "min": lambda x: min(x, 1), "max": lambda x: max(x, 0.5), "ternary": lambda x: x if x > 0 else 0,
    "constants": lambda x: 1.0 if x > 0 else 2, "compare": lambda x: x < 2.5, "abs": lambda x: abs(x),
    "pow": lambda x: math.pow(x, 2.0), "exp": lambda x: math.exp(x), "pi": lambda x: x * math.pi,
    "np.float32": lambda x: np.float32(x), "float": lambda x: float(x), "int": lambda x: int(x),
    "bool": lambda x: bool(x), "tuple": lambda x: (x, 1, 2.0)[0], "item": lambda x: (x, x)[1], "len": lambda x: len((x, x)),
    "accumulate": accumulate,
}
out = {}
for ty in (types.float32, types.float64, types.int32, types.int64, types.uint8):
    for name, function in {**FUNCTIONS, **({"loop": loop} if isinstance(ty, types.Integer) else {})}.items():
        _, result = cuda.compile(function, (ty,), cc=(9, 0), device=True, output="ptx")
        out[f"{name} of {ty}"] = str(result)
print(json.dumps(out))
"""


def types_in_a_process(how: str) -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    return dict(json.loads(done.stdout))


@pytest.mark.thorough
def test_plain_functions_keep_their_types() -> None:
    alone, beside = types_in_a_process("without"), types_in_a_process("with")
    assert beside == alone
    assert alone["x + 1.0 of float32"] == alone["x * 2 of float32"] == "float64" and alone["x - 1 of int32"] == "int64"
