"""Measurements: one script a table or figure, each run as `python -m bench.<name>`.

backends   what a measurement needs of an array library (PyTorch, CuPy): arrays, the peer's product, timing
harness    ours against the peer in one run: interleaved pairs, graphs, rotated inputs, checked results
gemm       products of plain matrices against cuBLAS
turns      calls of PyTorch's in turns: times, rows, the command of a bench that compares them
report     the result file (JSON), its schema, and the printed table
plot       draws a result file; plot_groups one with groups
hopper     the warp-specialised kernel on an H100: all that was asked of it, and mappings to tune it
             cases (its rows), fusions (their components and references), mappings (by short names), peers (cuBLAS and
             cuBLASLt), prepare (compiles ahead), supervise (a worker process), verdicts (bars, tables, merging)
experiments  the paper's experiments, from diagonal matrices to tensor contractions, by the same means
host       what a call costs on the host, and what the first call of a second process costs
"""
