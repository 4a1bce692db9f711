"""Products of rows that are grouped, as tokens are that are sorted by expert: the programs, and what they take.

    rows of group i are offsets[i] to offsets[i + 1], read on the GPU
    by groups:    d[rows of i]  = x[rows of i] @ w[i]
    of groups:    d[i]          = x[rows of i].T @ y[rows of i]

Each is the other's gradient: those of w are of groups, those of x, and of x and y, by groups. Rows of no group get zeros.
"""

from __future__ import annotations

from gemmkit import programs as gp
from gemmkit.programs.decorated import program
from gemmkit.programs.values import Parameter


@program
def by_groups(d: Parameter, x: Parameter, w: Parameter, offsets: Parameter, turned: bool) -> None:
    """``turned``: a group's matrix has the result's columns as its rows."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.rows if turned else w.columns):
        sums = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            sums += x[m, k] @ (w[i, n, k].T if turned else w[i, k, n])
        d[m, n] = sums


@program
def of_groups(d: Parameter, x: Parameter, y: Parameter, offsets: Parameter) -> None:
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, x.columns, y.columns):
        sums = gp.zeros(m, n)
        for k in gp.sequential(rows[i]):
            sums += x[k, m].T @ y[k, n]
        d[i, m, n] = sums

