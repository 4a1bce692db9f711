"""gemmkit: a composable GEMM framework in pure Python on Numba CUDA.

    d = gemmkit.matmul(a, b)                                   # everything derived from the arguments
    d = gemmkit.matmul(a, b, c, conf, out=d, epilogue=...)     # full control
    gemmkit.blas.gemmEx("N", "T", alpha, a, b, beta, c)        # in place, as BLAS has it
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

import ml_dtypes as _ml_dtypes  # noqa: F401 (NumPy knows bfloat16 by its name from then on)
import numpy as _np

from gemmkit.lang import fingerprint as _package_state  # noqa: F401 (it sees what files of gemmkit there are now)
from gemmkit.lang.deferred import public_names as _public_names

float16, float32, float64 = _np.float16, _np.float32, _np.float64
__version__ = "0.1.0"

__all__ = [
    "Array", "BlockSparse", "Braid", "Component", "ComponentError", "Concat", "Config", "ConfigError", "Diagonal",
    "Dual", "Explanation", "Gather", "Generated", "GroupPlan", "Mapping", "Matrix", "Plan", "Scalar", "Scatter",
    "StreamK", "Symmetric", "Tile", "Triangular", "Tuned", "activations", "attention", "blas", "einsum", "emulate",
    "epilogues", "explain", "fast", "float16", "float32", "float64", "get_config", "glu", "grouped", "layernorm",
    "layouts", "linearise", "log_softmax", "lstm_cell", "masks", "matmul", "mlp", "operators", "parallelise", "plan",
    "plan_grouped", "program", "programs", "rmsnorm", "rowwise", "scores", "select", "softmax", "subdivide",
    "transforms", "translate", "translate_base", "translate_offset", "tune",
]

if _TYPE_CHECKING:
    from gemmkit import blas, epilogues, layouts, operators, programs, transforms
    from gemmkit.components import Array, Component, ComponentError, Scalar
    from gemmkit.emulator.mode import emulate
    from gemmkit.epilogues import activations, fast
    from gemmkit.functions.attention import attention
    from gemmkit.functions.block_sparse import BlockSparse
    from gemmkit.functions.dual import Dual
    from gemmkit.functions.einsum import einsum
    from gemmkit.functions.glu import glu, lstm_cell
    from gemmkit.functions.grouped import GroupPlan, grouped, plan_grouped
    from gemmkit.functions.matmul import matmul
    from gemmkit.functions.mlp import mlp
    from gemmkit.functions.rows import layernorm, log_softmax, rmsnorm, rowwise, softmax
    from gemmkit.functions.semiring import select
    from gemmkit.kernels import masks
    from gemmkit.kernels import masks as scores
    from gemmkit.kernels.collectives.split_k import StreamK
    from gemmkit.kernels.config import Config
    from gemmkit.lang.errors import ConfigError
    from gemmkit.layouts.gather import Gather, Scatter
    from gemmkit.layouts.joined import Braid, Concat
    from gemmkit.layouts.matrices import Diagonal, Generated, Matrix, Symmetric, Triangular
    from gemmkit.plans.plan import Plan, plan
    from gemmkit.programs import Mapping, program
    from gemmkit.tiling import Tile, linearise, parallelise, subdivide, translate, translate_base, translate_offset
    from gemmkit.tools.explain import Explanation, explain
    from gemmkit.tuner import Tuned, tune
    from gemmkit.tuning.choose import get_config
else:
    __getattr__, __dir__ = _public_names(globals())
