"""Multi-layer perceptrons in one launch: activations stay in registers from layer to layer.

>>> import numpy as np, gemmkit as gk
>>> x, w = np.eye(2, 16, dtype=np.float16), np.full((2, 16, 16), 0.5, np.float16)
>>> with gk.emulate():
...     gk.mlp(x, w)[:, 0].tolist()
[4.0, 4.0]
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.activations import relu
from gemmkit.component_arrays import arrays_of, check_held
from gemmkit.kernels.mlp.activation import Activation, Identity, Relu
from gemmkit.mlp_operands import check_out, layers_of
from gemmkit.mlp_plans import MlpCall, run_mlp
from gemmkit.problem import check_places
from gemmkit.row_plans import matrix
from gemmkit.runtime.arrays import as_stream_handle, describe, empty_like

IDENTITY, RELU = Identity(), Relu()


def mlp(x: Any, weights: Any, biases: Any = None, activation: Any = relu, *, last: Any = None, out: Any = None,
        stream: Any = None) -> Any:
    """last(...activation(activation(x W1 + b1) W2 + b2)... WL + bL): a multi-layer perceptron in one launch. Forward only.

    Sums are float32, and biases are added to them in float32. Between layers activations are rounded to x's dtype, as
    separate products round what they store; they never leave the registers.

    Args:
        x: (..., K), float16 or bfloat16; leading axes must be one (strides that collapse).
        weights: a list of (K, N) arrays of x's dtype, or one stacked (layers, K, N) array: any number of layers, of any
            widths up to 256 that chain. All are contiguous along N, or all along K (``[layer.weight.T for layer in ...]``
            of torch.nn.Linear). The widest hidden layer decides what the others cost.
        biases: a list of (N,) arrays, or one stacked (layers, N) array, of x's dtype or float32; None for no biases.
        activation: a function of one number (device code), of all layers but the last; `gemmkit.activations.relu` where
            none is given.
        last: the same of the last layer; None leaves its sums as they are, as a torch.nn.Sequential does that ends in a
            Linear. Give ``last=activation`` for activations after every layer.
        out: an array (..., N) of x's dtype to write; None makes one.
        stream: the stream to launch on; None for the library's current one.

    Returns: ``out``, or a new array like x.

    On Hopper TMA loads x, weights and biases: addresses and strides are multiples of 16 bytes. What is not, and other GPUs
    from compute capability 8.0 on, go another way (mma.sync), which takes even strides and numbers of columns at addresses
    that are multiples of 4 bytes.

    Raises:
        TypeError: an argument is no array, of another dtype, or on the host outside of `gemmkit.emulate`; activation or last
            is no function of one number.
        ValueError: shapes do not chain, strides cannot be loaded, out overlaps what is read, a tensor requires a gradient.
        ConfigError: a layer wider than 256; a GPU of a compute capability below 8.0.
        ComponentError: code of activation or last cannot be compiled.

    Fused as in Müller et al., *Real-time neural radiance caching for path tracing* (2021), without shared memory in between.

    >>> import numpy as np, gemmkit as gk
    >>> x = np.float16([[1, 2] + 14 * [0]])
    >>> weights, biases = [np.eye(16, 32, dtype=np.float16), np.eye(32, 16, dtype=np.float16)], [np.zeros(32, np.float32),
    ...     np.full(16, -1.5, np.float32)]
    >>> with gk.emulate():
    ...     gk.mlp(x, weights, biases)[0, :3].tolist()
    ...     gk.mlp(x, weights, biases, lambda v: 2 * v, last=lambda v: max(v, 0))[0, :3].tolist()
    [-0.5, 0.5, -1.5]
    [0.5, 2.5, 0.0]
    """
    rule = RELU if activation is relu else Activation(activation)
    end = IDENTITY if last is None else Activation(last)
    handle = None if stream is None else as_stream_handle(stream)
    layers = layers_of(x, weights, biases)
    shape = (*layers.x.shape[:-1], layers.columns)
    result = empty_like(x, shape, layers.x.dtype) if out is None else out
    given = describe(result, "out")
    held = [(name, one) for name, part in (("activation", rule), ("last", end)) for one in arrays_of(part)]
    check_places({"x": layers.x, "out": given, **{one.name: one.info for _, one in held}})
    check_out(given, shape, layers)
    check_held(held, {"out": given})
    if math.prod(shape):
        call = MlpCall(layers._replace(x=matrix(layers.x, "x")), matrix(given, "out"), rule, end)
        run_mlp(call, {"x": x, "weights": weights, "biases": biases, "out": result}, handle)
    return result
