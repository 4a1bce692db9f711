"""Drawn cases: a *family* (kernel, operator, layouts, transforms, epilogue, mapping: what is compiled) and a *problem* (sizes,
values, alpha and beta: what is computed with it).

Both are plain data whose ``repr`` can be pasted. `tests.support.drawn_strategies` draws them, and `run` computes one on a machine
and compares it with NumPy in float64; what surrounds the operands in memory is NaN, and what surrounds the results may not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (names its dtypes for NumPy)
import numpy as np

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.kernels.collectives.scheduler import Columns, Grouped, Hilbert, Order
from gemmkit.lang.number_rules import part_dtypes
from gemmkit.layouts import ColMajor, Padded, Planes, RowMajor, Swizzled
from gemmkit.operators import Algebra, FPUOp, MMAOp, Operator, Semiring, WGMMAOp, WMMAOp
from gemmkit.tiling import Tile
from tests.support import drawn_functions as functions
from tests.support.drawn_memory import Held, Place, hold
from tests.support.drawn_reference import (
    Bounded,
    algebra_product,
    assert_within,
    product,
    rounded,
    semiring_product,
    through,
)
from tests.support.machines import epsilon, poison
from tests.support.user_layouts import Hankel, Packed, Toeplitz

WIDEST = Semiring(max, min, -math.inf)
SEMIRINGS = {"min_plus": operators.MIN_PLUS, "max_plus": operators.MAX_PLUS, "max_times": operators.MAX_TIMES,
             "log_sum_exp": operators.LOG_SUM_EXP, "or_and": operators.OR_AND, "widest": WIDEST}
ALGEBRAS = {"complex": operators.COMPLEX, "dual": operators.DUAL, "dual2": operators.dual(2), "split": operators.SPLIT_COMPLEX,
            "quaternion": operators.QUATERNION, "fractions": Algebra(None, [[[1, 0], [0, 1]], [[0, 1], [0.5, -2]]])}
ORDERS: dict[str, Order] = {"columns": Columns(), "grouped1": Grouped(1), "grouped3": Grouped(3), "hilbert": Hilbert()}
DIMS = {"a": "MK", "b": "KN", "c": "MN", "d": "MN"}


# -- what a case is -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Family:
    """What is compiled; the fields are plain data.

    ``residues``: sizes are these modulo 16, so that all problems are of one class; ``edge``: the sizes, if any, that the last
    problem has instead. ``call``: "conf", "gemmEx" (with conf) or "dispatch" (no conf: gemmkit chooses the mapping).
    """

    operator: tuple
    a: Place
    b: Place
    c: Place | None
    d: Place
    transforms: tuple = ()              # (point, (names)) pairs
    epilogue: tuple = ()                # parts, as "name" or "name:dtype"
    mapping: tuple = ()                 # (field of a Config, plain value) pairs
    call: str = "conf"
    residues: tuple[int, int, int] = (0, 0, 0)
    edge: tuple = ()

    @property
    def is_square(self) -> tuple[bool, bool]:
        """Whether M = K, and whether K = N."""
        return self.a.kind in SQUARE, self.b.kind in SQUARE


@dataclass(frozen=True)
class Problem:
    M: int
    N: int
    K: int
    values: str = "whole"               # or "normal"
    seed: int = 0
    alpha: float = 1
    beta: float = 0
    trans: str = "NN"                   # of gemmEx


SQUARE = ("diagonal", "lower symmetric", "upper symmetric")


def operator_of(spec: tuple) -> Operator:
    kind, *how = spec
    if kind == "mma":
        return MMAOp(dtype=how[0], accumulator=how[1])
    if kind == "wmma":
        return WMMAOp(how[0], how[1], dtype=how[2], accumulator=how[3])
    if kind == "wgmma":
        N, dtype, b_dtype, accumulator, promote = how
        return WGMMAOp(N, dtype, accumulator, b_dtype, promote)
    if kind == "fpu":
        a, b, accumulator, M, N, K, MB, NB = how
        return FPUOp(M, N, K, MB, NB, a, accumulator, b)
    if kind == "semiring":
        name, dtype, M, N, K, MB, NB = how
        dtype = np.dtype(dtype)
        return SEMIRINGS[name].sized(dict(M=M, N=N, K=K, MB=MB, NB=NB), dtype, dtype, dtype)
    return Algebra(operator_of(how[1]), ALGEBRAS[how[0]])


def element_dtype(family_dtype: str, operator: Operator) -> np.dtype:
    """The dtype of an operand's elements: of numbers, where the operator has them."""
    return operator.number_dtype(family_dtype) if isinstance(operator, Algebra) else np.dtype(family_dtype)


def pattern(i, j):
    return (3 * i + 2 * j) % 5 - 2


def layout_of(place: Place, operator: Operator, name: str) -> layouts.Layout:
    dtype = element_dtype(place.dtype, operator)
    plain = (ColMajor, RowMajor)[place.axis](dtype)
    order = ("col", "row")[place.axis]
    nothing = getattr(operator, "identity", 0) if isinstance(operator, Semiring) else 0
    half, _, more = place.kind.partition(" ")
    if place.kind in ("plain", "records"):
        return plain
    if half in ("lower", "upper"):
        return layouts.Symmetric(plain, half) if more == "symmetric" else layouts.Triangular(plain, half, more == "unit", nothing)
    if place.kind == "diagonal":
        return layouts.Diagonal(dtype, nothing)
    if place.kind == "generated":
        return layouts.Generated(dtype, pattern)
    if place.kind in ("interleaved", "planar"):
        return {"interleaved": layouts.Interleaved, "planar": layouts.Planar}[place.kind](dtype, order)
    return {"toeplitz": Toeplitz, "hankel": Hankel, "packed": Packed}[place.kind](dtype)


# -- configurations -------------------------------------------------------------------------------------------------------

def config_of(family: Family, **more: Any) -> gk.Config:
    """Raises ConfigError for a mapping that is not legal."""
    operator = operator_of(family.operator)
    fields: dict[str, Any] = {f"global_{name}_layout": layout_of(place, operator, name)
                              for name, place in (("a", family.a), ("b", family.b), ("c", family.c), ("d", family.d)) if place}
    extents = dict(block_shape="MNK", compute_warp="MNK", mem_a="MK", mem_b="KN", mem_cd="MN", cluster="MN")
    for field, value in family.mapping:
        if field.startswith("mem_"):
            for what, tile in zip(("warp", "thread"), value):
                fields[f"{field}_{what}"] = Tile(**dict(zip(extents[field], tile)))
        elif field in extents:
            fields[field] = Tile(**dict(zip(extents[field], value)))
        elif field.startswith("shared_"):
            fields[field] = _shared(field[7], value, operator, family)
        else:
            fields[field] = ORDERS[value] if field == "order" else value
    return gk.get_config(operator=operator, **fields, **more)


def _shared(name: str, how: tuple, operator: Operator, family: Family) -> Any:
    """(axis, padding in units of 16 bytes), or (axis, width) for the warp-specialised kernel."""
    axis, number = how
    fragment = {"a": operator.fragment_a, "b": operator.fragment_b}.get(name, operator.fragment_c)
    kind = (ColMajor, RowMajor)[axis]
    if isinstance(operator, WGMMAOp):
        return Swizzled(kind(family.d.dtype if name == "d" else fragment.dtype), number)
    part = part_dtypes(fragment.dtype)[0] if isinstance(operator, Algebra) else fragment.dtype
    padded = Padded(kind(part), number * 16 // part.itemsize)
    return Planes(padded, fragment.dtype) if isinstance(operator, Algebra) else padded


def coarser(one: Any, other: Any) -> Any:
    """Of two float types the one with fewer bits; of others the second."""
    return one if epsilon(one) > epsilon(other) else other


# -- one case -------------------------------------------------------------------------------------------------------------

class Case:
    """A problem of a family on a machine: operands made, computed, compared."""

    def __init__(self, machine: Any, family: Family, problem: Problem):
        self.machine, self.family, self.problem = machine, family, problem
        self.rng = np.random.default_rng(problem.seed)
        self.operator: Any = operator_of(family.operator)
        self.parts = self.operator.parts if isinstance(self.operator, Algebra) else 1
        self.semiring = family.operator[1] if family.operator[0] == "semiring" else ""
        self.tables = functions.Tables(machine, self.rng)
        base = self.operator.base if isinstance(self.operator, Algebra) else self.operator
        self.accumulator = np.dtype(base.accumulator)
        self.sizes = dict(M=problem.M, N=problem.N, K=problem.K)

    @property
    def low(self) -> int:
        """The least whole number: semirings of numbers that are not negative have 0."""
        return 0 if self.semiring in ("max_times", "or_and") else -3

    def random(self, shape: tuple[int, ...], dtype: Any, absent: bool = False) -> np.ndarray:
        dtype = np.dtype(dtype)
        small = dtype.kind in "iu" or dtype.itemsize == 1
        if self.problem.values == "whole" or small:
            out = self.rng.integers(0 if dtype.kind == "u" else self.low, 4, shape).astype(dtype)
        else:
            out = self.rng.standard_normal(shape)
            out = (np.abs(out) if self.low == 0 else out).astype(dtype)
        if absent and self.semiring in ("min_plus", "max_plus", "log_sum_exp") and dtype.kind == "f":
            out[self.rng.random(shape) < 0.2] = np.inf if self.semiring == "min_plus" else -np.inf
        return out

    def operand(self, name: str, place: Place) -> tuple[np.ndarray, Held]:
        """(the matrix that it means, what is in memory)."""
        rows, columns = (self.sizes[dim] for dim in DIMS[name])
        i, j = np.indices((rows, columns))
        dtype = np.dtype(place.dtype)
        nothing = getattr(self.operator, "identity", 0) if self.semiring else 0
        half, _, more = place.kind.partition(" ")
        if place.kind in ("toeplitz", "hankel"):
            stored = self.random((max(0, rows + columns - 1),), dtype)
            full = stored[i - j + columns - 1 if place.kind == "toeplitz" else i + j] if stored.size else np.zeros((rows, columns), dtype)
        elif place.kind == "diagonal":
            stored = self.random((rows,), dtype)
            full = np.where(i == j, stored[:, None], np.asarray(nothing, dtype)) if rows else np.zeros((0, 0), dtype)
        elif place.kind == "generated":
            stored, full = self.random((8,), dtype), pattern(i, j).astype(dtype)
        elif half in ("lower", "upper"):
            kept = i >= j if half == "lower" else i <= j
            kept &= (i != j) if more == "unit" else True
            values = self.random((rows, columns), dtype)
            stored = np.where(kept, values, poison((1, 1), dtype))
            full = values.T.copy() if more == "symmetric" else np.full((rows, columns), nothing, dtype)
            full[kept] = values[kept]
            if more == "unit":
                full[i == j] = 1
        else:
            full = self.random((rows, columns) if self.parts == 1 else (rows, columns, self.parts), dtype, name in "ab")
            stored = full
        return full, self.held(place, stored)

    def held(self, place: Place, stored: np.ndarray) -> Held:
        if place.kind == "records" and stored.ndim == 3:               # one element a number: a complex one of NumPy's
            number = self.operator.number_dtype(stored.dtype)
            return hold(self.machine, place, np.ascontiguousarray(stored).view(number)[..., 0])
        return hold(self.machine, place, stored)

    def array(self, dtype: np.dtype, poisoned: bool) -> tuple[np.ndarray, Any, Any]:
        """Another matrix of D's shape, placed as D is."""
        place = Place(dtype.name, "plain", self.family.d.axis, self.family.d.unit)
        shape = self.problem.M, self.problem.N
        host = poison(shape, dtype) if poisoned else self.random(shape, dtype)
        if not poisoned and self.problem.beta == 0 and "combine" in "".join(self.family.epilogue) and not self._has("residual"):
            host = poison(shape, dtype)                                # C is not read then
        held = hold(self.machine, place, host)
        return host if not np.isnan(host.astype(float)).any() else np.zeros(shape, dtype), held.array, held.read

    def _has(self, part: str) -> bool:
        return any(p.startswith(part) for p in self.family.epilogue)

    # -- what it should be, and what it is ------------------------------------------------------------------------------

    def transformed(self, x: Bounded, point: str, dtype: Any, fields: dict[str, Any], source: Any = None) -> Bounded:
        """``x`` (of dtype ``source``) after the transforms at a point, converted to ``dtype``; ``fields`` gets what does it."""
        names = dict(self.family.transforms).get(point)
        if names:
            made, chain = functions.transform(names, x.value.shape[1], self.tables, self.accumulator, self.parts > 1, self.low)
            fields[f"transform_{point}"] = made
            computed = coarser(source or dtype, dtype)
            for f in chain:
                if np.dtype(computed).kind in "iub":       # beside a coordinate or a captured number: NumPy's common type
                    weak = f.name == "placed" and np.dtype(computed).itemsize < 4
                    beside = np.int32 if weak else computed if f.table is None else f.table.dtype
                    computed = np.result_type(computed, beside)
                x = through(x, f, computed)
        return rounded(x, dtype)

    def run(self, conf: gk.Config | None = None) -> None:
        """Compute and compare."""
        d, outputs = self.prepare()
        self.compute(conf or self.config())
        assert_within(self.as_parts(self.out.read("D"), self.family.d), d, "D")
        for n, (read, bound) in enumerate(outputs):
            assert_within(read(f"output {n}"), bound, f"output {n}")

    def prepare(self) -> tuple[Bounded, list]:
        """Operands and components made; what D and the epilogue's outputs should be."""
        family, problem = self.family, self.problem
        self.fields = fields = {}                                      # keywords of matmul
        self.given = given = {}
        expected = {}
        for name, place in (("a", family.a), ("b", family.b), ("c", family.c)):
            if place is None:
                continue
            full, given[name] = self.operand(name, place)
            inside = self.accumulator if name == "c" else {"a": self._input(0), "b": self._input(1)}[name]
            x = self.transformed(Bounded.of(full), f"global_to_shared_{name}", inside, fields, place.dtype)
            expected[name] = self.transformed(x, f"shared_to_regs_{name}", inside, fields)
        d = self.transformed(self.product(expected), "regs_to_shared_d", self.accumulator, fields)
        d = self.transformed(d, "shared_to_global_d", self.accumulator, fields)
        shape = (problem.M, problem.N) if self.parts == 1 else (problem.M, problem.N, self.parts)
        before = poison(shape, family.d.dtype)
        if family.call == "gemmEx" and problem.beta != 0:
            before = self.random(shape, family.d.dtype)
        self.out = self.held(family.d, before)
        context = functions.Context(problem.M, problem.N, self.accumulator, self.parts > 1, self.tables, self.array, problem.alpha, problem.beta)
        outputs: list = []
        epilogue: Any = None
        for part in family.epilogue:
            made, d, output = functions.epilogue_part(part, d, context)
            epilogue = made if epilogue is None else epilogue | made
            outputs += [output] if output else []
        if epilogue is not None:
            fields["epilogue"] = epilogue
        if family.call == "gemmEx":
            d = functions.combined(d, context, Bounded.of(before), self.accumulator, family.d.dtype, self.accumulator)
        if family.call == "dispatch":
            fields |= {f"global_{name}_layout": layout_of(place, self.operator, name)
                       for name, place in (("a", family.a), ("b", family.b), ("c", family.c), ("d", family.d)) if place}
            if self.semiring:
                fields["operator"] = SEMIRINGS[self.semiring]
            elif family.operator[0] != "mma" or self.accumulator != np.float32:        # not what gemmkit takes by itself
                fields["operator"] = self.operator
        if any(p.kind in ("toeplitz", "hankel", "packed", "generated") for p in (family.a, family.b, family.c, family.d) if p):
            fields["gemm_shape"] = self.sizes
        return rounded(d, family.d.dtype), outputs

    def _input(self, which: int) -> np.dtype:
        operator = self.operator.base if isinstance(self.operator, Algebra) else self.operator
        return np.dtype((operator.fragment_a, operator.fragment_b)[which].dtype)

    def product(self, x: dict[str, Bounded]) -> Bounded:
        a, b, c = x["a"], x["b"], x.get("c")
        if self.semiring:
            return semiring_product(self.semiring, a, b, c, self.accumulator)
        if self.parts > 1:
            return algebra_product(a, b, c, self.accumulator, self.operator.table)
        kind = ""
        if self.family.operator[0] == "wgmma":
            kind = {4: "tf32", 1: "fp8"}.get(self._input(0).itemsize, "")
        return product(a, b, c, self.accumulator, kind)

    def config(self) -> gk.Config | None:
        return None if self.family.call == "dispatch" else config_of(self.family)

    def compute(self, conf: gk.Config | None) -> None:
        problem = self.problem
        a, b, c = (self.given[name].array if name in self.given else None for name in "abc")
        with self.machine.session():
            if self.family.call == "gemmEx":
                a, b = (x if t == "N" else x.swapaxes(0, 1) for x, t in zip((a, b), problem.trans))
                gk.blas.gemmEx(*problem.trans, problem.alpha, a, b, problem.beta, self.out.array, conf=conf)
            else:
                gk.matmul(a, b, c, conf, out=self.out.array, **self.fields)

    def as_parts(self, x: np.ndarray, place: Place) -> np.ndarray:
        """D as (M, N), or (M, N, parts)."""
        shape = self.problem.M, self.problem.N
        if self.parts == 1:
            return x.reshape(shape)
        if place.kind == "planar":
            return np.moveaxis(x, 0, 2)
        if place.kind == "records":
            return np.ascontiguousarray(x).view(place.dtype).reshape(*shape, self.parts)
        return x


def run(machine: Any, family: Family, problem: Problem, conf: gk.Config | None = None) -> None:
    """Compute and compare; a failure says how to repeat it."""
    try:
        Case(machine, family, problem).run(conf)
    except Exception as error:
        where = f"run(MACHINES['{machine!r}'],\n    {family!r},\n    {problem!r})"
        raise AssertionError(f"{type(error).__name__}: {error}\n\nTo repeat it:\n\nfrom tests.support.drawn import *\n"
                             f"from tests.support.machines import MACHINES\n{where}") from error


__all__ = ["ALGEBRAS", "Case", "Family", "Place", "Problem", "config_of", "operator_of", "run"]
