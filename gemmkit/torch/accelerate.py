"""``accelerate``: the layers of a finished model compute by gemmkit, in place.

    report = gemmkit.torch.accelerate(model)
    print(report)                                # what was replaced, and what was not and why
    report.undo()

A module gets another class and keeps everything else (`gemmkit.torch.modules`): parameters, their names in ``state_dict``,
hooks, optimisers and sharding stay valid. Before it does, gemmkit's result (and gradients, of a module in training mode) is
compared with the module's, both beside float32: of each row's largest, gemmkit's may be off by twice as much as the module's
own, and a unit of the dtype. A layer of packed integers, as quantisers have them, is another module: its tensors have
another order of bits.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils import _pytree

from gemmkit.torch import checkpoints, modules
from gemmkit.torch.attention import NAME, register_attention, scaled_dot_product_attention
from gemmkit.torch.layers import FUNCTIONS, QuantisedLinear, Unadded
from gemmkit.torch.modules import (
    HOOKS,
    Replaced,
    compared,
    compared_joined,
    compared_packed,
    compared_sums,
    exactly,
    has_formula,
    in_mode,
    is_linear,
    made,
    of_plain_layers,
)
from gemmkit.torch.product import NARROW, is_here
from gemmkit.torch.rows import UNITS

#: What `accelerate` replaces, in this order: an MLP is compared before its products are replaced, and when those of packed
#: integers are gemmkit's, whose pairs are one product.
PARTS = "attention", "quantised", "experts", "mlp", "linear", "qkv", "norm", "residual"

_ROWS = 16                             # of an input that is drawn


class Outcome(NamedTuple):
    """A module of a report: its name in the model, its class, what computes in its place ("" for what was left), and why it
    was left, or what was noticed."""

    name: str
    kind: str
    by: str
    why: str


class Report:
    """What `accelerate` did to a model.

    Attributes:
        entries: an `Outcome` for each module that has parameters of its own, in the model's order; attention comes first.
        difference: root of the mean square of what the sample's results differ by, over that of the results themselves;
            None without a sample.
    """

    def __init__(self) -> None:
        self.entries: list[Outcome] = []
        self.difference: float | None = None
        self._undone: list[tuple[Any, type, type]] = []          # a module, its class, and the one that it has now
        self._put: list[tuple[Any, str, Any, Any]] = []          # a parent, a name in it, its module, and the one there now
        self._attention: tuple[Any, dict[str, str]] | None = None    # a model, what its configurations named

    @property
    def replaced(self) -> list[Outcome]:
        """The entries of what was replaced."""
        return [x for x in self.entries if x.by]

    @property
    def left(self) -> list[Outcome]:
        """The entries of what was left, with the reason."""
        return [x for x in self.entries if not x.by]

    def undo(self) -> None:
        """Give all modules the class that they had, and put those back that were replaced. A second call does nothing.

        Raises RuntimeError, and changes nothing, where a module has got another class since, as ``fully_shard`` gives it, or
        where another module is in its place.
        """
        changed = [type(module).__name__ for module, _, now in self._undone if type(module) is not now]
        changed += [type(parent._modules.get(name)).__name__ for parent, name, _, now in self._put
                    if parent._modules.get(name) is not now]
        if changed:
            raise RuntimeError(f"{len(changed)} modules have another class than accelerate gave them, the first of them "
                               f"{changed[0]}; undo what came after accelerate first")
        while self._undone:
            module, before, _ = self._undone.pop()
            module.end()
            module.__class__ = before
        while self._put:
            parent, name, module, _ = self._put.pop()
            parent._modules[name] = module
        if self._attention is not None:
            model, names = self._attention
            model.set_attn_implementation(names if len(names) > 1 else names[""])
            self._attention = None
        self.entries = [x if not x.by else Outcome(x.name, x.kind, "", "undone") for x in self.entries]

    def __str__(self) -> str:
        """A line for all modules of a class that had the same fate, with the first one's name."""
        groups = Counter(x[1:] for x in self.entries)
        first = {x[1:]: x.name for x in reversed(self.entries)}
        lines = [("module", "count", "first", "computes by", "note")]
        order = {key: n for n, key in enumerate(dict.fromkeys(x[1:] for x in self.entries))}
        for key in sorted(groups, key=lambda key: (not key[1], order[key])):
            lines.append((key[0], str(groups[key]), first[key], key[1] or "as before", key[2]))
        widths = [max(len(line[n]) for line in lines) for n in range(4)]
        shown = ["  ".join((*(part.ljust(width) for part, width in zip(line, widths)), line[4])).rstrip() for line in lines]
        if self.difference is not None:
            shown.append(f"the sample's results differ by {self.difference:.2g} of their root mean square")
        return "\n".join(shown)

    def __repr__(self) -> str:
        return f"<{len(self.replaced)} modules replaced, {len(self.left)} left>"


def accelerate(model: torch.nn.Module, sample: object = None, *, parts: Sequence[str] = PARTS,
               tolerance: float | None = None) -> Report:
    """Have a model's own layers compute by gemmkit, in place, and report what was replaced.

    | part | what is replaced | by |
    |---|---|---|
    | "linear" | ``torch.nn.Linear``; ``Conv1D`` of transformers' GPT-2 | `gemmkit.torch.Linear` |
    | "qkv" | products of queries, keys and values of attention, outside of training | one product; see below |
    | "norm" | ``torch.nn.LayerNorm`` | `gemmkit.torch.layernorm` |
    | "norm" | modules of a product, a residual and a LayerNorm, as BERT's layers end | a product with a residual |
    | "norm" | ``torch.nn.RMSNorm`` and RMS norms of other libraries | `gemmkit.torch.rmsnorm` |
    | "residual" | layers of decoders as Llama's, where no gradient is recorded | products that add the layer's stream |
    | "mlp" | modules of gate, up and down (SwiGLU, GeGLU), whose products have no bias | `gemmkit.torch.glu` |
    | "mlp" | modules of a product, an activation and perhaps a second product | `gemmkit.torch.Linear` with its activation |
    | "quantised" | layers of 2 and 4 bits that GPTQ, AWQ or compressed-tensors have | `gemmkit.torch.QuantisedLinear` |
    | "experts" | gated experts whose matrices are two parameters, as transformers 5 has them | `gemmkit.torch.experts` |
    | "attention" | the attention "sdpa" of a model of transformers | `gemmkit.torch.attention` |

    Args:
        model: a module with its weights, on the device and of the dtype that it will compute in; its training mode stays.
        sample: what the model is called with once before and once after: a tensor, a tuple of arguments, or a dictionary of
            keywords. The layers then are compared with rows that they get from it. None draws rows for each layer.
        parts: which of these to replace.
        tolerance: of the sample's results: by how much of their root mean square they may differ, as a root of the mean
            square. None takes 8 units of the coarsest dtype among the parameters, 0.06 for bfloat16 and 0.008 for float16.

    Returns: a `Report`. ``print`` shows it as a table; ``undo()`` takes everything back. It holds the modules that a
        `gemmkit.torch.QuantisedLinear` has replaced: their memory is freed with it.

    A layer whose result is further from float32 than its own twice, and a unit of its dtype, is left; so is one whose
    gradients are, if it is in training mode. The first call of a kind of layer compiles its kernels. If the sample's
    results differ by more than ``tolerance``, all is undone. Replaced layers compute float16 and bfloat16, under
    ``torch.autocast`` too, on a GPU or within `gemmkit.emulate`; given anything else they compute as before.

    Raises, before anything is replaced
        TypeError: model is no module.
        ValueError: a part that is none, a tolerance that is no positive number.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Conv1d(1, 1, 1)).half()
    >>> with gk.emulate():
    ...     report = gk.torch.accelerate(model)
    >>> print(report)
    module  count  first  computes by      note
    Linear  1      0      gk.torch.Linear
    Conv1d  1      1      as before        gemmkit has no replacement for it
    >>> report.undo()
    >>> type(model[0])
    <class 'torch.nn.modules.linear.Linear'>
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; a torch.nn.Module is needed")
    unknown = [part for part in ([parts] if isinstance(parts, str) else parts) if part not in PARTS]
    if unknown or isinstance(parts, str):
        raise ValueError(f"parts={parts!r}: a tuple of {', '.join(map(repr, PARTS))} is needed")
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance > 0):
        raise ValueError(f"tolerance={tolerance!r}: a positive number is needed")
    work = _Work(model, tuple(parts))
    work.read()
    before = work.sampled(sample) if sample is not None else None
    try:
        work.replace()
        if before is not None:
            work.compare(before, results(model, sample), tolerance)
    except BaseException:
        work.report.undo()
        raise
    return work.report


class _Work:
    """What `accelerate` does to a model, step by step."""

    def __init__(self, model: torch.nn.Module, parts: tuple[str, ...]):
        self.model, self.parts, self.report = model, parts, Report()
        self.inputs: dict[int, torch.Tensor] = {}                # rows that a module got of the sample, by its id
        self.packed: dict[int, list[QuantisedLinear] | str] = {}     # what a module's words may be, or why they are nothing

    def read(self) -> None:
        """What modules of packed integers hold, before a sample's run: some unpack themselves in their first call."""
        for module in self.model.modules():
            if _candidate(module) == "quantised":
                try:
                    self.packed[id(module)] = _readings(module) if "quantised" in self.parts else []
                except (TypeError, ValueError) as error:
                    self.packed[id(module)] = str(error)

    def sampled(self, sample: object) -> list[Any]:
        """The model's results before anything is replaced; what modules get is kept."""
        def keep(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if id(module) not in self.inputs and len(args) >= 1 and isinstance(args[0], torch.Tensor) and args[0].dim():
                x = args[0].detach()
                self.inputs[id(module)] = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])[:_ROWS].clone()

        held = [module.register_forward_pre_hook(keep) for module in self.model.modules() if _candidate(module) is not None]
        try:
            return results(self.model, sample)
        finally:
            for handle in held:
                handle.remove()

    def replace(self) -> None:
        if "attention" in self.parts:
            self._attention()
        found: dict[int, Outcome] = {}
        named = [(name, module) for name, module in self.model.named_modules()]
        read = {id(m.out_proj) for _, m in named if isinstance(m, torch.nn.MultiheadAttention)}
        for part in PARTS[1:]:
            for name, module in named:
                if id(module) in read:
                    why = "MultiheadAttention reads its weights itself"
                    found[id(module)] = Outcome(name, type(module).__name__, "", why)
                elif id(module) in self.packed:
                    if part == "quantised":
                        found[id(module)] = self._of_packed(name, module)
                elif _candidate(module) == part:
                    found[id(module)] = self._one(name, module, part)
                elif part == "norm" and id(module) not in found and module._parameters:
                    found[id(module)] = _without(name, module)
        self.report.entries += [found[id(module)] for _, module in named if id(module) in found]

    def _one(self, name: str, module: torch.nn.Module, part: str) -> Outcome:
        kind = type(module).__name__
        if isinstance(module, (Replaced, QuantisedLinear)):
            return Outcome(name, kind, "", "computes by gemmkit already")
        why = f"parts does not name {part!r}" if part not in self.parts else _refusal(module)
        if why:
            return Outcome(name, kind, "", why)
        try:
            ways = _FINDERS[part](module)
        except _Left as error:
            return Outcome(name, kind, "", str(error))
        for mixin, said in ways:
            before, now = type(module), made(mixin, type(module))
            module.__class__ = now
            module.begin(*said)
            try:
                x = self._drawn(module, part)
                more = _choices(module, len(x)) if part == "experts" else (
                    _residual(module, x) if mixin is modules.FastOutput else ())
                why = compared_joined(module, x) if part == "qkv" else compared_sums(module, x) if part == "residual" else (
                    compared(module, before, now, x, more))
            except Exception as error:
                why = f"comparing it raised {type(error).__name__}: {str(error)[:200]}"
            if not why:
                self.report._undone.append((module, before, now))
                is_wide = part in ("experts", "mlp", "linear") and x.dtype not in NARROW
                return Outcome(name, kind, mixin.what, "under autocast" if is_wide else "")
            module.end()
            module.__class__ = before
        return Outcome(name, kind, "", why)

    def _drawn(self, module: torch.nn.Module, part: str) -> torch.Tensor:
        """Rows that a module is compared with: drawn ones, and behind them those that it got of the sample."""
        packed = next((m for m in module.modules() if isinstance(m, QuantisedLinear)), None)
        own: Any = next(module.parameters()) if packed is None else packed.scales.to(self._dtype(packed))
        given, columns = self.inputs.get(id(module)), _columns(module)
        drawn = torch.randn(_ROWS, columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float32)
        if part == "norm":                             # of rows that an eps decides, too
            drawn *= torch.logspace(-4, 1, _ROWS)[:, None]
        drawn = drawn.to(own.device, own.dtype)
        return drawn if given is None else torch.cat((drawn, given.to(own.dtype)))

    # -- layers of packed integers ------------------------------------------------------------------------------------

    def _of_packed(self, name: str, module: torch.nn.Module) -> Outcome:
        kind, layers = type(module).__name__, self.packed[id(module)]
        places = [(parent, key) for parent in self.model.modules() for key, child in parent._modules.items()
                  if child is module]
        why = layers if isinstance(layers, str) else _refusal_of_packed(module, bool(places))
        if "quantised" not in self.parts:
            why = "parts does not name 'quantised'"
        for layer in [] if why else layers:
            assert isinstance(layer, QuantisedLinear)
            try:
                x = self._drawn(layer, "linear")
                given = self.inputs.get(id(module))
                x = x if given is None else torch.cat((x.to(given.dtype), given))
                why = compared_packed(module, layer, x)
            except Exception as error:
                why = f"comparing it raised {type(error).__name__}: {str(error)[:200]}"
            if not why:
                layer.train(module.training)
                for parent, key in places:
                    self.report._put.append((parent, key, module, layer))
                    parent._modules[key] = layer
                return Outcome(name, kind, "gk.torch.QuantisedLinear", "x is gathered" if layer.order is not None else "")
        return Outcome(name, kind, "", str(why))

    def _dtype(self, layer: QuantisedLinear) -> torch.dtype:
        """The dtype of what a layer of packed integers gets: that of the model's other parameters."""
        own = (p.dtype for m in self.model.modules() if id(m) not in self.packed and not isinstance(m, QuantisedLinear)
               for p in m._parameters.values() if p is not None and p.is_floating_point())
        return next(own, layer.scales.dtype)

    def compare(self, before: list[Any], after: list[Any], tolerance: float | None) -> None:
        dtypes = {p.dtype for p in self.model.parameters() if p.is_floating_point()} & {*NARROW, torch.float32}
        most = tolerance or 8 * max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.bfloat16).eps)
        if [(x.shape, x.dtype) for x in before] != [(x.shape, x.dtype) for x in after]:
            self._undo_all("the sample's results have other shapes or dtypes")
            return
        worst = 0.0
        for x, y in zip(before, after):
            x, y = x.double(), y.double()
            size = float(x.square().mean().sqrt()) if x.numel() else 0.0
            off = float((x - y).square().mean().sqrt()) if x.numel() else 0.0
            if torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()):
                off = 0.0
            worst = max(worst, off / size if size else off) if math.isfinite(off) else math.inf
        self.report.difference = worst
        if not worst <= most:
            self._undo_all(f"undone: the sample's results differ by {worst:.2g} of their root mean square; {most:.2g} is "
                           "allowed (tolerance=)")

    def _undo_all(self, why: str) -> None:
        replaced = {id(x) for x in self.report.entries if x.by}
        fresh = [Outcome(x.name, x.kind, "", why) if id(x) in replaced else x for x in self.report.entries]
        self.report.undo()
        self.report.entries = fresh

    # -- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> None:
        """Of each model of transformers within the model, whose configuration names the attention that it calls."""
        if "transformers" not in sys.modules:
            return
        from transformers import PreTrainedModel

        outer = next((module for module in self.model.modules() if isinstance(module, PreTrainedModel)), None)
        if outer is None:
            return
        name = next(name for name, module in self.model.named_modules() if module is outer)
        kind = f"{type(outer).__name__}'s attention"
        why = _refusal_of_attention(outer)
        if why:
            self.report.entries.append(Outcome(name, kind, "", why))
            return
        register_attention()
        before = {key: config._attn_implementation for key, config in _configurations(outer)}
        wanted = {key: NAME if name == "sdpa" else name for key, name in before.items()}
        outer.set_attn_implementation(wanted if len(wanted) > 1 else NAME)
        if outer.config._attn_implementation != NAME:
            self.report.entries.append(Outcome(name, kind, "", "the model does not take another attention function"))
            return
        self.report._attention = outer, before
        self.report.entries.append(Outcome(name, kind, "gk.torch.attention", "without a mask tensor and dropout"))


# --------------------------------------------------------------------------------------------------
# What can be replaced, and by what.

class _Left(Exception):
    """Why a module is left as it is."""


def _candidate(module: torch.nn.Module) -> str | None:
    """The part that a module belongs to, by its class and its names; None for none."""
    if _holds_words(module):
        return "quantised"
    if isinstance(module, (torch.nn.Linear, QuantisedLinear)) or modules.is_conv1d(module):
        return "linear"
    if isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)) or _names_a_norm(module) or modules.output_of(module):
        return "norm"
    if any(all(isinstance(held := module._modules.get(x), (torch.nn.Linear, QuantisedLinear)) or _holds_words(held)
               for x in names if x) for names in modules.MLPS) or modules.mlp_of(module):
        return "mlp"
    if modules.qkv_of(module):
        return "qkv"
    if modules.sums_of(module):
        return "residual"
    of_experts = [module._parameters.get(name) for name in modules.EXPERTS]
    return "experts" if all(p is not None and p.dim() == 3 for p in of_experts) else None


def _names_a_norm(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    named = any(word in type(module).__name__ for word in ("RMSNorm", "T5LayerNorm"))
    own = named and list(module._parameters) == ["weight"] and not module._modules and not module._buffers
    return own and weight is not None and weight.dim() == 1 and any(
        getattr(module, name, None) is not None for name in modules.FastNamedNorm.names)


def _holds_words(module: torch.nn.Module | None) -> bool:
    """Whether a module has packed integers, as quantisers store them."""
    return module is not None and not PACKED.isdisjoint((*module._buffers, *module._parameters))


def _columns(module: torch.nn.Module) -> int:
    """How long the rows are that a candidate takes."""
    parts = modules.qkv_of(module) or modules.mlp_of(module) or modules.output_of(module)
    sums = modules.sums_of(module)
    if sums:
        return int(sums[0].out_features)
    module = module if parts is None else module.get_submodule(parts[0])
    if modules.is_conv1d(module):
        return len(module.get_parameter("weight"))
    if isinstance(module, (torch.nn.Linear, QuantisedLinear)):
        return int(module.in_features)
    if isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
        return int(module.normalized_shape[0])
    of_experts = module._parameters.get(modules.EXPERTS[0])
    if of_experts is not None:
        return int(of_experts.shape[-1])
    weight = module._parameters.get("weight")
    first = next((m for m in module._modules.values() if isinstance(m, (torch.nn.Linear, QuantisedLinear))), None)
    return int(weight.shape[0]) if weight is not None else first.in_features if first is not None else 0


def _without(name: str, module: torch.nn.Module) -> Outcome:
    return Outcome(name, type(module).__name__, "", "gemmkit has no replacement for it")


def _refusal(module: torch.nn.Module) -> str:
    """Why no class can be given to a module; "" where one can."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the object"
    for p in module.parameters():
        if p.is_meta:
            return "its parameters are on the meta device; load them first"
        if type(p) not in (torch.Tensor, torch.nn.Parameter):
            return f"its parameters are {type(p).__name__}s; accelerate before they are sharded or converted"
        if p.dtype not in (*NARROW, torch.float32):
            return f"its parameters are {str(p.dtype).removeprefix('torch.')}"
        if not is_here(p):
            return f"its parameters are on {p.device}; move the model to a GPU first"
    return ""


#: Tensors of layers of packed integers, by one of which they are known.
PACKED = frozenset(checkpoints.NAMES)


def _readings(module: torch.nn.Module) -> list[QuantisedLinear]:
    """What a module's tensors may be: of GPTQ, whose two formats they do not tell apart, the one that the module names
    first. The comparison finds out."""
    known = {name for of in checkpoints.NAMES.values() for names in of for name in names}
    tensors = {name: p for name, p in (*module._parameters.items(), *module._buffers.items())
               if p is not None and name in known}
    if "weight_packed" in tensors:
        return [QuantisedLinear.from_checkpoint(tensors)]
    stated, found, refused = getattr(module, "qzero_format", lambda: 1), [], ""
    for form in ("gptq_v2", "gptq") if callable(stated) and stated() == 2 else ("gptq", "gptq_v2"):
        try:
            found.append(QuantisedLinear.from_checkpoint(tensors, {"checkpoint_format": form}))
        except ValueError as error:
            refused = refused or str(error)
    if not found:
        raise ValueError(refused)
    return found


def _refusal_of_packed(module: torch.nn.Module, has_parent: bool) -> str:
    """Why a module of packed integers cannot be replaced; "" where it can."""
    tensor = next(x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None)
    if not is_here(tensor):
        return f"its tensors are on {tensor.device}; move the model to a GPU first"
    if not has_parent:
        return "it is the model itself, which QuantisedLinear.from_checkpoint replaces"
    if "_hf_hook" in module.__dict__ or any(module.__dict__[name] for name in HOOKS):
        return "it has hooks, which another module would not call"
    if getattr(module, "adapter", None) is not None:
        return "it has an adapter"
    if getattr(getattr(module, "quantization_scheme", None), "input_activations", None) is not None:
        return "it quantises its input, too"
    return ""


def _refusal_of_attention(model: torch.nn.Module) -> str:
    now = getattr(model.config, "_attn_implementation", None)
    if now == NAME:
        return "computes by gemmkit already"
    if now != "sdpa":
        return f"its attention is {now!r}; load the model with attn_implementation='sdpa'"
    if not hasattr(model, "set_attn_implementation"):
        return "this version of transformers cannot change a model's attention"
    own = next(iter(model.parameters()), None)
    if own is None or not is_here(own):
        return "the model is not on a GPU; move it there first"
    return compared_attention(model.config, own)


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
            found = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            wide = [x.float().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v)]
            with exactly():
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


#: What may take a module's place: a class, and what it is told. The first that passes the comparison is taken.
_Ways = list[tuple[type[Replaced], tuple[str, ...]]]


def _configurations(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """A model's configuration, named "", and those of the models within it."""
    within = ((key, getattr(model.config, key, None)) for key in getattr(model.config, "sub_configs", ()))
    return [("", model.config), *((key, config) for key, config in within if config is not None)]


def _linear(module: torch.nn.Module) -> _Ways:
    if modules.is_conv1d(module):
        return [(modules.FastConv1D, ())]
    if not is_linear(module):
        raise _Left("its class has a forward of its own")
    return [(modules.FastLinear, ())]


def _norm(module: torch.nn.Module) -> _Ways:
    own: Any = type(module).forward
    if output := modules.output_of(module):
        return _output(module, *output)
    if isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
        plain = torch.nn.LayerNorm if isinstance(module, torch.nn.LayerNorm) else torch.nn.RMSNorm
        if own is not plain.forward:
            raise _Left("its class has a forward of its own")
        if len(module.normalized_shape) != 1:
            raise _Left(f"it norms {len(module.normalized_shape)} axes at once; gemmkit norms the last one")
        if not list(module.parameters()):
            raise _Left("it has no parameters by which to tell its device and dtype")
        if plain is torch.nn.LayerNorm:
            return [(modules.FastLayerNorm, ())]
        return [(modules.FastRMSNorm, (eps,)) for eps in ("own", "float32")]
    for mixin, offset in ((modules.FastNamedNorm, 0.0), (modules.FastOffsetNorm, 1.0)):
        def formula(x: torch.Tensor, p: Mapping[str, torch.Tensor], offset: float = offset) -> Any:
            return _rms(x, module) * (p["weight"] + offset)

        if has_formula(module, {"weight": (8,)}, formula):
            return [(mixin, ())]
    raise _Left("its result is not that of an RMS norm with a factor of weight or 1 + weight")


def _rms(x: torch.Tensor, module: torch.nn.Module) -> Any:
    eps = next(value for name in modules.FastNamedNorm.names if (value := getattr(module, name, None)) is not None)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(eps))


def _plain_mlp(module: torch.nn.Module, up: str, between: str, down: str) -> _Ways:
    held: list[Any] = [module._modules[name] for name in (up, down) if name]
    if not all(is_linear(m) or modules.is_conv1d(m) for m in held):
        raise _Left("a module of it has a forward of its own")
    of_weights = zip((up, down), ((12, 8), (8, 12)))
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in of_weights if name}
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name, m in zip((up, down), held) if m.bias is not None}
    modes = (False,) if any(isinstance(m, torch.nn.Dropout) and m.p for m in module._modules.values()) else (False, True)
    for activation, function in FUNCTIONS.items():
        def formula(x: torch.Tensor, p: Mapping[str, torch.Tensor], function: Any = function) -> Any:
            y = function(F.linear(x, p[f"{up}.weight"], p.get(f"{up}.bias")))
            return F.linear(y, p[f"{down}.weight"], p.get(f"{down}.bias")) if down else y

        with of_plain_layers(module):
            found = has_formula(module, shapes, formula, modes=modes)
        if found:
            return [(modules.FastMLP, (activation, up, between, down))]
    raise _Left(f"its result is not {'down(f(up(x)))' if down else 'f(up(x))'} with f one of {', '.join(FUNCTIONS)}")


def _output(module: torch.nn.Module, product: str, norm: str) -> _Ways:
    held: list[Any] = [module._modules[name] for name in (product, norm)]
    if not is_linear(held[0]) or held[0].bias is None or held[1].weight is None or len(held[1].normalized_shape) != 1:
        raise _Left("its product has a forward of its own or no bias, or its norm no weight or several axes")
    if held[0].weight.dtype not in NARROW:
        raise _Left("its product is of float32")
    shapes = {f"{product}.weight": (8, 8), f"{product}.bias": (8,), **{f"{norm}.{x}": (8,) for x in held[1]._parameters}}
    y = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))

    def formula(x: torch.Tensor, p: Mapping[str, torch.Tensor]) -> Any:
        z = F.linear(x, p[f"{product}.weight"], p[f"{product}.bias"]) + y
        return F.layer_norm(z, (8,), p[f"{norm}.weight"], p.get(f"{norm}.bias"), held[1].eps)

    own = held[1].normalized_shape
    try:
        held[1].normalized_shape = (8,)
        found = has_formula(module, shapes, formula, (y,), modes=(False,))
    finally:
        held[1].normalized_shape = own
    if found:
        return [(modules.FastOutput, (product, norm))]
    raise _Left("its result is not norm(product(x) + y)")


def _mlp(module: torch.nn.Module) -> _Ways:
    for names in modules.MLPS:
        gate, up, down = names
        held = [module._modules.get(name) for name in names if name]
        if any(_holds_words(x) for x in held):
            raise _Left("a module of it has packed integers that were left")
        if not all(isinstance(x, (torch.nn.Linear, QuantisedLinear)) for x in held):
            continue
        if not all(is_linear(x) or (isinstance(x, QuantisedLinear) and x.activation is None) for x in held):
            raise _Left("a module of it has a forward of its own")
        packed = [isinstance(x, QuantisedLinear) for x in held[:-1]]
        if any(packed) and (not all(packed) or not up):
            raise _Left("of its gate and up one is packed integers, or both are one matrix of them")
        if any(x.bias is not None for x in held[:-1]):
            raise _Left("its gate or up product adds a bias, which gk.torch.glu does not")
        shapes: dict[str, tuple[int, ...]] = {f"{gate}.weight": (12 if up else 24, 8), f"{down}.weight": (8, 12)}
        if up:
            shapes[f"{up}.weight"] = 12, 8
        if held[-1].bias is not None:
            shapes[f"{down}.bias"] = (8,)
        for activation, unit in UNITS.items():
            def formula(x: torch.Tensor, p: Mapping[str, torch.Tensor], unit: Any = unit, gate: str = gate, up: str = up,
                        down: str = down) -> Any:
                w, v = (p[f"{gate}.weight"], p[f"{up}.weight"]) if up else p[f"{gate}.weight"].chunk(2)
                return F.linear(unit.of_tensors(x @ w.mT) * (x @ v.mT), p[f"{down}.weight"], p.get(f"{down}.bias"))

            with of_plain_layers(module):
                found = has_formula(module, shapes, formula)
            if found:
                return [(modules.FastGatedMLP, (activation, *names))]
    if plain := modules.mlp_of(module):
        return _plain_mlp(module, *plain)
    raise _Left(f"its result is not down(f(gate(x)) * up(x)) with f one of {', '.join(UNITS)}")


def _experts(module: torch.nn.Module) -> _Ways:
    both, down = modules.EXPERTS
    chosen, weights = _choices(module, 4)
    count = _count(module)
    for activation, unit in UNITS.items():
        def formula(x: torch.Tensor, p: Mapping[str, torch.Tensor], unit: Any = unit) -> Any:
            gate, up = p[both].mT.chunk(2, -1)
            every = (unit.of_tensors(x @ gate) * (x @ up)) @ p[down].mT                    # (experts, rows, columns)
            own = every.permute(1, 0, 2).gather(1, chosen[:, :, None].cpu().expand(-1, -1, x.shape[1]))
            return (own * weights[:, :, None].cpu()).sum(1)

        if has_formula(module, {both: (count, 24, 8), down: (count, 8, 12)}, formula, (chosen.cpu(), weights.cpu())):
            return [(modules.FastExperts, (activation,))]
    raise _Left(f"its result is not the sum of weight * down(f(gate(x)) * up(x)) with f one of {', '.join(UNITS)}")


def _residual(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor]:
    """What a module of `_output` adds to its product."""
    width = len(module.get_submodule(modules.output_of(module)[0]).weight)    # type: ignore[index]
    return (torch.randn(len(x), width, generator=torch.Generator().manual_seed(5)).to(x.device, x.dtype),)


def _choices(module: torch.nn.Module, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts of each row, and their weights, which are drawn."""
    device, drawn = next(module.parameters()).device, torch.Generator().manual_seed(3)
    chosen = torch.rand(rows, _count(module), generator=drawn).argsort(1)[:, :2]
    return chosen.to(device), torch.rand(chosen.shape, generator=drawn).to(device)


def _count(module: torch.nn.Module) -> int:
    return len(module.get_parameter(modules.EXPERTS[0]))


def _qkv(module: torch.nn.Module) -> _Ways:
    names = modules.qkv_of(module) or ()
    held: list[Any] = [module._modules[name] for name in names]
    if module.training:
        raise _Left("it is in training, where queries, keys and values are three products; model.eval() first")
    if all(isinstance(m, QuantisedLinear) for m in held):
        if len({(m.in_features, m.bits, m.group, m.symmetric, m.float8, m.words.device, m.bias is None) for m in held}) > 1:
            raise _Left("its packed integers have several widths, bits, groups or devices, or one of them alone a bias")
        if any(m.activation is not None or m.order is not None for m in held) or len(
                {m.bias.dtype for m in held if m.bias is not None}) > 1:
            raise _Left("one of its packed layers has an activation or gathers its inputs, or biases have two dtypes")
        return [(modules.FastQKV, names)]
    if not all(isinstance(m, modules.FastLinear) for m in held):
        raise _Left("a product of its queries, keys or values is not gemmkit's")
    weights, biases = [m.weight for m in held], [m.bias for m in held]
    if any(w.dtype not in NARROW or w.dtype != weights[0].dtype or w.device != weights[0].device for w in weights):
        raise _Left("its products are of float32, or of two dtypes or devices")
    if len({w.shape[1] for w in weights}) > 1 or len({b is None for b in biases}) > 1 or any(
            b is not None and b.dtype != weights[0].dtype for b in biases):
        raise _Left("its products have inputs of two widths, or one of them alone a bias")
    return [(modules.FastQKV, names)]


def _sums(module: torch.nn.Module) -> _Ways:
    for m in modules.sums_of(module):
        if not isinstance(m, (modules.FastLinear, QuantisedLinear)) or m.activation is not None:
            raise _Left("the last product of its attention or of its MLP is not gemmkit's")
        if isinstance(m, modules.FastLinear) and m.weight.dtype not in NARROW:
            raise _Left("its products are of float32")
    if not _adds(module):
        raise _Left("its result is not y + mlp(norm(y)) with y = x + attention(norm(x))")
    return [(modules.FastLayer, ())]


def _adds(module: torch.nn.Module) -> bool:
    """Whether a layer adds the results of attention and MLP to its stream, and does nothing else with them."""
    seen: list[bool] = []

    class Sine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.sin()

    class Part(torch.nn.Module):
        def forward(self, *args: torch.Tensor, **given: torch.Tensor) -> Any:
            x = args[0] if args else given["hidden_states"]

            def compute(y: torch.Tensor | None) -> torch.Tensor:
                seen.append(y is not None)
                return x.tanh() if y is None else x.tanh() + y

            found = Unadded(compute, x.shape, x)
            return (found, None) if self is attention else found

    attention, before = Part(), dict(module._modules)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(7))
    try:
        module._modules.update({name: Sine() for name in before}, self_attn=attention, mlp=Part())
        found = type(module).forward(module, x)
    except Exception:
        return False
    finally:
        module._modules.update(before)
    y = x + x.sin().tanh()
    found = found[0] if isinstance(found, tuple) else found
    return seen == [True, True] and isinstance(found, torch.Tensor) and torch.allclose(found, y + y.sin().tanh(), atol=1e-5)


_FINDERS: dict[str, Callable[[torch.nn.Module], _Ways]] = {"experts": _experts, "mlp": _mlp, "linear": _linear, "qkv": _qkv,
                                                           "norm": _norm, "residual": _sums}
