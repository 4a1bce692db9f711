"""Element-wise functions as text: what becomes of a thread's sums before they are stored.

A thread has the sums of two rows, 8 apart, and of pairs of columns, 8 apart; a function is told which one it has by ``i``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 by its name
import numpy as np

from gemmkit.programs.interpreter import COMPARISONS
from gemmkit.programs.lines import refused
from gemmkit.programs.trace import Value
from gemmkit.programs.values import Index

SIGNS = dict(add="+", sub="-", mul="*", div="/", lt="<", le="<=", eq="==", ne="!=")
JOINTS = {"and": "{} and {}", "or": "{} or {}", "not": "not {}"}
CALLS = dict(exp2="exp2", log2="log2", reciprocal="reciprocal", tanh="math.tanh", sqrt="math.sqrt", max="max")
NEEDS = dict(tanh="math", sqrt="math")
MEETING = COMPARISONS | {"add", "sub", "mul"}                  # 16 bits and float32 are float32 in these
KEPT = "kept_"                         # a text's name of a cell of columns in shared memory begins so


@dataclass
class Function:
    """A function of one element: ``sums`` are zipped, ``arrays`` and ``scalars`` passed whole.

    Of a result that has a value for each row or column ``indices`` is this one's alone, and a thread's values are ``step``
    apart, from ``place`` on. An element of a tile may read what has been added up of its row and its column: ``rows``, of
    which a thread has its own, and ``columns``, which are in shared memory.
    """

    name: str
    indices: tuple
    cells: dict[Value, str]
    stack: Index | None = None
    place: str = "row"
    step: int = 8
    rows: dict[Value, str] = field(default_factory=dict)
    columns: dict[Value, str] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    needs: set[str] = field(default_factory=set)
    places: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    names: dict[Value, str] = field(default_factory=dict)
    uses: dict[Value, int] = field(default_factory=dict)
    of_rows: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> list[str]:
        names = [index.name for index in self.indices if index.name in self.places]
        rows = [self.place, f"last_{names[0]}"] if self.indices[0].name in names else []
        columns = ["column", f"last_{names[-1]}"] if self.indices[1:] and self.indices[1].name in names else []
        stack = [self.stack.name] if self.stack is not None and self.stack.name in self.places else []
        return [*self.arrays, *self.scalars, *self.of_rows, *rows, *columns, *stack]

    @property
    def text(self) -> str:
        takes = self.sums[0] if len(self.sums) == 1 else "sums"
        unpack = [] if len(self.sums) == 1 else [f"    {', '.join(self.sums)} = sums"]
        return "\n".join([f"def {self.name}({', '.join([takes, 'i', *self.parameters])}):", *unpack,
                          *(f"    {line}" for line in self.lines)])

    # -- expressions --------------------------------------------------------------------------------------------------

    def of(self, x: Value, top: bool = False) -> str:
        """The text of a value, in brackets if it is no ``top``; what is used more than once has a line of its own."""
        if x in self.names:
            return self.names[x]
        is_shared = self.uses.get(x, 0) > 1 and (x.args or x.op == "load" or x in self.columns)
        text = self._operation(x) if x.args else self._leaf(x)
        if x.op not in CALLS and (x.args or x.op == "coordinate") and (is_shared or not top):
            text = f"({text})"
        if is_shared:
            name = f"value_{len(self.names)}"
            self.lines.append(f"{name} = {text}")
            self.names[x] = name
            return name
        return text

    def _operation(self, x: Value) -> str:
        args = [self.of(arg, top=x.op in CALLS or (x.op in COMPARISONS and arg.op == "coordinate")) for arg in x.args]
        for n, arg in enumerate(x.args):
            if is_converted(x, arg):
                args[n] = f"convert(F32, {args[n]})"
                self.needs.add("convert")
        if x.op in SIGNS:
            return f"{args[0]} {SIGNS[x.op]} {args[1]}"
        if x.op in JOINTS:
            return JOINTS[x.op].format(*args)
        if x.op in CALLS:
            self.needs.add(NEEDS.get(x.op, x.op if x.op != "max" else ""))
            return f"{CALLS[x.op]}({', '.join(args)})"
        if x.op == "neg":
            return f"-{args[0]}"
        if x.op == "where":
            return f"{args[1]} if {args[0]} else {args[2]}"
        if x.op == "finite":
            self.needs.add("math")
            return f"0.0 if {args[0]} == -math.inf else {args[0]}"
        what = "astype" if x.op == "cast" else {"dot": "a product"}.get(x.op, x.op)
        raise refused(ValueError, f"{what} where a tile is stored: kernels are derived that compute element by element "
                                  "there, and round to the result's dtype; of others there is the reference", x.line)

    def _leaf(self, x: Value) -> str:
        if x.op == "const":
            return repr(float(x.data)) if math.isfinite(x.data) else self._not_finite(x.data)
        if x.op == "scalar":
            if x.data not in self.scalars:
                self.scalars.append(x.data)
            return str(x.data)
        if x.op == "after" and x in self.cells:
            if self.cells[x] not in self.sums:
                self.sums.append(self.cells[x])
            return self.cells[x]
        if x.op == "after" and x in self.rows:
            if self.rows[x] not in self.of_rows:
                self.of_rows.append(self.rows[x])
            self.needs.add("row_value")
            return f"row_value({self.rows[x]}, i)"
        if x.op == "after" and x in self.columns:
            self.needs |= {"own_column", "column_at"}
            return f"{KEPT}{self.columns[x]}.at(own_column() + column_at(i))"
        if x.op == "coordinate" and x.data in self.indices:
            self.places.add(x.data.name)
            return self._place(x.data)
        if x.op == "load":
            parameter, key = x.data
            known = (*self.indices, *([self.stack] if self.stack is not None else []))
            if set(key) <= set(known) and len(key) == len(parameter.shape):
                if parameter.name not in self.arrays:
                    self.arrays.append(parameter.name)
                self.places.update(index.name for index in key)
                return f"{parameter.name}[{', '.join(map(self._in_range, key))}]"
        raise refused(ValueError, f"{x!r} is read where a tile is stored: sums after their loop, scalars, and elements of "
                                  "arrays at the tile's places are there", x.line)

    def _in_range(self, index: Index) -> str:
        return index.name if index is self.stack else f"min({self._place(index)}, last_{index.name})"

    def _not_finite(self, number: float) -> str:
        self.needs.add("math")
        return "math.nan" if math.isnan(number) else "math.inf" if number > 0 else "-math.inf"

    def _place(self, index: object) -> str:
        if len(self.indices) == 1:
            return f"{self.place} + i * {self.step}"
        is_row = index is self.indices[0]
        self.needs.add("row_of" if is_row else "column_at")
        return "row + row_of(i)" if is_row else "column + column_at(i)"


def is_converted(x: Value, y: Value) -> bool:
    """Whether an element of an array becomes float32 before an operation: of another dtype, unless it has 16 bits and what
    it meets is in float32, or whole numbers are compared."""
    if (load := _load(y)) is None or (dtype := np.dtype(load.data[0].dtype)) == np.float32:
        return False
    others = [z for z in x.args if z is not y]
    if x.op in COMPARISONS and dtype.kind in "iu":
        return not all(_is_counted(z) for z in others)
    return x.op not in MEETING or dtype.name not in ("float16", "bfloat16") or not any(map(_is_float32, others))


def _load(x: Value) -> Value | None:
    """The load of an array that a value's text is, in the array's dtype."""
    return x if x.op == "load" else x.args[0] if x.op == "read" else None


def _is_float32(x: Value) -> bool:
    load = _load(x)
    if load is not None:
        return np.dtype(load.data[0].dtype) == np.float32
    return x.op not in ("const", "coordinate") and (not x.args or any(_load(y) is not None or _is_float32(y)
                                                                      for y in x.args))


def _is_counted(x: Value) -> bool:
    load = _load(x)
    if load is not None:
        return np.dtype(load.data[0].dtype).kind in "iu"
    return x.op == "coordinate" or (x.op == "const" and float(x.data).is_integer()) or (
        x.op in ("add", "sub", "mul", "neg") and all(map(_is_counted, x.args)))


def function_of(name: str, root: Value, indices: tuple, cells: dict[Value, str], stack: Index | None,
                **more: Any) -> Function:
    """The function that makes an element of a result; ``more``: other fields of it. Raises ValueError, with the user's line,
    for what it cannot read."""
    made = Function(name, indices, cells, stack, **more)
    pending, seen = [root], set()
    while pending:
        x = pending.pop()
        made.uses[x] = made.uses.get(x, 0) + 1
        if x not in seen:
            seen.add(x)
            pending += x.args
    made.lines.append(f"return {made.of(root, top=True)}")
    if not made.sums:
        raise refused(ValueError, "a result that no sums are in; a product's are needed", root.line)
    return made
