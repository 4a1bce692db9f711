"""``gemmkit::attention``: attention as an operator of PyTorch's, with the gradients of q, k and v.

Autograd keeps q, k, v, the result and the logarithms of the sums; `gemmkit.functions.gradients` computes the rest.
A mask and a score are no tensors: eager calls carry them as they are, the operator a name of them (`_named`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from operator import getitem
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from gemmkit import programs as gp
from gemmkit.components import CONSTANTS, Component, field_values, held_values
from gemmkit.functions import attention as forward
from gemmkit.functions.gradients import Rules, gradients
from gemmkit.functions.slope import Replay, slope_of
from gemmkit.kernels.masks import Causal, Mask, Padding, Score, ScoreBias
from gemmkit.lang.references import is_gemmkit
from gemmkit.programs.decorated import program
from gemmkit.programs.values import Parameter
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.torch.autograd import OutputCoordinates, TensorWorld
from gemmkit.torch.dual import DualTensor, Paths, values
from gemmkit.torch.product import (
    NARROW,
    Differentiable,
    autocast,
    batched_by,
    define,
    derived,
    is_eager,
    is_here,
    is_looked_at,
    is_measured,
    node_of,
    records,
    takes,
)

# --------------------------------------------------------------------------------------------------
# What a call says beside its tensors.

class MaskAndScore:
    """A mask and a score. Raises TypeError for what is none."""

    def __init__(self, mask: Any, score: Any):
        self.mask, self.score = forward.mask_given(mask), forward.score_given(score)

    @cached_property
    def slope(self) -> Score | None:
        """The score's derivative. Raises TypeError where it is not known."""
        return slope_of(self.score)

    def check_gradient(self) -> None:
        """Raise TypeError where the derivative of the score is not known, NotImplementedError where an array of it, or of
        the mask, is to get a gradient."""
        for part in (self.mask, self.score):
            for name, x, _ in held_values(part):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    raise NotImplementedError(f"{name} requires a gradient, but gemmkit.torch.attention has those of q, k "
                                              "and v alone; pass .detach()")
        _ = self.slope


_PLAIN = ""                            # the name of no mask and no score
_PROCESS = secrets.token_hex(8)
_kinds: dict[str, MaskAndScore] = {_PLAIN: MaskAndScore(None, None)}
_names: dict[tuple[int, int], tuple[str, Any]] = {}                           # by ids, with what these are of


def _named(mask: Any, score: Any, recorded: bool) -> str:
    """The name of a mask and a score, from which the operator gets them: while PyTorch compiles, it is a constant. They stay
    known for as long as the process lives, since a compiled graph may. What gemmkit's own masks and scores say without
    arrays is their name, in every process; another name is of this process alone, so that none that is loaded takes it for
    its own."""
    key = id(mask), id(score)
    if key not in _names:
        kind, parts = MaskAndScore(mask, score), (mask, score)
        name = _PLAIN if parts == (None, None) else f"mask {mask!r}, score {score!r}" if all(map(_is_told, parts)) else (
            f"{_PROCESS} {len(_names)}")
        _kinds.setdefault(name, kind)
        _names[key] = name, parts                      # whose ids then stay theirs
    name = _names[key][0]
    if recorded:
        _kinds[name].check_gradient()
    return name


def _is_told(x: Any) -> bool:
    """Whether ``repr`` says all of it."""
    return x is None or (isinstance(x, Component) and is_gemmkit(type(x)) and all(
        type(value) in CONSTANTS or _is_told(value) for value in field_values(x).values()))


_constant_name = torch.compiler.assume_constant_result(_named)
CAUSAL = Causal()
#: The operator's names of no mask, and of the causal one.
KINDS = _PLAIN, _named(CAUSAL, None, False)


def _kind_of(kind: MaskAndScore | str) -> MaskAndScore:
    if isinstance(kind, MaskAndScore):
        return kind
    if kind not in _kinds:
        raise ValueError(f"kind={kind!r}: this process has not called gemmkit.torch.attention with this mask and score; "
                         "call it with them before a graph of another process runs")
    return _kinds[kind]


# --------------------------------------------------------------------------------------------------
# Calls.

def attention(q: Any, k: Any, v: Any, *, mask: Mask | None = None, score: Any = None, scale: float | None = None,
              layout: str = "bhnd", lengths: Any = None, key_starts: Any = None, key_lengths: Any = None, pages: Any = None,
              return_lse: bool = False, deterministic: bool = True) -> Any:
    """`gemmkit.attention` of tensors as an operator: autograd, ``torch.compile``, ``torch.func.vmap``. ``torch.autocast``
    casts q, k and v.

    Args:
        q, k, v, mask, score, scale, layout, lengths, key_lengths, return_lse: as in `gemmkit.attention`. While PyTorch
            compiles, lengths are tensors.
        pages, key_starts: as in `gemmkit.attention`, of tensors of which none requires a gradient.
        deterministic: gradients are the same bits every time. False allows that the gradient of q is added up in any order,
            in one kernel with those of k and v, which takes less time on Hopper with heads of up to 64 columns, and of 128.
            Other calls, and all under ``torch.use_deterministic_algorithms(True)``, keep the order.

    Returns: the result, or ``(result, lse)``. Both have gradients by q, k and v. PyTorch computes
    second derivatives, with all scores in memory. A key that no query sees, and one behind a length, gets zeros.

    Raises: what `gemmkit.attention` raises, before anything is launched, and where a gradient is wanted
        ValueError: pages or key_starts are given.
        TypeError: the derivative of the score is not known.
        NotImplementedError: an array of the mask or the score requires a gradient; a second derivative is asked for with
            ``lengths``, or of a mask or a score whose code does not run on tensors.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> q = k = torch.eye(2, 64).half()[None, None]
    >>> v = torch.ones(1, 1, 2, 64).half().requires_grad_()
    >>> with gk.emulate():
    ...     gk.torch.attention(q, k, v, mask=gk.masks.Causal(), scale=0.0).sum().backward()
    >>> v.grad[0, 0, :, 0].tolist()              # both queries see the first key
    [1.5, 0.5]
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; gemmkit.torch.attention takes tensors, gemmkit.attention any "
                            "array")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic={deterministic!r}: True or False is needed")
    q, k, v = autocast(q, k, v)
    return _attended(q, k, v, mask, score, scale, layout, lengths, key_starts, key_lengths, pages, return_lse, deterministic)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any, scale: float | None, layout: str,
              lengths: Any, key_starts: Any, key_lengths: Any, pages: Any, return_lse: bool,
              deterministic: bool = True) -> Any:
    if layout not in forward.LAYOUTS:
        raise ValueError(f'layout={layout!r}: "bhnd" or "bnhd" is needed')
    is_recorded = records(q, k, v)
    for name, x in (("pages", pages), ("key_starts", key_starts)):
        if x is not None and is_recorded:
            raise ValueError(f"{name} are given, and a tensor that requires a gradient is among q, k and v: attention with "
                             f"{name} has no gradient; pass .detach(), or call under torch.no_grad()")
    widest = max([x.shape[-1] for x in (k, v) if x.ndim], default=0)
    if is_recorded and widest > forward.WIDE:
        raise ValueError(f"heads have {widest} columns, and a tensor that requires a gradient is among q, k and v: heads of "
                         f"more than {forward.WIDE} have no gradient; pass .detach(), or call under torch.no_grad()")
    if pages is not None or key_starts is not None:
        return forward.attention(q, k, v, mask=mask, score=score, scale=scale, layout=layout, lengths=lengths,
                                 key_starts=key_starts, key_lengths=key_lengths, pages=pages, return_lse=return_lse)
    if not torch.compiler.is_compiling() and is_eager((q, k, v)):
        if not is_recorded:
            return forward.attention(q, k, v, mask=mask, score=score, scale=scale, layout=layout, lengths=lengths,
                                     key_lengths=key_lengths, return_lse=return_lse)
        kind = MaskAndScore(mask, score)
        kind.check_gradient()
        found = _OPERATOR(q, k, v, *_on_device(q, k, lengths, key_lengths, layout), kind=kind, scale=scale, layout=layout,
                          deterministic=deterministic)
    else:
        _ = [id(x) for x in (mask, score) if x is not None]           # what a compiled graph is guarded by
        name = _constant_name(mask, score, is_recorded)
        found = _OPERATOR(q, k, v, *_tensors(lengths, key_lengths), kind=name, scale=scale, layout=layout,
                          deterministic=deterministic)
    return tuple(found) if return_lse else found[0]


def causal_or_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None,
                    score: Score | None = None, mask: Mask | None = None, deterministic: bool = True) -> Any:
    """`attention` of (batch, rows, heads, head size), with a score and another mask where no compiler looks on. Tensors may
    begin anywhere: one that begins at no multiple of 16 bytes is copied first. Masks have their names before a compiler asks
    (PyTorch 2.11's takes no mask for a constant)."""
    q, k, v = autocast(q, k, v)
    if torch.compiler.is_compiling():
        return _OPERATOR(q, k, v, None, None, None, kind=KINDS[1 if is_causal else 0], scale=scale, layout="bnhd",
                         deterministic=deterministic)[0]
    q, k, v = (x.clone() if x.storage_offset() % 8 else x for x in (q, k, v))
    return _attended(q, k, v, mask or (CAUSAL if is_causal else None), score, scale, "bnhd", None, None, None, None, False,
                     deterministic)


def recorded(q: Any, k: Any, v: Any, out: Any, stream: Any, **more: Any) -> Any:
    """`gemmkit.attention` where a tensor among q, k and v requires a gradient. Raises ValueError for an ``out``, and for a
    ``stream``, TypeError for an array of another library among q, k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, and another operand is a tensor that requires a gradient; "
                            "give PyTorch tensors")
    for name, given, why in (
            ("out", out, "what is written in place cannot be recorded; leave out= away"),
            ("stream", stream, "autograd computes on PyTorch's current stream; use torch.cuda.stream(...)")):
        if given is not None:
            raise ValueError(f"{name}= is given, and a tensor that requires a gradient is among q, k and v: {why}, or call "
                             "under torch.no_grad()")
    return _attended(q, k, v, **more)


def _pair(lengths: Any) -> tuple[Any, Any]:
    if lengths is None:
        return None, None
    if not isinstance(lengths, (tuple, list)) or len(lengths) != 2:
        raise TypeError(f"lengths={lengths!r}: a pair of offsets, of queries and of keys, is needed")
    return lengths[0], lengths[1]


def _tensors(lengths: Any, key_lengths: Any) -> tuple[Any, ...]:
    found = *_pair(lengths), key_lengths
    for name, x in zip(("lengths", "lengths", "key_lengths"), found):
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} has a {type(x).__name__}; within a transform of PyTorch's tensors are needed")
    return found


def _on_device(q: torch.Tensor, k: torch.Tensor, lengths: Any, key_lengths: Any, layout: str) -> tuple[Any, ...]:
    """Offsets of queries and of keys, and lengths of keys, as tensors beside q. Those of the host are checked."""
    found = *_pair(lengths), key_lengths
    if all(x is None or isinstance(x, torch.Tensor) for x in found):
        return found
    with torch.no_grad():
        info = describe(q, "q")
        given = {name: x for name, x in zip(("q_offsets", "k_offsets", "key_lengths"), found) if x is not None}
        of = forward.lengths_of(given, info)
        if "q_offsets" in of and "k_offsets" in of and "key_lengths" not in of:
            rows = layout.index("n") - 1
            forward.check_offsets(of, {"q_offsets": q.shape[rows], "k_offsets": k.shape[rows]})
    tensors = {name: torch.from_numpy(x).to(q.device) if isinstance(x, np.ndarray) else x for name, x in of.items()}
    return tensors.get("q_offsets"), tensors.get("k_offsets"), tensors.get("key_lengths")


# --------------------------------------------------------------------------------------------------
# The operators of ``torch.library``.

_SAID = 'str kind="", float? scale=None, str layout="bhnd", bool deterministic=True'
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? q_offsets, Tensor? k_offsets, Tensor? key_lengths"
_SCHEMA = f"({_GIVEN}, *, {_SAID}) -> (Tensor, Tensor)"
_SCHEMA_OF_BACKWARD = (f"(Tensor grad, Tensor out, Tensor lse, Tensor? of_lse, {_GIVEN}, *, {_SAID}, int needed=7) -> "
                       "(Tensor, Tensor, Tensor)")


def _compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_offsets: Any, k_offsets: Any, key_lengths: Any, *,
             kind: MaskAndScore | str = _PLAIN, scale: float | None = None, layout: str = "bhnd",
             deterministic: bool = True) -> Any:
    of = _kind_of(kind)
    with torch.no_grad():
        found = forward.attention(q, k, v, mask=of.mask, score=of.score, scale=scale, layout=layout, key_lengths=key_lengths,
                                  lengths=None if q_offsets is None and k_offsets is None else (q_offsets, k_offsets),
                                  return_lse=True)
    return tuple(found)


def _in_a_graph(compute: Callable[..., Any], first: int) -> Callable[..., Any]:
    """What an operator computes in a compiled graph: ``compute``, of copies of those of q, k and v (the arguments from
    ``first`` on) that begin at no multiple of 16 bytes. Compilers cannot ask for that, so no graph has a guard of it."""
    def computed(*args: Any, **options: Any) -> Any:
        qkv = (x.clone() if x.data_ptr() % 16 else x for x in args[first:first + 3])
        return compute(*args[:first], *qkv, *args[first + 3:], **options)

    return computed


def _allocate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_offsets: Any, k_offsets: Any, key_lengths: Any, *,
              kind: str = _PLAIN, scale: float | None = None, layout: str = "bhnd", deterministic: bool = True) -> Any:
    """The results, uninitialised."""
    wanted = layout if q_offsets is None else layout[1:]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != len(wanted):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {len(wanted)} axes are needed (layout={layout!r})")
    rows = q.shape if layout == "bhnd" else q.transpose(-2, -3).shape
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows[:-1], dtype=torch.float32)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any],
          output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Any, of_lse: Any) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[:3]
    if grad is None and of_lse is None:
        return (None,) * 6
    *inputs, out, lse = ctx.saved_tensors
    if torch.is_grad_enabled():                            # a second derivative computes them from the inputs
        out, lse = out.detach(), lse.detach()
    grad = torch.zeros_like(out) if grad is None else grad
    compute = _GRADIENTS if torch.is_grad_enabled() or is_looked_at() else _compute_gradients
    found = compute(grad, out, lse, of_lse, *inputs, **ctx.options, needed=sum(x << n for n, x in enumerate(needed)))
    return *(x if is_needed else None for x, is_needed in zip(found, needed)), None, None, None


def _compute_gradients(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, of_lse: Any, q: torch.Tensor,
                       k: torch.Tensor, v: torch.Tensor, q_offsets: Any, k_offsets: Any, key_lengths: Any, *,
                       kind: MaskAndScore | str = _PLAIN, scale: float | None = None, layout: str = "bhnd",
                       deterministic: bool = True, needed: int = 7) -> Any:
    of = _kind_of(kind)
    with torch.no_grad():
        if grad.stride(-1) != 1 or why_not(describe(grad, "grad"), grad.dim() - 1) is not None:
            grad = grad.contiguous()                   # one element for all, as the gradient of a sum
        rules = Rules(of.mask, of.score, of.slope, q.shape[-1] ** -0.5 if scale is None else float(scale), layout,
                      None if q_offsets is None else (q_offsets, k_offsets), key_lengths,
                      deterministic or torch.are_deterministic_algorithms_enabled())
        found = gradients(rules, grad, q, k, v, out, lse, of_lse, tuple(bool(needed >> n & 1) for n in range(3)))
        return tuple(q.new_empty(0) if x is None else x for x in found)


def _allocate_gradients(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, of_lse: Any, q: torch.Tensor,
                        k: torch.Tensor, v: torch.Tensor, *lengths: Any, needed: int = 7, **said: Any) -> Any:
    return tuple(x.new_empty(x.shape if needed >> n & 1 else (0,)) for n, x in enumerate((q, k, v)))


def _one_by_one(size: int, in_dims: tuple[Any, ...], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Of a batch there is one launch after the other."""
    return batched_by(_OPERATOR, size, in_dims[:6], args, (None,) * 6, options)


def _gradients_one_by_one(size: int, in_dims: tuple[Any, ...], *args: Any, **options: Any) -> tuple[Any, Any]:
    return batched_by(_GRADIENTS, size, in_dims[:10], args, (None,) * 10, options)


# -- second derivatives: PyTorch's, of attention with all scores in memory ----------------------------------------------

def _first_of_attention(grad: torch.Tensor, out: object, lse: object, of_lse: torch.Tensor | None, q: torch.Tensor,
                        k: torch.Tensor, v: torch.Tensor, q_offsets: object, k_offsets: object,
                        key_lengths: torch.Tensor | None, *, kind: MaskAndScore | str, scale: float | None, layout: str,
                        deterministic: bool, needed: int) -> Any:
    if q_offsets is not None or k_offsets is not None:
        raise NotImplementedError("gemmkit.torch.attention with lengths= has no second derivative; call it for each "
                                  "sequence, or without create_graph=True")
    of, keys = _kind_of(kind), k.shape[layout.index("n")]
    count = None if key_lengths is None else key_lengths.clamp(0, keys)[:, None, None, None]

    def compute(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.float() if layout == "bhnd" else x.float().transpose(1, 2) for x in qkv)
        k, v = (x if x.shape[1] == 1 else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if count is not None:                              # what lies behind a length is no key, whatever is there
            k, v = (torch.where(torch.arange(x.shape[2], device=x.device)[:, None] < count, x, 0.0) for x in (k, v))
        s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
        seen = _seen(of.mask, s, count)
        s = _everywhere(f"score={of.score!r}", of.score, "at", torch.where(seen, s, 0.0))
        best = torch.where(seen, s, -math.inf)
        some = seen.any(-1, keepdim=True)                  # a query that sees no key gets zeros
        p = torch.where(some, best, 0.0).softmax(-1) * some
        out, total = p @ v, torch.where(some, best, 0.0).logsumexp(-1)
        return out if layout == "bhnd" else out.transpose(1, 2), torch.where(some[..., 0], total, -math.inf)

    found, pull = torch.func.vjp(compute, q, k, v)
    return pull((grad.float(), torch.zeros_like(found[1]) if of_lse is None else of_lse))


def _seen(mask: Mask, s: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """Which keys each query sees, as scores (batch, heads, queries, keys) lie. ``count``: how many keys there are."""
    queries, keys = s.shape[2:]
    count = torch.tensor(keys, device=s.device) if count is None else count
    seen = _everywhere(f"mask={mask!r}", mask, "sees", s, count - queries)
    return (seen & (torch.arange(keys, device=s.device) < count)).expand(s.shape)


def _everywhere(name: str, component: Component, method: str, s: torch.Tensor, shift: torch.Tensor | None = None) -> Any:
    """A score's ``at``, or a mask's ``sees``, of all places of s. Raises NotImplementedError, naming the component, for code
    that does not run on tensors."""
    paths = Paths()
    code = Replay(component, TensorWorld({}, OutputCoordinates(s, paths, s.dtype, {})))
    batch, head, m, n = (DualTensor(torch.arange(count, device=s.device).view(-1, *(1,) * (3 - axis)), paths)
                         for axis, count in enumerate(s.shape))
    try:
        run = getattr(code, method)
        if shift is None:
            return values(paths, lambda: run(DualTensor(s, paths), m, n, head, batch), s.new_zeros(()))
        return values(paths, lambda: run(m, n, head, batch, DualTensor(shift, paths)), shift.new_zeros((), dtype=torch.bool))
    except (TypeError, IndexError, AttributeError, ValueError) as error:
        raise NotImplementedError(f"{name} has no second derivative: {error}; call without create_graph=True") from error


_OPERATOR: Any = Differentiable(define("gemmkit::attention", _SCHEMA, _in_a_graph(_compute, 0), _allocate), _backward,
                                _keep, _one_by_one, _compute)
_GRADIENTS: Any = Differentiable(
    define("gemmkit::attention_backward", _SCHEMA_OF_BACKWARD, _in_a_graph(_compute_gradients, 4), _allocate_gradients),
    *derived(_first_of_attention), _gradients_one_by_one, _compute_gradients)


# --------------------------------------------------------------------------------------------------
# What attention takes, and attention in a graph before PyTorch takes it apart: its gradient is an operator, too.

def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, shares_heads: bool,
            known: Callable[[Any], bool] = bool) -> bool:
    """Whether attention takes these shapes and strides; ``known`` says whether a condition holds, of symbols in a graph."""
    if not q.dim() == k.dim() == v.dim() == 4 or not (known(k.numel() != 0) and known(v.numel() != 0)):
        return False
    (batch, heads, queries, size), (b, shared, keys, of_k), of_v = q.shape, k.shape, v.shape
    if not all(map(known, (batch == b, of_v[0] == b, of_v[1] == shared, of_v[2] == keys, size == of_k, size % 8 == 0,
                           of_v[3] % 8 == 0, size <= 256, of_v[3] <= 256, heads % shared == 0))):
        return False
    if not (shares_heads or known(heads == shared)) or (is_causal and not known(queries == keys)):
        return False
    return all(known(x.stride(3) == 1) and all(known(step % 8 == 0) for step in x.stride()[:3]) for x in (q, k, v))


_KEY = "example_value"
_ATTENTION = F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention


def replaced(module: torch.fx.GraphModule, takes_all: bool) -> Iterator[tuple[str, str]]:
    """Put ``gemmkit::attention`` where a graph of Dynamo's has attention that gemmkit takes; what each is, and why it stays
    PyTorch's ("": it does not)."""
    graph = module.graph
    cast = {x.args[1] for x in graph.nodes if "_enter_autocast" in str(x.target) and len(x.args) > 1}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _ATTENTION:
            continue
        said = _Said(*node.args, **node.kwargs)
        why = _why_not(said, cast, takes_all)
        yield "attention" + "".join(f" {tuple(_example(x).shape)}" for x in said[:3]), why
        if why:
            continue
        with graph.inserting_before(node):
            turned = [node_of(graph, "transpose", (x, 1, 2), key=_KEY) for x in said[:3]]
            kind = {"kind": KINDS[bool(said.is_causal)], "scale": said.scale, "layout": "bnhd"}
            both = node_of(graph, torch.ops.gemmkit.attention.default, (*turned, None, None, None), kind, key=_KEY)
            found = node_of(graph, "transpose", (node_of(graph, getitem, (both, 0), key=_KEY), 1, 2), key=_KEY)
        node.replace_all_uses_with(found)
        graph.erase_node(node)
    module.recompile()


class _Said(NamedTuple):
    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False


def _example(node: object) -> Any:
    return node.meta.get(_KEY) if isinstance(node, torch.fx.Node) else None


def _why_not(said: _Said, cast: set[Any], takes_all: bool) -> str:
    """Why attention stays PyTorch's; "" if it does not."""
    q, k, v = map(_example, said[:3])
    if not all(isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter) for x in (q, k, v)):
        return "its operands have no known shapes"
    if said.attn_mask is not None or said.dropout_p != 0:
        return "it has a mask tensor or dropout"
    if q.dtype not in NARROW or not q.dtype == k.dtype == v.dtype or cast - {q.dtype}:
        return f"operands of {q.dtype}"
    if not is_here(q):
        return f"tensors on {q.device}"
    if not takes_all and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "a gradient is recorded, and cuDNN's is faster"
    if not takes_all and not is_measured(q):
        return "the GPU is no Hopper, for which alone it is known what is faster"
    if not isinstance(said.is_causal, bool) or not (said.scale is None or isinstance(said.scale, float)):
        return "is_causal or scale is not a constant"
    if not attends(q, k, v, said.is_causal, bool(said.enable_gqa), statically_known_true):
        return "gemmkit does not take its shapes"
    return ""


# --------------------------------------------------------------------------------------------------
# Attention as PyTorch and transformers call it.

def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                 attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
                                 scale: float | None = None, enable_gqa: bool = False) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention``, by `gemmkit.torch.attention` for what that takes.

    gemmkit computes (batch, heads, rows, head size) of float16 and bfloat16 without a mask tensor and without dropout, of
    head sizes that are multiples of 8 up to 256; a causal mask needs as many queries as keys. PyTorch computes the rest.
    Arguments, results and errors are PyTorch's. A tensor that begins at no multiple of 16 bytes is copied first.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> q = k = v = torch.ones(1, 2, 3, 64).half()
    >>> with gk.emulate():
    ...     gk.torch.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 3, 64])
    """
    is_plain = attn_mask is None and not dropout_p and takes(query, key, value)
    if is_plain and attends(query, key, value, is_causal, enable_gqa):
        return _bnhd(query, key, value, is_causal, scale).transpose(1, 2)
    more: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)


def _bnhd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None,
          score: Score | None = None, mask: Mask | None = None, deterministic: bool = True) -> Any:
    """Attention of (batch, heads, rows, head size), as (batch, rows, heads, head size), which is then contiguous."""
    return causal_or_plain(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal, scale, score, mask,
                           deterministic)


#: The name of gemmkit's attention among those of transformers.
NAME = "gemmkit"


def attention_of_transformers(module: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                              attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                              is_causal: bool | None = None, **keywords: Any) -> tuple[Any, None]:
    """What transformers calls: (batch, heads, rows, head size) to (batch, rows, heads, head size). It computes what
    transformers' "sdpa" computes, and leaves masks, dropout and biases to that."""
    queries, stored = query.shape[2], getattr(key, "_gemmkit_stored", None)
    causal = queries > 1 and attention_mask is None and (
        getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if stored is not None:                              # of a KVCache, which has all of its keys and their number
        if not stored.is_current:
            raise ValueError("keys of a KVCache are read after tokens have been appended; read them in the step that "
                             "returned them")
        if attention_mask is None and not dropout and takes(query) and all(
                keywords.get(name) is None for name in ("position_bias", "softcap")):
            return stored.attention(query.transpose(1, 2), bool(causal), scaling), None
        key, value = stored.plain()
        if causal and key.shape[2] != queries:
            raise ValueError(f"{queries} queries see {key.shape[2]} keys of a KVCache without a mask; give the model an "
                             "attention_mask of all keys")
    bias, plain = keywords.get("position_bias"), attention_mask is None and not dropout and keywords.get("softcap") is None
    if plain and isinstance(bias, torch.Tensor) and not causal and not torch.compiler.is_compiling() and not records(bias):
        shape = 1, query.shape[1], queries, key.shape[2]            # of each head; T5 adds it to the scores
        if bias.shape == shape and takes(query, key, value, bias) and attends(query, key, value, False, True):
            return _bnhd(query, key, value, False, scaling, ScoreBias(bias.detach()[0])), None
    padding: Mask | None = getattr(attention_mask, "_gemmkit_padding", None)
    if padding is not None and not dropout and bias is None and keywords.get("softcap") is None and not records(
            query, key, value) and takes(query, key, value) and attends(query, key, value, False, True):
        return _bnhd(query, key, value, False, scaling, None, padding), None
    if plain and bias is None:
        cut = bool(causal) and key.shape[2] > queries   # an empty static cache: rows behind the queries hold nothing yet
        k, v = (key[:, :, :queries], value[:, :, :queries]) if cut else (key, value)
        if takes(query, k, v) and attends(query, k, v, bool(causal), True):
            return _bnhd(query, k, v, bool(causal), scaling, deterministic=keywords.get("deterministic") is not False), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: tuple[Any, None] = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout,
                                                     scaling=scaling, is_causal=is_causal, **keywords)
    return found


def register_attention() -> None:
    """Make gemmkit's attention known to transformers, with the masks of "sdpa": None where a mask is plainly causal.

    Raises ImportError for a transformers that has no interface of attention functions (before 4.53).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_of_transformers)
    AttentionMaskInterface.register(NAME, mask_of_transformers)


def mask_of_transformers(*args: Any, **said: Any) -> torch.Tensor | None:
    """The mask of "sdpa", and none for one query that sees all keys. transformers leaves that out, too, but not in a graph
    that is captured or compiled (5.17), where a mask would keep gemmkit from reading a `KVCache`."""
    from transformers.masking_utils import sdpa_mask

    queries = said["q_length"] if "q_length" in said else len(said.get("cache_position", ()))
    local = said.get("local_size")
    if (not args and queries == 1 and said.get("allow_is_causal_skip", True) and said.get("attention_mask") is None
            and (local is None or said["kv_length"] < local)):
        return None
    found: torch.Tensor | None = sdpa_mask(*args, **said)
    if found is not None and not torch.compiler.is_compiling() and (padding := _padding(found, said)) is not None:
        found._gemmkit_padding = padding
    return found


def _padding(found: torch.Tensor, said: dict[str, Any]) -> Mask | None:
    """A mask of "sdpa" of all keys of a batch, as one of gemmkit's; None if it hides anything but padding and later keys."""
    from transformers import masking_utils

    seen, function = said.get("attention_mask"), said.get("mask_function", masking_utils.causal_mask_function)
    causal = function is masking_utils.causal_mask_function
    if not isinstance(seen, torch.Tensor) or seen.dim() != 2 or said.get("local_size") is not None or not (
            causal or function is getattr(masking_utils, "bidirectional_mask_function", None)):
        return None
    if seen.shape != (found.shape[0], found.shape[-1]) or any(said.get(name) for name in ("q_offset", "kv_offset")) or (
            causal and found.shape[-1] != found.shape[-2]):
        return None
    mask = Padding.of(seen)
    return mask & Causal() if causal else mask


# --------------------------------------------------------------------------------------------------
# Rotary embeddings: transformers' attention turns queries and keys by a function of its module.

@program
def turned(x: Parameter, y: Parameter, cos_x: Parameter, sin_x: Parameter, cos_y: Parameter, sin_y: Parameter,
           u: Parameter, v: Parameter) -> None:
    """Rows of two halves, turned by an angle of each place and column (Su et al., "RoFormer", 2021, eq. 34)."""
    for b, h, m in gp.parallel(*x.counts, x.rows):
        u[b, h, m] = x[b, h, m] * cos_x[b, m] - y[b, h, m] * sin_x[b, m]
        v[b, h, m] = y[b, h, m] * cos_y[b, m] + x[b, h, m] * sin_y[b, m]


class Rotation:
    """A model's function that turns queries and keys, each result rounded once: in one kernel where both are columns of one
    product, else in two. What else it is given, the model's own function turns."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: object,
                 **how: object) -> Any:
        if more or how or not self._takes(q, k, cos, sin):
            return self.function(q, k, cos, sin, *more, **how)
        if len(q) != len(cos):
            cos, sin = cos.expand(len(q), -1, -1), sin.expand(len(q), -1, -1)
        both = _of_both(q, k)
        if both is None:
            return self._turned(q, cos, sin), self._turned(k, cos, sin)
        return self._turned(both, cos, sin).split((q.shape[1], k.shape[1]), 1)

    @staticmethod
    def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        (batch, heads, rows, size), half = x.shape, x.shape[-1] // 2
        out = x.new_empty((batch, rows, heads, size)).transpose(1, 2)          # as products store heads
        turned(x[..., :half], x[..., half:], cos[..., :half], sin[..., :half], cos[..., half:], sin[..., half:],
               out[..., :half], out[..., half:])
        return out

    @staticmethod
    def _takes(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        given = q, k, cos, sin
        if not all(type(x) is torch.Tensor and x.dtype == q.dtype and x.device == q.device and x.numel() for x in given):
            return False
        if not (q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3 and q.dtype in NARROW and is_here(q)):
            return False
        batch, _, rows, size = q.shape
        return (k.shape == (batch, k.shape[1], rows, size) and size % 2 == 0 and cos.shape == sin.shape
                and tuple(cos.shape) in ((batch, rows, size), (1, rows, size)) and is_eager(given) and not records(*given))


def _of_both(q: torch.Tensor, k: torch.Tensor) -> Any:
    """The heads of q and of k as one tensor, a view; None where they do not follow each other in memory."""
    (batch, heads, rows, size), more = q.shape, k.shape[1]
    step = q.stride(0), size, q.stride(2), 1
    if any(x.shape[n] != 1 and x.stride(n) != step[n] for n in range(4) for x in (q, k)) or (
            k.data_ptr() != q.data_ptr() + heads * size * q.element_size()
            or k.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()):
        return None
    return q.as_strided((batch, heads + more, rows, size), step)


class _Names(dict):                                                           # type: ignore[type-arg]
    """A module's global names, as they are at any time, but for some."""

    def __init__(self, names: dict[str, Any], **own: object):
        super().__init__(own, __builtins__=names["__builtins__"])
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


_ROTATION = "apply_rotary_pos_emb"


def turning(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The method of transformers' attention whose global function `_ROTATION` is a `Rotation`; None where it calls none, or
    one that turns in another way, such as neighbouring columns."""
    if not isinstance(forward, FunctionType) or _ROTATION not in forward.__code__.co_names:
        return None
    return _turning(forward, forward.__globals__.get(_ROTATION))


@lru_cache(maxsize=256)
def _turning(forward: FunctionType, function: Callable[..., Any]) -> Callable[..., Any] | None:
    drawn = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(shape, generator=drawn, device="cpu")
                      for shape in ((2, 3, 5, 8), (2, 2, 5, 8), (2, 5, 8), (2, 5, 8)))
    with torch.no_grad():
        try:
            found = function(q, k, cos, sin)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return None
    wanted = [x * cos[:, None] + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin[:, None] for x in (q, k)]
    if not isinstance(found, tuple) or len(found) != 2 or not all(
            isinstance(y, torch.Tensor) and y.shape == x.shape and torch.allclose(y, x, atol=1e-5)
            for x, y in zip(wanted, found)):
        return None
    names = _Names(forward.__globals__, **{_ROTATION: Rotation(function)})
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
