"""`Softmax`, `RMSNorm` and `LayerNorm` of D's rows, as the last epilogue of a product.

1. A warp makes each row of its part of D standard by that part alone: exp(x - largest), x / root mean square, and so on. So
   what is stored is near 1, whatever the values were.
2. Where the part has all columns of D (*one tile*), a factor (and a shift) for the row finishes the values in registers. So
   it does where the blocks of a cluster have them together (*one cluster*, in Hopper's kernel): blocks exchange their states
   of each row first (`gemmkit.kernels.sm90.exchange`).
3. Else (*two passes*) the part's state of each row is kept in a workspace, and D gets the standard values. A second small
   kernel (`gemmkit.kernels.collectives.lanes`) combines the states of a row, and multiplies each part of it in place.

In two passes values are rounded to D's dtype twice. Of exp(x - largest) and the like both roundings are relative to the
result: at most two units in its last place. (If x itself were stored, the error would be x times that: 3 % of 10 in
bfloat16.)
"""

from __future__ import annotations

import math
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gemmkit.components import Component, Scalar, with_fields
from gemmkit.epilogues.reductions import Reducing, RowStates
from gemmkit.kernels.collectives.lanes import Lanes, power
from gemmkit.kernels.spec import Spec, rule
from gemmkit.lang.aggregates import convert, convert_all
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric
from gemmkit.lang.number_rules import part_dtypes
from gemmkit.lang.registers import apply
from gemmkit.ptx.arithmetic import difference
from gemmkit.ptx.memory import load_global
from gemmkit.runtime.arrays import ArrayInfo, describe, is_array
from gemmkit.runtime.launch import PARTIALS as ROLES
from gemmkit.runtime.launch import described

if TYPE_CHECKING:
    from gemmkit.epilogues.base import Epilogue
    from gemmkit.layouts.base import ArrayLayout

FLOATS = "float16", "bfloat16", "float32", "float64"


# -- what is folded of a part -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Total(Component):
    """The sum of a part's values, as a group of threads asks for it (`Fragments.row_states`, `Lanes.row_states`)."""

    dtype: Any
    state_parts = 1

    def nothing(self) -> Any:
        return convert(self.dtype, 0)

    def state_of(self, x: Numeric, m: int, n: int) -> Any:
        return x

    def combine(self, a: Numeric, b: Numeric) -> Any:
        return a + b


@dataclass(frozen=True)
class Squares(Total):
    def state_of(self, x: Numeric, m: int, n: int) -> Any:
        return x * x


@dataclass(frozen=True)
class Largest(Total):
    def nothing(self) -> Any:
        return convert(self.dtype, -math.inf)

    def combine(self, a: Numeric, b: Numeric) -> Any:
        return max(a, b)                               # NaN where one is


# -- the contract -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Normalise(Reducing):
    """What the three have in common. `reserved` fills in the fields ``dtype`` (in which it computes), ``stored`` (D's),
    ``kept`` (a `RowStates` in two passes, else None) and ``across`` (the blocks of a cluster that have a row together)."""

    dtype: Any = field(default=None, kw_only=True)
    stored: Any = field(default=None, kw_only=True)
    kept: Any = field(default=None, kw_only=True)
    across: int = field(default=1, kw_only=True)

    along_m: ClassVar[bool] = False

    # -- device methods: what a kind says of itself ----------------------------------------------------------------------

    def standard(self, values: Elements, group: Lanes, at: Any) -> Elements:
        """A thread's values, standard by their parts of the rows, and these parts' states."""
        raise NotImplementedError

    def nothing(self) -> Any:
        """The state that changes nothing."""
        raise NotImplementedError

    def combine(self, a: Numeric, b: Numeric) -> Any:
        """The state of two parts."""
        raise NotImplementedError

    def factor(self, own: Numeric, whole: Numeric, shape: StackShape) -> Any:
        """What a standard value is multiplied by: ``own`` is its part's state, ``whole`` its row's."""
        raise NotImplementedError

    def shift(self, own: Numeric, whole: Numeric, shape: StackShape) -> Any:
        """What is added then."""
        return convert(self.dtype, 0)

    def finished(self, values: Elements, factor: Numeric, shift: Numeric, n: int) -> Elements:
        """Neighbours of a row, from column ``n`` on, of standard values."""
        return apply(multiplied, values, factor)

    # -- device methods ---------------------------------------------------------------------------------------------

    def finish_block(self, values: Elements, group: Any, at: Any) -> Elements:
        # 1. Standard values of this part, and its state of each row.
        values, states = self.standard(convert_all(self.dtype, values), group, at)
        if self.is_in_two_passes:
            # 3. The rest is the second kernel's.
            group.keep_rows(self, states, at)
            return values
        # 2. The part is the row, or the cluster's parts are.
        wholes = group.whole_rows(self, states, at) if self.across > 1 else states
        factors = apply(lambda state, r: self.factor(state, wholes[r], at.shape), states)
        shifts = apply(lambda state, r: self.shift(state, wholes[r], at.shape), states)
        return apply(finished_value, values, self, group, factors, shifts, at)

    def keep(self, state: Any, i: int, slot: int, shape: StackShape) -> None:
        self.kept.keep(state, i, slot, shape)

    def words_of(self, state: Any) -> tuple[Any, ...]:
        """A state as 1, 2 or 4 words: what is sent together."""
        if self.state_parts == 1:
            return (state,)
        if self.state_parts == 2:
            return state[0], state[1]
        return state[0], state[1], state[2], convert(self.dtype, 0)

    def of_words(self, words: Elements) -> Any:
        if self.state_parts == 1:
            return words[0]
        if self.state_parts == 2:
            return convert(self.state, (words[0], words[1]))
        return convert(self.state, (words[0], words[1], words[2]))

    def ending(self) -> Any:
        return self

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The dtype of a state."""
        raise NotImplementedError

    @property
    def state_parts(self) -> int:
        return len(part_dtypes(self.state))

    @property
    def total(self) -> Total:
        return Total(self.dtype)

    @property
    def squares(self) -> Squares:
        return Squares(self.dtype)

    @property
    def largest(self) -> Largest:
        return Largest(self.dtype)

    @property
    def is_in_two_passes(self) -> bool:
        return self.kept is not None

    @property
    def passes(self) -> str:
        """How rows are finished, in words (`Plan.row_passes`)."""
        return "two passes" if self.is_in_two_passes else "one cluster" if self.across > 1 else "one tile"

    is_last = True

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless the vectors have an element for each column."""
        for name in ("gain", "bias"):
            value = getattr(self, name, None)
            if value is not None:
                shape = describe(value, name).shape if is_array(value) else value.shape
                if shape[-1:] != (N,):
                    raise ValueError(f"{name} of {type(self).__name__} has shape {shape}; a {M} x {N} result needs {(N,)}")

    def reserved(self, number: int, spec: Spec, sizes: tuple[int, int], products: int, accumulator: np.dtype,
                 layout: ArrayLayout) -> Any:
        """The epilogue for D of ``sizes`` in ``layout``, by the kernel of ``spec``: with a workspace, the ``number``-th of a
        launch, where neither threads nor a cluster's blocks hold all of a row together.

        Raises ConfigError where D cannot hold what comes of it, or the second pass cannot read it.
        """
        name, stored = type(self).__name__, layout.dtype
        rule(stored.names is None and stored.name in FLOATS, "epilogue", self,
             f"its results are not numbers of {stored}; give an out of {', '.join(FLOATS[:-1])} or {FLOATS[-1]}")
        wide = stored == np.float64 or accumulator in (np.float64, np.complex128)
        fields = dict(dtype=np.dtype(np.float64 if wide else np.float32), stored=stored)
        (M, N), width = sizes, spec.parts[1]
        if N <= width:
            return with_fields(self, fields)
        blocks = 1 if wide else spec.blocks_of_a_row(sizes, self.row_words)
        if blocks > 1:
            return with_fields(self, dict(fields, across=blocks))
        plain = getattr(layout, "layout", layout)      # of a folded product
        rule(getattr(plain, "is_plain", False), "epilogue", self,
             f"a row of D has {N} columns and a tile {width}, so that {name} needs a second pass, which reads D again, and "
             f"global_d_layout={layout!r} is not plain; use RowMajor or ColMajor, or a tile of {N} columns")
        rule(number < len(ROLES), "epilogue", self, f"a launch may have {len(ROLES)} reductions; this is one more")
        one = with_fields(self, fields)
        slots = -(-N // width)
        count = products * slots * M
        rule(count < 2**31, "epilogue", self, f"its {count} partial states are 2**31 or more; use fewer rows at a time")
        return with_fields(one, dict(kept=RowStates(described(ROLES[number], count, one.state), one.state, slots, width)))


def multiplied(x: Numeric, n: int, factor: Numeric) -> Any:
    return x * factor


def finished_value(x: Numeric, n: int, epilogue: Any, group: Lanes, factors: Elements, shifts: Elements, at: Any) -> Any:
    r = group.row(n)
    return epilogue.finished((x,), factors[r], shifts[r], group.column(n, at))[0]


# -- softmax --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Softmax(Normalise):
    """exp(x - largest) over its sum, of each row of D: the last epilogue of a chain.

    ``Scale(0.125) | Causal() | Softmax()`` computes the softmax of masked scores: a masked value is 0. In a stack the rows
    are those of each product. A row of -inf alone, or with a NaN or inf, is NaN, as in NumPy. D is float16, bfloat16,
    float32 or float64. 16-bit results are computed in float32, and are within two units in the last place.

    If one tile of D has all columns, or the tiles of a cluster (Hopper) have them, the kernel finishes rows in registers.
    Otherwise a second kernel finishes them in a second pass over D (`Plan.row_passes` says which). Results have the same
    bits every time.

    Raises TypeError for an epilogue behind it, ValueError for another axis, ConfigError for a D of other numbers and for
    two passes over a D that is not plain.

    >>> import numpy as np, gemmkit as gk
    >>> a = np.float32([[0, 0], [3, 3]])
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), epilogue=Softmax()).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    row_words = 2

    axis: str = "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axis != "rows":
            raise ValueError(f"Softmax(axis={self.axis!r}): only rows are supported; for columns compute the transpose, "
                             "gk.matmul(b.T, a.T, out=d.T, epilogue=Softmax())")

    def standard(self, values: Elements, group: Any, at: Any) -> Elements:
        tops = group.row_states(self.largest, values, at)
        raised = apply(lambda x, n: power(self, difference(x, self.finite(tops[group.row(n)]))), values)
        return raised, apply(softmax_state, tops, self, group.row_states(self.total, raised, at))

    def nothing(self) -> Any:
        return convert(self.state, (-math.inf, 0.0))

    def combine(self, a: Any, b: Any) -> Any:
        top = max(a.largest, b.largest)
        low = self.finite(top)
        return convert(self.state, (top, a.total * power(self, a.largest - low) + b.total * power(self, b.largest - low)))

    def factor(self, own: Any, whole: Any, shape: StackShape) -> Any:
        return power(self, own.largest - whole.largest) / whole.total

    def finite(self, top: Numeric) -> Any:
        """A part of -inf alone has values 0, not NaN."""
        return top if top != -math.inf else convert(self.dtype, 0)

    @property
    def state(self) -> Any:
        return np.dtype([("largest", self.dtype), ("total", self.dtype)])

    @property
    def is_narrow(self) -> bool:
        return bool(self.dtype == np.float32 and self.stored.itemsize == 2)


def softmax_state(top: Numeric, r: int, softmax: Any, totals: Elements) -> Any:
    return convert(softmax.state, (top, totals[r]))


# -- norms ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Norm(Normalise):
    """What the two have in common: standard values are those of a part over its root mean square."""

    def own_scale(self, squares: Numeric) -> Any:
        """What makes a part's values standard, of their sum of squares; 1 where that is no number."""
        if squares > 0 and squares < math.inf:
            return self.root(squares / convert(self.dtype, self.width))
        return convert(self.dtype, 1)

    def root(self, x: Any) -> Any:
        """1 / sqrt(x); of 0 it is infinite."""
        return convert(self.dtype, 1) / convert(self.dtype, math.sqrt(x))

    @property
    def width(self) -> int:
        """Columns of a part; within one tile any number will do."""
        return self.kept.width if self.is_in_two_passes else 1


@dataclass(frozen=True)
class RMSNorm(Norm):
    """x / sqrt(mean of squares + eps) of each row of D, times ``gain[n]``: the last epilogue of a chain.

    Args:
        gain: N elements of any dtype, of a stack of products with the stack's dimensions before; None for 1.
        eps: a run-time number.

    All else is as with `Softmax`.

    >>> import numpy as np, gemmkit as gk
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([[1, 7]]), np.eye(2, dtype=np.float32), epilogue=RMSNorm(np.float32([1, 10]), 0.0)).tolist()
    [[0.20000000298023224, 14.0]]
    """

    array_ndims = MappingProxyType({"gain": 1})
    row_words = 1

    gain: Any = None
    eps: Scalar = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_vector(self, "gain")
        check_eps(self)

    def standard(self, values: Elements, group: Any, at: Any) -> Elements:
        sums = group.row_states(self.squares, values, at)
        return apply(scaled_value, values, group, apply(scale_of, sums, self)), sums

    def nothing(self) -> Any:
        return convert(self.dtype, 0)

    def combine(self, a: Numeric, b: Numeric) -> Any:
        return a + b

    def factor(self, own: Numeric, whole: Numeric, shape: StackShape) -> Any:
        return self.root(whole / convert(self.dtype, shape.N) + convert(self.dtype, self.eps)) / self.own_scale(own)

    def finished(self, values: Elements, factor: Numeric, shift: Numeric, n: int) -> Elements:
        scaled = apply(multiplied, values, factor)
        if self.gain is None:
            return scaled
        return convert_all(self.dtype, apply(times_column, scaled, load_global(self.gain, 0, (n,), (0,), len(values))))

    @property
    def state(self) -> Any:
        return self.dtype


@dataclass(frozen=True)
class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) of each row of D, times ``gain[n]`` plus ``bias[n]``: the last epilogue of a chain.

    The kernel sums the variance about the means of the parts, so nothing cancels. All products of a stack share one gain and
    one bias. Everything else is as with `RMSNorm` and `Softmax`.

    >>> import numpy as np, gemmkit as gk
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([[1, 3]]), np.eye(2, dtype=np.float32), epilogue=LayerNorm()).round(2).tolist()
    [[-1.0, 1.0]]
    """

    row_words = 4

    gain: Any = None
    bias: Any = None
    eps: Scalar = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_vector(self, "gain", 1)
        check_vector(self, "bias", 1)
        check_eps(self)

    def standard(self, values: Elements, group: Any, at: Any) -> Elements:
        count = convert(self.dtype, group.held_columns(at))
        means = apply(divided, group.row_states(self.total, values, at), count)
        values = apply(lambda x, n: x - means[group.row(n)], values)
        sums = group.row_states(self.squares, values, at)
        return apply(scaled_value, values, group, apply(scale_of, sums, self)), apply(moments, means, self, sums, count)

    def nothing(self) -> Any:
        return convert(self.state, (0.0, 0.0, 0.0))

    def combine(self, a: Any, b: Any) -> Any:
        """Chan's: of two parts' means, squares about them, and counts."""
        count = a.count + b.count
        far, part = b.mean - a.mean, b.count / max(count, convert(self.dtype, 1))
        return convert(self.state, (a.mean + far * part, a.squares + b.squares + far * far * a.count * part, count))

    def scale(self, whole: Any, shape: StackShape) -> Any:
        return self.root(whole.squares / convert(self.dtype, shape.N) + convert(self.dtype, self.eps))

    def factor(self, own: Any, whole: Any, shape: StackShape) -> Any:
        return self.scale(whole, shape) / self.own_scale(own.squares)

    def shift(self, own: Any, whole: Any, shape: StackShape) -> Any:
        return (own.mean - whole.mean) * self.scale(whole, shape)

    def finished(self, values: Elements, factor: Numeric, shift: Numeric, n: int) -> Elements:
        made = apply(moved, values, factor, shift)
        if self.gain is not None:
            made = convert_all(self.dtype, apply(times_column, made, load_global(self.gain, 0, (n,), (0,), len(values))))
        if self.bias is not None:
            made = convert_all(self.dtype, apply(plus_column, made, load_global(self.bias, 0, (n,), (0,), len(values))))
        return made

    @property
    def state(self) -> Any:
        return np.dtype([("mean", self.dtype), ("squares", self.dtype), ("count", self.dtype)])


def divided(x: Numeric, n: int, count: Any) -> Any:
    return x / count


def moments(mean: Numeric, r: int, norm: Any, sums: Elements, count: Any) -> Any:
    return convert(norm.state, (mean, sums[r], count))


def moved(x: Numeric, n: int, factor: Numeric, shift: Numeric) -> Any:
    return x * factor + shift


def times_column(x: Numeric, n: int, gains: Elements) -> Any:
    return x * gains[n]


def plus_column(x: Numeric, n: int, biases: Elements) -> Any:
    return x + biases[n]


def scale_of(squares: Numeric, r: int, norm: Any) -> Any:
    return norm.own_scale(squares)


def scaled_value(x: Numeric, n: int, group: Lanes, scales: Elements) -> Any:
    return x * scales[group.row(n)]


# -- what is given ------------------------------------------------------------------------------------------------------

def check_vector(epilogue: Epilogue, name: str, most: int = 8) -> None:
    value = getattr(epilogue, name)
    if value is None or isinstance(value, ArrayInfo):
        return
    if not is_array(value):
        raise TypeError(f"{type(epilogue).__name__}({name}={value!r}): a vector with an element for each column, or None, "
                        "is needed")
    info = describe(value, name)
    if not 1 <= len(info.shape) <= most:
        raise ValueError(f"{name} of {type(epilogue).__name__} has shape {info.shape}; a vector of N elements is needed")
    if len(part_dtypes(info.dtype)) > 1:
        raise TypeError(f"{name} of {type(epilogue).__name__} has dtype {info.dtype}; it must be real, because D's rows are")


def check_eps(epilogue: Any) -> None:
    eps = epilogue.eps
    is_number = isinstance(eps, (int, float, np.integer, np.floating)) and not isinstance(eps, bool)
    if not is_number or not 0 <= eps < 2.0**128:
        raise ValueError(f"{type(epilogue).__name__}(eps={eps!r}): a number from 0 on that float32 holds is needed")
