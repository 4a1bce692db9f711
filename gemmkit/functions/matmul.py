"""``matmul``: D = A B + C with any components, on arrays of any library."""

from __future__ import annotations

import string
from collections.abc import Callable
from importlib import import_module
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from gemmkit.emulator import current_mode
from gemmkit.kernels.config import Config, Keywords, given, names_keywords
from gemmkit.lang.checks import check_dtype
from gemmkit.layouts import RowMajor
from gemmkit.layouts.matrices import Matrix, result, unwrapped
from gemmkit.operators import Algebra, Operator
from gemmkit.plans.launch import KnownCalls
from gemmkit.plans.plan import known_call, multiply
from gemmkit.plans.problem import asked_dtype, check_places, stack_of
from gemmkit.runtime.arrays import ArrayInfo, RequiresGradient, describe, empty_like, strided
from gemmkit.runtime.device import target
from gemmkit.tuning.operators import new_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

# --------------------------------------------------------------------------------------------------
# Stacks of which one operand alone has a dimension: that dimension becomes rows or columns of fewer, larger products. So
# does the stack beside a vector.
#
# Any other stack is a plan like that of two matrices (`gemmkit.plans.problem`), and one launch; so is what is made
# here.

def folded(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any]) -> Any:
    """The product of stacks of which a or b alone has a dimension (the other lacks it, or is 1 there); None of any other
    call, and of one with a c, a conf or components, whose coordinates would change."""
    operator = keywords.get("operator")
    if (c is not None or conf is not None or set(keywords) - {"operator", "dtype"} or isinstance(operator, Algebra)
            or not isinstance(operator, (Operator, type(None)))):
        return None
    infos = {"a": describe(a, "a"), "b": describe(b, "b")}
    spec = _with_a_vector(infos["a"], infos["b"], None if out is None else describe(out, "out").shape)
    if spec is not None:
        return _einsum(spec, a, b, out=out, stream=stream, **keywords)
    if min(len(info.shape) for info in infos.values()) < 2 or not _folds(*infos.values()):
        return None
    check_places(dict(infos))
    keywords = dict(keywords)
    dtype = asked_dtype(keywords, None, None if out is None else describe(out, "out"))
    for name, info in infos.items():
        check_dtype(info.dtype, name)
    stack = stack_of(infos, {name: RowMajor(info.dtype) for name, info in infos.items()})
    assert stack is not None
    shape = (*stack, infos["a"].shape[-2], infos["b"].shape[-1])
    if out is None:
        dtypes = infos["a"].dtype, infos["b"].dtype
        out = empty_like(a, shape, new_dtype(*dtypes, operator, target(infos["a"].device), dtype))
    of_out = describe(out, "out")
    if of_out.shape != shape:
        raise ValueError(f"out has shape {of_out.shape}; the result has {shape}")
    labels = string.ascii_letters[:len(stack)]
    (a, in_a), (b, in_b) = (_without_ones(x, infos[name], labels) for name, x in (("a", a), ("b", b)))
    kept = [n for n, label in enumerate(labels) if label in in_a + in_b]         # both are 1 along the others
    axes = [*kept, len(stack), len(stack) + 1]
    view = strided(out, of_out, tuple(shape[n] for n in axes), tuple(of_out.strides[n] for n in axes))
    _einsum(f"{in_a}MK,{in_b}KN->{''.join(labels[n] for n in kept)}MN", a, b, out=view, stream=stream, **keywords)
    return out


def _einsum(spec: str, *operands: Any, **keywords: Any) -> Any:
    from gemmkit.functions.einsum import einsum  # which a product of two matrices needs not

    return einsum(spec, *operands, **keywords)


def _with_a_vector(a: ArrayInfo, b: ArrayInfo, out: tuple[int, ...] | None) -> str | None:
    """The contraction that a stack and a vector are, whose dimensions become rows or columns; None for other operands, and
    for those that do not fit each other.

    >>> from gemmkit.runtime.arrays import describe
    >>> import numpy as np
    >>> _with_a_vector(describe(np.ones((2, 3, 4))), describe(np.ones(4)), None)
    'abK,K->ab'
    """
    if sorted((min(len(a.shape), 3), min(len(b.shape), 3))) != [1, 3]:
        return None
    stack, is_row = (b, True) if len(a.shape) == 1 else (a, False)
    K, vector = stack.shape[-2 if is_row else -1], (a if is_row else b).shape[0]
    result = (*stack.shape[:-2], stack.shape[-1 if is_row else -2])
    if K != vector or (out is not None and out != result):
        return None
    free = string.ascii_lowercase[:len(result)]
    return f"K,{free[:-1]}K{free[-1]}->{free}" if is_row else f"{free}K,K->{free}"


def _folds(a: ArrayInfo, b: ArrayInfo) -> bool:
    """Whether a dimension of the stacks is one of a's or of b's alone."""
    one, other = a.shape[:-2], b.shape[:-2]
    longest = max(len(one), len(other))
    pairs = zip((1,) * (longest - len(one)) + one, (1,) * (longest - len(other)) + other)
    return any((n == 1) != (m == 1) for n, m in pairs)


def _without_ones(x: Any, info: ArrayInfo, labels: str) -> tuple[Any, str]:
    """A stack without the dimensions along which it is broadcast, and the labels of the others."""
    own = labels[len(labels) - (len(info.shape) - 2):]
    kept = [n for n, extent in enumerate(info.shape[:-2]) if extent != 1]
    axes = [*kept, len(info.shape) - 2, len(info.shape) - 1]
    view = strided(x, info, tuple(info.shape[n] for n in axes), tuple(info.strides[n] for n in axes))
    return view, "".join(own[n] for n in kept)


@names_keywords
def matmul(a: Any, b: Any, c: Any = None, conf: Config | None = None, *, out: Any = None, stream: Any = None,
           **others: Unpack[Keywords]) -> Any:
    """Compute D = A B + C, or what the components make of it.

    Args:
        a: (M, K): a CuPy array, a PyTorch tensor, a Numba device array, anything with ``__cuda_array_interface__`` or
            DLPack; a NumPy array under ``with gemmkit.emulate():``. Any strides: the kernel reads a transposed or sliced
            view in place. Or a matrix of `gemmkit.layouts` (`DiagonalMatrix(x)`, `Gather(x, rows)`). Dimensions before the
            last two are a stack, which broadcasts as in NumPy; one launch computes all products. One dimension is a row.
        b: (K, N), as a. One dimension is a column. The result lacks the dimension of a row or column: (N,), (M,) or ().
        c: (M, N), added to the product; None adds nothing.
        conf: a configuration of `gemmkit.get_config`; None chooses one for the dtypes and sizes.
        out: (M, N), or (..., M, N) for stacks: receives the result. It may be c itself, and must overlap nothing else; or
            a `gemmkit.layouts.Scatter`, a `SymmetricMatrix` (one half of D is computed), or a `Discard` (D is not
            stored, and the call returns None). None allocates an array of a's library, in C order, of ``dtype``.
        stream: the stream of the launch; None takes the current stream of a's library.
        others: any of `gemmkit.kernels.config.Keywords`. None means that the keyword is not given.

    Returns:
        out. The call does not cast or synchronise. It records a gradient if a PyTorch tensor requires one. On Hopper, a long
        product of 16-bit floats first copies an operand whose rows begin elsewhere than at multiples of 16 bytes, where that
        costs less: into the stream's workspace, which has up to twice the operand's size. `gemmkit.explain` says so, and
        with ``conf`` nothing is copied.

    **Accumulators hold whatever the result's type holds**: int8 into int32 is exact, float32 into float64 adds in float64.
    Integers wrap in NumPy's result type if ``out``, ``c`` and ``dtype`` ask for no other. An epilogue receives 8- and 16-bit
    integers as int32 or int64, and the result then has that type. A product of booleans says whether any k has both.

    Raises:
        NotImplementedError: a tensor requires a gradient, and the product has none.
        ValueError: shapes, dtypes or devices do not fit each other; ``out`` is read-only, or overlaps itself, a, b or an
            array of a component; an array's address is no multiple of its itemsize.
        TypeError: an argument is no array, or a host array without emulation; no operator takes a dtype.
        ConfigError: no kernel can carry out the configuration.
        ComponentError: a component's method cannot be compiled; the error names its file and line.

    >>> import numpy as np, gemmkit as gk
    >>> a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 2), np.float32)
    >>> with gk.emulate():
    ...     gk.matmul(a, b, epilogue=gk.epilogues.Bias(np.float32([0.5, 0]))).tolist()
    [[3.5, 3.0], [12.5, 12.0]]
    >>> with gk.emulate():
    ...     gk.matmul(a, np.ones(3, np.float32)).tolist()         # a matrix and a vector
    [3.0, 12.0]
    """
    keywords: dict[str, Any] = others                                 # type: ignore[assignment]
    if isinstance(a, Matrix) or isinstance(b, Matrix):
        keywords = given(keywords)
        product = next((x.product for x in (a, b) if isinstance(x, Matrix) and hasattr(x, "product")), None)
        if product is not None:                                       # it multiplies in its own way
            return product(a, b, c, conf, out, stream, **keywords)
        out, keywords = result(out, keywords)
        a, b, keywords = unwrapped(a, b, (c, out), keywords, conf)
    elif isinstance(out, Matrix):
        out, keywords = result(out, keywords)
    try:
        found = multiply(a, b, c, conf, out, stream, keywords, folded)
        is_plain = out is not None or (conf is None and "global_d_layout" not in keywords)
        return found if is_plain or not is_discarded(keywords, conf) else None
    except RequiresGradient:                                          # nothing has been launched or written
        if not any(getattr(x, "requires_grad", False) for x in (a, b, c)):
            raise                                                     # a component's tensor, or out itself
    recording = import_module("gemmkit.torch.autograd")               # which imports PyTorch, and calls this function
    return recording.recorded(a, b, c, conf, out, stream, given(keywords))


def is_discarded(keywords: dict[str, Any], conf: Config | None) -> bool:
    """Whether D is not stored."""
    layout = keywords.get("global_d_layout") if keywords else None
    return (layout is not None or conf is not None) and getattr(
        layout if conf is None or layout is not None else conf.global_d_layout, "is_discarded", False)


class Door:
    """A function of arrays that comes down to one product, whose components are made of these arrays. Its calls that come
    again are known by the arrays alone: no component is made or read. ``again(rest, arrays)`` is the result of one; None for
    another."""

    def __init__(self) -> None:
        self._calls = KnownCalls()
        self.again = self._calls.again

    def __call__(self, rest: Any, arrays: tuple[Any, ...], out: Any, stream: Any,
                 described: Callable[[], tuple[Any, Any, dict[str, Any]]]) -> Any:
        """`matmul` of what ``described()`` says: a, b and components. What these hold beside ``arrays`` follows from the
        arrays' kinds and from ``rest``, which can be looked up."""
        result = self.again(rest, arrays, (), (), out, stream)
        if result is not None:
            return result
        a, b, keywords = described()
        result = matmul(a, b, out=out, stream=stream, **keywords)
        if current_mode() is None:
            if isinstance(b, Matrix):
                a, b, keywords = unwrapped(a, b, (None, out), keywords, None)
            known, brought = known_call(a, b, out, keywords)
            if known is not None:
                self._calls.keep(rest, arrays, (), out, lambda: known.picking(_order(arrays, brought)))
        return result


def _order(arrays: tuple[Any, ...], brought: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What makes (out, *brought) of (out, *addresses of arrays): each address that is brought is that of one of these."""
    at = tuple(describe(x, "").pointer for x in arrays)
    constants = tuple(value for value in brought if value not in at)
    pick = itemgetter(0, *[1 + (at.index(value) if value in at else len(at) + constants.index(value)) for value in brought])
    return lambda now: pick(now + constants)
