"""``op``: any product as an operator of ``torch.library``; ``gemmkit::fused``, whose epilogue is text; and ``conv``."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gemmkit import epilogues
from gemmkit.epilogues import Bias, Epilogue, Store, activations
from gemmkit.functions import conv as by_products
from gemmkit.functions.conv import Convolution, parameters
from gemmkit.functions.conv import result_shape as shape_of_convolution
from gemmkit.functions.matmul import Door, matmul
from gemmkit.functions.number_systems import select
from gemmkit.kernels.config import KEYWORDS, Config, check_fields
from gemmkit.lang.host import Numeric
from gemmkit.layouts import ColMajor, Discard, Gather, InterleavedColumns
from gemmkit.runtime.arrays import dtype_to_torch
from gemmkit.torch import product
from gemmkit.torch.autograd import Derivative, EpilogueRecipe
from gemmkit.torch.product import (
    KEPT,
    Differentiable,
    autocast,
    batched_by,
    check_dtypes,
    check_together,
    define,
    qualified,
    result_dtype,
    result_shape,
)


def op(conf: Config | None = None, *, name: str, epilogue: Any = None, a: torch.Tensor | None = None,
       b: torch.Tensor | None = None, dtype: torch.dtype | None = None, derivative: Callable[..., Any] | None = None,
       **components: Any) -> ProductOperator:
    """An operator of PyTorch's that computes D = A B + C by a configuration or by components.

    It has a fake kernel, so that ``torch.compile`` and ``torch.export`` see it whole; autograd; and ``torch.func.vmap``.

    Args:
        conf: a configuration of `gemmkit.get_config`; None chooses one for each call, as `gemmkit.matmul` does.
        name: ``"namespace::name"``, or a name in the namespace ``gemmkit``: it is then ``torch.ops.namespace.name``.
        epilogue: an epilogue, or a function of tensors that makes one. These tensors are operands of the operator, after a
            and b, and get gradients: ``epilogue=lambda bias: Bias(bias) | GELU()``.
        a, b: what makes a matrix with structure of the operand: `gemmkit.layouts.DiagonalMatrix`,
            `TriangularMatrix`, `SymmetricMatrix`, or a function such as
            ``lambda x: gemmkit.layouts.TriangularMatrix(x, "upper")``.
        dtype: the result's dtype. None takes that of conf or the epilogue if they name one, else C's if there is one, else
            PyTorch's promotion of a's and b's.
        derivative: ``derivative(x, *operands)``, a function of tensors. It returns the derivative of each element of D by
            the product's element x (..., M, N), or a tuple of it and the derivatives by the operands that it reads. None
            derives them from the epilogue's own code, with dual numbers.
        components: what `gemmkit.matmul` takes: ``operator``, ``transform_...``, ``condition``, ``mapping``.

    a and b have one dtype (TypeError), and ``torch.autocast`` casts all operands, unless ``conf`` or ``operator`` says what
    is multiplied.

    Returns:
        A `ProductOperator`: ``f(a, b, *operands, c=None)`` of tensors (..., M, K), (..., K, N), the operands and (M, N).
        What has no derivative computes nevertheless; a backward pass through it raises.

    Raises:
        ValueError: a name that is none, or taken.
        TypeError: an epilogue that uses its operands otherwise than as arrays; a component of another kind.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> from gemmkit.epilogues import Bias, ReLU
    >>> f = gk.torch.op(name="docs::biased", epilogue=lambda bias: Bias(bias) | ReLU())
    >>> bias = torch.tensor([1.0, -9.0], requires_grad=True)
    >>> with gk.emulate():
    ...     d = f(torch.ones(2, 3), torch.ones(3, 2), bias)
    ...     d.sum().backward()
    >>> d.tolist(), bias.grad.tolist()
    ([[4.0, 0.0], [4.0, 0.0]], [2.0, 0.0])
    """
    return ProductOperator(conf, name, epilogue, a, b, dtype, derivative, components)


class ProductOperator:
    """An operator made by `op`."""

    def __init__(self, conf: Config | None, name: str, epilogue: Epilogue | None, a: torch.Tensor, b: torch.Tensor,
                 dtype: torch.dtype | None, derivative: Callable[..., Any] | None, components: dict[str, Any]):
        if conf is not None and not isinstance(conf, Config):
            raise TypeError(f"conf={conf!r}: a configuration of gemmkit.get_config is needed")
        allowed = set(KEYWORDS) - {"epilogue", "gemm_shape", "order", "global_c_layout", "global_d_layout"}
        if unknown := set(components) - allowed:
            raise TypeError(f"op() got unknown keywords {', '.join(sorted(unknown))}; it takes {', '.join(sorted(allowed))}")
        operator = components.get("operator")
        check_fields({} if operator is None else {"operator": operator})
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={dtype!r}: a torch.dtype is needed")
        if derivative is not None and not callable(derivative):
            raise TypeError(f"derivative={derivative!r}: a function of the product's tensor and the operands is needed")
        self.name = qualified(name)
        self.conf, self.components, self.dtype = conf, components, dtype
        self.recipe = EpilogueRecipe.of(getattr(conf, "epilogue", None) if epilogue is None else epilogue)
        self._has_epilogue = epilogue is not None
        self._says_dtypes = conf is not None or operator is not None
        self._of_parameters: dict[tuple[int, ...], tuple[Epilogue, list[Any], list[Any]]] = {}
        self._constant: Epilogue | None = None if self.recipe.names else self.recipe.model
        self.forms = self._form("a", a), self._form("b", b)
        self._is_plain = (conf is None and dtype is None and not components and self.forms == (product.PLAIN, product.PLAIN)
                          and self.recipe.model.result_dtype is None)
        self.derivative = Derivative.of(conf, components, self.recipe, self.forms, derivative)
        self._define()
        _operators[self.name] = self

    def _form(self, name: str, made: object) -> str:
        layout = self.components.get(f"global_{name}_layout", getattr(self.conf, f"global_{name}_layout", None))
        if layout is None or made is not None:
            return product.form_of(made, name)
        return product.form_of_layout(layout, f"global_{name}_layout")

    def __call__(self, a: torch.Tensor, b: torch.Tensor, *operands: torch.Tensor, c: torch.Tensor | None = None) -> Any:
        """D of tensors; recorded where one of them requires a gradient."""
        if len(operands) != len(self.recipe.names):
            raise TypeError(f"{self.name} takes a, b{''.join(', ' + name for name in self.recipe.names)} and c=; got "
                            f"{len(operands)} operands after a and b")
        if not self._says_dtypes:
            (a, b, c), operands = (found := autocast(a, b, c, *operands))[:3], found[3:]
        return self.of_one_dtype(a, b, c, *operands)

    def of_one_dtype(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, *operands: torch.Tensor) -> Any:
        """`__call__` of tensors that need no cast, all of them given."""
        if self._keeping is not None and torch.is_grad_enabled():
            for x in (a, b, c, *operands):
                if x is not None and x.requires_grad:
                    return self._keeping(a, b, c, *operands)[0]
        return self._plain(a, b, c, *operands)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name: the process that unpickles it must have made an operator of this name."""
        return _named, (self.name,)

    def __repr__(self) -> str:
        return f"<torch operator {self.name}(a, b{''.join(', ' + name for name in self.recipe.names)}, c=None)>"

    # -- the operators of torch.library -----------------------------------------------------------------------------

    def _define(self) -> None:
        taken = {"a", "b", "c"}.intersection(self.recipe.names)
        if taken:
            raise TypeError(f"epilogue: its operand {taken.pop()} has the name of one of the product's; name it otherwise")
        given = "".join(f", Tensor {name}" for name in self.recipe.names)
        plain = define(self.name, f"(Tensor a, Tensor b, Tensor? c{given}) -> Tensor", self._compute, self._allocate)
        self._plain = Differentiable(plain, self._backward, self._setup,
                                     lambda *batch: self._in_batches(self._plain, *batch), self._compute)
        self._keeping: Any = None
        if self.derivative.keeps:
            keeping = define(f"{self.name}_keeping_{self.derivative.keeps}",
                             f"(Tensor a, Tensor b, Tensor? c{given}) -> (Tensor, Tensor)",
                             self._compute_keeping, self._allocate_keeping)
            self._keeping = Differentiable(keeping, self._backward_keeping, self._setup,
                                           lambda *batch: self._in_batches(self._keeping, *batch), self._compute_keeping)

    def _allocate(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, *operands: torch.Tensor) -> Any:
        check_together(a, b=b, c=c, **dict(zip(self.recipe.names, operands)))
        if not self._says_dtypes and self.dtype is None:
            check_dtypes(a, b=b)
        shape = result_shape(a, b, *self.forms)
        if c is not None and tuple(c.shape[-2:]) != tuple(shape[-2:]):
            raise ValueError(f"c has shape {tuple(c.shape)}; the result is {tuple(shape)}")
        if c is not None:
            shape = (*torch.broadcast_shapes(shape[:-2], c.shape[:-2]), *shape[-2:])
        common = torch.promote_types(a.dtype, b.dtype)
        dtype = result_dtype(a, b, self._result_dtype(common, c))
        if self.conf is not None and isinstance(self.conf.global_d_layout, ColMajor):
            return a.new_empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).mT
        return a.new_empty(shape, dtype=dtype)

    def _result_dtype(self, common: object, c: torch.Tensor | None) -> Any:
        """The dtype of D: what the definition says, else C's, else the operands' common one."""
        if self.dtype is not None:
            return self.dtype
        stated = self.recipe.model.result_dtype if self.conf is None else self.conf.global_d_layout.dtype
        if stated is not None:
            return dtype_to_torch(stated)
        return common if c is None else c.dtype

    def _allocate_keeping(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None,
                          *operands: torch.Tensor) -> tuple[Any, Any]:
        out = self._allocate(a, b, c, *operands)
        if self.derivative.keeps == "index":
            return out, a.new_empty(out.shape, dtype=torch.int32 if a.dtype.itemsize == 4 else torch.int64)
        return out, a.new_empty(out.shape, dtype=torch.promote_types(a.dtype, b.dtype))

    def _compute(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, *operands: torch.Tensor) -> Any:
        if (self._is_plain and c is None and a.dtype in KEPT and min(a.dim(), b.dim()) >= 2 and a.shape[-1] == b.shape[-2]
                and all(x.dtype == a.dtype for x in (b, *operands))):            # known calls make the result themselves
            return product.products(self, (a, b, *operands), None, None, lambda: (a, b, self.keywords_of(operands)))
        out = self._allocate(a, b, c, *operands)
        self._launch(a, b, c, out, self.epilogue_of(operands) if self._has_epilogue else None)
        return out

    def _compute_keeping(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None,
                         *operands: torch.Tensor) -> tuple[Any, Any]:
        out, kept = self._allocate_keeping(a, b, c, *operands)
        if self.derivative.keeps == "index":
            if c is not None:
                raise ValueError(f"c of {self.name}: what was there before may decide an element, which has no k; use the "
                                 "minimum or maximum of C and the product by PyTorch")
            select(a, b, operator=self.derivative.semiring, out=out, index=kept)
        else:
            self._launch(a, b, c, out, Store(kept) | self.epilogue_of(operands))
        return out, kept

    def keywords_of(self, operands: tuple[Any, ...]) -> dict[str, Any]:
        """What `gemmkit.matmul` takes, with these operands of the epilogue."""
        return {**self.components, "epilogue": self.epilogue_of(operands)} if self._has_epilogue else self.components

    def epilogue_of(self, operands: tuple[Any, ...]) -> Epilogue:
        """The epilogue with these operands; one of parameters is kept."""
        if self._constant is not None:
            return self._constant
        if not all(type(x) is torch.nn.Parameter for x in operands):
            return self._made_of(operands)
        key, state = tuple(map(id, operands)), [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in operands]
        known = self._of_parameters.get(key)
        if known is not None and known[1] == state:        # frozen before: 50 to 190 us less (`gemmkit.components`)
            return known[0]
        made = self._made_of(operands)
        forget = [weakref.ref(x, lambda _: self._of_parameters.pop(key, None)) for x in operands]
        self._of_parameters[key] = made, state, forget
        return made

    def _made_of(self, operands: tuple[Any, ...]) -> Epilogue:
        return self.recipe.make(*(x.detach() for x in operands))

    def _launch(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None,
                epilogue: Epilogue | None) -> None:
        of_a, of_b = a, b
        for name, form in zip("ab", self.forms):
            if form != product.PLAIN and f"global_{name}_layout" not in self.components and self.conf is None:
                of_a, of_b = ((product.matrix_of(of_a, form), of_b) if name == "a"
                              else (of_a, product.matrix_of(of_b, form)))
        more = self.components if epilogue is None else {**self.components, "epilogue": epilogue}
        matmul(of_a, of_b, c, self.conf, out=out, **more)

    # -- autograd ---------------------------------------------------------------------------------------------------

    def _setup(self, ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
        self.derivative.check(self.name)
        ctx.set_materialize_grads(False)
        a, b, c, *operands = inputs
        ctx.has_c = c is not None
        kept = output[1:] if isinstance(output, tuple) else ()
        ctx.save_for_backward(a, b, *(() if c is None else (c,)), *operands, *kept)

    def _saved(self, ctx: torch.autograd.function.FunctionCtx) -> tuple[Any, Any, Any, list[Any], list[Any]]:
        a, b, *more = ctx.saved_tensors
        c = more.pop(0) if ctx.has_c else None
        count = len(self.recipe.names)
        return a, b, c, more[:count], more[count:]

    def _backward(self, ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
        """Of a call that kept nothing (by ``torch.ops``, or within ``torch.func.vmap``): what is needed is computed anew."""
        a, b, c, operands, _ = self._saved(ctx)
        index = self._keeping(a, b, c, *operands)[1] if self.derivative.keeps == "index" else None
        return tuple(self.derivative(grad, None, index, a, b, c, operands, ctx.needs_input_grad))

    def _backward_keeping(self, ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor,
                          of_kept: torch.Tensor | None) -> tuple[Any, ...]:
        a, b, c, operands, (kept,) = self._saved(ctx)
        return tuple(self.derivative(grad, of_kept, kept, a, b, c, operands, ctx.needs_input_grad))

    # -- batches ----------------------------------------------------------------------------------------------------

    def _in_batches(self, operator: Differentiable, size: int, in_dims: tuple[Any, ...],
                    *tensors: torch.Tensor) -> tuple[Any, Any]:
        if self.conf is not None:
            cores: list[int | None] = [None] * len(tensors)
        else:
            cores = [*map(product.own_ndim, self.forms), 2, *map(self.recipe.own_ndim, range(len(self.recipe.names)))]
        return batched_by(operator, size, in_dims, tensors, cores, {})


_operators: dict[str, ProductOperator] = {}    # by name, each for as long as PyTorch has it: until the process ends


def _named(name: str) -> ProductOperator:
    if name not in _operators:
        raise ValueError(f"this process has no operator {name}; call gemmkit.torch.op(name={name!r}, ...) before unpickling")
    return _operators[name]


# --------------------------------------------------------------------------------------------------
# ``gemmkit::fused``: a product whose epilogue is text, for graphs that PyTorch keeps (`gemmkit.torch.lowering`).

aten = torch.ops.aten
Line = Callable[..., str]               # of a result, by the text of arguments


def _infix(sign: str) -> Line:
    return lambda x, y: f"{x} {sign} {y}"


def _call(name: str) -> Line:
    return lambda x: f"{name}({x})"


def _sum(sign: str) -> Line:
    return lambda x, y, alpha="1": f"{x} {sign} {y}" if alpha == "1" else f"{x} {sign} {y} * {alpha}"


def factors_apart(graph: torch.fx.Graph) -> None:
    """Compute the factor in front of ``add(x, y, alpha=...)`` before the sum, if x or y is a product that is PyTorch's:
    Inductor (2.13) makes them an addmm, and leaves the factor out."""
    for node in [x for x in graph.nodes if x.target is aten.add.Tensor and x.kwargs.get("alpha", 1) != 1]:
        x, y = node.args
        if any(getattr(one, "target", None) is aten.mm.default for one in (x, y)) and hasattr(y, "meta"):
            with graph.inserting_before(node):
                made = graph.call_function(aten.mul.Tensor, (y, node.kwargs["alpha"]))
            made.meta.update(y.meta)
            node.args, node.kwargs = (x, made), {}


def _power(x: str, exponent: str) -> str:
    known = {2.0: f"{x} * {x}", 3.0: f"{x} * {x} * {x}", 0.5: f"math.sqrt({x})", -1.0: f"1 / {x}",
             -0.5: f"1 / math.sqrt({x})"}
    if float(exponent.strip("()")) not in known:
        raise ValueError(f"a power of {exponent}")
    return known[float(exponent.strip("()"))]


def _clamped(x: str, low: str = "", high: str = "") -> str:
    above = f"maximum({x}, {low})" if low else x
    return f"minimum({above}, {high})" if high else above


def _gelu(x: str, *, approximate: str = "none") -> str:
    return f"{'gelu' if approximate == 'none' else 'gelu_tanh'}({x})"


#: The operations, and the text of their results by that of their arguments.
LINES: dict[Any, Line] = {
    aten.add.Tensor: _sum("+"), aten.add.Scalar: _sum("+"), aten.sub.Tensor: _sum("-"), aten.sub.Scalar: _sum("-"),
    aten.rsub.Scalar: lambda x, y: f"{y} - {x}",
    aten.mul.Tensor: _infix("*"), aten.mul.Scalar: _infix("*"), aten.div.Tensor: _infix("/"), aten.div.Scalar: _infix("/"),
    aten.reciprocal.default: lambda x: f"1 / {x}", aten.neg.default: lambda x: f"-{x}", aten.abs.default: _call("abs"),
    aten.exp.default: _call("math.exp"), aten.log.default: _call("math.log"), aten.sqrt.default: _call("math.sqrt"),
    aten.rsqrt.default: lambda x: f"1 / math.sqrt({x})", aten.tanh.default: _call("math.tanh"),
    aten.erf.default: _call("math.erf"), aten.sin.default: _call("math.sin"), aten.cos.default: _call("math.cos"),
    aten.sigmoid.default: _call("sigmoid"), aten.relu.default: _call("relu"), aten.silu.default: _call("silu"),
    aten.gelu.default: _gelu, aten.pow.Tensor_Scalar: _power, aten.square.default: lambda x: f"{x} * {x}",
    aten.maximum.default: lambda x, y: f"maximum({x}, {y})", aten.minimum.default: lambda x, y: f"minimum({x}, {y})",
    aten.clamp.default: _clamped, aten.hardtanh.default: _clamped,
    aten.clamp_min.default: lambda x, low: f"maximum({x}, {low})",
    aten.clamp_max.default: lambda x, high: f"minimum({x}, {high})",
    aten.where.self: lambda which, x, y: f"{x} if {which} else {y}",
}
COMPARISONS = {getattr(getattr(aten, name), kind): _infix(sign) for kind in ("Scalar", "Tensor")
               for name, sign in dict(lt="<", le="<=", gt=">", ge=">=", eq="==", ne="!=").items()}
LINES.update(COMPARISONS)


def maximum(x: Numeric, y: Numeric) -> Any:
    """The larger; NaN if one is."""
    return x if x != x or x > y else y


def minimum(x: Numeric, y: Numeric) -> Any:
    """The smaller; NaN if one is."""
    return x if x != x or x < y else y


#: What the text of an epilogue may name.
NAMES: dict[str, Any] = {
    "math": math, "float32": np.float32, "float64": np.float64, "maximum": maximum, "minimum": minimum, "abs": abs,
    **{name: getattr(activations, name) for name in activations.__all__},
    **{name: getattr(epilogues, name) for name in ("Bias", "Binary", "Elementwise", "Fold", "Residual", "RowReduce")}}


@functools.lru_cache(maxsize=1024)
def made(text: str) -> Callable[..., Any]:
    """The function of arrays that an epilogue's text says."""
    names = dict(NAMES)
    exec(compile(text, "<epilogue of gemmkit::fused>", "exec"), names)
    function: Callable[..., Any] = names["epilogue"]
    return function


_FUSED = "(Tensor a, Tensor? index, Tensor[] b, Tensor[] operands, *, str epilogue, ScalarType dtype"
Tensors = Sequence[torch.Tensor]


def _allocate_fused(a: torch.Tensor, index: torch.Tensor | None, b: Tensors, operands: Tensors, *, epilogue: str,
              dtype: torch.dtype) -> Any:
    check_together(a, index=index, b=b[0])
    rows = a.shape[:-1] if index is None else index.shape
    return a.new_empty((*rows, b[0].shape[-1]), dtype=dtype)


def _compute_fused(a: torch.Tensor, index: torch.Tensor | None, b: Tensors, operands: Tensors, *, epilogue: str,
             dtype: torch.dtype) -> Any:
    """D = epilogue(A B), where A is ``a`` or its rows ``index``, and B one matrix or the interleaved columns of several."""
    own = dtype == a.dtype and index is None           # known calls make the result themselves
    out = None if own else _allocate_fused(a, index, b, operands, epilogue=epilogue, dtype=dtype)
    return _called(a, index, b, operands, epilogue, dtype, out, out)


def _allocate_reduced(a: torch.Tensor, index: torch.Tensor | None, b: Tensors, operands: Tensors, *, epilogue: str,
                      dtype: torch.dtype, stores: bool) -> tuple[Any, Any]:
    d = _allocate_fused(a, index, b, operands, epilogue=epilogue, dtype=dtype)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return d if stores else a.new_empty(0, dtype=dtype), a.new_empty(d.shape[:-1], dtype=wide)


def _compute_reduced(a: torch.Tensor, index: torch.Tensor | None, b: Tensors, operands: Tensors, *, epilogue: str,
                     dtype: torch.dtype, stores: bool) -> tuple[Any, Any]:
    """The same, and what the epilogue reduces the rows of D to; D is empty unless the call ``stores`` it."""
    out, rows = _allocate_reduced(a, index, b, operands, epilogue=epilogue, dtype=dtype, stores=stores)
    _called(a, index, b, (*operands, rows), epilogue, dtype, out if stores else None, out if stores else Discard())
    return out, rows


def _called(a: torch.Tensor, index: torch.Tensor | None, b: Tensors, operands: Tensors, epilogue: str, dtype: torch.dtype,
            known: torch.Tensor | None, out: torch.Tensor | Discard | None) -> Any:
    a, *rest = (x.detach() if x.requires_grad else x for x in (a, *b, *operands))
    b, operands = rest[:len(b)], rest[len(b):]

    def described() -> tuple[Any, Any, dict[str, Any]]:
        return (a if index is None else Gather(a, index), b[0] if len(b) == 1 else InterleavedColumns(*b),
                {"epilogue": made(epilogue)(*operands)} if epilogue else {})

    if out is not known or index is not None:          # calls are known by the addresses of plain operands and results
        x, y, keywords = described()
        return matmul(x, y, out=out, **keywords)
    return _calls((epilogue, dtype, len(b)), (a, *b, *operands), out, None, described)


_calls = Door()
FUSED = define("gemmkit::fused", f"{_FUSED}) -> Tensor", _compute_fused, _allocate_fused)
REDUCED = define("gemmkit::fused_and_reduced", f"{_FUSED}, bool stores) -> (Tensor, Tensor)", _compute_reduced,
                 _allocate_reduced)


# --------------------------------------------------------------------------------------------------
# Convolutions. Each one's gradients are the two others, so there are derivatives of every order.
#
# | operator | linear in | its gradients |
# |---|---|---|
# | ``gemmkit::conv`` | x, w, bias | `conv_input`, `conv_weight`, a sum |
# | ``gemmkit::conv_input`` | w, gradient | `conv_weight`, `conv` |
# | ``gemmkit::conv_weight`` | x, gradient | `conv_input`, `conv` |

def conv(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, stride: Any = 1, padding: Any = 0,
         dilation: Any = 1, groups: int = 1, layout: str | None = None) -> Any:
    """`gemmkit.conv` of tensors as an operator, with gradients of x, w and bias.

    Args:
        x: (N, C, H, W); one or three spatial dimensions are taken, too. ``torch.channels_last`` tensors are fast.
        w: (K, C / groups, R, S), of x's dtype; ``torch.autocast`` casts both, and the bias.
        bias: (K,), added in the kernel; None adds nothing.
        stride, padding, dilation, groups: as `gemmkit.conv` takes them.
        layout: the order of dimensions, as `gemmkit.conv` takes it; None is PyTorch's ("NCW", "NCHW", "NCDHW").

    Returns: a new tensor (N, K, P, Q), whose channels are neighbours in memory if x's are.

    Raises: what `gemmkit.conv` raises, TypeError for what is no tensor.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> x, w = torch.ones(1, 1, 3, 3, requires_grad=True), torch.ones(1, 1, 2, 2)
    >>> with gk.emulate():
    ...     gk.torch.conv(x, w, torch.tensor([1.0])).sum().backward()
    >>> x.grad[0, 0].tolist()
    [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]
    """
    if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor):
        raise TypeError(f"conv: x is a {type(x).__name__} and w a {type(w).__name__}; tensors are needed")
    if layout is None:
        layout = {3: "NCW", 5: "NCDHW"}.get(x.dim(), "NCHW")
    x, w, bias = autocast(x, w, bias)
    how = parameters("conv", x.shape, w.shape, stride, padding, dilation, groups, layout)
    flat = [n for pair in how.padding for n in pair]
    return _CONV(x, w, bias, list(how.stride), flat, list(how.dilation), how.groups, layout)


# -- the operators ----------------------------------------------------------------------------------------------------

_OF_GRADIENT = "Tensor gradient, SymInt[] shape"
_HOW = "int[] stride, int[] padding, int[] dilation, int groups, str layout"


def _given(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
           layout: str) -> dict[str, Any]:
    """The keywords of `gemmkit.conv`; ``padding`` has both ends of each dimension, one after the other."""
    return dict(stride=tuple(stride), padding=tuple(zip(padding[::2], padding[1::2])), dilation=tuple(dilation),
                groups=groups, layout=layout)


def _how(x: Any, w: Any, stride: Any, padding: Any, dilation: Any, groups: int, layout: str) -> Convolution:
    given = _given(stride, padding, dilation, groups, layout)
    return parameters("conv", x, w, *(given[name] for name in ("stride", "padding", "dilation", "groups", "layout")))


def _new(like: torch.Tensor, shape: Any, is_last: bool) -> torch.Tensor:
    """A new tensor, whose channels are neighbours in memory if those of ``like`` are."""
    if is_last or like.stride(1) != 1 or like.stride(-1) == 1:
        return like.new_empty(shape)
    return like.new_empty((shape[0], *shape[2:], shape[1])).movedim(-1, 1)


def _allocate(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    check_together(x, w=w, bias=bias)
    check_dtypes(x, w=w)
    made = _how(x.shape, w.shape, *how)
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise ValueError(f"conv: bias has shape {tuple(bias.shape)}; {(int(w.shape[0]),)} is needed, an element for each "
                         "filter")
    return _new(x, shape_of_convolution(x.shape, w.shape, made), made.is_last)


def _compute(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    out, given = _allocate(x, w, bias, *how), _given(*how)
    epilogue = None
    if bias is not None:
        epilogue = Bias(bias.detach() if given["groups"] == 1 else bias.detach().view(given["groups"], -1))
    by_products.conv(x.detach(), w.detach(), epilogue=epilogue, out=out, **given)
    return out


def _allocate_input(w: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], *how: Any) -> torch.Tensor:
    check_together(w, gradient=gradient)
    check_dtypes(w, gradient=gradient)
    return _new(gradient, tuple(shape), _how(shape, w.shape, *how).is_last)


def _compute_input(w: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], *how: Any) -> torch.Tensor:
    out = _allocate_input(w, gradient, shape, *how)
    by_products.conv_input_gradient(tuple(shape), w.detach(), gradient.detach(), out=out, **_given(*how))
    return out


def _allocate_weight(x: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], *how: Any) -> torch.Tensor:
    check_together(x, gradient=gradient)
    check_dtypes(x, gradient=gradient)
    return _new(x, tuple(shape), _how(x.shape, shape, *how).is_last)


def _compute_weight(x: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], *how: Any) -> torch.Tensor:
    out = _allocate_weight(x, gradient, shape, *how)
    by_products.conv_weight_gradient(x.detach(), tuple(shape), gradient.detach(), out=out, **_given(*how))
    return out


# -- autograd ---------------------------------------------------------------------------------------------------------

def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
    first, second, _, *ctx.how = inputs
    ctx.save_for_backward(first, second)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    of_x, of_w, of_bias, *_ = ctx.needs_input_grad
    axes = [n for n in range(x.dim()) if n != (x.dim() - 1 if ctx.how[-1].endswith("C") else 1)]
    return (_INPUT(w, gradient, list(x.shape), *ctx.how) if of_x else None,
            _WEIGHT(x, gradient, list(w.shape), *ctx.how) if of_w else None,
            gradient.sum(axes) if of_bias else None, *(None,) * len(ctx.how))


def _backward_input(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[Any, ...]:
    w, inner = ctx.saved_tensors
    of_w, of_inner, *_ = ctx.needs_input_grad
    return (_WEIGHT(gradient, inner, list(w.shape), *ctx.how) if of_w else None,
            _CONV(gradient, w, None, *ctx.how) if of_inner else None, None, *(None,) * len(ctx.how))


def _backward_weight(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, inner = ctx.saved_tensors
    of_x, of_inner, *_ = ctx.needs_input_grad
    return (_INPUT(gradient, inner, list(x.shape), *ctx.how) if of_x else None,
            _CONV(x, gradient, None, *ctx.how) if of_inner else None, None, *(None,) * len(ctx.how))


def _in_batches(operator: Any, count: int = 2) -> Any:
    """One convolution for each of a batch of ``torch.func.vmap``; ``count`` arguments are tensors."""
    def rule(size: int, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return batched_by(lambda *tensors: operator()(*tensors, *args[count:]), size, in_dims[:count], args[:count],
                          (None,) * count, {})

    return rule


_CONV: Any = Differentiable(define("gemmkit::conv", f"(Tensor x, Tensor w, Tensor? bias, {_HOW}) -> Tensor", _compute,
                                   _allocate), _backward, _keep, _in_batches(lambda: _CONV, 3), _compute)
_INPUT: Any = Differentiable(define("gemmkit::conv_input", f"(Tensor w, {_OF_GRADIENT}, {_HOW}) -> Tensor",
                                    _compute_input, _allocate_input), _backward_input, _keep, _in_batches(lambda: _INPUT),
                             _compute_input)
_WEIGHT: Any = Differentiable(define("gemmkit::conv_weight", f"(Tensor x, {_OF_GRADIENT}, {_HOW}) -> Tensor",
                                     _compute_weight, _allocate_weight), _backward_weight, _keep,
                              _in_batches(lambda: _WEIGHT), _compute_weight)
