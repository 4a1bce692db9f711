"""Operators of ``torch.library``: what all of gemmkit's have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

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
        compute: what the operator computes, of tensors that nothing but autograd looks at (`is_eager`): such calls do
            without PyTorch's dispatcher and its autograd of operators, which take 20 to 50 us of host time.

    The transforms of ``torch.func`` (grad, vjp, jacrev) refuse the derivative that ``torch.library`` makes of ``backward``,
    since it has no ``setup_context`` of its own (PyTorch 2.13). Within them a call records by an autograd function that has.
    """

    def __init__(self, operator: Any, backward: Callable[..., Any], setup: Callable[..., None], rule: Callable[..., Any],
                 compute: Callable[..., Any]):
        self.operator, self._compute = operator, compute
        torch.library.register_autograd(operator, backward, setup_context=setup)
        torch.library.register_vmap(operator, lambda info, *args, **told: rule(info.batch_size, *args, **told))
        arguments = operator._schema.arguments
        self._defaults = {x.name: x.default_value for x in arguments if x.kwarg_only}
        count, names = len(arguments) - len(self._defaults), tuple(self._defaults)
        self._recorded = _function(self, count, names, backward, setup, rule)
        self._eager = _eager_function(compute, count, self._defaults, setup, self._recorded.backward)

    def __call__(self, *args: Any, **told: Any) -> Any:
        if is_eager(args):
            if torch.is_grad_enabled() and any(type(x) in _PLAIN and x.requires_grad for x in args):
                return self._eager.apply(*args, *(told.get(name, default) for name, default in self._defaults.items()))
            return self._compute(*args, **told)
        if _transforms():
            return self._recorded.apply(*args, *{**self._defaults, **told}.values())
        return self.operator(*args, **told)


_PLAIN = torch.Tensor, torch.nn.Parameter


_transforms = torch._C._are_functorch_transforms_active
_dispatching, _overriding = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_tracing, _profiling = torch._C._get_tracing_state, torch.autograd._profiler_enabled
_overridden = torch._C._has_torch_function


def is_eager(args: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd looks at a call: no transform, mode, tracer, compiler, profiler, subclass of tensors, and
    no tensor without data or whose data stand for others (lazily conjugated)."""
    if (torch.compiler.is_compiling() or _transforms() or _dispatching() or _overriding() or _tracing() is not None
            or _profiling() or forward_ad._current_level >= 0 or _overridden(args)):
        return False
    for x in args:
        if type(x) in _PLAIN:
            if not (x.is_cuda or x.is_cpu) or x.is_conj() or x.is_neg():
                return False
        elif isinstance(x, torch.Tensor):
            return False
    return True


def _eager_function(compute: Callable[..., Any], count: int, defaults: dict[str, Any],
                    setup: Callable[..., None], gradients: Callable[..., Any]) -> Any:
    """The autograd function of eager calls. Saved with the forward pass: a `setup_context` of its own takes 5 us more."""
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            if not defaults:
                output = compute(*args)
                setup(ctx, inputs=args, output=output)
                return output
            told = dict(zip(defaults, args[count:]))
            output = compute(*args[:count], **{name: value for name, value in told.items() if value != defaults[name]})
            setup(ctx, inputs=args[:count], output=output, keyword_only_inputs=told)
            return output

        backward = staticmethod(gradients)

    return Eager


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
