"""gemmkit's products as operators of PyTorch's.

    linear = gemmkit.torch.op(name="mine::linear", epilogue=lambda bias: Bias(bias) | GELU())
    y = linear(x, weight, bias)                  # autograd, torch.compile, torch.func.vmap, torch.export, CUDA graphs
    y = gemmkit.torch.matmul(a, b)               # the same of a plain product

Nothing of gemmkit imports this package, and it imports PyTorch.
"""
from gemmkit.torch.product import product  # noqa: F401
