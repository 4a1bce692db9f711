"""gemmkit: a composable GEMM framework in pure Python on Numba CUDA."""
from gemmkit.components import Array, Component, Scalar
