"""gemmkit behind CuPy's own functions: ``cupy.matmul``, ``dot``, ``einsum``, ``tensordot``, ``cupy.cublas.gemm``, ``@``.

    with gemmkit.cupy.use() as using:
        d = a @ b                                # of CuPy's arrays
    print(using)

Only `use` imports CuPy. `gemmkit.cupy.using` decides which calls gemmkit computes and which it leaves to CuPy; it requires
neither CuPy nor a GPU.
"""

from gemmkit.cupy.using import Using, use

__all__ = ["Using", "use"]
