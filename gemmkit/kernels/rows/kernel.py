"""``rows``: a function of each row of a matrix, such as a softmax or a layer norm.

0. The kernel before may still run, where a GPU lets the next one begin: what it writes is waited for.
1. A team of threads takes a row: a warp, or a block.
2. It loads the row, as much as it can hold.
3. The function folds it as often as it wants, and stores its result.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.rows.row import Row
from gemmkit.ptx.warpgroup import grid_launch_dependents, grid_wait


def rows(spec: Any, x: Any, y: Any, count: int, columns: int) -> None:
    if spec.starts_early:
        grid_launch_dependents()
        grid_wait()                                                     # 0.
    index = spec.team.row()                                             # 1.
    if index < count:
        held = spec.source.load(spec, x, index, columns)                # 2.
        spec.function(Row(index, columns, held, x, y, spec))            # 3.
