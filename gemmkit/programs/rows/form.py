"""A program of rows as the passes see it: what is stored, and what each value has an element for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmkit.programs.lines import refused
from gemmkit.programs.trace import Loop, Store, Value
from gemmkit.programs.values import Axis, Index, shown

FLOATS = "float16", "bfloat16", "float32"
#: What all of a row becomes one value by. ``rowmean`` and ``variance`` are made by the algebra.
FOLDS = frozenset({"rowsum", "rowmax", "rowmin", "rowmean", "variance"})
FORMS = dict(dot="a product: products of whole rows are taken in rounds, for n in sequential(...)",
             transpose="a transpose, or a reduction over rows (axis=0): rows are computed as they lie",
             carried="a cell from outside of the loop: each row begins anew",
             after="a cell from outside of the loop: each row begins anew")


@dataclass(eq=False)
class RowProgram:
    """``columns``: the length of its rows; ``reads``: the arrays that are read, with the lines where they are."""

    stack: Index | None
    rows: Index
    columns: int
    stores: list[Store]
    reads: dict[str, str]
    line: str

    @property
    def indices(self) -> tuple[Index, ...]:
        return (self.rows,) if self.stack is None else (self.stack, self.rows)


def is_vector(x: Value) -> bool:
    """Whether a value has an element for each column of each row. A constant is a number, whatever it fills."""
    return x.op != "const" and len(x.dims) == 2


def is_column(x: Value) -> bool:
    """Whether it has one for each column, the same in every row."""
    return x.op != "const" and len(x.dims) == 1 and isinstance(x.dims[0], Axis)


def is_row(x: Value) -> bool:
    """Whether it is one value of a row, or of all rows."""
    return not is_vector(x) and not is_column(x)


def has_rows_alone(loop: Loop) -> bool:
    """Whether tiles go along rows, and nothing goes around in rounds."""
    along_rows = [index.stack for index in loop.indices] in ([False], [True, False])
    return along_rows and not any(isinstance(held, Loop) for held in loop.body)


def walked(roots: list[Value]) -> list[Value]:
    """The values and what they are made of, operands first."""
    out: dict[Value, None] = {}

    def visit(x: Value) -> None:
        if x not in out:
            for y in x.args:
                visit(y)
            out[x] = None

    for root in roots:
        visit(root)
    return list(out)


def row_program_of(loop: Loop) -> RowProgram:
    """Raises ValueError and TypeError, with the user's line, for what is no function of rows."""
    stack, rows = (None, loop.indices[0]) if len(loop.indices) == 1 else loop.indices
    stores = [held for held in loop.body if isinstance(held, Store)]
    made = RowProgram(stack, rows, 0, stores, {}, loop.line)
    lengths: dict[int, str] = {}
    for x in walked([store.value for store in stores]):
        _check(x, made, lengths)
    for store in stores:
        name, rank = store.parameter.name, len(store.parameter.shape)
        if store.only is not None or tuple(store.key) != made.indices or rank - len(made.indices) not in (0, 1):
            raise refused(ValueError, f"{name}[{shown(store.key)}] is stored: of functions of rows kernels are derived that "
                                      f"store rows or a value of each, [{shown(made.indices)}], and without once(...); of "
                                      "others there is the reference", store.line)
        if rank > len(made.indices):
            lengths.setdefault(store.parameter.shape[-1], store.line)
    if len(lengths) > 1:
        raise refused(ValueError, f"rows of {' and of '.join(map(str, lengths))} elements: kernels are derived of functions "
                                  "of rows of one length; of others there is the reference", list(lengths.values())[1])
    if not any(is_vector(x) and x.op == "load" for x in walked([store.value for store in stores])):
        raise refused(ValueError, "no sequential loop, and no row of an array that is read: kernels are derived of products "
                                  "in rounds and of functions of rows, x[m]", loop.line)
    made.columns = next(iter(lengths))
    return made


def _check(x: Value, program: RowProgram, lengths: dict[int, str]) -> None:
    if x.op in FORMS:
        raise refused(ValueError, FORMS[x.op], x.line)
    if x.op == "const":
        return
    if x.op == "load":
        parameter, key = x.data
        if not set(key) <= set(program.indices) or len(set(key)) < len(key):
            raise refused(ValueError, f"{parameter.name}[{shown(key)}]: the index of a function of rows is "
                                      f"{shown(program.indices)}", x.line)
        if np.dtype(parameter.dtype).name not in FLOATS:
            raise refused(TypeError, f"{parameter.name} is of {parameter.dtype}; functions of rows read float16, bfloat16 "
                                     "and float32", x.line)
        program.reads.setdefault(parameter.name, x.line)
    if x.op == "cast" and np.dtype(x.data).name not in FLOATS:
        raise refused(TypeError, f"astype({np.dtype(x.data)}): functions of rows are computed in float32, and rounded to "
                                 "float16 or bfloat16 where that is written", x.line)
    axes = [dim for dim in x.dims if isinstance(dim, Axis)]
    if len(axes) > 1 or len(x.dims) - len(axes) > 1:
        raise refused(ValueError, f"a value of ({shown(x.dims)}): a function of rows has whole rows, (m, all columns), and "
                                  "values of rows and of columns", x.line)
    for axis in axes:
        lengths.setdefault(axis.size, x.line)
    if x.op.startswith("row") and not isinstance(x.args[0].dims[1], Axis):
        raise refused(ValueError, f"{x.op[3:]}(axis=1) of a value of ({shown(x.args[0].dims)}) goes over "
                                  f"{x.args[0].dims[1]}: rows are reduced, and do not know of each other", x.line)
