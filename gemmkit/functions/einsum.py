"""``einsum``: contractions of tensors as single matrix products (GETT).

The indices of ``D = einsum(spec, A, B)`` fall into four kinds: those of A and D are the rows of D (M), those of B and D its
columns (N), those that D lacks are summed over (K), and those that all three have count products (the batch). The
operands are then matrices whose rows and columns are made of several dimensions each; `layouts.Matricised` reads and writes
them in place. Dimensions that lie in each other's stride, in both operands that have them, are merged first; where one is
left in each kind the operand is an ordinary strided matrix, and moves as one.

Of each kind the order of the dimensions is free; `gemmkit.functions.einsum` chooses it, so that accesses are wide. An
operand is copied into another order first if that costs less than to gather it (`_reordering`).

A batch is a stack of products (`gemmkit.plans.problem`), whose dimensions stand before those of the matrices, and one
launch.
"""

from __future__ import annotations

import functools
import itertools
import math
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gemmkit import shapes
from gemmkit.emulator import current_mode
from gemmkit.epilogues import Epilogue
from gemmkit.kernels.config import check_fields, names_keywords
from gemmkit.lang.checks import check_dtype
from gemmkit.layouts import Matricised
from gemmkit.layouts.joined import InterleavedColumns
from gemmkit.layouts.matrices import GeneratedMatrix, Matrix, unwrapped
from gemmkit.layouts.tensor import WIDE, Mode, ordered
from gemmkit.operators import Algebra, Operator
from gemmkit.plans.adapters import TensorCopy
from gemmkit.plans.launch import KnownCalls, cache
from gemmkit.plans.plan import Plan, ReorderedProduct, multiply, plan
from gemmkit.plans.problem import asked_dtype, check_out, check_places, layout_of, resolve
from gemmkit.runtime.arrays import ArrayInfo, check_aligned, describe, empty_like, strided
from gemmkit.runtime.device import target
from gemmkit.shapes import NOTHING, merged
from gemmkit.tuning.choose import MOST_MOVED
from gemmkit.tuning.operators import AccumulatorRule, algebra_of, check_multiplied, new_dtype

# --------------------------------------------------------------------------------------------------
# What the subscripts of an `einsum` say: the operands' indices, the result's, and views that have each index once.
#
# Three things of NumPy's notation are views. The dimensions of an ellipsis are indices of their own, the last of all
# operands together. An index that an operand repeats is its diagonal: one dimension, whose stride is the sum of both. A
# dimension of extent 1 whose index is larger elsewhere is left out, for its one element goes with all of them.

DOTS = "..."


class OperandView(NamedTuple):
    """An operand with each of its indices once, by shape and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Subscripts(NamedTuple):
    """Indices of the operands' views, the result's, and the views."""

    terms: tuple[str, ...]
    result: str
    views: tuple[OperandView, ...]


@functools.lru_cache(maxsize=4096)
def subscripts(spec: str, shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...], ...]) -> Subscripts:
    """Resolve a spec for operands of these shapes and strides.

    Raises ValueError, naming the term or the operand, for a spec that does not fit them.

    >>> subscripts("...ii->i...", ((2, 3, 3),), ((9, 3, 1),))
    Subscripts(terms=('ai',), result='ia', views=(OperandView(shape=(2, 3), strides=(9, 4)),))
    """
    text = spec.replace(" ", "")
    left, arrow, result = text.partition("->")
    named = tuple(left.split(","))
    for term in (*named, result):
        if (term.replace(DOTS, "") and not term.replace(DOTS, "").isalpha()) or term.count(".") > 3:
            raise ValueError(f"einsum({spec!r}): indices are letters, terms are separated by commas, and one -> may follow "
                             "them; a term may have an ellipsis, three dots, for dimensions without a name")
    if len(named) != len(shapes):
        raise ValueError(f"einsum({spec!r}) has {len(named)} terms and got {len(shapes)} operands")
    unnamed = [_unnamed(spec, n, term, shape) for n, (term, shape) in enumerate(zip(named, shapes))]
    others = _letters_beside(text)
    dots = "".join(next(others) for _ in range(max(unnamed)))
    terms = tuple(term.replace(DOTS, dots[len(dots) - count:]) for term, count in zip(named, unnamed))
    if not arrow:
        once = sorted(label for label in set(left) - set(",.") if left.count(label) == 1)
        result = dots + "".join(once)
    elif dots and DOTS not in result:
        raise ValueError(f"einsum({spec!r}): the operands have dimensions of an ellipsis, and the result has none; write "
                         "... in it")
    result = result.replace(DOTS, dots)
    if len(set(result)) != len(result):
        raise ValueError(f"einsum({spec!r}): the result {text.partition('->')[2]!r} repeats an index")
    missing = set(result) - set("".join(terms))
    if missing:
        raise ValueError(f"einsum({spec!r}): the result has {', '.join(sorted(missing))}, which no operand has")
    sizes = _checked_sizes(spec, named, terms, shapes, dots)
    views = [_view(term, shape, own, sizes) for term, shape, own in zip(terms, shapes, strides)]
    return Subscripts(tuple(term for term, _ in views), result, tuple(view for _, view in views))


def sizes_of(terms: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The extents of indices that fit each other."""
    return {label: extent for term, shape in zip(terms, shapes) for label, extent in zip(term, shape)}


def _unnamed(spec: str, n: int, term: str, shape: tuple[int, ...]) -> int:
    """How many dimensions of operand ``n`` are the ellipsis'."""
    count = len(shape) - len(term.replace(DOTS, ""))
    if count < 0 or (count > 0 and DOTS not in term):
        least = " or more" if DOTS in term else ""
        raise ValueError(f"einsum({spec!r}): {term!r} names {len(term.replace(DOTS, ''))} dimensions{least}, and "
                         f"operand {n} has shape {shape}")
    return count


def _letters_beside(text: str) -> Iterator[str]:
    """Indices that a spec does not use."""
    yield from (letter for letter in string.ascii_letters if letter not in text)
    yield from (letter for letter in map(chr, range(0xC0, 0x3000)) if letter.isalpha() and letter not in text)


def _checked_sizes(spec: str, named: tuple[str, ...], terms: tuple[str, ...], shapes: tuple[tuple[int, ...], ...],
                   dots: str) -> dict[str, int]:
    """The extent of each index: that of its dimensions, of which those of extent 1 are repeated."""
    sizes: dict[str, tuple[int, int]] = {}
    for n, (term, shape) in enumerate(zip(terms, shapes)):
        own: dict[str, int] = {}
        for label, extent in zip(term, shape):
            if own.setdefault(label, extent) != extent:
                raise ValueError(f"einsum({spec!r}): {named[n]!r} repeats {label}, which is {own[label]} and {extent} in "
                                 f"operand {n} (shape {shape}); a diagonal is of equal extents")
            first, known = sizes.setdefault(label, (n, extent))
            if known == 1:
                sizes[label] = n, extent
            elif extent not in (1, known):
                name = "a dimension of the ellipsis" if label in dots else label
                raise ValueError(f"einsum({spec!r}): {name} is {extent} in operand {n} (shape {shape}) and {known} in "
                                 f"operand {first} (shape {tuple(shapes[first])})")
    return {label: extent for label, (_, extent) in sizes.items()}


def _view(term: str, shape: tuple[int, ...], strides: tuple[int, ...], sizes: dict[str, int]) -> tuple[str, OperandView]:
    steps: dict[str, int] = {}
    for label, extent, stride in zip(term, shape, strides):
        if extent == sizes[label]:                         # else it is 1, and repeated
            steps[label] = steps.get(label, 0) + stride
    return "".join(steps), OperandView(tuple(sizes[label] for label in steps), tuple(steps.values()))


# --------------------------------------------------------------------------------------------------
# ``einsum`` of one operand, and of matrices with structure.
#
# Where nothing is summed over the result is a view. A sum is a product with a column of ones that is nowhere in memory
# (`layouts.Generated`): one launch of a product's kernel, which allocates nothing but its result. A matrix with structure
# is taken where its two indices are the two modes that it has.

def view_of(x: Any, info: ArrayInfo, term: str, result: str) -> Any:
    """An operand's dimensions in the order of the result's indices."""
    at = [term.index(label) for label in result]
    return strided(x, info, tuple(info.shape[n] for n in at), tuple(info.strides[n] for n in at))


@functools.lru_cache(maxsize=256)                          # a component is frozen once
def ones(count: int, dtype: Any) -> GeneratedMatrix:
    """A column of ones, generated as it is read.

    >>> ones(3, "float32").shape
    (3, 1)
    """
    return GeneratedMatrix(_one, (count, 1), dtype)


def _one(i: int, j: int) -> int:
    return 1


def check_matrix(spec: str, n: int, x: Matrix, found: Subscripts) -> None:
    """Raise ValueError unless operand ``n``, a matrix with structure, is a matrix of the product as it is."""
    name = f"einsum({spec!r}): operand {n} is a {type(x).__name__}"
    if isinstance(x, InterleavedColumns) or hasattr(x, "product"):
        raise ValueError(f"{name}, which has a product of its own; give it to matmul")
    if len(found.terms) != 2:
        raise ValueError(f"{name}, and such a matrix is contracted with one other operand; contract two at a time")
    term, other = found.terms[n], found.terms[1 - n]
    rows = [label for label in term if label in found.result and label not in other]
    summed = {label for label in term + other if label not in found.result}
    if x.ndim != 2 or len(term) != 2 or len(rows) != 1 or len(summed) != 1 or not summed <= set(term) & set(other):
        raise ValueError(f"{name} of shape {x.shape}: one of its two indices must be in the result only, and the other must "
                         "be the index that is summed over")


@names_keywords
def einsum(spec: str, *operands: Any, out: Any = None, operator: Operator | None = None, epilogue: Epilogue | None = None,
           precision: str | None = None, stream: Any = None, optimize: Any = "auto", dtype: Any = None,
           **others: NoReturn) -> Any:
    """Sum of products of tensors' elements, as `numpy.einsum` has it.

    Args:
        spec: the indices of each operand and, after ``->``, of the result: ``"abj,jk->bak"``. Without ``->`` the result has
            the indices that occur once, in alphabetical order. An index is one letter. An ellipsis stands for dimensions
            without a name (``"...ij,jk->...k"``). An operand that repeats an index contributes its diagonal (``"ii"`` is a
            trace). An index of extent 1 in one operand is broadcast.
        operands: arrays of any strides, of one library. If there are two, one or both may be a matrix with structure (such
            as `gemmkit.layouts.TriangularMatrix`): one of its indices is summed over, and one is the result's. Three and
            more are contracted two at a time along `opt_einsum`'s path, with intermediates in the result's dtype. The result
            of one operand is a view if nothing is summed over and there is no ``out``, as in NumPy; otherwise a product with
            a generated vector of ones.
        out: where the result goes (any strides); None allocates it in C order, of ``dtype``, or of NumPy's result type.
        operator: what multiplies and sums; None chooses one by dtypes and sizes.
        epilogue: an element-wise function of the result. Its coordinates are the row and column of the matrix product,
            not the tensor's.
        precision: as of `gemmkit.matmul`, of every product; not of one operand.
        stream: None is the current stream of the operands' library.
        optimize: for three operands and more: a path, or how `opt_einsum.contract_path` is to find one.
        dtype: the result's, which the sums hold, as they hold out's: int8 into int32 is exact. Without both, integers wrap
            in NumPy's result type.

    Returns:
        out.

    Raises:
        ValueError: the spec asks for an index that no operand has, or for one twice, or has another number of operands or
            dimensions; sizes of one index differ; a matrix with structure is no matrix of the product; one operand
            has an ``operator``, which names no neutral factor.
        TypeError, ConfigError, ComponentError: as `gemmkit.matmul`.

    On Hopper, a long product of 16-bit or float32 operands copies those that threads would have to gather into another order
    first, where that costs less. The copies lie in the stream's workspaces, which have the size of the operand, or up to
    twice that. With an operator, an epilogue or a precision nothing is copied.

    >>> import gemmkit, numpy as np
    >>> a, b = np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.ones((4, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     einsum("aij,ja->ia", a, b).tolist()
    [[6.0, 54.0], [22.0, 70.0], [38.0, 86.0]]
    >>> with gemmkit.emulate():
    ...     einsum("aij->j", a).tolist(), float(einsum("...ii->", a[0, :, :3]))
    ([60.0, 66.0, 72.0, 78.0], 15.0)
    """
    if others:
        raise TypeError(f"einsum() got unknown keywords {', '.join(sorted(others))}; it takes out, dtype, operator, "
                        "epilogue, precision, stream and optimize, and no transforms: transform the operand first "
                        "(x.conj()), or call matmul")
    is_quick = False
    is_plain = operator is None and epilogue is None and precision is None
    if len(operands) == 2 and is_plain and current_mode() is None:
        is_quick = dtype is None or isinstance(dtype, (str, type, np.dtype))
        found = _calls.again((spec, dtype), operands, (0,), (), out, stream) if is_quick else None
        if found is not None:
            return found
    check_fields({} if operator is None else {"operator": operator})
    given = operands
    terms, result, infos, of_out, operands = _checked(spec, operands, out)
    asked = None if dtype is None else asked_dtype({"dtype": dtype}, None, of_out, "einsum")
    if len(operands) == 1:
        if precision is not None:
            raise ValueError(f"precision={precision!r}: einsum({spec!r}) of one operand multiplies by ones alone; leave it "
                             "out")
        return _of_one(spec, terms[0], result, operands[0], infos[0], out, of_out, operator, epilogue, stream, asked)
    if len(operands) > 2:                  # which are a and b of products that the caller did not write
        for n, info in enumerate(infos):
            if operator is None and algebra_of(info.dtype) is None and info.dtype.kind != "b":
                check_multiplied(info.dtype, f"operand {n}")
        asked = asked if of_out is None else of_out.dtype
        return _chain(terms, result, operands, infos, out, operator, epilogue, precision, stream, optimize, asked)
    contraction = _arranged(spec, terms, result, operands, infos, out, of_out, operator, epilogue, asked)
    made, views = contraction.arrays[2], list(contraction.arrays)
    launched: Any = _reordered(contraction, stream) if is_plain else None
    if launched is None:
        recipe, views, keywords = contraction.as_matrices(operator, epilogue, precision)
        launched = _launch(recipe, views[0], views[1], views[2], stream, keywords)
    if is_quick and launched is not None:
        _know((spec, dtype), given, launched, views, made, out)
    return made


_calls = KnownCalls()


def _know(rest: Any, given: tuple[Any, ...], launched: Plan | ReorderedProduct, views: list[Any], made: object,
          out: object) -> None:
    """Know such a call from now on."""
    found, at = (tuple(describe(x, "").pointer for x in each) for each in (views[:2], given))
    if found in (at, at[::-1]):                            # neither copies nor operands that begin elsewhere
        pick = None if found == at else itemgetter(0, 2, 1, 3)
        _calls.keep(rest, given, (), out, lambda: launched.known({}, 0, None, describe(made, "out"), pick),
                    launched.stands)


def as_product(spec: str, *operands: Any, out: Any = None, operator: Operator | None = None,
               epilogue: Epilogue | None = None, precision: str | None = None,
               dtype: Any = None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The product of matrices that an `einsum` of two operands is: a, b, out (None makes a new one) and the keywords of
    `gemmkit.matmul`, layouts among them. Nothing is computed. Raises what `einsum` raises, and ValueError for more operands.

    >>> import gemmkit, numpy as np
    >>> a, b = np.ones((2, 3, 4), np.float32), np.ones((4, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     x, y, out, keywords = as_product("aij,ja->ia", a, b)
    ...     gemmkit.matmul(x, y, out=out, **keywords).shape, sorted(keywords)
    ((2, 3, 1), [])
    """
    recipe, (a, b, d), keywords = _one_product(spec, operands, out, operator, epilogue, dtype).as_matrices(
        operator, epilogue, precision)
    return a, b, d, {**keywords, **_layouts(recipe, _described(a, b, d), keywords)}


def as_launched(spec: str, *operands: Any, out: Any = None,
                **keywords: Any) -> tuple[tuple[Any, Any, Any, dict[str, Any]], dict[int, TensorCopy]]:
    """What `as_product` returns, of the product that is launched: behind copies of A (0) and B (1), whose places are
    allocated."""
    if not keywords:
        found = _in_order(_one_product(spec, operands, out))
        if found is not None:
            return (*found.matrices, found.layouts), found.copies
    return as_product(spec, *operands, out=out, **keywords), {}


def _one_product(spec: str, operands: tuple[Any, ...], out: object, operator: Operator | None = None,
                 epilogue: Epilogue | None = None, dtype: object = None) -> DescribedPair:
    """The contraction of an `einsum` of two operands, which are checked."""
    terms, result, infos, of_out, operands = _checked(spec, operands, out)
    if len(operands) != 2:
        which = "no product" if len(operands) == 1 else "several products; give each of them by itself"
        raise ValueError(f"einsum({spec!r}) of {len(operands)} operands is {which}")
    asked = None if dtype is None else asked_dtype({"dtype": dtype}, None, of_out, "einsum")
    return _arranged(spec, terms, result, operands, infos, out, of_out, operator, epilogue, asked)


def _checked(spec: str, operands: tuple[Any, ...],
             out: Any) -> tuple[tuple[str, ...], str, tuple[ArrayInfo, ...], ArrayInfo | None, tuple[Any, ...]]:
    """The operands' indices, the result's, and the operands as views with each index once."""
    if not isinstance(spec, str):
        raise TypeError(f"spec is a {type(spec).__name__}; a string such as 'ij,jk->ik' is needed, in front of the operands")
    if not operands:
        raise ValueError(f"einsum({spec!r}) got no operands; one or more are needed")
    arrays = {n: describe(_array_of(x, operands, spec), f"operand {n}") for n, x in enumerate(operands)}
    of_out = None if out is None else describe(out, "out")
    check_places({**{f"operand {n}": info for n, info in arrays.items()}, "out": of_out})
    infos = []
    for n, x in enumerate(operands):
        info = arrays[n]
        if isinstance(x, Matrix):                          # as it is: its strides are not looked at
            info = info._replace(shape=x.shape, strides=(0,) * x.ndim, dtype=x.dtype)
        check_dtype(info.dtype, f"operand {n}")
        check_aligned(info, f"operand {n}")
        infos.append(info)
    found = subscripts(spec, tuple(info.shape for info in infos), tuple(info.strides for info in infos))
    views = tuple(x if isinstance(x, Matrix) else strided(x, info, *view)
                  for x, info, view in zip(operands, infos, found.views))
    infos = [info._replace(shape=view.shape, strides=view.strides) for info, view in zip(infos, found.views)]
    for n, x in enumerate(operands):
        if isinstance(x, Matrix):
            check_matrix(spec, n, x, found)
    return found.terms, found.result, tuple(infos), of_out, views


def _array_of(x: Any, operands: tuple[Any, ...], spec: str) -> Any:
    """The array of an operand; one without an array is where the others are."""
    if not isinstance(x, Matrix):
        return x
    others = (getattr(other, "array", None) if isinstance(other, Matrix) else other for other in (x, *operands))
    found = next((other for other in others if other is not None), None)
    if found is None:
        raise TypeError(f"einsum({spec!r}): the operands have no arrays, which would say where to compute; give an "
                        "array among them")
    return found


class DescribedPair(NamedTuple):
    """A contraction of two operands in the order in which they are multiplied: what `_recipe` takes, the operands and the
    result, and what they are."""

    described: tuple[Any, ...]
    arrays: tuple[Any, Any, Any]
    infos: tuple[ArrayInfo, ArrayInfo, ArrayInfo]

    def reordering(self) -> tuple[OrderedOperand, ...] | None:
        """`_reordering`; None where it is not known what the product costs, or an operand has a structure."""
        device, (a, b, _) = target(self.infos[0].device), self.infos
        if (device.arch, a.dtype, self.described[4]) != ((9, 0), b.dtype, "") or a.dtype.name not in RATES:
            return None
        if device.sm_count < MEASURED:
            return None
        return _reordering(*self.described, a.dtype.name, (a.pointer % WIDE == 0, b.pointer % WIDE == 0))

    def as_matrices(self, operator: Operator | None, epilogue: Epilogue | None,
                    precision: str | None) -> tuple[ContractionPlan, list[Any], dict[str, Any]]:
        """Its recipe, the views of A, B and D, and the components."""
        _, terms, result, _, fixed, _ = self.described
        recipe = _recipe(*self.described)
        keywords: dict[str, Any] = {name: value for name, value in (("operator", operator), ("epilogue", epilogue),
                                                                    ("precision", precision)) if value is not None}
        if fixed:
            keywords["gemm_shape"] = dict(zip("MNK", recipe.sizes))
        views = [(x if (term[0] in result) == (n == 0) else x.T) if isinstance(x, Matrix) else strided(x, i, *v)
                 for n, (x, i, v, term) in enumerate(zip(self.arrays, self.infos, recipe.views, (*terms, result)))]
        return recipe, views, keywords


def _arranged(spec: str, terms: tuple[str, ...], result: str, operands: tuple[Any, ...], infos: tuple[ArrayInfo, ...],
              out: object, of_out: ArrayInfo | None, operator: Operator | None, epilogue: Epilogue | None,
              dtype: np.dtype | None) -> DescribedPair:
    """A contraction of two operands, with its result."""
    a, b = operands
    if of_out is None:
        sizes = sizes_of(terms, [info.shape for info in infos])
        shape = tuple(sizes[label] for label in result)
        dtypes = infos[0].dtype, infos[1].dtype
        K = math.prod(extent for label, extent in sizes.items() if label not in result)
        out = empty_like(_array_of(a, (b,), spec), shape,
                         new_dtype(*dtypes, operator, target(infos[0].device), dtype, epilogue, K))
        of_out = describe(out, "out")
    if operator is None and epilogue is None and _lies_across(terms, result, of_out):
        a, b, infos, terms = b, a, infos[::-1], terms[::-1]
    fixed = "".join(x for x, given in (("mk", a), ("kn", b)) if isinstance(given, Matrix))
    copies = (target(infos[0].device).arch[0] == 9 and all(i.dtype.itemsize == 2 for i in infos)
              and of_out.dtype.itemsize in (2, 4))
    of_a, of_b = infos
    arrays = tuple((i.shape, i.strides, i.dtype.itemsize) for i in (of_a, of_b, of_out))
    return DescribedPair((spec, terms, result, arrays, fixed, copies), (a, b, out), (of_a, of_b, of_out))


def _of_one(spec: str, term: str, result: str, x: Any, info: ArrayInfo, out: Any, of_out: ArrayInfo | None,
            operator: Operator | None, epilogue: Epilogue | None, stream: Any, dtype: np.dtype | None = None) -> Any:
    """`einsum` of one operand: a view, or a product with a column of ones."""
    if operator is not None:
        raise ValueError(f"operator={operator!r}: einsum({spec!r}) of one operand multiplies by one, and an operator does "
                         "not define its one; leave operator out, or contract with an operand of ones")
    if out is None and epilogue is None and set(term) == set(result) and dtype in (None, info.dtype):
        return view_of(x, info, term, result)
    if info.dtype.kind != "b":
        check_multiplied(info.dtype, "operand 0")
    sizes = sizes_of((term,), (info.shape,))
    if of_out is None:
        out = empty_like(x, tuple(sizes[label] for label in result),
                         new_dtype(info.dtype, info.dtype, None, target(info.device), dtype, epilogue))
        of_out = describe(out, "out")
    summed = "".join(label for label in term if label not in result)
    column = tuple(sizes[label] for label in summed), (0,) * len(summed), info.dtype.itemsize
    of_x, of_d = ((i.shape, i.strides, i.dtype.itemsize) for i in (info, of_out))
    recipe = _recipe(spec, (term, summed), result, (of_x, column, of_d))
    keywords: dict[str, Any] = dict(gemm_shape=dict(zip("MNK", recipe.sizes)))
    if epilogue is not None:
        keywords["epilogue"] = epilogue
    a, d = strided(x, info, *recipe.views[0]), strided(out, of_out, *recipe.views[2])
    _launch(recipe, a, ones(recipe.sizes[2], info.dtype), d, stream, keywords)
    return out


def _launch(recipe: ContractionPlan, a: Any, b: Any, out: Any, stream: Any, keywords: dict[str, Any]) -> Plan | None:
    """The launch. Without components of the user's its plan is kept, which leaves nothing else to do, and returned."""
    if isinstance(a, Matrix) or isinstance(b, Matrix):
        keywords = {**keywords, **_layouts(recipe, _described(a, b, out), keywords)}
        a, b, keywords = unwrapped(a, b, (None, out), keywords)
        multiply(a, b, None, None, out, stream, keywords)
        return None
    infos: Any = _described(a, b, out)
    key = None
    if not keywords and current_mode() is None:
        key = recipe, tuple((type(x), info[1:7], info.pointer & 15) for x, info in zip((a, b, out), infos))
        known: Plan | None = _plans.get(key)
        if known is not None:
            known(a, b, out=out, stream=stream)
            return known
    layouts = _layouts(recipe, infos, keywords)
    if key is None:
        multiply(a, b, None, None, out, stream, {**keywords, **layouts})
        return None
    made: Plan = _plans.keep(key, plan(a, b, out=out, **layouts))
    made(a, b, out=out, stream=stream)
    return made


def _described(a: Any, b: Any, out: Any) -> list[ArrayInfo | None]:
    """The arrays of a product; None is a matrix with structure."""
    return [None if isinstance(x, Matrix) else describe(x, name) for x, name in ((a, "a"), (b, "b"), (out, "out"))]


def _layouts(recipe: ContractionPlan, infos: Sequence[ArrayInfo | None], keywords: dict[str, Any]) -> dict[str, Any]:
    """The layouts of the views of A, B and D that are no ordinary matrices; None is a matrix that has one."""
    matrices = [info and info._replace(shape=info.shape[recipe.batch:], strides=info.strides[recipe.batch:])
                for info in infos]
    layouts: dict[str, Any] = {f"global_{name}_layout": Matricised.of(info, rows)
                               for name, info, rows in zip("abd", matrices, recipe.rows) if rows and info is not None}
    if isinstance(keywords.get("operator"), Algebra):             # a third dimension would be taken for numbers' parts
        layouts = {**{f"global_{name}_layout": layout_of(info, name)
                      for name, info in zip("abd", matrices) if info is not None}, **layouts}
    return layouts


_plans = cache()


# -- which operand comes first ----------------------------------------------------------------------------------------

def _lies_across(terms: Sequence[str], result: str, out: ArrayInfo) -> bool:
    """Whether the result is contiguous along a dimension of the first operand's: then the second should be first, for D is
    best stored by rows. (Components of the user's would see rows for columns, so with them the order is as given.)"""
    contiguous = [x for x, extent, stride in zip(result, out.shape, out.strides) if stride == 1 and extent > 1]
    return any(x in terms[0] and x not in terms[1] for x in contiguous)


# -- which dimensions are rows, columns and terms ---------------------------------------------------------------------

@dataclass(frozen=True)
class ContractionPlan:
    """A contraction resolved: shape and strides of the views of A, B and D; how many of each view's dimensions are its
    matrix's rows (0: it is an ordinary matrix); how many, before these, count products; and M, N and K."""

    views: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    rows: tuple[int, ...]
    batch: int
    sizes: tuple[int, int, int]


LONG = 1024                            # terms of a sum
REREAD = {"m": 256, "k": 512}          # from here on a tile of 256 rows reads twice as much of B as it writes of D, or more


@functools.lru_cache(maxsize=4096)
def _recipe(spec: str, terms: tuple[str, str], result: str, arrays: tuple[Any, ...], fixed: str = "",
            copies: bool = False) -> ContractionPlan:
    """``fixed`` are the kinds of dimensions (m, n, k) of which there is one, whose order is that of a matrix as it is.
    ``copies`` says that Hopper's kernel copies operands of 16 bits (cp.async) that TMA does not take."""
    (a_shape, _, _), (b_shape, _, _), (d_shape, _, _) = arrays
    sizes = sizes_of(terms, (a_shape, b_shape))
    wanted = tuple(sizes[label] for label in result)
    if d_shape != wanted:
        raise ValueError(f"einsum({spec!r}): out has shape {d_shape}; the result has {wanted}")
    strides = [dict(zip(term, own)) for term, (_, own, _) in zip((*terms, result), arrays)]
    counts = [math.prod(shape) for shape, _, _ in arrays]
    a, b, d = strides
    batch = [label for label in result if label in a and label in b]
    kinds = {"m": [x for x in result if x not in b], "n": [x for x in result if x not in a],
             "k": [x for x in dict.fromkeys(terms[0] + terms[1]) if x not in result]}

    def group(kind: str, first: int, second: int) -> list[Mode]:
        """The dimensions of one kind, that the ``first`` and the ``second`` of A, B and D have."""
        made = [Mode(sizes[x], strides[first].get(x, 0), strides[second].get(x, 0)) for x in kinds[kind] if sizes[x] != 1]
        if kind in fixed:
            return made
        is_reread = copies and kind == "n" and all(math.prod(sizes[x] for x in kinds[y]) >= n for y, n in REREAD.items())
        return ordered(made, (arrays[first][2], arrays[second][2]), (counts[first], counts[second]), second == 2,
                       second == 2 and d_is_little, is_reread)

    # On the ordinary units, which multiply numbers of 4 bytes and more, such a K takes longer than D, moved element by
    # element: A and B lead alone.
    d_is_little = min(arrays[0][2], arrays[1][2]) >= 4 and math.prod(sizes[x] for x in kinds["k"]) >= LONG
    m, n, k = group("m", 0, 2), group("n", 1, 2), group("k", 0, 1)
    views, rows = [], []
    for own, up, down in ((a, [(x.extent, x.first) for x in m], [(x.extent, x.first) for x in k]),
                          (b, [(x.extent, x.second) for x in k], [(x.extent, x.first) for x in n]),
                          (d, [(x.extent, x.second) for x in m], [(x.extent, x.second) for x in n])):
        outer = [(sizes[label], own[label]) for label in batch]
        up, down = _joined(up), _joined(down)
        both = [*outer, *up, *down]
        views.append((tuple(extent for extent, _ in both), tuple(stride for _, stride in both)))
        rows.append(0 if len(up) == len(down) == 1 else len(up))
    if any(math.prod(x.extent for x in group) >= 2**31 - 2**10 for group in (m, n, k)):
        raise ValueError(f"einsum({spec!r}) is a product with 2**31 rows, columns or terms, or more; split an index")
    M, N, K = (math.prod(x.extent for x in group) for group in (m, n, k))
    return ContractionPlan(tuple(views), tuple(rows), len(batch), (M, N, K))


def _joined(modes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(extent, stride) of one tensor's dimensions, fastest first: those in each other's stride are one, to it alone."""
    found = merged(modes)
    return [(1, 1)] if found == NOTHING else list(found)


# -- operands in another order ----------------------------------------------------------------------------------------
#
# Threads gather an operand whose dimensions do not merge to those of a matrix. TMA brings a matrix, and is faster: so where
# the product is long beside an operand, the operand is first copied into a workspace, in an order in which it is a matrix.
# (TMA takes boxes of five dimensions, too. But a box of a swizzled line has 64 elements along one dimension, and the tile's
# extents across: they would have to divide the tensor's, so most tensors would be left.)

MEASURED = 132                         # multiprocessors of the device that these are of, an H200
#: Tflop/s of products of ordinary matrices, of tensors that are gathered, and of those of which one is a comb, by dtype.
#: Those of tensors are TCCG's (docs/measured_rows.md, 2026-11-30). The first ones, `COPIED` and `BEGUN` are assumed so far.
RATES = {"float16": (680.0, 390.0, 195.0), "bfloat16": (680.0, 390.0, 195.0), "float32": (50.5, 49.0, 41.0)}
COPIED, BEGUN = 3.2e6, 4.0             # bytes that are read or written in a microsecond, and microseconds of a launch
WORTH = 0.95                           # of the time as it is that the other way takes at most


@functools.lru_cache(maxsize=4096)
def _reordering(spec: str, terms: tuple[str, str], result: str, arrays: tuple[Any, ...], fixed: str, copies: bool,
                dtype: str, aligned: tuple[bool, bool]) -> tuple[OrderedOperand, ...] | None:
    """The operands, of which those that are copied have other strides; None where the product is computed as it is.

    ``aligned`` says which operands begin at multiples of 16 bytes."""
    own = _recipe(spec, terms, result, arrays, fixed, copies)
    plain, gathered, combed = (2e-6 * math.prod((*own.sizes, _products(own))) / rate for rate in RATES[dtype])
    as_it_is = combed if any(map(_is_comb, own.views, own.rows, (own.batch,) * 2)) else gathered
    of_k, of_b = ([x for x in term if x not in result] for term in terms)
    if not any(own.rows[:2]) or as_it_is * WORTH < plain + BEGUN or {*of_k} != {*of_b}:
        return None
    strides = [dict(zip(term, array[1])) for term, array in zip((*terms, result), arrays)]
    sizes = sizes_of(terms, [array[0] for array in arrays[:2]])
    batch = "".join(x for x in result if x in terms[0] and x in terms[1])

    def slowest_first(which: int, kind: Iterable[str]) -> str:
        return "".join(sorted(kind, key=lambda x: -abs(strides[which][x])))

    of_m, of_n = ([x for x in term if x in result and x not in batch] for term in terms)
    listed: list[tuple[float, tuple[OrderedOperand, ...]]] = []
    for m, k in itertools.product(*(dict.fromkeys(slowest_first(n, kind) for n in tensors)
                                    for kind, tensors in ((of_m, (0, 2)), (of_k, (0, 1))))):
        ways = [[OrderedOperand(term, shape, own_strides, False)] * (aligned[n] and 0 not in own_strides) + [
            OrderedOperand.copy(batch, groups, sizes, size) for groups in ((rows, k), (k, rows))]
            for n, (term, (shape, own_strides, size), rows) in enumerate(zip(terms, arrays, (m, slowest_first(2, of_n))))]
        for pair in itertools.product(*ways):
            moved = [2 * math.prod(x.shape) * array[2] for x, array in zip(pair, arrays) if x.is_copy]
            time = plain + sum(count / COPIED + BEGUN for count in moved)
            is_worth = time <= as_it_is * WORTH and max(moved, default=0) < MOST_MOVED
            if is_worth and _is_ordinary(spec, pair, result, arrays, copies):
                turned = sum(x.is_copy and strides[n][x.term[-1]] != 1 for n, x in enumerate(pair))
                listed.append((time + turned, pair))
    return min(listed, key=itemgetter(0))[1] if listed else None


class InOrder(NamedTuple):
    """A contraction's matrices A, B and D where operands have been copied, with D's layout, and the copies."""

    matrices: tuple[Any, Any, Any]
    layouts: dict[str, Any]
    copies: dict[int, TensorCopy]


def _in_order(contraction: DescribedPair) -> InOrder | None:
    """None where the product is computed as it is: because that costs less, or was tuned."""
    orders = contraction.reordering()
    if orders is None:
        return None
    (spec, terms, result, arrays, _, copies), given, infos = contraction
    own, views, _ = contraction.as_matrices(None, None, None)
    a, b, d = (describe(x, "out") for x in views)
    if resolve(a, b, None, d, None, _layouts(own, (a, b, d), {})).chosen_by == "tuned":
        return None
    recipe = _recipe(spec, (orders[0].term, orders[1].term), result,
                     (*((x.shape, x.strides, array[2]) for x, array in zip(orders, arrays)), arrays[2]), "", copies)
    spaces = [empty_like(x, (order.elements,), info.dtype) if order.is_copy else x
              for x, info, order in zip(given, infos, orders)]
    x, y, z = (strided(space, describe(space, "out"), *view) for space, view in zip((*spaces, given[2]), recipe.views))
    moved = {n: TensorCopy(order.of(info, term), describe(space, "out")._replace(shape=order.shape, strides=order.strides))
             for n, (order, info, term, space) in enumerate(zip(orders, infos, terms, spaces)) if order.is_copy}
    return InOrder((x, y, z), _layouts(recipe, _described(x, y, z), {}), moved)


def _reordered(contraction: DescribedPair, stream: object) -> ReorderedProduct | None:
    """The launches of copies and of the product, whose plan is kept. None where the product is computed as it is."""
    if contraction.reordering() is None:
        return None
    given, infos = contraction.arrays, contraction.infos
    check_out(infos[2], dict(zip("ab", infos)))
    key = contraction.described, tuple((type(x), info[1:7], info.pointer & 15) for x, info in zip(given, infos))
    made: ReorderedProduct | None = _plans.get(key) if current_mode() is None else None
    if made is None:
        found = _in_order(contraction)
        if found is None:
            return None
        a, b, d = found.matrices
        made = ReorderedProduct(found.copies, plan(a, b, out=d, **found.layouts))
        if current_mode() is None:
            _plans.keep(key, made)
    made(given[0], given[1], out=given[2], stream=stream)
    return made


class OrderedOperand(NamedTuple):
    """An operand's indices, shape and strides, and whether it is copied to have them."""

    term: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_copy: bool

    @staticmethod
    def copy(batch: str, groups: tuple[str, str], sizes: dict[str, int], itemsize: int) -> OrderedOperand:
        """Matrices in C order, whose rows begin at multiples of 16 bytes."""
        outer, inner = groups
        width = -(-math.prod(sizes[x] for x in inner) * itemsize // WIDE) * WIDE // itemsize
        strides, at = dict[str, int](), 1
        for group, start in ((inner, 1), (batch + outer, width)):
            at = start
            for x in reversed(group):
                strides[x], at = at, at * sizes[x]
        term = batch + outer + inner
        return OrderedOperand(term, tuple(sizes[x] for x in term), tuple(strides[x] for x in term), True)

    @property
    def elements(self) -> int:
        """From the first on, with those between rows."""
        return 1 + shapes.span(zip(self.shape, self.strides))

    def of(self, info: ArrayInfo, term: str) -> ArrayInfo:
        """The operand, whose dimensions are those of ``term``, with its dimensions in this order."""
        at = [term.index(x) for x in self.term]
        return info._replace(shape=self.shape, strides=tuple(info.strides[n] for n in at))


def _is_ordinary(spec: str, pair: Sequence[OrderedOperand], result: str, arrays: Sequence[Any], copies: bool) -> bool:
    """Whether both operands are matrices that TMA takes, and D is written along its lines."""
    described = tuple((x.shape, x.strides, array[2]) for x, array in zip(pair, arrays))
    found = _recipe(spec, (pair[0].term, pair[1].term), result, (*described, arrays[2]), "", copies)
    for (shape, strides), (_, _, size) in zip(found.views, described):
        apart = [stride for extent, stride in zip(shape, strides) if extent > 1]
        if apart.count(1) != 1 or any(stride != 1 and stride * size % WIDE for stride in apart):
            return False
    return not any(found.rows[:2]) and found.views[2][1][found.batch + (found.rows[2] or 1)] == 1


def _is_comb(view: tuple[tuple[int, ...], tuple[int, ...]], rows: int, batch: int) -> bool:
    """Whether neighbours in memory are the second dimension of their group."""
    strides = view[1][batch:]
    return rows > 0 and 1 in strides and strides.index(1) not in (0, rows)


def _products(recipe: ContractionPlan) -> int:
    return math.prod(recipe.views[2][0][:recipe.batch])


# -- three operands and more ------------------------------------------------------------------------------------------

def _chain(terms: tuple[str, ...], result: str, operands: tuple[Any, ...], infos: tuple[ArrayInfo, ...], out: Any,
           operator: Operator | None, epilogue: Epilogue | None, precision: str | None, stream: Any, optimize: Any,
           dtype: np.dtype | None) -> Any:
    import opt_einsum

    text = f"{','.join(terms)}->{result}"
    if isinstance(optimize, bool):
        optimize = "auto" if optimize else [(0, 1)] * (len(operands) - 1)
    try:
        path, _ = opt_einsum.contract_path(text, *(info.shape for info in infos), shapes=True, optimize=optimize)
    except Exception as error:                     # of a path that is none
        raise ValueError(f"optimize={optimize!r}: opt_einsum finds no path with it ({error}); 'auto', 'greedy', 'optimal', "
                         "True, False or a path of pairs is needed") from None
    if any(len(step) != 2 for step in path):
        raise ValueError(f"optimize={optimize!r}: its path contracts "
                         f"{path} at a time; every step must contract two operands")
    left, arrays = list(terms), list(operands)
    whole = dtype or _result_type(infos)           # a pair's own type may hold less: bool times bool is no count
    for step, pair in enumerate(path):
        first, second = sorted(pair)
        here, there = left[first], left[second]
        arguments = arrays[first], arrays[second]
        for at in (second, first):
            del left[at], arrays[at]
        is_last = step == len(path) - 1
        needed = set(result).union(*left)
        kept = result if is_last else "".join(x for x in dict.fromkeys(here + there) if x in needed)
        held = _held(*arguments, operator, whole)
        if is_last:                                # operands that were widened do not widen the result
            own = dtype or getattr(epilogue, "result_dtype", None) or (whole if held is not None else None)
            held = own if out is None else None
        made = einsum(f"{here},{there}->{kept}", *arguments, out=out if is_last else None, operator=operator,
                      epilogue=epilogue if is_last else None, precision=precision, stream=stream, dtype=held)
        left.append(kept)
        arrays.append(made)
    return arrays[0]


def _result_type(infos: Sequence[ArrayInfo]) -> np.dtype | None:
    """NumPy's result type of all operands; None where there is none, or numbers have parts."""
    dtypes = [info.dtype for info in infos]
    if any(x.names is not None for x in dtypes):
        return None
    try:
        return np.result_type(*dtypes)
    except TypeError:                              # float8 with bfloat16: products of pairs decide
        return None


def _held(a: Any, b: Any, operator: Operator | None, dtype: np.dtype | None) -> np.dtype | None:
    """The dtype of an intermediate where the result is to hold ``dtype``; None: NumPy's result type."""
    of_a, of_b = (x.dtype if isinstance(x, Matrix) else describe(x).dtype for x in (a, b))
    if dtype is None or any(x.names is not None for x in (dtype, of_a, of_b)) or np.result_type(of_a, of_b) == dtype:
        return None
    sums = AccumulatorRule(of_a, of_b, dtype)
    return sums.accumulator if operator is None else sums.of_semiring
