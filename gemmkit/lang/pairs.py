"""Two 16-bit floats in a register, computed with at once.

A function of an element, such as ``lambda x: max(x + 1, 0)``, is typed for a pair where everything that it does has an
instruction for two: +, - and * with another pair or a constant, max and min with a constant, - and abs. Each half is
rounded as a single float is, so the results are the same. What cannot be typed (a comparison, a function of `math`) is
computed element by element.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, operation, signature, types
from gemmkit.lang.passes import KnownType, UnknownValue
from gemmkit.lang.registers import call_function
from gemmkit.lang.scalars import DTypeType, NarrowFloatType, WeakFloatLiteral, WeakIntLiteral, bfloat16, float16

i32 = ir.IntType(32)
_SUFFIX = {float16: "f16x2", bfloat16: "bf16x2"}


class PairType(types.Type):
    """Two floats of ``element`` in 32 bits."""

    def __init__(self, element: NarrowFloatType):
        self.element = element
        super().__init__(f"pair({element})")


@nb.register_model(PairType)
class _PairModel(nb.models.PrimitiveModel):
    def __init__(self, dmm: nb.DataModelManager, fe_type: PairType):
        super().__init__(dmm, fe_type, i32)


PAIRS = {element: PairType(element) for element in _SUFFIX}


def _constant(pair: PairType, value: float) -> Any:
    bits = int(np.asarray(value, pair.element.dtype).view(np.uint16))
    return i32(bits << 16 | bits)


def _takes(pair: PairType, other: types.Type) -> bool:
    """Whether a constant beside a pair leaves its type: beside bfloat16 a Python float does not (ml_dtypes)."""
    return isinstance(other, WeakIntLiteral) or (isinstance(other, WeakFloatLiteral) and pair.element == float16)


def _binary(name: str) -> Callable[..., Any]:
    def typer(context: TypingContext, *args: types.Type) -> Any:
        pairs = [t for t in args if isinstance(t, PairType)]
        if len(args) != 2 or not pairs or not all(t == pairs[0] or _takes(pairs[0], t) for t in args):
            return None
        pair = pairs[0]

        def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            from gemmkit.lang.scalars import pair_arithmetic

            given = [x if t == pair else _constant(pair, t.literal_value) for x, t in zip(v, s.args)]
            return pair_arithmetic(builder, f"{name}.rn.{_SUFFIX[pair.element]}", given)

        return signature(pair, *args), codegen

    return typer


def _extremum(name: str) -> Callable[..., Any]:
    def typer(context: TypingContext, *args: types.Type) -> Any:
        if len(args) != 2 or sum(isinstance(t, PairType) for t in args) != 1:
            return None
        pair, constant = sorted(args, key=lambda t: not isinstance(t, PairType))
        if not _takes(pair, constant):
            return None
        at = 0 if isinstance(args[0], PairType) else 1

        def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            from gemmkit.lang.scalars import pair_arithmetic

            given = [v[at], _constant(pair, constant.literal_value)]
            return pair_arithmetic(builder, f"{name}.NaN.{_SUFFIX[pair.element]}", given)

        return signature(pair, *args), codegen

    return typer


def _unary(name: str) -> Callable[..., Any]:
    def typer(context: TypingContext, *args: types.Type) -> Any:
        if len(args) != 1 or not isinstance(args[0], PairType):
            return None

        def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            from gemmkit.lang.scalars import pair_arithmetic

            return pair_arithmetic(builder, f"{name}.{_SUFFIX[args[0].element]}", list(v))

        return signature(args[0], args[0]), codegen

    return typer


_MAKERS: tuple[tuple[Callable[[str], Callable[..., Any]], dict[str, Any]], ...] = (
    (_binary, dict(add=operator.add, sub=operator.sub, mul=operator.mul)), (_extremum, dict(max=max, min=min)),
    (_unary, dict(neg=operator.neg, abs=abs)))
for _make, _functions in _MAKERS:
    for _name, _function in _functions.items():
        operation(_function)(_make(_name))


def _pairwise(context: TypingContext, transform: types.Type, element: types.Type) -> Any:
    """How a transform is called with a pair, if it can be and gives one; else None."""
    from gemmkit.lang.components import ComponentType

    if element not in PAIRS or not isinstance(transform, ComponentType) or transform.skeleton.with_coordinates:
        return None
    pair = PAIRS[element]
    try:
        method = context.resolve_getattr(transform, "of")
        inner = context.resolve_function_type(method, (pair,), {})
    except Exception:                                     # Numba's errors and ours: it is then no function of pairs
        return None
    return None if inner is None or inner.return_type != pair else (method, inner)


def _type_is_pairwise(context: TypingContext, transform: types.Type, dtype: types.Type) -> Any:
    if not isinstance(dtype, DTypeType):
        return None
    answer = types.literal(_pairwise(context, transform, dtype.target) is not None)
    return signature(answer, transform, dtype), lambda c, b, s, v: ir.Constant(ir.IntType(1), answer.literal_value)


@atom(_type_is_pairwise)
def is_pairwise(transform: Any, dtype: np.dtype) -> bool:
    """Whether a transform of elements of ``dtype`` can be computed two at a time: a compile-time value. (In the emulator
    everything is computed one by one, with the same results.)"""
    return False


def _decided(context: TypingContext, transform: types.Type, dtype: types.Type) -> bool:
    """`is_pairwise` before types are inferred (`gemmkit.lang.passes`)."""
    from gemmkit.lang.aggregates import static_type

    if not isinstance(dtype, np.dtype):
        raise UnknownValue
    ty: Any = transform.ty if isinstance(transform, KnownType) else static_type(transform)
    element: Any = static_type(dtype)
    return _pairwise(context, ty, element.target) is not None


is_pairwise.decided = _decided                             # type: ignore[attr-defined]


def _type_transform_pairs(context: TypingContext, transform: types.Type, dtype: types.Type, words: types.Type) -> Any:
    found = _pairwise(context, transform, dtype.target) if isinstance(dtype, DTypeType) else None
    if found is None or not isinstance(words, types.UniTuple):
        return None
    method, inner = found

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given = [b.extract_value(v[2], n) for n in range(words.count)]
        return c.make_tuple(b, words, [call_function(c, b, method, v[0], inner, [word]) for word in given])

    return signature(words, transform, dtype, words), codegen


@atom(_type_transform_pairs)
def transform_pairs(transform: Any, dtype: np.dtype, words: tuple) -> tuple:
    """A transform of elements of ``dtype`` in 32-bit words, two at a time (see `is_pairwise`)."""
    values = np.array(words, np.uint32).view(dtype)
    return tuple(np.array([transform.of(x) for x in values], dtype).view(np.uint32))
