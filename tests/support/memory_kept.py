"""``python -m tests.support.memory_kept [kernels]``: how a process grows by whole kernels that it compiles (Linux)."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time

import gemmkit as gk
from gemmkit import Tile, layouts, operators, transforms


def kernel(number: int) -> None:
    """One more distinct kernel: another constant in a transform."""
    from tests.support.compiling import entry

    conf = gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("f4"),
                         block_shape=Tile(M=16, N=16, K=8),
                         transform_regs_to_shared_d=transforms.Map(eval(f"lambda x: x * {number}.5 + {number}")))
    entry(conf)


def megabytes() -> float:
    """This process's own memory, without what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        (line,) = [line for line in file if line.startswith("Private_Dirty:")]
    return int(line.split()[1]) / 1024


def main(count: int) -> None:
    for number in range(2):
        kernel(number)
    before, objects = megabytes(), len(gc.get_objects())
    for number in range(2, 2 + count):
        began = time.process_time()
        kernel(number)
        cpu = time.process_time() - began
        print(f"{number - 1:3} kernels more: {megabytes() - before:6.2f} MB, {len(gc.get_objects()) - objects:6} objects; "
              f"{cpu:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    os.environ["GEMMKIT_CACHE"] = "0"
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
