"""Step 0 of `quantised`: a block's part of B comes into the L2 before the kernel in front has ended.

The launch is a dependent one: blocks begin where there is room, and wait (`grid_wait`) before they read or write anything,
for the kernel in front may write A, B or what D replaces. A prefetch reads no value, so it need not wait.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.work import Work
from gemmkit.ptx.prefetch import prefetch
from gemmkit.ptx.special import rolled, thread_index, udiv

LINE = 32                              # words in 128 bytes


def prefetch_b(spec: Any, b: Any, work: Work, shape: Any) -> None:
    """Each thread brings some of the lines of a block's words and scales."""
    end = min(work.k_begin + work.k_tiles * spec.block.size.K, shape.K)
    row = udiv(work.k_begin, spec.operator.rows) + thread_index()
    while row < udiv(end, spec.operator.rows):
        for line in range(spec.warps_n * spec.fragments_n):
            prefetch(b, (row, min(work.n + line * LINE, shape.N - 1)))
        row = rolled(row + spec.threads)
    group = udiv(work.k_begin, spec.b.layout.group) + thread_index()
    while group * spec.b.layout.group < end:
        prefetch(spec.b.layout.scales, (group, work.n))
        group = rolled(group + spec.threads)
