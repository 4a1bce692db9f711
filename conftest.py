"""What is collected: files that import PyTorch, where there is PyTorch."""

from importlib.util import find_spec

OF_TORCH = ["gemmkit/torch/*", "gemmkit/torch", "tests/pytorch/*", "tests/pytorch", "gemmkit/distributed/*",
            "gemmkit/distributed", "tests/distributed/*", "tests/distributed", "tests/support/ranks.py",
            "tests/support/torch_operators.py", "tests/support/checkpoints.py"]

collect_ignore_glob = [] if find_spec("torch") else OF_TORCH
