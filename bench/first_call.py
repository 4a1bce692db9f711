"""One process's first call of one work, timed: `python -m bench.first_call float32` prints one line of JSON.

`bench.host` starts it twice with one fresh GEMMKIT_CACHE_DIR. What is timed is the first call until its
result is there. Importing the libraries is timed apart; the device's context and the library's own product
come before it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from bench import backends

SIZE = 256
Made = tuple[Callable[[Any], Any], Any]     # from the gemmkit module to the call's result; that result in float64


def works() -> dict[str, Callable[[], Made]]:
    """By name: what makes the operands, the call and the expected result."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(1)

    def drawn(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    def product(dtype: Any) -> Made:
        a, b = (drawn(SIZE, SIZE, dtype=dtype) for _ in range(2))
        return lambda gk: gk.matmul(a, b), a.double() @ b.double()

    def similarity() -> Made:
        x = drawn(SIZE, 32)
        return (lambda gk: gk.matmul(x, x.T, epilogue=gk.epilogues.Elementwise(lambda s: math.exp(-0.1 * s))),
                (-0.1 * (x.double() @ x.double().T)).exp())

    def min_plus() -> Made:
        a, b = (drawn(SIZE, SIZE) for _ in range(2))
        return lambda gk: gk.matmul(a, b, operator=gk.operators.MIN_PLUS), (a.double()[:, :, None] + b.double()).amin(1)

    def einsum() -> Made:
        a, b = drawn(8, 64, 32), drawn(64, 8, 48)
        return lambda gk: gk.einsum("abc,bad->cd", a, b), torch.einsum("abc,bad->cd", a.double(), b.double())

    def attention() -> Made:
        q, k, v = (drawn(1, 4, SIZE, 64, dtype=torch.float16) for _ in range(3))
        return lambda gk: gk.attention(q, k, v), (q.double() @ k.double().mT / 8).softmax(-1) @ v.double()

    def softmax() -> Made:
        x = drawn(SIZE, 1024, dtype=torch.float16)
        return lambda gk: gk.softmax(x), x.double().softmax(-1)

    return {"float16": lambda: product(torch.float16), "float32": lambda: product(torch.float32),
            "float64": lambda: product(torch.float64), "float32 and exp": similarity, "min-plus": min_plus, "einsum": einsum,
            "attention": attention, "softmax": softmax}


WORKS = ("float16", "float32", "float64", "float32 and exp", "min-plus", "einsum", "attention", "softmax")


def compiles() -> int:
    """How many kernels this process has compiled."""
    from gemmkit.runtime import cache

    return cache.default_cache().stats.builds


def main(work: str) -> int:
    backend = backends.choose("torch")
    call, exact = works()[work]()
    backend.synchronise()

    start = time.perf_counter()
    import gemmkit

    imported = time.perf_counter()
    d = call(gemmkit)
    backend.synchronise()
    called = time.perf_counter()

    error = backend.relative_error(d, exact)
    found = {"import_s": imported - start, "first_call_s": called - imported, "compiles": compiles(), "error": error}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
