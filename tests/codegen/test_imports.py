"""What a process loads: Numba and what comes with it at the first compilation, not before."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

HEAVY = "numba", "numba_cuda", "llvmlite", "scipy", "asyncio", "torch", "cupy"


def loaded(*programs: str) -> list[set[str]]:
    """Which of the heavy packages a fresh process has after each of some programs, run one after the other."""
    report = f"\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", "".join(textwrap.dedent(program) + report for program in programs)],
                          capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


COMPONENTS = """
    from dataclasses import dataclass
    import gemmkit as gk
    import numpy as np

    @dataclass(frozen=True)
    class Skewed(gk.layouts.Layout):
        def element(self, data, m, k, shape):
            return data[m - k + shape.K - 1]

    scale = np.arange(32, dtype=np.float32)
    conf = gk.get_config(
        operator=gk.operators.MMAOp(dtype="bfloat16", accumulator="float32"), global_a_layout=gk.layouts.RowMajor("bfloat16"),
        transform_regs_to_shared_d=gk.transforms.Elementwise(lambda x: max(x, 0)), epilogue=gk.epilogues.Bias(scale),
        gemm_shape=dict(M=64, N=32, K=64))
    repr(conf), Skewed("float32"), gk.operators.WMMAOp(), gk.operators.WGMMAOp(), gk.epilogues.Saturate("int8")
    gk.operators.FPUOp(dtype="float64"), gk.layouts.Swizzled(gk.layouts.RowMajor("float16")), gk.operators.dual(1)
"""

EMULATED = """
    a, b = (np.ones(shape, np.float16) for shape in ((48, 40), (40, 32)))
    with gk.emulate():
        assert (gk.matmul(a, b) == 40).all()
        assert (gk.matmul(a.astype("f4"), b.astype("f4"), epilogue=gk.epilogues.Bias(scale)) == 40 + scale).all()
        assert (gk.matmul(a.astype("c8"), b.astype("c8")) == 40).all()
        assert (gk.einsum("ik,kj->ij", a, b) == 40).all()
        gk.plan(a, b)(a, b)
        assert np.allclose(gk.softmax(np.zeros((4, 8), "f4")), 1 / 8)
        q = np.ones((1, 1, 8, 64), np.float16)
        assert (gk.attention(q, q, q) == 1).all()
"""

#: Types are asked for before anything is compiled, as `compile_config` with shapes that layouts leave open does.
ASKED = """
    import gemmkit as gk
    from gemmkit.components import freeze
    from gemmkit.kernels.spec import Shape
    from gemmkit.runtime.compile import to_ptx
    from gemmkit.runtime.device import H100

    shape = freeze(Shape(1, 2, 3)).type

    def kernel(shape, out):
        out[0] = shape.M + shape.K

    import numpy as np
    from gemmkit.lang.functions import freeze_array
    from gemmkit.runtime.arrays import describe
    assert ".entry" in to_ptx(kernel, (shape, freeze_array(describe(np.zeros(4, np.int32), "out")).type), 32, H100)
"""

OWN = COMPONENTS + """
    with gk.emulate():
        d = gk.matmul(np.ones((4, 5), "f4"), np.ones((5, 6), "f4"), epilogue=gk.epilogues.Elementwise(lambda x, i, j: x + i))
        assert (d == 5 + np.arange(4)[:, None]).all()
"""

COMPILED = """
    import gemmkit as gk
    from gemmkit.plans.ahead import compile_config
    conf = gk.get_config(operator=gk.operators.FPUOp(M=16, N=16), global_a_layout=gk.layouts.RowMajor("float32"))
    assert compile_config(conf).usage.spill_stores == 0
"""


#: How many of gemmkit's modules there may be after ``import gemmkit``. A name that is asked for loads its own.
IMPORTED = 8

COUNTED = """
    import sys
    import gemmkit, numpy
    numpy.dtype("bfloat16")                                        # which NumPy knows by name from then on
    print(*[name for name in sys.modules if name.partition(".")[0] == "gemmkit"])
"""


def test_an_import_loads_no_more_than_names() -> None:
    """Plans, kernels, layouts, the emulator and the tuner are loaded with the first name that needs them."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(COUNTED)], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) <= IMPORTED, done.stdout


def test_without_compiling_nothing_heavy_is_loaded() -> None:
    assert loaded("import gemmkit", COMPONENTS, EMULATED) == [set()] * 3


@pytest.mark.sample(3)
@pytest.mark.compile
@pytest.mark.parametrize("program", [COMPILED, ASKED, OWN], ids=["compiled", "types first", "a function of the user's, in the emulator"])
def test_compiling_loads_the_compiler(program: str) -> None:
    """The names above are those of the packages that a compiler is. The emulator asks it about functions of the user's."""
    (found,) = loaded(program)
    assert {"numba", "llvmlite"} <= found


#: What a plain product, planned for an H100, has no use for.
UNUSED = ("attention_call", "attention_plans", "mlp_call", "mlp_plans", "rows", "row_plans", "lstm", "glu_call",
          "grouped_call", "groups", "programs", "specs", "tuner", "cli", "report", "distributed", "torch", "cupy",
          "inspection", "dual", "selection", "blas", "block_sparse", "contraction", "masks", "scores", "fast",
          "emulator.machine", "kernels.rows", "kernels.attention", "kernels.mlp", "kernels.simt.family",
          "kernels.sm80.family", "kernels.quantised.family")
PLANNED = """
    import sys
    import numpy as np
    import gemmkit as gk
    from gemmkit.plans.ahead import recorded
    from gemmkit.runtime.device import H100

    a = np.ones((256, 256), np.float16)
    (found,) = recorded(lambda: gk.matmul(a, a), H100)
    assert found.problem.config.kernel == "warp_specialised"
    print(*[name for name in sys.modules if name.partition(".")[0] == "gemmkit"])
"""


def test_a_product_loads_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PLANNED)], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert not found & {f"gemmkit.{name}" for name in UNUSED}
    assert len(found) <= 275
