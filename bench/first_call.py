"""One process's first product, timed: `python -m bench.first_call torch f16 64` prints one line of JSON.

`bench.host` starts it twice with one fresh GEMMKIT_CACHE_DIR. What is timed is the first product until its
result is there. Importing the libraries is timed apart; the device's context and the library's own product
come before it.
"""

from __future__ import annotations

import json
import sys
import time

from bench import backends


def compiles() -> int:
    """How many kernels this process has compiled."""
    from gemmkit.runtime import cache

    return cache.default_cache().stats.builds


def main(name: str, dtype: str, size: str) -> int:
    n = int(size)
    backend = backends.choose(name)
    a, b = (backend.normal(n, n, dtype, seed) for seed in (0, 1))
    reference = backend.reference(a, b)
    backend.synchronise()

    start = time.perf_counter()
    import gemmkit

    imported = time.perf_counter()
    d = gemmkit.matmul(a, b)
    backend.synchronise()
    called = time.perf_counter()

    error = backend.relative_error(d, reference)
    found = {
        "import_s": imported - start,
        "first_call_s": called - imported,
        "compiles": compiles(),
        "error": error,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
