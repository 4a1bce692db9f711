"""gemmkit: a composable GEMM framework in pure Python on Numba CUDA.

    d = gemmkit.matmul(a, b)                                   # everything derived from the arguments
    d = gemmkit.matmul(a, b, c, conf, out=d, epilogue=...)     # full control
    gemmkit.blas.gemmEx("N", "T", alpha, a, b, beta, c)        # in place, as BLAS has it
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import numpy as _np

from gemmkit.components import Array, Component, ComponentError, Scalar
from gemmkit.emulator.mode import emulate
from gemmkit.tiling import Tile, linearise, parallelise, subdivide, translate, translate_base, translate_offset

from gemmkit import epilogues, layouts, operators, transforms  # isort: skip
from gemmkit.block_sparse import BlockSparse
from gemmkit.config import Config, ConfigError
from gemmkit.configure import get_config
from gemmkit.contraction import einsum
from gemmkit.gather import Gather, Scatter
from gemmkit.glu import glu
from gemmkit.grouped import GroupPlan, grouped, plan_grouped
from gemmkit.joined import Braid, Concat
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.lstm import lstm_cell
from gemmkit.matmul import matmul
from gemmkit.matrices import Diagonal, Generated, Matrix, Symmetric, Triangular
from gemmkit.planning import Plan, plan
from gemmkit.selection import select

from gemmkit.dual import Dual  # isort: skip
from gemmkit import blas  # isort: skip
from gemmkit.lang.later import imported as _imported

if _TYPE_CHECKING:
    from gemmkit import fast, masks, programs, scores
    from gemmkit.attention_call import attention
    from gemmkit.programs import Mapping, program
    from gemmkit.report.explained import Explanation, explain
    from gemmkit.rows import layernorm, log_softmax, rmsnorm, rowwise, softmax
    from gemmkit.tuner import Tuned, tune

_imported()
float16, float32, float64 = _np.float16, _np.float32, _np.float64
__version__ = "0.1.0"

__all__ = [
    "Array", "BlockSparse", "Braid", "Component", "ComponentError", "Concat", "Config", "ConfigError", "Diagonal",
    "Dual", "Explanation", "Gather", "Generated", "GroupPlan", "Mapping", "Matrix", "Plan", "Scalar", "Scatter", "StreamK",
    "Symmetric", "Tile", "Triangular", "Tuned", "attention", "blas", "einsum", "emulate", "epilogues", "explain", "fast",
    "float16", "float32", "float64", "get_config", "glu", "grouped", "layernorm", "layouts", "linearise", "log_softmax",
    "lstm_cell", "masks", "matmul", "mlp", "operators", "parallelise", "plan", "plan_grouped", "program", "programs",
    "rmsnorm", "rowwise", "scores", "select", "softmax", "subdivide", "transforms", "translate", "translate_base",
    "translate_offset", "tune",
]


_MODULES = "cupy", "fast", "masks", "programs", "scores", "torch"
_LATER = {"Mapping": "programs", "Tuned": "tuner", "attention": "attention_call", "explain": "report.explained",
          "Explanation": "report.explained", "mlp": "mlp_call", "program": "programs",
          "tune": "tuner",
          **dict.fromkeys(("layernorm", "log_softmax", "rmsnorm", "rowwise", "softmax"), "rows")}


def __getattr__(name: str) -> _Any:
    """What no product needs is loaded when it is asked for: the tuner, attention, MLPs, and functions of rows."""
    if name in _MODULES:
        from importlib import import_module

        return import_module(f"gemmkit.{name}")
    if name in _LATER:
        from importlib import import_module

        found = globals()[name] = getattr(import_module(f"gemmkit.{_LATER[name]}"), name)    # asked for once
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
