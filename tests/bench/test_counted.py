"""`bench.counted` without ncu: what it asks for, and how it reads the answer."""

from __future__ import annotations

import pytest

from bench import counted

PAGE = '''==PROF== Connected to process 7
"ID","Kernel Name","smsp__inst_executed.sum","sm__inst_executed_pipe_tensor_x.sum"
"","","inst","inst"
"0","first","1,000","16"
"1","second","24","n/a"
==PROF== Disconnected
'''


def test_metrics_are_those_that_ncu_has() -> None:
    found = counted.available("Device NVIDIA\nsmsp__inst_executed   Counter\nsm__inst_executed_pipe_tensor_x  Counter\n\n")
    assert found == {"instructions": "smsp__inst_executed.sum", "tensor instructions _x": "sm__inst_executed_pipe_tensor_x.sum"}


def test_counts_are_sums_over_kernels() -> None:
    """A metric that one of them lacks is left out: its sum would be too small."""
    metrics = {"instructions": "smsp__inst_executed.sum", "tensor": "sm__inst_executed_pipe_tensor_x.sum"}
    assert counted.parsed(PAGE, metrics) == {"kernels": 2, "instructions": 1024}
    with pytest.raises(RuntimeError, match="measured no launch: ==ERROR=="):
        counted.parsed("==ERROR== no counters", metrics)
