"""Arrays by columns that rounds read, such as an MLP's biases: loaded while the round's product runs.

A load from global memory takes hundreds of cycles. Behind the wait for a product they would be on the way from one product
to the next: 20 layers of 16384 x 128 took 1.18 of the time of the kernel by hand, whose biases lie in shared memory. So a
thread's elements of such an array are a value of their own, which the scheduler computes as soon as it needs no wait.

Where products run ahead they are left where they are used: registers are short there, and a round's arithmetic hides them.
"""

from __future__ import annotations

from gemmkit.programs.chains.allocate import Choice, room_left
from gemmkit.programs.chains.chain import Chain, only_adds
from gemmkit.programs.kernels import Kernel
from gemmkit.programs.trace import Value

READ = "read"                          # the operation


def read_early(chain: Chain, choice: Choice, kernel: Kernel) -> None:
    """Put a `READ` in the place of loads by columns, as many as registers have room for."""
    if choice.ahead or only_adds(chain):
        return
    room, made = room_left(chain, choice, kernel), dict[Value, Value]()
    for x in [x for x in chain.body if x.op != "dot" and len(x.dims) == 2]:
        for y in x.args:
            if y.op != "load" or len(y.dims) != 1 or y.dims[0] is chain.rows or y in made:
                continue
            registers = choice.size(y.dims[0]) // 4
            if registers <= room:
                room -= registers
                made[y] = Value(READ, (y,), y.dims, None, f"{y.data[0].name}_columns", x.line)
        x.args = tuple(made.get(y, y) for y in x.args)
    chain.body[:0] = made.values()
