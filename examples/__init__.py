"""Programs on real data, run by `python -m gemmkit demo` or each alone as `python -m examples.<name>`.

digits           a classifier of handwritten digits: one fused product is its whole Gram matrix
shortest_paths   all-pairs shortest paths in social networks, by squaring in the min-plus semiring, and the paths
sensitivities    how a network's answers move with its images: derivatives by dual numbers, in one pass
attention        causal attention over a stream of digits: the mask fused, the zero half skipped
transformer      a transformer of two layers that reads digits row by row: packed sequences, gated units, residuals
hydrogen_chain   the correlation energy of a molecule (MP2, and a coupled-cluster term) by tensor contractions
programs         two kernels that no library has, each a program of a dozen lines: alone, and on a Hopper GPU
experts          a layer of a mixture of experts in two kernels: tokens sorted by expert, sizes on the GPU
train            a language model of letters that trains by PyTorch and by gemmkit, side by side (needs PyTorch)
serve            text of that model, letter by letter (needs PyTorch)
machine          where an example runs: on a GPU with the array library at hand, or in the emulator
"""
