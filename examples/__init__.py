"""Programs on real data, run by `python -m gemmkit demo` or each alone as `python -m examples.<name>`.

digits           a classifier of handwritten digits: one fused product is its whole Gram matrix
shortest_paths   all-pairs shortest paths in social networks, by squaring in the min-plus semiring
machine          where an example runs: on a GPU with the array library at hand, or in the emulator
"""
