"""Instructions of NVIDIA's GPUs as functions: for gemmkit's kernels, for kernels of a user's own (``numba.cuda.jit``), and
for the emulator. `gemmkit.ptx.own_kernels` launches a user's kernel and gives it arrays and tensor maps.

| for | modules |
|---|---|
| a thread's place, barriers of a block, shuffles and votes | `special` |
| counters and flags, mbarriers and clusters (sm_90) | `barriers` |
| global and shared memory | `memory` |
| asynchronous copies, prefetches | `copy_async` (sm_80), `tma` (sm_90) |
| tensor cores, ldmatrix and stmatrix | `mma` and `wmma`, `wgmma` (sm_90) |
| arithmetic, values in registers | `arithmetic`, `registers` |
"""
