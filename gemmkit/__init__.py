"""gemmkit: a composable GEMM framework in pure Python on Numba CUDA.

    d = gemmkit.matmul(a, b)                                   # everything derived from the arguments
    d = gemmkit.matmul(a, b, c, conf, out=d, epilogue=...)     # full control
    gemmkit.blas.gemmEx("N", "T", alpha, a, b, beta, c)        # in place, as BLAS has it
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

import ml_dtypes as _ml_dtypes  # noqa: F401 (NumPy knows bfloat16 by its name from then on)

from gemmkit.lang import fingerprint as _package_state  # noqa: F401 (it sees what files of gemmkit there are now)
from gemmkit.lang.deferred import public_names as _public_names

__version__ = "0.1.0"

__all__ = [
    "Array", "Component", "ComponentError", "Config", "ConfigError", "Mapping", "Scalar", "Tile", "attention", "blas",
    "conv", "einsum", "emulate", "epilogues", "explain", "functions", "get_config", "glu", "grouped", "kernels", "layernorm",
    "layouts", "log_softmax", "masks", "matmul", "mlp", "operators", "plan", "program", "programs", "rmsnorm", "rowwise",
    "softmax", "tiling", "transforms", "tune",
]

if _TYPE_CHECKING:
    from gemmkit import blas, epilogues, functions, kernels, layouts, operators, programs, tiling, transforms
    from gemmkit.components import Array, Component, ComponentError, Scalar
    from gemmkit.emulator import emulate
    from gemmkit.functions.attention import attention
    from gemmkit.functions.conv import conv
    from gemmkit.functions.einsum import einsum
    from gemmkit.functions.glu import glu
    from gemmkit.functions.grouped import grouped
    from gemmkit.functions.matmul import matmul
    from gemmkit.functions.mlp import mlp
    from gemmkit.functions.rows import layernorm, log_softmax, rmsnorm, rowwise, softmax
    from gemmkit.kernels import masks
    from gemmkit.kernels.config import Config
    from gemmkit.lang.errors import ConfigError
    from gemmkit.plans.plan import plan
    from gemmkit.programs import Mapping, program
    from gemmkit.tiling import Tile
    from gemmkit.tools.explain import explain
    from gemmkit.tuner import tune
    from gemmkit.tuning.choose import get_config
else:
    __getattr__, __dir__ = _public_names(globals())
