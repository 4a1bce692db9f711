"""What is collected: files that import PyTorch, where there is PyTorch."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["gemmkit/torch/*", "gemmkit/torch"]
