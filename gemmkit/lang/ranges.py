"""``range`` over coordinates: as wide as they are, so that what is computed from the loop variable stays so.
And ``enumerate``, whose numbers are coordinates."""

from __future__ import annotations

from typing import Any

from gemmkit.lang import number_rules
from gemmkit.lang.numba_hooks import (
    RefType,
    call_iternext,
    cgutils,
    compiles_ours,
    ir,
    iternext_impl,
    lowering_registry,
    models,
    operation,
    register_model,
    signature,
    types,
)
from gemmkit.lang.number_types import kind_of_type, type_of_kind
from gemmkit.lang.scalars import IndexType, WeakIntLiteral, index, wide_index


class IndexRangeType(types.SimpleIterableType):
    def __init__(self, of: IndexType) -> None:
        self.of = of
        super().__init__("index_range" if of == index else "wide_index_range", IndexRangeIteratorType(of))


class IndexRangeIteratorType(types.SimpleIteratorType):
    def __init__(self, of: IndexType) -> None:
        self.of = of
        super().__init__("index_range_iterator" if of == index else "wide_index_range_iterator", of)


@register_model(IndexRangeType)
class _RangeModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: Any):
        super().__init__(dmm, fe_type, [(name, fe_type.of) for name in ("start", "stop", "step")])


@register_model(IndexRangeIteratorType)
class _IteratorModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: Any):
        members = [("current", types.EphemeralPointer(fe_type.of)), ("stop", fe_type.of), ("step", fe_type.of)]
        super().__init__(dmm, fe_type, members)


@operation(range)
def _range(context: Any, *args: Any) -> Any:
    if not 1 <= len(args) <= 3:
        return None
    if not all(isinstance(a, (IndexType, types.IntegerLiteral)) for a in args):
        return _of_integers(context, args) if compiles_ours() else None
    if not any(isinstance(a, (IndexType, WeakIntLiteral)) for a in args):
        return None
    of = wide_index if wide_index in args else index
    width = ir.IntType(of.bitwidth)

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        state = cgutils.create_struct_proxy(sig.return_type)(context, builder)
        values = list(values)
        state.start = width(0) if len(values) == 1 else values.pop(0)
        state.stop = values.pop(0)
        state.step = values.pop(0) if values else width(1)
        return state._getvalue()

    return signature(IndexRangeType(of), *([of] * len(args))), codegen


def _of_integers(context: Any, args: tuple) -> Any:
    """Where NumPy's integers are among the limits: Numba's own range, of the type that the rules say."""
    kinds = [kind_of_type(a) for a in args]
    if any(kind is None for kind in kinds):
        return None
    ty = type_of_kind(number_rules.of_range(*kinds))
    if all(a == ty for a in args):
        return None
    inner = context.resolve_function_type(range, (ty,) * len(args), {})

    def codegen(c: Any, builder: Any, sig: Any, values: Any) -> Any:
        given = [c.cast(builder, v, t, ty) for v, t in zip(values, sig.args)]
        return c.get_function(context.resolve_value_type(range), inner)(builder, given)

    return signature(inner.return_type, *args), codegen


@lowering_registry.lower("getiter", IndexRangeType)
def _getiter(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    state = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
    iterator = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    iterator.current = cgutils.alloca_once_value(builder, state.start)
    builder.store(state.start, iterator.current)
    iterator.stop, iterator.step = state.stop, state.step
    return iterator._getvalue()


@lowering_registry.lower("iternext", IndexRangeIteratorType)
@iternext_impl(RefType.UNTRACKED)
def _iternext(context: Any, builder: Any, sig: Any, args: Any, result: Any) -> None:
    iterator = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
    current = builder.load(iterator.current)
    upwards = builder.icmp_signed(">", iterator.step, iterator.step.type(0))
    valid = builder.select(upwards, builder.icmp_signed("<", current, iterator.stop),
                           builder.icmp_signed(">", current, iterator.stop))
    result.set_valid(valid)
    with builder.if_then(valid):
        result.yield_(current)
        builder.store(builder.add(current, iterator.step, flags=("nsw",)), iterator.current)


# -- enumerate --------------------------------------------------------------------------------------------------------

class IndexEnumerateType(types.SimpleIteratorType):
    """What Numba's ``enumerate`` is, with a coordinate in place of an int64."""

    def __init__(self, of: Any) -> None:
        self.of = of
        super().__init__(f"index_enumerate({of})", types.BaseTuple.from_types((index, of.yield_type)))


@register_model(IndexEnumerateType)
class _EnumerateModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: Any):
        super().__init__(dmm, fe_type, [("count", types.EphemeralPointer(index)), ("iterator", fe_type.of)])


@operation(enumerate)
def _enumerate(context: Any, *args: Any) -> Any:
    if not 1 <= len(args) <= 2 or not isinstance(args[0], types.IterableType):
        return None
    if len(args) == 2 and not isinstance(args[1], (IndexType, WeakIntLiteral)):
        return None

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        state = cgutils.create_struct_proxy(sig.return_type)(context, builder)
        start = context.cast(builder, values[1], args[1], index) if len(values) == 2 else ir.IntType(32)(0)
        state.count = cgutils.alloca_once_value(builder, start)
        builder.store(start, state.count)
        getiter = context.get_function("getiter", signature(sig.return_type.of, args[0]))
        state.iterator = getiter(builder, (values[0],))
        return state._getvalue()

    return signature(IndexEnumerateType(args[0].iterator_type), *args), codegen


@lowering_registry.lower("iternext", IndexEnumerateType)
@iternext_impl(RefType.UNTRACKED)
def _next_of_enumerate(context: Any, builder: Any, sig: Any, args: Any, result: Any) -> None:
    of = sig.args[0].of
    state = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
    count = builder.load(state.count)
    following = call_iternext(context, builder, of, state.iterator)
    valid = following.is_valid()
    result.set_valid(valid)
    with builder.if_then(valid):
        result.yield_(context.make_tuple(builder, sig.args[0].yield_type, [count, following.yielded_value()]))
        builder.store(builder.add(count, count.type(1), flags=("nsw",)), state.count)
