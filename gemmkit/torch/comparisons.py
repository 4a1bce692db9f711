"""What `gemmkit.torch.accelerate` compares: formulas on drawn numbers, results and gradients beside float32, a sample's
results.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree

from gemmkit.torch import modules
from gemmkit.torch.layers import QuantisedLinear
from gemmkit.torch.modules import NARROW


@contextmanager
def in_mode(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """The module and all in it in a mode, and then in their own."""
    before = [(m, m.training) for m in module.modules()]
    try:
        module.train(training)
        yield
    finally:
        for m, was in before:
            m.training = was


@contextmanager
def of_plain_layers(module: torch.nn.Module) -> Iterator[None]:
    """The module with plain layers in place of packed ones, for parameters that are given to it."""
    before = dict(module._modules)
    try:
        for name, held in before.items():
            if isinstance(held, QuantisedLinear):
                module._modules[name] = torch.nn.Linear(1, 1, bias=held.bias is not None)
        yield
    finally:
        module._modules.update(before)


HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


@contextmanager
def unobserved(module: torch.nn.Module) -> Iterator[None]:
    """The module and all in it without hooks, which are not to see calls that compare."""
    before = [(m, name, m.__dict__[name]) for m in module.modules() for name in HOOKS]
    try:
        for m, name, hooks in before:
            m.__dict__[name] = type(hooks)()
        yield
    finally:
        for m, name, hooks in before:
            m.__dict__[name] = hooks


def has_formula(module: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]],
                 formula: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], Any], more: tuple[Any, ...] = ()) -> bool:
    """Whether a module computes a formula of its first argument and its parameters: on drawn numbers, tiny ones and large
    ones, in training and else. ``more`` are its other arguments."""
    drawn = torch.Generator().manual_seed(0)
    for size in (1e-3, 1.0, 30.0):
        given = {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
        x = size * torch.randn(4, 8, generator=drawn)
        for training in (False, True):
            try:
                with torch.no_grad(), in_mode(module, training), unobserved(module), torch.autocast("cpu", enabled=False):
                    found = torch.func.functional_call(module, given, (x, *more))
            except Exception:
                return False
            wanted = formula(x.double(), {name: p.double() for name, p in given.items()})
            if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
                return False
            if not (found - wanted).abs().max() <= 2e-5 * wanted.abs().max():
                return False
    return True


@contextmanager
def _exactly() -> Iterator[None]:
    """Products of float32 are of float32, not of TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _recorded(module: torch.nn.Module, is_training: bool) -> dict[str, Any]:
    """The parameters by whose gradients a module is compared, by their names."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and is_training}


def _evaluated(module: torch.nn.Module, x: torch.Tensor, more: tuple[Any, ...], is_training: bool) -> list[Any]:
    """A module's result; of one that is trained the gradients of x and of the parameters that require one, too."""
    forward, wanted = module.forward, list(_recorded(module, is_training).values())
    if not wanted:
        with torch.no_grad():
            return [forward(x, *more)]
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = forward(x, *more)
        drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
        return [y.detach(), *torch.autograd.grad(y, [x, *wanted], drawn)]


def compared(module: torch.nn.Module, before: type, now: type, x: torch.Tensor, more: tuple[Any, ...] = ()) -> str:
    """Why a module may not have the class that it has now: a result or a gradient of x is further from the exact one than
    its own class computes them. "" where none is."""
    narrow, is_training = x.dtype in NARROW, module.training
    around = nullcontext if narrow else lambda: torch.autocast(x.device.type, dtype=torch.bfloat16)
    with in_mode(module, False), unobserved(module), torch.random.fork_rng(devices=[]):
        with around():
            found = _evaluated(module, x, more, is_training)
        module.__class__ = before
        try:
            with around():
                theirs = _evaluated(module, x, more, is_training)
            wide = _widened(module)
            with _exactly(), torch.autocast(x.device.type, enabled=False):
                exact = _evaluated(wide, x.float(), more, is_training)
        finally:
            module.__class__ = now
    names = ["its result", "the gradient of x", *(f"the gradient of {name}" for name in _recorded(module, is_training))]
    for name, one, other, wanted in zip(names, found, theirs, exact):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{name} would be {_short(one)} and is {_short(other)}"
        unit = torch.finfo(one.dtype if narrow else torch.bfloat16).eps
        one, other, wanted = (t.float() for t in (one, other, wanted))
        here = wanted.isfinite() & other.isfinite()
        if not torch.equal(here, here & one.isfinite()):
            return f"{name} would have elements that are not finite"
        size = torch.where(here, wanted, 0).abs()
        size = size.amax(-1, keepdim=True) if one.shape[:-1] == x.shape[:-1] else size.max()         # of each row
        off, own = (float((torch.where(here, t - wanted, 0).abs() / size.clamp_min(1e-30)).max()) for t in (one, other))
        if not off <= 2 * own + unit:
            return f"{name} would be off by {off:.2g} of its largest, and its own class is by {own:.2g}"
    return ""


def _widened(module: torch.nn.Module) -> torch.nn.Module:
    """A copy in float32, with dense layers in place of packed ones."""
    wide = copy.deepcopy(module)
    for parent in wide.modules():
        for name, held in parent._modules.items():
            if isinstance(held, QuantisedLinear):
                parent._modules[name] = _dense(held)
    return wide.float()


def _dense(layer: QuantisedLinear) -> torch.nn.Linear:
    found = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    found.weight = torch.nn.Parameter(layer.dequantised(), requires_grad=False)
    if layer.bias is not None:
        found.bias = torch.nn.Parameter(layer.bias.detach().float(), requires_grad=False)
    return found


def compared_packed(module: torch.nn.Module, layer: QuantisedLinear, x: torch.Tensor) -> str:
    """Why a layer may not stand for a module of packed integers: a result is further from that of the weights in float32
    than the module's own twice, or the module's own is further than its dtype's roundings. "" where it may."""
    if x.dtype not in NARROW:
        return f"its input is {str(x.dtype).removeprefix('torch.')}; convert the model: model.half() or model.bfloat16()"
    with torch.no_grad(), in_mode(module, False), unobserved(module):
        found = layer(x)
        with _exactly(), torch.autocast(x.device.type, enabled=False):
            exact = _dense(layer)(x.float())
        is_bare = "weight_packed" in module._parameters and isinstance(module, torch.nn.Linear) and "weight" not in (
            module._parameters) and type(module).forward is torch.nn.Linear.forward
        theirs = found if is_bare else module(x)           # a bare one gets its weight in the model's first call
    if theirs.dtype != found.dtype or theirs.shape != found.shape:
        return f"its result would be {_short(found)} and is {_short(theirs)}"
    size, unit = exact.abs().amax(-1, keepdim=True).clamp_min(1e-30), torch.finfo(x.dtype).eps
    off, own = (float(((y.float() - exact).abs() / size).max()) for y in (found, theirs))
    if not own <= 8 * unit:
        return f"its own result is off by {own:.2g} from that of its tensors: a kernel has put them into an order of its own"
    return "" if off <= 2 * own + unit else f"its result would be off by {off:.2g}, and its own class is by {own:.2g}"


def compared_joined(module: torch.nn.Module, x: torch.Tensor) -> str:
    """Why the products of an attention's queries, keys and values may not be one; "" where they may."""
    held: list[Any] = [module._modules[name] for name in modules.QKV]
    joined: Any = module._gemmkit_joined
    with torch.no_grad(), unobserved(module), _exactly():
        own = [m(x) for m in held]
        if not joined.computed(held, x):
            return "its products cannot be one"
        found = [m(x) for m in held]
        joined.held = None
        for name, m, one, other in zip(modules.QKV, held, found, own):
            exact = F.linear(x.float(), m.weight.float(), None if m.bias is None else m.bias.float())
            size, unit = exact.abs().amax(-1, keepdim=True).clamp_min(1e-30), torch.finfo(x.dtype).eps
            off, theirs = (float(((y.float() - exact).abs() / size).max()) for y in (one, other))
            if one.shape != other.shape or not off <= 2 * theirs + unit:
                return f"the result of {name} would be off by {off:.2g}, and its own is by {theirs:.2g}"
    return ""


def _short(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def compared_attention(config: Any, like: torch.Tensor) -> str:
    """Why attention of a configuration's heads may not be gemmkit's; "" where it may."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    size = getattr(text, "head_dim", None) or (width // heads if width and heads else None)
    if not isinstance(heads, int) or not isinstance(size, int):
        return "its configuration does not name its heads"
    if size % 8 or size > 256:
        return f"its heads have {size} columns; gk.attention takes multiples of 8 up to 256"
    shared = getattr(text, "num_key_value_heads", None) or heads
    drawn = torch.Generator().manual_seed(2)
    dtype = like.dtype if like.dtype in NARROW else torch.bfloat16
    for queries, causal in ((5, True), (5, False), (1, False)):
        q, k, v = (torch.randn(1, h, n, size, generator=drawn).to(like.device, dtype)
                   for h, n in ((heads, queries), (shared, 5), (shared, 5)))
        with torch.no_grad():
            found = modules.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            wide = [x.float().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v)]
            with _exactly():
                exact = F.scaled_dot_product_attention(*wide, is_causal=causal)
        off = float((found.float() - exact).abs().max())
        if not off <= 2 * torch.finfo(dtype).eps * float(exact.abs().max()):
            return f"its result would be off by {off:.2g}"
    return ""


def results(model: torch.nn.Module, sample: object) -> list[Any]:
    """The tensors of real numbers that a model returns for a sample, without dropout."""
    args, keywords = ((), dict(sample)) if isinstance(sample, Mapping) else (
        (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)), {})
    with torch.no_grad(), in_mode(model, False), torch.random.fork_rng(devices=[]):
        found = model(*args, **keywords)
    return [x.detach().clone() for x in _pytree.tree_leaves(found) if isinstance(x, torch.Tensor) and x.is_floating_point()]
