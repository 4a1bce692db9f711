"""Modules of PyTorch and transformers that compute by gemmkit: what `gemmkit.torch.accelerate` puts in a module's place.

A module keeps its parameters, hooks and names, and gets another class, made of one of these and its own (`made`): it is an
instance of both. Each of these knows what it takes (dtypes, devices, plain tensors). Whatever else it is given, a module
computes by its own class, so that a model is right everywhere and fast where it can be.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any, SupportsIndex

import torch
from torch.nn import functional as F
from torch.utils import _pytree

from gemmkit.torch.attention import register_attention, turning
from gemmkit.torch.cache import storing
from gemmkit.torch.grouped import experts
from gemmkit.torch.layers import SHORTER, Linear, QuantisedLinear, Unadded, added, columns_of_joined, of_16_bits, summed
from gemmkit.torch.product import DATA, NARROW, casts, is_eager, is_here, records, takes
from gemmkit.torch.rows import glu, layernorm, rmsnorm


def _is_row(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether x has rows that a norm of gemmkit's takes. A compiler fuses norms with what is around them, and is let."""
    if not isinstance(x, torch.Tensor) or torch.compiler.is_compiling() or not is_here(x) or not x.numel():
        return False
    return x.dtype in (*NARROW, torch.float32) and (
        weight is None or (type(weight) in DATA and weight.device == x.device))


# --------------------------------------------------------------------------------------------------
# Classes of modules.

class Replaced:
    """A module that computes by gemmkit. Its class is `made`; the module's own comes behind this one."""

    what = ""
    _gemmkit_base: Any

    def begin(self, *said: str) -> None:
        """Take what the class needs beside the module's own attributes."""

    def end(self) -> None:
        """Give it back: what has a name of gemmkit's."""
        for name in [name for name in self.__dict__ if name.startswith("_gemmkit_")]:
            del self.__dict__[name]

    def _get_name(self) -> str:
        return f"gemmkit.{type(self).__name__}"

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """By the two classes: the class made of them is found or made again where the module is loaded."""
        if "_gemmkit_base" not in type(self).__dict__:            # another class is around it
            return super().__reduce_ex__(protocol)
        state = getattr(self, "__getstate__", lambda: self.__dict__)()
        return blank, type(self).__bases__, state


_classes: dict[tuple[type, type], Any] = {}


def made(mixin: type[Replaced], base: type) -> Any:
    """The class of a module of ``base`` that computes as ``mixin`` says."""
    key = mixin, base
    if key not in _classes:
        more = {"__module__": base.__module__, "__doc__": base.__doc__, "_gemmkit_base": base}
        _classes[key] = type(base.__name__, (mixin, base), more)
    return _classes[key]


def blank(mixin: type[Replaced], base: type) -> Any:
    """A module of `made` without anything in it, for pickles and copies."""
    if "transformers" in sys.modules:
        register_attention()                           # the configuration of a model that is loaded may name it
    kind = made(mixin, base)
    return kind.__new__(kind)


def is_observed(module: torch.nn.Module) -> bool:
    """Whether something watches a module's calls, or takes them over: then its parent has to call it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
                or "forward" in module.__dict__)


class FastLinear(Replaced, Linear):
    """A ``torch.nn.Linear`` as `gemmkit.torch.Linear`."""

    what = "gk.torch.Linear"

    def begin(self, *said: str) -> None:
        self.activation = None
        self._find_operators()

    def end(self) -> None:
        for name in ("activation", "_multiply", "_before_activation"):
            self.__dict__.pop(name, None)
        super().end()

    def forward(self, input: torch.Tensor) -> Any:
        found = columns_of_joined(self, input)         # of queries, keys and values
        if found is not None:
            return found
        own = self._parameters
        weight, bias = own.get("weight", None), own.get("bias", None)
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        found = self._again(input, weight, bias) if isinstance(input, torch.Tensor) else None
        if found is not None:
            return found
        if takes(input, weight, bias) and input.shape[-1] == weight.shape[1]:
            return Linear.forward(self, input)
        return torch.nn.Linear.forward(self, input)

    def extra_repr(self) -> str:
        return str(torch.nn.Linear.extra_repr(self))


class HeldLinear(Linear):
    """The product of a module within another, with an activation. Its parameters are that module's, whichever it has at a
    call; those of transformers' Conv1D are (in, out)."""

    def __init__(self, module: Any, activation: str | None = None):
        inputs, outputs = module.weight.shape if is_conv1d(module) else module.weight.shape[::-1]
        super().__init__(inputs, outputs, module.bias is not None, activation, "meta")
        self._parameters, self.is_transposed = module._parameters, is_conv1d(module)

    def _find_operators(self) -> None:
        super()._find_operators()
        if self.activation in SHORTER:
            self._multiply[True] = of_16_bits(self.activation)     # of what it takes, results have 16 bits

    def takes(self, module: torch.nn.Module, x: object) -> bool:
        """Whether x is rows for it, and ``module`` still the one whose product it is."""
        weight, bias = (self._parameters.get(name) for name in ("weight", "bias"))
        return (module._parameters is self._parameters and weight is not None and isinstance(x, torch.Tensor)
                and not is_observed(module) and takes(x, weight, bias) and x.shape[-1] == self.in_features)

    def adds(self, x: torch.Tensor, y: object) -> bool:
        """Whether `added` takes y, too."""
        bias = self._parameters["bias"]
        return (isinstance(y, torch.Tensor) and bias is not None and x.dim() > 1 and not casts(x) and y.dtype == x.dtype
                and y.device == x.device and y.shape == (*x.shape[:-1], self.out_features))

    def added(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        own: Any = self._parameters
        return added(x, own["weight"].mT if self.is_transposed else own["weight"], own["bias"], y)

    def forward(self, x: torch.Tensor) -> Any:
        own: Any = self._parameters
        return self.computed(x, own["weight"].mT if self.is_transposed else own["weight"], own["bias"])


class FastConv1D(Replaced):
    """transformers' Conv1D, a Linear whose weight is (in, out)."""

    what = "gk.torch.Linear"

    def begin(self, *said: str) -> None:
        self.__dict__["_gemmkit_linear"] = HeldLinear(self)    # (a module of this one would have a name in `state_dict`)

    def forward(self, *args: object, **keywords: object) -> Any:
        linear: Any = self.__dict__["_gemmkit_linear"]
        x: Any = args[0] if len(args) == 1 and not keywords else None
        own: Any = self._parameters                                          # type: ignore[attr-defined]
        if x is None or linear._parameters is not own or not takes(x, own["weight"], own["bias"]) or (
                x.shape[-1] != linear.in_features):
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        return linear(x)


class FastLayerNorm(Replaced, torch.nn.LayerNorm):
    what = "gk.torch.layernorm"

    def forward(self, input: torch.Tensor) -> Any:
        weight, bias = self.weight, self.bias
        is_bias_alone = weight is None and bias is not None                  # which `layernorm` refuses
        if not is_bias_alone and _is_row(input, weight) and input.shape[-1] == self.normalized_shape[0] and all(
                p is None or p.dtype in (input.dtype, torch.float32) or (input.is_cuda and casts(input))
                for p in (weight, bias)):
            return layernorm(input, weight, bias, eps=self.eps)
        return torch.nn.LayerNorm.forward(self, input)


class FastRMSNorm(Replaced, torch.nn.RMSNorm):
    """An RMS norm; where its eps is None, it is the dtype's or float32's, as the version of PyTorch has it."""

    what = "gk.torch.rmsnorm"

    def begin(self, *said: str) -> None:
        (self._gemmkit_eps,) = said                    # of 16 bits without an eps: "own" or "float32"

    def forward(self, x: torch.Tensor) -> Any:
        weight, eps = self.weight, self.eps
        widened = isinstance(x, torch.Tensor) and x.is_cuda and casts(x)
        if _is_row(x, weight) and x.shape[-1] == self.normalized_shape[0] and (
                weight is None or weight.dtype == x.dtype or widened):
            if eps is None:
                eps = torch.finfo(torch.float32 if widened or self._gemmkit_eps == "float32" else x.dtype).eps
            return rmsnorm(x, weight, eps=eps)
        return torch.nn.RMSNorm.forward(self, x)


class FastNamedNorm(Replaced):
    """An RMS norm of another library: a weight, and an eps under one of these names."""

    what = "gk.torch.rmsnorm"
    names = "variance_epsilon", "eps", "epsilon"
    weight: torch.Tensor

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        eps = next(value for value in (getattr(self, name, None) for name in self.names) if value is not None)
        return rmsnorm(x, weight, eps=float(eps), dtype=x.dtype)

    def forward(self, *args: object, **keywords: object) -> Any:
        x: Any = args[0] if len(args) == 1 else None
        weight = self.weight
        if keywords or not _is_row(x, weight) or x.dtype != weight.dtype or x.shape[-1] != weight.shape[0]:
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        return self.normed(x, weight)


class FastOffsetNorm(FastNamedNorm):
    """The same with a factor of 1 + weight, as Gemma has it."""

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return super().normed(x, 1.0 + weight.float())


def between(module: torch.nn.Module, *products: str) -> Any:
    """A module's own modules beside its products, by name: `accelerate` has compared it with these."""
    names = tuple(name for name in module._modules if name not in products)
    return names, tuple(map(module._modules.get, names))


class FastGatedMLP(Replaced):
    """``down(activation(gate(x)) * up(x))`` of these names."""

    what = "gk.torch.glu"

    def begin(self, *said: str) -> None:
        self._gemmkit_glu = *said, between(self, *said[1:])        # the activation; gate, up and down as in `MLPS`
        own: Any = self._modules                                             # type: ignore[attr-defined]
        gate, up = own[said[1]], own[said[2] or said[1]]
        if isinstance(gate, QuantisedLinear) and gate.order is not None and up.order is not None and (
                torch.equal(gate.order, up.order)):
            up.order = gate.order                      # x is gathered once, for one product

    def forward(self, *args: object, **keywords: object) -> Any:
        activation, of_gate, of_up, down, (names, others) = self._gemmkit_glu
        own: Any = self._modules                                             # type: ignore[attr-defined]
        gate, up = own[of_gate], own[of_up or of_gate]
        if tuple(map(own.get, names)) != others:       # another activation, it may be
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        x: Any = args[0] if len(args) == 1 and not keywords else None
        if isinstance(gate, QuantisedLinear) and isinstance(up, QuantisedLinear) and takes(x, gate.bias, up.bias) and not (
                is_observed(gate) or is_observed(up)):
            return own[down](glu(x, gate, up, activation))
        if len(args) != 1 or keywords or is_observed(gate) or is_observed(up) or not (is_linear(gate) and is_linear(up)) or (
                gate.bias is not None or up.bias is not None or not takes(args[0], gate.weight, up.weight)):
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        w, v = (gate.weight, up.weight) if of_up else gate.weight.chunk(2)
        return own[down](glu(args[0], w.mT, v.mT, activation))


class FastMLP(Replaced):
    """``down(activation(up(x)))``, or without ``down``; modules of these names, between which dropout may be."""

    what = "gk.torch.Linear with its activation"

    def begin(self, *said: str) -> None:
        self._gemmkit_mlp = *said, between(self, said[1], said[3])           # the names of up, its activation, down or ""
        self.__dict__["_gemmkit_up"] = HeldLinear(self._modules[said[1]], said[0])    # type: ignore[attr-defined]

    def forward(self, *args: object, **keywords: object) -> Any:
        _, up, activation, down, (names, others) = self._gemmkit_mlp
        own: Any = self._modules                                             # type: ignore[attr-defined]
        held: Any = self.__dict__["_gemmkit_up"]
        if len(args) != 1 or keywords or not held.takes(own[up], args[0]) or tuple(map(own.get, names)) != others or (
                is_observed(own[activation]) or drops(self)):
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        found = held(args[0])
        return own[down](found) if down else found


class FastOutput(Replaced):
    """``norm(linear(x) + y)`` of modules of these names, as BERT's layers end: y is added by the product."""

    what = "gk.torch.Linear with a residual"

    def begin(self, *said: str) -> None:
        self._gemmkit_output = said                    # the names of the product and of the norm
        self.__dict__["_gemmkit_linear"] = HeldLinear(self._modules[said[0]])         # type: ignore[attr-defined]

    def forward(self, *args: object, **keywords: object) -> Any:
        product, norm = self._gemmkit_output
        own: Any = self._modules                                             # type: ignore[attr-defined]
        held: Any = self.__dict__["_gemmkit_linear"]
        if len(args) != 2 or keywords or torch.compiler.is_compiling() or not held.takes(own[product], args[0]) or drops(
                self) or not held.adds(*args):
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        return own[norm](held.added(*args))


def drops(module: torch.nn.Module) -> bool:
    """Whether dropout of a module's own changes what it computes."""
    return module.training and any(isinstance(m, torch.nn.Dropout) and m.p for m in module._modules.values())


class JoinedLinear:
    """One product for modules of one input: their weights, dense or packed, are parts of one matrix, which the parameters
    and buffers are views of.

    The product is computed before the modules' parent runs (`FastQKV`), and each module takes its columns if it gets that
    very tensor, with no write to it since. A module that gets anything else computes by itself, and nothing outlives the
    parent's call. Hooks of the modules, a gradient that is recorded, ``torch.autocast`` and ``torch.compile`` have three
    products: there the tensor's identity would say too little, or one product has no use.
    """

    def __init__(self, held: list[Any]):
        first, self.sizes = held[0], [m.out_features for m in held]
        self.held, self.count, extents = None, 0, (first.in_features, sum(self.sizes))
        self.linear: Any = QuantisedLinear(*extents, first.bits, first.group, True, None, first.symmetric, "meta",
                                           float8=first.float8) if isinstance(first, QuantisedLinear) else (
            Linear(*extents, device="meta"))
        with torch.no_grad():
            for name, axis in _parts_of(first):
                parts = [getattr(m, name) for m in held]
                whole = torch.cat([p.detach() for p in parts], axis) if parts[0] is not None else None
                if whole is not None:
                    for p, part in zip(parts, whole.split(self.sizes, axis)):
                        p.data = part                      # the same parameter: its optimiser and its name stay
                is_plain = whole is None or name in self.linear._buffers
                setattr(self.linear, name, whole if is_plain else torch.nn.Parameter(whole, requires_grad=False))

    held: tuple[Any, ...] | None

    def part(self, held: list[Any]) -> None:
        """Give each module memory of its own again."""
        for m in held:
            for name, _ in _parts_of(m):
                p = getattr(m, name)
                if p is not None:
                    p.data = p.detach().clone(memory_format=torch.contiguous_format)
        self.linear = None

    def computed(self, held: list[Any], x: object) -> bool:
        """Whether the product has been computed for x: where nothing is recorded, cast or compiled, and the parameters still
        are views of the one matrix."""
        linear = self.linear
        if linear is None or torch.compiler.is_compiling():
            return False
        if not self.is_whole(held):
            self.linear = None                             # moved, or replaced: the matrix is held for nothing
            return False
        own = linear.bias if isinstance(linear, QuantisedLinear) else linear.weight
        if not isinstance(x, torch.Tensor) or not takes(x, own) or casts(x) or x.dim() < 2 or (
                x.shape[-1] != linear.in_features or any(is_observed(m) for m in held)):
            return False
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for m in held for p in m.parameters())):
            return False
        self.count, self.held = 0, (x, None if x.is_inference() else x._version, *linear(x).split(self.sizes, -1))
        return True

    def is_whole(self, held: list[Any]) -> bool:
        """Whether the modules' parameters and buffers are the parts of the one matrix."""
        linear: Any = self.linear
        for name, axis in _parts_of(linear):
            whole = linear._parameters.get(name, linear._buffers.get(name))
            at = 0 if whole is None else whole.data_ptr()
            for m, size in zip(held, self.sizes):
                p = m._parameters.get(name, m._buffers.get(name))
                if (p is None) != (whole is None) or (p is not None and (
                        type(p) not in DATA or p.dtype != whole.dtype or p.data_ptr() != at or p.shape[axis] != size
                        or p.stride() != whole.stride())):
                    return False
                at += 0 if p is None else size * p.stride(axis) * p.element_size()
        return True

    def taken(self, module: torch.nn.Module, x: torch.Tensor, place: int) -> Any:
        """The columns of the module at a place; None for another x, and for one that has changed."""
        held = self.held
        if held is None or held[0] is not x or (held[1] is not None and held[1] != x._version):
            return None
        self.count += 1
        return held[2 + place]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have parameters of their own, and no product of all."""
        return {"sizes": self.sizes, "linear": None, "held": None, "count": 0}


def _parts_of(module: Linear | QuantisedLinear | torch.nn.Linear) -> tuple[tuple[str, int], ...]:
    """The tensors of a layer, and their axes that have an element for each of its results."""
    packed = ("words", 1), ("scales", 1), ("zeros", 1)
    return (*(packed if isinstance(module, QuantisedLinear) else (("weight", 0),)), ("bias", 0))


class FastQKV(Replaced):
    """Attention whose queries, keys and values (`QKV`) are one product where no gradient is recorded; a `Rotation` turns
    them."""

    what = "gk.torch.Linear, one for q, k and v"

    def begin(self, *said: str) -> None:
        own: Any = self._modules                                             # type: ignore[attr-defined]
        self._gemmkit_names = said
        held = [own[name] for name in said]
        self._gemmkit_joined = JoinedLinear(held)
        for place, m in enumerate(held):
            m._gemmkit_joined = self._gemmkit_joined, place

    def end(self) -> None:
        own: Any = self._modules                                             # type: ignore[attr-defined]
        held = [own[name] for name in self._gemmkit_names]
        self._gemmkit_joined.part(held)
        for m in held:
            m.__dict__.pop("_gemmkit_joined", None)
        super().end()

    def forward(self, *args: object, **keywords: object) -> Any:
        joined, own = self._gemmkit_joined, self._modules                    # type: ignore[attr-defined]
        x = keywords.get("hidden_states", args[0] if args else None)
        if joined.linear is None or not joined.computed([own[name] for name in self._gemmkit_names], x):
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        own_forward = self._gemmkit_base.forward
        try:
            found = storing(turning(own_forward) or own_forward, self, args, keywords)
        finally:
            joined.held = None
        if joined.count < len(self._gemmkit_names):        # keys of another input: the product served not all
            joined.linear = None
        return found


#: Names of the modules whose products attention computes of one input.
QKV = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"))


def qkv_of(module: torch.nn.Module) -> tuple[str, ...] | None:
    """The names of a module's products of queries, keys and values; None if it has none."""
    own, kinds = module._modules, (torch.nn.Linear, QuantisedLinear)
    return next((names for names in QKV if all(isinstance(own.get(name), kinds) for name in names)), None)


#: Names of a decoder layer's products that are added to its stream: of attention, and of the MLP.
SUMS = ("self_attn", "o_proj"), ("mlp", "down_proj")


def sums_of(module: torch.nn.Module) -> list[Any]:
    """A decoder layer's products of `SUMS`; empty for another module."""
    found = [getattr(module._modules.get(parent), "_modules", {}).get(name) for parent, name in SUMS]
    return found if all(isinstance(m, (torch.nn.Linear, QuantisedLinear)) for m in found) else []


class Sums:
    """What a decoder layer's products (`sums_of`) give to the layer while it runs: `Unadded`, where nothing is recorded,
    cast or compiled."""

    held: int | None = None            # the thread that runs the layer: another one's calls get tensors

    def taken(self, module: Linear | QuantisedLinear, x: object, place: int) -> Unadded | None:
        is_packed = isinstance(module, QuantisedLinear)
        own = (module.bias,) if is_packed else (module.weight, module.bias)
        if self.held != get_ident() or not isinstance(x, torch.Tensor) or not takes(x, *own) or casts(x) or (
                not is_eager((x, *own)) or x.dim() < 2 or x.shape[-1] != module.in_features) or (
                is_observed(module) or records(x, *own)) or (
                is_packed and x.numel() != module.in_features):            # packed weights add to several rows no faster
            return None
        version = None if x.is_inference() else x._version

        def computed(y: torch.Tensor | None) -> Any:
            if version is not None and x._version != version:
                raise RuntimeError("the input of a decoder layer's product was changed in place before the product was "
                                   "added; accelerate the model without the part \"residual\"")
            return summed(module, x, y)

        return Unadded(computed, (*x.shape[:-1], module.out_features), x)


class FastLayer(Replaced):
    """A decoder layer, whose stream the products of attention and of the MLP add to themselves: see `Sums`."""

    what = "gk.torch.Linear with a residual"

    def begin(self, *said: str) -> None:
        self._gemmkit_sums = Sums()
        for m in sums_of(self):
            m._gemmkit_joined = self._gemmkit_sums, 0

    def end(self) -> None:
        for m in sums_of(self):
            m.__dict__.pop("_gemmkit_joined", None)
        super().end()

    def forward(self, *args: object, **keywords: object) -> Any:
        own: Any = self._modules                                             # type: ignore[attr-defined]
        if torch.compiler.is_compiling() or any(is_observed(own[parent]) for parent, _ in SUMS):
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        self._gemmkit_sums.held = get_ident()
        try:
            found = super().forward(*args, **keywords)                        # type: ignore[misc]
        finally:
            self._gemmkit_sums.held = None
        return _pytree.tree_map_only(Unadded, lambda x: x.value, found)


class FastExperts(Replaced):
    """Gated experts, whose matrices are parameters as transformers 5 has them: `EXPERTS`."""

    what = "gk.torch.experts"

    def begin(self, *said: str) -> None:
        (self._gemmkit_activation,) = said

    def forward(self, *args: Any, **keywords: Any) -> Any:
        own: Any = self._parameters                                          # type: ignore[attr-defined]
        both, down = (own.get(name) for name in EXPERTS)
        if len(args) != 3 or keywords or both is None or down is None or not (
                takes(args[0], both, down) and args[0].dim() == args[1].dim() == 2):
            return super().forward(*args, **keywords)                         # type: ignore[misc]
        gate, up = both.chunk(2, 1)
        return experts(*args, gate.mT, up.mT, down.mT, self._gemmkit_activation)


#: Names of the parameters of gated experts: (experts, 2 hidden, width), whose first halves are the gates', and (experts,
#: width, hidden). Their module takes rows, the numbers of each row's experts, and the weights of these.
EXPERTS = "gate_up_proj", "down_proj"

#: Names of the modules of gated MLPs: gate, up, down; where up is empty, gate holds the rows of both.
MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "", "down_proj"))


def is_linear(module: object) -> bool:
    """Whether a module multiplies as ``torch.nn.Linear`` does: no subclass with a ``forward`` of its own."""
    return isinstance(module, torch.nn.Linear) and type(module).forward in (torch.nn.Linear.forward, FastLinear.forward)


def is_conv1d(module: object) -> bool:
    """Whether a module is what transformers calls Conv1D."""
    own = module._parameters if isinstance(module, torch.nn.Module) and not module._modules else {}
    weight, bias = own.get("weight"), own.get("bias")
    return (any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and weight is not None and bias is not None
            and weight.dim() == 2 and bias.shape == weight.shape[1:])


def mlp_of(module: torch.nn.Module) -> tuple[str, str, str] | None:
    """The names of the modules of what may be `FastMLP`: one or two products, one module without parameters, and dropout."""
    products = [name for name, m in module._modules.items() if isinstance(m, torch.nn.Linear) or is_conv1d(m)]
    others = {name: m for name, m in module._modules.items() if name not in products}
    between = [name for name, m in others.items() if not isinstance(m, torch.nn.Dropout)]
    if len(between) != 1 or len(products) not in (1, 2) or module._parameters or any(
            m is None or m._modules or m._parameters for m in others.values()):
        return None
    return products[0], between[0], products[1] if len(products) == 2 else ""


def output_of(module: torch.nn.Module) -> tuple[str, str] | None:
    """The names of the modules of what may be `FastOutput`: a product, a layer norm, and dropout."""
    kinds = {name: next((k for k in (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Dropout) if isinstance(m, k)), None)
             for name, m in module._modules.items()}
    of = {kind: [name for name, k in kinds.items() if k is kind] for kind in (torch.nn.Linear, torch.nn.LayerNorm, None)}
    if module._parameters or [len(names) for names in of.values()] != [1, 1, 0]:
        return None
    return of[torch.nn.Linear][0], of[torch.nn.LayerNorm][0]


# --------------------------------------------------------------------------------------------------
# What `gemmkit.torch.accelerate` compares: formulas on drawn numbers, results and gradients beside float32, a sample's
# results.

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
    """The module with plain layers in place of packed ones and Conv1D, for parameters that are given to it."""
    before = dict(module._modules)
    try:
        for name, held in before.items():
            if isinstance(held, QuantisedLinear) or is_conv1d(held):
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
                 formula: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], Any], more: tuple[Any, ...] = (),
                 modes: tuple[bool, ...] = (False, True)) -> bool:
    """Whether a module computes a formula of its first argument and its parameters: on drawn numbers, tiny ones and large
    ones, in training and else (``modes``). ``more`` are its other arguments."""
    drawn = torch.Generator().manual_seed(0)
    for size in (1e-3, 1.0, 30.0):
        given = {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
        x = size * torch.randn(4, 8, generator=drawn)
        for training in modes:
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
def exactly() -> Iterator[None]:
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
            with exactly(), torch.autocast(x.device.type, enabled=False):
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
        with exactly(), torch.autocast(x.device.type, enabled=False):
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
    joined: Any = module._gemmkit_joined
    names: Any = module._gemmkit_names
    held: list[Any] = [module._modules[name] for name in names]
    with torch.no_grad(), unobserved(module), exactly():
        own = [m(x) for m in held]
        if not joined.computed(held, x):
            return "its products cannot be one"
        found = [m(x) for m in held]
        joined.held = None
        return next((why for name, m, one, other in zip(names, held, found, own)
                     if (why := _farther(name, one, other, _exact(m, x)))), "")


def compared_sums(module: torch.nn.Module, y: torch.Tensor) -> str:
    """Why products of a decoder layer may not add y; "" where they may."""
    with torch.no_grad(), unobserved(module), exactly():
        for (_, name), m in zip(SUMS, sums_of(module)):
            x = torch.randn(len(y), m.in_features, generator=torch.Generator().manual_seed(6)).to(y.device, y.dtype)
            why = _farther(name, summed(m, x, y), m(x) + y, _exact(m, x) + y.float())
            if why:
                return why
    return ""


def _exact(layer: torch.nn.Linear | QuantisedLinear, x: torch.Tensor) -> Any:
    """A layer's result in float32."""
    weight = layer.dequantised() if isinstance(layer, QuantisedLinear) else layer.weight.float()
    return F.linear(x.float(), weight, None if layer.bias is None else layer.bias.float())


def _farther(name: str, one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> str:
    """Why a layer's result may not become another: that is further from the exact one than its own twice, and a unit."""
    size, unit = exact.abs().amax(-1, keepdim=True).clamp_min(1e-30), torch.finfo(one.dtype).eps
    off, own = (float(((y.float() - exact).abs() / size).max()) for y in (one, other))
    return "" if one.shape == other.shape and off <= 2 * own + unit else (
        f"the result of {name} would be off by {off:.2g}, and its own is by {own:.2g}")


def _short(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
