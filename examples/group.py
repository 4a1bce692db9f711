"""The process group that an example of several ranks runs over, and each rank's device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def joined() -> Iterator[torch.device]:
    """Within it there is a default group: the one that there was, that of `torchrun`'s processes, or one of this process
    alone. Yields the device where this rank multiplies."""
    own, on_gpu = not dist.is_initialized(), torch.cuda.is_available()
    if own:
        if on_gpu:                                       # of a group that there was, each rank has chosen its GPU
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl" if on_gpu else "gloo"
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    finally:
        if own:
            dist.destroy_process_group()
