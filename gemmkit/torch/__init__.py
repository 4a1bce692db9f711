"""gemmkit's products as operators of PyTorch's, for autograd, ``torch.compile``, ``torch.func.vmap`` and ``torch.export``.

    linear = gemmkit.torch.op(name="mine::linear", epilogue=lambda b: Bias(b) | GELU())
    y = linear(x, weight, bias)
    y = gemmkit.torch.matmul(a, b)               # the same of a plain product
    layer = gemmkit.torch.Linear(1024, 4096, activation="gelu")

PyTorch is imported here and nowhere else in gemmkit, which imports this package when it is asked for. Tensors on the CPU are
computed in the emulator (``with gemmkit.emulate():``), so that operators can be tested without a GPU.
"""

from gemmkit.torch.autograd import matmul
from gemmkit.torch.layers import Linear, QuantisedLinear
from gemmkit.torch.operators import ProductOperator, op

__all__ = ["Linear", "ProductOperator", "QuantisedLinear", "matmul", "op"]
