"""Instructions of NVIDIA's GPUs as functions: for gemmkit's kernels, for kernels of a user's own (``numba.cuda.jit``), and
for the emulator. `gemmkit.ptx.own_kernels` launches a user's kernel and gives it arrays and tensor maps.

| for | modules |
|---|---|
| a thread's place, and barriers | `special`, `warpgroup`, `cluster` |
| global and shared memory | `memory`, `ldmatrix`, `stmatrix`, `prefetch`, `atomics` |
| asynchronous copies | `copy_async` (sm_80), `tma`, `map_table` and `mbarrier` (sm_90) |
| tensor cores | `mma` and `wmma`, `wgmma` and `descriptors` (sm_90), `fragments` |
| arithmetic | `arithmetic`, `half`, `approximate`, `shuffle`, `vote` |
"""
