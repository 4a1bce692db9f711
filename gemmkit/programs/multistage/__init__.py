"""Derived kernels for GPUs from compute capability 8.0 on: all threads copy, by cp.async, and multiply, by mma.sync."""
