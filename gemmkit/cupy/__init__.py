"""gemmkit behind CuPy's own functions: ``cupy.matmul``, ``dot``, ``einsum``, ``tensordot``, ``cupy.cublas.gemm``, ``@``.

    with gemmkit.cupy.use() as using:
        d = a @ b                                # of CuPy's arrays
    print(using)

CuPy is imported by `use`, and nowhere else in gemmkit. What is computed here, and what is left to CuPy, is decided in
`gemmkit.cupy.using`, which needs neither CuPy nor a GPU.
"""

from gemmkit.cupy.using import Using, use

__all__ = ["Using", "use"]
