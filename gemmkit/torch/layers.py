"""``Linear``: a layer whose bias and activation are in the product's epilogue."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from operator import or_
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils import _pytree

from gemmkit.epilogues import GELU, Bias, Elementwise, Epilogue, ReLU, Residual, Scale, SiLU, Tanh
from gemmkit.epilogues.activations import gelu_of_16_bits, gelu_tanh_of_16_bits
from gemmkit.functions.matmul import Door
from gemmkit.functions.matmul import matmul as plain_matmul
from gemmkit.functions.rows import to_float8
from gemmkit.layouts import GroupQuantised
from gemmkit.layouts.matrices import Matrix
from gemmkit.layouts.quantised import quantise
from gemmkit.plans.problem import check_mapping
from gemmkit.runtime.arrays import dtype_from_torch
from gemmkit.torch.autograd import matmul
from gemmkit.torch.checkpoints import read, unpacked
from gemmkit.torch.operators import ProductOperator, op
from gemmkit.torch.product import (
    NARROW,
    Differentiable,
    are_matrices,
    autocast,
    batched_by,
    casting,
    define,
    is_eager,
    known,
    layer,
    layers,
    records,
    summed_to,
)

# --------------------------------------------------------------------------------------------------
# Rows plus a bias, as `torch.compile` is to see it: the sum is fused into what follows, the bias's gradient is not.
#
# The gradient of the rows is in memory, since the gradient of the weights is a product of it. Where the bias's gradient
# was a sum that the compiler saw, its kernel computed the activation's derivative a second time instead of reading it: 80
# us for 8192 x 4096 of float16 with GELU, where summing what is there takes 16 (H200, PyTorch 2.11). An operator is read
# from memory.

def biased(x: torch.Tensor, bias: torch.Tensor) -> Any:
    """x (M, N) plus a bias (N,), recorded."""
    return _Biased.apply(x, bias)


class _Biased(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor) -> Any:
        return x + bias

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.of_x, ctx.of_bias = inputs[0].dtype, inputs[1].dtype

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, Any]:
        of_bias = _SUM(grad).to(ctx.of_bias) if ctx.needs_input_grad[1] else None
        return grad.to(ctx.of_x), of_bias


def _compute_sum(x: torch.Tensor) -> Any:
    return x.sum(0)


def _allocate_sum(x: torch.Tensor) -> Any:
    return x.new_empty(x.shape[1:])


def _keep_sum(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
    ctx.shape = inputs[0].shape


def _backward_sum(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> Any:
    return grad.expand(ctx.shape)


def _sum_in_batches(size: int, in_dims: tuple[Any, ...], x: torch.Tensor) -> tuple[Any, int]:
    """One sum of rows that are a batch long."""
    rows = x.movedim(in_dims[0], 1).flatten(1)
    return _SUM(rows).unflatten(0, (size, -1)), 0


_SUM = Differentiable(define("gemmkit::sum_of_rows", "(Tensor x) -> Tensor", _compute_sum, _allocate_sum), _backward_sum,
                      _keep_sum, _sum_in_batches, _compute_sum)


#: What `Linear` takes for ``activation``.
ACTIVATIONS: dict[str, Epilogue] = {"relu": ReLU(), "gelu": GELU(), "gelu_tanh": GELU("tanh"), "silu": SiLU(),
                                    "tanh": Tanh()}


#: Those that have a shorter form for results of 16 bits.
SHORTER = {"gelu": Elementwise(gelu_of_16_bits), "gelu_tanh": Elementwise(gelu_tanh_of_16_bits)}

#: The same by PyTorch, for where a gradient is wanted.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"relu": F.relu, "gelu": F.gelu,
                                              "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "silu": F.silu,
                                              "tanh": torch.tanh}


@functools.cache
def _operator(activation: str | None, has_bias: bool, mapping: str | None) -> ProductOperator | None:
    """The operator of all layers of a kind; None for a plain product."""
    after = None if activation is None else ACTIVATIONS[activation]
    name = "linear" + ("" if activation is None else f"_{activation}") + ("" if has_bias else "_without_bias")
    how: dict[str, Any] = {} if mapping is None else {"mapping": mapping}
    name = "_".join((name, *how.values()))
    if not has_bias:
        return None if after is None and mapping is None else op(name=name, epilogue=after, **how)
    if after is None:
        return op(name=name, epilogue=lambda bias: Bias(bias), **how)
    return op(name=name, epilogue=lambda bias: Bias(bias) | after, **how)


@functools.cache
def of_16_bits(activation: str) -> ProductOperator:
    """A product with a bias and an activation of `SHORTER`, for results of 16 bits that no gradient is wanted of."""
    return op(name=f"linear_{activation}_of_16_bits", epilogue=lambda bias: Bias(bias) | SHORTER[activation])


@functools.cache
def _adding(has_bias: bool) -> ProductOperator:
    if not has_bias:
        return op(name="linear_with_residual_without_bias", epilogue=lambda residual: Residual(residual))
    return op(name="linear_with_residual", epilogue=lambda bias, residual: Bias(bias) | Residual(residual))


def added(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> Any:
    """``x W^T + bias + y`` of (..., K), (N, K), (N,) and (..., N) of one dtype, rounded once."""
    further = (_rows(y),) if bias is None else (bias, _rows(y))
    return _adding(bias is not None).of_one_dtype(_rows(x), weight.mT, None, *further).view(y.shape)


def check_width(x: torch.Tensor, in_features: int) -> None:
    """Raise ValueError for an x whose last dimension is not ``in_features``."""
    if not x.dim() or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}; (..., {in_features}) is needed, as in_features={in_features}")


def check_layer(in_features: object, out_features: object, activation: object) -> None:
    """Raise ValueError for what is no number of features, and for another activation than those of `ACTIVATIONS`."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(f"activation={activation!r}: None or one of {', '.join(map(repr, ACTIVATIONS))} is needed")
    for name, count in (("in_features", in_features), ("out_features", out_features)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
            raise ValueError(f"{name}={count!r}: a whole number is needed, 0 or more")


def _rows(x: torch.Tensor) -> Any:
    """x as a matrix: a view, where its strides permit."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x[None]


class Linear(torch.nn.Linear):
    """``activation(x W^T + bias)`` of (..., in_features) to (..., out_features), one kernel forward where no gradient is
    wanted.

    With a gradient, the activation's derivative requires the values before the activation, so they are stored. One kernel
    that stores both takes longer than the product followed by PyTorch's activation (1.41 and 1.02 of the time without a
    gradient; 8192 rows, 4096 to 4096, float16, GELU, on an H200, 2026-11-24), so the layer records the latter.

    It is a ``torch.nn.Linear``, with its parameters, their initialisation and its ``state_dict``: weight (out, in), bias
    (out,). ``activation`` is None, "relu", "gelu", "gelu_tanh", "silu" or "tanh". ``torch.autocast`` casts x and the
    parameters, as it does for ``torch.nn.Linear``. With ``mapping="batch_invariant"`` a row of the result has the same bits
    in any batch, as in `gemmkit.matmul`; gradients are computed as without it.

    Raises ValueError for another activation or mapping, and for an x of another width, TypeError for an x of another dtype
    than weight.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> layer = gk.torch.Linear(3, 2, activation="relu")
    >>> with gk.emulate():
    ...     layer(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    mapping: str | None = None                                 # of layers that were pickled before there was a choice

    def __init__(self, in_features: int, out_features: int, bias: bool = True, activation: str | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None, mapping: str | None = None):
        check_layer(in_features, out_features, activation)
        check_mapping(mapping)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation, self.mapping = activation, mapping
        self._find_operators()

    def _find_operators(self) -> None:
        """Without a bias, and with one: a layer may get one, or lose it."""
        self._multiply = [_operator(self.activation, has_bias, self.mapping) for has_bias in (False, True)]
        self._before_activation = [_operator(None, has_bias, self.mapping) for has_bias in (False, True)]

    def __getstate__(self) -> dict[str, Any]:
        """Without the operators, which are this process's: a layer is pickled, copied and sent to other processes."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_multiply", "_before_activation")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._find_operators()

    def forward(self, x: torch.Tensor) -> Any:
        own = self._parameters                                 # (an attribute takes 1 us; parametrised ones are no such)
        weight, bias = own.get("weight", None), own.get("bias", None)
        weight, bias = self.weight if weight is None else weight, self.bias if bias is None else bias
        return self.computed(x, weight, bias)

    def computed(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """`forward` with these parameters."""
        is_cast = not torch.compiler.is_compiling() and casting()
        if is_cast:
            x, weight, bias = autocast(x, weight, bias)
        found = self._again(x, weight, bias, is_cast)
        if found is not None:
            return found
        check_width(x, weight.shape[1])
        x, weight, bias = autocast(x, weight, bias)
        if x.dtype != weight.dtype:
            raise TypeError(f"x has dtype {x.dtype} and the layer's weight {weight.dtype}; convert one with .to(), or "
                            "compute under torch.autocast")
        rows = _rows(x)
        is_recorded = records(x, weight, bias)
        is_split = self.activation is not None and is_recorded                   # the activation is recorded by itself
        operator = (self._before_activation if is_split else self._multiply)[0 if bias is None else 1]
        if are_matrices(rows, weight) and (bias is None or bias.dtype == x.dtype) and is_eager((rows, weight, bias)):
            found = layer(rows, weight, bias, operator)
        elif is_split and bias is not None and torch.compiler.is_compiling():    # which fuses the bias and the activation
            found = biased(matmul(rows, weight.mT, mapping=self.mapping), bias)
        elif operator is None:
            found = matmul(rows, weight.mT)
        else:
            found = operator.of_one_dtype(rows, weight.mT, None, *(() if bias is None else (bias,)))
        found = FUNCTIONS[self.activation or ""](found) if is_split else found
        return found if x.dim() == 2 else found.view(*x.shape[:-1], found.shape[1])

    def _again(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_cast: bool = False) -> Any:
        """The result of a call that is known, whatever leading axes x has; None for another."""
        if x.dim() < 2:
            return None
        rows = _rows(x)
        has_bias, tensors = (0, (rows, weight)) if bias is None else (1, (rows, weight, bias))     # (Dynamo takes no bool)
        found = known(layers, self._multiply[has_bias], tensors, is_cast,
                      (rows, weight, bias, self._before_activation[has_bias], True))
        if found is None:
            return None
        if self.activation is not None and found.requires_grad:                  # the activation is recorded by itself
            found = FUNCTIONS[self.activation](found)
        return found if rows is x else found.view(*x.shape[:-1], found.shape[1])

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, activation={self.activation!r}" + (
            "" if self.mapping is None else f", mapping={self.mapping!r}")


# --------------------------------------------------------------------------------------------------
# ``QuantisedLinear``: a layer whose weights are integers of 2 or 4 bits with group scales.
#
# The operator ``gemmkit::quantised_linear`` multiplies; its gradient is that of x (and of the bias), for the weights are
# integers:
#
#     y = x B + bias,   dx^T = B dy^T,   dbias = sum of dy's rows
#
# B is dequantised as it is read in both.


def columns_of_joined(module: torch.nn.Module, x: object) -> Any:
    """A module's columns of a product that has been computed for it and others (`gemmkit.torch.modules.JoinedLinear`); None
    where none has."""
    joined = module.__dict__.get("_gemmkit_joined")
    return None if joined is None or joined[0].held is None else joined[0].taken(module, x, joined[1])


def summed(layer: Linear | QuantisedLinear, x: torch.Tensor, y: torch.Tensor | None) -> Any:
    """A layer's result for x, plus y in the product's epilogue, of calls that nothing records. y None adds nothing."""
    if isinstance(layer, QuantisedLinear):
        found = _compute_quantised(layer.rows(x), layer.words, layer.scales, layer.zeros, layer.bias, layer.bits,
                                   layer.group, None, layer.float8, None if y is None else _rows(y))
        return found.view(*x.shape[:-1], layer.out_features)
    return layer.computed(x, layer.weight, layer.bias) if y is None else added(x, layer.weight, layer.bias, y)


class Unadded:
    """A product of ``shape`` and of ``like``'s dtype that waits for what it is to be added to: ``compute(y)`` is the product
    plus y, from one kernel, and ``compute(None)`` the product, which all functions but an addition of tensors get."""

    def __init__(self, compute: Callable[[torch.Tensor | None], torch.Tensor], shape: tuple[int, ...], like: torch.Tensor):
        self._compute, self._shape, self._like = compute, torch.Size(shape), like

    @functools.cached_property
    def value(self) -> torch.Tensor:
        return self._compute(None)

    def __add__(self, y: object) -> Any:
        is_fused = (isinstance(y, torch.Tensor) and type(y) is torch.Tensor and y.shape == self._shape
                    and y.dtype == self._like.dtype and y.device == self._like.device and not records(y))
        return self._compute(y) if is_fused else self.value + y

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...] = (),
                           keywords: Mapping[str, Any] | None = None) -> Any:
        if function in _ADDITIONS and len(args) == 2 and not keywords:
            first, second = args
            return first + second if isinstance(first, cls) else second + first
        args, keywords = _pytree.tree_map_only(cls, lambda x: x.value, (args, dict(keywords or {})))
        return function(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


_ADDITIONS = torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__


class QuantisedLinear(torch.nn.Module):
    """``activation(x W^T + bias)`` of float16 or bfloat16 (..., in_features) to (..., out_features); W has integers of
    ``bits`` bits.

    Each ``group`` input features of an output share a float16 scale (`gemmkit.layouts.quantised.quantise`).
    `from_linear` makes a layer of a trained one, `from_checkpoint` of tensors of GPTQ, AWQ or compressed-tensors; a new
    layer has weights of zero, which a ``state_dict`` replaces. The buffers are ``words`` (int32, in_features * bits / 32 x
    out_features), ``scales`` (float16, in_features / group x out_features), where not ``symmetric`` ``zeros`` (uint8), and
    where ``ordered`` ``order`` (int32, the input feature that each row of words is of: x is gathered by it, in a launch of
    PyTorch's); the parameter is ``bias``. Weights have no gradient. ``to(dtype)``, ``half()`` and the like convert ``bias``
    alone: buffers are bits, and keep their dtypes. ``torch.autocast`` casts x and ``bias``.

    With ``float8`` each row of x becomes float8_e4m3fn with a scale of its own (`gemmkit.functions.rows.to_float8`), and
    tensor cores multiply 8-bit floats: of 4 bits and groups of a multiple of 128, on compute capability 9.0. Gradients are
    those of the product without this rounding.

    A call raises TypeError for an x of another dtype, and ValueError for another width. The constructor raises ConfigError
    for bits and groups that `GroupQuantised` does not take, and ValueError if ``in_features`` is no multiple of ``group`` or
    the activation is none of `gemmkit.torch.Linear`'s.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> linear = torch.nn.Linear(32, 2, bias=False)
    >>> _ = torch.nn.init.constant_(linear.weight, 0.5)
    >>> layer = gk.torch.QuantisedLinear.from_linear(linear, group=32)
    >>> with gk.emulate():
    ...     layer(torch.ones(1, 32, dtype=torch.float16)).tolist()
    [[16.0, 16.0]]
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bits: int = 4, group: int = 128, bias: bool = True,
                 activation: str | None = None, symmetric: bool = True, device: torch.device | str | None = None,
                 ordered: bool = False, float8: bool = False):
        super().__init__()
        check_layer(in_features, out_features, activation)
        layout = GroupQuantised("float8_e4m3fn" if float8 else "float16", np.empty((0, 0), np.float16), bits, group)
        if in_features % group:
            raise ValueError(f"in_features={in_features}: a multiple of group={group} is needed")
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.bits, self.group, self.symmetric, self.float8 = bits, group, symmetric, float8
        groups = in_features // group, out_features
        middle = sum(layout.middle << bits * n for n in range(layout.rows))            # every integer stands for 0
        middle = middle - 2**32 if middle >= 2**31 else middle
        self.register_buffer("words", torch.full((in_features // layout.rows, out_features), middle, dtype=torch.int32,
                                                 device=device))
        self.register_buffer("scales", torch.zeros(groups, dtype=torch.float16, device=device))
        self.register_buffer("zeros", None if symmetric else torch.full(groups, layout.middle, dtype=torch.uint8,
                                                                        device=device))
        self.register_buffer("order", torch.arange(in_features, dtype=torch.int32, device=device) if ordered else None)
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=torch.float16, device=device)) if bias else None

    @classmethod
    def from_linear(cls, linear: Any, bits: int = 4, group: int = 128, activation: str | None = None,
                    symmetric: bool = True, float8: bool = False) -> QuantisedLinear:
        """The layer of a ``torch.nn.Linear`` (or `gemmkit.torch.Linear`, with its activation), its weights rounded to the
        nearest integers, on its device."""
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise TypeError(f"linear={type(linear).__name__}: a torch.nn.Linear is needed")
        activation = getattr(linear, "activation", None) if activation is None else activation
        out_features, in_features = weight.shape
        layer = cls(in_features, out_features, bits, group, linear.bias is not None, activation, symmetric, weight.device,
                    float8=float8)
        made = quantise(np.ascontiguousarray(weight.detach().float().cpu().numpy().T), bits, group, symmetric)
        layout: Any = made.layout
        with torch.no_grad():
            layer.words.copy_(torch.from_numpy(made.array.view(np.int32)))
            layer.scales.copy_(torch.from_numpy(layout.scales))
            if layer.zeros is not None:
                layer.zeros.copy_(torch.from_numpy(layout.zeros))
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    @classmethod
    def from_checkpoint(cls, tensors: Mapping[str, torch.Tensor], config: object = None,
                        activation: str | None = None, float8: bool = False) -> QuantisedLinear:
        """The layer of a checkpoint's tensors, as GPTQ, AWQ ("gemm") or compressed-tensors ("pack-quantized") stores them.

        Args:
            tensors: a layer's tensors by their names without the layer's own: qweight, qzeros, scales, g_idx and bias; or
                weight_packed, weight_scale, weight_shape, weight_zero_point, weight_g_idx and bias. Their shapes say which
                format they have (`gemmkit.torch.checkpoints`), and how many bits and groups.
            config: the checkpoint's ``quantization_config``, a dictionary or an object with ``to_dict``. It tells gptq_v2
                from gptq, which is taken without it; what it says of the rest must be what the tensors are.
            activation, float8: as the constructor takes them.

        Returns: a layer on the tensors' device, of as many bits. Words of GPTQ without a change of order are ``qweight``
            itself, others are repacked. Zero points that are all 2 ** (bits - 1) are left out. ``bias`` keeps its dtype and
            requires no gradient. Inputs in the order of their importance (``desc_act``, ``actorder``) make the layer
            ``ordered``.

        Raises: TypeError for tensors that are no dictionary of tensors. ValueError for other names, shapes, dtypes and
            formats, for 3 and 8 bits, for groups of different sizes or of inputs that fill no whole word, for a zero point
            of gptq that libraries read differently, for scales that float16 does not hold, and for a config that says
            otherwise.

        >>> import torch, gemmkit as gk, gemmkit.torch
        >>> tensors = {"qweight": torch.full((1, 8), 0x11111111, dtype=torch.int32), "scales": torch.ones(1, 8).half(),
        ...            "qzeros": torch.zeros(1, 1, dtype=torch.int32), "g_idx": torch.zeros(8, dtype=torch.int32)}
        >>> layer = gk.torch.QuantisedLinear.from_checkpoint(tensors, {"checkpoint_format": "gptq_v2"})
        >>> layer
        QuantisedLinear(8, 8, bits=4, group=8, bias=False, activation=None, symmetric=False)
        >>> with gk.emulate():
        ...     layer(torch.ones(1, 8).half())[0, :2].tolist()
        [8.0, 8.0]
        """
        found = read(tensors, config)
        rows, columns = found.words.shape
        layer = cls(rows * 32 // found.bits, columns, found.bits, found.group, False, activation, found.zeros is None,
                    torch.device("meta"), float8=float8)
        layer.words, layer.scales, layer.zeros, layer.order = found.words, found.scales, found.zeros, found.order
        if found.bias is not None:
            layer.bias = torch.nn.Parameter(found.bias.detach(), requires_grad=False)
        return layer

    def dequantised(self) -> torch.Tensor:
        """The weights as float32 numbers, (out_features, in_features)."""
        integers = unpacked(self.words, self.bits, 0).view(-1, self.group, self.out_features).float()
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros[:, None].float()
        weights = ((integers - zeros) * self.scales[:, None].float()).view(self.in_features, self.out_features)
        if self.order is not None:
            weights = torch.empty_like(weights).index_copy_(0, self.order.long(), weights)
        return weights.T

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """As ``torch.nn.Module`` has it, of buffers without a change of dtype."""
        def moved(x: torch.Tensor) -> Any:
            found = fn(x)
            is_bits = found.dtype != x.dtype and any(x is buffer for buffer in self._buffers.values())
            return x.to(found.device) if is_bits else found

        return super()._apply(moved, recurse)

    def forward(self, x: torch.Tensor) -> Any:
        joined = columns_of_joined(self, x)
        if joined is not None:
            return joined
        x, bias = autocast(x, self.bias)
        self.check(x)
        rows = self.rows(x)
        is_recorded = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
        fused = None if is_recorded else self.activation
        found = QUANTISED_LINEAR(rows, self.words, self.scales, self.zeros, bias, self.bits, self.group, fused, self.float8)
        if is_recorded and self.activation is not None:
            found = FUNCTIONS[self.activation](found)
        return found.view(*x.shape[:-1], self.out_features)

    def check(self, x: torch.Tensor) -> None:
        """Raise for an x that the layer does not take."""
        check_width(x, self.in_features)
        if x.dtype not in NARROW:
            raise TypeError(f"x has dtype {x.dtype}; weights become float16 or bfloat16, and x must be one of them: "
                            "x.half() or x.bfloat16()")

    def rows(self, x: torch.Tensor) -> Any:
        """x (..., in_features) as a matrix, whose columns are in the order of the words' rows."""
        rows = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        return rows if self.order is None else rows.index_select(1, self.order)

    def extra_repr(self) -> str:
        return (f"{self.in_features}, {self.out_features}, bits={self.bits}, group={self.group}, "
                f"bias={self.bias is not None}, activation={self.activation!r}, symmetric={self.symmetric}"
                + ("" if self.order is None else ", ordered=True") + (", float8=True" if self.float8 else ""))


# -- the operators ----------------------------------------------------------------------------------------------------

def packed_weights(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int,
             group: int) -> Matrix:
    """B, whose elements are of x's dtype."""
    return Matrix(words.view(torch.uint32), GroupQuantised(dtype_from_torch(x.dtype), scales, bits, group, zeros))


def _compute_quantised(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
                       bias: torch.Tensor | None, bits: int, group: int, activation: str | None,
                       float8: bool = False, residual: torch.Tensor | None = None) -> Any:
    dtype = x.dtype
    factors: list[torch.Tensor] = []
    if float8 and x.shape[0]:
        x, *factors = to_float8(x.detach(), block=None)

    def described() -> tuple[Any, Any, dict[str, Any]]:
        stages: list[Epilogue] = [Scale(factor.select(1, 0), "M") for factor in factors]
        if bias is not None:
            stages.append(Bias(bias.detach()))
        if activation is not None:
            stages.append(ACTIVATIONS[activation])
        if residual is not None:
            stages.append(Residual(residual))
        more: dict[str, Any] = {"epilogue": functools.reduce(or_, stages)} if stages else {}
        return x, packed_weights(x, words, scales, zeros, bits, group), {**more, "dtype": dtype_from_torch(dtype)}

    rest = bits, group, activation, zeros is None, bias is None, residual is None, dtype
    return of_rows(_products, rest, (x, words, scales, zeros, bias, residual, *factors), described)


_products = Door()                     # those that come again are known by their tensors


def of_rows(door: Door, rest: tuple[object, ...], tensors: tuple[torch.Tensor | None, ...],
            described: Callable[[], tuple[Any, Any, dict[str, Any]]]) -> Any:
    """A product of packed weights, which are ``tensors[1]``, as rows: of contiguous ones a `Door` allocates the result,
    since a call with a result is known by its address, too."""
    x: Any = tensors[0]
    columns: Any = tensors[1]
    present = tuple(y if not y.requires_grad else y.detach() for y in tensors if y is not None)
    out = None if x.is_contiguous() else x.new_empty((x.shape[0], columns.shape[1]))
    return door(rest, present, out, None, described)


def _allocate_quantised(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
                        bias: torch.Tensor | None, bits: int, group: int, activation: str | None,
                        float8: bool = False) -> Any:
    return x.new_empty((x.shape[0], words.shape[1]))


def _compute_gradient(grad: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int,
                      group: int) -> Any:
    out = _allocate_gradient(grad, words, scales, zeros, bits, group)
    plain_matmul(packed_weights(grad, words, scales, zeros, bits, group), grad.mT, out=out.mT)
    return out


def _allocate_gradient(grad: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int,
                       group: int) -> Any:
    return grad.new_empty((grad.shape[0], words.shape[0] * 32 // bits))


def _keep_quantised(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
    _, words, scales, zeros, bias, ctx.bits, ctx.group, ctx.activation, *rest = inputs
    ctx.options = 3 + len(rest)
    ctx.of_bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(words, scales, zeros)


def _backward_quantised(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    if ctx.activation is not None:
        raise NotImplementedError(f"a gradient through gemmkit::quantised_linear with activation={ctx.activation!r}, which "
                                  "keeps no product; leave activation out and apply the function to the result")
    words, scales, zeros = ctx.saved_tensors
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = QUANTISED_GRADIENT(grad, words, scales, zeros, ctx.bits, ctx.group)
    if ctx.needs_input_grad[4]:
        shape, dtype = ctx.of_bias
        of_bias = summed_to(grad, shape, torch.float32).to(dtype)
    return of_x, None, None, None, of_bias, *(None,) * ctx.options


def _backward_of_gradient(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    words, scales, zeros = ctx.saved_tensors
    found = QUANTISED_LINEAR(grad, words, scales, zeros, None, ctx.bits, ctx.group, None, False)
    return found, None, None, None, None, None


def _keep_of_gradient(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
    _, words, scales, zeros, ctx.bits, ctx.group = inputs
    ctx.save_for_backward(words, scales, zeros)


def _quantised_in_batches(operator: Differentiable, size: int, in_dims: tuple[Any, ...], x: torch.Tensor,
                          *rest: object) -> tuple[Any, int]:
    """A batch of x is more rows; of weights or a bias there is a launch for each."""
    if any(dim is not None for dim in in_dims[1:]):
        found: tuple[Any, int] = batched_by(operator, size, in_dims, (x, *rest), (None,) * len(in_dims), {})
        return found
    rows = x.movedim(in_dims[0], 0)
    return operator(rows.flatten(0, 1), *rest).unflatten(0, (size, rows.shape[1])), 0


QUANTISED_LINEAR: Differentiable = Differentiable(
    define("gemmkit::quantised_linear", "(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, int bits, "
           "int group, str? activation, bool float8=False) -> Tensor", _compute_quantised, _allocate_quantised),
    _backward_quantised, _keep_quantised, lambda *batch: _quantised_in_batches(QUANTISED_LINEAR, *batch), _compute_quantised)
QUANTISED_GRADIENT: Differentiable = Differentiable(
    define("gemmkit::quantised_linear_gradient", "(Tensor grad, Tensor words, Tensor scales, Tensor? zeros, int bits, "
           "int group) -> Tensor", _compute_gradient, _allocate_gradient),
    _backward_of_gradient, _keep_of_gradient, lambda *batch: _quantised_in_batches(QUANTISED_GRADIENT, *batch),
    _compute_gradient)
