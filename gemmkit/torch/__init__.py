"""gemmkit's products and its attention as operators of PyTorch's, for autograd, ``torch.compile``, ``torch.func.vmap`` and
``torch.export``.

    linear = gemmkit.torch.op(name="mine::linear", epilogue=lambda b: Bias(b) | GELU())
    y = linear(x, weight, bias)
    y = gemmkit.torch.matmul(a, b)               # the same of a plain product
    y = gemmkit.torch.attention(q, k, v, mask=gemmkit.masks.Causal())
    y = gemmkit.torch.conv(images, filters, bias, padding=1)
    y = gemmkit.torch.grouped_mm(tokens, matrices, ends)
    y = gemmkit.torch.experts(tokens, chosen, weights, gate, up, down)
    y = gemmkit.torch.scaled_mm(a, b, scale_a, scale_b)
    loss = gemmkit.torch.linear_cross_entropy(x, head.weight, labels)
    out = gemmkit.torch.KVCache(layers=1, batch=8, heads=8, head_size=128, capacity=4096).attend(q, k, v)
    layer = gemmkit.torch.Linear(1024, 4096, activation="gelu")
    print(gemmkit.torch.accelerate(model))       # a finished model's own layers, in place
    compiled = torch.compile(model, backend="gemmkit")           # products with what stands around them

Only this package imports PyTorch; gemmkit imports the package on demand. The emulator computes tensors on the CPU
(``with gemmkit.emulate():``), so you can test operators without a GPU.
"""

from gemmkit.torch.accelerate import Report, accelerate
from gemmkit.torch.attention import attention, scaled_dot_product_attention
from gemmkit.torch.autograd import matmul
from gemmkit.torch.cache import KVCache
from gemmkit.torch.grouped import experts, grouped_mm, scaled_mm
from gemmkit.torch.layers import Linear, QuantisedLinear
from gemmkit.torch.losses import linear_cross_entropy
from gemmkit.torch.lowering import LoweringReport, explain
from gemmkit.torch.operators import ProductOperator, conv, op
from gemmkit.torch.rows import gated, glu, layernorm, log_softmax, rmsnorm, softmax

__all__ = ["KVCache", "Linear", "LoweringReport", "ProductOperator", "QuantisedLinear", "Report", "accelerate", "attention",
           "conv", "experts", "explain", "gated", "glu", "grouped_mm", "layernorm", "linear_cross_entropy", "log_softmax",
           "matmul", "op", "rmsnorm", "scaled_dot_product_attention", "scaled_mm", "softmax"]
