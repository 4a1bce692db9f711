"""Operators of ``torch.library``: what all of gemmkit's have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Differentiable", "define", "qualified"]

_NAME = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)?")


def qualified(name: Any) -> str:
    """``namespace::name`` of a name; without a namespace it is gemmkit's. Raises ValueError for no name, or a taken one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f'name={name!r}: a name such as "linear" or "mine::linear" is needed')
    full = name if "::" in name else f"gemmkit::{name}"
    namespace, own = full.split("::")
    if hasattr(getattr(torch.ops, namespace), own):
        raise ValueError(f"name={name!r}: there is an operator {full} already; give another name")
    return full


def define(name: str, schema: str, compute: Callable[..., Any], allocate: Callable[..., Any]) -> Any:
    """An operator that computes by ``compute``; ``allocate`` gives its results of tensors without data (fake and meta
    ones)."""
    torch.library.define(name, schema)
    torch.library.impl(name, ("cpu", "cuda"), compute)
    torch.library.register_fake(name, allocate)
    namespace, own = name.split("::")
    return getattr(getattr(torch.ops, namespace), own).default


class Differentiable:
    """An operator of `define` that has a derivative and takes batches from now on; it is called as the operator is.

    Args:
        operator: the operator.
        backward, setup: as ``torch.library.register_autograd`` takes them.
        rule: ``rule(size, in_dims, *args, **keywords)``: the operator of a batch, and where the batch lies in its results.

    The transforms of ``torch.func`` (grad, vjp, jacrev) refuse the derivative that ``torch.library`` makes of ``backward``,
    since it has no ``setup_context`` of its own (PyTorch 2.13). Within them a call records by an autograd function that has.
    """

    def __init__(self, operator: Any, backward: Callable[..., Any], setup: Callable[..., None], rule: Callable[..., Any]):
        self.operator = operator
        torch.library.register_autograd(operator, backward, setup_context=setup)
        torch.library.register_vmap(operator, lambda info, *args, **told: rule(info.batch_size, *args, **told))
        arguments = operator._schema.arguments
        self._defaults = {x.name: x.default_value for x in arguments if x.kwarg_only}
        self._recorded = _function(self, len(arguments) - len(self._defaults), tuple(self._defaults), backward, setup, rule)

    def __call__(self, *args: Any, **told: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return self._recorded.apply(*args, *{**self._defaults, **told}.values())
        return self.operator(*args, **told)


def _function(call: Differentiable, count: int, names: tuple[str, ...], backward: Callable[..., Any],
              setup: Callable[..., None], rule: Callable[..., Any]) -> Any:
    """The autograd function of an operator of ``count`` arguments, and of the keywords ``names``, which come behind them."""
    def told(args: tuple) -> dict[str, Any]:
        return dict(zip(names, args[count:]))

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return call(*args[:count], **told(args))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup(ctx, inputs=inputs[:count], output=output, **({"keyword_only_inputs": told(inputs)} if names else {}))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = backward(ctx, *grads)
            return (*(found if isinstance(found, tuple) else (found,)), *(None for _ in names))

        @staticmethod
        def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
            return rule(info.batch_size, in_dims[:count], *args[:count], **told(args))

    return Recorded
