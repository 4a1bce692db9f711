"""`Softmax`, `RMSNorm` and `LayerNorm` of D's rows, as the last epilogue of a product.

`gemmkit.epilogues.softmax` and `gemmkit.epilogues.norms` have the three themselves.

1. A warp makes each row of its part of D standard by that part alone: exp(x - largest), x / root mean square, and so on. So
   what is stored is near 1, whatever the values were.
2. Where the part has all columns of D (*one tile*), a factor (and a shift) for the row finishes the values in registers. So
   it does where the blocks of a cluster have them together (*one cluster*, in Hopper's kernel): blocks exchange their states
   of each row first (`gemmkit.kernels.sm90.row_exchange`).
3. Else (*two passes*) the part's state of each row is kept in a workspace, and D gets the standard values. A second small
   kernel (`gemmkit.kernels.common.rescaling`) combines the states of a row, and multiplies each part of it in place.

In two passes values are rounded to D's dtype twice. Of exp(x - largest) and the like both roundings are relative to the
result: at most two units in its last place. (If x itself were stored, the error would be x times that: 3 % of 10 in
bfloat16.)
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from gemmkit.components import Component, with_fields
from gemmkit.epilogues.partial import Kept, Reducing
from gemmkit.kernels.common.rules import rule
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.records import part_dtypes
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert, convert_all
from gemmkit.runtime.arrays import describe, is_array
from gemmkit.runtime.workspace import PARTIALS as ROLES
from gemmkit.runtime.workspace import described

__all__ = ["Largest", "Normalise", "Squares", "Total", "multiplied"]

FLOATS = "float16", "bfloat16", "float32", "float64"


# -- what is folded of a part -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Total(Component):
    """The sum of a part's values, as a group of threads asks for it (`Fragments.row_states`, `Lanes.row_states`)."""

    dtype: Any
    state_parts = 1

    def nothing(self) -> Any:
        return convert(self.dtype, 0)

    def state_of(self, x: Any, m: int, n: int) -> Any:
        return x

    def combine(self, a: Any, b: Any) -> Any:
        return a + b


@dataclass(frozen=True)
class Squares(Total):
    def state_of(self, x: Any, m: int, n: int) -> Any:
        return x * x


@dataclass(frozen=True)
class Largest(Total):
    def nothing(self) -> Any:
        return convert(self.dtype, -math.inf)

    def combine(self, a: Any, b: Any) -> Any:
        return max(a, b)                               # NaN where one is


# -- the contract -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Normalise(Reducing):
    """What the three have in common. `reserved` fills in the fields ``dtype`` (in which it computes), ``stored`` (D's),
    ``kept`` (a `Kept` in two passes, else None) and ``across`` (the blocks of a cluster that have a row together)."""

    dtype: Any = field(default=None, kw_only=True)
    stored: Any = field(default=None, kw_only=True)
    kept: Any = field(default=None, kw_only=True)
    across: int = field(default=1, kw_only=True)

    along_m: ClassVar[bool] = False

    # -- device methods: what a kind says of itself ----------------------------------------------------------------------

    def standard(self, values: tuple, group: Any, at: Any) -> tuple:
        """A thread's values, standard by their parts of the rows, and these parts' states."""
        raise NotImplementedError

    def nothing(self) -> Any:
        """The state that changes nothing."""
        raise NotImplementedError

    def combine(self, a: Any, b: Any) -> Any:
        """The state of two parts."""
        raise NotImplementedError

    def factor(self, own: Any, whole: Any, shape: Any) -> Any:
        """What a standard value is multiplied by: ``own`` is its part's state, ``whole`` its row's."""
        raise NotImplementedError

    def shift(self, own: Any, whole: Any, shape: Any) -> Any:
        """What is added then."""
        return convert(self.dtype, 0)

    def finished(self, values: tuple, factor: Any, shift: Any, n: int) -> tuple:
        """Neighbours of a row, from column ``n`` on, of standard values."""
        return apply(multiplied, values, factor)

    # -- device methods ---------------------------------------------------------------------------------------------

    def finish_block(self, values: tuple, group: Any, at: Any) -> tuple:
        # 1. Standard values of this part, and its state of each row.
        values, states = self.standard(convert_all(self.dtype, values), group, at)
        if self.is_in_two_passes:
            # 3. The rest is the second kernel's.
            group.keep_rows(self, states, at)
            return values
        # 2. The part is the row, or the cluster's parts are.
        wholes = group.whole_rows(self, states, at) if self.across > 1 else states
        factors, shifts = apply(factor_of, states, self, wholes, at), apply(shift_of, states, self, wholes, at)
        return apply(finished_value, values, self, group, factors, shifts, at)

    def keep(self, state: Any, i: int, slot: int, shape: Any) -> None:
        self.kept.keep(state, i, slot, shape)

    def words_of(self, state: Any) -> tuple:
        """A state as 1, 2 or 4 words: what is sent together."""
        if self.state_parts == 1:
            return (state,)
        if self.state_parts == 2:
            return state[0], state[1]
        return state[0], state[1], state[2], convert(self.dtype, 0)

    def of_words(self, words: tuple) -> Any:
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

    def reserved(self, number: int, spec: Any, sizes: tuple[int, int], products: int, accumulator: np.dtype,
                 layout: Any) -> Any:
        """The epilogue for D of ``sizes`` in ``layout``, by the kernel of ``spec``: with a workspace, the ``number``-th of a
        launch, where neither threads nor a cluster's blocks hold all of a row together.

        Raises ConfigError where D cannot hold what comes of it, or the second pass cannot read it.
        """
        name, stored = type(self).__name__, layout.dtype
        rule(stored.names is None and stored.name in FLOATS, "epilogue", self,
             f"its results are no numbers of {stored}; give an out of {', '.join(FLOATS[:-1])} or {FLOATS[-1]}")
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
             f"global_d_layout={layout!r} is not plain; take RowMajor or ColMajor, or a tile of {N} columns")
        rule(number < len(ROLES), "epilogue", self, f"a launch may have {len(ROLES)} reductions; this is one more")
        one = with_fields(self, fields)
        slots = -(-N // width)
        count = products * slots * M
        rule(count < 2**31, "epilogue", self, f"its {count} partial states are 2**31 or more; take fewer rows at a time")
        return with_fields(one, dict(kept=Kept(described(ROLES[number], count, one.state), one.state, slots, width)))


def multiplied(x: Any, n: int, factor: Any) -> Any:
    return x * factor


def factor_of(state: Any, r: int, epilogue: Any, wholes: tuple, at: Any) -> Any:
    return epilogue.factor(state, wholes[r], at.shape)


def shift_of(state: Any, r: int, epilogue: Any, wholes: tuple, at: Any) -> Any:
    return epilogue.shift(state, wholes[r], at.shape)


def finished_value(x: Any, n: int, epilogue: Any, group: Any, factors: tuple, shifts: tuple, at: Any) -> Any:
    r = group.row(n)
    return epilogue.finished((x,), factors[r], shifts[r], group.column(n, at))[0]
