"""Where there is no CUDA at all, not even its packages: the emulator computes, and what compiles says what to install."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.support.patches import Seeded, Set

#: A process in which the packages that compile and launch are not installed, nor a library of device arrays.
HIDDEN = """
    import sys
    sys.modules.update(dict.fromkeys(("numba", "numba_cuda", "llvmlite", "cuda", "cupy", "torch")))
    import math
    from dataclasses import dataclass
    import numpy as np
    import gemmkit as gk
    from gemmkit import epilogues, layouts, operators, transforms

    rng = np.random.default_rng(5)
    def of(*shape, dtype="f4"):
        return rng.integers(-3, 4, shape).astype(dtype)
    def conf(**fields):
        rows = layouts.RowMajor("float32")
        return gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=rows, global_b_layout=rows, **fields)
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    text = textwrap.dedent(HIDDEN) + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", text, *arguments], capture_output=True, text=True)


def check(program: str) -> None:
    done = run(program)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.kin(2)
def test_components_of_users_are_emulated() -> None:
    check("""
        @dataclass(frozen=True)
        class Toeplitz(layouts.Layout):
            def element(self, data, m, k, shape):
                return data[m - k + shape.K - 1]

        @dataclass(frozen=True)
        class Decay(transforms.Transform):
            rate: gk.Scalar
            def __call__(self, x, m, k):
                return x / (1 + self.rate * k)

        @dataclass(frozen=True)
        class MinPlus(operators.FPUOp):
            identity = start = math.inf
            def multiply(self, a, b):
                return a + b
            def combine(self, c, product):
                return min(c, product)

        @dataclass(frozen=True)
        class Scaled(epilogues.Epilogue):
            by: gk.Array
            def __call__(self, x, m, n):
                return math.exp(-abs(x)) * self.by[n]

        t, a, b, by = of(11), of(5, 7), of(7, 3), of(3)
        with gk.emulate():
            d = gk.matmul(t, b, global_a_layout=Toeplitz("float32"), gemm_shape=dict(M=5, N=3, K=7))
            assert (d == t[np.subtract.outer(np.arange(5), np.arange(7)) + 6] @ b).all()
            d = gk.matmul(a, b, transform_global_to_shared_a=Decay(np.float32(0.5)))
            assert np.allclose(d, (a / (1 + 0.5 * np.arange(7))) @ b)
            assert (gk.matmul(a, b, operator=MinPlus()) == (a[:, :, None] + b).min(axis=1)).all()
            assert np.allclose(gk.matmul(a, b, epilogue=Scaled(by)), np.exp(-abs(a @ b)) * by)
            d = gk.matmul(a, b, transform_regs_to_shared_d=transforms.Map(lambda x: max(x, 0)))
            assert (d == np.maximum(a @ b, 0)).all()
    """)


#: Each kernel, and what is built on them: by ordinary units, by mma.sync, Hopper's, of stacks, groups, algebras, rows.
PRODUCTS = {
    "singlestage": "gk.matmul(a, b, conf=conf(kernel='singlestage')), a @ b",
    "multistage": "gk.matmul(a, b, conf=conf(kernel='multistage')), a @ b",
    "tensor cores": "gk.matmul(of(5, 16, dtype='f2'), c := of(16, 8, dtype='f2'), operator=operators.MMAOp()), None",
    "wgmma": "gk.matmul(h := of(64, 16, dtype='f2'), h.T, operator=operators.WGMMAOp()), h @ h.T",
    "stacks": "gk.matmul(s := of(2, 5, 4), t := of(2, 4, 3)), s @ t",
    "grouped": "gk.grouped([a, of(2, 7)], [b, b])[0], a @ b",
    "einsum": "gk.einsum('ik,kj->ji', a, b), (a @ b).T",
    "complex": "gk.matmul(a + 1j * a, b.astype('c16')), (a + 1j * a) @ b",
    "dual": "(gk.functions.Dual.of(a, a[..., None]) @ gk.functions.Dual.of(b, 0 * b[..., None])).tangents[..., 0], a @ b",
    "min-plus": "gk.matmul(a, b, operator=operators.MIN_PLUS), (a[:, :, None] + b).min(axis=1)",
    "structure": "gk.matmul(gk.layouts.TriangularMatrix(q := of(6, 6)), of(6, 2) * 0 + 1), np.tril(q) @ np.ones((6, 2), 'f4')",
    "softmax": "gk.softmax(a).sum(axis=1).round(5), np.ones(5, 'f4')",
    "attention": "gk.attention(*(of(1, 1, 8, 64, dtype='f2') * 0 for _ in 'qkv')), 0",
    "mlp": "gk.mlp(np.ones((64, 64), 'f2'), [np.eye(64, dtype='f2')] * 2), 1",
}


@pytest.mark.kin(2)
def test_kernels_are_emulated() -> None:
    """In one process: each starts one, and a process takes longer than a product."""
    check(f"""
        a, b = of(5, 7), of(7, 3)
        for what, pair in {PRODUCTS!r}.items():
            with gk.emulate():
                found, wanted = eval(pair)
            found = np.asarray(found)
            assert wanted is None or np.array_equal(found, np.broadcast_to(wanted, found.shape)), (what, found)
    """)


def test_what_compiles_says_what_to_install() -> None:
    """One error wherever it is asked for: it names what is missing, the extras, and the emulator."""
    done = run("""
        from gemmkit.plans.ahead import compile_config
        from gemmkit.lang.deferred import NotInstalledError
        from gemmkit.lang.deferred import load
        from gemmkit.runtime.compile import versions
        from gemmkit.runtime.device import current

        for asked in (lambda: compile_config(conf()), versions, current, load):
            try:
                asked()
            except NotInstalledError as error:
                print(error)
    """)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and len(set(lines)) == 2                          # a kernel is compiled, a GPU is driven
    for line in lines:
        for word in ("numba-cuda", "cuda-core", "pip install 'gemmkit[cu13]'", "gemmkit[cu12]", "gemmkit.emulate()"):
            assert word in line


def test_no_toolkit(replaced: Seeded, environment: Set) -> None:
    """numba-cuda without the toolkit's NVVM: the same answer."""
    from cuda import pathfinder
    from numba.cuda.cudadrv import libs  # while its own libraries are to be found

    from gemmkit.lang import deferred as installed
    from gemmkit.runtime import compile

    def nowhere(name: str, *rest: object) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"{name}: nowhere")

    replaced(installed, "_not_found", [])
    replaced(pathfinder, "load_nvidia_dynamic_lib", nowhere)
    replaced(libs, "get_cudalib", nowhere)                   # which may have found it for another test
    environment(CUDA_HOME="/nowhere")
    with pytest.raises(installed.NotInstalledError, match=r"CUDA's toolkit, which is not found here.*gemmkit\[cu13\]"):
        compile._nvvm()


@pytest.mark.kin(2)
def test_the_command_line() -> None:
    """`info` shows what there is, `explain` the mapping and then the way to a compiler; neither shows a traceback."""
    program = "import gemmkit.tools.cli\nraise SystemExit(gemmkit.tools.cli.main(sys.argv[1:]))"
    info = run(program, "info")
    assert info.returncode == 0 and "not installed" in info.stdout, info.stderr[-3000:]
    explained = run(program, "explain", "--m", "64")
    assert explained.returncode == 2 and "gemmkit[cu13]" in explained.stderr and "Traceback" not in explained.stderr
