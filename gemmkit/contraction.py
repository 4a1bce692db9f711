"""``einsum``: contractions of tensors as single matrix products, without transposition (GETT).

The indices of ``D = einsum(spec, A, B)`` fall into four kinds: those of A and D are the rows of D (M), those of B and D its
columns (N), those that D lacks are summed over (K), and those that all three have count products (the batch). The
operands are then matrices whose rows and columns are made of several dimensions each; `layouts.Tensor` reads and writes
them in place. Dimensions that lie in each other's stride, in both operands that have them, are merged first; where one is
left in each kind the operand is an ordinary strided matrix, and moves as one.

Of each kind the order of the dimensions is free; `gemmkit.modes` chooses it, so that accesses are wide.

A batch is a stack of products (`gemmkit.stacks`), whose dimensions stand before those of the matrices, and one launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.config import check_fields
from gemmkit.emulator.mode import current_mode
from gemmkit.epilogues import Epilogue
from gemmkit.lang.given import check_dtype
from gemmkit.launch import cache
from gemmkit.layouts import Tensor
from gemmkit.matrices import Matrix, unwrapped
from gemmkit.modes import Mode, ordered
from gemmkit.operators import Algebra, Operator
from gemmkit.planning import plan
from gemmkit.problem import asked_dtype, check_places, layout_of
from gemmkit.products import multiply
from gemmkit.runtime.arrays import ArrayInfo, check_aligned, describe, empty_like
from gemmkit.runtime.device import target
from gemmkit.runtime.views import strided
from gemmkit.strides import NOTHING, merged
from gemmkit.subscripts import sizes_of, subscripts
from gemmkit.sums import check_matrix, ones, view_of
from gemmkit.tuning.operators import Sums, algebra_of, check_multiplied, new_dtype


def einsum(spec: str, *operands: Any, out: Any = None, operator: Operator | None = None, epilogue: Epilogue | None = None,
           stream: Any = None, optimize: Any = "auto", dtype: Any = None, **others: Any) -> Any:
    """Sum of products of tensors' elements, as `numpy.einsum` has it.

    Args:
        spec: the indices of each operand and, after ``->``, of the result: ``"abj,jk->bak"``. Without ``->`` the result
            has the indices that occur once, in alphabetical order. An index is one letter. An ellipsis stands for
            dimensions without a name (``"...ij,jk->...k"``), and an index that an operand repeats for its diagonal
            (``"ii"`` is a trace). Where an index is 1 in one operand and more in another, it is broadcast.
        operands: arrays of any strides, of one library. Of two, one or both may be a matrix with structure
            (`gemmkit.Triangular` and the like), of whose indices one is summed over and one is the result's. Three and more
            are contracted two at a time along `opt_einsum`'s path, intermediates in the result's dtype. Of a single one
            the result is a view of it where nothing is summed over and there is no ``out``, as NumPy has it, else the
            product with a generated vector of ones.
        out: where the result goes (any strides); None allocates it in C order, of ``dtype``, or of NumPy's result type.
        operator: what multiplies and sums; None chooses one by dtypes and sizes.
        epilogue: an element-wise function of the result. Its coordinates are the row and column of the matrix product,
            not the tensor's.
        stream: None is the current stream of the operands' library.
        optimize: for three operands and more: a path, or how `opt_einsum.contract_path` is to find one.
        dtype: the result's, which the sums hold, as they hold out's: int8 into int32 is exact. Without both, integers wrap
            in NumPy's result type.

    Returns:
        out.

    Raises:
        ValueError: a spec that does not fit the operands: it asks for an index that no operand has, or for one twice, counts
            operands or dimensions otherwise; sizes of one index that differ; a matrix with structure that is no matrix of
            the product; an ``operator`` for one operand, which has no one of its own.
        TypeError, ConfigError, ComponentError: as `gemmkit.matmul`.

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
                        "epilogue, stream and optimize, and no transforms: give what one makes of the operand (x.conj()), "
                        "or call matmul")
    check_fields({} if operator is None else {"operator": operator})
    terms, result, infos, of_out, operands = _checked(spec, operands, out)
    asked = None if dtype is None else asked_dtype({"dtype": dtype}, None, of_out, "einsum")
    if len(operands) == 1:
        return _of_one(spec, terms[0], result, operands[0], infos[0], out, of_out, operator, epilogue, stream, asked)
    if len(operands) > 2:                  # which are a and b of products that the caller did not write
        for n, info in enumerate(infos):
            if operator is None and algebra_of(info.dtype) is None and info.dtype.kind != "b":
                check_multiplied(info.dtype, f"operand {n}")
        asked = asked if of_out is None else of_out.dtype
        return _chain(terms, result, operands, infos, out, operator, epilogue, stream, optimize, asked)
    recipe, views, keywords, out = _as_matrices(spec, terms, result, operands, infos, out, of_out, operator, epilogue, asked)
    _launch(recipe, views[0], views[1], views[2], stream, keywords)
    return out


def as_product(spec: str, *operands: Any, out: Any = None, operator: Operator | None = None,
               epilogue: Epilogue | None = None, dtype: Any = None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The product of matrices that an `einsum` of two operands is: a, b, out (None makes a new one) and the keywords of
    `gemmkit.matmul`, layouts among them. Nothing is computed. Raises what `einsum` raises, and ValueError for more operands.

    >>> import gemmkit, numpy as np
    >>> a, b = np.ones((2, 3, 4), np.float32), np.ones((4, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     x, y, out, keywords = as_product("aij,ja->ia", a, b)
    ...     gemmkit.matmul(x, y, out=out, **keywords).shape, sorted(keywords)
    ((2, 3, 1), [])
    """
    terms, result, infos, of_out, operands = _checked(spec, operands, out)
    if len(operands) != 2:
        which = "no product" if len(operands) == 1 else "several products; give each of them by itself"
        raise ValueError(f"einsum({spec!r}) of {len(operands)} operands is {which}")
    asked = None if dtype is None else asked_dtype({"dtype": dtype}, None, of_out, "einsum")
    made = _as_matrices(spec, terms, result, operands, infos, out, of_out, operator, epilogue, asked)
    recipe, (a, b, d), keywords, _ = made
    return a, b, d, {**keywords, **_layouts(recipe, _described(a, b, d), keywords)}


def _checked(spec: str, operands: tuple,
             out: Any) -> tuple[tuple[str, ...], str, tuple[ArrayInfo, ...], ArrayInfo | None, tuple[Any, ...]]:
    """The operands' indices, the result's, and the operands as views with each index once."""
    if not isinstance(spec, str):
        raise TypeError(f"spec={spec!r}: a string such as 'ij,jk->ik' is needed")
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


def _array_of(x: Any, operands: tuple, spec: str) -> Any:
    """The array of an operand; one without an array is where the others are."""
    if not isinstance(x, Matrix):
        return x
    others = (getattr(other, "array", None) if isinstance(other, Matrix) else other for other in (x, *operands))
    found = next((other for other in others if other is not None), None)
    if found is None:
        raise TypeError(f"einsum({spec!r}): the operands have no arrays, which would say where to compute; give an "
                        "array among them")
    return found


def _as_matrices(spec: str, terms: tuple[str, ...], result: str, operands: tuple, infos: tuple[ArrayInfo, ...], out: Any,
                 of_out: ArrayInfo | None, operator: Operator | None, epilogue: Epilogue | None,
                 dtype: np.dtype | None = None) -> tuple[Recipe, list[Any], dict[str, Any], Any]:
    """A contraction of two operands: its recipe, the views of A, B and D, the components, and the result."""
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
    copies = target(infos[0].device).arch[0] == 9 and all(i.dtype.itemsize == 2 for i in (*infos, of_out))
    recipe = _recipe(spec, terms, result, tuple((i.shape, i.strides, i.dtype.itemsize) for i in (*infos, of_out)), fixed,
                     copies)
    keywords: dict[str, Any] = {name: value for name, value in (("operator", operator), ("epilogue", epilogue))
                                if value is not None}
    if fixed:
        keywords["gemm_shape"] = dict(zip("MNK", recipe.sizes))
    views = [(x if (term[0] in result) == (n == 0) else x.T) if isinstance(x, Matrix) else strided(x, i, *v)
             for n, (x, i, v, term) in enumerate(zip((a, b, out), (*infos, of_out), recipe.views, (*terms, result)))]
    return recipe, views, keywords, out


def _of_one(spec: str, term: str, result: str, x: Any, info: ArrayInfo, out: Any, of_out: ArrayInfo | None,
            operator: Operator | None, epilogue: Epilogue | None, stream: Any, dtype: np.dtype | None = None) -> Any:
    """`einsum` of one operand: a view, or a product with a column of ones."""
    if operator is not None:
        raise ValueError(f"operator={operator!r}: einsum({spec!r}) of one operand multiplies by one, which an operator does "
                         "not say; leave it out, or contract with an operand of its ones")
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


def _launch(recipe: Recipe, a: Any, b: Any, out: Any, stream: Any, keywords: dict[str, Any]) -> None:
    """The launch. Without components of the user's its plan is kept, which leaves nothing else to do."""
    if isinstance(a, Matrix) or isinstance(b, Matrix):
        keywords = {**keywords, **_layouts(recipe, _described(a, b, out), keywords)}
        a, b, keywords = unwrapped(a, b, (None, out), keywords)
        multiply(a, b, None, None, out, stream, keywords)
        return
    infos: Any = _described(a, b, out)
    key = None
    if not keywords and current_mode() is None:
        key = recipe, tuple((type(x), info[1:7], info.pointer & 15) for x, info in zip((a, b, out), infos))
        known = _plans.get(key)
        if known is not None:
            known(a, b, out=out, stream=stream)
            return
    layouts = _layouts(recipe, infos, keywords)
    if key is None:
        multiply(a, b, None, None, out, stream, {**keywords, **layouts})
        return
    _plans.keep(key, plan(a, b, out=out, **layouts))(a, b, out=out, stream=stream)


def _described(a: Any, b: Any, out: Any) -> list[ArrayInfo | None]:
    """The arrays of a product; None is a matrix with structure."""
    return [None if isinstance(x, Matrix) else describe(x, name) for x, name in ((a, "a"), (b, "b"), (out, "out"))]


def _layouts(recipe: Recipe, infos: Sequence[ArrayInfo | None], keywords: dict[str, Any]) -> dict[str, Any]:
    """The layouts of the views of A, B and D that are no ordinary matrices; None is a matrix that has one."""
    matrices = [info and info._replace(shape=info.shape[recipe.batch:], strides=info.strides[recipe.batch:])
                for info in infos]
    layouts: dict[str, Any] = {f"global_{name}_layout": Tensor.of(info, rows)
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
class Recipe:
    """A contraction resolved: shape and strides of the views of A, B and D; how many of each view's dimensions are its
    matrix's rows (0: it is an ordinary matrix); how many, before these, count products; and M, N and K."""

    views: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    rows: tuple[int, ...]
    batch: int
    sizes: tuple[int, int, int]


LONG = 1024                            # terms of a sum
REREAD = {"m": 256, "k": 512}          # from here on a tile of 256 rows reads twice as much of B as it writes of D, or more


@functools.lru_cache(maxsize=4096)
def _recipe(spec: str, terms: tuple[str, str], result: str, arrays: tuple, fixed: str = "", copies: bool = False) -> Recipe:
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

    # On the ordinary units such a K takes longer than D, moved element by element: A and B lead alone.
    d_is_little = arrays[2][2] >= 4 and math.prod(sizes[x] for x in kinds["k"]) >= LONG
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
    return Recipe(tuple(views), tuple(rows), len(batch), (M, N, K))


def _joined(modes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(extent, stride) of one tensor's dimensions, fastest first: those in each other's stride are one, to it alone."""
    found = merged(modes)
    return [(1, 1)] if found == NOTHING else list(found)


# -- three operands and more ------------------------------------------------------------------------------------------

def _chain(terms: tuple[str, ...], result: str, operands: tuple, infos: tuple[ArrayInfo, ...], out: Any,
           operator: Operator | None, epilogue: Epilogue | None, stream: Any, optimize: Any, dtype: np.dtype | None) -> Any:
    import opt_einsum

    text = f"{','.join(terms)}->{result}"
    if isinstance(optimize, bool):
        optimize = "auto" if optimize else [(0, 1)] * (len(operands) - 1)
    try:
        path, _ = opt_einsum.contract_path(text, *(info.shape for info in infos), shapes=True, optimize=optimize)
    except Exception as error:                     # of a path that is none
        raise ValueError(f"optimize={optimize!r}: opt_einsum finds no path by it ({error}); 'auto', 'greedy', 'optimal', "
                         "True, False or a path of pairs is needed") from None
    if any(len(step) != 2 for step in path):
        raise ValueError(f"optimize={optimize!r}: its path takes {path} at a time; every step must take two operands")
    left, arrays = list(terms), list(operands)
    for step, pair in enumerate(path):
        first, second = sorted(pair)
        here, there = left[first], left[second]
        arguments = arrays[first], arrays[second]
        for at in (second, first):
            del left[at], arrays[at]
        is_last = step == len(path) - 1
        needed = set(result).union(*left)
        kept = result if is_last else "".join(x for x in dict.fromkeys(here + there) if x in needed)
        held = (dtype if out is None else None) if is_last else _held(*arguments, operator, dtype)
        made = einsum(f"{here},{there}->{kept}", *arguments, out=out if is_last else None, operator=operator,
                      epilogue=epilogue if is_last else None, stream=stream, dtype=held)
        left.append(kept)
        arrays.append(made)
    return arrays[0]


def _held(a: Any, b: Any, operator: Operator | None, dtype: np.dtype | None) -> np.dtype | None:
    """The dtype of an intermediate where the result is to hold ``dtype``; None: NumPy's result type."""
    of_a, of_b = (x.dtype if isinstance(x, Matrix) else describe(x).dtype for x in (a, b))
    if dtype is None or any(x.names is not None for x in (dtype, of_a, of_b)) or np.result_type(of_a, of_b) == dtype:
        return None
    sums = Sums(of_a, of_b, dtype)
    return sums.accumulator if operator is None else sums.of_semiring
