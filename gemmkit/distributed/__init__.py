"""Products over several GPUs, on torch.distributed: shards of A, B or K in the ranks of a process group, any components.

    d = gemmkit.distributed.all_gather_matmul(a_shard, b)      # D = gather(A) B
    d = gemmkit.distributed.matmul_reduce_scatter(a, b_shard)  # rows of the sum of A B
    d = gemmkit.distributed.matmul_all_reduce(a, b_shard)      # all rows, on every rank
    d = gemmkit.distributed.ring_matmul(a, b_shard)            # rows; shards go round
    y = gemmkit.distributed.experts(x, chosen, weights, gate, up, down)        # tokens go to the ranks of their experts

A `DistributedMatrix` knows how it is shared out: ``gemmkit.matmul`` picks one of these for it, and `explain` says which.

``torchrun`` starts the processes. gemmkit imports this package on demand, because it requires PyTorch. The emulator computes
tensors on the CPU (``with gemmkit.emulate():``), over gloo, so you can test programs of several ranks without a GPU.
"""

from gemmkit.distributed.matmul import all_gather_matmul, experts, matmul_all_reduce, matmul_reduce_scatter
from gemmkit.distributed.matrix import DistributedMatrix, explain, ring_matmul

__all__ = ["DistributedMatrix", "all_gather_matmul", "experts", "explain", "matmul_all_reduce", "matmul_reduce_scatter",
           "ring_matmul"]
