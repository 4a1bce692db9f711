"""``gemmkit::product``: the product of two matrices as an operator of PyTorch's, whose derivative is two of its kind.

    D = A B,   dA = dD B^H,   dB = A^H dD

An operand is plain or has a form (`gemmkit.torch.product`), and may be conjugated as it is loaded. The derivative of a
product is of the same kind in all of these, so that one operator has derivatives of every order. Source: Giles,
"Collected matrix derivative results for forward and reverse mode algorithmic differentiation", 2008.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree

from gemmkit import layouts
from gemmkit.blas import CONJUGATE
from gemmkit.emulator import current_mode
from gemmkit.functions.matmul import Door, matmul
from gemmkit.layouts import matrices

# --------------------------------------------------------------------------------------------------
# What a tensor is as an operand: a plain matrix, or what is stored of a matrix with structure.
#
# A form is a word, so that it can be an argument of an operator of PyTorch's. The gradient of what is stored follows from
# that of the matrix (G): the diagonal of G; the half of G; for a symmetric matrix the half of G + G^T, whose diagonal
# counts once.

PLAIN = "plain"
#: The forms, and what makes a matrix of an array.
FORMS: dict[str, Callable[[Any], Any]] = {
    PLAIN: lambda x: x,
    "diagonal": matrices.DiagonalMatrix,
    "lower": lambda x: matrices.TriangularMatrix(x, "lower"),
    "upper": lambda x: matrices.TriangularMatrix(x, "upper"),
    "unit lower": lambda x: matrices.TriangularMatrix(x, "lower", unit=True),
    "unit upper": lambda x: matrices.TriangularMatrix(x, "upper", unit=True),
    "symmetric lower": lambda x: matrices.SymmetricMatrix(x, "lower"),
    "symmetric upper": lambda x: matrices.SymmetricMatrix(x, "upper"),
}
_TRANSPOSED = {"lower": "upper", "upper": "lower", "unit lower": "unit upper", "unit upper": "unit lower"}


def check_form(form: str, name: str) -> None:
    if form not in FORMS:
        raise ValueError(f"{name}={form!r}: one of {', '.join(map(repr, FORMS))} is needed")


def form_of(made: Any, name: str) -> str:
    """The form of what a user's ``a=`` or ``b=`` makes of tensors: None, or a function that gives a matrix with structure,
    such as `gemmkit.layouts.TriangularMatrix`."""
    if made is None:
        return PLAIN
    for shape in ((1, 1), (1,)):
        try:
            found = made(np.zeros(shape, np.float32))
        except ValueError:
            continue
        except TypeError as error:
            raise TypeError(f"{name}={made!r}: {error}; None or a function that makes a matrix with structure of an array "
                            "is needed, such as gemmkit.layouts.TriangularMatrix") from None
        if isinstance(found, matrices.Matrix) and found.condition(name) is not None:
            raise TypeError(f"{name}={made!r} makes a {type(found).__name__}, whose mask an operator of PyTorch does "
                            "not take; give it to gemmkit.matmul")
        return form_of_layout(found.layout if isinstance(found, matrices.Matrix) else None, name)
    raise TypeError(f"{name}={made!r} takes neither a matrix nor a vector")


def form_of_layout(layout: Any, name: str) -> str:
    """The form of an operand of a layout; raises TypeError for a layout that has no form."""
    kind = type(layout)
    if kind in (layouts.RowMajor, layouts.ColMajor):
        return PLAIN
    if kind is layouts.Diagonal:
        return "diagonal"
    if kind is layouts.Triangular and layout.nothing == 0:
        return f"{'unit ' if layout.unit else ''}{layout.half}"
    if kind is layouts.Symmetric:
        return f"symmetric {layout.half}"
    raise TypeError(f"{name}: {layout!r} has no form known to gemmkit.torch; plain matrices, Diagonal, Triangular and "
                    "Symmetric have (gemmkit.torch.glu records a gated unit)")


def matrix_of(x: torch.Tensor, form: str) -> Any:
    """The array as the matrix that a product takes."""
    return FORMS[form](x)


def own_ndim(form: str | None) -> int:
    """How many dimensions a matrix of this form has in its tensor; those before are a stack's."""
    return 1 if form == "diagonal" else 2


def shape_of(x: torch.Tensor, form: str, name: str) -> tuple[Any, ...]:
    """The shape of the matrix, or the stack of them, that a tensor is. Raises ValueError where it is none."""
    if form == "diagonal":
        if x.dim() < 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; the diagonal of a matrix is a vector")
        return *x.shape, x.shape[-1]
    if x.dim() < 2:
        raise ValueError(f"{name} has {x.dim()} dimensions; a matrix of 2 is needed (a vector v: v[:, None] or v[None, :])")
    if form.startswith("symmetric") and x.shape[-2] != x.shape[-1]:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; a symmetric matrix is square")
    return tuple(x.shape)


def transposed(x: Any, form: str) -> tuple[Any, str]:
    """What is stored of the transpose, and its form; nothing is copied."""
    if form == "diagonal" or form.startswith("symmetric"):
        return x, form
    return x.mT, _TRANSPOSED.get(form, form)


def gradient_of_stored(gradient: torch.Tensor, form: str) -> Any:
    """The gradient of what is stored, from that of the matrix."""
    if form == PLAIN:
        return gradient
    if form == "diagonal":
        return torch.diagonal(gradient, dim1=-2, dim2=-1)
    half = torch.tril if form.endswith("lower") else torch.triu
    if form.startswith("symmetric"):
        strictly = -1 if form.endswith("lower") else 1
        return half(gradient) + half(gradient.mT, strictly)
    strictly = 0 if not form.startswith("unit") else -1 if form.endswith("lower") else 1
    return half(gradient, strictly)


# --------------------------------------------------------------------------------------------------
# ``torch.func.vmap`` of operators: a batch is one more dimension of a stack of products, and one launch.
#
# Where an operand cannot have that (an array that all products share) there is a launch for each of the batch.

def batched_by(operator: Callable[..., Any], size: int, in_dims: Sequence[int | None], tensors: Sequence[Any],
               cores: Sequence[int | None], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """The operator of a batch, and where the batch lies in each result: in front.

    ``cores`` is how many dimensions of each tensor are one product's, None where a stack cannot have one for each product.
    """
    batched = [n for n, (dim, x) in enumerate(zip(in_dims, tensors)) if dim is not None and x is not None]
    if any(cores[n] is None for n in batched):
        return _one_after_the_other(operator, size, in_dims, tensors, batched, keywords)

    def stack_ndim(n: int) -> int:
        return int(tensors[n].dim()) - (n in batched) - (cores[n] or 0)

    most = max(stack_ndim(n) for n, x in enumerate(tensors) if x is not None and cores[n] is not None)
    given = list(tensors)
    for n in batched:
        x, missing = tensors[n].movedim(in_dims[n], 0), most - stack_ndim(n)
        given[n] = x[(slice(None), *(None,) * missing)]
    if not {0, 1}.intersection(batched):                   # the stack is that of A and B
        given[0] = tensors[0].expand(size, *(1,) * (most - stack_ndim(0)), *tensors[0].shape)
    found = operator(*given, **keywords)
    return found, (0,) * len(found) if isinstance(found, tuple) else 0


def _one_after_the_other(operator: Callable[..., Any], size: int, in_dims: Sequence[int | None], tensors: Sequence[Any],
                         batched: Sequence[int], keywords: dict[str, Any]) -> tuple[Any, Any]:
    made = [operator(*(x if n not in batched else x.select(in_dims[n], one) for n, x in enumerate(tensors)), **keywords)
            for one in range(size)]
    if not isinstance(made[0], tuple):
        return torch.stack(made), 0
    return tuple(torch.stack(found) for found in zip(*made)), (0,) * len(made[0])


# --------------------------------------------------------------------------------------------------
# What gemmkit computes of a model: tensors of a GPU, and of the CPU in the emulator; nodes of compilers' graphs.

NARROW = torch.float16, torch.bfloat16
DATA = torch.Tensor, torch.nn.Parameter


def _emulated() -> bool:
    return current_mode() is not None


_is_emulated = torch.compiler.assume_constant_result(_emulated)


def is_here(x: torch.Tensor) -> bool:
    """Whether gemmkit computes tensors of x's device: a GPU's, and the CPU's in the emulator."""
    return bool(x.is_cuda or (x.is_cpu and _is_emulated()))


def is_measured(x: torch.Tensor) -> bool:
    """Whether it is known of x's GPU which of gemmkit's kernels are faster than PyTorch's: a Hopper's; or the emulator's."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) == (9, 0)


def node_of(graph: torch.fx.Graph, target: Callable[..., Any] | str, args: tuple[Any, ...],
            options: dict[str, Any] | None = None, like: torch.Tensor | None = None, key: str = "val") -> Any:
    """A call in a graph of ``torch.fx``, with the value that compilers know each node by, in its ``meta[key]``. ``like`` is
    such a value, for a call without tensors."""
    options = options or {}
    node = getattr(graph, "call_method" if isinstance(target, str) else "call_function")(target, args, options)
    given = torch.fx.node.map_arg((args, options), lambda x: x.meta.get(key))
    function = getattr(torch.Tensor, target) if isinstance(target, str) else target
    fake = next((x.fake_mode for x in _pytree.tree_leaves((given, like)) if hasattr(x, "fake_mode")), nullcontext())
    with fake:
        node.meta[key] = function(*given[0], **given[1])
    return node


# --------------------------------------------------------------------------------------------------
# Operators of ``torch.library``: what all of gemmkit's have in common.

_NAME = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)?")


def qualified(name: object) -> str:
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
    def allocated(*args: object, **options: object) -> object:
        _call_from_graphs(operator)
        return allocate(*args, **options)

    torch.library.define(name, schema, tags=torch.Tag.needs_exact_strides)
    torch.library.impl(name, ("cpu", "cuda"), compute)
    torch.library.register_fake(name, allocated)
    namespace, own = name.split("::")
    operator: Any = getattr(getattr(torch.ops, namespace), own).default
    operator.compute = compute
    return operator


def _call_from_graphs(operator: torch._ops.OpOverload) -> None:
    """Have Inductor's graphs call an operator's ``compute``, as they call Inductor's own extern kernels. Graphs record
    nothing, and PyTorch's dispatcher and its autograd of operators would take 14 us of 20.

    A fake call tells Inductor, which takes 1 s to load, and makes one before it asks how an operator is called. The
    operator's tag then says which strides tensors must have."""
    inductor = sys.modules.get("torch._inductor.lowering")
    if inductor is None or operator in inductor.lowerings:
        return
    called = inductor.fallback_handler(operator)

    def lowered(*args: object, **options: object) -> object:
        graph = inductor.V.graph
        before, found = len(graph.operations), called(*args, **options)
        for made in graph.operations[before:] if not (graph.cpp_wrapper or graph.fx_wrapper) else ():
            if getattr(made, "op_overload", None) is operator:
                made.python_kernel_name += ".compute"
        return found

    inductor.lowerings[operator] = lowered


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
        torch.library.register_vmap(operator, lambda info, *args, **options: rule(info.batch_size, *args, **options))
        arguments = operator._schema.arguments
        self._defaults = {x.name: x.default_value for x in arguments if x.kwarg_only}
        count, names = len(arguments) - len(self._defaults), tuple(self._defaults)
        self._recorded = _function(self, count, names, backward, setup, rule)
        self._eager = _eager_function(compute, count, self._defaults, setup, self._recorded.gradients)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if is_eager(args):
            if torch.is_grad_enabled() and any(type(x) in DATA and x.requires_grad for x in args):
                return self._eager.apply(*args, *(options.get(name, default) for name, default in self._defaults.items()))
            return self._compute(*args, **options)
        if _transforms():
            return self._recorded.apply(*args, *{**self._defaults, **options}.values())
        return self.operator(*args, **options)


def keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object,
         keyword_only_inputs: dict[str, Any] | None = None) -> None:
    """The ``setup`` of an operator whose gradients need its tensors and keywords."""
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def derived(first: Callable[..., Any]) -> tuple[Callable[..., None], Callable[..., None]]:
    """``backward`` and ``setup`` of an operator that computes gradients: second derivatives. ``first`` computes what the
    operator computes, with operators that have derivatives. It is called with the operator's tensors and keywords when a
    second derivative is asked for, and returns results of any dtype."""
    def setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any],
              output: object) -> None:
        ctx.set_materialize_grads(False)
        keep(ctx, inputs, output, keyword_only_inputs)

    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor | None) -> Any:
        inputs, given = ctx.saved_tensors, {n: grad for n, grad in enumerate(grads) if grad is not None}
        wanted = [n for n in range(len(inputs)) if ctx.needs_input_grad[n]]
        if not wanted or not given:
            return (None,) * len(inputs)

        def of_wanted(*some: torch.Tensor) -> tuple[Any, ...]:
            args = {**dict(enumerate(inputs)), **dict(zip(wanted, some))}
            found = first(*args.values(), **ctx.options)
            return tuple((found if isinstance(found, tuple) else (found,))[n] for n in given)

        with torch.autocast(inputs[0].device.type, enabled=False):
            found, pull = torch.func.vjp(of_wanted, *(inputs[n] for n in wanted))
            second = dict(zip(wanted, pull(tuple(grad.to(y.dtype) for grad, y in zip(given.values(), found)))))
        return tuple(second.get(n) for n in range(len(inputs)))

    return backward, setup


_transforms = torch._C._are_functorch_transforms_active
_dispatching, _overriding = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_tracing, _profiling = torch._C._get_tracing_state, torch.autograd._profiler_enabled
_overridden = torch._C._has_torch_function
casting = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def is_looked_at() -> bool:
    """Whether anything but autograd looks at calls: a transform, mode, tracer, compiler or profiler."""
    return (torch.compiler.is_compiling() or _transforms() or _dispatching() or _overriding() or _tracing() is not None
            or _profiling() or forward_ad._current_level >= 0)


def is_eager(args: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd looks at a call (`is_looked_at`), of no subclass of tensors, and of no tensor without
    data or whose data stand for others (lazily conjugated)."""
    if is_looked_at() or _overridden(args):
        return False
    for x in args:
        if type(x) in DATA:
            if not (x.is_cuda or x.is_cpu) or x.is_conj() or x.is_neg():
                return False
        elif isinstance(x, torch.Tensor):
            return False
    return True


def known(door: Door, rest: Any, tensors: tuple[Any, ...], is_cast: bool = False, recorded: tuple[Any, ...] = ()) -> Any:
    """The result of a call that is known, at which nothing but autograd looks and which casts nothing (or has cast, where it
    ``is_cast``); None for one that has to be looked at. One that autograd records is `record` of ``recorded``."""
    if is_looked_at() or (casting() and not is_cast):          # a compiler would have its graphs ask all that follows
        return None
    is_recorded = False
    for x in tensors:
        if type(x) not in DATA:
            return None
        is_recorded = is_recorded or x.requires_grad
    if is_recorded and torch.is_grad_enabled():
        try:
            return record(*recorded) if recorded else None
        except Unknown:
            return None
    return door.again(rest, tensors)


def _own(output: object) -> Any:
    """The memory of a result that is a view as a tensor that is none: PyTorch lets nobody write to the view of a function of
    autograd, as ``y += x`` does."""
    if not isinstance(output, torch.Tensor) or not output._is_view():
        return output
    return output.new_empty(0).set_(output)


def _eager_function(compute: Callable[..., Any], count: int, defaults: dict[str, Any],
                    setup: Callable[..., None], gradients: Callable[..., Any]) -> Any:
    """The autograd function of eager calls. Saved with the forward pass: a `setup_context` of its own takes 5 us more."""
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, *args: object) -> Any:
            if not defaults:
                output = _own(compute(*args))
                setup(ctx, inputs=args, output=output)
                return output
            options = dict(zip(defaults, args[count:]))
            output = _own(compute(*args[:count], **{name: x for name, x in options.items() if x != defaults[name]}))
            setup(ctx, inputs=args[:count], output=output, keyword_only_inputs=options)
            return output

        backward = staticmethod(gradients)

    return Eager


def _function(call: Differentiable, count: int, names: tuple[str, ...], backward: Callable[..., Any],
              setup: Callable[..., None], rule: Callable[..., Any]) -> Any:
    """The autograd function of an operator of ``count`` arguments, and of the keywords ``names``, which come behind them."""
    def options(args: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(names, args[count:]))

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(*args: object) -> Any:
            return call(*args[:count], **options(args))

        @staticmethod
        def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
            setup(ctx, inputs=inputs[:count], output=output, **({"keyword_only_inputs": options(inputs)} if names else {}))

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: object) -> Any:
            return Recorded.gradients(_Alive(ctx), *grads)

        @staticmethod
        def gradients(ctx: torch.autograd.function.FunctionCtx | _Alive, *grads: object) -> Any:
            found = backward(ctx, *grads)
            return (*(found if isinstance(found, tuple) else (found,)), *(None for _ in names))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return rule(info.batch_size, in_dims[:count], *args[:count], **options(args))

    return Recorded


class _Alive:
    """The context of a transform's function. Behind the transform, which `torch.func.vjp` leaves before it pulls back, saved
    tensors are wrappers without memory: here they are what these wrapped."""

    def __init__(self, ctx: torch.autograd.function.FunctionCtx):
        self._ctx: Any = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(x if x is None else torch._C._functorch.unwrap_if_dead(x) for x in self._ctx.saved_tensors)


_SCHEMA = ('(Tensor a, Tensor b, *, str a_form="plain", str b_form="plain", bool conj_a=False, bool conj_b=False, '
           "ScalarType? dtype=None, str? mapping=None) -> Tensor")


def result_shape(a: torch.Tensor, b: torch.Tensor, a_form: str, b_form: str) -> tuple[Any, ...]:
    """The shape of A B. Raises ValueError, naming both, where they do not fit each other."""
    of_a, of_b = shape_of(a, a_form, "a"), shape_of(b, b_form, "b")
    if of_a[-1] != of_b[-2]:
        raise ValueError(f"a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}: a has {of_a[-1]} columns and b "
                         f"{of_b[-2]} rows; both must be K")
    if len(of_a) == 2 or len(of_b) == 2:                    # (`broadcast_shapes` takes 10 us for nothing)
        return (*of_a[:-2], *of_b[:-2], of_a[-2], of_b[-1])
    try:
        stack = torch.broadcast_shapes(of_a[:-2], of_b[:-2])
    except RuntimeError:
        raise ValueError(f"a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}: the stacks {tuple(of_a[:-2])} and "
                         f"{tuple(of_b[:-2])} cannot be broadcast together") from None
    return (*stack, of_a[-2], of_b[-1])


def autocast(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """Operands as ``torch.autocast`` casts those of ``torch.matmul``: floating-point ones to its dtype, except float64. None
    stays None; outside ``torch.autocast`` all stay as they are."""
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x is None or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type != kind
                 else x.to(dtype) for x in tensors)


def check_dtypes(a: Any, **others: Any) -> None:
    """Raise TypeError for operands of several dtypes, as PyTorch does: a forgotten cast would cost speed or digits."""
    for name, x in others.items():
        if x is not None and x.dtype != a.dtype:
            raise TypeError(f"a has dtype {a.dtype} and {name} has dtype {x.dtype}; operands must have one dtype: convert "
                            "one with .to(), or compute under torch.autocast")


def check_together(a: Any, **others: Any) -> None:
    """Raise ValueError for tensors that are not all on a's device."""
    for name, x in others.items():
        if x is not None and x.device != a.device:
            raise ValueError(f"{name} is on {x.device} and a on {a.device}; all operands of a product must be on one device")


def result_dtype(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None) -> Any:
    """``dtype``, or where it is None that which holds a's and b's. Raises TypeError for a real one of a complex product."""
    common = torch.promote_types(a.dtype, b.dtype)
    if dtype is not None and common.is_complex and not dtype.is_complex:
        raise TypeError(f"dtype={dtype}: the product of {a.dtype} and {b.dtype} is complex, and its imaginary part would be "
                        "lost; use a complex dtype, or .real of the result")
    return common if dtype is None else dtype


def _compute(a: torch.Tensor, b: torch.Tensor, *, a_form: str = PLAIN, b_form: str = PLAIN, conj_a: bool = False,
             conj_b: bool = False, dtype: torch.dtype | None = None, mapping: str | None = None) -> Any:
    if a_form == b_form == PLAIN and dtype is mapping is None and not (conj_a or conj_b):
        found = products.again(None, (a, b))               # known calls make the result themselves
        if found is not None:
            return found
        if a.dtype == b.dtype and a.dtype in KEPT and min(a.dim(), b.dim()) >= 2 and a.shape[-1] == b.shape[-2]:
            return products(None, (a, b), None, None, lambda: (a, b, {}))
    out = _allocate(a, b, a_form=a_form, b_form=b_form, dtype=dtype)
    more: dict[str, Any] = {} if mapping is None else {"mapping": mapping}
    for name, conjugated, x in (("a", conj_a, a), ("b", conj_b, b)):
        if conjugated and x.is_complex():
            more[f"transform_global_to_shared_{name}"] = CONJUGATE
    matmul(matrix_of(a, a_form), matrix_of(b, b_form), out=out, **more)
    return out


def _allocate(a: torch.Tensor, b: torch.Tensor, *, a_form: str = PLAIN, b_form: str = PLAIN, conj_a: bool = False,
              conj_b: bool = False, dtype: torch.dtype | None = None, mapping: str | None = None) -> Any:
    """The result, uninitialised: what the operator makes of tensors that have no data."""
    check_form(a_form, "a_form")
    check_form(b_form, "b_form")
    check_together(a, b=b)
    return a.new_empty(result_shape(a, b, a_form, b_form), dtype=result_dtype(a, b, dtype))


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    options = {name: x for name, x in ctx.options.items() if name not in ("dtype", "mapping")}
    return gradients(grad, a, b, ctx.needs_input_grad[:2], **options)


def gradients(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, needed: tuple[bool, ...], a_form: str = PLAIN,
              b_form: str = PLAIN, conj_a: bool = False, conj_b: bool = False) -> tuple[Any, Any]:
    """The gradients of A and B, from that of A B; None where ``needed`` is false.

    Each has its operand's dtype. The product of a gradient and an operand of two dtypes is of their common one: by that
    nothing is rounded.
    """
    of_a = of_b = None
    if needed[0]:
        turned, form = transposed(b, b_form)
        # conj(dD (B')^H), as A' = conj(A): both factors are conjugated where A is
        of_a = _like(a, a_form, grad, turned, PLAIN, form, conj_a, conj_b == conj_a)
    if needed[1]:
        turned, form = transposed(a, a_form)
        of_b = _like(b, b_form, turned, grad, form, PLAIN, conj_a == conj_b, conj_b)
    return of_a, of_b


def _like(operand: torch.Tensor, operand_form: str, a: torch.Tensor, b: torch.Tensor, a_form: str, b_form: str, conj_a: bool,
          conj_b: bool) -> Any:
    """The gradient of what is stored of an operand, of its shape and dtype: a product of a and b."""
    if (a_form == b_form == operand_form == PLAIN and operand.dim() == a.dim() == b.dim() == 2
            and a.dtype == b.dtype == operand.dtype and not operand.is_complex()):      # no view more than it needs
        return product(b.mT, a.mT).mT if _lies_in_columns(operand) else product(a, b)
    a, b = _of_one_dtype(a, b)
    if operand_form == PLAIN and operand.dim() == 2:
        a, b = _folded(a, b, a_form, b_form, operand)
    if operand_form == PLAIN and operand.dim() > 1 and _lies_in_columns(operand):   # so does the gradient: no copy
        (a, a_form), (b, b_form) = transposed(a, a_form), transposed(b, b_form)
        found = product(b, a, b_form, a_form, conj_b, conj_a).mT
    else:
        found = product(a, b, a_form, b_form, conj_a, conj_b)
    stored = gradient_of_stored(found, operand_form)
    if not operand.is_complex() and stored.is_complex():
        stored = stored.real
    return summed_to(stored, operand.shape).to(operand.dtype)


def _of_one_dtype(a: torch.Tensor, b: torch.Tensor) -> tuple[Any, Any]:
    """The factors of a gradient in the dtype that holds both."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _folded(a: torch.Tensor, b: torch.Tensor, a_form: str, b_form: str, operand: torch.Tensor) -> tuple[Any, Any]:
    """The factors of the gradient of one matrix that was multiplied with a stack: a sum over the stack is one long K,
    where views can say so."""
    if a.dim() < 3 or a.shape[:-2] != b.shape[:-2] or a_form != PLAIN or b_form != PLAIN:
        return a, b
    try:
        return a.mT.view(-1, a.shape[-2]).mT, b.view(-1, b.shape[-1])
    except (RuntimeError, ValueError):                     # strides that one K does not have: a stack, summed up
        return a, b


def summed_to(x: Any, shape: Any, dtype: torch.dtype | None = None) -> Any:
    """A gradient summed over what was broadcast; in ``dtype``, where one is given: nothing of x is converted in memory."""
    if x.shape == shape:
        return x if dtype is None else x.to(dtype)
    if dtype is None:
        return x.sum_to_size(shape)
    first = x.dim() - len(shape)
    along = [n for n in range(x.dim()) if n < first or (shape[n - first] == 1 and x.shape[n] != 1)]
    return x.sum(along, keepdim=True, dtype=dtype).reshape(shape)


def product(a: torch.Tensor, b: torch.Tensor, a_form: str = PLAIN, b_form: str = PLAIN, conj_a: bool = False,
            conj_b: bool = False, dtype: torch.dtype | None = None, mapping: str | None = None) -> Any:
    """A B by the operator ``gemmkit::product``, of (..., M, K) and (..., K, N)."""
    if a_form == b_form == PLAIN and dtype is mapping is None and not (conj_a or conj_b):
        if are_matrices(a, b) and a.shape[1] == b.shape[0] and is_eager((a, b)):
            if not records(a, b):
                return products(None, (a, b), None, None, lambda: (a, b, {}))
            return record(a, b, None, None, False, True)
        return _OPERATOR(a, b)                             # (the five by name take 2 us)
    return _OPERATOR(a, b, a_form=a_form, b_form=b_form, conj_a=conj_a, conj_b=conj_b, dtype=dtype, mapping=mapping)


products = Door()                      # of A and B alone


def are_matrices(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are matrices, of one dtype of `KEPT`."""
    return a.dim() == b.dim() == 2 and a.dtype == b.dtype and a.dtype in KEPT


def records(*tensors: torch.Tensor) -> bool:
    """Whether autograd records what is computed of tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operator: object) -> Any:
    """x W^T of matrices (`are_matrices`) that nothing but autograd looks at (`is_eager`), with the epilogue of an operator
    (`gemmkit.torch.op`; None: none), which adds ``bias`` and nothing more where a gradient is wanted."""
    if records(x, weight, bias):
        return record(x, weight, bias, operator, True, True)
    return _of_layer(x, weight, bias, operator)


layers = Door()                        # by the operator, of x, weight and bias


def _of_layer(x: Any, weight: Any, bias: Any, operator: Any) -> Any:
    """`layer` without autograd."""
    def described() -> tuple[Any, Any, dict[str, Any]]:
        return x, weight.mT, {} if operator is None else operator.keywords_of(() if bias is None else (bias,))

    return layers(operator, (x, weight) if bias is None else (x, weight, bias), None, None, described)


class _Eager(torch.autograd.Function):
    """A B of matrices, or a layer, whose B is stored by rows and whose operator adds a bias: what autograd runs is this
    alone, no view and no operator, and each gradient is one launch."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
                operator: object = None, is_layer: bool = False, is_checked: bool = False) -> Any:
        found = (layers.again(operator, (a, b) if bias is None else (a, b, bias)) if is_layer
                 else products.again(None, (a, b)) if a.dim() == b.dim() == 2 else None)       # (stacks are known, too)
        if found is None:
            if not is_checked:
                raise Unknown
            found = _of_layer(a, b, bias, operator) if is_layer else products(None, (a, b), None, None, lambda: (a, b, {}))
        ctx.save_for_backward(a, b)
        ctx.is_layer = is_layer
        return found

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        (of_a, of_b, *others), is_layer = ctx.needs_input_grad, ctx.is_layer
        found = (_gradient(_of_a, is_layer, a, (grad, b), lambda: (grad, b if is_layer else b.mT)) if of_a else None,
                 _gradient(_of_b, is_layer, b, (grad, a), lambda: (grad.mT, a) if is_layer else (a.mT, grad))
                 if of_b else None)
        return *found, grad.sum(0) if True in others else None, None, None, None


class Unknown(Exception):
    """A call that is to be recorded has to be looked at: it was not known. Nothing has been launched."""


#: A B of matrices, or a `layer`'s ``(x, weight, bias, operator, True)``, recorded; raises `Unknown` for a call that is not
#: known, unless ``True`` behind these says that it has been looked at. What autograd functions do in front of this is for
#: tensors of transforms, and takes as long as a product's look-up.
record = super(torch.autograd.Function, _Eager).apply
_of_a, _of_b = Door(), Door()          # gradients, of the tensors that they are products of


def _gradient(door: Door, is_layer: bool, operand: torch.Tensor, tensors: tuple[torch.Tensor, torch.Tensor],
              factors: Callable[[], tuple[Any, Any]]) -> Any:
    """The gradient of an operand: a product, which lies as the operand does, so that nothing is copied where it adds up."""
    lies_in_columns = _lies_in_columns(operand)

    def described() -> tuple[Any, Any, dict[str, Any]]:
        a, b = factors()
        return (b.mT, a.mT, {}) if lies_in_columns else (a, b, {})

    if torch.is_grad_enabled():                                            # a gradient of the gradient is recorded, too
        found = product(*described()[:2])
    else:
        found = door((is_layer, lies_in_columns), tensors, None, None, described)
    return found.mT if lies_in_columns else found


def _lies_in_columns(operand: torch.Tensor) -> bool:
    return bool(operand.stride(-2) == 1 and operand.stride(-1) != 1)


def _in_batches(size: int, in_dims: tuple[Any, ...], a: torch.Tensor, b: torch.Tensor, **options: Any) -> tuple[Any, int]:
    cores = own_ndim(options.get("a_form")), own_ndim(options.get("b_form"))
    return batched_by(_OPERATOR, size, in_dims[:2], (a, b), cores, options)


#: Of whose products `gemmkit.matmul` makes results as the operator does, of the operands' own dtype.
KEPT = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


_OPERATOR = Differentiable(define("gemmkit::product", _SCHEMA, _compute, _allocate), _backward, keep, _in_batches, _compute)


# --------------------------------------------------------------------------------------------------
# What layers take.

def casts(x: torch.Tensor) -> bool:
    return bool(torch.is_autocast_enabled(x.device.type))


def takes(x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether a product of x and parameters is gemmkit's: of float16 or bfloat16, alike or cast by ``torch.autocast``.

    Products of float32 stay PyTorch's, whose setting says whether they may use TF32. Sharded parameters (``DTensor``) and
    other subclasses of tensors multiply in their own way.
    """
    if not isinstance(x, torch.Tensor) or not is_here(x) or not x.dim() or not x.numel():
        return False
    if casts(x):
        if x.dtype not in (*NARROW, torch.float32) or torch.get_autocast_dtype(x.device.type) not in NARROW:
            return False
        return all(p is None or (type(p) in DATA and p.dtype in (*NARROW, torch.float32) and p.device == x.device)
                   for p in parameters)
    return x.dtype in NARROW and all(p is None or (type(p) in DATA and p.dtype == x.dtype and p.device == x.device)
                                     for p in parameters)
