"""Six kernels that multiply matrices, from one thread an element to a persistent kernel with warps in roles.

    python -m examples.levels                       # on a GPU: each level checked, and timed beside cuBLAS
    python -m examples.levels --emulate             # without one: small products in the emulator

Each file is read from top to bottom. The kernels are ``numba.cuda.jit``'s, on `gemmkit.tiling` and `gemmkit.ptx` alone.
"""
