"""Equal expressions that cost less, of functions of rows, beyond those of `gemmkit.programs.algebra`.

| written | computed | instead of |
|---|---|---|
| the mean of (t - mean of t)^2 | a row's moments: its warps meet once for both | a fold more |
| a sum over the number of columns | the mean | a constant of the length |
| -max(-x), -max(-x, -y) | min | two signs an element |
| astype(float32) | what is in float32 anyway | |
"""

from __future__ import annotations

import numpy as np

from gemmkit.programs.algebra import LEAVES, Rewriter
from gemmkit.programs.rows.form import RowProgram
from gemmkit.programs.trace import Value


def rewritten(program: RowProgram) -> list[Value]:
    """What is stored, in the order of the stores."""
    rewriter = RowRewriter(program.columns)
    return [rewriter.of(store.value) for store in program.stores]


class RowRewriter(Rewriter):
    """Of rows of so many columns."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns = columns

    def of(self, x: Value) -> Value:
        new = super().of(x)
        if x.name and not new.name and new.op not in LEAVES:
            new.name = x.name
        return new

    def _of_mul(self, like: Value, x: Value, y: Value) -> Value | None:
        is_mean = x.op == "rowsum" and y.op == "const" and not y.dims and self.columns and y.data == 1 / self.columns
        return self.build("rowmean", x.args, like) if is_mean else super()._of_mul(like, x, y)

    def _of_rowmean(self, like: Value, x: Value) -> Value | None:
        if x.op != "mul" or x.args[0] is not x.args[1] or x.args[0].op != "sub":
            return None
        t, mean = x.args[0].args
        return self.build("variance", (t,), like) if mean.op == "rowmean" and mean.args[0] is t else None

    def _of_neg(self, like: Value, x: Value) -> Value | None:
        if x.op == "neg":
            return x.args[0]
        if x.op == "rowmax" and x.args[0].op == "neg":
            return self.build("rowmin", x.args[0].args, like)
        if x.op == "max" and "neg" in (x.args[0].op, x.args[1].op):
            return self.build("min", tuple(self.build("neg", (y,), y) for y in x.args), like)
        if x.op == "const" and not x.dims:
            return Value("const", data=-x.data, line="")
        return None


    def _of_cast(self, like: Value, x: Value) -> Value | None:
        return x if np.dtype(like.data) == np.dtype(np.float32) else None
