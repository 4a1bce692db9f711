"""Activation functions, as plain functions of one number: for epilogues, transforms and functions of your own.

They compute in the type of what they are given and are right over its whole range: none overflows, NaN stays NaN.
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.lang.host import Numeric

__all__ = ["gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh"]


def relu(x: Numeric) -> Any:
    """max(x, 0).

    >>> relu(-2.0), relu(3.0)
    (0, 3.0)
    """
    return 0 if x < 0 else x


def gelu(x: Numeric) -> Any:
    """x Phi(x), Phi the normal distribution: GELU itself, by the error function."""
    return 0.5 * x * (1 + math.erf(x * 0.7071067811865476))


def gelu_tanh(x: Numeric) -> Any:
    """The approximation of GELU by the hyperbolic tangent (PyTorch's ``approximate="tanh"``)."""
    return 0.5 * x * (1 + math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), by the exponential of a negative number: it cannot overflow."""
    small = math.exp(-abs(x))
    return (small if x < 0 else 1) / (1 + small)


def silu(x: Numeric) -> Any:
    """x sigmoid(x), also known as swish."""
    return x * sigmoid(x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return math.tanh(x)
