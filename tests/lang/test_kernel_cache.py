"""Kernels in the cache: one compilation for many threads and processes; and what a process keeps of a kernel that it compiled."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.components import Component, freeze
from gemmkit.operators import FPUOp, MMAOp
from gemmkit.runtime import compile as compiling
from gemmkit.runtime.cache import CubinCache, default_cache
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.support.compiling import entry

# ==========================================================================================================================
# Kernels in the cache: one compilation for many threads and for many processes; another kernel under another key.

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(own_cache: Path) -> CubinCache:
    """An empty cache in a folder of its own."""
    return default_cache()


def small(**fields: Any) -> gk.Config:
    return gk.get_config(**{**dict(operator=FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("f4"),
                                   block_shape=Tile(M=16, N=16, K=8)), **fields})


@pytest.mark.kin(5)
@pytest.mark.compile
def test_threads_that_ask_for_one_kernel_compile_it_once(cache: CubinCache) -> None:
    before, meet = compiling.stats.compiled, Barrier(4)

    def ask(_: int) -> Any:
        meet.wait()
        return entry(small())

    with ThreadPoolExecutor(4) as pool:
        entries = list(pool.map(ask, range(4)))
    assert compiling.stats.compiled == before + 1 and cache.stats.builds == 1
    assert {e.cubin for e in entries} == {entries[0].cubin} and entries[0].cubin.startswith(b"\x7fELF")
    assert entries[0].meta["usage"]["registers"] > 0


@pytest.mark.thorough
@pytest.mark.compile
def test_what_is_the_same_kernel_and_what_is_not(cache: CubinCache) -> None:
    """Values of runtime fields and where a function is written are not part of a kernel; everything else is."""
    def shifted(by: Any) -> Any:
        return Map(lambda x, i, j: x + by[j])

    def same_as_shifted(by: Any) -> Any:
        return Map(lambda x, i, j: x + by[j])

    ones, twos = np.ones(256, "f4"), np.full(256, 2, "f4")
    kernels = [
        [small(), small()],
        [small(epilogue=epilogues.Bias(ones)), small(epilogue=epilogues.Bias(twos))],
        [small(epilogue=epilogues.Bias(ones, "M"))],
        [small(epilogue=epilogues.Bias(ones.astype("f8")))],
        [small(transform_regs_to_shared_d=shifted(ones)), small(transform_regs_to_shared_d=shifted(twos)),
         small(transform_regs_to_shared_d=same_as_shifted(ones))],
        [small(transform_regs_to_shared_d=Map(lambda x: x + 1))],
        [small(transform_regs_to_shared_d=Map(lambda x: x + 2))],
        [small(transform_shared_to_global_d=Map(lambda x: x + 2))],
        [small(blocks_per_sm=2)],
        [small(global_b_layout=layouts.ColMajor("f4"))],
    ]
    cubins = []
    for n, group in enumerate(kernels):
        cubins.append({entry(conf).cubin for conf in group})
        assert (cache.stats.builds, len(cubins[-1])) == (n + 1, 1), group[0]
    entry(small(), whole=False), entry(small(), size=255)            # other classes of divisibility and alignment
    assert cache.stats.builds == len(kernels) + 2


@pytest.mark.kin(5)
@pytest.mark.compile
def test_another_version_of_gemmkit_or_of_a_compiler_is_another_key(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmkit.lang import fingerprint as package_state

    entry(small())
    with monkeypatch.context() as patch:
        patch.setattr(package_state, "package_digest", lambda: "another gemmkit")
        entry(small())
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "versions", lambda: "numba-cuda=99")
        entry(small())
    assert cache.stats.builds == 3
    entry(small())
    assert cache.stats.builds == 3


SCRIPT = """
    import dataclasses, json, sys
    import numpy as np
    import gemmkit as gk
    from gemmkit import epilogues, layouts, operators, transforms
    from gemmkit.runtime import compile
    from tests.support.compiling import entry

    @dataclasses.dataclass(frozen=True)
    class Clamp(epilogues.Epilogue):
        low: gk.Scalar
        high: float = 5.0
        def __call__(self, x, m, n):
            return min(max(x, self.low), self.high)

    shift = np.arange(256, dtype="f4") + float(sys.argv[1])
    conf = gk.get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("f2"), epilogue=Clamp(float(sys.argv[1])),
                         block_shape=gk.Tile(M=32, N=32, K=32),
                         transform_regs_to_shared_d=transforms.Map(lambda x, i, j: x + shift[j]))
    found = entry(conf)
    print(json.dumps([compile.stats.compiled, found.from_disk, "numba" in sys.modules, len(found.cubin)]))
"""


def process(script: str, *arguments: str, **environment: str) -> Any:
    """The JSON that a script prints last, run in a new process."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), *arguments], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.kin(1)
@pytest.mark.compile
def test_another_process_finds_the_kernel(tmp_path: Path) -> None:
    """With user-written components, other runtime values and another hash seed; and it does not even load Numba."""
    where = dict(GEMMKIT_CACHE_DIR=str(tmp_path), GEMMKIT_CACHE="1")
    compiled, from_disk, *_ = process(SCRIPT, "1.0", **where, PYTHONHASHSEED="1")
    assert (compiled, from_disk) == (1, False)
    assert process(SCRIPT, "2.0", **where, PYTHONHASHSEED="2")[:3] == [0, True, False]


@pytest.mark.compile
@pytest.mark.thorough
def test_another_process_does_not_use_what_is_damaged(tmp_path: Path) -> None:
    where = dict(GEMMKIT_CACHE_DIR=str(tmp_path), GEMMKIT_CACHE="1")
    process(SCRIPT, "1.0", **where)
    (file,) = tmp_path.glob("*.kernel")
    content = bytearray(file.read_bytes())
    content[-100] ^= 255
    file.write_bytes(content)
    assert process(SCRIPT, "1.0", **where)[:2] == [1, False]


@pytest.mark.kin(5)
@pytest.mark.compile
def test_nothing_is_kept_where_that_is_asked(tmp_path: Path) -> None:
    where = dict(GEMMKIT_CACHE_DIR=str(tmp_path), GEMMKIT_CACHE="0")
    assert process(SCRIPT, "1.0", **where)[:2] == [1, False]
    assert list(tmp_path.iterdir()) == []


KEY_SCRIPT = """
    import hashlib
    import json
    import numpy as np
    import gemmkit as gk
    from gemmkit.plans.plan import Plan

    a = np.ones((64, 32), "f2")
    texts = []
    for operator in (gk.operators.WGMMAOp(64), gk.operators.MMAOp(), gk.operators.FPUOp(dtype="f2", accumulator="f4")):
        with gk.emulate():
            made = Plan(a, a.T, None, None, None, dict(operator=operator))
        texts += [x.fingerprint for x in made._compiled.arguments]
    print(json.dumps(hashlib.sha256("|".join(texts).encode()).hexdigest()))
"""


@pytest.mark.kin(5)
def test_a_kernel_has_one_key_in_all_processes() -> None:
    """An address in a fingerprint would make every process compile anew."""
    assert process(KEY_SCRIPT) == process(KEY_SCRIPT)


GPU_SCRIPT = """
    import json
    import cupy
    import gemmkit as gk
    from gemmkit.runtime import compile

    a = cupy.ones((64, 32), "f2")
    d = gk.matmul(a, a.T)
    assert (d == 32).all()
    print(json.dumps(compile.stats.compiled))
"""


@pytest.mark.gpu
def test_a_second_process_compiles_nothing_for_its_first_call(tmp_path: Path) -> None:
    where = dict(GEMMKIT_CACHE_DIR=str(tmp_path), GEMMKIT_CACHE="1")
    assert process(GPU_SCRIPT, **where) == 1
    assert process(GPU_SCRIPT, **where) == 0


@pytest.mark.gpu
def test_threads_that_call_for_one_kernel_compile_it_once(cache: CubinCache) -> None:
    import cupy

    before, meet = compiling.stats.compiled, Barrier(4)
    arrays = [cupy.full((40, 48), n, "f2") for n in range(4)]
    b = cupy.ones((48, 24), "f2")
    conf = gk.get_config(operator=MMAOp(), global_a_layout=layouts.RowMajor("f2"), block_shape=Tile(M=16, N=16, K=48))

    def ask(n: int) -> Any:
        meet.wait()
        return gk.matmul(arrays[n], b, conf=conf)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(ask, range(4)))
    cupy.cuda.Device().synchronize()
    assert compiling.stats.compiled == before + 1
    assert all(bool((d == 48 * n).all()) for n, d in enumerate(results))


@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.usefixtures("quick_collections")
def test_a_captured_array_dies_with_its_function(cache: CubinCache) -> None:
    """A kernel is kept for as long as the process lives; an array that its first user captured is not."""
    class Array(np.ndarray):                                         # one that can be referred to weakly
        pass

    def conf_of(values: np.ndarray) -> gk.Config:
        return small(transform_regs_to_shared_d=Map(lambda x, i, j: x + values[j]))

    for _ in range(2):
        array = np.ones(256, "f4").view(Array)
        alive = weakref.ref(array)
        conf = conf_of(array)
        entry(conf)
        del conf, array
        gc.collect()
        assert alive() is None
    assert cache.stats.builds == 1


def test_a_component_without_its_arrays_is_the_same_kernel() -> None:
    from gemmkit.components import freeze, without_arrays
    from gemmkit.kernels.collectives.operand import OperandArrays

    bias, table = np.ones(256, "f4"), np.ones(256, "f4")
    conf = small(epilogue=epilogues.Bias(bias), transform_regs_to_shared_d=Map(lambda x, i, j: x + table[j]))
    spec = conf.spec(OperandArrays(None, None, None, 256, 256, 256))
    count = sys.getrefcount(bias), sys.getrefcount(table)
    described = without_arrays(spec)
    assert freeze(described).type is freeze(spec).type and freeze(described).leaves == freeze(spec).leaves
    assert (sys.getrefcount(bias), sys.getrefcount(table)) == count
    assert without_arrays(small().operator) == small().operator


# ==========================================================================================================================
# What a process keeps of a kernel that it compiled.
#
# Here kernels of a few lines are compiled. ``python -m tests.support.memory_kept 20`` compiles so many whole ones (2 s of CPU each)
# and says how many megabytes the process has grown by.


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


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.usefixtures("quick_collections")
def test_little_is_kept_of_a_device_function() -> None:
    """Objects that the garbage collector walks through: signatures and tables, not LLVM's instructions."""
    for number in range(2):
        compile_tiny(number)
    gc.collect()
    before, kernels = len(gc.get_objects()), 2
    for number in range(2, 2 + kernels):
        compile_tiny(number)
    gc.collect()
    assert (len(gc.get_objects()) - before) / kernels < 500
