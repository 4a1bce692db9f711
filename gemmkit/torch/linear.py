"""``Linear``: a layer whose bias and activation are in the product's epilogue."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from gemmkit.epilogues import GELU, Bias, Epilogue, ReLU, SiLU, Tanh
from gemmkit.torch.biased import biased
from gemmkit.torch.library import is_eager
from gemmkit.torch.operators import Product, op
from gemmkit.torch.product import are_matrices, autocast, layer, records
from gemmkit.torch.recorded import matmul

#: What `Linear` takes for ``activation``.
ACTIVATIONS: dict[str, Epilogue] = {"relu": ReLU(), "gelu": GELU(), "gelu_tanh": GELU("tanh"), "silu": SiLU(),
                                    "tanh": Tanh()}


#: The same by PyTorch, for where a gradient is wanted.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"relu": F.relu, "gelu": F.gelu,
                                              "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "silu": F.silu,
                                              "tanh": torch.tanh}


@functools.cache
def _operator(activation: str | None, has_bias: bool) -> Product | None:
    """The operator of all layers of a kind; None for a plain product."""
    after = None if activation is None else ACTIVATIONS[activation]
    name = "linear" + ("" if activation is None else f"_{activation}") + ("" if has_bias else "_without_bias")
    if not has_bias:
        return None if after is None else op(name=name, epilogue=after)
    if after is None:
        return op(name=name, epilogue=lambda bias: Bias(bias))
    return op(name=name, epilogue=lambda bias: Bias(bias) | after)


def check_width(x: Any, in_features: int) -> None:
    """Raise ValueError for an x whose last dimension is not ``in_features``."""
    if not x.dim() or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}; (..., {in_features}) is needed, as in_features={in_features}")


def check_layer(in_features: Any, out_features: Any, activation: Any) -> None:
    """Raise ValueError for what is no number of features, and for another activation than those of `ACTIVATIONS`."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(f"activation={activation!r}: None or one of {', '.join(map(repr, ACTIVATIONS))} is needed")
    for name, count in (("in_features", in_features), ("out_features", out_features)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
            raise ValueError(f"{name}={count!r}: a whole number is needed, 0 or more")


class Linear(torch.nn.Module):
    """``activation(x W^T + bias)`` of (..., in_features) to (..., out_features), one kernel forward where no gradient is
    wanted.

    Where one is, the activation's derivative needs what comes before it, and that is stored. A kernel that stores both from
    its registers takes longer than the product and PyTorch's activation behind it (1.41 and 1.02 of the time without a
    gradient; 8192 rows, 4096 to 4096, float16, GELU, on an H200, 2026-11-24), so the latter is what is recorded.

    Parameters and how they start are those of ``torch.nn.Linear`` (its ``state_dict`` fits): weight (out, in), bias (out,).
    ``activation`` is None, "relu", "gelu", "gelu_tanh", "silu" or "tanh". ``torch.autocast`` casts x and the parameters, as
    those of ``torch.nn.Linear``.

    Raises ValueError for another activation and for an x of another width, TypeError for an x of another dtype than weight.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> layer = gk.torch.Linear(3, 2, activation="relu")
    >>> with gk.emulate():
    ...     layer(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, activation: str | None = None,
                 device: Any = None, dtype: Any = None):
        super().__init__()
        check_layer(in_features, out_features, activation)
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self._find_operators()
        self.reset_parameters()

    def _find_operators(self) -> None:
        self._multiply = _operator(self.activation, self.bias is not None)
        self._before_activation = _operator(None, self.bias is not None)

    def __getstate__(self) -> dict[str, Any]:
        """Without the operators, which are this process's: a layer is pickled, copied and sent to other processes."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_multiply", "_before_activation")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._find_operators()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Any) -> Any:
        check_width(x, self.in_features)
        own = self._parameters                                 # (an attribute takes 1 us; parametrised ones are no such)
        weight, bias = own.get("weight", None), own.get("bias", None)
        weight, bias = self.weight if weight is None else weight, self.bias if bias is None else bias
        x, weight, bias = autocast(x, weight, bias)
        if x.dtype != weight.dtype:
            raise TypeError(f"x has dtype {x.dtype} and the layer's weight {weight.dtype}; convert one with .to(), or "
                            "compute under torch.autocast")
        rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), self.in_features)
        is_split = self.activation is not None and records(x, weight, bias)      # the activation is recorded by itself
        operator = self._before_activation if is_split else self._multiply
        if are_matrices(rows, weight) and (bias is None or bias.dtype == x.dtype) and is_eager((rows, weight, bias)):
            found = layer(rows, weight, bias, operator)
        elif is_split and bias is not None and torch.compiler.is_compiling():    # which fuses the bias and the activation
            found = biased(matmul(rows, weight.mT), bias)
        elif operator is None:
            found = matmul(rows, weight.mT)
        else:
            found = operator.of_one_dtype(rows, weight.mT, None, *(() if bias is None else (bias,)))
        found = FUNCTIONS[self.activation or ""](found) if is_split else found
        return found if x.dim() == 2 else found.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, activation={self.activation!r}"
