"""The end of a function is in its code once, as it is written.

Python 3.12 and later copy a short end (a call and the return, for example) to every jump that leads there. Threads of a warp
that take different ways then meet a barrier at different instructions, and one that is ``.aligned`` (`bar.sync`,
`barrier.cluster`, wgmma's) waits for ever:

    if thread_index() == 0:
        produce(sizes, map_a, map_b)
    cluster_barrier()                  # 3.12: one copy for thread 0, one for the other threads of its warp

Copies are known by their lines: they are ends of blocks that do the same at the same lines, up to the names of intermediate
values. All jump to one of them again.
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.numba_hooks import FunctionPass, register_pass
from gemmkit.lang.numba_hooks import numba_ir as ir

__all__ = ["Endings"]


class Endings(FunctionPass):
    """Joins the copies of a function's end."""

    _name = "gemmkit_endings"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks
        ends = [label for label, block in blocks.items() if isinstance(block.body[-1], ir.Return)]
        changed = False
        while ends:
            first = ends.pop(0)
            for other in list(ends):
                count = _common(blocks[first].body, blocks[other].body)
                if count and any(_calls(statement) for statement in blocks[first].body[-count:]):
                    first = _join(blocks, first, other, count)
                    ends.remove(other)
                    changed = True
        return changed


register_pass(mutates_CFG=True, analysis_only=False)(Endings)


def _calls(statement: Any) -> bool:
    """Whether it does more than name a value and return it."""
    if isinstance(statement, ir.Assign):
        return isinstance(statement.value, ir.Expr) and statement.value.op != "cast"
    return not isinstance(statement, ir.Return)


def _common(one: list, other: list) -> int:
    """How many statements at the ends of two blocks do the same, and use no intermediate value from before."""
    wanted: dict[str, str] = {}        # intermediate values of the one, by those of the other, that are not assigned yet
    found = 0
    for count, (x, y) in enumerate(zip(reversed(one), reversed(other), strict=False), 1):
        if type(x) is not type(y) or (_calls(x) and x.loc.line != y.loc.line):       # a return's line is Python's choice
            break
        if isinstance(x, ir.Assign):
            if wanted.pop(y.target.name, x.target.name) != x.target.name or not _same_name(x.target, y.target):
                break
            same = _same(x.value, y.value, wanted)
        elif isinstance(x, ir.Return):
            same = _same(x.value, y.value, wanted)
        else:
            same = (isinstance(x, (ir.SetItem, ir.StaticSetItem, ir.SetAttr))
                    and all(_same(value, getattr(y, name), wanted) for name, value in _fields(x)))
        if not same:
            break
        if not wanted:
            found = count
    return found


def _fields(statement: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(statement).items() if name != "loc"]


def _is_intermediate(variable: Any) -> bool:
    return str(variable.name).startswith("$")


def _same_name(x: Any, y: Any) -> bool:
    return (_is_intermediate(x) and _is_intermediate(y)) or x.name == y.name


def _same(x: Any, y: Any, wanted: dict[str, str]) -> bool:
    """Whether values are the same if the intermediate ones are that they use, which are added to ``wanted``."""
    if isinstance(x, ir.Var) and isinstance(y, ir.Var):
        if not _is_intermediate(x):
            return bool(x.name == y.name)
        return _is_intermediate(y) and wanted.setdefault(y.name, x.name) == x.name
    if type(x) is not type(y):
        return False
    if isinstance(x, ir.Expr):
        return x.op == y.op and _same(dict(x._kws), dict(y._kws), wanted)
    if isinstance(x, (ir.Global, ir.FreeVar)):
        return x.name == y.name and x.value is y.value
    if isinstance(x, ir.Const):
        return type(x.value) is type(y.value) and bool(x.value == y.value)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same(value, y[name], wanted) for name, value in x.items())
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(_same(a, b, wanted) for a, b in zip(x, y, strict=True))
    return bool(x is y or (isinstance(x, (str, int, bool)) and x == y))


def _join(blocks: dict[int, Any], first: int, other: int, count: int) -> int:
    """The last ``count`` statements of both in one block; returns its label."""
    label = first
    if count < len(blocks[first].body):
        label = max(blocks) + 1
        end = blocks[label] = ir.Block(blocks[first].scope, blocks[first].body[-count].loc)
        end.body = blocks[first].body[-count:]
        _lead(blocks[first], count, label)
    _lead(blocks[other], count, label)
    return label


def _lead(block: Any, count: int, label: int) -> None:
    """Have a block go on at a label in place of its last statements."""
    at = block.body[-count].loc
    block.body[-count:] = [ir.Jump(label, at)]
