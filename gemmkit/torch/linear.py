"""``Linear``: a layer whose bias and activation are in the product's epilogue."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from gemmkit.epilogues import GELU, Bias, Epilogue, ReLU, SiLU, Tanh
from gemmkit.torch.operators import Product, op
from gemmkit.torch.recorded import matmul

__all__ = ["ACTIVATIONS", "Linear"]

#: What `Linear` takes for ``activation``.
ACTIVATIONS: dict[str, Epilogue] = {"relu": ReLU(), "gelu": GELU(), "gelu_tanh": GELU("tanh"), "silu": SiLU(),
                                    "tanh": Tanh()}


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


class Linear(torch.nn.Module):
    """``activation(x W^T + bias)`` of (..., in_features) to (..., out_features), one kernel forward.

    Parameters and how they start are those of ``torch.nn.Linear`` (its ``state_dict`` fits): weight (out, in), bias (out,).
    ``activation`` is None, "relu", "gelu", "gelu_tanh", "silu" or "tanh". Raises ValueError for another one.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> layer = gk.torch.Linear(3, 2, activation="relu")
    >>> with gk.emulate():
    ...     layer(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, activation: str | None = None,
                 device: Any = None, dtype: Any = None):
        super().__init__()
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: None or one of {', '.join(map(repr, ACTIVATIONS))} is needed")
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self._multiply = _operator(activation, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Any) -> Any:
        rows, weight = x.reshape(-1, self.in_features), self.weight.mT
        if self._multiply is None:
            found = matmul(rows, weight)
        elif self.bias is None:
            found = self._multiply(rows, weight)
        else:
            found = self._multiply(rows, weight, self.bias)
        return found.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, activation={self.activation!r}"
