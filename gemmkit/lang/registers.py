"""Values that live in registers: tuples made by a function, and arrays of fragments.

A *fragment* is what one thread holds of a tile: a tuple of ``count`` elements. ``registers(fragment, m, n)`` is an m x n
array of fragments; loops with constant bounds over it are unrolled, and it then lives in registers alone (tests look for
local memory in the compiled kernels).

To compiled code the array is a slot on the stack of the function that makes it, so it can be passed to functions, and none
can return it: `refuse_returned`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.functions import when_compiled
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, operation, signature, types
from gemmkit.lang.number_rules import is_of_one_type
from gemmkit.lang.passes import KnownType, UnknownValue
from gemmkit.lang.scalars import (
    DTypeType,
    IndexType,
    NarrowFloatType,
    WeakFloatLiteral,
    WeakIntLiteral,
    bfloat16,
    float16,
    index,
    numba_type,
    pair_arithmetic,
    weak_float64,
)

__all__ = [
    "Fragment", "IndexType", "Registers", "apply", "generate", "holds_registers", "refuse_returned", "registers",
]

V = TypeVar("V")

i32 = ir.IntType(32)


@dataclass(frozen=True)
class Fragment:
    """What one thread holds of an operand: ``count`` elements of ``dtype``."""

    dtype: np.dtype
    count: int

    def __device_type__(self) -> types.Type:
        return FragmentType(self)


class FragmentType(types.Type):
    def __init__(self, fragment: Fragment):
        self.fragment = fragment
        self.value = types.UniTuple(numba_type(fragment.dtype), fragment.count)
        super().__init__(f"Fragment({fragment.dtype}, {fragment.count})")


nb.kept_as(FragmentType, None)
nb.typeof_impl.register(Fragment)(lambda value, c: FragmentType(value))


@nb.attributes_of(FragmentType)
def _fragment_attribute_type(ty: FragmentType, attr: str) -> Any:
    from gemmkit.lang.aggregates import static_type

    return static_type(getattr(ty.fragment, attr)) if attr in ("dtype", "count") else None


@nb.lowering_registry.lower_getattr_generic(FragmentType)
def _fragment_getattr(context: Context, builder: ir.IRBuilder, ty: FragmentType, value: ir.Value, attr: str) -> Any:
    from gemmkit.lang.aggregates import static_type, static_value

    static = getattr(ty.fragment, attr)
    return static_value(context, builder, static_type(static), static)


class RegistersType(types.Type):
    """An array of fragments; the value is the address of a stack slot that the optimiser dissolves."""

    def __init__(self, value: types.Type, shape: tuple[int, ...]):
        self.value, self.shape = value, shape
        super().__init__(f"registers({value}, {shape})")


@nb.register_model(RegistersType)
class _RegistersModel(nb.models.PrimitiveModel):
    def __init__(self, dmm: nb.DataModelManager, fe_type: RegistersType):
        super().__init__(dmm, fe_type, dmm.lookup(fe_type.value).get_value_type().as_pointer())


class Registers(dict):
    """The emulator's registers: a dictionary that knows its shape and fragments, and refuses to give what was never set."""

    def __init__(self, fragment: Fragment, shape: tuple[int, ...]):
        super().__init__()
        self.fragment, self.shape = fragment, shape

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self:                                            # what is there was checked when it was set
            self._check(key)
            self._check_value(value)
        super().__setitem__(key, value)

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        raise UnboundLocalError(f"registers of shape {self.shape}: {key} was read before anything set it")

    def _check(self, key: Any) -> None:
        indices = key if isinstance(key, tuple) else (key,)
        if len(indices) != len(self.shape) or any(not 0 <= i < n for i, n in zip(indices, self.shape)):
            raise IndexError(f"registers of shape {self.shape} indexed with {key}")

    def _check_value(self, value: Any) -> None:
        """Compiled code has room for so many elements, and converts what is of another type; the emulator does neither."""
        if len(value) != self.fragment.count:
            raise TypeError(f"registers of {self.fragment}: a fragment has {self.fragment.count} elements, not {len(value)}")
        others = [x.dtype for x in value if isinstance(x, np.generic) and x.dtype != self.fragment.dtype]
        if others:
            raise TypeError(f"registers of {self.fragment}: a fragment has elements of {self.fragment.dtype}, not of "
                            f"{others[0]}")


def _type_registers(context: TypingContext, fragment: types.Type, *shape: types.Type) -> Any:
    if not isinstance(fragment, FragmentType) or not all(isinstance(n, types.IntegerLiteral) for n in shape):
        return None
    ty = RegistersType(fragment.value, tuple(int(n.literal_value) for n in shape))

    def codegen(context: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
        count = int(np.prod(ty.shape))
        with builder.goto_entry_block():
            return builder.alloca(context.get_value_type(ty.value), size=i32(count))

    return signature(ty, fragment, *shape), codegen


@atom(_type_registers)
def registers(fragment: Fragment, *shape: int) -> Registers:
    """An uninitialised array of ``shape`` (compile-time numbers) whose elements are fragments."""
    return Registers(fragment, shape)


def holds_registers(ty: types.Type) -> bool:
    """Whether values of a type have an array of registers in them: in a tuple, a component, a captured variable."""
    if isinstance(ty, RegistersType):
        return True
    inner = [*getattr(ty, "types", ()), getattr(ty, "type", None)]
    for members in (getattr(ty, name, None) for name in ("runtime", "members")):
        inner += members.values() if isinstance(members, dict) else ()
    return any(isinstance(part, types.Type) and holds_registers(part) for part in inner)


@when_compiled
def refuse_returned(result: types.Type) -> None:
    """Raise TypingError if a compiled function (Numba's result) returns registers.

    Made in the function they are its stack, which is gone when it returns: the machine code then reads what others put
    there, while the emulator, whose registers are Python objects, computes the right thing. Those of an argument are the
    caller's, who has them already.
    """
    if not holds_registers(result.signature.return_type):
        return
    annotation = result.type_annotation
    found = [statement.loc for block in annotation.blocks.values() for statement in block.body
             if isinstance(statement, nb.numba_ir.Return) and holds_registers(annotation.typemap[statement.value.name])]
    error = nb.TypingError("returns registers: they are this function's own stack, which is gone when it returns; make them "
                        "with registers(...) where they are used, and pass them to the functions that fill them")
    error.loc = found[0] if found else None
    raise error


def _slot(context: Context, builder: ir.IRBuilder, ty: RegistersType, pointer: ir.Value, key_type: types.Type,
          key: ir.Value) -> Any:
    if isinstance(key_type, types.BaseTuple):
        parts = [context.cast(builder, builder.extract_value(key, n), t, index)
                 for n, t in enumerate(key_type.types)]
    else:
        parts = [context.cast(builder, key, key_type, index)]
    linear = parts[0]
    for extent, part in zip(ty.shape[1:], parts[1:]):
        linear = builder.add(builder.mul(linear, i32(extent)), part)
    return builder.gep(pointer, [linear])


def _is_key(key: types.Type, ty: RegistersType) -> bool:
    parts = key.types if isinstance(key, types.BaseTuple) else (key,)
    return len(parts) == len(ty.shape) and all(isinstance(p, types.Integer) for p in parts)


@operation(operator.getitem)
def _getitem(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 2 or not isinstance(args[0], RegistersType) or not _is_key(args[1], args[0]):
        return None
    return signature(args[0].value, *args), lambda c, b, s, v: b.load(_slot(c, b, s.args[0], v[0], s.args[1], v[1]))


@operation(operator.setitem)
def _setitem(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 3 or not isinstance(args[0], RegistersType) or not _is_key(args[1], args[0]):
        return None
    ty = args[0]

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        value = c.cast(b, v[2], s.args[2], ty.value)
        b.store(value, _slot(c, b, ty, v[0], s.args[1], v[1]))

    return signature(types.none, *args), codegen


# -- tuples made by functions -----------------------------------------------------------------------------------------

def call_function(context: Context, builder: ir.IRBuilder, fnty: types.Type, function: ir.Value, sig: Signature,
                  values: Values) -> Any:
    """Call a function value of any callable type from inside a lowering; parameters not given take their defaults."""
    implementation = context.get_function(fnty, sig)
    if len(values) < len(sig.args):
        rest = list(sig.pysig.parameters.values())[len(values):]
        values = [*values, *(context.get_constant_generic(builder, t, p.default)
                             for t, p in zip(sig.args[len(values):], rest))]
    if sig.recvr:
        values = [function, *values]
    return implementation(builder, values)


def _call(context: Context, builder: ir.IRBuilder, function: tuple[types.Type, ir.Value, Signature], values: Values,
          given: Sequence[types.Type], wanted: types.Type) -> Any:
    """Call a function with values of the ``given`` types; its result as one of the ``wanted``."""
    fnty, value, sig = function
    values = [context.cast(builder, v, t, to) for v, t, to in zip(values, given, sig.args)]
    return context.cast(builder, call_function(context, builder, fnty, value, sig, values), sig.return_type, wanted)


def _resolve(context: TypingContext, function: types.Type, *args: types.Type) -> Any:
    return context.resolve_function_type(function, args, {}) if isinstance(function, types.Callable) else None


def _type_generate(context: TypingContext, count: types.Type, function: types.Type, *args: types.Type) -> Any:
    inner = _resolve(context, function, index, *args)
    if inner is None or not isinstance(count, types.IntegerLiteral):
        return None
    result = types.UniTuple(types.unliteral(inner.return_type), int(count.literal_value))

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        return c.make_tuple(b, result, [_call(c, b, (function, v[1], inner), (i32(i), *v[2:]), (index, *args), result.dtype)
                                        for i in range(result.count)])

    return signature(result, count, function, *args), codegen


@atom(_type_generate)
def generate(count: int, function: Any, *args: Any) -> tuple:
    """``tuple(function(i, *args) for i in range(count))``, unrolled; ``count`` is a compile-time number."""
    return tuple([function(i, *args) for i in range(count)])


def _type_apply(context: TypingContext, function: types.Type, values: types.Type, *args: types.Type) -> Any:
    if not isinstance(values, types.BaseTuple):
        return None
    inner = [_resolve(context, function, t, index, *args) for t in values.types]
    if any(sig is None for sig in inner):
        return None
    result = types.BaseTuple.from_types([types.unliteral(sig.return_type) for sig in inner])

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        return c.make_tuple(b, result, [
            _call(c, b, (function, v[0], sig), (b.extract_value(v[1], i), i32(i), *v[2:]), (ty, index, *args), wanted)
            for i, (sig, ty, wanted) in enumerate(zip(inner, values.types, result.types))])

    return signature(result, function, values, *args), codegen


@atom(_type_apply)
def apply(function: Any, values: tuple, *args: Any) -> tuple:
    """``tuple(function(value, i, *args) for i, value in enumerate(values))``, unrolled."""
    return tuple([function(value, i, *args) for i, value in enumerate(values)])


# --------------------------------------------------------------------------------------------------
# Compile-time control: choosing, repeating and combining without leaving anything in the machine code.

def _type_each(context: TypingContext, function: types.Type, values: types.Type, *args: types.Type) -> Any:
    if not isinstance(values, types.BaseTuple):
        return None
    inner = [_resolve(context, function, t, index, *args) for t in values.types]
    if any(sig is None for sig in inner):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        for n, (sig, ty) in enumerate(zip(inner, values.types)):
            given = (b.extract_value(v[1], n), i32(n), *v[2:])
            _call(c, b, (function, v[0], sig), given, (ty, index, *args), sig.return_type)

    return signature(types.none, function, values, *args), codegen


@atom(_type_each)
def each(function: Any, values: tuple, *args: Any) -> None:
    """``function(value, i, *args)`` for every value of a tuple, unrolled."""
    for i, value in enumerate(values):
        function(value, i, *args)


def _type_join(context: TypingContext, parts: types.Type) -> Any:
    if not isinstance(parts, types.BaseTuple) or not all(isinstance(p, types.BaseTuple) for p in parts.types):
        return None
    result = types.BaseTuple.from_types([t for part in parts.types for t in part.types])

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = []
        for n, part in enumerate(parts.types):
            inner = b.extract_value(v[0], n)
            out += [b.extract_value(inner, k) for k in range(len(part.types))]
        return c.make_tuple(b, result, out)

    return signature(result, parts), codegen


@atom(_type_join)
def join(parts: tuple) -> tuple:
    """A tuple of tuples as one tuple."""
    return tuple([value for part in parts for value in part])


def to_and_fro(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """The places (i, j) of an outer product column by column, down one and up the next: neighbours in this order share a
    factor, which the reuse cache of the arithmetic units then has. No element's own order of terms depends on it.

    >>> list(to_and_fro(2, 2))
    [(0, 0), (1, 0), (1, 1), (0, 1)]
    """
    for j in range(columns):
        for i in range(rows) if j % 2 == 0 else reversed(range(rows)):
            yield i, j


def _type_outer(context: TypingContext, function: types.Type, c: types.Type, a: types.Type, b: types.Type, depth: types.Type,
                *args: types.Type) -> Any:
    if not all(isinstance(t, types.UniTuple) for t in (c, a, b)) or not isinstance(depth, types.IntegerLiteral):
        return None
    k = int(depth.literal_value)
    rows, columns = a.count // k, b.count // k
    kept = _of_any_value(c)
    inner = _resolve(context, function, kept.dtype, a.dtype, b.dtype, *args)
    if inner is None or rows * columns != c.count:
        return None

    def codegen(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        parts = [[builder.extract_value(v[at], n) for n in range(ty.count)] for at, ty in ((1, c), (2, a), (3, b))]
        out, lhs, rhs = parts
        out = [ctx.cast(builder, value, c.dtype, kept.dtype) for value in out]
        for step in range(k):
            for i, j in to_and_fro(rows, columns):
                n = i + j * rows
                operands = (out[n], lhs[step * rows + i], rhs[step * columns + j], *v[5:])
                out[n] = _call(ctx, builder, (function, v[0], inner), operands, (kept.dtype, a.dtype, b.dtype, *args),
                               kept.dtype)
        return ctx.make_tuple(builder, kept, out)

    return signature(kept, function, c, a, b, depth, *args), codegen


@atom(_type_outer)
def outer(function: Any, c: tuple, a: tuple, b: tuple, depth: int, *args: Any) -> tuple:
    """An outer product of register vectors: ``c[i, j] = function(c[i, j], a[k, i], b[k, j], *args)`` for k < depth.

    ``a`` holds ``depth`` groups of rows, ``b`` as many of columns; ``c`` is rows x columns, rows first.
    """
    rows, columns = len(a) // depth, len(b) // depth
    if args and getattr(args[0], "is_elementwise", False) and is_of_one_type(a + b + c):
        lhs, rhs = np.array(a).reshape(depth, 1, rows), np.array(b).reshape(depth, columns, 1)
        sums = np.array(c).reshape(columns, rows)
        for step in range(depth):
            sums = function(sums, lhs[step], rhs[step], *args)
        return tuple(sums.reshape(-1))
    out = list(c)
    for step in range(depth):
        for j in range(columns):
            for i in range(rows):
                n = i + j * rows
                out[n] = function(out[n], a[step * rows + i], b[step * columns + j], *args)
    return tuple(out)


def _type_fold(context: TypingContext, count: types.Type, function: types.Type, value: types.Type, *args: types.Type) -> Any:
    kept = _of_any_value(value)
    inner = _resolve(context, function, kept, index, *args)
    if inner is None or not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = c.cast(b, v[2], value, kept)
        for n in range(int(count.literal_value)):
            out = _call(c, b, (function, v[1], inner), (out, i32(n), *v[3:]), (kept, index, *args), kept)
        return out

    return signature(kept, count, function, value, *args), codegen


def _of_any_value(ty: types.Type) -> Any:
    """The type of a value that will change: not that of a constant, which is its value."""
    if isinstance(ty, types.BaseTuple):
        return types.BaseTuple.from_types([_of_any_value(t) for t in ty.types], getattr(ty, "instance_class", None))
    if isinstance(ty, types.Literal):
        return {WeakIntLiteral: index, WeakFloatLiteral: weak_float64}.get(type(ty), types.unliteral(ty))
    return ty


@atom(_type_fold)
def fold(count: int, function: Any, value: V, *args: Any) -> V:
    """``for n in range(count): value = function(value, n, *args)``, unrolled; the value keeps its type."""
    for n in range(count):
        value = function(value, n, *args)
    return value


def _parted(part_of: Callable[[int, int, int], slice], counts: bool) -> Callable[..., Any]:
    """The typer of what makes a tuple of tuples of one: ``part_of(n, parts, size)`` says of which values. ``counts``: its
    number is that of the parts, not their size."""
    def typer(context: TypingContext, values: types.Type, number: types.Type) -> Any:
        if not isinstance(values, types.UniTuple) or not isinstance(number, types.IntegerLiteral):
            return None
        n = int(number.literal_value)
        if n < 1 or values.count % n:
            return None
        count, size = (n, values.count // n) if counts else (values.count // n, n)
        part = types.UniTuple(values.dtype, size)
        result = types.UniTuple(part, count)

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            given = [b.extract_value(v[0], n) for n in range(values.count)]
            return c.make_tuple(b, result, [c.make_tuple(b, part, given[part_of(n, count, size)]) for n in range(count)])

        return signature(result, values, number), codegen

    return typer


@atom(_parted(lambda n, count, size: slice(n * size, (n + 1) * size), counts=False))
def split(values: tuple, size: int) -> tuple:
    """A tuple as a tuple of tuples of ``size`` values: what `join` puts together again."""
    return tuple([values[n:n + size] for n in range(0, len(values), size)])


def _type_interleave(context: TypingContext, parts: types.Type) -> Any:
    if not isinstance(parts, types.UniTuple) or not isinstance(parts.dtype, types.UniTuple):
        return None
    result = types.UniTuple(parts.dtype.dtype, parts.count * parts.dtype.count)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given = [b.extract_value(v[0], n) for n in range(parts.count)]
        return c.make_tuple(b, result, [b.extract_value(part, n) for n in range(parts.dtype.count) for part in given])

    return signature(result, parts), codegen


@atom(_type_interleave)
def interleave(parts: tuple) -> tuple:
    """Tuples of one length as one tuple: the first value of each, then the second of each, and so on."""
    return tuple(part[n] for n in range(len(parts[0])) for part in parts)


@atom(_parted(lambda n, count, size: slice(n, None, count), counts=True))
def deal(values: tuple, count: int) -> tuple:
    """A tuple as ``count`` tuples, dealt out one by one: what `interleave` puts together again."""
    return tuple(values[n::count] for n in range(count))


# --------------------------------------------------------------------------------------------------
# Reductions over tuples of registers, unrolled: one chain of dependent operations, or several side by side.
#
# `control.fold` counts, and `registers.apply` maps one tuple. `reduce` folds over a tuple's values, and `together` maps
# two: ``reduce(f, groups[0], groups[1:])`` with an ``f`` that is `together` has as many chains as a group has values,
# which hides the latency of one.
#
# >>> reduce(max, 1, (5, 3)), together(max, (1, 4), (2, 3))
# (5, (2, 4))

def _type_reduce(context: TypingContext, function: types.Type, value: types.Type, values: types.Type,
                 *args: types.Type) -> Any:
    kept = types.unliteral(value)
    if values == types.Tuple(()):
        return signature(kept, function, value, values, *args), lambda c, b, s, v: c.cast(b, v[1], value, kept)
    inner = _resolve(context, function, kept, values.dtype, *args) if isinstance(values, types.UniTuple) else None
    if inner is None:
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = c.cast(b, v[1], value, kept)
        for n in range(values.count):
            given = (out, b.extract_value(v[2], n), *v[3:])
            out = _call(c, b, (function, v[0], inner), given, (kept, values.dtype, *args), kept)
        return out

    return signature(kept, function, value, values, *args), codegen


@atom(_type_reduce)
def reduce(function: Any, value: Any, values: tuple, *args: Any) -> Any:
    """``for x in values: value = function(value, x, *args)``, unrolled; the value keeps its type."""
    for x in values:
        value = function(value, x, *args)
    return value


def _type_together(context: TypingContext, function: types.Type, a: types.Type, b: types.Type) -> Any:
    if not all(isinstance(t, types.UniTuple) for t in (a, b)) or a.count != b.count:
        return None
    inner = _resolve(context, function, a.dtype, b.dtype)
    if inner is None:
        return None
    result = types.UniTuple(inner.return_type, a.count)

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        return c.make_tuple(builder, result, [
            _call(c, builder, (function, v[0], inner), [builder.extract_value(x, n) for x in v[1:]], (a.dtype, b.dtype),
                  result.dtype) for n in range(a.count)])

    return signature(result, function, a, b), codegen


@atom(_type_together)
def together(function: Any, a: tuple, b: tuple) -> tuple:
    """``tuple(function(x, y) for x, y in zip(a, b))``, unrolled."""
    return tuple([function(x, y) for x, y in zip(a, b)])


# --------------------------------------------------------------------------------------------------
# Two 16-bit floats in a register, computed with at once.
#
# A function of an element, such as ``lambda x: max(x + 1, 0)``, is typed for a pair where everything that it does has an
# instruction for two: +, - and * with another pair or a constant, max and min with a constant, - and abs. Each half is
# rounded as a single float is, so the results are the same. What cannot be typed (a comparison, a function of `math`) is
# computed element by element.

_SUFFIX = {float16: "f16x2", bfloat16: "bf16x2"}


class PairType(types.Type):
    """Two floats of ``element`` in 32 bits."""

    def __init__(self, element: NarrowFloatType):
        self.element = element
        super().__init__(f"pair({element})")


nb.kept_as(PairType, lambda ty: i32)


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
            given = [v[at], _constant(pair, constant.literal_value)]
            return pair_arithmetic(builder, f"{name}.NaN.{_SUFFIX[pair.element]}", given)

        return signature(pair, *args), codegen

    return typer


def _unary(name: str) -> Callable[..., Any]:
    def typer(context: TypingContext, *args: types.Type) -> Any:
        if len(args) != 1 or not isinstance(args[0], PairType):
            return None
        return signature(args[0], args[0]), lambda c, builder, s, v: (
            pair_arithmetic(builder, f"{name}.{_SUFFIX[args[0].element]}", list(v)))

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
